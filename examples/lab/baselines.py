"""What the DE ELBo is compared with: MAP estimation, its penalties chosen by grid, random or TPE search.

    loss = mean NLL + alpha/(2N) |w - mu_p|^2 + beta/(2N) |V|^2               L2-zero (mu_p = 0), L2-SP (mu_p = mu)
    loss = mean NLL + 1/(2N lambda) (w - mu)^T Sigma_p^-1 (w - mu) + beta/(2N) |V|^2                           PTYL

with beta = 1/tau. A search holds out a fifth of the training set, trains every setting on the rest, takes the one with
the lowest NLL on what was held out, and trains it again on all N examples.
"""

import itertools
import math
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import EvalLoopOutput, has_length
from transformers.utils import logging

from hf_deelbo.config import PRIORS, FineTuningConfig, positive_number
from hf_deelbo.fine_tuning import FineTuningTrainer
from hf_deelbo.metrics import class_averaged_accuracy, probabilities_of
from hf_deelbo.priors import GaussianPrior, IsotropicPrior
from hf_deelbo.sharing.files import ResultsFile, as_json
from hf_deelbo.weights.batch_norm import batch_norm_layers, compute_statistics, with_statistics
from hf_deelbo.weights.blocks import (
    Block,
    Tensors,
    add_scaled_,
    gradients_of,
    on_all_cores,
    parameters_by_name,
    values_of,
)
from hf_deelbo.weights.parameters import backbone_of, head_parameter_names

if TYPE_CHECKING:
    import optuna

logger = logging.get_logger(__name__)

# the paper's grids
LEARNING_RATES = (0.1, 0.01, 0.001, 0.0001)
PENALTIES_OVER_N = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 0.0)
LAMBDAS = tuple(10.0**power for power in range(10))

RESULTS_FILE = "search.json"
MODEL_FOLDER = "model"


# ---- MAP ------------------------------------------------------------------------------------------------------------


@dataclass
class MAPConfig(FineTuningConfig):
    """Arguments of `MAPTrainer`: those of `TrainingArguments`, of `FineTuningConfig`, and the following.

    The penalty

    Args:
        alpha_over_n: alpha/N, the backbone's penalty for all priors but `"ptyl"`; alpha = 1/lambda.
        beta_over_n: beta/N, the head's penalty; beta = 1/tau.
        lambda_: the prior variance of the backbone for `"ptyl"`, in place of alpha/N.

    Evaluation

    Args:
        recompute_batch_norm: evaluate with batch-norm statistics computed over training inputs at the weights that
            were learned, as a weight sample of the DE ELBo is; if false, with the running ones, as the paper does.

    Example:
        >>> MAPConfig(output_dir="outputs", prior="l2-sp", alpha_over_n=1e-2, beta_over_n=1e-2).max_grad_norm
        1.0
    """

    alpha_over_n: float = field(default=0.0, metadata={"help": "alpha/N, the backbone's penalty; not for ptyl."})
    beta_over_n: float = field(default=0.0, metadata={"help": "beta/N = 1/(tau N), the head's penalty."})
    lambda_: float | None = field(default=None, metadata={"help": "Prior variance of the backbone for ptyl."})
    recompute_batch_norm: bool = field(
        default=False, metadata={"help": "Evaluate with batch-norm statistics computed for the learned weights."}
    )

    the_decay: ClassVar[str] = "The prior is the decay: set `alpha_over_n` and `beta_over_n`."

    def _check_method(self) -> None:
        super()._check_method()
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


class MAPTrainer(FineTuningTrainer):
    """Fine-tunes a classifier by maximum a posteriori estimation with a fixed penalty.

        loss = NLL of the batch + strength/2 (w - mu_p)^T Sigma_p^-1 (w - mu_p) + beta/(2N) |V|^2

    where strength is alpha/N for L2-zero and L2-SP (Sigma_p = I) and 1/(lambda N) for PTYL. The optimiser, the
    batches and the prior are those of `DEELBoTrainer`. `eval_loss` is the NLL alone.

    It takes the arguments of `transformers.Trainer`, and:

    Args:
        args: a `MAPConfig`.
        prior: the backbone's prior, over its trainable parameters by name, in place of the one that `args.prior`
            names.
        unaugmented_dataset: the training set without augmentation, for batch-norm statistics; default is
            `train_dataset` itself.
        compute_loss_func: a likelihood of your own: `(outputs, labels, num_items_in_batch=None)` to the *mean*
            negative log likelihood of the batch's examples.

    Example:
        ```python
        args = MAPConfig.paper("outputs", max_steps=600, learning_rate=0.1, alpha_over_n=1e-3, beta_over_n=1e-3)
        trainer = MAPTrainer(model, args, train_dataset=train, eval_dataset=test)
        trainer.train()
        ```
    """

    config_class = MAPConfig

    def __init__(self, *args: Any, **kwargs: Any):
        self._priors = None
        super().__init__(*args, **kwargs)
        _ = self.priors  # made now: mu is what the model holds before it is trained

    @property
    def priors(self) -> tuple[GaussianPrior, GaussianPrior]:
        """p(w) of the backbone and p(V) of the head, up to their variances."""
        if self._priors is None:
            weights = values_of(parameters_by_name(self.model))
            names = head_parameter_names(self.model, self.args.head_names)
            backbone = self._make_prior(names)
            backbone.check_matches(backbone_of(self.model, names))
            self._priors = backbone, IsotropicPrior.l2_zero({name: weights[name] for name in names})
        return self._priors

    @property
    def strengths(self) -> tuple[float, float]:
        """alpha/N or 1/(lambda N) of the backbone, beta/N of the head."""
        args = self.args
        return 1 / (args.lambda_ * self._known_n()) if args.prior == "ptyl" else args.alpha_over_n, args.beta_over_n

    def penalty(self) -> Penalty:
        """strength/2 (w - mu_p)^T Sigma_p^-1 (w - mu_p) at the present weights, of the backbone and of the head."""
        weights = values_of(parameters_by_name(self.model))
        parts = zip(self.priors, self.strengths, strict=True)
        return Penalty(*(strength / 2 * prior.mahalanobis(prior.own(weights)) for prior, strength in parts))

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model, and with it a new mu."""
        self._priors = None
        return super().call_model_init(trial)

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        if self._is_sharded():
            raise ValueError("model: it is sharded, which the baseline does not support. Load it whole, and run DDP.")

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Forward and backward of the NLL; with the last batch of a step the penalty's gradient is added, once."""
        loss = super().training_step(model, inputs, num_items_in_batch)
        finite = torch.isfinite(loss)
        if self.accelerator.sync_gradients:
            norms = self._add_gradient_of_penalty()
            if self.accelerator.scaler is None:  # with a scaler an overflow is expected, and skips the step
                finite &= torch.isfinite(norms).all()
        if not finite:
            backbone, head = self._last_penalty
            self._raise_non_finite(loss, f"penalties of {float(backbone):.4g} (backbone) and {float(head):.4g} (head)")
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
        loss, outputs = self._mean_nll_of_batch(model, inputs)
        if model.training:
            self._last_penalty = self.penalty()
            loss = loss + sum(self._last_penalty).to(loss.dtype)
        return (loss, outputs) if return_outputs else loss

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """`Trainer`'s loop, with running or (`recompute_batch_norm`) recomputed batch-norm statistics."""
        if not (self.args.recompute_batch_norm and batch_norm_layers(self.model)):
            return super().evaluation_loop(*args, **kwargs)
        self.model.eval()  # the mode in which `Trainer` leaves it
        with self.accelerator.autocast():
            statistics = compute_statistics(self.model, self._batch_norm_inputs(), lambda batch: self.model(**batch))
        with with_statistics(self.model, statistics):
            return super().evaluation_loop(*args, **kwargs)

    @torch.no_grad()
    def _add_gradient_of_penalty(self) -> torch.Tensor:
        """In place gradient += strength Sigma_p^-1 (w - mu_p), as `Trainer` would scale it; the norms of the sums."""
        parameters = parameters_by_name(self.model)
        weights, gradients = values_of(parameters), gradients_of(parameters)
        scale = self._loss_scale()
        norms = []
        for prior, strength in zip(self.priors, self.strengths, strict=True):
            norms += _add_pull_(gradients, prior, prior.own(weights), torch.as_tensor(scale * strength))
        return torch.stack(norms)

    def _parts_of_loss(self, nll: float) -> dict[str, float]:
        return {f"penalty_{part}": float(value) for part, value in self._last_penalty._asdict().items()}

    def save_checkpoint(self, folder: str) -> None:
        """Save the weights and the logs, for `load_checkpoint`."""
        self.save_model(folder)
        if self.is_world_process_zero():
            self.state.save_to_json(os.path.join(folder, TRAINER_STATE_NAME))

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        _ = self.priors  # mu is not what the checkpoint holds
        super()._load_from_checkpoint(*args, **kwargs)

    def _known_n(self) -> int:
        num_examples = self._num_train_examples()
        if num_examples is None:
            raise ValueError(
                "num_train_examples: the penalty 1/(2N lambda) needs N. Give the trainer a `train_dataset`, or set it."
            )
        return num_examples


def _add_pull_(
    gradients: Tensors, prior: GaussianPrior, weights: Tensors, strength: torch.Tensor
) -> list[torch.Tensor]:
    """In place gradient += strength * Sigma_p^-1 (w - mu_p); the norms of the pieces that it was done in."""
    precision_product = prior.precision_product(weights)

    def add(block: Block) -> tuple[torch.Tensor, ...]:
        g = block.of(gradients)
        add_scaled_(g, precision_product(block), strength)
        return torch._foreach_norm(g)

    return list(itertools.chain.from_iterable(on_all_cores(add, prior.blocks)))


# ---- What is searched -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A learning rate and penalties.

    Example:
        >>> setting = Setting(learning_rate=0.1, alpha_over_n=1e-3, beta_over_n=1e-3)
        >>> setting.name
        'lr0.1_alpha0.001_beta0.001'
        >>> MAPConfig(output_dir="outputs", prior="l2-sp", **setting.arguments).alpha_over_n
        0.001
    """

    learning_rate: float
    beta_over_n: float
    alpha_over_n: float | None = None
    lambda_: float | None = None

    @property
    def name(self) -> str:
        """A name for folders and tables."""
        backbone = f"lambda{self.lambda_:g}" if self.alpha_over_n is None else f"alpha{self.alpha_over_n:g}"
        return f"lr{self.learning_rate:g}_{backbone}_beta{self.beta_over_n:g}"

    @property
    def arguments(self) -> dict[str, float]:
        """Its numbers as arguments of `MAPConfig`."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def grid(
    prior: str,
    learning_rates: Sequence[float] = LEARNING_RATES,
    penalties: Sequence[float] = PENALTIES_OVER_N,
    lambdas: Sequence[float] = LAMBDAS,
) -> list[Setting]:
    """The paper's grid, or another: 24 settings for L2-zero and L2-SP, with alpha = beta; 240 for PTYL.

    Example:
        >>> len(grid("l2-zero")), len(grid("l2-sp")), len(grid("ptyl"))
        (24, 24, 240)
        >>> [setting.name for setting in grid("l2-sp", learning_rates=[0.1], penalties=[0.01, 0])]
        ['lr0.1_alpha0.01_beta0.01', 'lr0.1_alpha0_beta0']
    """
    _check_prior(prior)
    if prior == "ptyl":
        points = itertools.product(learning_rates, lambdas, penalties)
        return [Setting(rate, lambda_=lambda_, beta_over_n=beta) for rate, lambda_, beta in points]
    points = itertools.product(learning_rates, penalties)
    return [Setting(rate, alpha_over_n=penalty, beta_over_n=penalty) for rate, penalty in points]


def random_settings(
    prior: str, num_settings: int, seed: int = 0, learning_rates: Sequence[float] = LEARNING_RATES
) -> list[Setting]:
    """Points of the continuous space that the grid spans, log-uniform, each number drawn by itself.

    Example:
        >>> [f"{setting.learning_rate:.5f}" for setting in random_settings("l2-sp", 3, seed=1)]
        ['0.00343', '0.07014', '0.03042']
    """
    generator = np.random.default_rng(seed)
    ranges = _ranges(prior, learning_rates)
    return [
        Setting(**{name: float(math.exp(generator.uniform(*np.log(ends)))) for name, ends in ranges.items()})
        for _ in range(num_settings)
    ]


def search_space(
    prior: str, learning_rates: Sequence[float] = LEARNING_RATES
) -> Callable[["optuna.Trial"], dict[str, float]]:
    """The same space for `Trainer.hyperparameter_search` and Optuna's samplers; see `validation_nll`."""
    ranges = _ranges(prior, learning_rates)
    return lambda trial: {name: trial.suggest_float(name, *ends, log=True) for name, ends in ranges.items()}


def validation_nll(metrics: dict[str, float]) -> float:
    """The NLL of `eval_dataset` as the objective of `Trainer.hyperparameter_search`, to be minimised.

    Example:
        ```python
        trainer = MAPTrainer(args=args, model_init=load_model, train_dataset=train, eval_dataset=held_out)
        trainer.hyperparameter_search(
            hp_space=search_space("l2-sp"),
            compute_objective=validation_nll,
            direction="minimize",
            backend="optuna",
            sampler=optuna.samplers.TPESampler(seed=0),
            catch=(FloatingPointError,),  # a run that diverged
        )
        ```
    """
    return metrics["eval_loss"]


def _ranges(prior: str, learning_rates: Sequence[float]) -> dict[str, tuple[float, float]]:
    """From the smallest to the largest positive number of the grid."""
    _check_prior(prior)
    penalties = min(penalty for penalty in PENALTIES_OVER_N if penalty > 0), max(PENALTIES_OVER_N)
    backbone = {"lambda_": (min(LAMBDAS), max(LAMBDAS))} if prior == "ptyl" else {"alpha_over_n": penalties}
    return {"learning_rate": (min(learning_rates), max(learning_rates)), **backbone, "beta_over_n": penalties}


def _check_prior(prior: str) -> None:
    if prior not in PRIORS:
        raise ValueError(f"prior: unknown prior {prior!r}; choose one of {', '.join(PRIORS)}.")


class Split(NamedTuple):
    """Which examples to train on and which to hold out."""

    train: list[int]
    validation: list[int]


def train_validation_split(labels: Sequence[int], seed: int = 0) -> Split:
    """Hold out a fifth, drawn by `seed`, with the classes as frequent as in all; both parts are sorted.

    Of a class of n examples in random order, the k-th stands at (k - 1/2)/n; the fifth that stands lowest is held out.

    Example:
        >>> train_validation_split([0, 0, 0, 0, 0, 1, 1, 1, 1, 1], seed=1)
        Split(train=[0, 2, 3, 4, 6, 7, 8, 9], validation=[1, 5])
    """
    size = len(labels) // 5
    if size == 0:
        raise ValueError(f"labels: of {len(labels)} examples no fifth can be held out; at least 5 are needed.")
    by_class = defaultdict(list)
    for index in torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).tolist():
        by_class[labels[index]].append(index)
    ranked = sorted(
        ((rank + 0.5) / len(members), label, index)
        for label, members in by_class.items()
        for rank, index in enumerate(members)
    )
    held_out = {index for _, _, index in ranked[:size]}
    return Split([index for index in range(len(labels)) if index not in held_out], sorted(held_out))


# ---- Searches -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValidationTrial:
    """A setting trained on four fifths, and how it did on the other; infinite NLL if it diverged.

    Attributes:
        measured: what `measure` gave; nothing if it diverged. It takes no part in the choice, nor in `seconds`.
    """

    setting: Setting
    steps: int
    validation_nll: float
    validation_accuracy: float
    seconds: float
    measured: dict[str, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: what is not finite, as of a trial that diverged, is null."""
        return as_json(asdict(self) | {"setting": self.setting.arguments})


@dataclass(frozen=True)
class SearchResult:
    """All trials, in the order they were made, and the setting with the lowest validation NLL.

    Attributes:
        final_steps: steps of the last run, of the best setting on all examples.
        final_seconds: how long that took.
    """

    method: str
    best: Setting
    trials: tuple[ValidationTrial, ...]
    final_steps: int
    final_seconds: float

    @property
    def runs(self) -> float:
        """The whole cost, in runs as long as the last: 25 for the paper's grid of 24, if none diverged."""
        return sum(trial.steps for trial in self.trials) / self.final_steps + 1

    @property
    def seconds(self) -> float:
        """The whole cost in seconds."""
        return sum(trial.seconds for trial in self.trials) + self.final_seconds

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it, with the cost: NLL and accuracy of a trial that diverged are null."""
        return as_json(asdict(self) | {"runs": self.runs, "seconds": self.seconds})


# a trainer for a setting, that writes into the folder and trains and evaluates on the split
MakeTrainer = Callable[[Setting, str, Split], MAPTrainer]
# numbers to note of a trial, such as its accuracy on test data, to study the search itself
Measure = Callable[[MAPTrainer], dict[str, float]]


def grid_search(
    make_trainer: MakeTrainer,
    settings: Sequence[Setting],
    folder: str | os.PathLike,
    labels: Sequence[int],
    seed: int = 0,
    measure: Measure | None = None,
) -> tuple[MAPTrainer, SearchResult]:
    """Try the settings on a held-out fifth, train the best on all, and return its trainer and what was measured.

    Results are written to `folder` after each trial: called again after it was killed, it goes on with the setting it
    was at. Nothing is kept of the trials but their numbers; the last model is saved in `folder`/model. Of settings
    with the same NLL the first is taken.

    Args:
        make_trainer: makes a trainer for a setting, an output folder and a `Split`, with a model that was not trained
            yet. The last run has all examples in `split.train` and none in `split.validation`.
        settings: at least one; `grid(prior)` is the paper's.
        folder: where to work; one folder for one search.
        labels: the class of each training example.
        seed: draws the fifth.
        measure: called with the trainer of each trial that did not diverge; see `ValidationTrial.measured`.

    Example:
        ```python
        def make_trainer(setting, output_dir, split):
            args = MAPConfig.paper(output_dir, prior="l2-sp", max_steps=6000, save_strategy="no", **setting.arguments)
            train_dataset, eval_dataset = augmented.select(split.train), plain.select(split.validation)
            return MAPTrainer(load_model(), args, train_dataset=train_dataset, eval_dataset=eval_dataset)

        trainer, result = grid_search(make_trainer, grid("l2-sp"), "outputs/grid", plain["label"])
        ```
    """
    return _search_among("grid", make_trainer, settings, folder, labels, seed, measure)


def random_search(
    make_trainer: MakeTrainer,
    prior: str,
    num_trials: int,
    folder: str | os.PathLike,
    labels: Sequence[int],
    seed: int = 0,
    measure: Measure | None = None,
    learning_rates: Sequence[float] = LEARNING_RATES,
) -> tuple[MAPTrainer, SearchResult]:
    """`grid_search` among `random_settings(prior, num_trials, seed, learning_rates)`."""
    settings = random_settings(prior, num_trials, seed, learning_rates)
    return _search_among("random", make_trainer, settings, folder, labels, seed, measure)


def tpe_search(
    make_trainer: MakeTrainer,
    prior: str,
    num_trials: int,
    folder: str | os.PathLike,
    labels: Sequence[int],
    seed: int = 0,
    measure: Measure | None = None,
    learning_rates: Sequence[float] = LEARNING_RATES,
) -> tuple[MAPTrainer, SearchResult]:
    """`grid_search`, but Optuna's TPE proposes each setting of `search_space`, after what it saw of those before.

    `Trainer.hyperparameter_search` (see `validation_nll`) does so too, but returns no record of the trials, forgets
    those that diverged, and cannot go on after it was killed.
    """
    try:
        import optuna
    except ImportError as error:
        raise ImportError("TPE is Optuna's: pip install optuna.") from error
    space = search_space(prior, learning_rates)
    search = {"method": "tpe", "prior": prior, "num_trials": num_trials, "learning_rates": learning_rates}
    session = _Session(make_trainer, Path(folder), search, labels, seed, measure)
    study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=seed))
    for _ in range(num_trials):
        trial = study.ask()
        study.tell(trial, session.run(Setting(**space(trial))).validation_nll)
    return session.finish()


def _search_among(
    method: str,
    make_trainer: MakeTrainer,
    settings: Sequence[Setting],
    folder: str | os.PathLike,
    labels: Sequence[int],
    seed: int,
    measure: Measure | None,
) -> tuple[MAPTrainer, SearchResult]:
    if not settings or len(set(settings)) != len(settings):
        raise ValueError(f"settings: needs at least one, and none twice; got {list(settings)}.")
    search = {"method": method, "settings": [asdict(setting) for setting in settings]}
    session = _Session(make_trainer, Path(folder), search, labels, seed, measure)
    for setting in settings:
        session.run(setting)
    return session.finish()


class _Session:
    """The trials of one search, and their file."""

    def __init__(
        self,
        make_trainer: MakeTrainer,
        folder: Path,
        search: dict[str, Any],
        labels: Sequence[int],
        seed: int,
        measure: Measure | None,
    ):
        self.make_trainer, self.folder, self.method = make_trainer, folder, search["method"]
        self.measure = measure
        self.split = train_validation_split(labels, seed)
        self.all = Split(list(range(len(labels))), [])
        self.file = ResultsFile(folder / RESULTS_FILE, {**search, "seed": seed, "num_examples": len(labels)})
        known = self.file.read()
        self.trials = [
            ValidationTrial(**{**trial, "setting": Setting(**trial["setting"])}) for trial in known.get("trials", [])
        ]
        self.final: dict[str, float] = known.get("final", {})

    def run(self, setting: Setting) -> ValidationTrial:
        """Train a setting on four fifths and evaluate it on the other; what was done before is not done again."""
        for trial in self.trials:
            if trial.setting == setting:
                return trial
        start = time.perf_counter()
        trainer = self._trainer(setting, setting.name, self.split)
        nll, accuracy = _train_and_validate(trainer)
        seconds = time.perf_counter() - start
        measured = self.measure(trainer) if self.measure and math.isfinite(nll) else None
        trial = ValidationTrial(setting, trainer.state.global_step, nll, accuracy, seconds, measured)
        logger.info(f"{setting.name}: validation NLL {nll:.6g}, accuracy {accuracy:.4g}")
        self.trials.append(trial)
        self._write(trainer)
        if trainer.is_world_process_zero():
            shutil.rmtree(self.folder / setting.name, ignore_errors=True)
        return trial

    def finish(self) -> tuple[MAPTrainer, SearchResult]:
        """Train the best setting on all examples, or load what that gave."""
        best = min(self.trials, key=lambda trial: trial.validation_nll)
        if best.validation_nll == math.inf:
            raise FloatingPointError("Every setting diverged. Give smaller learning rates.")
        trainer, folder = self._trainer(best.setting, MODEL_FOLDER, self.all), self.folder / MODEL_FOLDER
        if self.final:
            trainer.load_checkpoint(str(folder))
        else:
            start = time.perf_counter()
            trainer.train()
            self.final = {"steps": trainer.state.global_step, "seconds": time.perf_counter() - start}
            trainer.save_checkpoint(str(folder))
            self._write(trainer)
            if trainer.is_world_process_zero():
                for checkpoint in folder.glob("checkpoint-*"):
                    shutil.rmtree(checkpoint)
        result = SearchResult(
            self.method, best.setting, tuple(self.trials), self.final["steps"], self.final["seconds"]
        )
        return trainer, result

    def _trainer(self, setting: Setting, name: str, split: Split) -> MAPTrainer:
        trainer = self.make_trainer(setting, str(self.folder / name), split)
        for argument, rows in (("train_dataset", split.train), ("eval_dataset", split.validation)):
            dataset = getattr(trainer, argument)
            size = len(dataset) if has_length(dataset) else None
            if rows and size != len(rows):
                raise ValueError(
                    f"make_trainer: the {argument} of its trainer has {size} examples, not the {len(rows)} of the "
                    "split. Train on the rows `split.train` and evaluate on the rows `split.validation`."
                )
        return trainer

    def _write(self, trainer: MAPTrainer) -> None:
        if trainer.is_world_process_zero():
            self.file.write({"trials": [asdict(trial) for trial in self.trials], "final": self.final})


def _train_and_validate(trainer: MAPTrainer) -> tuple[float, float]:
    """NLL and class-averaged accuracy on the validation set; (inf, nan) if training diverged."""
    trainer.compute_metrics = None  # only the loss and the logits are needed, which may not be finite
    try:
        trainer.train()
    except FloatingPointError as error:
        logger.warning(f"A setting diverged: {error}")
        return math.inf, math.nan
    output = trainer.predict(trainer.eval_dataset, metric_key_prefix="validation")
    nll = output.metrics["validation_loss"]
    if not math.isfinite(nll):
        return math.inf, math.nan
    logits = output.predictions[0] if isinstance(output.predictions, tuple) else output.predictions
    return nll, class_averaged_accuracy(probabilities_of(logits), output.label_ids)
