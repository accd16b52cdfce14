import math

import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.distributions import MultivariateNormal, kl_divergence

from hf_deelbo import IsotropicPrior, LowRankPrior
from hf_deelbo.blocks import blocks_of

SHAPES = {"conv.weight": (4, 2, 3), "conv.bias": (4,), "scale": ()}
SIGMA = torch.tensor(0.2, dtype=torch.float64)


def random_tensors(seed: int, *leading: int, dtype=torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn((*leading, *s), generator=generator, dtype=dtype) for name, s in SHAPES.items()}


def flat(tensors: dict[str, torch.Tensor], leading: int = 0) -> torch.Tensor:
    return torch.cat(
        [t.flatten(start_dim=leading) if t.dim() > leading else t.unsqueeze(-1) for t in tensors.values()], -1
    )


def make_case(kind: str):
    """A prior, and its mean and covariance as dense matrices."""
    w0 = random_tensors(1)
    size = flat(w0).numel()
    if kind == "l2-zero":
        return IsotropicPrior.l2_zero(w0), torch.zeros(size).double(), torch.eye(size).double()
    if kind == "l2-sp":
        return IsotropicPrior.l2_sp(w0), flat(w0), torch.eye(size).double()
    diagonal = {name: tensor.abs() for name, tensor in random_tensors(2).items()}
    deviations = random_tensors(3, 5)
    q = flat(deviations, leading=1).T
    covariance = torch.diag(flat(diagonal) / 2 + 0.1) + q @ q.T / (2 * 5 - 2)
    return LowRankPrior(w0, diagonal, deviations, eps=0.1), flat(w0), covariance


@pytest.fixture(params=["l2-zero", "l2-sp", "low-rank"])
def case(request):
    return make_case(request.param)


def test_trace_determinant_and_distance_are_those_of_the_dense_matrix(case):
    prior, mean, covariance = case
    w = random_tensors(4)
    precision = torch.linalg.inv(covariance)
    difference = flat(w) - mean
    assert prior.num_parameters == len(mean)
    torch.testing.assert_close(prior.trace_inverse, precision.trace(), rtol=1e-9, atol=0)
    torch.testing.assert_close(prior.log_det, torch.logdet(covariance), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(prior.mahalanobis(w), difference @ precision @ difference, rtol=1e-9, atol=0)


@pytest.mark.parametrize("variance", [1e-3, 0.5, 20.0])
def test_kl_is_that_of_torch_distributions(case, variance):
    prior, mean, covariance = case
    w = random_tensors(4)
    q = MultivariateNormal(flat(w), SIGMA**2 * torch.eye(len(mean), dtype=torch.float64))
    expected = kl_divergence(q, MultivariateNormal(mean, variance * covariance))
    ours = prior.kl(w, SIGMA, torch.tensor(variance, dtype=torch.float64))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=0)


def test_optimal_variance_is_what_a_numeric_search_on_dense_gaussians_finds(case):
    prior, mean, covariance = case
    w = random_tensors(4)
    q = MultivariateNormal(flat(w), SIGMA**2 * torch.eye(len(mean), dtype=torch.float64))

    def kl(log_variance: float) -> float:
        return kl_divergence(q, MultivariateNormal(mean, math.exp(log_variance) * covariance)).item()

    found = minimize_scalar(kl, bounds=(-10, 10), options={"xatol": 1e-9})
    best, kl_there = prior.optimum(w, SIGMA)
    assert math.log(best) == pytest.approx(found.x, abs=1e-6)
    assert kl_there.item() == pytest.approx(found.fun, rel=1e-9)
    assert best.item() == prior.optimal_variance(w, SIGMA).item()


def test_precision_product_is_half_the_gradient_of_the_distance(case):
    prior, mean, covariance = case
    w = random_tensors(4)
    product = prior.precision_product(w)
    ours = torch.cat([piece.flatten() for block in blocks_of(w, size=5) for piece in product(block)])
    torch.testing.assert_close(ours, torch.linalg.solve(covariance, flat(w) - mean), rtol=1e-9, atol=1e-12)


def test_low_rank_in_float32_storage_is_accurate():
    prior, _, _ = make_case("low-rank")
    single = LowRankPrior(
        *({k: t.float() for k, t in part.items()} for part in (prior.mean, prior.diagonal, prior.deviations))
    )
    w = random_tensors(4, dtype=torch.float32)
    exact = prior.mahalanobis({name: tensor.double() for name, tensor in w.items()})
    torch.testing.assert_close(single.mahalanobis(w), exact, rtol=1e-6, atol=0)
    product = single.precision_product(w)
    assert product(blocks_of(w)[0])[0].dtype == torch.float32


def test_kl_of_25_million_parameters_in_float32_keeps_its_digits():
    generator = torch.Generator().manual_seed(0)
    mean = {"w": torch.randn(25_000_000, generator=generator)}
    w = {"w": mean["w"] + 1e-3 * torch.randn(25_000_000, generator=generator)}
    prior = IsotropicPrior(mean, mean=mean)
    sigma = torch.tensor(1e-4, dtype=torch.float64)
    variance, kl = prior.optimum(w, sigma)

    size = 25_000_000
    distance = (w["w"].double() - mean["w"].double()).square().sum().item()
    v = sigma.item() ** 2 + distance / size
    expected = 0.5 * ((sigma.item() ** 2 * size + distance) / v - size + size * math.log(v / sigma.item() ** 2))
    assert variance.item() == pytest.approx(v, rel=1e-6)
    assert kl.item() == pytest.approx(expected, rel=1e-6)


def test_l2_sp_keeps_a_copy_of_the_starting_point():
    w = random_tensors(1)
    prior = IsotropicPrior.l2_sp(w)
    start = {name: tensor.clone() for name, tensor in w.items()}
    for tensor in w.values():
        tensor.add_(1)
    assert prior.mahalanobis(start) == 0


def test_state_dict_and_back(case):
    prior, _, _ = case
    w = random_tensors(4)
    expected, state = prior.kl(w, SIGMA, SIGMA), {k: t.clone() for k, t in prior.state_dict().items()}
    for tensor in prior.state_dict().values():
        tensor.mul_(1.5)
    prior.load_state_dict(state)
    assert prior.kl(w, SIGMA, SIGMA) == expected


class TestRefusals:
    def test_names_of_another_model(self):
        prior, _, _ = make_case("l2-sp")
        other = random_tensors(1)
        other["new"] = other.pop("scale")
        with pytest.raises(ValueError, match=r"Not in the prior: 'new'. Not in the backbone: 'scale'"):
            prior.check_matches(other)

    def test_shapes_of_another_model(self):
        prior, _, _ = make_case("l2-sp")
        other = random_tensors(1) | {"conv.bias": torch.zeros(5)}
        with pytest.raises(ValueError, match=r"'conv.bias' has shape \(4,\), but \(5,\)"):
            prior.check_matches(other)

    @pytest.mark.parametrize("rank", [0, 1])
    def test_fewer_than_two_deviations(self, rank):
        w = random_tensors(1)
        with pytest.raises(ValueError, match="K >= 2"):
            LowRankPrior(w, random_tensors(2), random_tensors(3, rank))

    def test_deviations_without_a_name(self):
        w, deviations = random_tensors(1), random_tensors(3, 5)
        del deviations["scale"]
        with pytest.raises(ValueError, match=r"deviations: .*'scale'"):
            LowRankPrior(w, w, deviations)

    def test_a_diagonal_of_another_shape(self):
        w = random_tensors(1)
        diagonal = {name: torch.ones_like(t) for name, t in w.items()} | {"conv.bias": torch.ones(5)}
        with pytest.raises(ValueError, match=r"'conv.bias': mean \(4,\), diagonal \(5,\)"):
            LowRankPrior(w, diagonal, random_tensors(3, 5))

    def test_a_negative_variance(self):
        w = random_tensors(1)
        diagonal = {name: torch.ones_like(t) for name, t in w.items()} | {"conv.bias": torch.full((4,), -1.0)}
        with pytest.raises(ValueError, match=r"must be positive, but is not in 'conv.bias'"):
            LowRankPrior(w, diagonal, random_tensors(3, 5))
