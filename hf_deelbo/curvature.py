"""How curved the NLL is, from the gradients that training computes anyway: what sigma's closed form needs."""

import math

import torch

BETA = 0.9


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
