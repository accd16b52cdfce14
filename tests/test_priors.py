import math

import mpmath
import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch.distributions import MultivariateNormal, kl_divergence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_deelbo import GaussianPrior, IsotropicPrior, LowRankPrior
from hf_deelbo.weights.blocks import blocks_of

SHAPES = {"conv.weight": (4, 2, 3), "conv.bias": (4,), "scale": ()}
SIGMA = torch.tensor(0.2, dtype=torch.float64)


def optimum(
    prior: GaussianPrior, w: dict[str, torch.Tensor], sigma: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best variance, and the KL there."""
    variance = prior.optimal_variance(w, sigma)
    return variance, prior.kl(w, sigma, variance)


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
    if kind == "scaled":
        scales = {"conv.weight": 0.3, "conv.bias": 2.0, "scale": 5.0}
        r = flat({name: scales[name] * torch.ones_like(tensor) for name, tensor in w0.items()})
        return IsotropicPrior(w0, mean=w0, scales=scales), flat(w0), torch.diag(r)
    diagonal = {name: tensor.abs() for name, tensor in random_tensors(2).items()}
    deviations = random_tensors(3, 5)
    q = flat(deviations, leading=1).T
    covariance = torch.diag(flat(diagonal) / 2 + 0.1) + q @ q.T / (2 * 5 - 2)
    return LowRankPrior(w0, diagonal, deviations, eps=0.1), flat(w0), covariance


@pytest.fixture(params=["l2-zero", "l2-sp", "scaled", "low-rank"])
def case(request, each_kind_of_device):
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


def test_kl_is_that_of_torch_distributions(case):
    prior, mean, covariance = case
    w = random_tensors(4)
    q = MultivariateNormal(flat(w), SIGMA**2 * torch.eye(len(mean), dtype=torch.float64))
    for variance in (1e-3, 0.5, 20.0):
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
    best, kl_there = optimum(prior, w, SIGMA)
    assert math.log(best) == pytest.approx(found.x, abs=1e-6)
    assert kl_there.item() == pytest.approx(found.fun, rel=1e-9)
    assert best.item() == prior.optimal_variance(w, SIGMA).item()


def test_precision_product_is_half_the_gradient_of_the_distance(case):
    prior, mean, covariance = case
    w = random_tensors(4)
    product = prior.precision_product(w)
    ours = torch.cat([piece.flatten().clone() for block in blocks_of(w, size=5) for piece in product(block)])
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
    assert {piece.dtype for block in blocks_of(w) for piece in product(block)} == {torch.float32}


def test_kl_of_millions_of_parameters_in_float32_keeps_its_digits():
    generator = torch.Generator().manual_seed(0)
    mean = {"w": torch.randn(2_000_000, generator=generator)}
    w = {"w": mean["w"] + 1e-3 * torch.randn(2_000_000, generator=generator)}
    prior = IsotropicPrior(mean, mean=mean)
    sigma = torch.tensor(1e-4, dtype=torch.float64)
    variance, kl = optimum(prior, w, sigma)

    size = 2_000_000
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


def log_uniform(low: float, high: float, size: int, generator: torch.Generator) -> torch.Tensor:
    exponents = torch.rand(size, generator=generator, dtype=torch.float64) * math.log10(high / low) + math.log10(low)
    return 10**exponents


def split(vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """The last dimension as tensors of some shapes, in order."""
    leading, size = vector.shape[:-1], vector.shape[-1]
    rows = (size - 1) // 3
    parts = vector.split([3 * rows, size - 3 * rows - 1, 1], dim=-1)
    shapes = {"matrix": (rows, 3), "vector": (-1,), "number": ()}
    return {name: part.reshape((*leading, *shape)) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


class TestLowRankAccuracy:
    @pytest.mark.parametrize(
        ("size", "rank", "block_size"),
        [(5, 7, 64), (40, 2, 2**18), (300, 20, 64), (900, 13, 64), (900, 13, 2**18)],
    )
    def test_as_the_dense_gaussian(self, size, rank, block_size, monkeypatch):
        monkeypatch.setattr("hf_deelbo.weights.blocks.BLOCK_SIZE", block_size)
        generator = torch.Generator().manual_seed(size)
        mean, w = torch.randn(2, size, generator=generator, dtype=torch.float64)
        q = torch.randn(rank, size, generator=generator, dtype=torch.float64)
        diagonal = log_uniform(1e-8, 1e2, size, generator)
        covariance = torch.diag(diagonal / 2 + 0.1) + q.T @ q / (2 * rank - 2)
        prior = LowRankPrior(split(mean), split(diagonal), split(q))
        w_by_name = split(w)

        lambda_, kl = optimum(prior, w_by_name, SIGMA)
        precision = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
        quadratic = SIGMA**2 * precision.trace() + (w - mean) @ precision @ (w - mean)
        torch.testing.assert_close(lambda_, quadratic / size, rtol=1e-8, atol=0)
        posterior = MultivariateNormal(w, SIGMA**2 * torch.eye(size, dtype=torch.float64))
        expected = kl_divergence(posterior, MultivariateNormal(mean, lambda_ * covariance))
        torch.testing.assert_close(kl, expected, rtol=1e-8, atol=0)
        product = prior.precision_product(w_by_name)
        ours = torch.cat([piece.flatten() for block in blocks_of(w_by_name) for piece in product(block)])
        torch.testing.assert_close(ours, precision @ (w - mean), rtol=1e-8, atol=1e-9)

    # what float64 can hold: the distance and the gradient lose digits with the condition of Sigma_p
    @pytest.mark.parametrize(
        ("scale", "spread", "eps", "tolerance"),
        [
            (1.0, 1.0, 1e-10, 1e-8),  # a tiny eps
            (1e6, 1.0, 0.1, 1e-8),  # huge deviations
            (1.0, 1e-6, 0.1, 1e-8),  # nearly collinear deviations
            (1e3, 0.0, 1e-4, 1e-8),  # collinear ones
            (1e3, 1e-6, 1e-8, 1e-5),  # all of it
            (0.0, 0.0, 0.1, 1e-8),  # none
        ],
    )
    @pytest.mark.parametrize("where", ["anywhere", "in the span of Q"])
    @pytest.mark.usefixtures("each_kind_of_device")
    def test_ill_conditioned_cases_as_in_80_digits(self, scale, spread, eps, tolerance, where):
        size, rank = 24, 4
        generator = torch.Generator().manual_seed(0)
        mean, direction, step = torch.randn(3, size, generator=generator, dtype=torch.float64)
        q = scale * (direction + spread * torch.randn(rank, size, generator=generator, dtype=torch.float64))
        diagonal = log_uniform(1e-8, 1e2, size, generator)
        w = mean + (q.sum(0) + 1e-3 * step if where == "in the span of Q" else step)
        prior = LowRankPrior({"w": mean}, {"w": diagonal}, {"w": q}, eps)

        with mpmath.workdps(80):
            a = mpmath.diag([mpmath.mpf(x) / 2 + mpmath.mpf(eps) for x in diagonal.tolist()])
            exact_q = mpmath.matrix(q.tolist())
            covariance = a + exact_q.T * exact_q / (2 * rank - 2)
            precision, root = covariance**-1, mpmath.cholesky(covariance)
            d = mpmath.matrix(w.tolist()) - mpmath.matrix(mean.tolist())
            trace = float(sum(precision[i, i] for i in range(size)))
            log_det = float(2 * sum(mpmath.log(root[i, i]) for i in range(size)))
            gradient = precision * d
            distance = float((d.T * gradient)[0])
            gradient = torch.tensor([float(x) for x in gradient], dtype=torch.float64)

        assert prior.trace_inverse.item() == pytest.approx(trace, rel=1e-9)
        assert prior.log_det.item() == pytest.approx(log_det, rel=1e-9)
        assert prior.mahalanobis({"w": w}).item() == pytest.approx(distance, rel=tolerance)
        if where == "anywhere":
            ((ours,),) = (prior.precision_product({"w": w})(block) for block in blocks_of({"w": w}))
            assert (ours - gradient).norm() <= tolerance * gradient.norm()

    def test_millions_of_parameters_in_float32_keep_their_digits(self):
        size, rank = 2_000_000, 2
        generator = torch.Generator().manual_seed(0)
        mean, step, diagonal = (torch.rand(size, generator=generator) for _ in range(3))
        q = torch.rand(rank, size, generator=generator).sub_(0.5)
        w = mean + 1e-3 * step
        prior = LowRankPrior({"w": mean}, {"w": diagonal}, {"w": q})
        sigma = torch.tensor(1e-4, dtype=torch.float64)
        lambda_, kl = optimum(prior, {"w": w}, sigma)

        trace_a = log_det_a = distance = 0.0
        gram, gram_2, projection = np.zeros((rank, rank)), np.zeros((rank, rank)), np.zeros(rank)
        for part in torch.arange(size).split(1_000_000):
            rows = slice(part[0], part[-1] + 1)
            a = diagonal[rows].double().numpy() / 2 + 0.1
            u = q[:, rows].double().numpy() / math.sqrt(2 * rank - 2)
            d = w[rows].double().numpy() - mean[rows].double().numpy()
            trace_a, log_det_a, distance = (
                trace_a + (1 / a).sum(),
                log_det_a + np.log(a).sum(),
                distance + d**2 @ (1 / a),
            )
            gram, gram_2, projection = gram + (u / a) @ u.T, gram_2 + (u / a**2) @ u.T, projection + u @ (d / a)
        m = np.eye(rank) + gram
        trace = trace_a - np.trace(np.linalg.solve(m, gram_2))
        quadratic = 1e-8 * trace + distance - projection @ np.linalg.solve(m, projection)
        log_det = log_det_a + np.linalg.slogdet(m)[1]
        v = quadratic / size
        assert lambda_.item() == pytest.approx(v, rel=5e-6)  # a block is a dot product in float32, good to 1e-6
        assert kl.item() == pytest.approx(0.5 * (size * math.log(v / 1e-8) + log_det), rel=1e-6)

    def test_the_gradient_follows_w(self, monkeypatch):
        """What was found for the distance at w is used for the gradient at w, and only there."""
        prior, mean, covariance = make_case("low-rank")
        w, calls, mahalanobis = random_tensors(4), [], prior.mahalanobis
        monkeypatch.setattr(prior, "mahalanobis", lambda w: calls.append(1) or mahalanobis(w))
        prior.mahalanobis(w)
        copy = {name: tensor.clone() for name, tensor in w.items()}
        prior.precision_product(copy)
        assert len(calls) == 1
        copy["scale"].add_(1e-15)
        product = prior.precision_product(copy)
        assert len(calls) == 2
        copy["conv.weight"][0] = 7.0
        product = prior.precision_product(copy)
        ours = torch.cat([piece.flatten() for block in blocks_of(copy) for piece in product(block)])
        torch.testing.assert_close(ours, torch.linalg.solve(covariance, flat(copy) - mean), rtol=1e-9, atol=1e-12)

    def test_float64_weights_on_a_prior_in_float32(self):
        prior, _, _ = make_case("low-rank")
        parts = (prior.mean, prior.diagonal, prior.deviations)
        single = LowRankPrior(*({k: t.float() for k, t in part.items()} for part in parts))
        w = random_tensors(4)
        torch.testing.assert_close(single.mahalanobis(w), prior.mahalanobis(w), rtol=1e-6, atol=0)
        product = single.precision_product(w)
        assert {piece.dtype for block in blocks_of(w) for piece in product(block)} == {torch.float64}

    def test_no_step_allocates_more_than_a_block_at_a_time(self):
        size = 2**20
        mean, w = {"w": torch.zeros(size)}, {"w": torch.full((size,), 1e-3)}
        prior = LowRankPrior(mean, {"w": torch.ones(size)}, {"w": torch.randn(10, size) * 1e-3})
        with LargestAllocation([*w.values(), *prior.state_dict().values()]) as allocation:
            prior.mahalanobis(w)
            product = prior.precision_product(w)
            for block in blocks_of(w):
                list(product(block))
        assert allocation.largest == 4 * 2**18


class LargestAllocation(TorchDispatchMode):
    """Bytes of the largest new tensor, apart from views of known ones."""

    def __init__(self, known: list[torch.Tensor]):
        super().__init__()
        self.known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, result.untyped_storage().nbytes())
        return results


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
