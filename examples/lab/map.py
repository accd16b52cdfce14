"""What the DE ELBo is compared with: MAP estimation, a `Trainer` with a penalty.

    loss = mean NLL + alpha/(2N) |w - mu_p|^2 + beta/(2N) |V|^2               L2-zero (mu_p = 0), L2-SP (mu_p = mu)
    loss = mean NLL + 1/(2N lambda) (w - mu)^T Sigma_p^-1 (w - mu) + beta/(2N) |V|^2                           PTYL

with alpha = 1/lambda and beta = 1/tau.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import EvalLoopOutput, TrainOutput, get_last_checkpoint
from transformers.utils import logging

from hf_deelbo.config import PAPER, check_count, positive_number
from hf_deelbo.data import nothing_dropped
from hf_deelbo.priors import PRIORS, SAVED_PRIORS, GaussianPrior, IsotropicPrior
from hf_deelbo.sharing.priors import load_prior
from hf_deelbo.weights.batch_norm import batch_norm_layers
from hf_deelbo.weights.blocks import Block, Tensors, add_scaled_, on_all_cores, parameters_by_name, values_of
from hf_deelbo.weights.parameters import backbone_of, head_parameter_names
from hf_deelbo.weights.shards import is_sharded

from .batch_norm import recomputed_batch_norm

logger = logging.get_logger(__name__)


@dataclass
class MAPConfig(TrainingArguments):
    """Arguments of `MAPTrainer`: those of `TrainingArguments`, with its defaults, and the following.

    The penalty

    Args:
        prior, prior_name_or_path, prior_revision: which prior, and where it is saved, as in `DEELBoConfig`.
        head_names: modules or parameters that form the head; found by itself if not given.
        alpha_over_n: alpha/N, the backbone's penalty for all priors but `"ptyl"`; alpha = 1/lambda.
        beta_over_n: beta/N, the head's penalty; beta = 1/tau.
        lambda_: the prior variance of the backbone for `"ptyl"`, in place of alpha/N.

    Evaluation

    Args:
        recompute_batch_norm: evaluate with batch-norm statistics computed over training inputs at the weights that
            were learned, as a weight sample of the DE ELBo is; if false, with the running ones, as the paper does.
        num_batch_norm_examples: at most so many inputs, class-balanced, are taken for that.

    `weight_decay` is ignored, with a warning: the prior is the decay.

    Example:
        >>> MAPConfig(output_dir="outputs", prior="l2-sp", alpha_over_n=1e-2, beta_over_n=1e-2).max_grad_norm
        1.0
    """

    prior: str = field(default="l2-sp", metadata={"help": f"Prior of the backbone: {', '.join(PRIORS)}."})
    prior_name_or_path: str | None = field(
        default=None, metadata={"help": "The saved prior or posterior: a folder or an id on the Hub."}
    )
    prior_revision: str | None = field(default=None, metadata={"help": "Its branch, tag or commit on the Hub."})
    head_names: list[str] | None = field(
        default=None, metadata={"help": "Modules or parameters that form the head; found by itself if not given."}
    )
    alpha_over_n: float = field(default=0.0, metadata={"help": "alpha/N, the backbone's penalty; not for ptyl."})
    beta_over_n: float = field(default=0.0, metadata={"help": "beta/N = 1/(tau N), the head's penalty."})
    lambda_: float | None = field(default=None, metadata={"help": "Prior variance of the backbone for ptyl."})
    recompute_batch_norm: bool = field(
        default=False, metadata={"help": "Evaluate with batch-norm statistics computed for the learned weights."}
    )
    num_batch_norm_examples: int = field(
        default=2048, metadata={"help": "At most so many training inputs are taken for batch-norm statistics."}
    )

    @classmethod
    def paper(cls, output_dir: str | None = None, **kwargs: Any) -> Self:
        """With the paper's protocol (`hf_deelbo.config.PAPER`) in place of the defaults, but for what is given.

        Example:
            >>> MAPConfig.paper("outputs", max_steps=600).lr_scheduler_type.value
            'cosine'
        """
        own = {name: value for name, value in PAPER.items() if name != "optim_args" or "optim" not in kwargs}
        return cls(output_dir=output_dir, **(own | kwargs))

    def __post_init__(self):
        self._check_prior()
        self._check_penalty()
        check_count("num_batch_norm_examples", self.num_batch_norm_examples, lowest=2)
        if self.weight_decay:
            logger.warning(
                f"weight_decay={self.weight_decay} is ignored: delete it. The prior is the decay: set `alpha_over_n` "
                "and `beta_over_n`."
            )
            self.weight_decay = 0.0
        super().__post_init__()

    def _check_prior(self) -> None:
        if self.prior not in PRIORS:
            raise ValueError(f"prior: unknown prior {self.prior!r}; choose one of {', '.join(PRIORS)}.")
        if self.prior_name_or_path is not None and self.prior not in SAVED_PRIORS:
            raise ValueError(
                f"prior_name_or_path: {self.prior_name_or_path!r} was given, but prior={self.prior!r} is not loaded "
                f"from anywhere; choose {' or '.join(SAVED_PRIORS)}."
            )

    def _check_penalty(self) -> None:
        for name in ("alpha_over_n", "beta_over_n"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}: must be a number of at least 0, got {value!r}.")
        if self.prior == "ptyl":
            self.lambda_ = positive_number("lambda_", self.lambda_, or_else=' for prior="ptyl"')
            if self.alpha_over_n != 0:
                raise ValueError(
                    f'alpha_over_n: {self.alpha_over_n} has no meaning for prior="ptyl"; its backbone\'s penalty is '
                    "1/(lambda_ N)."
                )
        elif self.lambda_ is not None:
            raise ValueError(
                f'lambda_: {self.lambda_} is for prior="ptyl"; for {self.prior!r} set alpha_over_n = 1/(lambda N).'
            )


class Penalty(NamedTuple):
    """What the prior adds to the mean NLL."""

    backbone: torch.Tensor
    head: torch.Tensor


class MAPTrainer(Trainer):
    """Fine-tunes a classifier by maximum a posteriori estimation with a fixed penalty.

        loss = NLL of the batch + strength/2 (w - mu_p)^T Sigma_p^-1 (w - mu_p) + beta/(2N) |V|^2

    where strength is alpha/N for L2-zero and L2-SP (Sigma_p = I) and 1/(lambda N) for PTYL. `eval_loss` is the NLL
    alone, of all examples: `dataloader_drop_last` is for training. A batch is no larger than the training set.

    It takes the keyword arguments of `transformers.Trainer`, and:

    Args:
        model: the model, at mu.
        args: a `MAPConfig`.
        train_dataset: N examples.
        prior: the backbone's prior, over its trainable parameters by name, in place of the one that `args.prior`
            names.
        unaugmented_dataset: the training set without augmentation, for batch-norm statistics; default is
            `train_dataset` itself.

    Attributes:
        priors: p(w) of the backbone and p(V) of the head, up to their variances.

    Example:
        ```python
        args = MAPConfig.paper("outputs", max_steps=600, learning_rate=0.1, alpha_over_n=1e-3, beta_over_n=1e-3)
        trainer = MAPTrainer(model, args, train_dataset=train, eval_dataset=test)
        trainer.train()
        ```
    """

    # `compute_loss` returns the mean over a batch, so Trainer divides by the number of accumulated batches
    loss_is_scaled_for_ga = False

    def __init__(
        self,
        model: nn.Module,
        args: MAPConfig,
        *,
        train_dataset: Any,
        prior: GaussianPrior | None = None,
        unaugmented_dataset: Any = None,
        **kwargs: Any,
    ):
        if not isinstance(args, MAPConfig):
            raise TypeError(f"args: must be a MAPConfig, got {type(args).__name__}; it takes the same arguments.")
        if args.dataloader_drop_last:  # a larger batch would be dropped as incomplete
            most = max(1, len(train_dataset) // (args.world_size * max(1, args.n_gpu)))
            args.per_device_train_batch_size = min(args.per_device_train_batch_size, most)
        super().__init__(model, args, train_dataset=train_dataset, **kwargs)
        self.model_accepts_loss_kwargs = False  # `loss_is_scaled_for_ga` before transformers 5.19
        if self.is_deepspeed_enabled or self.is_fsdp_enabled or is_sharded(self.model):
            raise ValueError("model: it is sharded, which the baseline does not support. Load it whole, and run DDP.")
        self.unaugmented_dataset = train_dataset if unaugmented_dataset is None else unaugmented_dataset
        self.priors = self._make_priors(prior)

    def _make_priors(self, given: GaussianPrior | None) -> tuple[GaussianPrior, GaussianPrior]:
        args, weights = self.args, values_of(parameters_by_name(self.model))
        head_names = head_parameter_names(self.model, args.head_names)
        backbone, where = backbone_of(self.model, head_names), args.prior_name_or_path
        prior = given or load_prior(args.prior, backbone, where, revision=args.prior_revision, token=args.hub_token)
        prior.check_matches(backbone)
        return prior, IsotropicPrior.l2_zero({name: weights[name] for name in head_names})

    @property
    def strengths(self) -> tuple[float, float]:
        """alpha/N or 1/(lambda N) of the backbone, beta/N of the head."""
        args = self.args
        backbone = 1 / (args.lambda_ * len(self.train_dataset)) if args.prior == "ptyl" else args.alpha_over_n
        return backbone, args.beta_over_n

    def penalty(self) -> Penalty:
        """strength/2 (w - mu_p)^T Sigma_p^-1 (w - mu_p) at the present weights, of the backbone and of the head."""
        weights = values_of(parameters_by_name(self.model))
        parts = zip(self.priors, self.strengths, strict=True)
        return Penalty(*(strength / 2 * prior.mahalanobis(weights) for prior, strength in parts))

    # ---- Training --------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        """`Trainer`'s, but it finds all weights of a checkpoint; mu is what the model held before."""
        self._nll_since_log, self._steps_since_log = torch.zeros((), device=self.args.device), 0
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir) or True  # `Trainer` says so if none
        if isinstance(resume_from_checkpoint, str) and isinstance(self.model, PreTrainedModel):
            self.load_checkpoint(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Forward and backward of the NLL; with the last batch of a step the penalty's gradient is added, once."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        self._nll_since_log += self._last_nll / self.current_gradient_accumulation_steps
        finite = torch.isfinite(loss)
        if self.accelerator.sync_gradients:
            self._steps_since_log += 1
            norms = self._add_gradient_of_penalty()
            if self.accelerator.scaler is None:  # with a scaler an overflow is expected, and skips the step
                finite &= torch.isfinite(norms).all()
        if not finite:
            self._raise_non_finite(loss)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """In train mode the mean NLL of the batch plus the penalty; in eval mode the NLL alone.

        The penalty is a constant here; its gradient is added in closed form by `training_step`.
        """
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        loss = loss.mean()  # over the devices of a `DataParallel` model
        if model.training:
            self._last_nll, self._last_penalty = loss.detach(), self.penalty()
            loss = loss + sum(self._last_penalty).to(loss.dtype)
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _add_gradient_of_penalty(self) -> torch.Tensor:
        """In place gradient += strength Sigma_p^-1 (w - mu_p), as `Trainer` would scale it; the norms of the sums."""
        parameters = parameters_by_name(self.model)
        weights, gradients = values_of(parameters), gradients_of(parameters)
        scaler = self.accelerator.scaler
        scale = 1.0 if scaler is None else scaler.scale(torch.ones((), device=self.args.device))
        norms = []
        for prior, strength in zip(self.priors, self.strengths, strict=True):
            norms += _add_pull_(gradients, prior, weights, torch.as_tensor(scale * strength))
        return torch.stack(norms)

    def _raise_non_finite(self, loss: torch.Tensor) -> None:
        backbone, head = self._last_penalty
        raise FloatingPointError(
            f"Step {self.state.global_step + 1}: the loss ({float(loss):.4g}) or its gradient is not finite, with "
            f"penalties of {float(backbone):.4g} (backbone) and {float(head):.4g} (head). The model is at the weights "
            f"that the step started from. Try a smaller learning_rate than {self.args.learning_rate}, and look for "
            "bad values in the inputs."
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Beside the loss, the mean NLL since the last log and the penalties."""
        if "loss" in logs:
            nll = self.accelerator.gather(self._nll_since_log).mean().item() / max(1, self._steps_since_log)
            logs |= {"nll": nll}
            logs |= {f"penalty_{part}": float(value) for part, value in self._last_penalty._asdict().items()}
            self._nll_since_log.zero_()
            self._steps_since_log = 0
        super().log(logs, start_time)

    def load_checkpoint(self, folder: str | os.PathLike) -> None:
        """The weights and the logs of a checkpoint, to use them without training on.

        By `from_pretrained`: ViT, among others, is saved under the names of its original architecture, which
        `Trainer` does not find.
        """
        loaded = type(self.model).from_pretrained(folder, dtype=self.model.dtype)
        self.model.load_state_dict(loaded.state_dict())
        self.state = TrainerState.load_from_json(os.path.join(folder, TRAINER_STATE_NAME))

    # ---- Evaluation ------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """`Trainer`'s loop, with running or (`recompute_batch_norm`) recomputed batch-norm statistics."""
        if not (self.args.recompute_batch_norm and batch_norm_layers(self.model)):
            return super().evaluation_loop(*args, **kwargs)
        self.model.eval()  # the mode in which `Trainer` leaves it
        with recomputed_batch_norm(self, self.unaugmented_dataset):
            return super().evaluation_loop(*args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """`Trainer`'s, of every example."""
        with nothing_dropped(self.args):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        """`Trainer`'s, of every example."""
        with nothing_dropped(self.args):
            return super().get_test_dataloader(test_dataset)


def _add_pull_(
    gradients: Tensors, prior: GaussianPrior, weights: Tensors, strength: torch.Tensor
) -> list[torch.Tensor]:
    """In place gradient += strength * Sigma_p^-1 (w - mu_p); the norms of the pieces that it was done in."""
    precision_product = prior.precision_product(weights)

    def add(block: Block) -> tuple[torch.Tensor, ...]:
        g = block.of(gradients)
        add_scaled_(g, precision_product(block), strength)
        return torch._foreach_norm(g)

    return list(chain.from_iterable(on_all_cores(add, prior.blocks)))


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Their gradients by name.

    Where the loss does not reach there is a zero to add to: a prior pulls there too.

    Example:
        >>> gradients_of(parameters_by_name(nn.Linear(2, 1)))
        {'weight': tensor([[0., 0.]]), 'bias': tensor([0.])}
    """
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return {name: parameter.grad for name, parameter in parameters.items()}
