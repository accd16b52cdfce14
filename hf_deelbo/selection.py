"""Choose a learning rate by J on the training set: no validation set.

Two ways: `"full"` trains with every rate to the end, as the paper does, and takes the highest J. `"halving"` trains
with all for a small part of the steps, drops the half with the lower J, trains the rest on, and so forth (successive
halving, Jamieson and Talwalkar 2016): for four rates it costs 1.3 runs instead of 4. None is dropped before it has
made ten steps, nor is the last choice made before the KL has its full weight (`kl_warmup_epochs`), as before it does
not train by J: on 200 texts, a rate that ended far worse had the higher J until then. So a training of few steps or
epochs costs more: 2 runs for one of 10 epochs.

Halving needs sigma at its best wherever it stops, as `sigma_update="closed-form"` has it. Where the optimiser moves
sigma from a small start, the rates that learn have the lowest J at first, as the KL charges them for having moved.
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
from transformers.trainer_utils import has_length
from transformers.utils import logging

from .callbacks import examples_of_a_step
from .config import check_count
from .data import class_balanced_indices, column_of_labels
from .reporting import Report
from .sharing.checkpoints import newest_whole
from .sharing.files import ResultsFile, as_json
from .temperature import Temperatures
from .trainer import DEELBoTrainer

logger = logging.get_logger(__name__)

METHODS = ("full", "halving")
RESULTS_FILE, HELD_OUT = "selection.json", "held_out"
HALVING_BUDGET = 1.3
# sooner, J ranks by chance: after three steps another CPU's rounding made another choice, of a rate that did not learn
LEAST_STEPS = 10
# of a J that only drops rates: the same noise and examples for all, and their J are far apart
ROUGH_J = {"num_samples": 1, "num_examples": 512}


@dataclass(frozen=True)
class Trial:
    """J after so many steps with a learning rate; minus infinity if it diverged."""

    learning_rate: float
    steps: int
    de_elbo: float
    seconds: float


@dataclass(frozen=True)
class Selection:
    """All trials, in the order they were made, and the learning rate with the highest J in full length.

    Attributes:
        runs: the whole cost, in full runs.
        seconds: the same in seconds.
        temperatures: of predictions, fitted on a fifth that was held out of one more run; 1 if that was not asked for.
    """

    method: str
    best_learning_rate: float
    trials: tuple[Trial, ...]
    runs: float
    seconds: float
    temperatures: Temperatures

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: J of a trial that diverged is null."""
        return as_json(asdict(self) | {"temperatures": self.temperatures._asdict()})


# a trainer of the whole run for a learning rate, that writes into the folder
MakeTrainer = Callable[[float, str], DEELBoTrainer]


def select(
    make_trainer: MakeTrainer,
    learning_rates: Sequence[float],
    folder: str | os.PathLike,
    method: str = "halving",
    num_samples: int | None = None,
    calibrate: bool = False,
    report: Report | None = None,
) -> tuple[DEELBoTrainer, Selection]:
    """Train with the learning rates and return the trainer of the best, trained in full, and what was measured.

    Results are written to `folder` after each trial and checkpoints at its end: called again after it was killed, it
    goes on where it was. With one rate it trains with that one.

    Args:
        make_trainer: makes a trainer for a learning rate and an output folder, with a model that was not trained yet.
        learning_rates: at least one.
        folder: where to work; one folder for one selection.
        method: `"full"` or `"halving"`.
        num_samples: weight samples of J in full length; default is the trainer's `args.num_elbo_samples`. On the way
            there, halving takes one, and at most 512 examples.
        calibrate: train with the chosen rate once more, on four fifths of the rows, and fit the temperatures of
            predictions on the other fifth, class-balanced. The posterior of all rows has them then, although no row is
            kept from it.
        report: tells what is tried, kept and dropped, and how long it will take; `Report()` prints it. Default is to
            log it, at level info.

    Example:
        ```python
        def make_trainer(learning_rate, output_dir):
            args = DEELBoConfig(output_dir, learning_rate=learning_rate, num_train_epochs=10)
            return DEELBoTrainer(load_model(), args, train_dataset=train)

        trainer, selection = select(make_trainer, [2e-4, 1e-4, 5e-5, 2e-5], "outputs/selection")
        ```
    """
    if method not in METHODS:
        raise ValueError(f"method: unknown method {method!r}; choose one of {', '.join(METHODS)}.")
    if not learning_rates or len(set(learning_rates)) != len(learning_rates):
        raise ValueError(f"learning_rates: needs at least one, and none twice; got {list(learning_rates)}.")
    check_count("num_samples", num_samples)
    report = Report(logger.info, bar=False) if report is None else report
    session = _Session(make_trainer, Path(folder), method, list(learning_rates), num_samples, calibrate, report)
    trials = session.try_all(learning_rates, rung=0)
    rung = 0
    while trials[0].steps < session.max_steps:
        survivors = _best_first(trials)[: math.ceil(len(trials) / 2)]
        _tell_dropped(report, trials, survivors)
        rung += 1
        trials = session.try_all([trial.learning_rate for trial in survivors], rung)
    best = _best_first(trials)[0]
    if not math.isfinite(best.de_elbo):
        raise FloatingPointError("Every learning rate diverged. Give smaller ones.")
    if len(trials) > 1:
        report.say(f"Chosen: learning rate {best.learning_rate:g}, with the highest J.")
    session.clean_up(keep=best.learning_rate)
    temperatures = session.temperatures(best.learning_rate) if calibrate else Temperatures()
    cost = session.runs(), session.seconds()
    selection = Selection(method, best.learning_rate, tuple(session.trials), *cost, temperatures)
    trainer = session.trainer_of(best.learning_rate)
    trainer.posterior.temperatures = temperatures
    return trainer, selection


def halving_steps(num_rates: int, max_steps: int, warmup_steps: int = 0) -> list[int]:
    """After how many steps half of the learning rates are dropped, each time, in a training of `max_steps`.

    They are s, 2s, 4s, ... With n_k rates left, n_{k+1} = ceil(n_k / 2), all costs n_0 s + n_1 s + n_2 2s + ... +
    (max_steps - 2^(K-1) s) steps, and s is such that this is `HALVING_BUDGET` runs, but at least `LEAST_STEPS`, and
    such that the last is not within `warmup_steps`, in which the KL's weight grows.

    Example:
        >>> halving_steps(4, max_steps=6000)
        [450, 900]
        >>> halving_steps(4, max_steps=50)
        [10, 20]
        >>> halving_steps(4, max_steps=130, warmup_steps=63)
        [32, 64]
        >>> halving_steps(4, max_steps=15)  # the two that are left are trained to the end
        [10]
    """
    counts = _rates_left(num_rates)
    num_rungs = len(counts) - 1
    if num_rungs == 0:
        return []
    cost = counts[0] + sum(counts[k] * 2 ** (k - 1) for k in range(1, num_rungs)) - 2 ** (num_rungs - 1)
    in_budget = math.floor((HALVING_BUDGET - 1) / cost * max_steps + 1e-9)
    first = max(LEAST_STEPS, in_budget, math.ceil(warmup_steps / 2 ** (num_rungs - 1)))
    return [steps for steps in (first * 2**k for k in range(num_rungs)) if steps < max_steps]


def halving_runs(num_rates: int, max_steps: int, warmup_steps: int = 0) -> float:
    """What halving costs, in full runs.

    Example:
        >>> halving_runs(4, max_steps=6000)
        1.3
        >>> halving_runs(4, max_steps=50)
        1.8
        >>> halving_runs(4, max_steps=128, warmup_steps=64)
        2.0
    """
    total, done = 0, 0
    rungs = [*halving_steps(num_rates, max_steps, warmup_steps), max_steps]
    for steps, left in zip(rungs, _rates_left(num_rates), strict=False):
        total += left * (steps - done)
        done = steps
    return total / max_steps


def _rates_left(num_rates: int) -> list[int]:
    """At first, and after each time that half of them are dropped."""
    counts = [num_rates]
    while counts[-1] > 1:
        counts.append(math.ceil(counts[-1] / 2))
    return counts


def elbo_objective(trainer: DEELBoTrainer) -> Callable[[dict[str, float]], float]:
    """J as the objective of `Trainer.hyperparameter_search`, to be maximised; minus infinity if it diverged.

    A search over kappa is refused, as J of different kappas cannot be compared.

    Example:
        ```python
        trainer.hyperparameter_search(
            hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-3, log=True)},
            compute_objective=elbo_objective(trainer),
            direction="maximize",
        )
        ```
    """
    kappas = set()

    def objective(metrics: dict[str, float]) -> float:
        kappas.add(trainer.posterior.kappa)
        if len(kappas) > 1:
            low, high = min(kappas), max(kappas)
            raise ValueError(f"hp_space: J of different kappas, {low:.6g} and {high:.6g}, cannot be compared.")
        return _or_the_worst(trainer.de_elbo().value)

    return objective


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
        learning_rates: list[float],
        num_samples: int | None,
        calibrate: bool,
        report: Report,
    ):
        self.make_trainer, self.folder, self.num_samples = make_trainer, folder, num_samples
        self.method, self.num_rates = method, len(learning_rates)
        self.calibrate, self.report = calibrate, report
        self.file = ResultsFile(folder / RESULTS_FILE, {"method": method, "learning_rates": learning_rates})
        known = self.file.read()
        self.max_steps, self.warmup_steps = known.get("max_steps"), known.get("warmup_steps", 0)
        self.num_parameters: int | None = known.get("num_parameters")
        self.trials = [Trial(**trial) for trial in known.get("trials", [])]
        self.calibration: dict[str, Any] = known.get("calibration", {})
        self.kappa: float | None = None
        self._last: tuple[float, DEELBoTrainer] | None = None
        self._told_steps = False

    def try_all(self, learning_rates: Sequence[float], rung: int) -> list[Trial]:
        """`run` them all."""
        count = len(learning_rates)
        return [self.run(rate, rung, f"{place} of {count}") for place, rate in enumerate(learning_rates, 1)]

    def run(self, learning_rate: float, rung: int, place: str) -> Trial:
        """Train up to the steps of a rung and measure J; what was done before is not done again."""
        trainer = None
        if self.max_steps is None or self.num_parameters is None:
            trainer = self._new_trainer(learning_rate)
            self.max_steps, self.warmup_steps = _num_steps(trainer)
            self.num_parameters = trainer.posterior.num_parameters
        is_halving = self.method == "halving"
        rungs = halving_steps(self.num_rates, self.max_steps, self.warmup_steps) if is_halving else []
        if not self._told_steps:
            self._tell_steps(rungs)
        before, steps = [0, *rungs, self.max_steps][rung : rung + 2]
        name, at = f"learning rate {learning_rate:g} ({place})", (learning_rate, steps)
        known = next((trial for trial in self.trials if (trial.learning_rate, trial.steps) == at), None)
        with self.report.part(name, steps - before):
            trial = known or self._run(learning_rate, steps, trainer)
        quality = f"J/D {trial.de_elbo / self.num_parameters:.4f}" if math.isfinite(trial.de_elbo) else "diverged"
        from_before = ", known from before" if known else ""
        self.report.say(f"  {name}: {steps} of {self.max_steps} steps, {quality}{from_before}{self.report.left()}")
        return trial

    def _run(self, learning_rate: float, steps: int, trainer: DEELBoTrainer | None) -> Trial:
        start = time.perf_counter()
        trainer = self._new_trainer(learning_rate) if trainer is None else trainer
        self._check_kappa(trainer)
        value = self._train_and_measure(trainer, steps)
        trial = Trial(learning_rate, steps, value, time.perf_counter() - start)
        self._last = learning_rate, trainer
        self.trials.append(trial)
        self._note(trainer)
        return trial

    def temperatures(self, learning_rate: float) -> Temperatures:
        """Of a run without a fifth of the rows, fitted on them; what was fitted before is not fitted again."""
        with self.report.part("calibration", self._calibration_steps):
            if not self.calibration:
                self._calibrate(learning_rate)
        found = Temperatures(self.calibration["mean"], self.calibration["average"])
        self.report.say(
            f"  temperature of its probabilities {found.mean:.2f} at the mean, {found.average:.2f} averaged"
            + self.report.left()
        )
        return found

    def _calibrate(self, learning_rate: float) -> None:
        start, trainer = time.perf_counter(), self._new_trainer(learning_rate, self.folder / HELD_OUT)
        rows = trainer.hold_out(_a_fifth(trainer))
        self.report.say(f"Calibration: one more run, without {len(rows)} rows, to see how sure it may be of them.")
        trainer.add_callback(self.report)
        trainer.train(resume_from_checkpoint=newest_whole(trainer.args.output_dir))
        found = trainer.calibrate(rows, self.num_samples)
        steps = {"steps": trainer.state.global_step, "seconds": time.perf_counter() - start}
        self.calibration = found._asdict() | steps
        self._note(trainer)

    def _tell_steps(self, rungs: list[int]) -> None:
        """How many there will be."""
        self._told_steps = True
        # epochs of fewer rows have fewer steps; how many is known when the run is made
        self._calibration_steps = self.max_steps if self.calibrate else 0
        runs = halving_runs(self.num_rates, self.max_steps, self.warmup_steps) if rungs else self.num_rates
        steps = round(runs * self.max_steps)
        self.report.expect(steps + self._calibration_steps)
        how = f"half of those left are dropped after {' and '.join(map(str, rungs))} steps" if rungs else "in full"
        rates = f"{self.num_rates} learning rates, {how}" if self.num_rates > 1 else "one learning rate"
        calibration = f", and {self._calibration_steps} to calibrate" if self.calibrate else ""
        self.report.say(f"Training with {rates}: {steps} steps{calibration}.")

    def _check_kappa(self, trainer: DEELBoTrainer) -> None:
        kappa = trainer.posterior.kappa
        self.kappa = self.kappa or kappa
        if not math.isclose(kappa, self.kappa, rel_tol=1e-6):
            raise ValueError(
                f"make_trainer: its trainers have different kappas, {self.kappa:.6g} and {kappa:.6g}, whose J cannot "
                "be compared. Choose among runs of one kappa."
            )

    def _note(self, trainer: DEELBoTrainer) -> None:
        if trainer.is_world_process_zero():
            steps = {"max_steps": self.max_steps, "warmup_steps": self.warmup_steps}
            steps |= {"num_parameters": self.num_parameters}
            trials = {"trials": [asdict(trial) for trial in self.trials]}
            self.file.write(steps | trials | ({"calibration": self.calibration} if self.calibration else {}))

    def trainer_of(self, learning_rate: float) -> DEELBoTrainer:
        """The trainer that trained with the rate in full, or one that loads what it learned."""
        if self._last is not None and self._last[0] == learning_rate:
            return self._last[1]
        trainer = self._new_trainer(learning_rate)
        trainer.load_checkpoint(newest_whole(trainer.args.output_dir))
        return trainer

    def runs(self) -> float:
        """The cost of all, in full runs: the steps that were made with each rate."""
        furthest = {}
        for trial in self.trials:
            furthest[trial.learning_rate] = max(trial.steps, furthest.get(trial.learning_rate, 0))
        return (sum(furthest.values()) + self.calibration.get("steps", 0)) / self.max_steps

    def seconds(self) -> float:
        """The cost of all, in seconds."""
        return sum(trial.seconds for trial in self.trials) + self.calibration.get("seconds", 0.0)

    def clean_up(self, keep: float) -> None:
        """Remove the checkpoints of the other rates."""
        for trial in self.trials:
            if trial.learning_rate != keep:
                shutil.rmtree(self._folder_of(trial.learning_rate), ignore_errors=True)

    def _folder_of(self, learning_rate: float) -> Path:
        return self.folder / f"lr{learning_rate}"

    def _new_trainer(self, learning_rate: float, folder: str | None = None) -> DEELBoTrainer:
        self._last = None  # before there is another model in memory
        return self.make_trainer(
            learning_rate, str(self.folder / folder if folder else self._folder_of(learning_rate))
        )

    def _train_and_measure(self, trainer: DEELBoTrainer, steps: int) -> float:
        trainer.add_callback(_StopAt(steps))
        trainer.add_callback(self.report)
        checkpoint = newest_whole(trainer.args.output_dir)
        try:
            if checkpoint is not None and int(checkpoint.rsplit("-", 1)[-1]) >= steps:  # killed before J was noted
                trainer.load_checkpoint(checkpoint)
            else:
                trainer.train(resume_from_checkpoint=checkpoint)
            if steps < self.max_steps:
                trainer.posterior.update_variances()
                value = trainer.de_elbo(**ROUGH_J).value
            else:
                value = trainer.de_elbo(num_samples=self.num_samples).value
        except FloatingPointError as error:
            logger.warning(f"A learning rate diverged: {error}")
            return -math.inf
        finally:
            trainer.remove_callback(_StopAt)
            trainer.remove_callback(self.report)
        return _or_the_worst(value)


def planned_runs(trainer: DEELBoTrainer, num_rates: int, max_steps: int, method: str = "halving") -> float:
    """What a choice among so many rates will cost, in full runs of `max_steps`, with trainers like this one."""
    return halving_runs(num_rates, max_steps, _warmup_steps(trainer)) if method == "halving" else float(num_rates)


def _num_steps(trainer: DEELBoTrainer) -> tuple[int, int]:
    """Those of a whole training, and those in which the KL's weight grows."""
    max_steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())[-1]
    return max_steps, _warmup_steps(trainer)


def _warmup_steps(trainer: DEELBoTrainer) -> int:
    return math.ceil(trainer.args.kl_warmup_epochs * trainer.posterior.num_examples / examples_of_a_step(trainer.args))


def _a_fifth(trainer: DEELBoTrainer) -> list[int]:
    """Rows of the training set, class-balanced as far as labels can be told."""
    dataset = trainer.train_dataset
    size = len(dataset) // 5 if has_length(dataset) else 0
    if size == 0:
        raise ValueError("calibrate: needs a training set that tells its length, of at least five rows.")
    return class_balanced_indices(column_of_labels(dataset) or [0] * len(dataset), size, trainer.args.seed)


def _tell_dropped(report: Report, trials: Sequence[Trial], survivors: Sequence[Trial]) -> None:
    dropped = [trial for trial in trials if trial not in survivors]
    if dropped:
        kept, lost = (" and ".join(f"{trial.learning_rate:g}" for trial in some) for some in (survivors, dropped))
        report.say(f"Kept {kept}, dropped {lost}: the lower J after {trials[0].steps} steps.")


def _best_first(trials: Sequence[Trial]) -> list[Trial]:
    return sorted(trials, key=lambda trial: -_or_the_worst(trial.de_elbo))


def _or_the_worst(value: float) -> float:
    """A number that is not finite compares with nothing."""
    return value if math.isfinite(value) else -math.inf
