"""What all trainers of this package share: the mean NLL of a batch as a loss, N, the backbone's prior, the data."""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import datasets
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm.auto import tqdm
from transformers import PreTrainedModel, Trainer, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    TrainOutput,
    has_length,
    rotate_checkpoints,
    sort_checkpoints,
)
from transformers.utils import SAFE_WEIGHTS_NAME, ModelOutput, logging

from .config import SHARD_AT_LOADING, FineTuningConfig
from .data import class_balanced_indices, column_of_labels
from .priors import GaussianPrior
from .sharing.files import CHECKPOINT_IN_WORK, put_in_place, remove_at_once
from .sharing.priors import load_prior
from .weights.parameters import backbone_of
from .weights.shards import is_sharded

logger = logging.get_logger(__name__)


class FineTuningTrainer(Trainer):
    """A `Trainer` of classifiers by the paper's protocol; `DEELBoTrainer` and `MAPTrainer` add their objective.

    Args:
        args: a `config_class`.
        prior: the backbone's prior, over its trainable parameters by name, in place of the one that `args.prior`
            names.
        unaugmented_dataset: the training set without augmentation; default is `train_dataset` itself.

    Attributes:
        last_nll: the mean NLL of the last batch of training.
    """

    # `compute_loss` returns the mean over a batch, so Trainer divides by the number of accumulated batches
    loss_is_scaled_for_ga = False
    config_class = FineTuningConfig

    def __init__(
        self,
        model: nn.Module | None = None,
        args: FineTuningConfig | None = None,
        *trainer_args: Any,
        prior: GaussianPrior | None = None,
        unaugmented_dataset: Dataset | datasets.Dataset | None = None,
        **trainer_kwargs: Any,
    ):
        wanted = self.config_class
        args = wanted("trainer_output") if args is None else args
        if not isinstance(args, wanted):
            raise TypeError(
                f"args: must be a {wanted.__name__}, got {type(args).__name__}; it takes the same arguments."
            )
        self._given_prior = prior
        self._unaugmented_dataset = unaugmented_dataset
        self._batch_weight = 1.0
        self._saves_checkpoint_into: str | None = None
        super().__init__(model, args, *trainer_args, **trainer_kwargs)
        self._refuse_unsupported()
        if self.train_dataset is not None:
            self._keep_batch_within_dataset()

    # ---- The prior and N -------------------------------------------------------------------------------------------

    def _make_prior(self, head_names: list[str]) -> GaussianPrior:
        if self._given_prior is not None:
            return self._given_prior
        args = self.args
        hub_options = {"revision": args.prior_revision, "token": args.hub_token}
        backbone = backbone_of(self.model, head_names)
        return load_prior(args.prior, backbone, args.prior_name_or_path, **hub_options)

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

    # ---- Training --------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimiser of `Trainer` or your own, without weight decay."""
        optimizer = super().create_optimizer(model)
        if decays := {group["weight_decay"] for group in optimizer.param_groups if group.get("weight_decay")}:
            logger.warning(f"optimizer: its weight_decay of {max(decays)} is set to 0. {self.args.the_decay}")
            for group in optimizer.param_groups:
                group["weight_decay"] = 0.0
        return optimizer

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> TrainOutput:
        self._nll_since_log, self._steps_since_log = torch.zeros((), device=self.args.device), 0
        return super()._inner_training_loop(*args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list, Any]:
        """The batches of one optimiser step, whose sizes are noted so that `training_step` can weigh them."""
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
        """Forward and backward of one batch of a step; `Trainer` averages them, so a smaller one must weigh less."""
        self._batch_weight = (find_batch_size(inputs) or 1) / self._mean_batch_size
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self._batch_weight = 1.0
        self._nll_since_log += self.last_nll / self.current_gradient_accumulation_steps
        self._steps_since_log += int(self.accelerator.sync_gradients)
        return loss

    def _mean_nll_of_batch(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        """The mean NLL of a batch, weighed by its size in a training step, and the model's outputs."""
        labels = inputs.get("labels")
        if model.training and labels is not None and (self.state.epoch or 0) < 1:  # each example once
            self._check_labels(labels)
        nll, outputs = super().compute_loss(model, dict(inputs), return_outputs=True)
        nll = nll.mean()  # over the devices of a `DataParallel` model
        if model.training:
            nll = nll * self._batch_weight
            self.last_nll = nll.detach()
        return nll, outputs

    def _loss_scale(self) -> torch.Tensor | float:
        scaler = self.accelerator.scaler
        return 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.args.device))

    def _raise_non_finite(self, loss: torch.Tensor, situation: str) -> None:
        self.model.zero_grad()
        raise FloatingPointError(
            f"Step {self.state.global_step + 1}: the loss ({float(loss):.4g}) or its gradient is not finite, with "
            f"{situation}. The model is at the weights that the step started from. Try a smaller learning_rate than "
            f"{self.args.learning_rate}, and look for bad values in the inputs."
        )

    def _check_labels(self, labels: torch.Tensor) -> None:
        if self.compute_loss_func is not None:
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

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the NLL since the last log beside the loss, and what `_parts_of_loss` adds."""
        if "loss" in logs:
            nll = self.accelerator.gather(self._nll_since_log).mean().item() / max(1, self._steps_since_log)
            logs |= {"nll": nll, **self._parts_of_loss(nll)}
            self._nll_since_log.zero_()
            self._steps_since_log = 0
        super().log(logs, start_time)

    def _parts_of_loss(self, nll: float) -> dict[str, float]:
        return {}

    def training_settings(self) -> dict[str, Any]:
        """How it was trained, by name, for a model card."""
        args = self.args
        return {
            "learning rate": args.learning_rate,
            "steps": self.state.global_step,
            "batch size": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
            "optimizer": f"{args.optim.value} ({args.optim_args})" if args.optim_args else args.optim.value,
            "schedule": args.lr_scheduler_type.value,
            "gradient norm clipped at": args.max_grad_norm,
            "seed": args.seed,
        }

    # ---- Evaluation ------------------------------------------------------------------------------------------------

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """`Trainer`'s, but its loss leaves out the examples that fill up the last batch of several processes."""
        num_own = self._num_own_examples(inputs)
        is_filled_up = num_own is not None
        loss, logits, labels = super().prediction_step(
            model, inputs, prediction_loss_only and not is_filled_up, ignore_keys
        )
        if is_filled_up and loss is not None and num_own > 0:
            first = logits[0] if isinstance(logits, (tuple, list)) else logits
            loss = self._nll_of(first[:num_own], labels[:num_own])
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

    # ---- Data ------------------------------------------------------------------------------------------------------

    def _get_dataloader(self, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        """`Trainer`'s, but `dataloader_drop_last` is for training: an evaluation keeps every example."""
        drop_last = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = drop_last and is_training
        try:
            return super()._get_dataloader(*args, is_training=is_training, **kwargs)
        finally:
            self.args.dataloader_drop_last = drop_last

    def _training_inputs(self) -> Any:
        dataset = self.train_dataset if self._unaugmented_dataset is None else self._unaugmented_dataset
        if dataset is None:
            raise ValueError("dataset: the trainer has no `train_dataset` to compute this on; give it one.")
        return dataset

    def _some_training_inputs(self, most: int) -> Any:
        """At most so many, class-balanced, always the same."""
        inputs = self._training_inputs()
        if not has_length(inputs) or len(inputs) <= most:
            return inputs
        labels = column_of_labels(inputs) or [0] * len(inputs)
        return Subset(self._without_unused_columns(inputs), class_balanced_indices(labels, most, self.args.seed))

    def _batch_norm_inputs(self) -> "_Mapped":
        """Batches of at most `num_batch_norm_examples` training inputs, class-balanced, without labels."""
        inputs = self._some_training_inputs(self.args.num_batch_norm_examples)
        return self._batches(inputs, without=self.label_names)

    def _without_unused_columns(self, dataset: Any) -> Any:
        return self._remove_unused_columns(dataset) if isinstance(dataset, datasets.Dataset) else dataset

    def _batches(self, dataset: Any, without: Sequence[str] = (), num_batches: int | None = None) -> "_Mapped":
        """Batches in order, on the device, not shared out; `without` are keys left out."""
        collator = self.data_collator
        if not isinstance(dataset, datasets.Dataset):
            collator = self._get_collator_with_removed_columns(collator)
        dataset = self._without_unused_columns(dataset)
        loader = DataLoader(
            dataset,
            **self._batching(dataset, num_batches),
            collate_fn=collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type != "cpu",
        )

        def prepare(inputs: Mapping[str, Any]) -> dict[str, Any]:
            return self._prepare_inputs({key: value for key, value in inputs.items() if key not in without})

        return _Mapped(prepare, loader)

    def _batching(self, dataset: Any, num_batches: int | None) -> dict[str, Any]:
        """Batches as equal as they can be: batch norm has no statistics of a single example left over."""
        if not has_length(dataset):
            return {"batch_size": self.args.eval_batch_size}
        num_batches = num_batches or math.ceil(len(dataset) / self.args.eval_batch_size)
        return {"batch_sampler": [part.tolist() for part in torch.arange(len(dataset)).tensor_split(num_batches)]}

    def _progress(self, items: Iterable, description: str) -> Iterable:
        disable = self.args.disable_tqdm or not self.is_local_process_zero()
        return tqdm(items, desc=description, disable=disable, leave=False)

    def _is_sharded(self) -> bool:
        return self.model is not None and is_sharded(self.model)

    def _refuse_unsupported(self) -> None:
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:  # by accelerate's configuration
            wanted = "FSDP" if self.is_fsdp_enabled else "DeepSpeed"
            raise ValueError(f"{wanted}: is not supported. {SHARD_AT_LOADING}")
        if self._is_sharded() and not self.is_distributed_loading_by_transformers:
            raise ValueError(f"model: it is sharded in a way that `Trainer` does not know. {SHARD_AT_LOADING}")
        if self.is_model_parallel:
            raise ValueError("model: it is spread over several devices; load it on one, without `device_map`.")

    # ---- Checkpoints -----------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint: str) -> None:
        """Load the weights and the logs of a checkpoint, to use them without training on."""
        self._load_from_checkpoint(checkpoint)
        self.state = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """`Trainer`'s, but `checkpoint-N` appears when its last file is there.

        So a run that is killed at any moment resumes from a whole one. All processes write into a working folder,
        which is renamed when they are done; the next save removes what a killed run left there.
        """
        state, run_dir = self.state, self._get_output_dir(trial)
        in_work = os.path.join(run_dir, CHECKPOINT_IN_WORK)
        name = f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        written, checkpoint = os.path.join(in_work, name), os.path.join(run_dir, name)
        if self.is_local_process_zero():
            shutil.rmtree(in_work, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._saves_checkpoint_into = in_work
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saves_checkpoint_into = None
        best = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}")
        if best == checkpoint or os.path.isdir(best):
            state.best_model_checkpoint = best  # not where it is in work
            if self.args.should_save:
                state.save_to_json(os.path.join(written, TRAINER_STATE_NAME))
        self.accelerator.wait_for_everyone()
        with self.args.main_process_first(local=False):  # the others find it done, if the nodes share a disk
            if self.is_local_process_zero() and os.path.isdir(written):
                put_in_place(written, checkpoint)
                shutil.rmtree(in_work)
        if self.args.push_to_hub:
            self._push_checkpoint(checkpoint)
        if self.args.should_save:
            rotate_checkpoints(run_dir, self.args.save_total_limit, state.best_model_checkpoint, use_mtime=True)

    def _finalize_training(self, trial: Any, *args: Any) -> TrainOutput:
        """`Trainer`'s, which with `save_total_limit=1` keeps only the best checkpoint; no other is left in half."""
        best = self.state.best_model_checkpoint
        if self.args.should_save and self.args.save_total_limit == 1 and best is not None:
            for checkpoint in sort_checkpoints(self._get_output_dir(trial)):
                if not os.path.samefile(checkpoint, best):
                    remove_at_once(checkpoint)
        return super()._finalize_training(trial, *args)

    def _get_output_dir(self, trial: Any) -> str:
        return self._saves_checkpoint_into or super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Nothing yet: `_save_checkpoint` pushes the checkpoint when it is whole and has its name."""

    def _push_checkpoint(self, checkpoint: str) -> None:
        super()._push_from_checkpoint(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._has_other_names(resume_from_checkpoint):
            loaded = type(self.model).from_pretrained(resume_from_checkpoint, dtype=self.model.dtype)
            self.model.load_state_dict(loaded.state_dict())
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

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


class _Mapped:
    """`map(function, iterable)`, any number of times."""

    def __init__(self, function: Callable, iterable: Iterable):
        self.function, self.iterable = function, iterable

    def __iter__(self) -> Iterator:
        return map(self.function, self.iterable)
