"""Tables of a study, from its lines alone: quality, cost, and how the DE ELBo compares with the search of its prior.

Every row names the lines it was made of, by their ids.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_deelbo.priors import PRIORS

from .searches import LEARNING_RATES
from .studies import MAP_METHODS, StudyRun

Line = Mapping[str, Any]

METHODS = {
    "map-grid": "MAP, grid search",
    "map-random": "MAP, random search",
    "map-tpe": "MAP, TPE search",
    "deelbo-full": "DE ELBo, all in full",
    "deelbo-halving": "DE ELBo, halving",
    "deelbo-single": "DE ELBo, no choice",
    "elbo": "ELBo, kappa = 1",
}
# where the test is made
AT = {"mean": "mean", "mean_recomputed": "mean, recomputed", "average": "average"}
# what a setting of the task is made of; methods are compared within one
_TASK = ("dataset", "train_size", "model", "input_size", "horizontal_flip", "steps", "num_test", "seed")


# ---- Rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Lines that differ in nothing but the training set."""

    config: dict[str, Any]
    lines: tuple[Line, ...]

    @property
    def task(self) -> tuple:
        """What methods must share to be compared."""
        about = self.config | {"input_size": self.input_size}
        return tuple(about[name] for name in _TASK)

    @property
    def input_size(self) -> str:
        """Of an image or of a text."""
        tokens = self.config.get("max_seq_length")
        return f"{self.config['image_size']} px" if tokens is None else f"{tokens} tokens"

    @property
    def name(self) -> str:
        """Prior, method and what was set for it."""
        return f"{PRIORS[self.config['prior']].label}, {self.method}"

    @property
    def method(self) -> str:
        """The same without the prior."""
        config = self.config
        parts = [METHODS[config["method"]]]
        if self.sigma:
            parts.append(self.sigma)
        if config.get("learning_rates", list(LEARNING_RATES)) != list(LEARNING_RATES):
            parts.append("learning rate " + " or ".join(f"{rate:g}" for rate in config["learning_rates"]))
        if config.get("calibrate"):
            parts.append("calibrated")
        return ", ".join(parts)

    @property
    def is_search(self) -> bool:
        """Whether it is the baseline."""
        return self.config["method"] in MAP_METHODS

    @property
    def sigma(self) -> str:
        """How it was learned, of the DE ELBo."""
        config = self.config
        if self.is_search:
            return ""
        if config["sigma_update"] == "optimizer":
            return f"sigma from {config['init_sigma']:g}"
        if config["grouping"] == StudyRun.grouping:
            return "sigma in closed form"
        return f"sigma in closed form, {'one' if config['grouping'] == 'all' else 'by ' + config['grouping']}"

    @property
    def ids(self) -> str:
        """The lines it was made of."""
        return " ".join(f"`{line['id']}`" for line in self.lines)

    @property
    def sets(self) -> set[int]:
        """The training sets, by their seeds."""
        return {line["config"]["subset_seed"] for line in self.lines}

    def settings_but(self, name: str) -> str:
        """The same for rows that differ in nothing else."""
        return repr(sorted((key, value) for key, value in self.config.items() if key != name))

    def on(self, sets: set[int]) -> "Row":
        """The row on some of its training sets."""
        return Row(self.config, tuple(line for line in self.lines if line["config"]["subset_seed"] in sets))

    def values(self, metric: str, at: str = "mean", test: str = "test") -> list[float]:
        """A test metric on each training set; none where it was not measured, infinity where it was not finite.

        `test="uncalibrated"` is the same at temperature 1.
        """
        found = [line[test][at][metric] for line in self.lines if at in line.get(test, ())]
        return [math.inf if value is None else value for value in found]

    @property
    def de_elbos(self) -> list[float]:
        """J/D on each training set; none for MAP."""
        return [line["de_elbo"]["de_elbo"] / line["num_parameters"] for line in self.lines if "de_elbo" in line]

    def costs(self, name: str) -> list[float]:
        """`runs` or `seconds` on each training set, where they were measured."""
        return [line[name] for line in self.lines if line[name] is not None]


def rows_of(lines: Sequence[Line]) -> list[Row]:
    """Lines in rows, in the order of tables."""
    groups = defaultdict(list)
    for line in lines:
        config = {name: value for name, value in line["config"].items() if name != "subset_seed"}
        groups[repr(sorted(config.items()))].append((config, line))
    rows = [
        Row(pairs[0][0], tuple(sorted((line for _, line in pairs), key=lambda line: line["config"]["subset_seed"])))
        for pairs in groups.values()
    ]

    def order(row: Row) -> tuple:
        methods, priors = list(METHODS), list(PRIORS)
        place = priors.index(row.config["prior"]), methods.index(row.config["method"])
        return (*map(str, row.task[:1]), row.task[1], str(row.task), *place, str(row.config))

    return sorted(rows, key=order)


def spread(values: Sequence[float], digits: int, scale: float = 1) -> str:
    """Mean (lowest-highest), or the one value.

    Example:
        >>> spread([0.5, 0.25, 0.75], digits=1, scale=100)
        '50.0 (25.0-75.0)'
        >>> spread([0.5], digits=2), spread([], digits=2)
        ('0.50', '')
    """
    if not values:
        return ""
    mean, low, high = (f"{scale * f(values):,.{digits}f}" for f in (statistics.fmean, min, max))
    return mean if len(values) == 1 else f"{mean} ({low}{' to ' if min(values) < 0 else '-'}{high})"


# ---- Tables ---------------------------------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown.

    Example:
        >>> print(markdown_table(["a", "b"], [["1", "2"]]))
        | a | b |
        |---|---|
        | 1 | 2 |
    """
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def quality_table(rows: Sequence[Row]) -> str:
    """Accuracy and NLL on the test set, mean (lowest-highest) over the training sets."""
    header = ["method", "sets", *(f"accuracy %, {name}" for name in AT.values()), *(f"NLL, {n}" for n in AT.values())]
    body = [
        [
            row.name,
            str(len(row.lines)),
            *(spread(row.values("accuracy", at), 1, 100) for at in AT),
            *(spread(row.values("nll", at), 2) for at in AT),
            spread(row.de_elbos, 3),
            row.ids,
        ]
        for row in rows
    ]
    return markdown_table([*header, "J/D", "lines"], body)


def cost_table(rows: Sequence[Row]) -> str:
    """Runs and seconds of the whole choice, and how many times fewer than the search of the same prior."""
    body = []
    for row in rows:
        comparison = compare(row, rows)
        fewer = ["", ""] if comparison is None else [comparison.times_fewer(name) for name in ("runs", "seconds")]
        of_a_run = [line["seconds"] / line["runs"] for line in row.lines if line["seconds"] is not None]
        costs = [spread(row.costs("runs"), 1), spread(row.costs("seconds"), 0), spread(of_a_run, 0)]
        body.append([row.name, *costs, *fewer, row.ids])
    header = ["method", "runs", "seconds", "seconds of a run", "times fewer runs", "times fewer seconds", "lines"]
    return markdown_table(header, body)


def preferred_starts(rows: Sequence[Row]) -> list[str]:
    """Of rows that differ in nothing but where sigma starts, on how many training sets J is highest for which."""
    groups = defaultdict(list)
    for row in rows:
        if row.config.get("sigma_update") == "optimizer":
            groups[row.settings_but("init_sigma")].append(row)
    sentences = []
    for group in groups.values():
        shared = set.intersection(*(row.sets for row in group))
        if len(group) < 2 or not shared:
            continue
        best = Counter(_highest_j(group, seed).sigma for seed in sorted(shared))
        chosen = ", ".join(f"{start} on {count}" for start, count in best.most_common())
        name = f"{PRIORS[group[0].config['prior']].label}, {METHODS[group[0].config['method']]}"
        sentences.append(f"{name}: of {len(shared)} training sets, J is highest with {chosen}.")
    return sentences


def _highest_j(rows: Sequence[Row], subset_seed: int) -> Row:
    return max(rows, key=lambda row: row.on({subset_seed}).de_elbos[0])


# ---- Against the search ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """A method and the search of its prior, on the training sets that both have."""

    ours: Row
    search: Row

    @property
    def accuracy(self) -> str:
        """Whether the mean accuracy lies within the search's lowest and highest."""
        mean, searched = statistics.fmean(self.ours.values("accuracy")), self.search.values("accuracy")
        if min(searched) <= mean <= max(searched):
            return "within"
        return "above" if mean > max(searched) else "**below**"

    def nll(self, at: str, search_at: str) -> str:
        """Whether the mean NLL is lower, and both."""
        ours, searched = (
            statistics.fmean(row.values("nll", a)) for row, a in ((self.ours, at), (self.search, search_at))
        )
        return f"{'better' if ours < searched else '**worse**'}: {ours:.2f}, {searched:.2f}"

    def times_fewer(self, cost: str) -> str:
        """How many times the search's cost is ours; seconds count where both were measured on the same machine."""
        pairs = [
            (ours, searched)
            for ours, searched in zip(self.ours.lines, self.search.lines, strict=True)
            if cost != "seconds" or (ours["seconds"] is not None and ours["machine"] == searched["machine"])
        ]
        if not pairs:
            return ""
        ours, searched = (sum(line[cost] for line in lines) for lines in zip(*pairs, strict=True))
        return f"{searched / ours:.1f}"


def compare(row: Row, rows: Sequence[Row]) -> Comparison | None:
    """A row of the DE ELBo or ELBo with the search of its task and prior, if there is one on the same sets.

    That is a grid search, or a random one where there is no grid. Of several, with other learning rates, it is the one
    that shares the most sets, then the largest.
    """
    if row.is_search:
        return None
    searches = [
        search
        for search in rows
        if (search.task, search.config["prior"]) == (row.task, row.config["prior"])
        and search.config["method"] in ("map-grid", "map-random")
        and row.sets & search.sets
    ]
    if not searches:
        return None

    def worth(search: Row) -> tuple[bool, int, float]:
        return search.config["method"] == "map-grid", len(row.sets & search.sets), max(search.costs("runs"))

    search = max(searches, key=worth)
    shared = row.sets & search.sets
    return Comparison(row.on(shared), search.on(shared))


def comparison_table(rows: Sequence[Row], with_ids: bool = True) -> str:
    """The answers: accuracy, NLL and cost of each method against the search of its prior."""
    body = []
    for row in rows:
        comparison = compare(row, rows)
        if comparison is None:
            continue
        ours, search = comparison.ours, comparison.search
        cells = [
            row.config["dataset"],
            f"{row.config['train_size']:,}",
            f"{row.config['steps']:,}",
            row.name,
            spread(ours.values("accuracy"), 1, 100),
            spread(search.values("accuracy"), 1, 100) + (" (random)" if search.config["method"] != "map-grid" else ""),
            comparison.accuracy,
            comparison.nll("mean", "mean"),
            comparison.nll("average", "mean_recomputed"),
            comparison.times_fewer("runs"),
            comparison.times_fewer("seconds"),
        ]
        body.append([*cells, f"{ours.ids} / {search.ids}"] if with_ids else cells)
    header = [
        *("data", "N", "steps", "method", "accuracy %", "grid's accuracy %", "its mean in the grid's lowest-highest"),
        *("NLL at the mean: ours, grid's", "NLL: our average, grid's recomputed"),
        *("times fewer runs", "times fewer seconds"),
    ]
    return markdown_table([*header, "lines / grid's"] if with_ids else header, body)


def calibrated_table(rows: Sequence[Row]) -> str:
    """Calibrated runs, before and after, against the search of their prior: accuracy, NLL and calibration error."""
    body = []
    for row in rows:
        comparison = compare(row, rows)
        if comparison is None or not row.config.get("calibrate"):
            continue
        ours, search = comparison.ours, comparison.search

        def three(metric: str, at: str, of_search: str, ours: Row = ours, search: Row = search) -> str:
            numbers = [
                ours.values(metric, at),
                ours.values(metric, at, "uncalibrated"),
                search.values(metric, of_search),
            ]
            return " / ".join(f"{statistics.fmean(values):.3f}" for values in numbers)

        temperatures = [[line["temperatures"][at] for line in ours.lines] for at in ("mean", "average")]
        accuracies = [row.values("accuracy", at) for row, at in ((ours, "mean"), (ours, "average"), (search, "mean"))]
        body.append(
            [
                *(row.config["dataset"], f"{row.config['train_size']:,}", f"{row.config['steps']:,}"),
                PRIORS[row.config["prior"]].label,
                str(len(ours.lines)),
                " / ".join(f"{100 * statistics.fmean(values):.1f}" for values in accuracies),
                three("nll", "mean", "mean"),
                three("nll", "average", "mean_recomputed"),
                three("ece", "mean", "mean"),
                three("ece", "average", "mean_recomputed"),
                " / ".join(f"{statistics.fmean(values):.2f}" for values in temperatures),
                spread(ours.costs("runs"), 1),
                ours.ids,
            ]
        )
    header = ["data", "N", "steps", "prior", "sets", "accuracy %: mean / average / grid"]
    header += [f"{metric} {at}: ours / at T = 1 / grid" for metric in ("NLL", "ECE") for at in ("mean", "average")]
    return markdown_table([*header, "T: mean / average", "runs", "lines"], body)


def without_repeats(rows: Sequence[Row]) -> list[Row]:
    """Leave out those that try all candidates in full where halving was run on the same sets."""

    def what_else(row: Row) -> tuple[str, frozenset[int]]:
        return row.settings_but("method"), frozenset(row.sets)

    halved = {what_else(row) for row in rows if row.config["method"] == "deelbo-halving"}
    return [row for row in rows if row.config["method"] != "deelbo-full" or what_else(row) not in halved]


# ---- Accuracy over compute ------------------------------------------------------------------------------------------


def search_curve(
    trials: Sequence[Line], num_classes: int, num_subsamples: int = 500, seed: int = 0
) -> list[tuple[float, float]]:
    """Seconds and test accuracy of a search that is stopped after 1, 2, ... of its trials, in random order.

    The trials are put in `num_subsamples` random orders. Of the first k of each, the one with the lowest validation
    NLL is taken; the answer is the mean of its test accuracy, and of the seconds of all k. A trial that diverged
    guesses.

    Example:
        >>> good = {"validation_nll": 0.5, "seconds": 10.0, "measured": {"accuracy": 0.8}}
        >>> search_curve([good, good], num_classes=10)
        [(10.0, 0.8), (20.0, 0.8)]
    """
    nll = np.array([math.inf if trial["validation_nll"] is None else trial["validation_nll"] for trial in trials])
    accuracy = np.array([trial["measured"]["accuracy"] if trial["measured"] else 1 / num_classes for trial in trials])
    seconds = np.array([trial["seconds"] for trial in trials])
    generator = np.random.default_rng(seed)
    orders = generator.permuted(np.tile(np.arange(len(trials)), (num_subsamples, 1)), axis=1)
    curve = []
    for k in range(1, len(trials) + 1):
        first = orders[:, :k]
        best = first[np.arange(num_subsamples), nll[first].argmin(axis=1)]
        curve.append((round(float(seconds[first].sum(axis=1).mean()), 9), round(float(accuracy[best].mean()), 9)))
    return curve


def mean_curve(curves: Sequence[Sequence[tuple[float, float]]]) -> list[tuple[float, float]]:
    """The mean over training sets, after each number of trials that all have."""
    shortest = min(map(len, curves))
    means = np.mean([curve[:shortest] for curve in curves], axis=0)
    return [tuple(point) for point in means.tolist()]
