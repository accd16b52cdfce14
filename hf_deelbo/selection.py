"""Choose a learning rate, and where sigma starts, by J on the training set: no validation set.

Two ways: `"full"` trains every candidate to the end, as the paper does, and takes the highest J. `"halving"` trains
all for a small part of the steps, drops the half with the lower J, trains the rest on, and so forth (successive
halving, Jamieson and Talwalkar 2016): for four candidates it costs 1.3 runs instead of 4. None is dropped before it
has made ten steps, so that in trainings of fewer than 134 it costs more.

After few steps J alone would drop the rates that learn: they move the means at once, and pay for it in the KL until
sigma, which starts small, has grown too. So on the way, halving ranks by `potential`: J at these means with a sigma
that has grown as far as the likelihood lets it.
"""

import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import logging

from .config import check_count
from .files import as_json
from .results_file import ResultsFile
from .trainer import DEELBoTrainer

logger = logging.get_logger(__name__)

METHODS = ("full", "halving")
RESULTS_FILE = "selection.json"
HALVING_BUDGET = 1.3
# sooner, J ranks by chance: after three steps another CPU's rounding made another choice, of a rate that did not learn
LEAST_STEPS = 10
# of a J that only drops candidates: the same noise and examples for all, and their J are far apart
ROUGH_J = {"num_samples": 1, "num_examples": 512}


@dataclass(frozen=True)
class Candidate:
    """What is chosen.

    Example:
        >>> Candidate(learning_rate=0.1, init_sigma=1e-4).name
        'lr0.1_sigma0.0001'
    """

    learning_rate: float
    init_sigma: float

    @property
    def name(self) -> str:
        """A name for folders and tables."""
        return f"lr{self.learning_rate:g}_sigma{self.init_sigma:g}"


@dataclass(frozen=True)
class Trial:
    """J of a candidate after so many steps, its `potential` before the last; minus infinity if it diverged."""

    candidate: Candidate
    steps: int
    de_elbo: float
    seconds: float


@dataclass(frozen=True)
class Selection:
    """All trials, in the order they were made, and the candidate with the highest J in full length.

    Attributes:
        runs: the whole cost, in full runs.
    """

    method: str
    best: Candidate
    trials: tuple[Trial, ...]
    runs: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: J of a trial that diverged is null."""
        return as_json(asdict(self))


# a trainer of the whole run for a candidate, that writes into the folder
MakeTrainer = Callable[[Candidate, str], DEELBoTrainer]


def select(
    make_trainer: MakeTrainer,
    candidates: Sequence[Candidate],
    folder: str | os.PathLike,
    method: str = "halving",
    num_samples: int | None = None,
) -> tuple[DEELBoTrainer, Selection]:
    """Train the candidates and return the trainer of the best one, trained in full, and what was measured.

    Results are written to `folder` after each trial and checkpoints at its end: called again after it was killed, it
    goes on where it was. With one candidate it trains that one.

    Args:
        make_trainer: makes a trainer for a candidate and an output folder, with a model that was not trained yet.
        candidates: at least one.
        folder: where to work; one folder for one selection.
        method: `"full"` or `"halving"`.
        num_samples: weight samples of J in full length; default is the trainer's `args.num_elbo_samples`. On the way
            there, halving takes one, and at most 512 examples.

    Example:
        ```python
        def make_trainer(candidate, output_dir):
            args = DEELBoConfig(output_dir, learning_rate=candidate.learning_rate, init_sigma=candidate.init_sigma)
            return DEELBoTrainer(load_model(), args, train_dataset=train)

        candidates = [Candidate(lr, 1e-4) for lr in (0.1, 0.01, 0.001, 0.0001)]
        trainer, selection = select(make_trainer, candidates, "outputs/selection")
        ```
    """
    if method not in METHODS:
        raise ValueError(f"method: unknown method {method!r}; choose one of {', '.join(METHODS)}.")
    if not candidates or len(set(candidates)) != len(candidates):
        raise ValueError(f"candidates: needs at least one, and none twice; got {list(candidates)}.")
    check_count("num_samples", num_samples)
    session = _Session(make_trainer, Path(folder), method, list(candidates), num_samples)
    survivors, rung = list(candidates), 0
    trials = [session.run(candidate, rung) for candidate in survivors]
    while trials[0].steps < session.max_steps:
        survivors = [trial.candidate for trial in _best_first(trials)][: math.ceil(len(survivors) / 2)]
        rung += 1
        trials = [session.run(candidate, rung) for candidate in survivors]
    best = _best_first(trials)[0]
    if best.de_elbo == -math.inf:
        raise FloatingPointError("Every candidate diverged. Give smaller learning rates.")
    session.clean_up(keep=best.candidate)
    return session.trainer_of(best.candidate), Selection(method, best.candidate, tuple(session.trials), session.runs())


def halving_steps(num_candidates: int, max_steps: int) -> list[int]:
    """After how many steps half of the candidates are dropped, each time, in a training of `max_steps`.

    They are s, 2s, 4s, ... With n_k candidates left, n_{k+1} = ceil(n_k / 2), all costs n_0 s + n_1 s + n_2 2s + ...
    + (max_steps - 2^(K-1) s) steps, and s is such that this is `HALVING_BUDGET` runs, but at least `LEAST_STEPS`.

    Example:
        >>> halving_steps(4, max_steps=6000)
        [450, 900]
        >>> halving_steps(4, max_steps=50)
        [10, 20]
        >>> halving_steps(4, max_steps=15)  # the two that are left are trained to the end
        [10]
    """
    counts = _candidates_left(num_candidates)
    num_rungs = len(counts) - 1
    if num_rungs == 0:
        return []
    cost = counts[0] + sum(counts[k] * 2 ** (k - 1) for k in range(1, num_rungs)) - 2 ** (num_rungs - 1)
    first = max(LEAST_STEPS, math.floor((HALVING_BUDGET - 1) / cost * max_steps + 1e-9))
    return [steps for steps in (first * 2**k for k in range(num_rungs)) if steps < max_steps]


def halving_runs(num_candidates: int, max_steps: int) -> float:
    """What halving costs, in full runs.

    Example:
        >>> halving_runs(4, max_steps=6000)
        1.3
        >>> halving_runs(4, max_steps=50)
        1.8
    """
    total, done = 0, 0
    rungs = [*halving_steps(num_candidates, max_steps), max_steps]
    for steps, left in zip(rungs, _candidates_left(num_candidates), strict=False):
        total += left * (steps - done)
        done = steps
    return total / max_steps


def _candidates_left(num_candidates: int) -> list[int]:
    """At first, and after each time that half of them are dropped."""
    counts = [num_candidates]
    while counts[-1] > 1:
        counts.append(math.ceil(counts[-1] / 2))
    return counts


def potential(trainer: DEELBoTrainer, **kwargs: Any) -> float:
    """J at the present means, at the best of sigma, 4 sigma, 16 sigma, ... that cost the likelihood nothing.

    Each has its own lambda* and tau*. What costs the likelihood nothing only makes the KL smaller, so training would
    go there. A larger sigma is tried while the KL is more than a hundredth of the rest of J, and taken if the NLL
    rises by no more than a hundredth.

    Args:
        trainer: it keeps its own sigma.
        **kwargs: of its `de_elbo`.

    Example:
        ```python
        trainer.train()
        assert potential(trainer) >= trainer.de_elbo().value
        ```
    """
    posterior = trainer.posterior
    best, sigma = trainer.de_elbo(**kwargs), float(posterior.sigma)
    most_nll = 1.01 * best.nll
    while best.kl > 0.01 * -best.kappa * best.log_likelihood:
        sigma *= 4
        with posterior.at_sigma(sigma):
            larger = trainer.de_elbo(**kwargs)
        if not (larger.nll <= most_nll and larger.value > best.value):
            break
        best = larger
    return best.value


def elbo_objective(trainer: DEELBoTrainer) -> Callable[[dict[str, float]], float]:
    """J as the objective of `Trainer.hyperparameter_search`, to be maximised.

    Example:
        ```python
        trainer.hyperparameter_search(
            hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 0.1, log=True)},
            compute_objective=elbo_objective(trainer),
            direction="maximize",
        )
        ```
    """
    return lambda metrics: trainer.de_elbo().value


class _StopAt(TrainerCallback):
    """Stops at a step, with a checkpoint to go on from."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        if state.global_step >= self.step:
            control.should_save = True
            control.should_training_stop = True
        return control


class _Session:
    """The trials of one selection, and their file."""

    def __init__(
        self,
        make_trainer: MakeTrainer,
        folder: Path,
        method: str,
        candidates: list[Candidate],
        num_samples: int | None,
    ):
        self.make_trainer, self.folder, self.num_samples = make_trainer, folder, num_samples
        self.method, self.num_candidates = method, len(candidates)
        search = {"method": method, "candidates": [asdict(candidate) for candidate in candidates]}
        self.file = ResultsFile(folder / RESULTS_FILE, search)
        known = self.file.read()
        self.max_steps = known.get("max_steps")
        self.trials = [
            Trial(**{**trial, "candidate": Candidate(**trial["candidate"])}) for trial in known.get("trials", [])
        ]
        self._last: tuple[Candidate, DEELBoTrainer] | None = None

    def run(self, candidate: Candidate, rung: int) -> Trial:
        """Train a candidate up to the steps of a rung and measure it; what was done before is not done again."""
        start, trainer = time.perf_counter(), None
        if self.max_steps is None:
            trainer = self._new_trainer(candidate)
            self.max_steps = _num_steps(trainer)
        rungs = halving_steps(self.num_candidates, self.max_steps) if self.method == "halving" else []
        steps = [*rungs, self.max_steps][rung]
        for trial in self.trials:
            if (trial.candidate, trial.steps) == (candidate, steps):
                return trial
        if trainer is None:
            trainer = self._new_trainer(candidate)
        value = self._train_and_measure(trainer, steps)
        trial = Trial(candidate, steps, value, time.perf_counter() - start)
        logger.info(f"{candidate.name}: J = {value:.6g} after {steps} of {self.max_steps} steps")
        self._last = candidate, trainer
        self.trials.append(trial)
        if trainer.is_world_process_zero():
            self.file.write({"max_steps": self.max_steps, "trials": [asdict(trial) for trial in self.trials]})
        return trial

    def trainer_of(self, candidate: Candidate) -> DEELBoTrainer:
        """The trainer that trained the candidate in full, or one that loads what it learned."""
        if self._last is not None and self._last[0] == candidate:
            return self._last[1]
        trainer = self._new_trainer(candidate)
        trainer.load_checkpoint(get_last_checkpoint(trainer.args.output_dir))
        return trainer

    def runs(self) -> float:
        """The cost of all, in full runs: the steps that each candidate was taken to."""
        furthest = {}
        for trial in self.trials:
            furthest[trial.candidate] = max(trial.steps, furthest.get(trial.candidate, 0))
        return sum(furthest.values()) / self.max_steps

    def clean_up(self, keep: Candidate) -> None:
        """Remove the checkpoints of the others."""
        for trial in self.trials:
            if trial.candidate != keep:
                shutil.rmtree(self.folder / trial.candidate.name, ignore_errors=True)

    def _new_trainer(self, candidate: Candidate) -> DEELBoTrainer:
        self._last = None  # before there is another model in memory
        return self.make_trainer(candidate, str(self.folder / candidate.name))

    def _train_and_measure(self, trainer: DEELBoTrainer, steps: int) -> float:
        trainer.add_callback(_StopAt(steps))
        checkpoint = get_last_checkpoint(trainer.args.output_dir) if os.path.isdir(trainer.args.output_dir) else None
        try:
            if checkpoint is not None and int(checkpoint.rsplit("-", 1)[-1]) >= steps:  # killed before J was noted
                trainer.load_checkpoint(checkpoint)
            else:
                trainer.train(resume_from_checkpoint=checkpoint)
            if steps < self.max_steps:
                value = potential(trainer, **ROUGH_J)
            else:
                value = trainer.de_elbo(num_samples=self.num_samples).value
        except FloatingPointError as error:
            logger.warning(f"A candidate diverged: {error}")
            return -math.inf
        finally:
            trainer.remove_callback(_StopAt)
        return value if math.isfinite(value) else -math.inf


def _num_steps(trainer: DEELBoTrainer) -> int:
    return trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]


def _best_first(trials: Sequence[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: -trial.de_elbo)
