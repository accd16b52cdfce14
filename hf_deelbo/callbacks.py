"""When things happen during training."""

import math
import os
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SchedulerType, has_length
from transformers.utils import logging

from .groups import table_lines
from .objective import kl_annealing, sigma_growth
from .priors import checksum
from .sharing.priors import LowRankPrior
from .swag import SWAGMoments
from .weights.batch_norm import batch_norm_layers, compute_statistics
from .weights.parameters import backbone_of, head_parameter_names

logger = logging.get_logger(__name__)

# whether training stood still is judged by the mean NLL of so many steps, the first and the last ones
STEPS_TO_COMPARE = 10
SWAG_FILE = "swag.safetensors"
# the others end at a learning rate near zero, where the weights no longer move
SWAG_SCHEDULES = ("constant", "constant_with_warmup", "cosine_with_restarts")


class PriorVarianceCallback(TrainerCallback):
    """Sets sigma, lambda and tau to their optimum before each optimiser step, and when training ends.

    Says so if at the end the prior holds the weights where they were. `DEELBoTrainer` adds it by itself.

    Args:
        trainer: whose posterior to update.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self._nlls: list[torch.Tensor] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A new training."""
        self._nlls.clear()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """sigma*, lambda* and tau* at the w_bar that the step starts from."""
        posterior = self.trainer.posterior
        epochs = (state.global_step + 1) * examples_of_a_step(args) / posterior.num_examples
        posterior.kl_annealing = kl_annealing(epochs, args.kl_warmup_epochs)
        posterior.update_variances(sigma_growth(state.global_step / state.max_steps))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the NLL of the first and the last steps."""
        self._nlls.append(self.trainer.last_nll)
        if len(self._nlls) > 2 * STEPS_TO_COMPARE:
            del self._nlls[STEPS_TO_COMPARE]

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """sigma*, lambda* and tau* at what was learned."""
        posterior = self.trainer.posterior
        posterior.kl_annealing = 1.0
        posterior.update_variances(growth=0.0)
        if self.trainer.is_world_process_zero():
            logger.info("\n".join(["What was learned:", *table_lines(posterior.group_table())]))
        if state.global_step >= state.max_steps:  # not where it was stopped early
            self._warn_if_the_prior_holds(args)

    def _warn_if_the_prior_holds(self, args: TrainingArguments) -> None:
        if len(self._nlls) < 2 * STEPS_TO_COMPARE or not self.trainer.is_world_process_zero():
            return
        posterior = self.trainer.posterior
        first, last = (float(torch.stack(nlls).mean()) for nlls in _halves(self._nlls))
        sigma, lambda_ = float(posterior.sigma), float(posterior.lambda_)
        if last < 0.97 * first or lambda_ > 1.1 * sigma**2:
            return
        if args.sigma_update == "optimizer":
            advice = 'set sigma_update="closed-form", or start sigma higher (init_sigma=1e-2) and use SGD at 0.1'
        elif args.kappa != "auto":
            advice = 'leave kappa at "auto", which is D/N'
        else:
            advice = f"train longer, or with a larger learning_rate than {args.learning_rate}"
        logger.warning(
            f"The prior holds the weights: the NLL of training stood still ({first:.4g}, at the end {last:.4g}), and "
            f"lambda={lambda_:.3g} is no more than sigma^2, with kappa={posterior.kappa:.4g} and sigma={sigma:.3g}. "
            f"To let them learn, {advice}."
        )


def examples_of_a_step(args: TrainingArguments) -> int:
    """How many an optimiser step takes, over all processes."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


def _halves(items: list) -> tuple[list, list]:
    return items[: len(items) // 2], items[len(items) // 2 :]


class SWAGCallback(TrainerCallback):
    """Collects the backbone's weights while any `Trainer` trains, and makes PTYL's prior of them (SWAG).

    Give it a source task and a learning rate that keeps the weights moving (`lr_scheduler_type="constant"`). The
    moments are saved with each checkpoint, in `swag.safetensors`, and a run that resumes in the same `output_dir`
    finds them; for a checkpoint that is elsewhere, call `load_checkpoint` before `train`.

    Args:
        num_deviations: K >= 2, the rank of the prior.
        collect_every: `"epoch"`, or a number of optimiser steps.
        start: collect after this part of the training (0 <= start < 1), or after this number of steps (an int).
        head_names: modules or parameters that are the head, which is not collected; found by itself if not given.
        eps: what the prior adds to its diagonal.

    Attributes:
        moments: the `SWAGMoments` so far.

    Example:
        ```python
        swag = SWAGCallback(num_deviations=5)
        args = TrainingArguments("source", num_train_epochs=20, lr_scheduler_type="constant")
        trainer = Trainer(model, args, train_dataset=source, callbacks=[swag])
        trainer.train()
        swag.load_mean(trainer)  # the model is the SWAG mean now, with batch-norm statistics computed there
        prior = swag.prior()  # for DEELBoTrainer(model, ..., prior=prior)
        ```
    """

    def __init__(
        self,
        num_deviations: int = 5,
        collect_every: str | int = "epoch",
        start: float | int = 0.0,
        head_names: Iterable[str] | None = None,
        eps: float = 0.1,
    ):
        if collect_every != "epoch" and not (isinstance(collect_every, int) and collect_every > 0):
            raise ValueError(f'collect_every: must be "epoch" or a positive number of steps, got {collect_every!r}.')
        if start < 0 or (isinstance(start, float) and start >= 1):
            raise ValueError(
                f"start: must be a part of the training, 0 <= start < 1, or a whole number of steps, got {start!r}."
            )
        self.moments = SWAGMoments(num_deviations)
        self.collect_every, self.start, self.eps = collect_every, start, eps
        self.head_names = None if head_names is None else list(head_names)
        self._given_checkpoint: str | os.PathLike | None = None

    # ---- What it is for --------------------------------------------------------------------------------------------

    def prior(self) -> LowRankPrior:
        """The prior over the backbone's weights, by name: N(mean, lambda Sigma_p)."""
        return self.moments.to_prior(self.eps)

    def load_mean(self, trainer: Trainer, batches: Iterable[Any] | None = None) -> None:
        """Put the mean into the backbone of the trainer's model, with batch-norm statistics that belong to it.

        The running statistics are those of the weights that training passed through, not of their mean. The head stays
        as training left it.

        Args:
            trainer: the one that trained.
            batches: to compute the statistics over, as the trainer's data collator makes them; by default all of
                its `train_dataset`.
        """
        model = _unwrapped(trainer.model)
        layers = batch_norm_layers(model)
        if layers and batches is None:
            batches = _batches_of_training_set(trainer)
        self.moments.copy_mean_to(self._backbone(model))

        def forward(batch: Any) -> None:
            with trainer.compute_loss_context_manager():
                trainer.compute_loss(model, trainer._prepare_inputs(batch))

        if layers:
            for name, (mean, variance) in compute_statistics(model, batches, forward).items():
                layers[name].running_mean.copy_(mean)
                layers[name].running_var.copy_(variance)

    def load_checkpoint(self, checkpoint: str | os.PathLike) -> None:
        """Read the moments of a checkpoint: to use them, or to resume from it if it is not in `output_dir`."""
        self._load(checkpoint)
        self._given_checkpoint = checkpoint

    # ---- When ------------------------------------------------------------------------------------------------------

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        train_dataloader: DataLoader | None = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Start anew, or from the moments of the checkpoint that training resumes from."""
        if args.deepspeed or args.fsdp:
            raise ValueError("SWAG: sharded parameters are not supported; run several processes with DDP.")
        self._plan(args, state, train_dataloader)
        if isinstance(lr_scheduler, LambdaLR) and args.lr_scheduler_type not in SWAG_SCHEDULES:
            logger.warning(
                f'SWAG: with lr_scheduler_type="{SchedulerType(args.lr_scheduler_type).value}" the learning rate goes '
                'to zero, and the deviations with it. Use "constant" or "constant_with_warmup", or '
                '"cosine_with_restarts" with a collection at the end of each of its cycles.'
            )
        if state.global_step == 0:
            self.moments = SWAGMoments(self.moments.num_deviations)
        else:
            self._resume(args, state, _unwrapped(model))
        self._given_checkpoint = None

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Collect, if it is time; the end of an epoch is its last step, so that a checkpoint of that step knows it."""
        if state.global_step > self._first_step and state.global_step % self._interval == 0:
            self.moments.collect(self._backbone(_unwrapped(model)))

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the moments into the checkpoint."""
        if not args.should_save:
            return
        folder = _checkpoint_folder(args, state)
        if not os.path.isdir(folder):  # hyperparameter search puts them elsewhere
            logger.warning_once(
                f"SWAG: there is no folder {folder}; the moments are not saved, and cannot be resumed."
            )
            return
        weights = self._backbone(_unwrapped(model))
        self.moments.save(os.path.join(folder, SWAG_FILE), {"checksum": _checksum_of(weights)})

    # ---- Inside ----------------------------------------------------------------------------------------------------

    def _plan(self, args: TrainingArguments, state: TrainerState, train_dataloader: DataLoader) -> None:
        """Set the steps to collect at: those after `_first_step` that `_interval` divides."""
        if self.collect_every != "epoch":
            self._interval = self.collect_every
        elif has_length(train_dataloader):
            self._interval = max(1, math.ceil(len(train_dataloader) / args.gradient_accumulation_steps))
        else:
            raise ValueError(
                'collect_every: "epoch" needs training data that tells its length; give a number of steps instead.'
            )
        self._first_step = self.start if isinstance(self.start, int) else int(self.start * state.max_steps)
        planned = state.max_steps // self._interval - self._first_step // self._interval
        if planned < self.moments.num_deviations:
            raise ValueError(
                f"num_deviations: a prior with K = {self.moments.num_deviations} needs as many collections, but this "
                f"training of {state.max_steps} steps has {max(0, planned)}, one every {self._interval} steps after "
                f"step {self._first_step}. Train longer, collect more often (`collect_every`) or sooner (`start`), or "
                "ask for fewer deviations."
            )

    def _resume(self, args: TrainingArguments, state: TrainerState, model: nn.Module) -> None:
        """Read the moments; a callback is not told where training resumes from, so check that they belong to it."""
        checkpoint = self._given_checkpoint or args.resume_from_checkpoint or ""
        if not os.path.isdir(checkpoint):
            checkpoint = _checkpoint_folder(args, state)
        weights = self._backbone(model)
        metadata = self._load(checkpoint, next(iter(weights.values())).device)
        if metadata.get("checksum") != _checksum_of(weights):
            raise ValueError(
                f"SWAG: the moments in {checkpoint} were saved with other weights than those that training resumes "
                "from. If it resumes from another checkpoint, call `load_checkpoint` of the callback with that one."
            )

    def _load(self, checkpoint: str | os.PathLike, device: str | torch.device = "cpu") -> dict[str, str]:
        path = os.path.join(checkpoint, SWAG_FILE)
        if not os.path.isfile(path):
            raise ValueError(
                f"SWAG: {path} is missing, so the moments that were collected before this checkpoint are lost. If "
                "training resumes from a checkpoint in another folder, call `load_checkpoint` of the callback with it "
                "before `train`; if it was written without this callback, start anew."
            )
        return self.moments.load(path, device)

    def _backbone(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return backbone_of(model, head_parameter_names(model, self.head_names))


def _unwrapped(model: nn.Module) -> nn.Module:
    return extract_model_from_parallel(model, keep_torch_compile=False)


def _checkpoint_folder(args: TrainingArguments, state: TrainerState) -> str:
    return os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def _checksum_of(weights: dict[str, torch.Tensor]) -> str:
    return str(checksum(list(weights.values())).item())


def _batches_of_training_set(trainer: Trainer) -> DataLoader:
    """All of it on each process, in batches as equal as can be: batch norm fails on a single example left over."""
    if not has_length(trainer.train_dataset):
        raise ValueError("batches: the trainer has no `train_dataset` with a length; give the batches to go through.")
    loader = trainer.get_test_dataloader(trainer.train_dataset)
    indices = torch.arange(len(loader.dataset))
    num_batches = math.ceil(len(indices) / trainer.args.eval_batch_size)
    return DataLoader(
        loader.dataset,
        batch_sampler=[part.tolist() for part in indices.tensor_split(num_batches)],
        collate_fn=loader.collate_fn,
        num_workers=trainer.args.dataloader_num_workers,
    )
