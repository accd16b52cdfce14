"""Runs of a study: what each is, what it measures, and the file that holds one line for each.

A line is a JSON object: `id` (the hash of `config`), `config`, `date`, `commit`, `machine`, the cost (`runs`,
`seconds`, null where they were measured beside other work), the `choice` that was made and the `trials` behind it, the
`test` metrics and, of the DE ELBo, what it `learned`; with PTYL's prior also the hash of that (`ptyl_prior`).
"""

import hashlib
import itertools
import json
import os
import platform
import subprocess
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from hf_deelbo.config import DEELBoConfig
from hf_deelbo.metrics import named_metrics
from hf_deelbo.plots import FixedPosterior
from hf_deelbo.selection import halving_runs, select
from hf_deelbo.sharing.files import as_json, write_whole
from hf_deelbo.sharing.hub import fetch
from hf_deelbo.sharing.prior_files import PriorConfig
from hf_deelbo.temperature import Temperatures
from hf_deelbo.trainer import DEELBoTrainer

from .backbones import EMBEDDED_MODEL, EMBEDDED_MODELS
from .batch_norm import recomputed_batch_norm
from .data import EMBEDDED_DATASET
from .map import MAPConfig, MAPTrainer
from .searches import (
    LEARNING_RATES,
    PENALTIES_OVER_N,
    Setting,
    Split,
    grid,
    grid_search,
    random_search,
    tpe_search,
)
from .tasks import DataArguments, ModelArguments, Task, quiet

REPOSITORY = Path(__file__).parents[2]
DEELBO_METHODS = ("deelbo-full", "deelbo-halving", "deelbo-single", "elbo")
MAP_METHODS = ("map-grid", "map-random", "map-tpe")
# fields of a run whose value is a list; every other field with a list stands for several runs
_LISTS = ("learning_rates", "penalties")
_OF_DEELBO = ("sigma_update", "grouping", "init_sigma", "kappa", "num_samples", "calibrate")
_OF_MAP = ("penalties", "num_trials")


# ---- What a run is --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudyRun:
    """One line of a study, before it is run.

    Attributes:
        dataset, train_size, subset_seed: what it learns from; N and which class-balanced subset.
        method: `"deelbo-full"` and `"deelbo-halving"` choose a learning rate by J, `"deelbo-single"` has one and
            `"elbo"` is the plain ELBo, kappa = 1, by halving; `"map-grid"`, `"map-random"` and `"map-tpe"` are
            searches on held-out data.
        prior, model: as for the trainers.
        image_size, horizontal_flip: of images.
        max_seq_length: of texts; default is 128 tokens.
        steps: of each training run.
        learning_rates: candidates.
        sigma_update, grouping, init_sigma, kappa, num_samples: of the DE ELBo; the last is for J and for averages.
        calibrate: fit temperatures on a fifth that is held out of one more run (the DE ELBo).
        penalties, num_trials: of MAP; the first for the grid, the second for other searches.
        num_test: at most so many test examples.
        seed: of the head, the order of the examples and the augmentation.

    Example:
        >>> run = StudyRun("digits", 100, 1001, "map-grid", steps=50)
        >>> run.id, run.num_runs
        ('43a0f5bfcd', 25)
    """

    dataset: str
    train_size: int
    subset_seed: int
    method: str
    prior: str = "l2-sp"
    model: str = EMBEDDED_MODEL
    image_size: int = 64
    horizontal_flip: bool = True
    steps: int = 150
    learning_rates: tuple[float, ...] = LEARNING_RATES
    sigma_update: str = DEELBoConfig.sigma_update
    grouping: str = DEELBoConfig.grouping
    init_sigma: float = DEELBoConfig.init_sigma
    kappa: float | str = "auto"
    num_samples: int = 10
    penalties: tuple[float, ...] = PENALTIES_OVER_N
    num_trials: int = 24
    num_test: int = 2000
    seed: int = 42
    max_seq_length: int | None = None
    calibrate: bool | None = None

    def __post_init__(self):
        methods = DEELBO_METHODS + MAP_METHODS
        if self.method not in methods:
            raise ValueError(f"method: unknown method {self.method!r}; choose one of {', '.join(methods)}.")
        if self.method == "deelbo-single" and len(self.learning_rates) != 1:
            raise ValueError(
                f'learning_rates: "deelbo-single" makes no choice; give one rate, not {self.learning_rates}.'
            )

    @property
    def is_map(self) -> bool:
        """Whether it is the baseline."""
        return self.method in MAP_METHODS

    @property
    def config(self) -> dict[str, Any]:
        """The fields that matter to its method, as JSON has them."""
        others = _OF_DEELBO if self.is_map else _OF_MAP
        if self.method == "elbo":
            others += ("kappa",)
        if self.method in MAP_METHODS:
            others += ("num_trials",) if self.method == "map-grid" else ("penalties", "learning_rates")
        content = {name: value for name, value in asdict(self).items() if name not in others and value is not None}
        return json.loads(json.dumps(content))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "StudyRun":
        """The run of a line."""
        return cls(**{name: tuple(value) if name in _LISTS else value for name, value in config.items()})

    @cached_property
    def id(self) -> str:
        """A hash of `config`."""
        return hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def num_runs(self) -> float:
        """How many full training runs it will cost."""
        if self.method == "map-grid":
            return len(grid(self.prior, self.learning_rates, self.penalties)) + 1
        if self.is_map:
            return self.num_trials + 1
        count = len(self.learning_rates)
        return count if self.method == "deelbo-full" else halving_runs(count, self.steps)


def expand(block: Mapping[str, Any]) -> list[StudyRun]:
    """The runs of a block of a matrix: fields with a list of values stand for one run each.

    Example:
        >>> shared = {"dataset": "digits", "train_size": 100}
        >>> runs = expand(shared | {"subset_seed": [1001, 2001], "method": ["elbo", "map-tpe"]})
        >>> [(run.subset_seed, run.method) for run in runs]
        [(1001, 'elbo'), (1001, 'map-tpe'), (2001, 'elbo'), (2001, 'map-tpe')]
    """
    unknown = block.keys() - {part.name for part in fields(StudyRun)}
    if unknown:
        raise ValueError(f"{sorted(unknown)[0]}: a run has no such field.")
    axes = [
        [(name, tuple(value))]
        if name in _LISTS
        else [(name, v) for v in (value if isinstance(value, list) else [value])]
        for name, value in block.items()
    ]
    return [StudyRun(**dict(point)) for point in itertools.product(*axes)]


# ---- Running it -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Where things are, which makes no difference to a run.

    Attributes:
        work_dir: for what is needed to go on after a run was killed.
        data_root, model_root: folders with datasets and models by their names; default is the Hub.
        ptyl_prior: the saved prior of runs with `prior="ptyl"`.
        cache_dir: for resized images.
    """

    work_dir: str
    data_root: str | None = None
    ptyl_prior: str | None = None
    cache_dir: str | None = None
    model_root: str | None = None

    def of(self, run: StudyRun) -> Path:
        """The folder of a run."""
        return Path(self.work_dir) / run.id


def carry_out(run: StudyRun, places: Places) -> dict[str, Any]:
    """Train, choose and test; the line to note. Called again after it was killed, it goes on where it was."""
    task = load_task(run, places)
    numbers = _carry_out_map(run, task, places) if run.is_map else _carry_out_deelbo(run, task, places)
    about = {"id": run.id, "config": run.config, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    about |= {"commit": commit(), "machine": machine()}
    if run.prior == "ptyl":
        _, saved = fetch(places.ptyl_prior, PriorConfig, only_config=True)
        about["ptyl_prior"] = saved.sha256[PriorConfig.TENSORS_FILE]
    sizes = {"num_classes": len(task.class_names), "num_test_examples": len(task.test)}
    return as_json(about | sizes | numbers)


def _carry_out_deelbo(run: StudyRun, task: Task, places: Places) -> dict[str, Any]:
    method = "full" if run.method == "deelbo-full" else "halving"
    make_trainer = partial(make_deelbo_trainer, run, task, places)
    trainer, selection = select(
        make_trainer, run.learning_rates, places.of(run), method, calibrate=bool(run.calibrate)
    )
    de_elbo, posterior = trainer.posterior.de_elbo or trainer.de_elbo(), trainer.posterior
    test = _tests(trainer, task, run.num_samples)
    uncalibrated = {}
    if run.calibrate:
        posterior.temperatures = Temperatures()
        uncalibrated = {"temperatures": selection.temperatures._asdict()}
        uncalibrated |= {"uncalibrated": _tests(trainer, task, run.num_samples)}
    return {
        "choice": {"learning_rate": selection.best_learning_rate},
        "runs": selection.runs,
        "seconds": selection.seconds,
        "test": test,
        "de_elbo": de_elbo.to_dict(),
        "learned": {name: float(getattr(posterior, name)) for name in ("lambda_", "tau", "sigma", "kappa")},
        "num_parameters": posterior.num_parameters,
        **uncalibrated,
        "posterior": asdict(FixedPosterior.from_posterior(run.method, posterior, de_elbo.nll)),
        "training_nll": _training_nll(trainer),
        "trials": selection.to_dict()["trials"],
    }


def _carry_out_map(run: StudyRun, task: Task, places: Places) -> dict[str, Any]:
    make_trainer, folder = partial(make_map_trainer, run, task, places), places.of(run)
    rest = {"folder": folder, "labels": task.labels, "measure": lambda trainer: _test(trainer, task)}
    if run.method == "map-grid":
        settings = grid(run.prior, run.learning_rates, run.penalties)
        trainer, result = grid_search(make_trainer, settings, **rest)
    else:
        search = random_search if run.method == "map-random" else tpe_search
        trainer, result = search(make_trainer, run.prior, run.num_trials, **rest)
    return {
        "choice": result.best.arguments,
        "runs": result.runs,
        "seconds": result.seconds,
        "test": {"mean": _test(trainer, task), "mean_recomputed": _test_recomputed(trainer, task)},
        "num_parameters": sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        "training_nll": _training_nll(trainer),
        "trials": [trial.to_dict() for trial in result.trials],
    }


def load_task(run: StudyRun, places: Places) -> Task:
    """What the run learns."""
    data = DataArguments(
        dataset_name=_under(places.data_root, run.dataset, embedded=(EMBEDDED_DATASET,)),
        train_size=run.train_size,
        subset_seed=run.subset_seed,
        max_eval_samples=run.num_test,
        image_size=run.image_size,
        horizontal_flip=run.horizontal_flip,
        cache_images=True,
    )
    if run.max_seq_length is not None:
        data.max_seq_length = run.max_seq_length
    model = _under(places.model_root, run.model, embedded=EMBEDDED_MODELS)
    if run.prior == "ptyl":
        model = places.ptyl_prior  # start at the prior's mean
    return Task(ModelArguments(model, cache_dir=places.cache_dir), data, disable_tqdm=True)


def _under(root: str | None, name: str, embedded: Collection[str]) -> str:
    return name if root is None or name in embedded else os.path.join(root, name)


def _arguments(run: StudyRun, places: Places, output_dir: str) -> dict[str, Any]:
    return {
        "output_dir": output_dir,
        "prior": run.prior,
        "prior_name_or_path": places.ptyl_prior if run.prior == "ptyl" else None,
        "max_steps": run.steps,
        "seed": run.seed,
        "logging_steps": max(1, run.steps // 20),
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def make_deelbo_trainer(
    run: StudyRun, task: Task, places: Places, learning_rate: float, output_dir: str
) -> DEELBoTrainer:
    """A trainer with a fresh model, by the paper's protocol and the run's way of learning sigma."""
    config = DEELBoConfig.paper(
        **_arguments(run, places, output_dir),
        learning_rate=learning_rate,
        sigma_update=run.sigma_update,
        grouping=run.grouping,
        init_sigma=run.init_sigma,
        kappa=1 if run.method == "elbo" else run.kappa,
        num_elbo_samples=run.num_samples,
    )
    task.configure(config)
    model = task.load_model(config.seed)
    return quiet(DEELBoTrainer(model, config, elbo_dataset=task.unaugmented, **task.trainer_arguments))


def make_map_trainer(
    run: StudyRun, task: Task, places: Places, setting: Setting, output_dir: str, split: Split
) -> MAPTrainer:
    """A trainer with a fresh model, by the paper's protocol, on what the split has to train on."""
    config = MAPConfig.paper(**_arguments(run, places, output_dir), **setting.arguments)
    task.configure(config)
    return quiet(task.map_trainer(config, setting, output_dir, split))


def _tests(trainer: DEELBoTrainer, task: Task, num_samples: int) -> dict[str, dict[str, float]]:
    """At the posterior mean, also with batch-norm statistics of there, and averaged over weight samples."""
    test = {"mean": _test(trainer, task), "mean_recomputed": _test_recomputed(trainer, task)}
    trainer.args.num_eval_samples = num_samples
    test["average"] = _test(trainer, task)
    trainer.args.num_eval_samples = 0
    return test


def _test(trainer: Trainer, task: Task) -> dict[str, float]:
    compute_metrics, trainer.compute_metrics = trainer.compute_metrics, task.trainer_arguments["compute_metrics"]
    metrics = trainer.predict(task.test).metrics
    trainer.compute_metrics = compute_metrics
    return named_metrics(metrics, "test")


def _test_recomputed(trainer: Trainer, task: Task) -> dict[str, float]:
    """At the learned weights or the posterior mean, with batch-norm statistics computed there over training inputs."""
    with recomputed_batch_norm(trainer, task.unaugmented):
        return _test(trainer, task)


def _training_nll(trainer: Trainer) -> list[list[float]]:
    """Steps and the NLL of the batches up to there, to see whether it had come to rest."""
    return [[line["step"], line["nll"]] for line in trainer.state.log_history if "nll" in line]


# ---- Where and how long ---------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What a time, and the last bit of a result, depends on, without a name of the machine."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _cpu() -> str:
    """Its model, as far as it tells, and the instructions that torch uses of it."""
    known = Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
    models = [line.partition(":")[2].strip() for line in known.splitlines() if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def commit(repository: str | os.PathLike = REPOSITORY) -> str | None:
    """The commit of the repository's code, with a `+` if library or scripts were changed since; their results may."""
    code = ["hf_deelbo", "examples", ":(exclude)examples/results"]

    def git(*arguments: str) -> str:
        command = ["git", "-C", repository, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "--", *code) else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def measure_step(run: StudyRun, places: Places, steps: int = 4) -> float:
    """Seconds of a training step, the median of some, without the first."""
    task = load_task(run, places)
    output_dir = os.path.join(places.work_dir, "measure")
    run = replace(run, steps=steps)
    if run.is_map:
        backbone = {"lambda_": 1.0} if run.prior == "ptyl" else {"alpha_over_n": 0.0}
        setting, everything = Setting(1e-4, beta_over_n=0.0, **backbone), Split(list(range(run.train_size)), [])
        trainer = make_map_trainer(run, task, places, setting, output_dir, everything)
    else:
        trainer = make_deelbo_trainer(run, task, places, 1e-4, output_dir)
    return seconds_of_a_step(trainer)


def seconds_of_a_step(trainer: Trainer) -> float:
    """The median over its steps, which it makes, without the first."""
    clock = _Clock()
    trainer.add_callback(clock)
    trainer.train()
    return clock.median()


class _Clock(TrainerCallback):
    """Times steps."""

    def __init__(self):
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.ends.append(time.perf_counter())

    def median(self) -> float:
        durations = sorted(after - before for before, after in itertools.pairwise(self.ends))
        return durations[len(durations) // 2]


# ---- Lines ----------------------------------------------------------------------------------------------------------


def read_lines(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of a study; none if there is no file yet."""
    if not os.path.exists(path):
        return []
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


def write_line(path: str | os.PathLike, line: Mapping[str, Any]) -> None:
    """Add a line, or replace that of the same run.

    Lines stand in an order that does not depend on when they were written, and the file is always whole.
    """
    lines = {old["id"]: old for old in read_lines(path)} | {line["id"]: line}
    in_order = sorted(lines.values(), key=lambda line: (json.dumps(line["config"]), line["id"]))
    write_whole(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in in_order))
