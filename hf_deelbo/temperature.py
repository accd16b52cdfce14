"""Temperature: the one number that makes probabilities as sure as they are right."""

import math
from typing import NamedTuple

import torch

# of log T below and above 0, before anything is seen: few examples, all of them right, are no reason to be surer
PRIOR_DEVIATIONS = (0.2, 1.0)
HOTTEST = 1000.0


class Temperatures(NamedTuple):
    """What logits are divided by before they become probabilities; 1 leaves them as they are.

    Attributes:
        mean: T of the posterior mean's logits.
        average: T of the logarithms of probabilities that are averaged over weight samples.
    """

    mean: float = 1.0
    average: float = 1.0


def fit_temperature(
    logits: torch.Tensor, labels: torch.Tensor, deviations: tuple[float, float] = PRIOR_DEVIATIONS
) -> float:
    """The temperature T of examples that were not trained on (Guo et al. 2017), near 1 if they are few.

        maximise  sum_i log softmax(f_i / T)[y_i] - (log T)^2 / (2 d^2),    d = deviations[T > 1]

    The derivative by t = log T, with b = 1/T and p_i = softmax(b f_i), is zero there:

        b sum_i ( sum_c p_ic f_ic - f_i,y_i ) - t / d^2 = 0

    Args:
        logits: f, shape (n, C); logarithms of probabilities are logits too.
        labels: y, n whole numbers in [0, C).
        deviations: of log T below and above 0, before anything is seen; `inf` for no prior.

    Example:
        >>> logits = 4 * torch.tensor([[1.0, 0.0]] * 100)
        >>> labels = torch.tensor([0] * 73 + [1] * 27)  # right as often as softmax([1, 0]) says
        >>> round(fit_temperature(logits, labels), 1)
        3.8
    """
    logits, labels = logits.double(), labels.long()
    if logits.dim() != 2 or len(logits) == 0 or labels.shape != logits.shape[:1]:
        raise ValueError(
            "labels: a temperature needs one class index for each row of logits; got "
            f"{tuple(labels.shape)} labels for logits of shape {tuple(logits.shape)}."
        )
    if not torch.isfinite(logits).all():
        raise ValueError("logits: they are not all finite; look for bad values in the inputs.")
    of_label = logits.gather(1, labels[:, None])[:, 0]

    def slope(log_temperature: float) -> float:
        inverse = math.exp(-log_temperature)
        excess = ((inverse * logits).softmax(-1) * logits).sum(-1) - of_label
        return inverse * float(excess.sum()) - log_temperature / deviations[log_temperature > 0] ** 2

    low, high = -math.log(HOTTEST), math.log(HOTTEST)
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) > 0 else (low, middle)
    return math.exp((low + high) / 2)


def tempered(probabilities: torch.Tensor, temperature: float) -> torch.Tensor:
    """`p_c^(1/T) / sum_k p_k^(1/T)`, which is softmax(f / T) for p = softmax(f).

    Example:
        >>> tempered(torch.tensor([0.9, 0.1]), temperature=2.0)
        tensor([0.7500, 0.2500])
    """
    if temperature == 1:
        return probabilities
    return torch.softmax(log_of(probabilities) / temperature, dim=-1)


def log_of(probabilities: torch.Tensor) -> torch.Tensor:
    """Their logarithm; a probability that was rounded to zero is taken for the smallest that there is."""
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()
