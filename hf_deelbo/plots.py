"""Figures of a run: what was learned over the steps, calibration, uncertainty, and the ELBo beside the DE ELBo.

It needs matplotlib, but no display: every function makes a `Figure` of its own and leaves pyplot's state alone.
"""

import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from .metrics import confidence_bins, out_of_distribution_auroc, risk_coverage_curve
from .objective import (
    DEELBo,
    default_kappa,
    gaussian_kl,
    optimal_variance,
)
from .priors import GaussianPrior
from .sharing.files import as_json, write_whole
from .sharing.posteriors import GaussianPosterior
from .weights.blocks import Tensors

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter
except ImportError as error:
    raise ImportError("Figures come with a package: pip install 'hf-deelbo[plots]'.") from error

# The colours of Okabe and Ito, which the colour-blind tell apart; dashes and markers do the same for print in grey
STYLES = [
    {"color": "#0072B2", "linestyle": "-", "marker": "o"},
    {"color": "#D55E00", "linestyle": "--", "marker": "s"},
    {"color": "#009E73", "linestyle": "-.", "marker": "^"},
    {"color": "#CC79A7", "linestyle": ":", "marker": "D"},
    {"color": "#E69F00", "linestyle": "-", "marker": "v"},
    {"color": "#56B4E9", "linestyle": "--", "marker": "P"},
]
FONT_SIZE = 11  # still read when a figure of 7 inches is printed 3.5 inches wide
# The names that a figure has room for
MOST_NAMES, LONGEST_LABEL = 16, 36
# A legend outside of the axes, where it covers no data
ABOVE = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "frameon": False, "fontsize": FONT_SIZE}


# ---- Training curves -----------------------------------------------------------------------------------------------


def plot_training_curves(log_history: Sequence[Mapping[str, Any]]) -> Figure:
    """What a run learned, over its steps: lambda, tau, sigma, the NLL and the KL of backbone and head.

    Args:
        log_history: `trainer.state.log_history`; lines without `nll`, such as those of an evaluation, are left out.

    Example:
        >>> line = {"nll": 0.5, "kl_backbone": 9.0, "kl_head": 2.0, "lambda": 0.1, "tau": 0.2, "sigma": 0.01}
        >>> figure = plot_training_curves([line | {"step": 10}, line | {"step": 20}])
        >>> len(figure.axes)
        5
    """
    lines = [line for line in log_history if "nll" in line]
    if not lines:
        raise ValueError('log_history: no line has "nll". Give `state.log_history` of a DEELBoTrainer after a run.')
    figure = Figure(figsize=(7, 5), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    panels = [*top.subplots(1, 3), *bottom.subplots(1, 2)]
    contents = [
        ("prior variance of\nthe backbone, $\\lambda$", ["lambda"]),
        ("prior variance of\nthe head, $\\tau$", ["tau"]),
        ("standard deviation\nof the posterior, $\\sigma$", ["sigma"]),
        ("negative log likelihood\nof an example, NLL", ["nll"]),
        ("divergence from\nthe prior, KL", ["kl_backbone", "kl_head"]),
    ]
    for axes, (label, keys) in zip(panels, contents, strict=True):
        for key, style in zip(keys, STYLES, strict=False):
            steps, values = [line["step"] for line in lines], [line[key] for line in lines]
            axes.plot(steps, values, **style, markevery=[-1], label=key)
        describe_axes(axes, "step", label)
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=(1, 2, 5, 10)))
        axes.set_xlim(left=0)
        if keys != ["nll"]:
            _use_log_scale(axes)
    panels[-1].legend(["backbone", "head"], ncols=2, **ABOVE)
    return laid_out(figure)


def _use_log_scale(axes: Axes, which: str = "y") -> None:
    """A log scale over the positive numbers; the others are left out, and where all are, the scale stays linear.

    A run from L2-SP starts at KL = 0 up to rounding, which must not stretch the scale over ten empty decades.
    """
    values = np.concatenate([line.get_xdata() if which == "x" else line.get_ydata() for line in axes.lines])
    shown = values[values > max(0, 1e-10 * values.max())]
    if len(shown) == 0:
        return
    set_scale, set_limits, axis = (
        (axes.set_xscale, axes.set_xlim, axes.xaxis) if which == "x" else (axes.set_yscale, axes.set_ylim, axes.yaxis)
    )
    set_scale("log", nonpositive="mask")
    low, high = shown.min(), shown.max()
    margin = max((high / low) ** 0.05, 1.02)
    set_limits(low / margin, high * margin)
    # Whatever the range, two ticks at least
    few_decades = LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=6)
    axis.set_major_locator(MaxNLocator(4, steps=(1, 2, 5, 10)) if high < 5 * low else few_decades)
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())


# ---- Groups --------------------------------------------------------------------------------------------------------


def plot_groups(groups: Sequence[Mapping[str, Any]]) -> Figure:
    """What each group of weights learned, from the first layer down to the head: sigma, and how far it may move.

    Args:
        groups: rows of `posterior.group_table()`. Up to `MOST_NAMES` are named; of more, those of the head are marked.

    Example:
        >>> row = {"in_head": False, "sigma": 1e-3, "prior_variance": 1e-4}
        >>> figure = plot_groups([row | {"name": "stem"}, row | {"name": "layer"}])
        >>> [float(width) for width in figure.axes[0].lines[1].get_xdata()]
        [0.01, 0.01]
    """
    if not groups:
        raise ValueError("groups: there are none; give the rows of `posterior.group_table()`.")
    named = len(groups) <= MOST_NAMES
    figure = Figure(figsize=(7, 1.7 + 0.34 * len(groups) if named else 7), layout="constrained")
    axes, positions = figure.subplots(), range(1, len(groups) + 1)
    values = {
        "posterior, $\\sigma$": [row["sigma"] for row in groups],
        "prior, $\\sqrt{\\lambda}$, in the head $\\sqrt{\\tau}$": [math.sqrt(row["prior_variance"]) for row in groups],
    }
    for (label, widths), style in zip(values.items(), STYLES, strict=False):
        size = {} if named else {"markersize": 3, "linewidth": 0.6}
        axes.plot(widths, positions, **style, **size, label=label)
    axes.set_ylim(len(groups) + 0.6, 0.4)
    in_head = [position for position, row in zip(positions, groups, strict=True) if row["in_head"]]
    if in_head:
        axes.axhspan(in_head[0] - 0.5, in_head[-1] + 0.5, color="0.93", linewidth=0, zorder=0)
    describe_axes(axes, "standard deviation of a weight", "" if named else "group of weights, the head in grey")
    _use_log_scale(axes, "x")
    if named:
        axes.set_yticks(positions, [_end_of(row["name"]) for row in groups], parse_math=False)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.legend(ncols=2, **ABOVE)
    return laid_out(figure)


def _end_of(name: str) -> str:
    """Which tells more than its beginning, if there is no room for both."""
    return name if len(name) <= LONGEST_LABEL else f"…{name[1 - LONGEST_LABEL :]}"


# ---- Calibration ---------------------------------------------------------------------------------------------------


def plot_reliability(
    probabilities: ArrayLike | Mapping[str, ArrayLike], labels: ArrayLike, num_bins: int = 15
) -> Figure:
    """Reliability diagram: accuracy over confidence in bins (a, b] of equal width, and the share of examples in each.

    The title tells the expected calibration error, ECE = sum_b n_b/n |accuracy_b - confidence_b|. The bars between
    points and diagonal are its |accuracy_b - confidence_b|.

    Args:
        probabilities: one row of class probabilities for each example; or several such by name, for instance those of
            the posterior mean and those averaged over weight samples.
        labels: the class index of each example.
        num_bins: how many bins.

    Example:
        >>> figure = plot_reliability([[0.8, 0.2], [0.6, 0.4]], labels=[0, 1], num_bins=5)
        >>> figure.get_suptitle()
        'ECE 0.400'
    """
    if num_bins < 1:
        raise ValueError(f"num_bins: must be at least 1, got {num_bins}.")
    named = probabilities if isinstance(probabilities, Mapping) else {"predictions": probabilities}
    if not named:
        raise ValueError("probabilities: there are none; give at least one name with its probabilities.")
    edges = np.arange(num_bins + 1) / num_bins
    titles = []
    figure = Figure(figsize=(5, 6), layout="constrained")
    diagram, histogram = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    diagram.plot([0, 1], [0, 1], color="0.4", linewidth=1, label="perfect calibration")
    for (name, rows), style in zip(named.items(), cycle(STYLES), strict=False):
        share, confidence, accuracy = _calibration(*_checked_predictions(rows, labels), num_bins)
        gap = np.abs(accuracy - confidence)
        titles.append(f"ECE {(share[share > 0] * gap).sum():.3f}" + (f", {name}" if len(named) > 1 else ""))
        diagram.vlines(confidence, confidence, accuracy, color=style["color"], linewidth=5, alpha=0.3)
        diagram.plot(confidence, accuracy, **style, clip_on=False, label=name)
        # The share of (a, b] is given at b, and drawn back to a
        histogram.plot(edges, [0, *share], **(style | {"marker": ""}), drawstyle="steps-pre", label=name)
        histogram.fill_between(edges, [0, *share], step="pre", color=style["color"], alpha=0.15, linewidth=0)
    diagram.set(xlim=(0, 1), ylim=(-0.03, 1.03))
    histogram.set_ylim(bottom=0)
    describe_axes(diagram, "", "accuracy")
    describe_axes(histogram, "confidence, the largest probability", "share of\nexamples")
    diagram.legend(**ABOVE)
    figure.suptitle("\n".join(titles), fontsize=FONT_SIZE)
    return laid_out(figure)


def _calibration(
    probabilities: np.ndarray, labels: np.ndarray, num_bins: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The share of examples in every bin; mean confidence and accuracy in those that are not empty."""
    confidence, correct = probabilities.max(1), probabilities.argmax(1) == labels
    bins = confidence_bins(confidence, num_bins)
    count = np.bincount(bins, minlength=num_bins)
    sums = [np.bincount(bins, weights, minlength=num_bins) for weights in (confidence, correct)]
    filled = count > 0
    return count / len(labels), *(total[filled] / count[filled] for total in sums)


def _checked_predictions(probabilities: ArrayLike, labels: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    probabilities = torch.as_tensor(probabilities, dtype=torch.float64).detach().cpu().numpy()
    labels = torch.as_tensor(labels).cpu().numpy()
    if probabilities.ndim != 2 or labels.ndim != 1:
        raise ValueError(
            "probabilities: expected one row for each example, and labels one class index for each; got the shapes "
            f"{probabilities.shape} and {labels.shape}."
        )
    if len(probabilities) != len(labels) or len(labels) == 0:
        raise ValueError(
            f"labels: {len(labels)} for {len(probabilities)} rows of probabilities; it needs one for each, and one at "
            "least."
        )
    if probabilities.min() < 0 or not np.allclose(probabilities.sum(1), 1, atol=1e-2):
        raise ValueError("probabilities: rows must be >= 0 and sum to 1; apply a softmax to logits first.")
    if labels.min() < 0 or labels.max() >= probabilities.shape[1]:
        raise ValueError(f"labels: must be class indices from 0 to {probabilities.shape[1] - 1}.")
    return probabilities, labels


# ---- Uncertainty ---------------------------------------------------------------------------------------------------


def plot_risk_coverage(scores: Mapping[str, tuple[ArrayLike, ArrayLike]]) -> Figure:
    """What is gained by answering only where one is sure: the mean loss over the share of examples that are kept.

    The legend tells the area under each curve, AURC. A curve that rises from left to right knows where it errs.

    Args:
        scores: for each name, uncertainties and losses of some examples, as `metrics.risk_coverage_curve` takes them.

    Example:
        >>> figure = plot_risk_coverage({"doubt": ([0.1, 0.9, 0.5, 0.7], [0, 1, 0, 0])})
        >>> figure.axes[0].lines[0].get_label()
        'doubt, AURC 0.0625'
    """
    if not scores:
        raise ValueError("scores: there are none; give at least one name with its uncertainties and losses.")
    figure = Figure(figsize=(5, 4), layout="constrained")
    axes = figure.subplots()
    for (name, (uncertainties, losses)), style in zip(scores.items(), cycle(STYLES), strict=False):
        coverage, risk = risk_coverage_curve(uncertainties, losses)
        axes.plot(coverage, risk, **style, markevery=[-1], clip_on=False, label=f"{name}, AURC {risk.mean():.4f}")
    axes.set(xlim=(0, 1), ylim=(0, None))
    describe_axes(axes, "coverage, the share of examples that are answered", "risk, the mean loss of these")
    axes.legend(**ABOVE)
    return laid_out(figure)


def plot_out_of_distribution(
    inside: ArrayLike, outside: ArrayLike | Mapping[str, ArrayLike], score: str = "doubt", num_bins: int = 30
) -> Figure:
    """Whether an uncertainty tells other examples from those of the kind that was learned from.

    Left how it is distributed among either, right the ROC curves: over the share of those inside above a threshold,
    the share of those outside. The legend tells the area under each, `metrics.out_of_distribution_auroc`.

    Args:
        inside: the uncertainty of each example of the kind that was learned from.
        outside: the same of another kind, or of several by name.
        score: what the uncertainty is.
        num_bins: of the left panel.

    Example:
        >>> figure = plot_out_of_distribution([0.1, 0.2, 0.3], {"noise": [0.3, 0.4]})
        >>> [line.get_label() for line in figure.axes[1].lines]
        ['chance', 'noise, AUROC 0.917']
    """
    named = outside if isinstance(outside, Mapping) else {"outside": outside}
    if not named:
        raise ValueError("outside: there are none; give the uncertainties of at least one other kind.")
    if num_bins < 1:
        raise ValueError(f"num_bins: must be at least 1, got {num_bins}.")
    # first, as they refuse what is no uncertainty
    aurocs = {name: out_of_distribution_auroc(inside, values) for name, values in named.items()}
    inside, named = np.asarray(inside, float), {name: np.asarray(values, float) for name, values in named.items()}
    everything = np.concatenate([inside, *named.values()])
    if not np.isfinite(everything).all():
        raise ValueError("inside, outside: a histogram has no place for infinite uncertainties; leave them out.")
    edges = np.histogram_bin_edges(everything, num_bins)
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    right.plot([0, 1], [0, 1], color="0.4", linewidth=1, label="chance")
    for (name, values), style in zip({"inside": inside, **named}.items(), cycle(STYLES), strict=False):
        share = np.histogram(values, edges)[0] / len(values)
        # The share of [a, b) is given at b, and drawn back to a
        left.plot(edges, [0, *share], **(style | {"marker": ""}), drawstyle="steps-pre", label=name)
        left.fill_between(edges, [0, *share], step="pre", color=style["color"], alpha=0.15, linewidth=0)
        if name in aurocs:
            false_alarms, found = _roc(inside, values)
            label = f"{name}, AUROC {aurocs[name]:.3f}"
            right.plot(false_alarms, found, **(style | {"marker": ""}), clip_on=False, label=label)
    left.set_ylim(bottom=0)
    right.set(xlim=(0, 1), ylim=(0, 1))
    describe_axes(left, score, "share of examples")
    describe_axes(right, "share of inside above a threshold", "share of outside above it")
    for axes in (left, right):
        axes.legend(**ABOVE)
    return laid_out(figure)


def _roc(inside: np.ndarray, outside: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The shares of both at or above each threshold, from none to all."""
    thresholds = np.unique(np.concatenate([inside, outside]))[::-1]
    shares = [1 - np.searchsorted(np.sort(of), thresholds, side="left") / len(of) for of in (inside, outside)]
    return tuple(np.concatenate([[0.0], share]) for share in shares)


# ---- ELBo and DE ELBo ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PriorFit:
    """How one part of q, backbone or head, lies in its prior: all that its KL needs beside sigma and the variance.

    Groups of weights may have a sigma_g and a prior variance each. Then the part's variance is their mean over the
    weights, of which group g has the share r_g (Sigma_p of the group counts r_g times), and sigma is one number to
    measure the sigma_g by.

    Attributes:
        mahalanobis: (mu_p - w_bar)^T Sigma_p^-1 (mu_p - w_bar); of several groups their sum, each over r_g.
        trace_inverse: tr(Sigma_p^-1); of several groups sum_g (sigma_g / sigma)^2 tr(Sigma_p^-1)_g / r_g.
        log_det: log det Sigma_p; of several groups the sum of that plus D_g log( r_g (sigma / sigma_g)^2 ).
        num_parameters: D of this part.

    Example:
        >>> PriorFit(mahalanobis=0.0, trace_inverse=3.0, log_det=0.0, num_parameters=3).kl(sigma=0.5, variance=0.25)
        0.0
    """

    mahalanobis: float
    trace_inverse: float
    log_det: float
    num_parameters: int

    @classmethod
    def of(
        cls,
        prior: GaussianPrior,
        weights: Tensors,
        sigmas: torch.Tensor,
        variances: torch.Tensor,
        sigma: torch.Tensor,
    ) -> "PriorFit":
        """Of the means `weights` in `prior`, with sigma and prior variance of its groups, measured by `sigma`."""
        mean_variance = (prior.group_sizes * variances).sum() / prior.num_parameters
        shares, ratios = variances / mean_variance, (sigmas / sigma) ** 2
        mahalanobis = (prior.mahalanobis(weights) / shares).sum()
        trace_inverse = (ratios * prior.trace_inverse / shares).sum()
        log_det = (prior.log_det + prior.group_sizes * (shares / ratios).log()).sum()
        return cls(float(mahalanobis), float(trace_inverse), float(log_det), prior.num_parameters)

    def kl(self, sigma: float, variance: float) -> float:
        """KL( N(w_bar, sigma^2 I) || N(mu_p, variance * Sigma_p) )."""
        return float(gaussian_kl(_float64(sigma), _float64(variance), **asdict(self)))


@dataclass(frozen=True)
class FixedPosterior:
    """A posterior q that is kept fixed, to see J at any lambda, tau and kappa.

    Where groups of weights have a prior variance each, lambda and tau are their means, and change in proportion.

    Attributes:
        name: what the legend calls it.
        nll: mean negative log likelihood of a training example under q, such as `trainer.de_elbo().nll`.
        sigma: the standard deviation of q; of several, what `backbone` and `head` measure them by.
        backbone: the backbone in its prior.
        head: the head in its prior.
        num_examples: N, the size of the training set.

    Example:
        >>> backbone, head = PriorFit(0.0, 3.0, 0.0, num_parameters=3), PriorFit(4.0, 2.0, 0.0, num_parameters=2)
        >>> q = FixedPosterior("q", nll=0.5, sigma=1.0, backbone=backbone, head=head, num_examples=10)
        >>> q.value(lambda_=1.0, tau=1.0, kappa=2.0)  # -2 * 10 * 0.5 - 0 - 2
        -12.0
    """

    name: str
    nll: float
    sigma: float
    backbone: PriorFit
    head: PriorFit
    num_examples: int

    @classmethod
    def from_posterior(cls, name: str, posterior: GaussianPosterior, nll: float) -> "FixedPosterior":
        """The present state of a posterior, with the `nll` that was computed for it."""
        if posterior.is_sampled:
            raise ValueError("posterior: the model holds a weight sample; leave `with sampled(...)` first.")
        if posterior.num_examples is None:
            raise ValueError("posterior: it has no `num_examples`, and J needs N, the size of the training set.")
        priors, weights = (posterior.prior, posterior.head_prior), (posterior.backbone, posterior.head)
        sigmas, variances = posterior.by_part(posterior.sigmas), posterior.by_part(posterior.prior_variances)
        parts = [
            PriorFit.of(*groups, sigma=posterior.sigma)
            for groups in zip(priors, weights, sigmas, variances, strict=True)
        ]
        return cls(name, nll, float(posterior.sigma), *parts, posterior.num_examples)

    @property
    def num_parameters(self) -> int:
        """D."""
        return self.backbone.num_parameters + self.head.num_parameters

    @property
    def best_common_variance(self) -> float:
        """The value of lambda = tau that maximises J; kappa does not enter."""
        best = optimal_variance(
            _float64(self.sigma),
            mahalanobis=self.backbone.mahalanobis + self.head.mahalanobis,
            trace_inverse=self.backbone.trace_inverse + self.head.trace_inverse,
            num_parameters=self.num_parameters,
        )
        return float(best)

    def value(self, lambda_: float, tau: float, kappa: float) -> float:
        """J = -kappa * N * nll - KL(q(w) || p(w)) - KL(q(V) || p(V))."""
        kl_backbone, kl_head = self.backbone.kl(self.sigma, lambda_), self.head.kl(self.sigma, tau)
        return DEELBo(self.nll, kl_backbone, kl_head, kappa, self.num_examples).value


def plot_elbo_comparison(posteriors: Sequence[FixedPosterior]) -> Figure:
    """Which of some fixed posteriors the ELBo (kappa = 1, left) and the DE ELBo (kappa = D/N, right) prefer.

    Each curve is J/D of one posterior over a common value of lambda and tau (of their means, where groups of weights
    have one each, in the proportions learned), with a mark at its maximum. Far to the left, where the prior is too
    narrow for the posterior, curves fall without bound and leave the panel.

    Args:
        posteriors: of the same model on the same training set, for instance one trained with `kappa=1` and one with
            `kappa="auto"`.

    Example:
        >>> simple, close = PriorFit(0.1, 50.0, 0.0, num_parameters=50), PriorFit(9.0, 50.0, 0.0, num_parameters=50)
        >>> q_a = FixedPosterior("A: plain ELBo", 2.3, 0.3, backbone=simple, head=simple, num_examples=10)
        >>> q_b = FixedPosterior("B: DE ELBo", 0.1, 0.1, backbone=close, head=close, num_examples=10)
        >>> elbo, de_elbo = plot_elbo_comparison([q_a, q_b]).axes
        >>> [line.get_label() for line in de_elbo.lines]
        ['A: plain ELBo', 'B: DE ELBo']
    """
    if not posteriors:
        raise ValueError("posteriors: there are none; give at least one FixedPosterior.")
    sizes = {(q.num_parameters, q.num_examples) for q in posteriors}
    if len(sizes) > 1:
        raise ValueError(f"posteriors: they must share D and N to be compared, got (D, N) = {sorted(sizes)}.")
    kappa = default_kappa(*sizes.pop())
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_objective(left, posteriors, kappa=1.0)
    _draw_objective(right, posteriors, kappa)
    left.set_title("ELBo, $\\kappa = 1$", fontsize=FONT_SIZE)
    right.set_title(f"DE ELBo, $\\kappa = D/N$ = {kappa:,.1f}", fontsize=FONT_SIZE)
    figure.legend(handles=left.lines, loc="outside upper center", ncols=2, frameon=False, fontsize=FONT_SIZE)
    return laid_out(figure)


def _draw_objective(axes: Axes, posteriors: Sequence[FixedPosterior], kappa: float) -> None:
    best = [q.best_common_variance for q in posteriors]
    variances = np.union1d(np.geomspace(min(best) / 10, max(best) * 100, 200), best)
    lowest, highest = math.inf, -math.inf
    for q, style in zip(posteriors, cycle(STYLES), strict=False):
        values = [q.value(v, v, kappa) / q.num_parameters for v in variances]
        axes.plot(variances, values, **style, markersize=8, markevery=[int(np.argmax(values))], label=q.name)
        lowest, highest = min(lowest, values[-1]), max(highest, *values)
    axes.set_xscale("log")
    axes.set_ylim(lowest, highest + 0.08 * (highest - lowest))
    describe_axes(axes, "common prior variance, $\\lambda = \\tau$", "objective per parameter, $J/D$")


def _float64(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64)


# ---- Studies --------------------------------------------------------------------------------------------------------


# ---- Files ---------------------------------------------------------------------------------------------------------


def save_figure(figure: Figure, path: str | os.PathLike) -> list[Path]:
    """Write `<path>.png`, and `<path>.json` with the numbers of every line, from which the figure can be drawn anew.

    The same figure gives the same bytes, and an older file is replaced only by a complete one.

    Args:
        figure: a figure of this module.
        path: where to write, without suffix; its folder is made if need be.

    Returns:
        The two files.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> figure = plot_reliability([[0.8, 0.2], [0.6, 0.4]], labels=[0, 1], num_bins=5)
        >>> with TemporaryDirectory() as folder:
        ...     [file.name for file in save_figure(figure, f"{folder}/reliability")]
        ['reliability.png', 'reliability.json']
    """
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150, metadata={"Software": None})
    numbers = {"title": figure.get_suptitle(), "axes": [_numbers_of(axes) for axes in figure.axes]}
    contents = {".png": image.getvalue(), ".json": json.dumps(numbers, indent=1, allow_nan=False).encode()}
    files = [Path(f"{os.fspath(path)}{suffix}") for suffix in contents]
    for file, content in zip(files, contents.values(), strict=True):
        write_whole(file, content)
    return files


def _numbers_of(axes: Axes) -> dict[str, Any]:
    lines = [
        {
            "label": line.get_label(),
            "x": as_json(np.asarray(line.get_xdata()).tolist()),
            "y": as_json(np.asarray(line.get_ydata()).tolist()),
        }
        for line in axes.lines
    ]
    labels = {"title": axes.get_title(), "xlabel": axes.get_xlabel(), "ylabel": axes.get_ylabel()}
    return labels | {"xscale": axes.get_xscale(), "yscale": axes.get_yscale(), "lines": lines}


# ---- Looks ---------------------------------------------------------------------------------------------------------


def describe_axes(axes: Axes, x_label: str, y_label: str) -> None:
    """Label both axes, in the size that all figures have."""
    axes.set_xlabel(x_label, fontsize=FONT_SIZE)
    axes.set_ylabel(y_label, fontsize=FONT_SIZE)
    axes.tick_params(labelsize=FONT_SIZE - 1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)


def laid_out(figure: Figure) -> Figure:
    """Keep the layout: the engine's answer changes with how often it ran, and so would the bytes of a saved file."""
    figure.draw_without_rendering()
    figure.draw_without_rendering()  # as the first pass chose the ticks for axes of another size
    figure.set_layout_engine("none")
    return figure
