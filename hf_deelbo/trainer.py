"""A `transformers.Trainer` whose loss is the DE ELBo and which learns its own regularisation strength.

Private methods of `Trainer` that are overridden, each with its reason: `_clip_grad_norm`, `_save`, `_save_checkpoint`,
`_push_from_checkpoint` and `_load_from_checkpoint`.
"""

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import datasets
import torch
from accelerate.utils import broadcast_object_list, send_to_device
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    EvalLoopOutput,
    HubStrategy,
    TrainOutput,
    has_length,
    rotate_checkpoints,
)
from transformers.utils import SAFE_WEIGHTS_NAME, ModelOutput, PushInProgress, logging

from .callbacks import PriorVarianceCallback, TrainingNLL
from .config import SHARD_AT_LOADING, DEELBoConfig, check_count
from .data import class_balanced_indices, column_of_labels, digests_of, in_equal_batches, nothing_dropped, some_of
from .metrics import METRICS
from .objective import DEELBo
from .priors import GaussianPrior
from .sharing.cards import PosteriorCardData, save_card
from .sharing.checkpoints import break_seal, check_whole, newest_whole, seal
from .sharing.files import finish_interrupted
from .sharing.hub import push_folder
from .sharing.models import auto_class_of
from .sharing.posterior_files import read_state, write_posterior
from .sharing.posteriors import GaussianPosterior
from .sharing.priors import load_prior
from .temperature import Temperatures, fit_temperature
from .weights.batch_norm import batch_norm_layers, weights_and_statistics
from .weights.blocks import check_finite
from .weights.parameters import backbone_of, head_parameter_names
from .weights.shards import is_sharded

logger = logging.get_logger(__name__)


class DEELBoTrainer(Trainer):
    """Fine-tunes a classifier by the data-emphasised ELBo, in one run on all the data, with no validation set.

        loss = NLL of the batch at one weight sample + [ KL(q(w) || p(w)) + KL(q(V) || p(V)) ] / (kappa N)

    It takes the arguments of `transformers.Trainer`, and:

    Args:
        args: a `DEELBoConfig`.
        prior: the backbone's prior, over its trainable parameters by name; needed for `args.prior="ptyl"` and in
            place of the one that `args.prior` names.
        elbo_dataset: the training set without augmentation, for `de_elbo` and batch-norm statistics; default is
            `train_dataset` itself.
        compute_loss_func: a likelihood of your own: `(outputs, labels, num_items_in_batch=None)` to the *mean*
            negative log likelihood of the batch's examples.

    Attributes:
        posterior: the `GaussianPosterior`: `sigma`, `rho`, `lambda_`, `tau`, `kappa`, `num_parameters`, ...

    Example:
        ```python
        args = DEELBoConfig("outputs", max_steps=600, learning_rate=0.1)
        trainer = DEELBoTrainer(model, args, train_dataset=train, eval_dataset=test)
        trainer.train()
        trainer.posterior.lambda_, trainer.posterior.tau  # learned
        trainer.de_elbo().value  # compares runs, without a validation set
        ```
    """

    # `compute_loss` returns the mean over a batch, so Trainer divides by the number of accumulated batches
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: nn.Module | None = None,
        args: DEELBoConfig | None = None,
        *trainer_args: Any,
        prior: GaussianPrior | None = None,
        elbo_dataset: Dataset | datasets.Dataset | None = None,
        **trainer_kwargs: Any,
    ):
        args = DEELBoConfig("trainer_output") if args is None else args
        if not isinstance(args, DEELBoConfig):
            raise TypeError(f"args: must be a DEELBoConfig, got {type(args).__name__}; it takes the same arguments.")
        self._given_prior, self._elbo_dataset = prior, elbo_dataset
        self._held_out: Any = None
        self._posterior: GaussianPosterior | None = None
        self._evaluations: dict[str, _Evaluation] = {}
        self._batch_weight = self._mean_batch_size = 1.0
        self._running_statistics: list[torch.Tensor] = []
        self._statistics_of_before: list[torch.Tensor] = []  # the step
        self.training_nll = TrainingNLL(args.device)
        super().__init__(model, args, *trainer_args, **trainer_kwargs)
        self.model_accepts_loss_kwargs = False  # `loss_is_scaled_for_ga` before transformers 5.19
        self._refuse_unsupported()
        self.add_callback(PriorVarianceCallback(self))
        if self.train_dataset is not None:
            self._keep_batch_within_dataset()
            _ = self.posterior  # built now, so that what does not fit is said now

    # ---- The posterior ---------------------------------------------------------------------------------------------

    @property
    def posterior(self) -> GaussianPosterior:
        """The posterior over the model's trainable parameters; its mean is the model itself."""
        if self._posterior is None:
            args, head_names = self.args, head_parameter_names(self.model, self.args.head_names)
            prior = self._given_prior
            if prior is None:
                where = {"revision": args.prior_revision, "token": args.hub_token}
                prior = load_prior(args.prior, backbone_of(self.model, head_names), args.prior_name_or_path, **where)
            self._posterior = GaussianPosterior(
                self.model,
                head_names,
                prior,
                grouping=args.grouping,
                sigma_update=args.sigma_update,
                init_sigma=args.init_sigma,
                kappa=args.kappa,
                num_examples=self._num_train_examples(),
            )
        return self._posterior

    @contextmanager
    def _turn(self, caller: str) -> Iterator[None]:
        """At the posterior mean, while other threads wait; there may be no posterior where nothing is trained."""
        if self._posterior is None:
            yield
            return
        with self._posterior.lock:
            self._posterior.ensure_mean(caller)
            yield

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model, and with it a new posterior."""
        self._posterior = None
        return super().call_model_init(trial)

    # ---- Training --------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """`Trainer`'s; `resume_from_checkpoint=True` takes the newest checkpoint in `output_dir` that is whole."""
        if resume_from_checkpoint is True:
            found = [newest_whole(self.args.output_dir) if self.is_world_process_zero() else None]
            [resume_from_checkpoint] = broadcast_object_list(found)
            if resume_from_checkpoint is None:
                raise ValueError(f"resume_from_checkpoint: there is no whole checkpoint in {self.args.output_dir!r}.")
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._running_statistics = self._statistics_of_before = []
            if self._posterior is not None:
                self._posterior.trained_by = None

    def begin_training(self) -> None:
        """Called as training begins: from now on, until `train` returns, other threads are refused."""
        with self.posterior.lock:
            self.posterior.ensure_mean("train")
            self.posterior.trained_by = get_ident()
        self.training_nll.restart()
        self._running_statistics = [b for layer in batch_norm_layers(self.model).values() for b in layer.buffers()]

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimiser of `Trainer` or your own, without weight decay; with `sigma_update="optimizer"` it has rho."""
        optimizer = super().create_optimizer(model)
        if decays := {group["weight_decay"] for group in optimizer.param_groups if group.get("weight_decay")}:
            logger.warning(
                f"optimizer: its weight_decay of {max(decays)} is set to 0. The KL to the prior is the decay, and its "
                "strength is learned."
            )
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0
        rho = self.posterior.rho
        is_there = any(parameter is rho for group in optimizer.param_groups for parameter in group["params"])
        if self.args.sigma_update == "optimizer" and not is_there:
            if self._is_sharded():  # optimisers do not take sharded and whole parameters at once
                optimizer.add_param_group(optimizer.param_groups[0] | {"params": [rho]})
            else:
                optimizer.param_groups[0]["params"].append(rho)
        return optimizer

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, Any]:
        """The batches of one optimiser step, whose sizes are noted: `Trainer` averages them, so smaller weigh less.

        So are the running statistics of batch norm, which come back if the step raises.
        """
        self._statistics_of_before = [buffer.clone() for buffer in self._running_statistics]
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        sizes = [find_batch_size(batch) or 1 for batch in batches]
        self._mean_batch_size = sum(sizes) / max(1, len(sizes))
        return batches, num_items

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Forward and backward at w = w_bar + sigma * eps, then the gradients of w_bar and rho; w_bar is back after.

        eps is drawn from (seed, step): the same for all batches of a step, on every process, and after a resume. The
        later batches of a step find the sample where the first one left it.
        """
        self._evaluations.clear()
        self._batch_weight = (find_batch_size(inputs) or 1) / self._mean_batch_size
        ends_step, scaler = self.accelerator.sync_gradients, self.accelerator.scaler
        try:
            with self.posterior.sampled(self.args.seed, self.state.global_step, reuse=True):
                loss = super().training_step(model, inputs, num_items_in_batch)
                self._batch_weight = 1.0
                finite = torch.isfinite(loss)
                if ends_step:
                    scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.args.device))
                    product = self.posterior.complete_gradients(scale)
                    if scaler is None:  # with a scaler an overflow is expected, and skips the step
                        finite &= torch.isfinite(product)  # <g, eps> is as finite as g
            self.training_nll.add(self._last_nll, self.current_gradient_accumulation_steps, ends_step)
            if not finite:  # the host waits for it here, as it would right after for `Trainer`'s own look at the loss
                self._raise_non_finite(loss)
        except BaseException:
            for buffer, before in zip(self._running_statistics, self._statistics_of_before, strict=True):
                buffer.copy_(before)
            raise
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """In train mode the DE ELBo as a loss, NLL + KL / (kappa N); in eval mode the NLL alone.

        The NLL is the mean over the batch. The KL is that of the present lambda and tau, with as much of its weight as
        is in force (`kl_warmup_epochs`); its gradient is added in closed form by `training_step`.
        """
        if model.training and (self.state.epoch or 0) < 1:  # each example once
            self._check_labels(inputs.get("labels"))
        nll, outputs = super().compute_loss(model, dict(inputs), return_outputs=True)
        loss = nll = nll.mean()  # over the devices of a `DataParallel` model
        if model.training:
            nll, posterior = nll * self._batch_weight, self.posterior
            self._last_nll = nll.detach()
            loss = nll + posterior.kl_weight * (posterior.kl.backbone + posterior.kl.head).to(nll.dtype)
            if self.compute_loss_func is not None and not hasattr(Trainer, "loss_is_scaled_for_ga"):
                loss = loss / self.current_gradient_accumulation_steps  # `Trainer` took it for scaled, before 5.19
        return (loss, outputs) if return_outputs else loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Private, as `Trainer` clips over the model's parameters alone: the paper's way has rho among them."""
        if self.args.sigma_update != "optimizer":
            return super()._clip_grad_norm(model)
        return self.accelerator.clip_grad_norm_([*model.parameters(), self.posterior.rho], self.args.max_grad_norm)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Beside the loss: the NLL since the last log, KL, J of it, and lambda, tau and sigma."""
        if "loss" in logs:
            posterior, nll = self.posterior, self.accelerator.gather(self.training_nll.take()).mean().item()
            kl_backbone, kl_head = float(posterior.kl.backbone), float(posterior.kl.head)
            logs |= {
                "nll": nll,
                "kl_backbone": kl_backbone,
                "kl_head": kl_head,
                "de_elbo": DEELBo(nll, kl_backbone, kl_head, posterior.kappa, posterior.num_examples).value,
                **self._learned(),
            }
        super().log(logs, start_time)

    def _learned(self) -> dict[str, float]:
        posterior = self.posterior
        return {"lambda": float(posterior.lambda_), "tau": float(posterior.tau), "sigma": float(posterior.sigma)}

    def _raise_non_finite(self, loss: torch.Tensor) -> None:
        self.model.zero_grad()
        learned = ", ".join(f"{name}={value:.4g}" for name, value in self._learned().items())
        raise FloatingPointError(
            f"Step {self.state.global_step + 1}: the loss ({float(loss):.4g}) or its gradient is not finite, with "
            f"{learned}. The model is where the step started from. Try a smaller learning_rate than "
            f"{self.args.learning_rate}, and look for bad values in the inputs."
        )

    def _check_labels(self, labels: torch.Tensor | None) -> None:
        if labels is None or self.compute_loss_func is not None:
            return
        num_labels = getattr(getattr(self.model, "config", None), "num_labels", None)
        if labels.is_floating_point() or labels.dim() != 1 or num_labels == 1:
            raise ValueError(
                f"labels: expected one class index per example, got {labels.dtype} of shape {tuple(labels.shape)} for "
                f"a head of {num_labels} outputs. For another likelihood (several labels, regression, tokens) pass "
                "`compute_loss_func`, which returns the mean negative log likelihood of the examples."
            )
        lowest, highest = int(labels.min()), int(labels.max())
        if lowest < 0 or (num_labels is not None and highest >= num_labels):
            raise ValueError(
                f"labels: found {lowest if lowest < 0 else highest}, but the head has {num_labels} classes, 0 to "
                f"{num_labels - 1 if num_labels else '?'}. Load the model with the dataset's `num_labels`."
            )

    def _num_train_examples(self) -> int | None:
        if self.args.num_train_examples is not None or self.train_dataset is None:
            return self.args.num_train_examples
        if not has_length(self.train_dataset):
            raise ValueError(
                "num_train_examples: the training set does not tell its length, and the objective needs N. Set "
                "`num_train_examples` to the number of different examples it yields."
            )
        if len(self.train_dataset) == 0:
            raise ValueError("train_dataset: it is empty; there is nothing to learn from.")
        return len(self.train_dataset)

    def _keep_batch_within_dataset(self) -> None:
        """min(batch size, N): a batch larger than the training set would be dropped as incomplete."""
        args = self.args
        if not (args.dataloader_drop_last and has_length(self.train_dataset)):
            return
        most = max(1, len(self.train_dataset) // (args.world_size * max(1, args.n_gpu)))
        if args.per_device_train_batch_size > most:
            logger.warning_once(f"The training set is smaller than a batch: per_device_train_batch_size={most}.")
            args.per_device_train_batch_size = most
            self._train_batch_size = args.train_batch_size

    def _refuse_unsupported(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # by accelerate's configuration
            wanted = "FSDP" if self.is_fsdp_enabled else "DeepSpeed"
            raise ValueError(f"{wanted}: is not supported. {SHARD_AT_LOADING}")
        if self._is_sharded() and not getattr(self, "is_distributed_loading_by_transformers", False):
            raise ValueError(f"model: it is sharded in a way that `Trainer` does not know. {SHARD_AT_LOADING}")
        if self._is_sharded() and self.args.push_to_hub and self.args.hub_strategy != HubStrategy.END:
            raise ValueError(
                'hub_strategy: must be "end" for a sharded model, which is not pushed in training; got '
                f"{self.args.hub_strategy.value!r}."
            )
        if self.is_model_parallel:
            raise ValueError("model: it is spread over several devices; load it on one, without `device_map`.")

    def _is_sharded(self) -> bool:
        return self.model is not None and is_sharded(self.model)

    # ---- The DE ELBo of what was learned ---------------------------------------------------------------------------

    def de_elbo(
        self,
        dataset: Dataset | datasets.Dataset | None = None,
        num_samples: int | None = None,
        num_examples: int | None = None,
    ) -> DEELBo:
        """J at the posterior, at the optimal lambda and tau, by Monte Carlo over weight samples.

            J = kappa * N * 1/S sum_s [ mean_i log p(y_i | w_s, V_s) ] - KL(q(w) || p(w)) - KL(q(V) || p(V))

        The highest J chooses among runs, such as those of several learning rates, without a validation set.

        Args:
            dataset: where to take the mean over examples; default is the training set, without augmentation if the
                trainer was given an `elbo_dataset`.
            num_samples: S; default is `args.num_elbo_samples`.
            num_examples: take the mean over at most so many training examples, class-balanced, for a rough J.

        Returns:
            A `DEELBo`: J is its `value`.
        """
        num_samples = self.args.num_elbo_samples if num_samples is None else num_samples
        check_count("num_samples", num_samples)
        check_count("num_examples", num_examples)
        if dataset is not None and num_examples is not None:
            raise ValueError("num_examples: takes examples of the training set; give it or a `dataset`, not both.")
        is_training_set = dataset is None and num_examples is None
        name = self._name_of_training_inputs() if dataset is None else "dataset"
        dataset, posterior = self._training_inputs() if dataset is None else dataset, self.posterior
        _ = posterior.kl_weight  # says so if N is not known
        with posterior.lock:  # J is of one posterior
            posterior.update_prior_variances()
            self.recompute_batch_norm(num_samples)
            batches, num_own = self._share_of(dataset, self._balanced(dataset, num_examples))
            samples = self._progress(range(num_samples), "DE ELBo")
            nlls = [self._mean_nll(batches, num_own, seed, name) for seed in samples]
            nlls = torch.tensor(nlls, dtype=torch.float64)
            de_elbo = DEELBo(
                nll=nlls.mean().item(),
                kl_backbone=float(posterior.kl.backbone),
                kl_head=float(posterior.kl.head),
                kappa=posterior.kappa,
                num_examples=posterior.num_examples,
                nll_standard_error=(nlls.std() / math.sqrt(num_samples)).item() if num_samples > 1 else math.nan,
            )
            if is_training_set:
                posterior.de_elbo = de_elbo
        return de_elbo

    @torch.no_grad()
    def _mean_nll(self, batches: DataLoader, num_own: float, seed: int, name: str) -> float:
        """Mean over all examples, each once: every process takes its share, without padding.

        Args:
            batches, num_own: of `_share_of`.
            seed: the weight sample.
            name: of the dataset, for an error.
        """
        totals = torch.zeros(2, dtype=torch.float64)
        with self.posterior.evaluated_at(seed):
            for inputs in batches:
                count = find_batch_size(inputs) if totals[1] < num_own else 0
                with self.accelerator.autocast():
                    nll = self.compute_loss(self.model, send_to_device(inputs, self.args.device))
                if not math.isfinite(nll.item()):
                    _check_inputs(inputs, name)
                totals += torch.tensor([nll.item() * count, count], dtype=torch.float64)
        total, count = self.accelerator.reduce(totals.to(self.args.device), "sum").tolist()
        return total / count

    def _share_of(self, dataset: Any, indices: list[int] | None) -> tuple[DataLoader, float]:
        """The batches that this process evaluates, and how many of their examples count.

        All have the same number of batches, as a sharded model needs all of them in each forward pass. One with fewer
        examples than batches gets another one, which does not count.
        """
        world_size, rank = self.args.world_size, self.args.process_index
        if world_size == 1 or not has_length(dataset):
            return self._batches(dataset, indices), math.inf
        indices = range(len(dataset)) if indices is None else indices
        own = list(indices[rank::world_size])
        num_batches = math.ceil(math.ceil(len(indices) / world_size) / self.args.eval_batch_size)
        rows = own if len(own) >= num_batches else [*own, indices[0]]
        return self._batches(dataset, rows, num_batches), len(own)

    def recompute_batch_norm(self, num_samples: int) -> None:
        """Give the weight samples 0 .. num_samples - 1 batch-norm statistics of their own, over training inputs.

        `de_elbo`, `evaluate` and `predict` do so by themselves; nothing is done for a model without batch norm or with
        `recompute_batch_norm=False`.
        """
        if not (self.args.recompute_batch_norm and batch_norm_layers(self.model)):
            return
        dataset = self._training_inputs()
        loader = self._batches(dataset, self._balanced(dataset, self.args.num_batch_norm_examples))
        inputs = _Inputs(loader, self.label_names, self.args.device)
        try:
            with self.accelerator.autocast():
                self.posterior.recompute_batch_norm(inputs, num_samples)
        except FloatingPointError:
            for batch in inputs:
                _check_inputs(batch, self._name_of_training_inputs())
            raise

    # ---- Evaluation ------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """`Trainer`'s loop, at the posterior mean or (`num_eval_samples`) with averaged probabilities."""
        num_samples = self.args.num_eval_samples
        with self._turn("evaluation_loop"):
            if num_samples:
                self.recompute_batch_norm(num_samples)
            output = super().evaluation_loop(*args, **kwargs)
        self._evaluations["average" if num_samples else "mean"] = _Evaluation(output, num_samples)
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """NLL and logits at the posterior mean, or of the probabilities averaged over weight samples.

        In the second case the logits are log( 1/S sum_s softmax(logits_s) ), whose softmax is the average. Both are
        divided by the temperature that `calibrate` found. The NLL leaves out the examples that fill up the last batch
        of several processes.
        """
        num_samples, num_own = self.args.num_eval_samples, self._num_own_examples(inputs)
        step = partial(super().prediction_step, model, ignore_keys=ignore_keys)
        temperatures = self.posterior.temperatures
        if num_samples == 0:
            is_whole = num_own is None and temperatures.mean == 1
            loss, logits, labels = step(inputs, prediction_loss_only=prediction_loss_only and is_whole)
            if is_whole:
                return (loss, None, None) if prediction_loss_only else (loss, logits, labels)
            average = _first(logits) / temperatures.mean
            logits = (average, *logits[1:]) if isinstance(logits, (tuple, list)) else average
        else:
            log_probabilities = []
            for seed in range(num_samples):
                with self.posterior.evaluated_at(seed):
                    loss, logits, labels = step(dict(inputs), prediction_loss_only=False)
                log_probabilities.append(torch.log_softmax(_first(logits).float(), dim=-1))
            log_average = torch.logsumexp(torch.stack(log_probabilities), dim=0) - math.log(num_samples)
            logits = average = log_average / temperatures.average
        if loss is not None:  # of a process with none of its own `Trainer` drops it
            loss = self._nll_of(average[: num_own or None], labels[: num_own or None])
        return (loss, None, None) if prediction_loss_only else (loss, logits, labels)

    def _num_own_examples(self, inputs: dict[str, Any]) -> int | None:
        """How many examples of a batch are not there to fill it up; `None` if all.

        `Trainer` gathers one loss per example, rank by rank, and keeps the first `remainder` of the last batch.
        """
        loader = self.accelerator.gradient_state
        if self.args.world_size == 1 or not loader.end_of_dataloader or loader.remainder <= 0:
            return None
        batch_size = find_batch_size(inputs)
        return min(max(0, loader.remainder - self.args.process_index * batch_size), batch_size)

    def _nll_of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.compute_loss_func is not None:
            return self.compute_loss_func(ModelOutput(logits=logits), labels, num_items_in_batch=None)
        return nn.functional.cross_entropy(logits, labels)

    def get_eval_dataloader(self, eval_dataset: str | Dataset | None = None) -> DataLoader:
        """`Trainer`'s, with every example: `dataloader_drop_last` is for training."""
        with nothing_dropped(self.args):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        """`Trainer`'s, with every example: `dataloader_drop_last` is for training."""
        with nothing_dropped(self.args):
            return super().get_test_dataloader(test_dataset)

    # ---- Calibration -----------------------------------------------------------------------------------------------

    def calibrate(self, dataset: Dataset | datasets.Dataset, num_samples: int | None = None) -> Temperatures:
        """Fit the temperatures of the posterior's predictions on rows that were not trained on.

        They are part of `posterior` until it is trained further: `evaluate`, `predict`, `predict_proba`, cards and
        saved files have them. Test on other rows than these. Without rows to spare, see `selection.select`.

        Args:
            dataset: rows with labels, as for `evaluate`. If more than a tenth are the same as rows of the training
                set (without augmentation), they are refused.
            num_samples: S, of the averaged probabilities; default is `args.num_elbo_samples`.

        Example:
            ```python
            trainer.train()
            trainer.calibrate(validation)
            trainer.evaluate(test)
            ```
        """
        num_samples = self.args.num_elbo_samples if num_samples is None else num_samples
        check_count("num_samples", num_samples)
        if self.compute_loss_func is not None:
            raise ValueError("compute_loss_func: a temperature is of class probabilities, not of another likelihood.")
        if dataset is not self._held_out:
            self._refuse_training_rows(dataset)
        return self._fit_temperatures(dataset, num_samples)

    def _fit_temperatures(self, dataset: Any, num_samples: int) -> Temperatures:
        self.posterior.temperatures = Temperatures()
        as_asked, fitted = self.args.num_eval_samples, []
        try:
            for self.args.num_eval_samples in (0, num_samples):
                output = self.predict(dataset)
                logits = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
                fitted.append(fit_temperature(torch.as_tensor(logits), torch.as_tensor(output.label_ids)))
        finally:
            self.args.num_eval_samples = as_asked
        self._evaluations.clear()
        self.posterior.temperatures = Temperatures(*fitted)
        return self.posterior.temperatures

    def _refuse_training_rows(self, dataset: Any) -> None:
        trained_on = self.train_dataset if self._elbo_dataset is None else self._elbo_dataset
        if trained_on is None or not (has_length(dataset) and has_length(trained_on)):
            return
        known = set(digests_of(trained_on, without=self.label_names))
        count = sum(digest in known for digest in digests_of(dataset, without=self.label_names))
        what = f"{count} of its {len(dataset)} rows are in the training set, where the model is right too often"
        if count > len(dataset) / 10:
            raise ValueError(
                f"dataset: {what} to tell how sure it may be. Give rows that were held out, or let `selection.select("
                "..., calibrate=True)` hold some out for a while."
            )
        if count:
            logger.warning(f"dataset: {what}; leave them out.")

    def hold_out(self, indices: Sequence[int]) -> Any:
        """Take rows out of the training set before it is trained; N follows. Returned without augmentation.

        Args:
            indices: of the rows.
        """
        dataset, augmented = self._training_inputs(), self.train_dataset
        if self.state.global_step:
            raise RuntimeError("hold_out: the trainer has trained on these rows; call it before.")
        if self.args.num_train_examples is not None or not has_length(augmented) or len(dataset) != len(augmented):
            raise ValueError(
                "train_dataset: rows can be held out of one with a length, of which `elbo_dataset` has the same rows, "
                "and without `num_train_examples`."
            )
        rest = sorted(set(range(len(dataset))) - set(indices))
        self.train_dataset = some_of(augmented, rest)
        self._elbo_dataset = some_of(dataset, rest)
        self._posterior = None
        self._keep_batch_within_dataset()
        _ = self.posterior
        self._held_out = some_of(dataset, list(indices))
        return self._held_out

    # ---- Passes over the training inputs ---------------------------------------------------------------------------

    def _training_inputs(self) -> Any:
        dataset = self.train_dataset if self._elbo_dataset is None else self._elbo_dataset
        if dataset is None:
            raise ValueError("dataset: the trainer has no `train_dataset` to compute this on; give it one.")
        return dataset

    def _name_of_training_inputs(self) -> str:
        return "train_dataset" if self._elbo_dataset is None else "elbo_dataset"

    def _balanced(self, dataset: Any, most: int | None) -> list[int] | None:
        """Which of the examples to take, at most so many, class-balanced, always the same; `None` for all."""
        if most is None or not has_length(dataset) or len(dataset) <= most:
            return None
        return class_balanced_indices(column_of_labels(dataset) or [0] * len(dataset), most, self.args.seed)

    def _batches(self, dataset: Any, indices: list[int] | None = None, num_batches: int | None = None) -> DataLoader:
        """In order, all on each process."""
        loader = self.get_test_dataloader(dataset)
        return in_equal_batches(loader, self.args.eval_batch_size, indices, num_batches)

    def _progress(self, items: Iterable, description: str) -> Iterable:
        disable = self.args.disable_tqdm or not self.is_local_process_zero()
        return tqdm(items, desc=description, disable=disable, leave=False)

    # ---- Sharing it ------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the posterior, for `GaussianPosterior.from_pretrained` and, its mean, for transformers; see `hub`."""
        if not _internal_call:
            self._prepare_to_share()
        super().save_model(output_dir, _internal_call)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the posterior with its card to `output_dir`, and publish that as one commit of `hub_model_id`.

        Args:
            commit_message, blocking, token, revision: as for `Trainer`.
            **kwargs: for `create_model_card`.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = self.args.hub_token if token is None else token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self._finish_current_push()  # files must not change while they are uploaded
        self._prepare_to_share()
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**kwargs)
        return self._push_output_dir(commit_message, token=token, revision=revision, run_as_future=not blocking)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Private, as `Trainer`'s pushes a fixed list of files, without the posterior's: the same files as at the end.

        With them goes the checkpoint if `hub_strategy` says so.
        """
        self._seal(checkpoint_folder)
        args, checkpoint = self.args, Path(checkpoint_folder)
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if not args.hub_always_push and self.push_in_progress is not None and not self.push_in_progress.is_done():
            return
        self._finish_current_push()  # files must not change while they are uploaded
        self.callback_handler.on_push_begin(args, self.state, self.control)
        self._prepare_to_share()
        self.save_model(_internal_call=True)
        self.create_model_card()
        with_checkpoint = args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
        path_in_repo = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else checkpoint.name
        files = [path for path in checkpoint.iterdir() if path.is_file()] if with_checkpoint else []
        also = {f"{path_in_repo}/{path.name}": path for path in files}
        job = self._push_output_dir(
            f"Training in progress, step {self.state.global_step}", token=args.hub_token, also=also, run_as_future=True
        )
        job.add_done_callback(self._warn_of_failed_push)
        self.push_in_progress = PushInProgress([job])

    def _warn_of_failed_push(self, job: Future) -> None:
        if (error := job.exception()) is not None:
            logger.warning(f"A push to {self.hub_model_id!r} failed and is not repeated: {error}")

    def _push_output_dir(self, commit_message: str, revision: str | None = None, **kwargs: Any) -> Any:
        revision = self.args.hub_revision if revision is None else revision
        return push_folder(
            self.args.output_dir,
            self.hub_model_id,
            commit_message=commit_message,
            private=self.args.hub_private_repo,
            revision=revision,
            **kwargs,
        )

    def _prepare_to_share(self) -> None:
        """Whoever gets the posterior has no training inputs to compute batch-norm statistics from."""
        if self.train_dataset is not None or self._elbo_dataset is not None:
            self.recompute_batch_norm(self.args.num_saved_samples)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        finetuned_from: str | None = None,
        dataset: str | list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the posterior's card, `README.md` of `output_dir`; what users wrote there is kept.

        Args:
            language, license: as the Hub spells them.
            finetuned_from: the base model, if the model does not tell it.
            dataset: what it was trained on, an id on the Hub or a name.
            **kwargs: any attribute of `sharing.cards.PosteriorCardData`, or what `Trainer` knows and we do not.
        """
        if not self.is_world_process_zero():
            return
        if auto_class_of(self.model) is None:  # PEFT and plain modules; `from_pretrained` could not load it
            super().create_model_card(language=language, license=license, finetuned_from=finetuned_from, **kwargs)
            return
        named = {
            "language": language,
            "license": license,
            "base_model": finetuned_from,
            "dataset_name": dataset[0] if isinstance(dataset, (list, tuple)) else dataset,
        }
        known = {part.name for part in fields(PosteriorCardData)}
        given = {name: value for name, value in (kwargs | named).items() if value is not None and name in known}
        save_card(self.args.output_dir, replace(self.card_data(), **given))

    def card_data(self) -> PosteriorCardData:
        """What the model card tells, as far as the trainer knows it."""
        args = self.args
        average = self._evaluations.get("average")
        measured_on = next(iter(self._evaluations.values()), None)
        data = self.posterior.card_data()
        return replace(
            data,
            prior=args.prior if self._given_prior is None else data.prior,
            metrics={name: evaluation.metrics for name, evaluation in self._evaluations.items()},
            num_samples=average.num_samples if average else 0,
            num_test_examples=measured_on and measured_on.num_examples,
            training={
                "sigma starts at": args.init_sigma,
                "learning rate": args.learning_rate,
                "steps": self.state.global_step,
                "batch size": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
                "optimizer": f"{args.optim.value} ({args.optim_args})" if args.optim_args else args.optim.value,
                "schedule": args.lr_scheduler_type.value,
                "gradient norm clipped at": args.max_grad_norm,
                "seed": args.seed,
            },
            repo_id=self.hub_model_id,
        )

    # ---- Checkpoints -----------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint: str) -> None:
        """Load the weights, the posterior and the logs of a checkpoint, to use them without training on."""
        self.load_weights(checkpoint)
        self.state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))
        self.posterior.kl_annealing = 1.0
        self.posterior.update_variances(growth=0.0)  # as when training ended there

    def load_weights(self, checkpoint: str) -> None:
        """Load the weights and the posterior of a checkpoint; sigma, lambda and tau are what they were there."""
        self._load_from_checkpoint(checkpoint)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Private, as every save comes here: `Trainer`'s files and the posterior's, all or none, and no pickle."""
        if not (self.args.should_save or self._is_sharded()):  # since transformers 5.23 every process comes here
            return
        with self.posterior.new_files_of(output_dir or self.args.output_dir) as new:
            super()._save(str(new), state_dict)
            (new / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            write_posterior(self.posterior, new)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Private, as the list of files that makes a checkpoint count must be there before older ones are removed."""
        args, run_dir = self.args, self._get_output_dir(trial)
        checkpoint = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if args.should_save:
            break_seal(checkpoint)
        limit, args.save_total_limit = args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            args.save_total_limit = limit
        if not args.push_to_hub:  # else the push, which is before this, has done it
            self._seal(checkpoint)
        if args.should_save:
            rotate_checkpoints(run_dir, limit, self.state.best_model_checkpoint, use_mtime=True)

    def _seal(self, checkpoint: str) -> None:
        self.accelerator.wait_for_everyone()  # each process writes the state of its own random numbers
        if self.args.should_save:
            seal(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Private, as resuming comes here: with the posterior, and weights that were saved under other names too."""
        finish_interrupted(resume_from_checkpoint)
        check_whole(resume_from_checkpoint)
        state = read_state(resume_from_checkpoint)  # raises before the model is touched
        with self._turn("load_checkpoint"):
            if self._has_other_names(resume_from_checkpoint):
                loaded = type(self.model).from_pretrained(resume_from_checkpoint, dtype=self.model.dtype)
                self.model.load_state_dict(loaded.state_dict())
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)
            check_finite(weights_and_statistics(self.model), resume_from_checkpoint)
            self.posterior.load_state_dict(state)

    def _has_other_names(self, checkpoint: str) -> bool:
        """Whether `save_pretrained` wrote the weights under the names of the original architecture.

        It does for ViT, among others. `Trainer` looks for the model's present names, does not find them, and goes on
        from what the model happens to hold, with a warning; `from_pretrained` translates them.
        """
        path = os.path.join(checkpoint, SAFE_WEIGHTS_NAME)
        if not isinstance(self.model, PreTrainedModel) or not os.path.isfile(path):
            return False
        with safe_open(path, framework="pt") as file:
            return not set(file.keys()) <= self.model.state_dict().keys()


def _first(logits: Any) -> torch.Tensor:
    return logits[0] if isinstance(logits, (tuple, list)) else logits


def _check_inputs(inputs: dict[str, Any], name: str) -> None:
    for column, values in inputs.items():
        is_number = isinstance(values, torch.Tensor) and values.is_floating_point()
        if is_number and not torch.isfinite(values).all():
            raise ValueError(
                f"{name}: {column!r} has values that are nan or infinite. Repair or remove such examples."
            )


class _Inputs:
    """Batches on the device, without labels, any number of times."""

    def __init__(self, loader: DataLoader, label_names: Iterable[str], device: torch.device):
        self.loader, self.label_names, self.device = loader, frozenset(label_names), device

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            inputs = {name: value for name, value in batch.items() if name not in self.label_names}
            yield send_to_device(inputs, self.device)


class _Evaluation:
    """Metrics of an evaluation, without the prefix of its dataset."""

    def __init__(self, output: EvalLoopOutput, num_samples: int):
        found = {name.partition("_")[2]: value for name, value in output.metrics.items()}
        if "loss" in found:  # it is the NLL
            found.setdefault("nll", found["loss"])
        self.metrics = {name: float(found[name]) for name in METRICS if name in found}
        self.num_samples, self.num_examples = num_samples, output.num_samples
