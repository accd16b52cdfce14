"""SWAG (Maddox et al. 2019): a Gaussian fitted to the weights that training passes through.

It turns a run on a source task into an informative prior for others: PTYL's prior, a `LowRankPrior`. `SWAGMoments`
are the mathematics, `SWAGCallback` says when the weights are collected.
"""

import math
import os
from collections.abc import Iterable
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel, send_to_device
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SchedulerType, has_length
from transformers.utils import logging

from .data import in_equal_batches
from .priors import checksum
from .sharing.files import whole_file
from .sharing.hub import by_first_word
from .sharing.priors import LowRankPrior
from .weights.batch_norm import batch_norm_layers, compute_statistics
from .weights.blocks import Tensors
from .weights.parameters import backbone_of, head_parameter_names

logger = logging.get_logger(__name__)

SWAG_FILE = "swag.safetensors"
# the others end at a learning rate near zero, where the weights no longer move
SWAG_SCHEDULES = ("constant", "constant_with_warmup", "cosine_with_restarts")


class SWAGMoments:
    """The mean, the variances and the last K deviations of named weights, collected one set w_n at a time.

        mean_n = mean_{n-1} + (w_n - mean_{n-1}) / n
        m2_n   = m2_{n-1} + (1 - 1/n) (w_n - mean_{n-1})^2,    S_diag = m2_n / n
        Q      = [ w_{n-K+1} - mean_{n-K+1}, ..., w_n - mean_n ]

    S_diag is the mean of the squares minus the square of the mean, in a form that does not cancel and is never
    negative. Each deviation is from the mean of its time, as SWAG has it; the very first is zero. All is held in
    float32, or float64 for such weights, and takes K + 2 times the memory of the weights.

    Args:
        num_deviations: K >= 2.

    Example:
        >>> moments = SWAGMoments(num_deviations=2)
        >>> for number in (1.0, 3.0, 5.0):
        ...     moments.collect({"w": torch.tensor([number])})
        >>> prior = moments.to_prior()
        >>> prior.mean["w"], prior.diagonal["w"], prior.deviations["w"].flatten()
        (tensor([3.]), tensor([2.6667]), tensor([1., 2.]))
    """

    def __init__(self, num_deviations: int = 5):
        if not isinstance(num_deviations, int) or num_deviations < 2:
            raise ValueError(
                f"num_deviations: must be a whole number >= 2, got {num_deviations!r}; Sigma_p divides by 2K - 2."
            )
        self.num_deviations = num_deviations
        self.num_collected = 0
        self.mean: dict[str, torch.Tensor] = {}
        self._m2: dict[str, torch.Tensor] = {}
        self._deviations: dict[str, torch.Tensor] = {}  # a ring: that of w_n is in row (n - 1) mod K

    @torch.no_grad()
    def collect(self, weights: Tensors) -> None:
        """Take one more set of weights into account; the same names and shapes each time."""
        if self.num_collected == 0:
            self._allocate(weights)
        self._check_names(weights)
        row = self.num_collected % self.num_deviations
        self.num_collected += 1
        n = self.num_collected
        for name, weight in weights.items():
            mean = self.mean[name]
            step = weight - mean
            self._m2[name].addcmul_(step, step, value=1 - 1 / n)
            mean.add_(step, alpha=1 / n)
            torch.sub(weight, mean, out=self._deviations[name][row])

    @torch.no_grad()
    def copy_mean_to(self, weights: Tensors) -> None:
        """Make these weights the mean, in place."""
        self._check_names(weights)
        for name, weight in weights.items():
            weight.copy_(self.mean[name])

    def to_prior(self, eps: float = 0.1) -> LowRankPrior:
        """PTYL's prior: N(mean, lambda Sigma_p) with Sigma_p = S_diag/2 + eps I + Q Q^T / (2K - 2).

        It holds copies: collecting may go on.
        """
        if self.num_collected < self.num_deviations:
            raise ValueError(
                f"num_deviations: a prior with K = {self.num_deviations} needs as many collections of the weights, "
                f"but there were {self.num_collected}. Train longer, collect more often (`collect_every`) or sooner "
                "(`start`), or ask for fewer deviations."
            )
        oldest = self.num_collected % self.num_deviations
        return LowRankPrior(
            mean={name: tensor.clone() for name, tensor in self.mean.items()},
            diagonal={name: tensor / self.num_collected for name, tensor in self._m2.items()},
            deviations={name: tensor.roll(-oldest, dims=0) for name, tensor in self._deviations.items()},
            eps=eps,
        )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """`num_collected`, and `mean.<name>`, `m2.<name>` and `deviations.<name>`."""
        parts = {"mean": self.mean, "m2": self._m2, "deviations": self._deviations}
        tensors = {f"{part}.{name}": tensor for part, named in parts.items() for name, tensor in named.items()}
        return {"num_collected": torch.tensor(self.num_collected), **tensors}

    def load_state_dict(self, state: Tensors) -> None:
        """The inverse of `state_dict`; the tensors are taken over, not copied."""
        parts = by_first_word(state, ("mean", "m2", "deviations"))
        ranks = {len(tensor) for tensor in parts["deviations"].values()}
        if ranks - {self.num_deviations}:
            raise ValueError(
                f"num_deviations: the saved moments have K = {ranks.pop()}, this is for K = {self.num_deviations}. "
                "Use the same number as in the saved run."
            )
        self.num_collected = int(state["num_collected"])
        self.mean, self._m2, self._deviations = parts["mean"], parts["m2"], parts["deviations"]

    def save(self, path: str | os.PathLike, metadata: dict[str, str] | None = None) -> None:
        """Write `state_dict` and `metadata` to a safetensors file, which is there as a whole or not at all."""
        with whole_file(path) as new:
            save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, new, metadata)

    def load(self, path: str | os.PathLike, device: str | torch.device = "cpu") -> dict[str, str]:
        """Read what `save` wrote, and return its metadata."""
        self.load_state_dict(load_file(path, device=str(device)))
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}

    def _check_names(self, weights: Tensors) -> None:
        ours, theirs = ({name: tensor.shape for name, tensor in part.items()} for part in (self.mean, weights))
        if ours != theirs:
            different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
            raise ValueError(
                f"weights: {len(different)} of their names or shapes are not those of the {self.num_collected} "
                f"collections so far, such as {different[0]!r}. The trainable backbone must stay the same."
            )

    def _allocate(self, weights: Tensors) -> None:
        for name, weight in weights.items():
            zeros = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
            self.mean[name], self._m2[name] = zeros, zeros.clone()
            self._deviations[name] = zeros.new_zeros((self.num_deviations, *zeros.shape))


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
            batches = _all_of_training_set(trainer)
        self.moments.copy_mean_to(self._backbone(model))

        def forward(batch: Any) -> None:
            with trainer.compute_loss_context_manager():
                trainer.compute_loss(model, send_to_device(batch, trainer.args.device))

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


def _all_of_training_set(trainer: Trainer) -> DataLoader:
    if not has_length(trainer.train_dataset):
        raise ValueError("batches: the trainer has no `train_dataset` with a length; give the batches to go through.")
    return in_equal_batches(trainer.get_test_dataloader(trainer.train_dataset), trainer.args.eval_batch_size)
