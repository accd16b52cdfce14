import math

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from hf_deelbo.objective import (
    DEELBo,
    default_kappa,
    gaussian_kl,
    kl_gradient_of_sigma,
    optimal_variance,
)


@pytest.fixture
def problem() -> dict:
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(7, 7, generator=generator, dtype=torch.float64)
    covariance = factor @ factor.T + torch.eye(7)
    difference = torch.randn(7, generator=generator, dtype=torch.float64)
    precision = torch.linalg.inv(covariance)
    numbers = {"mahalanobis": difference @ precision @ difference, "trace_inverse": precision.trace()}
    return {"covariance": covariance, "difference": difference, "numbers": numbers}


def dense_kl(problem: dict, sigma: torch.Tensor, variance: float) -> torch.Tensor:
    q = MultivariateNormal(problem["difference"], sigma**2 * torch.eye(7, dtype=torch.float64))
    p = MultivariateNormal(torch.zeros(7, dtype=torch.float64), variance * problem["covariance"])
    return kl_divergence(q, p)


@pytest.mark.parametrize("variance", [0.01, 1.0, 30.0])
def test_kl_is_that_of_dense_gaussians(problem, variance):
    sigma = torch.tensor(0.3, dtype=torch.float64)
    log_det = torch.logdet(problem["covariance"])
    kl = gaussian_kl(
        sigma, torch.tensor(variance, dtype=torch.float64), **problem["numbers"], log_det=log_det, num_parameters=7
    )
    torch.testing.assert_close(kl, dense_kl(problem, sigma, variance), rtol=1e-12, atol=0)


def test_kl_gradient_of_sigma_is_autograd_of_the_dense_kl(problem):
    sigma = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    dense_kl(problem, sigma, 0.7).backward()
    trace = problem["numbers"]["trace_inverse"]
    ours = kl_gradient_of_sigma(sigma.detach(), torch.tensor(0.7), trace_inverse=trace, num_parameters=7)
    torch.testing.assert_close(ours, sigma.grad, rtol=1e-7, atol=0)


def test_optimal_variance_has_zero_gradient_and_is_a_minimum_of_the_dense_kl(problem):
    sigma = torch.tensor(0.3, dtype=torch.float64)
    best = optimal_variance(sigma, **problem["numbers"], num_parameters=7).requires_grad_()
    kl = dense_kl(problem, sigma, best)
    (slope,) = torch.autograd.grad(kl, best)
    assert abs(slope) < 1e-12
    assert dense_kl(problem, sigma, best * 1.01) > kl < dense_kl(problem, sigma, best * 0.99)


def test_no_parameters_no_kl():
    zero = torch.tensor(0.0)
    variance = optimal_variance(torch.tensor(0.1), mahalanobis=zero, trace_inverse=zero, num_parameters=0)
    kl = gaussian_kl(torch.tensor(0.1), variance, mahalanobis=zero, trace_inverse=zero, log_det=zero, num_parameters=0)
    assert kl == 0


def test_j_is_the_weighted_likelihood_minus_the_kl():
    parts = DEELBo(nll=0.7, kl_backbone=120.0, kl_head=3.0, kappa=default_kappa(4000, 80), num_examples=80)
    assert parts.kappa == 50
    assert parts.value == pytest.approx(50 * 80 * -0.7 - 123)


def test_to_dict_is_plain_numbers():
    numbers = DEELBo(nll=0.5, kl_backbone=2.0, kl_head=1.0, kappa=1.0, num_examples=10).to_dict()
    assert math.isnan(numbers.pop("nll_standard_error"))
    assert numbers == {
        "de_elbo": -8.0,
        "log_likelihood": -5.0,
        "nll": 0.5,
        "kl_backbone": 2.0,
        "kl_head": 1.0,
        "kappa": 1.0,
        "num_examples": 10,
    }
