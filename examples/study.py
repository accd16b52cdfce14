"""The paper's comparison as a matrix of runs, each one line of a file.

    python examples/study.py --preset digits --dry-run              # how long it would take; measures a few steps
    python examples/study.py --preset digits --jobs 2               # two runs side by side
    python examples/study.py --preset cifar10-100 --data_root DIR   # DIR/cifar10 instead of the Hub's
    python examples/study.py --matrix my_matrix.yaml                # blocks of fields, as PRESETS below
    python examples/study.py --preset digits --rerun d081afc392     # run a line again, and compare

Stopped and started again, it goes on where it was. `examples/report.py` makes tables and figures of the lines.
"""

import argparse
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from lab.studies import (
    Places,
    StudyRun,
    carry_out,
    expand,
    measure_step,
    read_lines,
    write_line,
)

RESULTS = Path(__file__).parent / "results"
SEEDS = [1001, 2001, 3001]

# the paper's way, from a start of sigma for short runs; halving ranks it by J as it is, which is not how the lines of
# 2026-11 were ranked (see results/README.md)
BY_OPTIMIZER = {"sigma_update": "optimizer", "grouping": "all", "init_sigma": 1e-2}
SIGMAS = [1e-4, 1e-2]  # the paper's start, and that
IN_CLOSED_FORM = {"sigma_update": "closed-form", "grouping": "tensor", "init_sigma": 1e-3}
# the package's defaults, and one more run to calibrate
CALIBRATED = IN_CLOSED_FORM | {"method": "deelbo-halving", "calibrate": True}

# steps: MAP's training NLL at its best learning rate comes to rest; sizes: for two cores
DIGITS = BY_OPTIMIZER | {
    "dataset": "digits",
    "train_size": 100,
    "image_size": 32,
    "horizontal_flip": False,
    "steps": 100,
}
DIGITS_50 = DIGITS | {"steps": 50}  # it still falls
DIGITS_200 = DIGITS | {"steps": 200}
CIFAR_100 = BY_OPTIMIZER | {"dataset": "cifar10", "train_size": 100, "image_size": 48, "steps": 100}
CIFAR_1000 = BY_OPTIMIZER | {"dataset": "cifar10", "train_size": 1000, "image_size": 48, "steps": 150}
PET = BY_OPTIMIZER | {"dataset": "oxford-iiit-pet", "train_size": 370, "image_size": 96, "steps": 100}
SNIPPETS = BY_OPTIMIZER | {  # of examples/movie_snippets.py
    "dataset": "movie-snippets",
    "model": "sentence-transformers/all-MiniLM-L6-v2",
    "train_size": 100,
    "max_seq_length": 32,
    "steps": 40,
}
PAPER = BY_OPTIMIZER | {
    "model": "microsoft/resnet-50",
    "image_size": 224,
    "steps": 6000,
    "num_test": 10_000,
    "init_sigma": 1e-4,
}

# fields with a list of values stand for one run each
PRESETS: dict[str, list[dict[str, Any]]] = {
    "digits": [
        DIGITS | {"subset_seed": SEEDS, "method": ["deelbo-full", "deelbo-halving"], "init_sigma": SIGMAS},
        DIGITS | {"subset_seed": SEEDS, "method": ["elbo", "map-grid", "map-random", "map-tpe"]},
        DIGITS | {"subset_seed": SEEDS, "prior": "l2-zero", "method": ["deelbo-full", "deelbo-halving", "map-grid"]},
    ],
    "digits-closed-form": [
        DIGITS | IN_CLOSED_FORM | {"subset_seed": SEEDS, "prior": ["l2-sp", "l2-zero"], "method": "deelbo-halving"},
    ],
    # all rows of the tables below, but for PTYL's
    "calibrated": [
        DIGITS | CALIBRATED | {"subset_seed": SEEDS, "prior": ["l2-sp", "l2-zero"]},
        CIFAR_100 | CALIBRATED | {"subset_seed": SEEDS},
        SNIPPETS | CALIBRATED | {"subset_seed": SEEDS},
        DIGITS_50 | CALIBRATED | {"subset_seed": SEEDS, "prior": ["l2-sp", "l2-zero"]},
        DIGITS_200 | CALIBRATED | {"subset_seed": SEEDS},
        CIFAR_1000 | CALIBRATED | {"subset_seed": SEEDS},
        PET | CALIBRATED | {"subset_seed": SEEDS},
    ],
    "calibrated-ptyl": [DIGITS | CALIBRATED | {"subset_seed": SEEDS, "prior": "ptyl"}],
    # stopped too early
    "digits-50": [
        DIGITS_50 | {"subset_seed": SEEDS, "method": "deelbo-full", "init_sigma": SIGMAS},
        DIGITS_50 | {"subset_seed": SEEDS, "prior": "l2-zero", "method": "deelbo-full"},
        DIGITS_50 | {"subset_seed": SEEDS, "prior": ["l2-sp", "l2-zero"], "method": "map-grid"},
    ],
    # twice as long; the grid at the rate that it chose before
    "digits-200": [
        DIGITS_200 | {"subset_seed": SEEDS, "prior": ["l2-sp", "l2-zero"], "method": "deelbo-halving"},
        DIGITS_200 | {"subset_seed": SEEDS, "method": "map-grid", "learning_rates": (0.1,)},
    ],
    # needs --ptyl_prior; ours is of 1,000 images of CIFAR-10: run_swag.py --dataset_name cifar10 --train_size 1000
    # --image_size 32 --cache_images --per_device_train_batch_size 128 --learning_rate 0.01 --max_steps 120
    # --collect_every 5 (one thread). Its grid would have 240 settings; 24 are tried at random
    "digits-ptyl": [DIGITS | {"subset_seed": SEEDS, "prior": "ptyl", "method": ["deelbo-halving", "map-random"]}],
    "digits-kappa": [
        DIGITS
        | {"subset_seed": SEEDS[0], "method": "deelbo-single", "learning_rates": (0.1,)}
        | {"kappa": [1, 100, 10_000, "auto", 100_000, 1_000_000]},
    ],
    "cifar10-100": [
        CIFAR_100 | {"subset_seed": SEEDS, "method": ["deelbo-full", "deelbo-halving"], "init_sigma": SIGMAS},
        CIFAR_100 | {"subset_seed": SEEDS, "method": ["elbo", "map-grid"]},
        CIFAR_100 | {"subset_seed": SEEDS, "method": "deelbo-halving", "prior": "l2-zero"},
    ],
    "cifar10-1000": [
        CIFAR_1000 | {"subset_seed": SEEDS, "method": ["deelbo-halving", "map-grid"]},
    ],
    "pet": [
        PET | {"subset_seed": SEEDS, "method": "deelbo-halving"},
        PET | {"subset_seed": SEEDS, "method": "map-grid", "learning_rates": (0.1,)},
    ],
    "text": [
        SNIPPETS | {"subset_seed": SEEDS, "method": "deelbo-halving"},
        SNIPPETS | {"subset_seed": SEEDS, "method": "map-grid", "learning_rates": (0.1, 0.01)},
    ],
    # the paper's own scale, for a GPU
    "paper": [
        PAPER
        | {"dataset": "cifar10", "train_size": [100, 1000, 10_000, 50_000], "subset_seed": SEEDS}
        | {"prior": ["l2-zero", "l2-sp"], "method": ["deelbo-full", "map-grid"]},
        PAPER
        | {"dataset": "oxford-iiit-pet", "train_size": [370, 3441], "subset_seed": SEEDS}
        | {"prior": ["l2-zero", "l2-sp"], "method": ["deelbo-full", "map-grid"]},
    ],
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    matrix = parser.add_mutually_exclusive_group(required=True)
    matrix.add_argument("--preset", choices=PRESETS)
    matrix.add_argument("--matrix", help="a YAML or JSON file with a list of blocks")
    parser.add_argument("--results", help="the file of lines; default is examples/results/<name of the matrix>.jsonl")
    parser.add_argument("--work_dir", default="outputs/study", help="what a stopped run goes on from")
    parser.add_argument("--data_root", help="a folder with datasets by their names, instead of the Hub")
    parser.add_argument("--model_root", help="a folder with models by their names, instead of the Hub")
    parser.add_argument("--ptyl_prior", help="the saved prior of runs with ptyl")
    parser.add_argument("--cache_dir", help="for resized images; default is the cache of datasets")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, which share the cores")
    parser.add_argument("--steps", type=int, help="another number of steps than the matrix has")
    parser.add_argument("--image_size", type=int, help="another size of images than the matrix has")
    parser.add_argument("--dry-run", action="store_true", help="measure steps and say how long it would take")
    parser.add_argument("--rerun", metavar="ID", help="run a line again and compare, without changing it")
    options = parser.parse_args(argv)
    name = options.preset or Path(options.matrix).stem
    options.results = Path(options.results or RESULTS / f"{name}.jsonl")
    return options


def runs_of(options: argparse.Namespace) -> list[StudyRun]:
    """The runs of the matrix, each once."""
    blocks = PRESETS[options.preset] if options.preset else yaml.safe_load(Path(options.matrix).read_text())
    changes = {name: getattr(options, name) for name in ("steps", "image_size") if getattr(options, name)}
    runs = {run.id: run for block in blocks for run in expand(block | changes)}
    if options.ptyl_prior is None and any(run.prior == "ptyl" for run in runs.values()):
        raise ValueError("ptyl_prior: some runs have the prior ptyl; say where it is saved.")
    return list(runs.values())


def workers(jobs: int) -> ProcessPoolExecutor:
    """Processes that share the cores."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    return ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (threads,))


def run_all(runs: Sequence[StudyRun], places: Places, results: Path, jobs: int) -> None:
    """Carry out what has no line yet, longest first, so that none is left over at the end.

    A run that fails is told, and does not stop the others.
    """
    done = {line["id"] for line in read_lines(results)}
    left = sorted((run for run in runs if run.id not in done), key=lambda run: -run.num_runs * run.steps)
    print(f"{len(runs) - len(left)} of {len(runs)} runs are done.")

    failed = []

    def note(run: StudyRun, result: Callable[[], dict[str, Any]]) -> None:
        try:
            line = result()
        except Exception:
            traceback.print_exc()
            failed.append(run.id)
            return
        write_line(results, line)
        shutil.rmtree(places.of(run), ignore_errors=True)
        print(described(run, line), flush=True)

    if jobs == 1:
        for run in left:
            note(run, partial(carry_out, run, places))
    else:
        with workers(jobs) as pool:
            futures = {pool.submit(carry_out, run, places): run for run in left}
            for future in as_completed(futures):
                note(futures[future], future.result)
    if failed:
        sys.exit(f"Failed: {', '.join(failed)}. The same command tries them again.")


def described(run: StudyRun, line: dict[str, Any]) -> str:
    """A run in one line."""
    tests = ", ".join(f"{at} {m['accuracy']:.1%} / {m['nll'] or float('nan'):.3f}" for at, m in line["test"].items())
    name = f"{run.dataset} N={run.train_size} set {run.subset_seed} {run.prior} {run.method}"
    return f"{run.id} {name}: {tests}; {line['runs']:.1f} runs, {line['seconds']:.0f} s"


def estimate(runs: Sequence[StudyRun], places: Places, jobs: int) -> float:
    """Seconds that the training of all runs would take, from steps measured under the same load."""
    seconds, total = {}, 0.0
    with workers(jobs) as pool:
        for run in runs:
            kind = (run.dataset, run.model, run.image_size, min(run.train_size, 128), run.prior, run.is_map)
            if kind not in seconds:
                seconds[kind] = sum(pool.map(measure_step, [run] * jobs, [places] * jobs)) / jobs
                print(f"{run.dataset}, {run.image_size} px, {run.prior}, {run.method}: {seconds[kind]:.2f} s a step")
            total += seconds[kind] * run.num_runs * run.steps
    return total / jobs


def dry_run(runs: Sequence[StudyRun], places: Places, results: Path) -> None:
    """Say how long it will take, one after the other and side by side."""
    done = {line["id"] for line in read_lines(results)}
    left = [run for run in runs if run.id not in done]
    trainings = sum(run.num_runs for run in left)
    print(f"{len(left)} of {len(runs)} runs are left, with {trainings:.0f} trainings.")
    hours = {}
    for jobs in (1, 2) if (os.cpu_count() or 1) > 1 and left else (1,):
        print(f"--jobs {jobs}:")
        hours[jobs] = estimate(left, places, jobs) / 3600
    for jobs, value in hours.items():
        print(f"--jobs {jobs}: {value:.2f} hours of training, without tests and J")
    print(f"Faster: --jobs {min(hours, key=hours.get)}")


def rerun(line: dict[str, Any], places: Places) -> dict[str, Any]:
    """Carry out a line again, from nothing, and print both."""
    run = StudyRun.from_config(line["config"])
    torch.set_num_threads(line["machine"]["threads"])  # sums over threads differ in their last bit, and runs with them
    with tempfile.TemporaryDirectory() as folder:
        again = carry_out(run, replace(places, work_dir=folder))
    print("noted:", described(run, line))
    print("again:", described(run, again))
    return again


def main(argv: Sequence[str] | None = None) -> None:
    """Run."""
    options = parse(argv)
    places = Places(
        options.work_dir, options.data_root, options.ptyl_prior, options.cache_dir, model_root=options.model_root
    )
    runs = runs_of(options)
    if options.rerun:
        rerun(next(line for line in read_lines(options.results) if line["id"] == options.rerun), places)
    elif options.dry_run:
        dry_run(runs, places, options.results)
    else:
        run_all(runs, places, options.results, options.jobs)


if __name__ == "__main__":
    main()
