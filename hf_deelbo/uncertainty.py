"""How unsure predictions are, and how much of that is the model's doubt rather than the data's ambiguity."""

from typing import NamedTuple

import torch

from .priors import wide_dtype
from .temperature import log_of, tempered


class Uncertainty(NamedTuple):
    """What weight samples know of some examples; entropies in nats, with `total == data + doubt`.

    Attributes:
        probabilities: averaged over the samples, and tempered as `predict_proba` has them: examples x classes.
        total: the entropy of these probabilities, one number for each example, as all that follow.
        data: the part of it that stays when the weights are known: classes that look alike, labels that are noisy.
        doubt: the other part, the mutual information of class and weights: what more training data could resolve.
        agreement: the share of samples whose most probable class is that of the average.
    """

    probabilities: torch.Tensor
    total: torch.Tensor
    data: torch.Tensor
    doubt: torch.Tensor
    agreement: torch.Tensor


def uncertainty_of(samples: torch.Tensor, temperature: float = 1.0) -> Uncertainty:
    """The uncertainty of S weight samples, with p the average of their probabilities p_s.

        total = H[p],    data = 1/S sum_s H[p_s],    doubt = total - data = 1/S sum_s KL( p_s || p ) >= 0

    with H[p] = - sum_c p_c log p_c. A temperature T is one of averages, p^(1/T) / sum p^(1/T); the p_s tempered one by
    one would have another average. So it makes classes more or less probable, and what a class tells of the samples,
    r_s|c = p_sc / sum_t p_tc, stays. Of all ways to give sample and class together a probability in which the class
    has the tempered p, r_s|c p_c is the nearest (by KL) to that without a temperature. The samples then have the
    weights w_s and the probabilities q_s, whose average is p:

        w_s = sum_c r_s|c p_c,    q_sc = r_s|c p_c / w_s

        total = H[p],    data = sum_s w_s H[q_s],    doubt = total - data = sum_sc r_s|c p_c log( r_s|c / w_s ) >= 0

    At T = 1 these are w_s = 1/S, q_s = p_s, and the formulas above.

    Args:
        samples: p_s, samples x examples x classes; at least two samples, as one has nothing to differ from.
        temperature: T.

    Example:
        >>> of_one_mind, split = [0.5, 0.5], [1.0, 0.0]
        >>> found = uncertainty_of(torch.tensor([[of_one_mind, split], [of_one_mind, [0.0, 1.0]]]))
        >>> found.total, found.doubt
        (tensor([0.6931, 0.6931], dtype=torch.float64), tensor([0.0000, 0.6931], dtype=torch.float64))
    """
    if samples.dim() != 3 or len(samples) < 2:
        raise ValueError(
            "samples: doubt is what weight samples differ by; give the probabilities of at least two, as samples x "
            f"examples x classes, not the shape {tuple(samples.shape)}."
        )
    average = samples.mean(0)
    probabilities = tempered(average, temperature)
    wide = wide_dtype(samples.device)
    p = probabilities.to(wide)
    p = p / p.sum(-1, keepdim=True)  # in half precision they may be off by more than the doubt is
    log_r = log_of(samples.to(wide)).log_softmax(0)
    joint = log_r.exp() * p
    weights = joint.sum(-1, keepdim=True)
    doubt = (joint * (log_r - log_of(weights))).sum((0, -1)).clamp_min(0)  # against rounding
    data = -torch.special.xlogy(joint, joint / weights.clamp_min(torch.finfo(wide).tiny)).sum((0, -1))
    data = data.clamp_min(0)
    agreement = (samples.argmax(-1) == average.argmax(-1)).to(wide).mean(0)
    return Uncertainty(probabilities, data + doubt, data, doubt, agreement)
