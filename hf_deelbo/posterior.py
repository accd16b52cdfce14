"""The approximate posterior q(w, V) = N(w_bar, sigma^2 I) N(V_bar, sigma^2 I) around a model's parameters."""

import copy
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from threading import Lock, RLock, get_ident
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.functional import softplus

from .groups import SIGMA_UPDATES, groups_of
from .objective import (
    Curvature,
    DEELBo,
    default_kappa,
    gaussian_kl,
    kl_gradient_of_sigma,
    optimal_posterior_variance,
    optimal_variance,
    shared_posterior_variance,
)
from .priors import GaussianPrior, IsotropicPrior, prior_from, wide_dtype
from .temperature import Temperatures, fit_temperature, log_of, tempered
from .uncertainty import Uncertainty, uncertainty_of
from .weights.batch_norm import Statistics, as_it_is, batch_norm_layers, compute_statistics, ways_between
from .weights.blocks import (
    Block,
    Tensors,
    add_scaled_,
    blocks_of,
    draw_sample,
    on_all_cores,
    parameters_by_name,
    total,
    values_of,
)
from .weights.parameters import last_linear
from .weights.shards import check_sharding, class_of, is_sharded, reshard

# sigma^2 falls to a quarter at most from one step to the next; up to this sigma, which does no harm, it grows at once
MOST_FALL, HARMLESS_SIGMA = 4.0, 1e-3
HOLDS_SAMPLE = "the model holds a weight sample; leave `with sampled(...)` first."
Method = TypeVar("Method", bound=Callable[..., Any])


class KL(NamedTuple):
    """KL(q(w) || p(w)) and KL(q(V) || p(V))."""

    backbone: torch.Tensor
    head: torch.Tensor


def at_the_mean(method: Method) -> Method:
    """A method of a posterior that has its turn at the model, which is the posterior mean then.

    Example:
        ```python
        class MyPosterior(GaussianPosterior):
            @at_the_mean
            def norm(self):  # other threads wait; a RuntimeError within `with posterior.sampled(...)`
                return sum(w.square().sum() for w in self.backbone.values())
        ```
    """

    @wraps(method)
    def in_turn(posterior: "Posterior", *args: Any, **kwargs: Any) -> Any:
        with posterior.lock:
            posterior.ensure_mean(method.__name__)
            return method(posterior, *args, **kwargs)

    return in_turn


class Posterior:
    """A Gaussian around the trainable parameters of a model, with a standard deviation sigma for each group of them.

    The means w_bar, V_bar are the model's own parameters: outside of `sampled` the model is the posterior mean. Beside
    them stand, for each group, `rho`, with sigma = log(1 + exp(rho)), and a prior variance, lambda in the backbone and
    tau in the head. Frozen parameters are constants, outside of q, the KL and D.

    Args:
        model: its trainable parameters are w and V.
        head_names: which of them are V, by parameter name; the rest is the backbone w.
        prior: p(w) up to lambda, over the backbone; default L2-SP at the present weights. p(V) = N(0, tau I).
        grouping, sigma_update: as in `DEELBoConfig`.
        init_sigma: where sigma starts.
        kappa: weight of the likelihood; `"auto"` is D/N.
        num_examples: N, the size of the training set; may be left out where nothing is trained.

    Attributes:
        rho: a parameter for the optimiser, where that learns sigma: one number, or one for each group.
        groups: the `Group`s: backbone first, then head.
        curvature: what is known of T for the closed form; `None` where the optimiser learns sigma.
        prior, head_prior: p(w) and p(V), up to lambda and tau.
        prior_variances: lambda or tau of each group, as set by the last `update_prior_variances`.
        kl: KL of backbone and head at that moment.
        kl_annealing: the part of the KL's weight that is in force; 1 but in training.
        de_elbo: J as the trainer measured it at the present means, or `None`.
        temperatures: what predictions are tempered by, at the present means, see `calibrate`.
        num_parameters: D.
        lock: held by the thread that uses the model, whose turn others wait for. All methods take it; take it too
            (`with posterior.lock:`) around what you do with the model yourself while other threads predict.
        trained_by: the thread that trains it now; meanwhile others are refused.

    Before something in the model is switched, what undoes it is noted. If an interrupt cuts that short, the next use
    completes it, in any thread.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> posterior = Posterior(model, ["2.weight", "2.bias"], init_sigma=0.1, num_examples=67)
        >>> posterior.num_parameters, posterior.kappa
        (67, 1.0)
        >>> x = torch.randn(5, 4)
        >>> with posterior.sampled(0):
        ...     logits_of_a_sample = model(x)
        >>> logits_of_the_mean = model(x)
    """

    def __init__(
        self,
        model: nn.Module,
        head_names: Iterable[str],
        prior: GaussianPrior | None = None,
        *,
        grouping: str = "all",
        sigma_update: str = "closed-form",
        init_sigma: float = 1e-3,
        kappa: float | str = "auto",
        num_examples: int | None = None,
    ):
        if not (math.isfinite(init_sigma) and init_sigma > 0):
            raise ValueError(f"init_sigma: must be a positive number, got {init_sigma}.")
        if sigma_update not in SIGMA_UPDATES:
            raise ValueError(f"sigma_update: unknown value {sigma_update!r}; choose {' or '.join(SIGMA_UPDATES)}.")
        self.model = model
        self.lock = RLock()
        self.trained_by: int | None = None
        self._in_sample = Lock()  # held in the body of `sampled`
        self._undo: tuple[Callable[[], None], ...] = ()  # it makes the model the mean again, and may be called twice
        _posteriors.add(self)
        self._head_names = frozenset(head_names)
        self._is_sharded = is_sharded(model)
        parameters = self.parameters()
        self._names = parameters.keys()
        _check_parameters(parameters, self._head_names)
        self.prior = prior or IsotropicPrior.l2_sp(self.backbone)
        self.prior.check_matches(self.backbone)
        if self._is_sharded:
            self.prior = prior_from(self.prior.config, self.prior.state_dict(), self.backbone)
        self.head_prior = IsotropicPrior.l2_zero(self.head)
        shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.grouping, self.sigma_update = grouping, sigma_update
        self.groups = groups_of(shapes, self._head_names, grouping, whole_backbone=not self.prior.separable)
        self._num_backbone = sum(not group.in_head for group in self.groups)  # groups of it, which come first
        names = [[group.parameters for group in self.groups if group.in_head == in_head] for in_head in (False, True)]
        self.prior = self.prior.grouped(names[0], self.backbone)
        self.head_prior = self.head_prior.grouped(names[1], self.head)
        self._blocks = blocks_of(parameters, groups=[group.parameters for group in self.groups])
        self.num_parameters = self.prior.num_parameters + self.head_prior.num_parameters
        self.num_examples = num_examples
        self.kl_annealing = 1.0
        self.kappa = self._resolve_kappa(kappa)

        device = next(iter(parameters.values())).device
        shape = () if grouping == "all" else (len(self.groups),)
        sigma = torch.full(shape, init_sigma, dtype=wide_dtype(device), device=device)
        self.rho = nn.Parameter(torch.log(torch.expm1(sigma)))  # the inverse of softplus
        self.curvature = Curvature(like=self.rho) if sigma_update == "closed-form" else None
        self.sample_statistics: dict[int, Statistics] = {}
        self.de_elbo: DEELBo | None = None
        self.temperatures = Temperatures()
        self._sampled: dict[str, nn.Parameter] = {}  # the parameters that hold the sample
        self._means: Tensors = {}  # while they do
        self._sample: Tensors = {}
        self._room: dict[str, torch.Tensor] = {}  # a second set of weights
        self._last_drawn: tuple[tuple[int, ...], bool] | None = None
        self._describe_groups()
        self.update_prior_variances()

    # ---- What it is ------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, torch.Tensor]:
        """The trainable parameters by name, each once (tied weights too), as views without gradient."""
        with self.lock:
            if self._undo and not self._in_sample.locked():
                self._put_back()
            if self._is_sharded:
                reshard(self.model)
            return {name: parameter.detach() for name, parameter in parameters_by_name(self.model).items()}

    @property
    def is_sampled(self) -> bool:
        """Whether the model holds a weight sample now."""
        return self._in_sample.locked() and bool(self._undo)

    @property
    def backbone(self) -> dict[str, torch.Tensor]:
        """The backbone's w_bar, by parameter name."""
        return {name: p for name, p in self.parameters().items() if name not in self._head_names}

    @property
    def head(self) -> dict[str, torch.Tensor]:
        """The head's V_bar, by parameter name."""
        return {name: p for name, p in self.parameters().items() if name in self._head_names}

    @property
    def sigma(self) -> torch.Tensor:
        """sigma = softplus(rho) = log(1 + exp(rho)); of several, the root of the mean of sigma^2 over all weights."""
        sigma = softplus(self.rho.detach())
        return sigma if sigma.dim() == 0 else _mean(sigma**2, self._sizes).sqrt()

    @property
    def sigmas(self) -> torch.Tensor:
        """sigma of each of `groups`."""
        return softplus(self.rho.detach()).expand(len(self.groups))

    @property
    def lambda_(self) -> torch.Tensor:
        """lambda, the backbone's prior variance; of several, their mean over all weights."""
        return _mean(self.by_part(self.prior_variances)[0], self.prior.group_sizes)

    @property
    def tau(self) -> torch.Tensor:
        """tau, the head's prior variance; of several, their mean over all weights."""
        return _mean(self.by_part(self.prior_variances)[1], self.head_prior.group_sizes)

    def group_table(self) -> list[dict[str, Any]]:
        """Each of `groups` in plain numbers: `name`, `in_head`, `num_parameters`, `sigma` and `prior_variance`."""
        numbers = zip(self.groups, self.sigmas.tolist(), self.prior_variances.tolist(), strict=True)
        return [
            {
                "name": group.name,
                "in_head": group.in_head,
                "num_parameters": group.num_parameters,
                "sigma": sigma,
                "prior_variance": variance,
            }
            for group, sigma, variance in numbers
        ]

    def by_part(self, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A number of each of `groups`, as views of the backbone's and the head's, in the shapes of their priors."""
        parts = numbers[: self._num_backbone], numbers[self._num_backbone :]
        priors = self.prior, self.head_prior
        return tuple(part.reshape(prior.trace_inverse.shape) for part, prior in zip(parts, priors, strict=True))

    @property
    def kl_weight(self) -> float:
        """1 / (kappa N), the weight of the KL in the training loss; times `kl_annealing` while that is below 1."""
        if self.num_examples is None:
            raise ValueError(
                "num_examples: the KL's weight 1/(kappa N) needs N, the size of the training set. Give the trainer a "
                "`train_dataset` with a length, or set `num_train_examples`."
            )
        return self.kl_annealing / (self.kappa * self.num_examples)

    def __repr__(self) -> str:
        numbers = {"sigma": self.sigma, "lambda_": self.lambda_, "tau": self.tau}
        learned = ", ".join(f"{name}={float(value):.3g}" for name, value in numbers.items())
        return f"{type(self).__name__}({class_of(self.model).__name__}, D={self.num_parameters:,}, {learned})"

    # ---- Learning it -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    @at_the_mean
    def update_variances(self, growth: float = math.inf, with_sigma: bool = True) -> None:
        """Set sigma, as far as the steps so far have told, lambda and tau to the maximum of J at the present means.

            sigma*^2 (sigma*^2 + d2) = c d2 / T                              `objective.optimal_posterior_variance`
            lambda* = [ sigma^2 tr(Sigma_p^-1) + (mu_p - w_bar)^T Sigma_p^-1 (mu_p - w_bar) ] / D_w
            tau*    = sigma^2 + |V_bar|^2 / D_V

        each over the weights of a group, and note the KL there. Where the optimiser learns rho, sigma is left to it.
        What was computed at earlier means, J, temperatures and batch-norm statistics, is forgotten with the earlier
        sigma.

        Args:
            growth: by what part of itself sigma^2 may grow, 0.3 for 30 %; by default it goes to its optimum at once.
            with_sigma: if false, only lambda and tau are set, see `update_prior_variances`.
        """
        self._last_drawn = None  # the means have moved
        weights, sizes = self.parameters(), self._sizes
        if weights.keys() != self._names:
            changed = next(iter(weights.keys() ^ self._names))
            raise RuntimeError(
                f"model: {changed!r} was frozen or unfrozen after the posterior was made. Do so before, or make a "
                "new trainer."
            )
        distances = torch.cat([prior.mahalanobis(weights).reshape(-1) for prior in (self.prior, self.head_prior)])

        if with_sigma:
            self.sample_statistics.clear()
            self.de_elbo, self.temperatures = None, Temperatures()
        if with_sigma and self.curvature is not None:
            # of each group, or of all of them together; where nothing is known yet it stays
            best = shared_posterior_variance if self.rho.dim() == 0 else optimal_posterior_variance
            variance = best(self.curvature.mean(), distances / self._traces, self.kl_weight * sizes)
            present = softplus(self.rho.detach()) ** 2
            variance = torch.where(torch.isfinite(variance) & (variance > 0), variance, present)
            if growth < math.inf:
                most = (present * (1 + growth)).clamp(min=HARMLESS_SIGMA**2)
                variance = variance.clamp(present / MOST_FALL, most)
            self.rho.data.copy_(torch.log(torch.expm1(variance.sqrt())))

        numbers = {"mahalanobis": distances, "trace_inverse": self._traces, "num_parameters": sizes}
        sigmas = self.sigmas
        self.prior_variances = optimal_variance(sigmas, **numbers)
        kl = gaussian_kl(sigmas, self.prior_variances, log_det=self._log_dets, **numbers)
        self.kl = KL(kl[: self._num_backbone].sum(), kl[self._num_backbone :].sum())

    def update_prior_variances(self) -> None:
        """Set lambda and tau to the maximum of J at the present means and sigma, and note the KL there."""
        self.update_variances(with_sigma=False)

    @contextmanager
    def sampled(self, *key: int, on_cpu: bool = False, reuse: bool = False) -> Iterator[None]:
        """Within it the model's weights are w = w_bar + sigma * eps, with eps ~ N(0, I) drawn from `key`.

        The sample has memory of its own, and the parameters point to it until the exit, also when the body raises or
        is interrupted; the means are not touched. Gradients that the body leaves in the parameters are those at the
        sample; see `complete_gradients`. Other threads wait for their turn until the exit.

        Args:
            *key: decides eps, together with the device that draws it.
            on_cpu: draw it on the CPU wherever the model is, so that the key alone decides: slower on a GPU.
            reuse: take the last sample again, if it was of the same key and neither `update_prior_variances` nor
                `complete_gradients` was called since. The means must not have moved since then.
        """
        with self.lock:
            self.ensure_mean("sampled")
            with self._in_sample:
                try:
                    self._put_in_sample(key, on_cpu, reuse)
                    yield
                finally:
                    self._put_back()

    @torch.no_grad()
    def complete_gradients(self, loss_scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        """Inside `sampled`, after the backward pass of the NLL: make its gradients those of the training loss.

        With g the gradient of the NLL at the sample, and lambda, tau held at their last update (by the envelope
        theorem, that is the gradient through lambda*, tau* too):

            d loss / d w_bar = g + 1/(kappa N) Sigma_p^-1 (w_bar - mu_p) / lambda        (the head alike, with tau)
            d loss / d rho   = [ <g, eps> + 1/(kappa N) dKL/dsigma ] dsigma/drho,        eps = (w - w_bar) / sigma

        the second where the optimiser learns rho; else <g, eps> is noted for sigma's closed form. The means are back
        in the model afterwards; `sampled` still ends as usual.

        Args:
            loss_scale: what the gradients were multiplied by (`GradScaler`).

        Returns:
            <g, w - w_bar>, which is finite if all gradients are.
        """
        if not self._means:
            raise RuntimeError("complete_gradients: there is no weight sample; call it inside `with sampled(...)`.")
        self._last_drawn = None  # it is spent
        if self._is_sharded:  # FSDP2 may have moved them in its first forward pass
            self._sample = self.parameters()
            self._sampled = parameters_by_name(self.model)
        for parameter in self._sampled.values():
            if parameter.grad is None:  # the loss does not reach it, but the prior pulls there too
                parameter.grad = torch.zeros_like(parameter)
        gradients = {name: parameter.grad for name, parameter in self._sampled.items()}
        kl_weight = loss_scale * self.kl_weight
        pulls = kl_weight / self.prior_variances
        # Sigma_p^-1 (w_bar - mu_p) of a block of the backbone, and of one of the head
        towards_prior = [prior.precision_product(self._means) for prior in (self.prior, self.head_prior)]

        def complete(block: Block) -> torch.Tensor:
            """In one pass: add the pull to g, spend w; <g, w - w_bar> and |g|^2, with the g of before."""
            w, g = block.of(self._sample), block.of(gradients)
            torch._foreach_sub_(w, block.of(self._means))
            product = torch.stack([torch.dot(a.flatten(), b.flatten()) for a, b in zip(w, g, strict=True)]).sum()
            sums = torch.stack([product, torch.stack(torch._foreach_norm(g)).square().sum()])
            add_scaled_(g, towards_prior[self.groups[block.group].in_head](block), pulls[block.group])
            return sums.to(pulls.dtype)

        groups, zeros = [block.group for block in self._blocks], pulls.new_zeros(len(pulls), 2)
        products, squared_norms = total(on_all_cores(complete, self._blocks), self._means, zeros, groups).T
        shape = self.rho.shape  # of one sigma, to which all groups add up, or of one for each
        if self.curvature is not None:
            sums = (products.sum_to_size(shape) / loss_scale, squared_norms.sum_to_size(shape) / loss_scale**2)
            self.curvature.add(*sums, softplus(self.rho.detach()) ** 2)
        else:
            numbers = {"trace_inverse": self._traces, "num_parameters": self._sizes}
            kl_gradients = kl_gradient_of_sigma(self.sigmas, self.prior_variances, **numbers)
            gradient = (products / self.sigmas + kl_weight * kl_gradients).sum_to_size(shape)
            self.rho.grad = gradient * torch.sigmoid(self.rho)
        self._put_back()
        return products.sum()

    # ---- Using it --------------------------------------------------------------------------------------------------

    @contextmanager
    def evaluated_at(self, seed: int) -> Iterator[None]:
        """The weight sample `seed` in eval mode, with the batch-norm statistics that `recompute_batch_norm` made."""
        with self.sampled(seed, on_cpu=True):
            self._set_eval_mode()
            self._use_statistics(seed)
            yield

    @at_the_mean
    def recompute_batch_norm(self, batches: Iterable[Mapping[str, Any]], num_samples: int) -> None:
        """Compute the batch-norm statistics of the weight samples 0 .. num_samples - 1 over training inputs.

        They are kept for `evaluated_at` and `predict_proba` until the posterior is trained further.

        Args:
            batches: keyword arguments of the model, gone through once for each sample that has no statistics yet.
            num_samples: how many samples.
        """
        if not batch_norm_layers(self.model):
            return
        for seed in range(num_samples):
            if seed not in self.sample_statistics:
                with self.sampled(seed, on_cpu=True):
                    self._undo = (as_it_is(self.model), *self._undo)
                    statistics = compute_statistics(self.model, batches, lambda batch: self.model(**batch))
                for layer, moments in statistics.items():
                    if not all(torch.isfinite(moment).all() for moment in moments):
                        raise FloatingPointError(
                            f"batches: weight sample {seed} has batch-norm statistics that are not finite, in layer "
                            f"{layer!r}. Look for bad values in the inputs; if there are none, training diverged."
                        )
                self.sample_statistics[seed] = statistics

    @torch.no_grad()
    @at_the_mean
    def predict_proba(self, inputs: Mapping[str, Any], num_samples: int = 0) -> torch.Tensor:
        """Class probabilities: of the posterior mean, or averaged over weight samples.

            p(y | x) = 1/S sum_s softmax( f(x; w_s) ),    w_s ~ q

        and, once `calibrate` was called, p^(1/T) / sum p^(1/T). Several threads may call it, and take turns.

        Args:
            inputs: keyword arguments of the model, which is put in eval mode for the call.
            num_samples: S; 0 is the posterior mean.
        """
        _check_count("num_samples", num_samples)
        if num_samples:
            return tempered(self.sample_proba(inputs, num_samples).mean(0), self.temperatures.average)
        try:
            self._set_eval_mode()
            return tempered(self._probabilities(inputs), self.temperatures.mean)
        finally:
            self._put_back()

    @at_the_mean
    def calibrate(self, batches: Iterable[Mapping[str, Any]], num_samples: int = 10) -> Temperatures:
        """Fit two temperatures on examples that were not trained on; `predict_proba` and what is saved use them.

        Accuracy at the mean is not touched. `DEELBoTrainer.calibrate` takes a dataset, and
        `selection.select(..., calibrate=True)` needs no examples beside those of training.

        Args:
            batches: keyword arguments of the model, with their `labels`; a `DataLoader` for instance.
            num_samples: S, of the averaged probabilities; 0 leaves their temperature at 1.

        Example:
            >>> model = nn.Linear(2, 2)
            >>> posterior = Posterior(model, ["weight", "bias"], num_examples=10)
            >>> batch = {"input": torch.randn(20, 2), "labels": torch.tensor([0, 1] * 10)}
            >>> posterior.calibrate([batch]) == posterior.temperatures
            True
        """
        _check_count("num_samples", num_samples)
        self.temperatures = Temperatures()
        labels, at_mean, averaged = [], [], []
        for batch in batches:
            if "labels" not in batch:
                raise ValueError(f"batches: each needs `labels`; this one has {', '.join(batch)}.")
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            labels.append(batch["labels"])
            at_mean.append(log_of(self.predict_proba(inputs)))
            if num_samples:
                averaged.append(log_of(self.predict_proba(inputs, num_samples)))
        if not labels:
            raise ValueError("batches: there are none; a temperature needs examples that were not trained on.")
        fitted = [fit_temperature(torch.cat(part), torch.cat(labels)) for part in (at_mean, averaged) if part]
        self.temperatures = Temperatures(*fitted)
        return self.temperatures

    @torch.no_grad()
    @at_the_mean
    def calibrated_model(self) -> nn.Module:
        """A copy of the model at the posterior mean, in eval mode, whose own logits are divided by the temperature.

        Its last linear layer is scaled by 1/T. So `pipeline(..., model=posterior.calibrated_model())` gives the
        probabilities of `predict_proba`. It is no posterior mean any more: share it as a model, not as a posterior.

        Example:
            >>> posterior = Posterior(nn.Linear(2, 2), ["weight", "bias"], num_examples=10)
            >>> posterior.temperatures = Temperatures(mean=2.0)
            >>> x = torch.randn(5, 2)
            >>> torch.allclose(2 * posterior.calibrated_model()(x), posterior.model(x))
            True
        """
        if self._is_sharded:
            raise ValueError("calibrated_model: a sharded model cannot be copied. Save the posterior, and load it.")
        model = copy.deepcopy(self.model).eval()
        last = last_linear(model, self._head_names)
        for parameter in last.parameters():
            parameter.div_(self.temperatures.mean)
        return model

    @torch.no_grad()
    @at_the_mean
    def sample_proba(self, inputs: Mapping[str, Any], num_samples: int) -> torch.Tensor:
        """The class probabilities of each of the weight samples 0 .. S - 1, stacked: S x examples x classes.

        Their average is `predict_proba`; what they differ by is the doubt in `uncertainty`.
        """
        _check_count("num_samples", num_samples)
        self._check_statistics(range(num_samples))
        samples = []
        with self._in_sample:  # as `evaluated_at`, with the mode switched once
            try:
                self._set_eval_mode()
                eval_mode = self._undo
                for seed in range(num_samples):
                    self._put_in_sample((seed,), on_cpu=True)
                    self._use_statistics(seed)
                    samples.append(self._probabilities(inputs))
                    self._put_back(eval_mode)
            finally:
                self._put_back()
        return torch.stack(samples)

    def uncertainty(self, inputs: Mapping[str, Any], num_samples: int = 10) -> Uncertainty:
        """The averaged probabilities, how unsure they are, and how much of that is doubt; from one set of samples.

            H[p] = 1/S sum_s H[p_s] + doubt,    p = 1/S sum_s p_s

        see `uncertainty_of`, which also has the formula once `calibrate` was called.

        Args:
            inputs: keyword arguments of the model, which is put in eval mode for the call.
            num_samples: S, at least 2.

        Example:
            >>> posterior = Posterior(nn.Linear(2, 3), ["weight", "bias"], init_sigma=0.5, num_examples=10)
            >>> found = posterior.uncertainty({"input": torch.randn(5, 2)})
            >>> torch.equal(found.total, found.data + found.doubt)
            True
        """
        _check_count("num_samples", num_samples)
        if num_samples < 2:
            raise ValueError(
                f"num_samples: doubt is what weight samples differ by; take at least 2, got {num_samples}. "
                "`predict_proba` gives probabilities of the mean, or of one sample."
            )
        return uncertainty_of(self.sample_proba(inputs, num_samples), self.temperatures.average)

    @torch.no_grad()
    @at_the_mean
    def sample_model(self, seed: int) -> nn.Module:
        """A copy of the model, in eval mode, that holds the weight sample `seed` and its batch-norm statistics."""
        _check_count("seed", seed)
        if self._is_sharded:
            raise ValueError("sample_model: a sharded model cannot be copied. Save the posterior and load it whole.")
        self._check_statistics([seed])
        with self.evaluated_at(seed):
            return copy.deepcopy(self.model)

    @at_the_mean
    def as_prior(self) -> IsotropicPrior:
        """The prior N(w_bar, lambda I) of a next task, over the same backbone, with lambda to be learned there.

        If this posterior has a lambda for each group, the prior keeps how large they are beside each other. Start that
        task's model from w_bar too: load it from where this posterior was saved.
        """
        mean, scales = {name: w.clone() for name, w in self.backbone.items()}, None
        groups = [group for group in self.group_table() if not group["in_head"]]
        if len(groups) > 1:
            of_group = {group["name"]: group["prior_variance"] / self.lambda_.item() for group in groups}
            named = [group for group in self.groups if not group.in_head]
            scales = {name: of_group[group.name] for group in named for name in group.parameters}
        return IsotropicPrior(mean, mean=mean, scales=scales)

    def _probabilities(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        return torch.softmax(_logits(self.model(**inputs)), dim=-1)

    def _check_statistics(self, seeds: Iterable[int]) -> None:
        without = [seed for seed in seeds if seed not in self.sample_statistics]
        if without and batch_norm_layers(self.model):
            have = f"{len(self.sample_statistics)} samples have" if self.sample_statistics else "no sample has"
            raise ValueError(
                f"num_samples: the model has batch norm, but sample {without[0]} has no statistics ({have}); "
                "running statistics would be wrong. Take fewer samples, or call `recompute_batch_norm` first, of the "
                "trainer or, with training inputs, of this posterior."
            )

    # ---- Keeping it ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the model's own state does not hold: rho, lambda, tau and the prior's tensors."""
        lambdas, taus = self.by_part(self.prior_variances)
        own = {"rho": self.rho.detach(), "lambda_": lambdas, "tau": taus}
        if self.curvature is not None:
            own["curvature"] = self.curvature.sums
        return own | {f"prior.{name}": tensor for name, tensor in self.prior.state_dict().items()}

    @torch.no_grad()
    @at_the_mean
    def load_state_dict(self, state: Tensors) -> None:
        """The inverse of `state_dict`, for a posterior over the same model and kind of prior; loads nothing if not."""
        own = self.state_dict()
        wrong = sorted(state.keys() ^ own.keys())
        wrong += [name for name in own.keys() & state.keys() if own[name].shape != state[name].shape]
        if wrong:
            raise ValueError(
                f"The saved posterior does not fit this one: {wrong[0]!r} is missing, unknown or of another shape "
                f"({len(wrong)} such tensors). Use the same model, `prior` and `head_names` as in the saved run."
            )
        for name in own.keys() - {f"prior.{name}" for name in self.prior.state_dict()}:
            own[name].copy_(state[name])
        self.prior.load_state_dict({name: state[f"prior.{name}"] for name in self.prior.state_dict()})
        self._describe_groups()
        self.sample_statistics.clear()
        self.de_elbo, self.temperatures = None, Temperatures()

    # ---- Inside ----------------------------------------------------------------------------------------------------

    def _describe_groups(self) -> None:
        """Note D_g, tr(Sigma_p^-1) and log det Sigma_p of each group."""

        def of_priors(name: str) -> torch.Tensor:
            numbers = [getattr(prior, name) for prior in (self.prior, self.head_prior)]
            return torch.cat([torch.as_tensor(number).to(self.rho.detach()).reshape(-1) for number in numbers])

        self._sizes, self._traces = of_priors("group_sizes"), of_priors("trace_inverse")
        self._log_dets = of_priors("log_det")

    def _resolve_kappa(self, kappa: float | str) -> float | None:
        if kappa == "auto":
            return default_kappa(self.num_parameters, self.num_examples) if self.num_examples else None
        if not (math.isfinite(kappa) and kappa > 0):
            raise ValueError(f'kappa: must be "auto" (D/N) or a positive number, got {kappa}.')
        return float(kappa)

    def ensure_mean(self, caller: str) -> None:
        """With `lock` held: a `RuntimeError` unless the model is the posterior mean, and no other thread trains it.

        Args:
            caller: what it is needed for, which is named in the error.

        Example:
            ```python
            with posterior.lock:
                posterior.ensure_mean("my function")
                logits = posterior.model(**inputs).logits  # no other thread puts a sample into it meanwhile
            ```
        """
        if self._in_sample.locked():
            raise RuntimeError(f"{caller}: {HOLDS_SAMPLE}")
        if self.trained_by not in (None, get_ident()):
            raise RuntimeError(
                f"{caller}: another thread trains this posterior now. Wait until that is over, or use a copy that was "
                "saved: GaussianPosterior.from_pretrained(...)."
            )
        if self._undo:
            self._put_back()

    def _put_in_sample(self, key: tuple[int, ...], on_cpu: bool, reuse: bool = False) -> None:
        """As `sampled` says, until `_put_back`."""
        if self._is_sharded:
            reshard(self.model)
        parameters, sigmas = parameters_by_name(self.model), self.sigmas
        weights = {name: parameter.detach() for name, parameter in parameters.items()}
        # memory for a second set of weights, which every sample uses again
        present = [(w.shape, w.stride(), w.dtype, w.device) for w in self._room.values()]
        if present != [(w.shape, w.stride(), w.dtype, w.device) for w in weights.values()]:
            with torch.inference_mode(False):  # training may use it after a prediction in that mode
                self._room = {name: torch.empty_like(w) for name, w in weights.items()}
            self._last_drawn = None
        if self._is_sharded:  # FSDP2 keeps its weights where they are
            self._copy(weights, self._room)
            means, sample = self._room, weights
        else:
            means, sample = weights, self._room

        def draw(block: Block) -> None:
            draw_sample(sample, means, block, sigmas[block.group], key, on_cpu)

        def point_to(tensors: Tensors) -> None:
            for name, parameter in parameters.items():
                parameter.data = tensors[name]

        def copy_means() -> None:
            reshard(self.model)
            self._copy(means, values_of(parameters_by_name(self.model)))

        is_there = reuse and self._last_drawn == (key, on_cpu)
        self._sampled, self._means, self._sample, self._last_drawn = parameters, means, sample, None
        self._undo = (copy_means if self._is_sharded else partial(point_to, means), *self._undo)
        if not is_there:
            on_all_cores(draw, self._blocks)
        if not self._is_sharded:
            self._last_drawn = key, on_cpu
            point_to(sample)

    def _set_eval_mode(self) -> None:
        """For all modules, until `_put_back`."""
        training = [module for module in self.model.modules() if module.training]

        def put_back() -> None:
            for module in training:
                module.training = True

        if training:
            self._undo = (put_back, *self._undo)
            self.model.eval()

    def _use_statistics(self, seed: int) -> None:
        """Of that weight sample, if there are any, until `_put_back`."""
        if statistics := self.sample_statistics.get(seed):
            use, put_back = ways_between(self.model, statistics)
            self._undo = (put_back, *self._undo)
            use()

    def _put_back(self, until: tuple[Callable[[], None], ...] = ()) -> None:
        """The model is the posterior mean again, in the modes and with the statistics that it had.

        Args:
            until: an earlier `_undo`, to which it goes back.
        """

        def put_back() -> None:
            self._sampled, self._means, self._sample = {}, {}, {}
            while len(self._undo) > len(until):
                self._undo[0]()
                self._undo = self._undo[1:]  # only now: what was interrupted is done again

        try:
            put_back()
        except BaseException:  # a signal, which seldom comes twice: whoever looks at the model itself finds the mean
            put_back()
            raise

    def _copy(self, source: Tensors, target: Tensors) -> None:
        on_all_cores(lambda block: torch._foreach_copy_(block.of(target), block.of(source)), self._blocks)


# every posterior of this process
_posteriors: "WeakSet[Posterior]" = WeakSet()


def _free_locks() -> None:
    """In a child process: what a thread holds that was not forked along would be held for ever."""
    for posterior in _posteriors:
        if posterior.lock.acquire(blocking=False):
            posterior.lock.release()
        else:
            posterior.lock, posterior._in_sample = RLock(), Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_locks)


def _mean(values: torch.Tensor, sizes: int | torch.Tensor) -> torch.Tensor:
    """Over all weights of groups of these sizes; 1 if there is no group."""
    if values.dim() == 0:
        return values
    return (values * sizes).sum() / sizes.sum() if len(values) else values.new_ones(())


def _check_parameters(parameters: Tensors, head_names: frozenset[str]) -> None:
    if not parameters:
        raise ValueError("model: it has no trainable parameter. Set `requires_grad` on those that should be learned.")
    check_sharding(parameters)
    for name, parameter in parameters.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"model: {name!r} is {parameter.dtype}, too coarse to hold noise of size sigma. Load the model with "
                "`dtype=torch.float32`, and use `bf16=True` or `fp16=True` for mixed precision."
            )
    unknown = sorted(head_names - parameters.keys())
    if unknown:
        raise ValueError(f"head_names: {unknown[0]!r} is not a trainable parameter of the model.")


def _check_count(argument: str, value: int) -> None:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{argument}: must be a whole number >= 0, got {value!r}.")


def _logits(outputs: Any) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else outputs["logits"] if "logits" in outputs else outputs[0]
