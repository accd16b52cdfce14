"""MAP's learning rate and penalties, chosen by grid, random or TPE search.

A search holds out a fifth of the training set, trains every setting on the rest, takes the one with the lowest NLL on
what was held out, and trains it again on all N examples. Its trials are in a file, Optuna's storage, from which a
search that was killed goes on.
"""

import itertools
import json
import math
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import has_length
from transformers.utils import logging

from hf_deelbo.config import check_count
from hf_deelbo.metrics import class_averaged_accuracy, probabilities_of
from hf_deelbo.priors import PRIORS
from hf_deelbo.sharing.files import as_json

from .map import MAPTrainer

if TYPE_CHECKING:
    import optuna

logger = logging.get_logger(__name__)

# the paper's grids
LEARNING_RATES = (0.1, 0.01, 0.001, 0.0001)
PENALTIES_OVER_N = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 0.0)
LAMBDAS = tuple(10.0**power for power in range(10))

STORAGE_FILE = "search.log"
MODEL_FOLDER = "model"


# ---- What is searched -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A learning rate and penalties.

    Example:
        >>> setting = Setting(learning_rate=0.1, alpha_over_n=1e-3, beta_over_n=1e-3)
        >>> setting.name
        'lr0.1_alpha0.001_beta0.001'
        >>> setting.arguments
        {'learning_rate': 0.1, 'beta_over_n': 0.001, 'alpha_over_n': 0.001}
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


# the arguments of a setting, as an Optuna trial suggests them
Space = Callable[["optuna.Trial"], dict[str, float]]


def search_space(prior: str, learning_rates: Sequence[float] = LEARNING_RATES) -> Space:
    """The same space for Optuna's samplers."""
    ranges = _ranges(prior, learning_rates)
    return lambda trial: {name: trial.suggest_float(name, *ends, log=True) for name, ends in ranges.items()}


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
    # not by `datasets`' `train_test_split`, which draws another fifth than that of the lines in examples/results
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

    A search that goes on after it was killed proposes what it would have proposed.
    """
    check_count("num_trials", num_trials)
    space = search_space(prior, learning_rates)
    about = {"method": "tpe", "prior": prior, "num_trials": num_trials, "learning_rates": learning_rates}
    search = _Search(make_trainer, folder, about, labels, seed, measure)
    search.study.sampler = _tpe_sampler(seed, space, search.trials)
    while len(search.trials) < num_trials:
        search.try_next(space)
    return search.finish()


def _tpe_sampler(seed: int, space: Space, trials: Sequence[ValidationTrial]) -> "optuna.samplers.TPESampler":
    """A sampler whose random numbers stand where they stood after these trials: it proposes them all over again."""
    optuna = _optuna()
    sampler = optuna.samplers.TPESampler(seed=seed)
    past = optuna.create_study(sampler=sampler)
    for trial in trials:
        proposed = past.ask()
        space(proposed)
        past.tell(proposed, trial.validation_nll)
    return sampler


def _search_among(
    method: str,
    make_trainer: MakeTrainer,
    settings: Sequence[Setting],
    folder: str | os.PathLike,
    labels: Sequence[int],
    seed: int,
    measure: Measure | None,
) -> tuple[MAPTrainer, SearchResult]:
    """Try these settings in this order.

    They are given to Optuna rather than drawn by its `GridSampler`, which goes through a grid in another order, and
    `RandomSampler`, which draws other numbers than those in examples/results.
    """
    if not settings or len(set(settings)) != len(settings):
        raise ValueError(f"settings: needs at least one, and none twice; got {list(settings)}.")
    about = {"method": method, "settings": [setting.arguments for setting in settings]}
    search = _Search(make_trainer, folder, about, labels, seed, measure)
    values = {name: [setting.arguments[name] for setting in settings] for name in settings[0].arguments}
    while (num_tried := len(search.trials)) < len(settings):
        search.study.enqueue_trial(settings[num_tried].arguments)
        search.try_next(lambda trial: {name: trial.suggest_float(name, min(v), max(v)) for name, v in values.items()})
    return search.finish()


class _Search:
    """One search, whose trials are an Optuna study in a file of its folder.

    Args:
        about: what is searched, and how; the study of another search is refused.
    """

    def __init__(
        self,
        make_trainer: MakeTrainer,
        folder: str | os.PathLike,
        about: dict[str, Any],
        labels: Sequence[int],
        seed: int,
        measure: Measure | None,
    ):
        self.make_trainer, self.folder, self.measure = make_trainer, Path(folder), measure
        self.split, self.all = train_validation_split(labels, seed), Split(list(range(len(labels))), [])
        self.about = json.loads(json.dumps(about | {"seed": seed, "num_examples": len(labels)}))  # tuples to lists
        self.study = self._open_study()

    def _open_study(self) -> "optuna.Study":
        optuna = _optuna()
        self.folder.mkdir(parents=True, exist_ok=True)
        file = optuna.storages.journal.JournalFileBackend(str(self.folder / STORAGE_FILE))
        storage = optuna.storages.JournalStorage(file)
        study = optuna.create_study(storage=storage, study_name="search", load_if_exists=True)
        known = study.user_attrs.get("about")
        if known is None:
            study.set_user_attr("about", self.about)
        elif known != self.about:
            names = sorted(n for n in known.keys() | self.about.keys() if known.get(n) != self.about.get(n))
            raise ValueError(
                f"folder: {self.folder} holds another search (it differs in: {', '.join(names)}). Choose another "
                "folder, or remove it."
            )
        # a setting that was at work, or waited for it, when the search was killed, is to be tried from its start
        for _ in study.get_trials(states=[optuna.trial.TrialState.WAITING]):
            study.ask()
        for begun in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
            study.tell(begun.number, state=optuna.trial.TrialState.FAIL)
        return study

    @property
    def trials(self) -> list[ValidationTrial]:
        """Those that were finished, in order."""
        finished = self.study.get_trials(states=[_optuna().trial.TrialState.COMPLETE])
        return [
            ValidationTrial(Setting(**trial.params), validation_nll=trial.value, **trial.user_attrs)
            for trial in finished
        ]

    def try_next(self, space: Space) -> None:
        """Train the setting that is next on four fifths, and evaluate it on the other."""
        trial = self.study.ask()
        setting = Setting(**space(trial))
        start = time.perf_counter()
        trainer = self._trainer(setting, setting.name, self.split)
        nll, accuracy = _train_and_validate(trainer)
        seconds = time.perf_counter() - start
        measured = self.measure(trainer) if self.measure and math.isfinite(nll) else None
        numbers = {"steps": trainer.state.global_step, "validation_accuracy": accuracy, "seconds": seconds}
        for name, value in (numbers | {"measured": measured}).items():
            trial.set_user_attr(name, value)
        self.study.tell(trial, nll)
        logger.info(f"{setting.name}: validation NLL {nll:.6g}, accuracy {accuracy:.4g}")
        shutil.rmtree(self.folder / setting.name, ignore_errors=True)

    def finish(self) -> tuple[MAPTrainer, SearchResult]:
        """Train the best setting on all examples, or load what that gave."""
        trials = self.trials
        best = min(trials, key=lambda trial: trial.validation_nll)  # of equals the first
        if best.validation_nll == math.inf:
            raise FloatingPointError("Every setting diverged. Give smaller learning rates.")
        trainer, folder = self._trainer(best.setting, MODEL_FOLDER, self.all), self.folder / MODEL_FOLDER
        final = self.study.user_attrs.get("final")
        if final is not None:
            trainer.load_checkpoint(folder)
        else:
            start = time.perf_counter()
            trainer.train()
            final = {"final_steps": trainer.state.global_step, "final_seconds": time.perf_counter() - start}
            trainer.save_model(str(folder))
            trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))
            self.study.set_user_attr("final", final)
        return trainer, SearchResult(self.about["method"], best.setting, tuple(trials), **final)

    def _trainer(self, setting: Setting, name: str, split: Split) -> MAPTrainer:
        trainer = self.make_trainer(setting, str(self.folder / name), split)
        if trainer.args.world_size > 1:
            raise ValueError(
                f"make_trainer: its trainer is one of {trainer.args.world_size} processes, but a search runs in one. "
                "Start it with `python`."
            )
        for argument, rows in (("train_dataset", split.train), ("eval_dataset", split.validation)):
            dataset = getattr(trainer, argument)
            size = len(dataset) if has_length(dataset) else None
            if rows and size != len(rows):
                raise ValueError(
                    f"make_trainer: the {argument} of its trainer has {size} examples, not the {len(rows)} of the "
                    "split. Train on the rows `split.train` and evaluate on the rows `split.validation`."
                )
        return trainer


def _optuna() -> ModuleType:
    """Optuna, which the scripts that search nothing do without."""
    try:
        import optuna
    except ImportError as error:
        raise ImportError("Searches are Optuna's: pip install optuna.") from error
    return optuna


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
