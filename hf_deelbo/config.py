"""The settings of the method, beside those of `transformers.TrainingArguments`."""

import math
from dataclasses import dataclass, field
from typing import Any, Self

from transformers import TrainingArguments
from transformers.utils import logging

from .groups import GROUPINGS, SIGMA_UPDATES
from .priors import PRIORS, SAVED_PRIORS

logger = logging.get_logger(__name__)

# what to do instead of letting accelerate or DeepSpeed shard the model when training starts
SHARD_AT_LOADING = (
    "Run several processes with DDP or, where the weights do not fit on one device, let transformers (5.19 or newer) "
    "shard the model when it loads it (FSDP2): `from_pretrained(..., "
    "distributed_config=DistributedConfig(fsdp_size=...))`."
)
# the paper's protocol, as far as it is about arguments of `TrainingArguments`
PAPER = {
    "optim": "sgd",
    "optim_args": "momentum=0.9,nesterov=True",
    "lr_scheduler_type": "cosine",
    "learning_rate": 0.01,
    "per_device_train_batch_size": 128,
    "per_device_eval_batch_size": 128,
    "dataloader_drop_last": True,
}
PAPER_SIGMA = {"sigma_update": "optimizer", "grouping": "all", "init_sigma": 1e-4, "kl_warmup_epochs": 0.0}
# they step inside the backward pass, before the gradients are those of the whole objective
_FUSED_BACKWARD_OPTIMIZERS = ("lomo", "layerwise")


def check_count(argument: str, value: int | None, lowest: int = 1) -> None:
    """Raise a `ValueError` unless it is a whole number of at least so much, or not given.

    Example:
        >>> check_count("num_samples", 0)
        Traceback (most recent call last):
        ValueError: num_samples: must be a whole number of at least 1, got 0.
    """
    if value is not None and (not isinstance(value, int) or value < lowest):
        raise ValueError(f"{argument}: must be a whole number of at least {lowest}, got {value!r}.")


@dataclass
class DEELBoConfig(TrainingArguments):
    """Arguments of `DEELBoTrainer`: those of `TrainingArguments`, with its defaults, and the following.

    The prior

    Args:
        prior: p(w) of the backbone up to its variance lambda: `"l2-sp"` is N(pretrained weights, lambda I),
            `"l2-zero"` is N(0, lambda I), `"ptyl"` is a low-rank Gaussian learned on a source task,
            `"posterior"` is N(w_bar, lambda I) with w_bar the mean of an earlier posterior.
        prior_name_or_path, prior_revision: that prior or posterior, a folder or an id on the Hub; load the model from
            there too. A `LowRankPrior` can also be passed to the trainer, as `prior=`.
        head_names: modules or parameters that form the head, which has the prior N(0, tau I); found by itself if not
            given.

    The objective

    Args:
        kappa: weight of the likelihood: `"auto"` is D/N, `1` the plain ELBo, or any positive number.
        num_train_examples: N, for a training set that does not tell its length.
        sigma_update: how the posterior's standard deviation sigma is learned: `"closed-form"` sets it before each
            step, as lambda and tau, whatever the optimiser; `"optimizer"` is the paper's way, a parameter rho with
            sigma = softplus(rho) that the optimiser moves, which takes SGD and a large learning rate.
        grouping: what has a sigma and a prior variance of its own: each `"tensor"`, each `"layer"`, or each `"part"`,
            backbone and head; `"all"` is the paper's, with one sigma, one lambda (backbone) and one tau (head). A
            prior of low rank (PTYL) ties all of the backbone, which then is one group.
        init_sigma: where sigma starts.
        kl_warmup_epochs: in so many epochs the KL's weight grows to its full, slowly at first. In the first passes
            over the data there is little to overfit, and noise and prior only slow what is learned.

    Evaluation

    Args:
        num_eval_samples: `evaluate` and `predict` average the probabilities of so many weight samples; 0 takes the
            posterior mean.
        num_elbo_samples: weight samples of `DEELBoTrainer.de_elbo`.
        recompute_batch_norm: give each weight sample that is evaluated batch-norm statistics of its own, computed over
            training inputs; if false, it meets the running ones, which fit no sample.
        num_batch_norm_examples: at most so many inputs, class-balanced, are taken for that.
        num_saved_samples: `save_model` and pushes save the statistics of so many weight samples, for those who have
            the posterior but not the training data.

    `weight_decay` is ignored, with a warning: the KL to the prior is the decay.

    Example:
        >>> DEELBoConfig(output_dir="outputs", prior="l2-sp", kappa=1).kappa
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

    kappa: str = field(
        default="auto",
        metadata={"help": "Weight of the likelihood: `auto` (D/N) or a positive number; 1 is the plain ELBo."},
    )
    num_train_examples: int | None = field(
        default=None, metadata={"help": "N, for a training set that does not tell its length."}
    )
    sigma_update: str = field(
        default="closed-form", metadata={"help": f"How sigma is learned: {', '.join(SIGMA_UPDATES)} (the paper's)."}
    )
    grouping: str = field(
        default="tensor", metadata={"help": f"What shares a sigma and a prior variance: {', '.join(GROUPINGS)}."}
    )
    init_sigma: float = field(default=1e-3, metadata={"help": "Where the posterior's standard deviation starts."})
    kl_warmup_epochs: float = field(
        default=5.0, metadata={"help": "Epochs in which the KL's weight grows to its full; 0 for none."}
    )

    num_eval_samples: int = field(
        default=0, metadata={"help": "Weight samples averaged by evaluate and predict; 0 is the posterior mean."}
    )
    num_elbo_samples: int = field(default=10, metadata={"help": "Weight samples for the DE ELBo of a posterior."})
    recompute_batch_norm: bool = field(
        default=True, metadata={"help": "Compute batch-norm statistics for each weight sample that is evaluated."}
    )
    num_batch_norm_examples: int = field(
        default=2048, metadata={"help": "At most so many training inputs are taken for batch-norm statistics."}
    )
    num_saved_samples: int = field(
        default=10, metadata={"help": "Weight samples whose batch-norm statistics are saved with the posterior."}
    )

    @classmethod
    def paper(cls, output_dir: str | None = None, **kwargs: Any) -> Self:
        """The paper's protocol in place of `Trainer`'s defaults, and its way of learning sigma, but for what is given.

        SGD with Nesterov momentum 0.9 and a clip of the gradient norm at 1.0, a cosine schedule from the learning rate
        0.01, batches of 128 (or N, if that is less), of which the last incomplete one is dropped; one sigma, moved by
        the optimiser from 1e-4. With `sigma_update="closed-form"` the protocol alone is the paper's.

        Example:
            >>> args = DEELBoConfig.paper("outputs", learning_rate=0.1)
            >>> args.lr_scheduler_type.value, args.sigma_update
            ('cosine', 'optimizer')
        """
        own = PAPER if "optim" not in kwargs else {k: v for k, v in PAPER.items() if not k.startswith("optim")}
        if kwargs.get("sigma_update", "optimizer") == "optimizer":
            own = own | PAPER_SIGMA
        return cls(output_dir=output_dir, **(own | kwargs))

    def __post_init__(self):
        self._check_prior()
        self._check_objective()
        for name, least in (("num_eval_samples", 0), ("num_elbo_samples", 1), ("num_saved_samples", 0)):
            check_count(name, getattr(self, name), least)
        check_count("num_batch_norm_examples", self.num_batch_norm_examples, 2)
        for name in ("deepspeed", "fsdp"):
            if getattr(self, name):
                raise ValueError(f"{name}: is not supported. {SHARD_AT_LOADING}")
        if self.weight_decay:
            logger.warning(
                f"weight_decay={self.weight_decay} is ignored: delete it. The KL to the prior is the decay, and its "
                "strength is learned."
            )
            self.weight_decay = 0.0
        super().__post_init__()
        self._check_inherited()

    def _check_prior(self) -> None:
        if self.prior not in PRIORS:
            raise ValueError(f"prior: unknown prior {self.prior!r}; choose one of {', '.join(PRIORS)}.")
        if self.prior_name_or_path is not None and self.prior not in SAVED_PRIORS:
            raise ValueError(
                f"prior_name_or_path: {self.prior_name_or_path!r} was given, but prior={self.prior!r} is not loaded "
                f"from anywhere; choose {' or '.join(SAVED_PRIORS)}."
            )
        if self.prior_name_or_path is None and self.prior == "posterior":
            raise ValueError(
                'prior_name_or_path: prior="posterior" needs the posterior, a folder or an id on the Hub.'
            )

    def _check_objective(self) -> None:
        for name, known in (("sigma_update", SIGMA_UPDATES), ("grouping", GROUPINGS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: unknown value {getattr(self, name)!r}; choose one of {', '.join(known)}.")
        if self.kappa != "auto":
            self.kappa = positive_number("kappa", self.kappa, or_else=' or "auto" (D/N)')
        self.init_sigma = positive_number("init_sigma", self.init_sigma)
        if not (math.isfinite(self.kl_warmup_epochs) and self.kl_warmup_epochs >= 0):
            raise ValueError(f"kl_warmup_epochs: must be a number of at least 0, got {self.kl_warmup_epochs!r}.")
        check_count("num_train_examples", self.num_train_examples)

    def _check_inherited(self) -> None:
        if self.label_smoothing_factor != 0:
            raise ValueError(
                f"label_smoothing_factor: must be 0, got {self.label_smoothing_factor}. Smoothed labels have no "
                "likelihood; pass the trainer a `compute_loss_func` with a likelihood of your own."
            )
        if self.fp16_full_eval or self.bf16_full_eval:
            wanted = "fp16_full_eval" if self.fp16_full_eval else "bf16_full_eval"
            raise ValueError(
                f"{wanted}: 16-bit weights are too coarse for what is learned; use `bf16` or `fp16` autocast."
            )
        if any(kind in self.optim for kind in _FUSED_BACKWARD_OPTIMIZERS):
            raise ValueError(
                f"optim: {self.optim.value} updates the weights inside the backward pass, before the prior's gradient "
                'is there; use "sgd" or "adamw_torch".'
            )


def positive_number(name: str, value: float | str, or_else: str = "") -> float:
    """The value of an argument as a positive number, or a `ValueError` that names it."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{name}: must be a positive number{or_else}, got {value!r}.")
    return number
