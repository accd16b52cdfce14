"""sigma in closed form: its update against numeric maximisation, T against known Hessians, and where it goes."""

import copy
import math

import numpy as np
import pytest
import torch
from conftest import Recorder, add_noise_, low_rank_prior, make_dataset, make_model
from scipy.optimize import brentq, minimize
from scipy.stats import truncnorm
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from torch.func import functional_call

from hf_deelbo import DEELBoTrainer, GaussianPosterior, IsotropicPrior
from hf_deelbo.groups import groups_of
from hf_deelbo.objective import Curvature, mean_above_zero, optimal_posterior_variance, shared_posterior_variance
from hf_deelbo.weights.parameters import backbone_of, head_parameter_names


class Quadratic(nn.Module):
    """NLL of an example: (w - target)^T H (w - target) / 2, over all weights together."""

    def __init__(self, hessian: torch.Tensor, target: torch.Tensor, sizes: dict[str, int]):
        super().__init__()
        self.parts = nn.ParameterDict({name: torch.zeros(size) for name, size in sizes.items()})
        self.register_buffer("hessian", hessian)
        self.register_buffer("target", target)

    def forward(self, labels=None):
        difference = torch.cat([self.parts[name] for name in self.parts]) - self.target
        loss = difference @ self.hessian @ difference / 2
        return {"loss": loss, "logits": torch.zeros(1 if labels is None else len(labels), 2)}


def positive_definite(size: int, seed: int = 0) -> torch.Tensor:
    factor = torch.randn(size, size, generator=torch.Generator().manual_seed(seed))
    return factor @ factor.T / size + torch.eye(size)


def flat(tensors: dict[str, torch.Tensor], names: list[str]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in names]).double()


# ---- One update -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grouping", ["all", "part", "layer", "tensor"])
@pytest.mark.parametrize("prior", ["l2-zero", "l2-sp", "ptyl"])
def test_an_update_is_the_numeric_maximum_of_the_bound_with_dense_gaussians(prior, grouping):
    """-J / (kappa N) = sum_g T_g s_g / 2 + ( KL_w + KL_V ) / (kappa N), over all log s_g, log lambda_g, log tau_g."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"0": nn.Linear(3, 2), "1": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    head = ["head.weight", "head.bias"]
    backbone = backbone_of(model, head)
    priors = {"l2-zero": IsotropicPrior.l2_zero, "l2-sp": IsotropicPrior.l2_sp}
    the_prior = low_rank_prior(model) if prior == "ptyl" else priors[prior](backbone)
    posterior = GaussianPosterior(model, head, the_prior, grouping=grouping, kappa=3.0, num_examples=5)
    start = {name: w.clone() for name, w in backbone.items()}
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)

    num_sigmas = posterior.rho.numel()
    curvature = torch.linspace(1.0, 3.0, num_sigmas).double().reshape(posterior.rho.shape)
    posterior.curvature.sums = torch.stack([curvature, torch.ones_like(curvature), torch.zeros_like(curvature)])
    posterior.update_variances()

    names = list(start)
    index = {name: i for i, group in enumerate(posterior.groups) for name in group.parameters}
    of_weights = [
        torch.tensor([index[n] for n in part for _ in range(dict(model.named_parameters())[n].numel())])
        for part in (names, head)
    ]
    means = [flat(posterior.backbone, names), flat(posterior.head, head)]
    covariance = torch.eye(len(means[0])).double()
    if prior == "ptyl":
        q = torch.cat([the_prior.deviations[n].flatten(1) for n in names], 1).double()
        covariance = torch.diag(flat(the_prior.diagonal, names) / 2 + 0.1) + q.T @ q / (2 * len(q) - 2)
    centre = torch.zeros_like(means[0]) if prior == "l2-zero" else flat(start, names)

    def loss(theta: np.ndarray) -> tuple[float, np.ndarray]:
        theta = torch.tensor(theta, requires_grad=True)
        log_s, log_v = theta[:num_sigmas], theta[num_sigmas:]
        s = log_s.exp().expand(len(posterior.groups))
        roots = [(log_v[which] / 2).exp() for which in of_weights]
        kl = sum(
            kl_divergence(
                MultivariateNormal(mean, torch.diag(s[which])),
                MultivariateNormal(mu, root[:, None] * sigma_p * root),
            )
            for mean, which, root, mu, sigma_p in (
                (means[0], of_weights[0], roots[0], centre, covariance),
                (means[1], of_weights[1], roots[1], torch.zeros(6).double(), torch.eye(6).double()),
            )
        )
        value = (curvature.reshape(-1) * log_s.exp()).sum() / 2 + kl / (3.0 * 5)
        value.backward()
        return value.item(), theta.grad.numpy()

    start_at = np.zeros(num_sigmas + len(posterior.groups)) - 1
    best = minimize(loss, start_at, jac=True, method="BFGS", options={"gtol": 1e-10}).x
    sigmas = posterior.sigmas[:num_sigmas]
    np.testing.assert_allclose(sigmas.square().log(), best[:num_sigmas], rtol=0, atol=1e-5)
    np.testing.assert_allclose(posterior.prior_variances.log(), best[num_sigmas:], rtol=0, atol=1e-5)


def test_the_closed_form_solves_its_equation_at_any_scale():
    scales = torch.logspace(-12, 4, 9, dtype=torch.float64)
    curvature, distance, weight = (x.flatten() for x in torch.meshgrid(scales, scales, scales, indexing="ij"))
    s = optimal_posterior_variance(curvature, distance, weight)
    torch.testing.assert_close(s * (s + distance) * curvature, weight * distance, rtol=1e-12, atol=0)
    for i in range(0, len(scales) ** 3, 37):
        distances, weights = distance[i] * scales[[3, 2, 4]], weight[i] * scales[[3, 4, 2]]
        shared = shared_posterior_variance(curvature[i], distances, weights)
        left = (weights * distances / (shared * (shared + distances))).sum()
        torch.testing.assert_close(left, curvature[i], rtol=1e-12, atol=0)


# ---- T --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [-1e3, -40.0, -29.0, -3.0, 0.0, 2.0, 50.0])
def test_mean_above_zero_is_that_of_the_truncated_normal(ratio):
    deviation = 0.7
    ours = mean_above_zero(*(torch.tensor(x, dtype=torch.float64) for x in (ratio * deviation, deviation)))
    expected = truncnorm.mean(-ratio, np.inf, loc=ratio * deviation, scale=deviation)
    assert ours.item() == pytest.approx(expected if ratio > -30 else deviation / -ratio, rel=2e-3)


def test_curvature_is_the_weighted_average_of_the_steps():
    random = np.random.default_rng(0)
    products, norms, variances = random.normal(size=(3, 12)) ** [[1], [2], [2]]
    variances = np.sort(variances)  # sigma grows
    curvature = Curvature(like=torch.zeros(1, dtype=torch.float64))
    for step in zip(products, norms, variances, strict=True):
        curvature.add(*(torch.tensor([number]) for number in step))
    age = 0.9 ** np.arange(11, -1, -1.0)
    weights = age * variances
    mean = (weights * products / variances).sum() / weights.sum()
    error = math.sqrt((weights**2 * norms / variances).sum()) / weights.sum()
    assert curvature.mean().item() == pytest.approx(truncnorm.mean(-mean / error, np.inf, loc=mean, scale=error))


def test_a_step_that_is_not_finite_is_left_out():
    curvature = Curvature(like=torch.zeros(2, dtype=torch.float64))
    ones = torch.ones(2)
    curvature.add(ones, ones, ones)
    before = curvature.sums.clone()
    curvature.add(torch.tensor([1.0, math.inf]), ones, ones)
    curvature.add(ones, torch.tensor([math.nan, 1.0]), ones)
    assert torch.equal(curvature.sums, before)


def test_the_average_over_the_noise_is_the_trace_of_the_hessian():
    """Of each group, with correlations between the groups, and a gradient at the mean that is not zero."""
    hessian, sizes = positive_definite(12), {"a": 5, "b": 4, "head": 3}
    model = Quadratic(hessian, torch.ones(12), sizes)
    names = [f"parts.{name}" for name in sizes]
    posterior = GaussianPosterior(model, names[2:], grouping="tensor", init_sigma=0.5, num_examples=1)
    traces = torch.stack([part.trace() for part in (hessian[:5, :5], hessian[5:9, 5:9], hessian[9:, 9:])])
    steps, sums = [], torch.zeros(3, 3, dtype=torch.float64)
    for step in range(4000):
        model.zero_grad()
        posterior.curvature = Curvature(like=posterior.rho.detach())
        with posterior.sampled(step):
            model()["loss"].backward()
            posterior.complete_gradients()
        steps.append(posterior.curvature.sums[0] / posterior.curvature.sums[1])
        sums += posterior.curvature.sums
    found = torch.stack(steps)
    error = found.std(0) / math.sqrt(len(steps))
    assert ((found.mean(0) - traces).abs() < 4 * error).all()
    assert (error < 0.1 * traces).all()
    # the error that is foretold for a step is at least the one it has: |g|^2 is that at the sample
    foretold = (sums[2] / sums[1] ** 2 * len(steps)).sqrt()
    assert (foretold > 0.7 * found.std(0)).all()
    assert (foretold < 1.5 * found.std(0)).all()


@pytest.mark.parametrize("init_sigma", [1e-3, 0.5])
@pytest.mark.parametrize("grouping", ["all", "tensor"])
def test_sigma_converges_to_the_exact_optimum_of_a_quadratic_likelihood(grouping, init_sigma):
    """There T is the trace of the Hessian, whatever w_bar and sigma, and the optimum follows from it by iteration."""
    hessian, sizes, kappa_n = positive_definite(60), {"a": 30, "b": 20, "head": 10}, 40.0
    model = Quadratic(hessian, torch.ones(60), sizes)
    names = [f"parts.{name}" for name in sizes]
    posterior = GaussianPosterior(
        model, names[2:], grouping=grouping, init_sigma=init_sigma, kappa=kappa_n, num_examples=1
    )
    optimizer, variances = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(1500):
        posterior.update_variances(growth=0.2)
        optimizer.zero_grad()
        with posterior.sampled(step):
            model()["loss"].backward()
            posterior.complete_gradients()
        optimizer.step()
        variances.append(posterior.sigmas.square())
    found = torch.stack(variances[500:]).log().mean(0)

    index = torch.tensor([i for i, group in enumerate(posterior.groups) for _ in range(group.num_parameters)])
    by_group = torch.nn.functional.one_hot(index).T.double()
    counts, traces, exact = by_group.sum(1), by_group @ hessian.diagonal().double(), hessian.double()
    w, s = torch.ones(60).double(), torch.full((len(posterior.groups),), 0.1).double()
    for _ in range(500):
        d2 = by_group @ w.square() / counts
        pull = (1 / (kappa_n * (s + d2)))[index]
        w = torch.linalg.solve(exact + torch.diag(pull), exact @ torch.ones(60).double())
        if grouping == "all":
            lowest, highest = -40.0, 20.0
            for _ in range(100):  # bisection
                middle = (lowest + highest) / 2
                at = math.exp(middle)
                too_small = (counts / kappa_n * d2 / (at * (at + d2))).sum() > traces.sum()
                lowest, highest = (middle, highest) if too_small else (lowest, middle)
            s = torch.full_like(s, math.exp(lowest))
        else:
            s = (-d2 + (d2**2 + 4 * counts / kappa_n * d2 / traces).sqrt()) / 2
    torch.testing.assert_close(found, s.log(), rtol=0, atol=0.06)


# ---- Groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vit", "resnet", "bert"])
@pytest.mark.parametrize("grouping", ["all", "part", "layer", "tensor"])
def test_groups_hold_every_parameter_once_and_never_both_parts(kind, grouping):
    model = make_model(kind)
    head = head_parameter_names(model)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    groups = groups_of(shapes, head, grouping)
    assert sorted(name for group in groups for name in group.parameters) == sorted(shapes)
    assert len({(group.name, group.in_head) for group in groups}) == len(groups)
    for group in groups:
        assert {name in head for name in group.parameters} == {group.in_head}
        assert group.num_parameters == sum(shapes[name].numel() for name in group.parameters)
    expected = {"all": 2, "part": 2, "tensor": len(shapes)}
    assert len(groups) == expected.get(grouping, len(groups))
    if (kind, grouping) == ("bert", "layer"):
        layers = ["bert.embeddings", "bert.encoder.layer.0", "bert.encoder.layer.1", "bert.pooler", "classifier"]
        assert [group.name for group in groups] == layers


# ---- In training ----------------------------------------------------------------------------------------------------


class Reference:
    """Steps of SGD on the DE ELBo by autograd, scipy and lists of all that was seen: no running sums."""

    def __init__(self, trainer: DEELBoTrainer):
        self.posterior, self.args = trainer.posterior, trainer.args
        self.model = copy.deepcopy(trainer.model).double().train()
        self.w_bar = {name: p.detach().clone().requires_grad_() for name, p in self.model.named_parameters()}
        self.mu = {name: 0 if name in trainer.posterior.head else w.detach().clone() for name, w in self.w_bar.items()}
        self.groups = [group.parameters for group in trainer.posterior.groups]
        self.is_shared = trainer.args.grouping == "all"
        self.sizes = np.array([sum(self.w_bar[name].numel() for name in names) for names in self.groups])
        self.num_examples = len(trainer.train_dataset)
        self.kappa_n = trainer.posterior.kappa * self.num_examples
        self.s = np.full(1 if self.is_shared else len(self.groups), trainer.args.init_sigma**2)
        self.seen = []  # of each step, by sigma: <g, w - w_bar>, |g|^2, s
        self.optimizer = torch.optim.SGD(self.w_bar.values(), lr=trainer.args.learning_rate)

    def by_group(self, term) -> np.ndarray:
        return np.array([sum(term(name) for name in names) for names in self.groups])

    def curvature(self, i: int) -> float:
        products, norms, s = np.array([[row[i] for row in step] for step in self.seen]).T
        weights = np.zeros(0)
        for now in s:  # all before weigh as nine steps at the present sigma, at most
            weights = np.append(0.9 * weights * min(1, now * 10 / weights.sum() if len(weights) else 1), now)
        mean, error = (
            (weights * products / s).sum() / weights.sum(),
            np.sqrt((weights**2 * norms / s).sum()) / weights.sum(),
        )
        return truncnorm.mean(-mean / error, np.inf, loc=mean, scale=error)

    def update_s(self, distances: np.ndarray, kl_weight: float, most: float) -> None:
        d2, c = distances / self.sizes, self.sizes * kl_weight
        for i in range(len(self.s)):
            mine, curvature = slice(None) if self.is_shared else slice(i, i + 1), self.curvature(i)

            def excess(log_s: float, mine=mine, curvature=curvature) -> float:
                s = math.exp(log_s)
                return math.log(np.sum(c[mine] * d2[mine] / (s * (s + d2[mine]))) / curvature)

            best = math.exp(brentq(excess, -60, 20, xtol=1e-13))
            self.s[i] = min(max(best, self.s[i] / 4), max(self.s[i] * most, 1e-6))

    def distances(self) -> np.ndarray:
        return self.by_group(lambda n: (self.w_bar[n].detach() - self.mu[n]).square().sum().item())

    def step(self, batch: dict, step: int) -> None:
        epochs = (step + 1) * self.args.train_batch_size / self.num_examples
        kl_weight = min(1, epochs / self.args.kl_warmup_epochs) ** 4 / self.kappa_n
        distances = self.distances()
        if self.seen:
            self.update_s(distances, kl_weight, most=1.3 - 0.3 * step / self.args.max_steps)
        s = np.broadcast_to(self.s, len(self.groups))
        variances = s + distances / self.sizes
        sigma = {name: math.sqrt(s[i]) for i, names in enumerate(self.groups) for name in names}
        variance = {name: variances[i] for i, names in enumerate(self.groups) for name in names}
        eps = {name: torch.zeros_like(p) for name, p in self.w_bar.items()}
        add_noise_(eps, torch.tensor(1.0), key=(self.args.seed, step))
        delta = {name: sigma[name] * eps[name] for name in self.w_bar}
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
        w = {name: p + delta[name] for name, p in self.w_bar.items()}
        functional_call(self.model, w, kwargs=inputs).loss.backward()
        g = {name: p.grad.clone() for name, p in self.w_bar.items()}
        sums = [
            self.by_group(lambda n: (g[n] * delta[n]).sum().item()),
            self.by_group(lambda n: g[n].square().sum().item()),
        ]
        if self.is_shared:
            sums = [x.sum(keepdims=True) for x in sums]
        self.seen.append((*sums, self.s.copy()))
        for name, p in self.w_bar.items():
            p.grad += kl_weight * (p.detach() - self.mu[name]) / variance[name]
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("grouping", ["all", "part", "layer", "tensor"])
@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_training_is_that_of_the_reference(make_trainer, kind, grouping):
    recorder, steps = Recorder(), 8
    data = [
        {k: v.double() if torch.is_floating_point(torch.as_tensor(v)) else v for k, v in row.items()}
        for row in make_dataset(kind)
    ]
    trainer = make_trainer(
        kind,
        model=make_model(kind).double(),
        train_dataset=data,
        sigma_update="closed-form",
        grouping=grouping,
        init_sigma=0.01,
        kl_warmup_epochs=1.9,
        kappa=20,
        max_steps=steps,
        optim="sgd",
        max_grad_norm=0,
        lr_scheduler_type="constant",
        trainer={"data_collator": recorder},
    )
    reference = Reference(trainer)
    trainer.train()
    for step in range(steps):
        reference.step(recorder.batches[step], step)
    reference.update_s(reference.distances(), 1 / reference.kappa_n, most=1.0)
    found = trainer.posterior.sigmas.numpy()
    # attention does not depend on the bias of its keys: what is left of their gradient is rounding
    has_gradient = (
        np.array([norm for _, norms, _ in reference.seen for norm in norms]).reshape(steps, -1).min(0) > 1e-20
    )
    has_gradient = np.broadcast_to(has_gradient, found.shape)
    assert has_gradient.mean() > 0.9
    assert (np.abs(found / 0.01 - 1) > 1e-3)[has_gradient].all()
    expected = np.broadcast_to(reference.s, found.shape)
    np.testing.assert_allclose((found**2)[has_gradient], expected[has_gradient], rtol=1e-6)
    parameters = dict(trainer.model.named_parameters())
    for name in (name for names, has in zip(reference.groups, has_gradient, strict=True) if has for name in names):
        torch.testing.assert_close(parameters[name], reference.w_bar[name], rtol=0, atol=1e-9, msg=name)
