"""The data-emphasised evidence lower bound: formulas on numbers, no models and no files.

J = kappa * E_q[ sum_i log p(y_i | w, V) ] - KL(q(w) || p(w)) - KL(q(V) || p(V))
"""

import math
from dataclasses import asdict, dataclass

import torch

BETA = 0.9  # of the running average of T


def default_kappa(num_parameters: int, num_examples: int) -> float:
    """`kappa = D / N`, which gives the likelihood of N examples the weight of D parameters.

    Example:
        >>> default_kappa(num_parameters=5000, num_examples=100)
        50.0
    """
    return num_parameters / num_examples


def gaussian_kl(
    sigma: torch.Tensor,
    variance: torch.Tensor,
    *,
    mahalanobis: torch.Tensor,
    trace_inverse: torch.Tensor,
    log_det: torch.Tensor,
    num_parameters: int | torch.Tensor,
) -> torch.Tensor:
    """KL( N(w_bar, sigma^2 I) || N(mu_p, v Sigma_p) ) for D numbers and a prior variance v (lambda or tau).

        1/2 [ sigma^2/v tr(Sigma_p^-1) + (mu_p - w_bar)^T Sigma_p^-1 (mu_p - w_bar)/v
              - D + D log v + log det Sigma_p - D log sigma^2 ]

    Example:
        >>> zero, one = torch.tensor(0.0), torch.tensor(1.0)
        >>> gaussian_kl(one, one, mahalanobis=zero, trace_inverse=3 * one, log_det=zero, num_parameters=3)
        tensor(0.)
    """
    quadratic = (sigma**2 * trace_inverse + mahalanobis) / variance
    log_volumes = num_parameters * (torch.log(variance) - 2 * torch.log(sigma)) + log_det
    return (quadratic - num_parameters + log_volumes) / 2


def optimal_variance(
    sigma: torch.Tensor, *, mahalanobis: torch.Tensor, trace_inverse: torch.Tensor, num_parameters: int | torch.Tensor
) -> torch.Tensor:
    """The prior variance that maximises J; kappa does not enter.

        lambda* = [ sigma^2 tr(Sigma_p^-1) + (mu_p - w_bar)^T Sigma_p^-1 (mu_p - w_bar) ] / D

    With Sigma_p = I and mu_p = 0 it is tau* = sigma^2 + |V_bar|^2 / D_V. Without parameters the KL is 0 whatever the
    variance, and 1 is returned.

    Example:
        >>> two = torch.tensor(2.0)
        >>> optimal_variance(two, mahalanobis=4 * two, trace_inverse=two, num_parameters=2)
        tensor(8.)
    """
    if isinstance(num_parameters, int) and num_parameters == 0:
        return torch.ones_like(sigma)
    return (sigma**2 * trace_inverse + mahalanobis) / num_parameters


def kl_gradient_of_sigma(
    sigma: torch.Tensor, variance: torch.Tensor, *, trace_inverse: torch.Tensor, num_parameters: int | torch.Tensor
) -> torch.Tensor:
    """`dKL/dsigma = sigma/v tr(Sigma_p^-1) - D/sigma`.

    Example:
        >>> one = torch.tensor(1.0)
        >>> kl_gradient_of_sigma(one, one, trace_inverse=3 * one, num_parameters=3)
        tensor(0.)
    """
    return sigma / variance * trace_inverse - num_parameters / sigma


class Curvature:
    """T_g, the trace of the NLL's Hessian over each group of weights, averaged over the steps.

    By Stein's lemma, for the gradient g at a sample w = w_bar + sigma * eps,

        T = E[ <g, eps> ] / sigma = E[ <g, w - w_bar> ] / sigma^2,    with the variance |g|^2 / sigma^2 about.

    One step tells little where sigma is small. So steps weigh by sigma^2, later ones more,

        T_hat = sum_k v_k <g_k, w_k - w_bar_k> / sigma_k^2,   v_k ~ beta^age sigma_k^2,   sum_k v_k = 1
        error^2 = sum_k v_k^2 |g_k|^2 / sigma_k^2

    where all earlier steps together weigh no more than if their sigma had been the present one. As T is positive,
    where the error is larger than T_hat it counts instead: `mean` is the mean of N(T_hat, error^2) above zero. As long
    as nothing is known about T, it is therefore large, and sigma grows only as far as the signal has been seen.

    Args:
        like: its shape, type and device, a number for each group.
    """

    def __init__(self, like: torch.Tensor):
        self.sums = torch.zeros(3, *like.shape, dtype=like.dtype, device=like.device)

    def add(self, products: torch.Tensor, squared_norms: torch.Tensor, variances: torch.Tensor) -> None:
        """Take a step in: <g, w - w_bar>, |g|^2 and sigma^2 of each group. One that is not finite is left out."""
        most = BETA / (1 - BETA) * variances
        decay = BETA * (most / (BETA * self.sums[1])).clamp(max=1)
        kept = self.sums * torch.stack([decay, decay, decay**2])
        sums = kept + torch.stack([products, variances, variances * squared_norms])
        self.sums = torch.where(torch.isfinite(sums).all(), sums, self.sums)

    def mean(self) -> torch.Tensor:
        """The mean of T_g, given that it is positive; `nan` before the first step and where there is no gradient."""
        products, weights, squares = self.sums
        return mean_above_zero(products / weights, squares.sqrt() / weights)


def mean_above_zero(mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
    """E[x | x > 0] for x ~ N(mean, deviation^2): mean + deviation * phi(r) / Phi(r), r = mean / deviation.

    Example:
        >>> mean_above_zero(torch.tensor([5.0, 0.0, -5.0]), torch.tensor([0.1, 1.0, 1.0]))
        tensor([5.0000, 0.7979, 0.1865])
    """
    ratio = mean / deviation
    log_hazard = -0.5 * ratio**2 - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(ratio)
    # far below zero, where the sum cancels, it is deviation / |r|
    return torch.where(ratio > -30, mean + deviation * log_hazard.exp(), -deviation / ratio)


def optimal_posterior_variance(curvature: torch.Tensor, distance: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The posterior variance `s = sigma^2` of a group of D_g weights that maximises J, at its optimal prior variance.

    With T the trace of the NLL's Hessian over the group, t = tr(Sigma_p^-1), d2 = (mu_p - w_bar)^T Sigma_p^-1
    (mu_p - w_bar) / t and c = D_g / (kappa N), the loss is E[NLL] + c/2 log(1 + d2/s) + ..., and dE[NLL]/ds = T/2:

        s (s + d2) = c d2 / T,    s = ( -d2 + sqrt(d2^2 + 4 c d2 / T) ) / 2

    Args:
        curvature: T > 0.
        distance: d2.
        weight: c.

    Example:
        >>> s = optimal_posterior_variance(*(torch.tensor(value) for value in (3.0, 0.5, 9.0)))
        >>> s, s * (s + 0.5)
        (tensor(1.), tensor(1.5000))
    """
    newton = weight / curvature  # what s would be if the prior were flat
    return 2 * newton / (1 + torch.sqrt(1 + 4 * newton / distance))  # without the cancellation of the formula


def shared_posterior_variance(curvature: torch.Tensor, distance: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The posterior variance s that several groups share, each with a prior variance of its own.

        sum_g c_g d2_g / ( s (s + d2_g) ) = T

    The logarithm of the left side falls in log s with a slope between -1 and -2. So a step of its distance to log T,
    divided by 1.5, leaves at most a third of the error.

    Args:
        curvature: T > 0, of all groups together.
        distance: d2_g, a vector.
        weight: c_g, a vector.

    Example:
        >>> s = shared_posterior_variance(torch.tensor(6.0), torch.full((2,), 0.5), torch.full((2,), 9.0))
        >>> round(s.item(), 4)
        1.0
    """
    log_s = optimal_posterior_variance(curvature, distance.max(), weight.sum()).log()
    for _ in range(34):  # 3^-34 is below float64's resolution
        s = log_s.exp()
        log_s = log_s + ((weight * distance / (s * (s + distance))).sum() / curvature).log() / 1.5
    return log_s.exp()


def kl_annealing(epochs: float, warmup_epochs: float) -> float:
    """The part of the KL's weight that is in force after so many epochs, `min(1, epochs / warmup_epochs)^4`.

    In the first passes over the data there is little to overfit, and noise and prior only slow what is learned. While
    s is far above d2, sigma* grows in proportion to the epochs.

    Example:
        >>> kl_annealing(2.5, warmup_epochs=5.0), kl_annealing(6.0, warmup_epochs=5.0), kl_annealing(0.1, 0.0)
        (0.0625, 1.0, 1.0)
    """
    return min(1.0, epochs / warmup_epochs) ** 4 if warmup_epochs else 1.0


def sigma_growth(progress: float) -> float:
    """By what part of itself sigma^2 may grow in a step, `0.3 (1 - progress)`, where the training's end is progress 1.

    While little is learned T is near zero, and says little of where it will be. When all is learned it is near zero
    again, and sigma would outgrow the noise that the weights, no longer moving, have been trained with.

    Example:
        >>> sigma_growth(0.0), sigma_growth(0.5), sigma_growth(1.0)
        (0.3, 0.15, 0.0)
    """
    return 0.3 * (1 - progress)


@dataclass(frozen=True)
class DEELBo:
    """J at a posterior, and its parts.

    Attributes:
        nll: mean negative log likelihood of an example, averaged over the weight samples.
        kl_backbone: KL(q(w) || p(w)).
        kl_head: KL(q(V) || p(V)).
        kappa: the weight of the likelihood.
        num_examples: N, the size of the training set.
        nll_standard_error: Monte Carlo error of `nll` (`nan` for one sample).

    Example:
        >>> DEELBo(nll=2.0, kl_backbone=900.0, kl_head=100.0, kappa=50.0, num_examples=100).value
        -11000.0
    """

    nll: float
    kl_backbone: float
    kl_head: float
    kappa: float
    num_examples: int
    nll_standard_error: float = math.nan

    @property
    def log_likelihood(self) -> float:
        """E_q[ sum_i log p(y_i | w, V) ]."""
        return -self.num_examples * self.nll

    @property
    def kl(self) -> float:
        """KL(q || p), of backbone and head."""
        return self.kl_backbone + self.kl_head

    @property
    def value(self) -> float:
        """J = kappa * log_likelihood - kl."""
        return self.kappa * self.log_likelihood - self.kl

    def to_dict(self) -> dict[str, float]:
        """All of it as plain numbers, J under `de_elbo`."""
        return {"de_elbo": self.value, "log_likelihood": self.log_likelihood, **asdict(self)}
