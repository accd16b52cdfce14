"""The swap test: the same script twice, with two class names changed.

    python examples/swap_test.py --rows digits-sgd-0.1           # needs no network
    python examples/movie_snippets.py data/movie-snippets
    python examples/complaints.py ARCHIVE data/complaints        # see there
    python examples/swap_test.py --data_root data --jobs 2       # data/cifar10 and so on, instead of the Hub's
    python examples/swap_test.py --data_root data --trainers deelbo --deelbo grouping=layer init_sigma=1e-3
    python examples/swap_test.py --table                         # of the lines that are there

A run is a row (a task and an optimiser's settings) on one of three class-balanced training sets, by `Trainer` and
`TrainingArguments` ("plain") or by `DEELBoTrainer` and `DEELBoConfig` ("deelbo"), with the same keyword arguments,
seed, model, head, collator and data. It takes one thread, and is one line of the results. Stopped and started again,
it goes on where it was.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from lab.backbones import EMBEDDED_MODEL
from lab.data import EMBEDDED_DATASET
from lab.reports import markdown_table
from lab.studies import commit, machine, read_lines, write_line
from lab.tasks import DataArguments, ModelArguments, Task
from transformers import PrinterCallback, Trainer, TrainingArguments

from hf_deelbo import DEELBoConfig, DEELBoTrainer
from hf_deelbo.metrics import named_metrics
from hf_deelbo.sharing.files import as_json
from hf_deelbo.weights.batch_norm import batch_norm_layers, compute_statistics, with_statistics

RESULTS = Path(__file__).parent / "results" / "swap_test.jsonl"
SEEDS = [1001, 2001, 3001]
NUM_SAMPLES = 10
HOW_TO_READ = """\
The same script with `Trainer` (plain) and with `DEELBoTrainer` (at the posterior's *mean*, and the *average* of 10
weight samples), means over training sets. Two numbers in a cell are those with running batch-norm statistics / with
recomputed ones; the average always has statistics of its own."""

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
# the model of texts, and tasks, as `DataArguments` has them
REVIEWS = {"dataset_name": "movie-snippets", "train_size": 200, "max_seq_length": 64, "max_eval_samples": 1000}
COMPLAINTS = {"dataset_name": "complaints", "train_size": 200, "max_seq_length": 64, "max_eval_samples": 500}
DIGITS = {"dataset_name": "digits", "train_size": 100, "image_size": 32, "horizontal_flip": False}
CIFAR10 = {"dataset_name": "cifar10", "train_size": 100, "image_size": 48, "max_eval_samples": 1000}

# of both trainers in every row; none of it changes what is learned, but for the seed
COMMON = {
    "seed": 42,
    "per_device_eval_batch_size": 100,
    "logging_steps": 0.05,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
TEXTS = {"num_train_epochs": 10, "per_device_train_batch_size": 16}
IMAGES = {"max_steps": 100, "per_device_train_batch_size": 100}
ADAMW = {"learning_rate": 1e-3}
SGD = {
    "optim": "sgd",
    "optim_args": "momentum=0.9,nesterov=True",
    "learning_rate": 0.1,
    "lr_scheduler_type": "cosine",
}

# the task, and keyword arguments of both trainers
ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reviews-5e-5": (REVIEWS, TEXTS | {"learning_rate": 5e-5}),
    "reviews-2e-4": (REVIEWS, TEXTS | {"learning_rate": 2e-4}),
    "complaints-5e-5": (COMPLAINTS, TEXTS | {"learning_rate": 5e-5}),
    "complaints-2e-4": (COMPLAINTS, TEXTS | {"learning_rate": 2e-4}),
    "reviews-default": (REVIEWS, {}),
    "complaints-default": (COMPLAINTS, {}),
    "digits-adamw-1e-3": (DIGITS, IMAGES | ADAMW),
    "cifar10-adamw-1e-3": (CIFAR10, IMAGES | ADAMW),
    "digits-sgd-0.1": (DIGITS, IMAGES | SGD),
    "cifar10-sgd-0.1": (CIFAR10, IMAGES | SGD),
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--trainers", nargs="+", choices=("plain", "deelbo"), default=["plain", "deelbo"])
    parser.add_argument(
        "--deelbo",
        nargs="+",
        action="extend",
        type=setting,
        default=[],
        metavar="KEY=VALUE",
        help="fields of DEELBoConfig, for the runs of that trainer",
    )
    add_options_of_lines(parser, RESULTS)
    return parser.parse_args(argv)


def add_options_of_lines(parser: argparse.ArgumentParser, results: Path) -> None:
    """Those of any script whose runs are lines of a file."""
    parser.add_argument("--subset_seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--results", type=Path, default=results, help="the file of lines")
    parser.add_argument("--data_root", help="a folder with datasets by their names, instead of the Hub")
    parser.add_argument("--model_root", help="a folder with models by their names, instead of the Hub")
    parser.add_argument("--cache_dir", help="for resized images; default is the cache of datasets")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, of one thread each")
    parser.add_argument("--table", action="store_true", help="print a table of the lines instead of running")


def setting(text: str) -> tuple[str, Any]:
    """A `key=value` of the command line; the value is JSON or else a string.

    Example:
        >>> setting("init_sigma=1e-3"), setting("grouping=layer")
        (('init_sigma', 0.001), ('grouping', 'layer'))
    """
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


# ---- Runs -----------------------------------------------------------------------------------------------------------


def configs_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What decides the outcome of each run."""
    configs = []
    for row, subset_seed, trainer in itertools.product(options.rows, options.subset_seeds, options.trainers):
        data, arguments = ROWS[row]
        config = {"row": row, "subset_seed": subset_seed, "trainer": trainer, "data": data}
        deelbo = dict(options.deelbo) if trainer == "deelbo" else {}
        configs.append(config | {"arguments": COMMON | arguments, "deelbo": deelbo})
    return configs


def id_of(config: dict[str, Any]) -> str:
    """A hash of it."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:10]


def carry_out(config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Train and test; the line to note."""
    task = task_of(config, options)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(config, task, folder)
        trainer.remove_callback(PrinterCallback)
        seconds = trainer.train().metrics["train_runtime"]
        about = {"id": id_of(config), "config": config, "date": time.strftime("%Y-%m-%d", time.gmtime())}
        about |= {"commit": commit(), "machine": machine(), "seconds": seconds, "history": history(trainer)}
        about |= learned(trainer) if config["trainer"] == "deelbo" else {}
        return as_json(about | {"test": tests(trainer, task)})


def task_of(config: dict[str, Any], options: argparse.Namespace) -> Task:
    """The data, and the model that fits them, for one thread."""
    torch.set_num_threads(1)
    data = DataArguments(**config["data"], subset_seed=config["subset_seed"], cache_images=True)
    if options.data_root is not None and data.dataset_name != EMBEDDED_DATASET:
        data.dataset_name = os.path.join(options.data_root, data.dataset_name)
    is_text = "max_seq_length" in config["data"]
    model = os.path.join(options.model_root or "", MINILM) if is_text else EMBEDDED_MODEL
    return Task(ModelArguments(model, cache_dir=options.cache_dir), data, disable_tqdm=True)


def make_trainer(config: dict[str, Any], task: Task, folder: str) -> Trainer:
    """The two class names."""
    if config["trainer"] == "plain":
        args, trainer_class, more = TrainingArguments(folder, **config["arguments"]), Trainer, {}
    else:
        args = DEELBoConfig(folder, **config["arguments"], **config["deelbo"])
        trainer_class, more = DEELBoTrainer, {"elbo_dataset": task.unaugmented}
    task.configure(args)
    return trainer_class(task.load_model(args.seed), args, **task.trainer_arguments, **more)


def history(trainer: Trainer) -> list[dict[str, float | None]]:
    """The NLL of the batches up to a step, and sigma there."""
    return [
        {"step": log["step"], "nll": log.get("nll", log["loss"]), "sigma": log.get("sigma")}
        for log in trainer.state.log_history
        if "loss" in log
    ]


def learned(trainer: DEELBoTrainer) -> dict[str, Any]:
    """All settings of the method, those not given too, and what it learned."""
    inherited = {field.name for field in fields(TrainingArguments)}
    names = [field.name for field in fields(trainer.args) if field.name not in inherited]
    posterior = trainer.posterior
    numbers = {name: float(getattr(posterior, name)) for name in ("sigma", "lambda_", "tau", "kappa")}
    numbers |= {"num_parameters": posterior.num_parameters}
    numbers |= {"de_elbo_per_parameter": trainer.de_elbo(num_samples=3).value / posterior.num_parameters}
    return {"settings": {name: getattr(trainer.args, name) for name in names}, "learned": numbers}


def tests(trainer: Trainer, task: Task) -> dict[str, dict[str, float]]:
    """Metrics at the weights or the posterior's mean, also with batch-norm statistics of there, and averaged."""

    def test() -> dict[str, float]:
        return named_metrics(trainer.predict(task.test).metrics, "test")

    model, found = trainer.model, {"mean": test()}
    if batch_norm_layers(model):
        batches = trainer.get_eval_dataloader(task.unaugmented)
        with with_statistics(model, compute_statistics(model, batches, lambda batch: model(**batch))):
            found["mean_recomputed"] = test()
    if isinstance(trainer, DEELBoTrainer):
        trainer.args.num_eval_samples = NUM_SAMPLES
        found["average"] = test()
    return found


def run_all(
    configs: Sequence[dict[str, Any]],
    carry_out: Callable[[dict[str, Any]], dict[str, Any]],
    options: argparse.Namespace,
) -> None:
    """Carry out what has no line yet; a run that fails is told, and does not stop the others."""
    done = {line["id"] for line in read_lines(options.results)}
    left = [config for config in configs if id_of(config) not in done]
    print(f"{len(configs) - len(left)} of {len(configs)} runs are done.", flush=True)

    failed = []

    def note(config: dict[str, Any], result: Callable[[], dict[str, Any]]) -> None:
        try:
            line = result()
        except Exception:
            traceback.print_exc()
            failed.append(id_of(config))
            return
        write_line(options.results, line)
        metrics = ", ".join(f"{at} {found['accuracy']:.1%} / {found['nll']:.3f}" for at, found in line["test"].items())
        print(f"{name_of(config)}, set {config['subset_seed']}, {config['trainer']}: {metrics}", flush=True)

    if options.jobs == 1:
        for config in left:
            note(config, partial(carry_out, config))
    else:
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            futures = {pool.submit(carry_out, config): config for config in left}
            for future in as_completed(futures):
                note(futures[future], future.result)
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}. The same command tries them again.")


# ---- Table ----------------------------------------------------------------------------------------------------------


def name_of(config: dict[str, Any]) -> str:
    """The row, and what was set of the method."""
    kappa = {"kappa": config["kappa"]} if "kappa" in config else {}
    return " ".join([config["row"], *(f"{name}={value}" for name, value in (config["deelbo"] | kappa).items())])


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Means over the training sets that both trainers have, and whether anything was lost by the swap.

    Two numbers in a cell are those of the running batch-norm statistics / of recomputed ones. The order of the lines
    makes no difference.
    """
    found = defaultdict(dict)
    for line in lines:
        config = line["config"]
        found[config["trainer"], name_of(config)][config["subset_seed"]] = line
    rows, order = [], list(ROWS)
    for (trainer, name), runs in sorted(found.items(), key=lambda item: (order.index(item[0][1].split()[0]), item[0])):
        peers = found.get(("plain", name.split()[0]), {})
        sets = sorted(runs.keys() & peers.keys())
        if trainer == "deelbo" and sets:
            rows.append([name, str(len(sets)), *compared([peers[s] for s in sets], [runs[s] for s in sets])])
    header = ["row", "sets", "plain accuracy %", "NLL", "mean accuracy %", "NLL", "average accuracy %", "NLL", "ECE"]
    verdicts = ["mean accuracy >= plain - 1", ">= plain", "average NLL <= plain (default: + 2 %)"]
    return markdown_table(header + verdicts, rows)


def compared(plain: Sequence[dict[str, Any]], deelbo: Sequence[dict[str, Any]]) -> list[str]:
    """Cells of the same training sets by both trainers."""

    def means(lines: Sequence[dict[str, Any]], metric: str, *at: str) -> list[float]:
        values = ([line["test"][kind][metric] for line in lines] for kind in at)
        return [fmean(math.inf if value is None else value for value in of_sets) for of_sets in values]

    kinds = [kind for kind in ("mean", "mean_recomputed") if kind in plain[0]["test"]]
    slack = 1.02 if plain[0]["config"]["row"].endswith("-default") else 1.0
    accuracy, nll = means(plain, "accuracy", *kinds), means(plain, "nll", *kinds)
    own_accuracy = means(deelbo, "accuracy", *kinds)
    [average_nll] = means(deelbo, "nll", "average")
    pairs = list(zip(own_accuracy, accuracy, strict=True))
    cells = [
        [f"{100 * value:.1f}" for value in accuracy],
        [f"{value:.3f}" for value in nll],
        [f"{100 * value:.1f}" for value in own_accuracy],
        [f"{value:.3f}" for value in means(deelbo, "nll", *kinds)],
        [f"{100 * value:.1f}" for value in means(deelbo, "accuracy", "average")],
        [f"{average_nll:.3f}"],
        [f"{value:.3f}" for value in means(deelbo, "ece", "average")],
        ["yes" if own >= other - 0.01 else "no" for own, other in pairs],
        ["yes" if own >= other else "no" for own, other in pairs],
        ["yes" if average_nll <= slack * other else "no" for other in nll],
    ]
    return [" / ".join(parts) for parts in cells]


def main(argv: Sequence[str] | None = None) -> None:
    """Run, or print the table."""
    options = parse(argv)
    if options.table:
        print(table(read_lines(options.results)))
    else:
        run_all(configs_of(options), partial(carry_out, options=options), options)


if __name__ == "__main__":
    main()
