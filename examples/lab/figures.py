"""Figures of studies."""

from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from hf_deelbo.plots import FONT_SIZE, STYLES, describe_axes, laid_out


def plot_accuracy_over_compute(
    points: Mapping[str, Sequence[tuple[float, float]]],
    curves: Mapping[str, Sequence[tuple[float, float]]],
    title: str = "",
) -> Figure:
    """What accuracy each method reaches for how much compute.

    Args:
        points: seconds and accuracy on each training set, by the name of the method; the mean is marked, with a bar
            from the lowest to the highest accuracy.
        curves: seconds and accuracy of some of these methods when they are stopped early, without the last training
            on all the data.
        title: on which data.

    Example:
        >>> points = {"grid search": [(50.0, 0.6)], "DE ELBo": [(10.0, 0.5), (12.0, 0.7)]}
        >>> figure = plot_accuracy_over_compute(points, {"grid search": [(20.0, 0.3), (40.0, 0.6)]})
        >>> [line.get_label() for line in figure.axes[0].lines]
        ['grid search', 'grid search, stopped early', 'DE ELBo']
    """
    figure = Figure(figsize=(7, 4.2 + 0.22 * len(points)), layout="constrained")
    axes = figure.subplots()
    marks = []
    for position, (name, values) in enumerate(points.items()):
        style = STYLES[position % len(STYLES)]
        hollow = {} if position < len(STYLES) else {"markerfacecolor": "white"}
        seconds, accuracy = np.array(values).T
        at, mean = seconds.mean(), 100 * accuracy.mean()
        marks += axes.plot([at], [mean], **(style | {"linestyle": ""}), **hollow, markersize=8, label=name)
        axes.vlines(at, 100 * accuracy.min(), 100 * accuracy.max(), color=style["color"])
        if name in curves:
            x, y = np.array(curves[name]).T
            axes.plot(x, 100 * y, **(style | {"marker": ""}), label=f"{name}, stopped early")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    describe_axes(axes, "compute of the whole choice, seconds", "test accuracy, %")
    what_curves_are = "curves: the best of a search so far, not yet trained again on all the data"
    figure.suptitle("\n".join(filter(None, [title, what_curves_are])), fontsize=FONT_SIZE)
    figure.legend(handles=marks, loc="outside lower center", frameon=False, fontsize=FONT_SIZE)
    return laid_out(figure)


def plot_comparison(rows: Mapping[str, tuple[float, float, float]], cost: str) -> Figure:
    """Test accuracy (left) and NLL (right) of some ways to fine-tune, over what they cost.

    Args:
        rows: cost, accuracy and NLL by name.
        cost: what it is counted in.

    Example:
        >>> figure = plot_comparison({"plain": (10.0, 0.6, 1.2), "DE ELBo": (25.0, 0.7, 0.9)}, "seconds")
        >>> [float(line.get_ydata()[0]) for line in figure.axes[0].lines]
        [60.0, 70.0]
    """
    figure = Figure(figsize=(7, 3.6 + 0.22 * len(rows)), layout="constrained")
    panels = figure.subplots(1, 2)
    for (name, (spent, accuracy, nll)), style in zip(rows.items(), cycle(STYLES), strict=False):
        for axes, value in zip(panels, (100 * accuracy, nll), strict=True):
            axes.plot([spent], [value], **(style | {"linestyle": ""}), markersize=8, label=name)
    for axes, label in zip(panels, ("test accuracy, %", "test NLL"), strict=True):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.margins(0.15)
        describe_axes(axes, f"cost of the whole choice, {cost}", label)
    figure.legend(handles=panels[0].lines, loc="outside lower center", frameon=False, fontsize=FONT_SIZE)
    return laid_out(figure)


def plot_kappa_sweep(runs: Sequence[tuple[float, float, float]], default: float | None, title: str = "") -> Figure:
    """Test accuracy (left) and NLL (right) over kappa, the mean and every run.

    Args:
        runs: kappa, accuracy and NLL of each.
        default: D/N, to be marked if given.
        title: on which data.

    Example:
        >>> figure = plot_kappa_sweep([(1.0, 0.1, 2.3), (100.0, 0.8, 0.5), (100.0, 0.6, 0.7)], default=100.0)
        >>> figure.axes[0].lines[1].get_ydata().tolist()
        [10.0, 70.0]
    """
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    kappas = sorted({kappa for kappa, *_ in runs})
    for axes, column, scale, label in zip(
        figure.subplots(1, 2), (1, 2), (100, 1), ("test accuracy, %", "test NLL"), strict=True
    ):
        means = [float(np.mean([scale * run[column] for run in runs if run[0] == kappa])) for kappa in kappas]
        if default is not None:
            axes.axvline(default, color="0.4", linewidth=1, label="$\\kappa = D/N$")
        axes.plot(kappas, means, **STYLES[0], label="mean")
        every = {"linestyle": "", "marker": ".", "color": STYLES[0]["color"], "alpha": 0.5}
        axes.plot([run[0] for run in runs], [scale * run[column] for run in runs], **every, label="each training set")
        axes.set_xscale("log")
        describe_axes(axes, "weight of the likelihood, $\\kappa$", label)
    figure.suptitle(title, fontsize=FONT_SIZE)
    handles = figure.axes[0].lines
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=FONT_SIZE)
    return laid_out(figure)


def plot_by_method(values: Mapping[str, Sequence[float]], label: str, title: str = "") -> Figure:
    """One row for each method, with a bar at the mean and a dot for each training set.

    Args:
        values: a number for each training set, by the name of the method.
        label: what the number is.
        title: on which data.

    Example:
        >>> figure = plot_by_method({"MAP": [0.5, 0.7], "DE ELBo": [0.4]}, "test NLL")
        >>> [float(line.get_xdata()[0]) for line in figure.axes[0].lines[::2]]
        [0.6, 0.4]
    """
    figure = Figure(figsize=(9, 1.6 + 0.32 * len(values)), layout="constrained")
    axes = figure.subplots()
    for position, (name, numbers) in enumerate(values.items()):
        mean, (bar, dot) = sum(numbers) / len(numbers), STYLES[:2]
        axes.plot([mean], [position], color=bar["color"], marker="|", markersize=18, markeredgewidth=3, label=name)
        axes.plot(
            numbers, [position] * len(numbers), **(dot | {"linestyle": "", "marker": "o"}), label=f"{name}, sets"
        )
    axes.set_yticks(range(len(values)), list(values))
    axes.set_ylim(len(values) - 0.5, -0.5)
    describe_axes(axes, label, "")
    explained = "dots: training sets, bars: their mean"
    figure.suptitle("\n".join(filter(None, [title, explained])), fontsize=FONT_SIZE)
    return laid_out(figure)


def plot_kappa_map(
    curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    rules: Mapping[str, Sequence[tuple[str, float, float]]],
) -> Figure:
    """Test NLL over kappa as a fraction of D/N, a panel for each task; rules are marked where they end.

    Args:
        curves: for each task, by what is predicted with, fractions and NLL; the same for each task.
        rules: for each task the name of a rule, the fraction where it ends, and its NLL.

    Example:
        >>> curves = {"digits": {"mean": [(0.1, 0.4), (1.0, 0.3)]}, "pet": {"mean": [(0.1, 2.3), (1.0, 2.4)]}}
        >>> figure = plot_kappa_map(curves, {"digits": [("bound", 0.2, 0.35)]})
        >>> [axes.get_title() for axes in figure.axes if axes.lines]
        ['digits', 'pet']
    """
    columns = min(4, len(curves))
    figure = Figure(figsize=(2.6 * columns + 0.6, 2.7 * -(-len(curves) // columns) + 0.8), layout="constrained")
    panels = figure.subplots(-(-len(curves) // columns), columns, squeeze=False).flat
    handles = {}
    names = sorted({name for of_task in rules.values() for name, *_ in of_task})
    marks = dict(zip(names, "*Pdv^", strict=False))
    for (task, of_task), axes in zip(curves.items(), panels, strict=False):
        for style, (name, points) in zip(STYLES, of_task.items(), strict=False):
            x, y = np.array(sorted(points)).T
            handles[name] = axes.plot(x, y, **style, label=name)[0]
        for name, x, y in rules.get(task, ()):
            style = {"linestyle": "", "marker": marks[name], "markersize": 9, "color": "0.25"}
            handles[name] = axes.plot([x], [y], **style, label=name)[0]
        handles["D/N"] = axes.axvline(1, color="0.6", linewidth=1, label="D/N")
        axes.set_xscale("log")
        axes.set_title(task, fontsize=FONT_SIZE)
        describe_axes(axes, "$\\kappa$ / (D/N)", "test NLL")
    for axes in list(panels):
        axes.set_axis_off()
    figure.legend(
        handles=list(handles.values()), loc="outside lower center", ncols=3, frameon=False, fontsize=FONT_SIZE
    )
    return laid_out(figure)
