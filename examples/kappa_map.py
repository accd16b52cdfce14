"""The map of kappa: the same fine-tuning with the likelihood weighted by fractions of D/N, and by rules that move it.

    python examples/kappa_map.py --tasks digits --subset_seeds 1001      # needs no network
    python examples/kappa_map.py --data_root data --model_root models --jobs 2
    python examples/kappa_map.py --data_root data --ways gamma bound=0.1 # rules: see WAYS
    python examples/kappa_map.py --table                                 # of the lines that are there

A run is a task, a class-balanced training set and a way to set kappa, everything else as `DEELBoTrainer` has it by
default. It takes one thread, and is one line of the results. Stopped and started again, it goes on where it was.
Datasets are made as for `swap_test.py`.
"""

import argparse
import itertools
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from lab.reports import markdown_table
from lab.studies import commit, machine, read_lines
from lab.tasks import Task
from scipy.special import log_softmax
from swap_test import (
    ADAMW,
    CIFAR10,
    COMMON,
    COMPLAINTS,
    DIGITS,
    IMAGES,
    REVIEWS,
    TEXTS,
    add_options_of_lines,
    id_of,
    make_trainer,
    run_all,
    task_of,
)
from transformers import PrinterCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from hf_deelbo import DEELBoTrainer
from hf_deelbo.callbacks import PriorVarianceCallback
from hf_deelbo.metrics import named_metrics
from hf_deelbo.objective import default_kappa
from hf_deelbo.sharing.files import as_json
from hf_deelbo.weights.batch_norm import batch_norm_layers, compute_statistics, with_statistics

RESULTS = Path(__file__).parent / "results" / "kappa_map.jsonl"
NUM_SAMPLES = 6

# smaller tests than those of swap_test.py, as there are many runs
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # data, keyword arguments of the trainer, and of the method
    "digits": (DIGITS | {"max_eval_samples": 1000}, IMAGES | ADAMW, {}),
    "cifar10-100": (CIFAR10 | {"max_eval_samples": 800}, IMAGES | ADAMW, {}),
    "reviews": (
        REVIEWS | {"max_eval_samples": 500, "max_seq_length": 32},
        TEXTS | {"learning_rate": 2e-4},
        {},
    ),
    "digits-l2-zero": (DIGITS | {"max_eval_samples": 1000}, IMAGES | ADAMW, {"prior": "l2-zero"}),
    "cifar10-1000": (
        CIFAR10 | {"max_eval_samples": 800, "train_size": 1000},
        ADAMW | {"max_steps": 150, "per_device_train_batch_size": 128},
        {},
    ),
    "pet": (
        {"dataset_name": "oxford-iiit-pet", "train_size": 370, "image_size": 96, "max_eval_samples": 740},
        ADAMW | {"max_steps": 100, "per_device_train_batch_size": 128},
        {},
    ),
    "complaints": (COMPLAINTS | {"max_eval_samples": 400}, TEXTS | {"learning_rate": 2e-4}, {}),
}
# said before any run: the first choose a rule, the others, and other training sets of the first, judge it
CHOOSING, JUDGING = ("digits", "cifar10-100", "reviews"), ("digits-l2-zero", "cifar10-1000", "pet", "complaints")
FRACTIONS = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)
# "1": the plain ELBo
WAYS = [*(f"{fraction:g}*D/N" for fraction in FRACTIONS), "1"]
AT_FIXED_WEIGHTS = (0.3, 0.1, 0.03, 0.01)
HOW_TO_READ = """\
kappa as a fraction of D/N, fixed or moved by a rule: *gamma* follows gamma/N once the KL has its full weight;
*bound=b* then lowers kappa as long as the training NLL at weight samples stays below b. *at fixed weights* keeps what
was learned at D/N and gives sigma its optimum for another kappa, for prediction alone. The *best temperature* is that
of the test set: no one knows it, and it says how much of the NLL is wrong confidence. Means over training sets."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ways", nargs="+", default=WAYS, help="FRACTION*D/N, a number, gamma, or bound=NLL")
    add_options_of_lines(parser, RESULTS)
    return parser.parse_args(argv)


# ---- Ways to set kappa ----------------------------------------------------------------------------------------------


class MovingKappa(PriorVarianceCallback):
    """Sets kappa before each step, then sigma, lambda and tau as ever; it starts at D/N."""

    def __init__(self, trainer: DEELBoTrainer):
        super().__init__(trainer)
        self.fraction, self.average = 1.0, None

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A new kappa, once the KL has its full weight."""
        posterior = self.trainer.posterior
        epochs = (state.global_step + 1) * self._examples_of_a_step / posterior.num_examples
        if state.global_step and epochs >= args.kl_warmup_epochs:
            self.fraction = min(1.0, max(1e-4, self.moved(float(self.trainer._last_nll))))
        posterior.kappa = self.fraction * default_kappa(posterior.num_parameters, posterior.num_examples)
        super().on_step_begin(args, state, control, **kwargs)

    def moved(self, nll: float) -> float:
        """The next fraction of D/N, after a batch of this NLL."""
        raise NotImplementedError


class Gamma(MovingKappa):
    """kappa = gamma/N, with the effective parameters gamma of the step before, after a first part at D/N."""

    def moved(self, nll: float) -> float:
        """gamma/D."""
        posterior = self.trainer.posterior
        return effective_parameters(posterior) / posterior.num_parameters


class Bound(MovingKappa):
    """The smallest kappa whose training NLL, at weight samples, stays below a bound."""

    def __init__(self, trainer: DEELBoTrainer, bound: float):
        super().__init__(trainer)
        self.bound = bound

    def moved(self, nll: float) -> float:
        """Up to a fifth up or down in log kappa, towards where the average NLL of the last steps is the bound."""
        self.average = nll if self.average is None else 0.85 * self.average + 0.15 * nll
        distance = math.log(max(self.average, 1e-9) / self.bound)
        return self.fraction * math.exp(0.2 * min(1.0, max(-1.0, distance)))


def set_kappa(trainer: DEELBoTrainer, way: str) -> None:
    """Give the trainer, which was not trained yet, this way to set kappa."""
    posterior = trainer.posterior
    if way == "gamma" or way.startswith("bound="):
        trainer.remove_callback(PriorVarianceCallback)
        trainer.add_callback(Gamma(trainer) if way == "gamma" else Bound(trainer, float(way.partition("=")[2])))
    elif way.endswith("*D/N"):
        posterior.kappa *= float(way.removesuffix("*D/N"))
    else:
        posterior.kappa = float(way)


def effective_parameters(posterior: Any) -> float:
    """gamma = sum_g [ D_g - sigma_g^2 tr(Sigma_p^-1)_g / lambda_g ], of which the data, not the prior, decide.

    With lambda at its optimum and Sigma_p = I it is sum_g D_g d2_g / (sigma_g^2 + d2_g).
    """
    rows = posterior.group_table()
    return sum(row["num_parameters"] * (1 - row["sigma"] ** 2 / row["prior_variance"]) for row in rows)


# ---- Runs -----------------------------------------------------------------------------------------------------------


def configs_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What decides the outcome of each run."""
    return [
        {"row": task, "subset_seed": subset_seed, "trainer": "deelbo", "kappa": way, "data": TASKS[task][0]}
        | {"arguments": COMMON | TASKS[task][1], "deelbo": TASKS[task][2]}
        for task, subset_seed, way in itertools.product(options.tasks, options.subset_seeds, options.ways)
    ]


def carry_out(config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Train and test; the line to note."""
    logging.set_verbosity_error()
    task = task_of(config, options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(config, task, folder)
        trainer.remove_callback(PrinterCallback)
        set_kappa(trainer, config["kappa"])
        seconds = trainer.train().metrics["train_runtime"]
        posterior = trainer.posterior
        d_over_n = default_kappa(posterior.num_parameters, posterior.num_examples)
        line = {"id": id_of(config), "config": config, "date": time.strftime("%Y-%m-%d", time.gmtime())}
        line |= {"commit": commit(), "machine": machine(), "seconds": seconds}
        line["learned"] = {name: float(getattr(posterior, name)) for name in ("sigma", "lambda_", "tau", "kappa")}
        line["learned"] |= {"fraction": posterior.kappa / d_over_n}
        line["learned"] |= {"gamma_per_parameter": effective_parameters(posterior) / posterior.num_parameters}
        de_elbo = trainer.de_elbo(num_samples=3)
        line["de_elbo_per_parameter"] = de_elbo.value / posterior.num_parameters
        line["train"] = {"nll_of_samples": de_elbo.nll, "nll_of_mean": evaluated(trainer, task.unaugmented)["nll"]}
        line["test"] = tests(trainer, task)
        if config["kappa"] == "1*D/N":
            line["at_fixed_weights"] = {}
            for fraction in AT_FIXED_WEIGHTS:
                posterior.kappa = fraction * d_over_n
                posterior.update_variances()
                line["at_fixed_weights"][f"{fraction:g}"] = averaged(trainer, task)
        return as_json(line)


def tests(trainer: DEELBoTrainer, task: Task) -> dict[str, dict[str, float]]:
    """At the posterior's mean, there also with batch-norm statistics of its own, and averaged over weight samples."""
    model, found = trainer.model, {"mean": evaluated(trainer, task.test)}
    if batch_norm_layers(model):
        batches = trainer.get_eval_dataloader(task.unaugmented)
        with with_statistics(model, compute_statistics(model, batches, lambda batch: model(**batch))):
            found["mean_recomputed"] = evaluated(trainer, task.test)
    return found | {"average": averaged(trainer, task)}


def averaged(trainer: DEELBoTrainer, task: Task) -> dict[str, float]:
    """Of the probabilities averaged over weight samples."""
    trainer.args.num_eval_samples = NUM_SAMPLES
    found = evaluated(trainer, task.test)
    trainer.args.num_eval_samples = 0
    return found


def evaluated(trainer: DEELBoTrainer, rows: Any) -> dict[str, float]:
    """Metrics, and the NLL at the best temperature, which no one knows: how much of the NLL is wrong confidence."""
    output = trainer.predict(rows)
    metrics = named_metrics(output.metrics, "test")
    temperatures = np.geomspace(0.2, 30, 200)
    right = np.arange(len(output.label_ids)), output.label_ids
    nlls = [-log_softmax(output.predictions / t, axis=-1)[right].mean() for t in temperatures]
    best = int(np.argmin(nlls))
    return metrics | {"best_temperature": float(temperatures[best]), "nll_there": float(nlls[best])}


# ---- Table ----------------------------------------------------------------------------------------------------------


def table(lines: Sequence[dict[str, Any]]) -> str:
    """A row for each task and way, means over the training sets."""
    found = defaultdict(list)
    for line in lines:
        found[line["config"]["row"], line["config"]["kappa"]].append(line)
    ways = list(dict.fromkeys([*WAYS, *sorted(way for _, way in found)]))
    header = ["task", "kappa", "sets", "ends at (D/N)", "gamma/D", "sigma", "J/D", "training NLL", "accuracy %", "NLL"]
    header += ["ECE", "average accuracy %", "NLL", "ECE", "NLL at best temperature"]
    rows = []
    for task, way in itertools.product(TASKS, ways):
        if (task, way) not in found:
            continue
        lines_of_it = found[task, way]
        rows.append([task, way, str(len(lines_of_it)), *cells(lines_of_it)])
        for fraction in lines_of_it[0].get("at_fixed_weights", ()):
            again = [line["at_fixed_weights"][fraction] for line in lines_of_it]
            numbers = [
                (name, fmean(of_it[name] for of_it in again)) for name in ("accuracy", "nll", "ece", "nll_there")
            ]
            shown = [f"{100 * value:.1f}" if name == "accuracy" else f"{value:.3f}" for name, value in numbers]
            where = [task, f"{fraction}*D/N at fixed weights", str(len(lines_of_it)), fraction]
            rows.append([*where, *[""] * (len(header) - 8), *shown])
    return markdown_table(header, rows)


def curves_and_rules(lines: Sequence[dict[str, Any]]) -> tuple[dict, dict]:
    """For `lab.figures.plot_kappa_map`: NLL over fixed fractions, and where rules end."""
    names = {("mean", "nll"): "mean", ("average", "nll"): "average"}
    names |= {("average", "nll_there"): "average, at its best temperature"}
    curves, rules = {}, {}
    for task in TASKS:
        of_task = defaultdict(list)
        for line in lines:
            if line["config"]["row"] == task:
                of_task[line["config"]["kappa"]].append(line)
        # where all training sets are, so that no step of a curve is one from set to set
        most = max(map(len, of_task.values()), default=0)
        fixed = {way: found for way, found in of_task.items() if way.endswith("*D/N") and len(found) == most}
        if len(fixed) > 1:
            curves[task] = {
                label: [
                    (float(way.removesuffix("*D/N")), fmean(line["test"][at][metric] for line in found))
                    for way, found in fixed.items()
                ]
                for (at, metric), label in names.items()
            }
        moved = sorted(way for way in of_task if way == "gamma" or way.startswith("bound="))
        rules[task] = [
            (
                way,
                fmean(line["learned"]["fraction"] for line in of_task[way]),
                fmean(line["test"]["average"]["nll"] for line in of_task[way]),
            )
            for way in moved
        ]
    return curves, rules


def cells(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Of the same task and way."""

    def mean(*path: str) -> float:
        values = []
        for line in lines:
            value: Any = line
            for name in path:
                value = value[name]
            values.append(math.inf if value is None else value)
        return fmean(values)

    cells = [f"{mean('learned', 'fraction'):.3g}", f"{mean('learned', 'gamma_per_parameter'):.3f}"]
    cells += [f"{mean('learned', 'sigma'):.3g}", f"{mean('de_elbo_per_parameter'):.4f}"]
    cells += [f"{mean('train', 'nll_of_samples'):.3f}"]
    for at in ("mean", "average"):
        cells += [f"{100 * mean('test', at, 'accuracy'):.1f}", f"{mean('test', at, 'nll'):.3f}"]
        cells += [f"{mean('test', at, 'ece'):.3f}"]
    return [*cells, f"{mean('test', 'average', 'nll_there'):.3f}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run, or print the table."""
    options = parse(argv)
    if options.table:
        print(table(read_lines(options.results)))
    else:
        run_all(configs_of(options), partial(carry_out, options=options), options)


if __name__ == "__main__":
    main()
