"""Tables and figures of `examples/study.py` and `examples/swap_test.py`, from their lines alone.

    python examples/report.py      # or `make report`

It reads what they wrote into the `*.jsonl` of the folder `examples/results`, and writes `REPORT.md` and figures there,
and the part of that folder's README between two marks. The same lines give the same bytes.
"""

import argparse
import math
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import kappa_map
import swap_test
import uncertainty
from lab.figures import plot_accuracy_over_compute, plot_by_method, plot_kappa_map, plot_kappa_sweep
from lab.reports import (
    AT,
    Line,
    Row,
    calibrated_table,
    comparison_table,
    cost_table,
    markdown_table,
    mean_curve,
    preferred_starts,
    quality_table,
    rows_of,
    search_curve,
    spread,
    without_repeats,
)
from lab.studies import read_lines
from matplotlib.figure import Figure

from hf_deelbo.plots import (
    FixedPosterior,
    PriorFit,
    plot_elbo_comparison,
    save_figure,
)
from hf_deelbo.priors import PRIORS
from hf_deelbo.sharing.files import write_whole

RESULTS = Path(__file__).parent / "results"
MARKS = "<!-- results: begin -->", "<!-- results: end -->"
HOW_TO_READ = """\
Numbers are means over training sets, with the lowest and the highest. *mean*: at the posterior mean, or the weights
that MAP learned, with running batch-norm statistics, as in the paper. *mean, recomputed*: the same weights with
statistics computed over the training images. *average*: probabilities averaged over weight samples, each with
statistics of its own. J/D compares runs of the same kappa. Seconds are those of the whole choice, without tests. A
row's *lines* are the ids of its runs in the `*.jsonl`."""

HOW_TO_READ_CALIBRATED = """\
Temperatures fitted on a fifth that was held out of one more run, which the costs include. Three numbers in a cell are
those with the temperatures, without them (T = 1), and of the search, whose average has recomputed statistics in its
place. Means over training sets."""


def main(argv: Sequence[str] | None = None) -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of lines")
    parser.add_argument("--readme", type=Path, default=RESULTS / "README.md", help="the file with the two marks")
    options = parser.parse_args(argv)
    write_report(options.results, options.readme)


def write_report(results: Path, readme: Path) -> None:
    """Read the lines; write figures and the report, and its first table into the README of the results."""
    lines = {line["id"]: line for path in sorted(results.glob("*.jsonl")) for line in read_lines(path)}
    mapped = [line for line in lines.values() if "kappa" in line["config"] and "row" in line["config"]]
    swaps = [line for line in lines.values() if "row" in line["config"] and "kappa" not in line["config"]]
    trainers = {line["config"]["trainer"] for line in swaps}
    rows = rows_of([line for line in lines.values() if "method" in line["config"]])
    compared = [row for row in rows if row.config["method"] != "deelbo-single"]
    sections = [section(list(of_task), results) for _, of_task in groupby(compared, key=lambda row: row.task)]
    swept = [row for row in rows if row.config["method"] == "deelbo-single"]
    sections += [kappa_section(list(of_task), results) for _, of_task in groupby(swept, key=lambda row: row.task)]
    parts = ["# Results", "Made by `make report`; do not edit.", HOW_TO_READ, "## Against grid search"]
    parts += [comparison_table(compared), *sections]
    if len(trainers) > 1:  # else there is nothing to compare yet
        parts += ["## The swap test", swap_test.HOW_TO_READ, swap_test.table(swaps)]
    if any(row.config.get("calibrate") for row in compared):
        parts += ["## Calibrated", HOW_TO_READ_CALIBRATED, calibrated_table(compared)]
    if mapped:
        parts += ["## The map of kappa", kappa_map.HOW_TO_READ, map_figure(mapped, results), kappa_map.table(mapped)]
    if doubted := [line for line in lines.values() if line["config"].get("what") == "uncertainty"]:
        parts += ["## What the posterior knows", uncertainty.HOW_TO_READ, uncertainty.table(doubted)]
    write_whole(results / "REPORT.md", "\n\n".join(parts) + "\n")
    put_between_marks(readme, summary(compared))


# ---- Sections -------------------------------------------------------------------------------------------------------


def section(rows: list[Row], folder: Path) -> str:
    """Tables and figures of the methods on one task."""
    parts = [f"## {title(rows[0])}", quality_table(rows), *preferred_starts(rows), cost_table(rows)]
    name = file_name(rows[0])
    for prior, of_prior in groupby(rows, key=lambda row: row.config["prior"]):
        of_prior = list(of_prior)
        heading = f"{PRIORS[prior].label}: {title(of_prior[0])}".replace(" (", "\n(", 1)  # as wide as a figure
        if any(row.is_search for row in of_prior):
            figure = accuracy_over_compute(of_prior, heading)
            text = f"Accuracy over compute, {PRIORS[prior].label}. The curves stop a search after some of its trials "
            text += (
                "(500 random orders) and test the best as it is, trained on four fifths; marks are the ends, with all "
                "data."
            )
            parts.append(saved(figure, folder, f"compute_{name}_{prior}", text))
        learned = [row for row in without_repeats(of_prior) if row.config["method"] != "elbo"]  # that is far off
        values = {f"{row.method}, {at}": row.values("nll", key) for row in learned for key, at in AT.items()}
        values = {label: numbers for label, numbers in values.items() if numbers and max(numbers) < math.inf}
        if values:
            figure = plot_by_method(values, "test NLL", heading)
            text = f"NLL, {PRIORS[prior].label}. Without the plain ELBo, what is infinite, and what repeats halving."
            parts.append(saved(figure, folder, f"nll_{name}_{prior}", text))
    if pair := same_set_by_both(rows):
        figure = plot_elbo_comparison([posterior_of("plain ELBo", pair[0]), posterior_of("DE ELBo", pair[1])])
        text = "Which posterior each objective prefers. "
        text += f"From the lines `{pair[0]['id']}` (plain ELBo) and `{pair[1]['id']}` (DE ELBo)."
        parts.append(saved(figure, folder, f"elbo_{name}", text))
    return "\n\n".join(parts)


def kappa_section(rows: list[Row], folder: Path) -> str:
    """Accuracy and NLL over kappa."""
    points, body, default = [], [], None
    for row in sorted(rows, key=lambda row: row.lines[0]["learned"]["kappa"]):
        kappa, is_default = row.lines[0]["learned"]["kappa"], row.config["kappa"] == "auto"
        default = kappa if is_default else default
        points += [(kappa, *(line["test"]["mean"][key] for key in ("accuracy", "nll"))) for line in row.lines]
        cells = [spread(row.values("accuracy"), 1, 100), spread(row.values("nll"), 2)]
        averaged = [spread(row.values("accuracy", "average"), 1, 100), spread(row.values("nll", "average"), 2)]
        body.append([f"{kappa:,.0f}" + (" (D/N)" if is_default else ""), *cells, *averaged, row.ids])
    header = ["kappa", "accuracy %, mean", "NLL, mean", "accuracy %, average", "NLL, average", "lines"]
    figure = plot_kappa_sweep([point for point in points if None not in point], default, title(rows[0]))
    parts = [f"## kappa: {title(rows[0])}", markdown_table(header, body)]
    parts.append(saved(figure, folder, f"kappa_{file_name(rows[0])}", "At the posterior mean."))
    return "\n\n".join(parts)


def summary(rows: list[Row]) -> str:
    """For the README of the results."""
    if not rows:
        return "No results yet: `python examples/study.py --preset digits`, then `make report`."
    lines = [line for row in rows for line in row.lines]
    machines = {tuple(line["machine"][name] for name in ("cores", "device", "threads", "torch")) for line in lines}
    where = "; ".join("{} cores ({}), {} for a run, torch {}".format(*machine) for machine in sorted(machines))
    days = sorted({line["date"] for line in lines})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    text = "All tables and figures are in [REPORT.md](REPORT.md)"
    table = comparison_table(without_repeats(rows), with_ids=False)
    return f"{table}\n\n{text}; {when}, on {where}."


def map_figure(lines: list[Line], folder: Path) -> str:
    """NLL over kappa, with the rules."""
    figure = plot_kappa_map(*kappa_map.curves_and_rules(lines))
    text = (
        "Test NLL over kappa. Lines: fixed fractions of D/N, means over training sets; marks: rules, where they end, "
    )
    return saved(figure, folder, "kappa_map", text + "by the NLL of their average. D/N is the default.")


# ---- Figures --------------------------------------------------------------------------------------------------------


def accuracy_over_compute(rows: list[Row], heading: str) -> Figure:
    """Where each method ends, and the curves of searches."""
    points = {
        row.method: [(line["seconds"], line["test"]["mean"]["accuracy"]) for line in row.lines]
        for row in rows
        if len(row.costs("seconds")) == len(row.lines)
    }
    curves = {
        row.method: mean_curve([search_curve(line["trials"], line["num_classes"]) for line in row.lines])
        for row in rows
        if row.is_search
    }
    return plot_accuracy_over_compute(points, curves, heading)


def same_set_by_both(rows: list[Row]) -> tuple[Line, Line] | None:
    """A line of the plain ELBo, and the like of the DE ELBo on the same training set that has the highest J."""
    lines = [line for row in rows for line in row.lines]
    for plain in (line for line in lines if line["config"]["method"] == "elbo"):
        where = {name: plain["config"][name] for name in ("prior", "subset_seed", "sigma_update", "grouping")}
        ours = [line for line in lines if line["config"]["method"].startswith("deelbo")]
        ours = [line for line in ours if where.items() <= line["config"].items()]
        if ours:
            return plain, max(ours, key=lambda line: line["de_elbo"]["de_elbo"])
    return None


def posterior_of(name: str, line: Line) -> FixedPosterior:
    """The posterior that a line describes."""
    parts = {part: PriorFit(**line["posterior"][part]) for part in ("backbone", "head")}
    return FixedPosterior(**line["posterior"] | parts | {"name": name})


# ---- Text -----------------------------------------------------------------------------------------------------------


def title(row: Row) -> str:
    """What was learned from, by which model, for how long."""
    config, tested = row.config, row.lines[0]["num_test_examples"]
    size = f"{row.input_size}, {config['steps']:,} steps, {tested:,} test examples"
    return f"{config['dataset']}, N = {config['train_size']:,} ({Path(config['model']).name}, {size})"


def file_name(row: Row) -> str:
    """The same, for files."""
    config = row.config
    parts = (
        config["dataset"],
        config["train_size"],
        Path(config["model"]).name,
        row.input_size.split()[0],
        config["steps"],
    )
    return re.sub(r"[^a-z0-9]+", "_", "_".join(map(str, parts)).lower())


def saved(figure: Figure, folder: Path, name: str, text: str) -> str:
    """Write the figure, and show it in Markdown."""
    save_figure(figure, folder / "figures" / name)
    return f"![{text.split('.')[0]}](figures/{name}.png)\n\n{text}"


def put_between_marks(path: Path, text: str) -> None:
    """Replace what stands between the two marks."""
    content = path.read_text(encoding="utf-8")
    begin, end = MARKS
    if content.count(begin) != 1 or content.count(end) != 1:
        raise ValueError(f"readme: {path} needs the marks {begin} and {end}, once each.")
    before, rest = content.split(begin)
    new = f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"
    if new != content:
        write_whole(path, new)


if __name__ == "__main__":
    main()
