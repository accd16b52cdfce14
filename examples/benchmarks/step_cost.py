"""What a step of `DEELBoTrainer` costs over one of the plain `Trainer`, and PTYL's prior over L2-SP: time and memory.

    python examples/benchmarks/step_cost.py
    python examples/benchmarks/step_cost.py --models resnet50 --rounds 20 --output step_cost.json
    python examples/benchmarks/step_cost.py --sweep size batch processes

The sweeps:

    models     three usual models, and the two of images also with their channels last, as this project's collator
               gives them; with PTYL's prior too, and the peak of memory in use by each method
    size       BERTs of 1 to 110 million parameters
    batch      EfficientNet-Lite0 with batches of several sizes
    pixels     ResNet-50 with images of several sizes, up to the paper's
    processes  one process and two, by DDP over gloo, that share the batch and the threads

The first two also time the posterior's own work alone: against one draw and one SGD update of as many numbers, and
against the same work on a single tensor of them, which tells what a model's many tensors cost.

The trainers run the same model, data and optimiser, each in a process of its own, and take turns, a few steps at a
time, so that a busy machine slows all alike; CPU time, of all threads, is told too, as that is what a busy machine
stretches least. A process is up to a tenth faster or slower than the same one started again, so a careful measurement
has several `--restarts`. Weights are random: neither time nor memory depends on them.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from transformers.utils import logging
from turns import METHODS, PTYL_RANK, measure_memory, measure_posterior, measure_steps
from workloads import BY_PIXELS, BY_SIZE, CHANNELS_LAST, USUAL, WORKLOADS, Workload

PTYL_TARGET = 1.10  # over L2-SP
POSTERIOR_TARGET = 3  # over one draw and one SGD update
MEMORY_TARGET = 2  # D floats over L2-SP's mu

# ---- The sweeps: one record for each thing that is measured --------------------------------------------------------


def sweep_models(arguments: argparse.Namespace) -> Iterator[dict]:
    """Time and memory of all methods, at the models' usual batch sizes, and the posterior's own work."""
    for workload in workloads_of(arguments, (*USUAL, *CHANNELS_LAST)):
        record = measure_steps(workload, **turns_of(arguments), methods=METHODS) | own_work_of(workload, arguments)
        yield record | {"peak_bytes": measure_memory(workload, arguments.steps)}


def sweep_size(arguments: argparse.Namespace) -> Iterator[dict]:
    """Time against D, of whole steps and of the posterior's own work."""
    for workload in workloads_of(arguments, BY_SIZE):
        yield measure_steps(workload, **turns_of(arguments)) | own_work_of(workload, arguments)


def sweep_batch(arguments: argparse.Namespace) -> Iterator[dict]:
    """Time against the batch size: what is added stays the same, so the ratio falls."""
    for workload in workloads_of(arguments, CHANNELS_LAST[:1]):
        for batch_size in arguments.batch_sizes:
            yield measure_steps(workload, **turns_of(arguments), batch_size=batch_size)


def sweep_pixels(arguments: argparse.Namespace) -> Iterator[dict]:
    """Time against the size of the images: likewise."""
    for workload in workloads_of(arguments, BY_PIXELS):
        yield measure_steps(workload, **turns_of(arguments))


def sweep_processes(arguments: argparse.Namespace) -> Iterator[dict]:
    """Time against the number of processes, which share the batch and the threads."""
    for workload in workloads_of(arguments, (CHANNELS_LAST[0], USUAL[2])):
        for world_size in arguments.world_sizes:
            yield measure_steps(workload, **turns_of(arguments), world_size=world_size)


def turns_of(arguments: argparse.Namespace) -> dict[str, int]:
    """How often and how long each method takes turns."""
    return {name: getattr(arguments, name) for name in ("rounds", "steps", "restarts")}


def own_work_of(workload: Workload, arguments: argparse.Namespace) -> dict[str, dict]:
    """The posterior's own work, as often as the steps."""
    return {"own_work": measure_posterior(workload, arguments.rounds * arguments.steps * arguments.restarts)}


def workloads_of(arguments: argparse.Namespace, default: Iterable[Workload]) -> Iterable[Workload]:
    """Those asked for, or else those of the sweep."""
    return [WORKLOADS[name] for name in arguments.models] if arguments.models else default


# ---- Tables --------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, str]]) -> str:
    """Rows with the same keys as a Markdown table."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def row_of_steps(record: dict) -> dict[str, str]:
    """What all sweeps tell."""
    return {
        "model": record["model"],
        "D": f"{record['num_parameters']:,}",
        "batch": str(record["batch_size"]),
        "processes x threads": f"{record['world_size']} x {record['threads']}",
        "plain": _seconds(record["seconds"]["plain"]),
        "DE ELBo": _seconds(record["seconds"]["deelbo"]),
        "ratio (quartiles)": _ratio(record["ratios"]["deelbo/plain"], record["target"]),
        "of CPU time": _ratio(record["cpu_ratios"]["deelbo/plain"]),
        "by its parts": f"{ratio_by_parts(record):.3f}",
        "overhead": f"{record['overhead_ns_per_parameter']:.1f} ns per parameter",
    }


def ratio_by_parts(record: dict) -> float:
    """A plain step with the parts that the DE ELBo adds, over a plain step: it varies least, and leaves out the rest.

    What else a step of the DE ELBo may be slower or faster by is told by the ratio of whole steps alone.
    """
    return 1 + sum(record["phases"]["deelbo"].values()) / statistics.median(record["seconds"]["plain"])


def row_of_ptyl(record: dict) -> dict[str, str]:
    """PTYL's prior over L2-SP."""
    return {
        "model": record["model"],
        "DE ELBo": _seconds(record["seconds"]["deelbo"]),
        "PTYL": _seconds(record["seconds"]["ptyl"]),
        "PTYL / L2-SP (quartiles)": _ratio(record["ratios"]["ptyl/deelbo"], PTYL_TARGET),
        "of CPU time": _ratio(record["cpu_ratios"]["ptyl/deelbo"]),
    }


def row_of_memory(record: dict) -> dict[str, str]:
    """Peaks, and their differences in D floats."""
    peaks, size = record["peak_bytes"], 4 * record["num_parameters"]
    deelbo, ptyl = ((peaks[method] - peaks[other]) / size for other, method in pairwise(METHODS))
    return {
        "model": record["model"],
        **{method: f"{peak / 2**20:.0f} MiB" for method, peak in peaks.items()},
        "DE ELBo over plain and L2-SP's mu": f"{deelbo - 1:.2f} D floats, target {MEMORY_TARGET}",
        "PTYL over L2-SP": f"{ptyl:.2f} D floats, S_diag and Q are {PTYL_RANK + 1}",
    }


def rows_of_phases(record: dict) -> list[dict[str, str]]:
    """The parts of what is added to the plain step."""
    return [
        {"model": record["model"], "method": method}
        | {phase: f"{1000 * value:.1f} ms" for phase, value in phases.items()}
        for method, phases in record["phases"].items()
    ]


def row_of_own_work(record: dict) -> dict[str, str]:
    """The posterior's own work, that on one tensor, one draw and one SGD update."""
    own_work = record["own_work"]
    return {
        "model": record["model"],
        "D": f"{record['num_parameters']:,}",
        **{part: f"{1000 * statistics.median(values):.1f} ms" for part, values in own_work["seconds"].items()},
        "posterior / (draw + sgd) (quartiles)": _ratio(own_work["ratio"], POSTERIOR_TARGET),
    }


def _seconds(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} s"


def _ratio(quartiles: list[float], target: float | None = None) -> str:
    low, median, high = quartiles
    return f"{median:.3f} ({low:.3f}-{high:.3f})" + (f", target {target}" if target else "")


def tables_of(sweep: str, records: list[dict]) -> str:
    """All that is printed of a sweep."""
    tables = [[row_of_steps(record) for record in records]]
    if sweep == "models":
        tables += [[row(record) for record in records] for row in (row_of_ptyl, row_of_memory)]
    if sweep in ("models", "size"):
        tables.append([row_of_own_work(record) for record in records])
    tables.append([row for record in records for row in rows_of_phases(record)])
    return "\n\n".join(map(table, tables))


# ---- Command line --------------------------------------------------------------------------------------------------

SWEEPS: dict[str, Callable[[argparse.Namespace], Iterator[dict]]] = {
    "models": sweep_models,
    "size": sweep_size,
    "batch": sweep_batch,
    "pixels": sweep_pixels,
    "processes": sweep_processes,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", nargs="+", choices=SWEEPS, default=["models"])
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, help="in place of those of the sweep")
    parser.add_argument("--batch_sizes", nargs="+", type=int, default=[8, 32, 128], help="of the sweep over them")
    parser.add_argument("--world_sizes", nargs="+", type=int, default=[1, 2], help="of the sweep over processes")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each method")
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--restarts", type=int, default=1, help="how often all of them start new processes")
    parser.add_argument("--output", help="also write each record to this JSON file, once it is measured")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    results = {sweep: [] for sweep in arguments.sweep}
    for sweep, records in results.items():
        for record in SWEEPS[sweep](arguments):
            records.append(record)
            if arguments.output:
                Path(arguments.output).write_text(json.dumps(results, indent=2))
        print(f"{sweep}:\n\n{tables_of(sweep, records)}\n", flush=True)


if __name__ == "__main__":
    main()
