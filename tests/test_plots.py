import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_model
from matplotlib.axes import Axes
from PIL import Image
from sklearn.metrics import roc_curve
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence

from hf_deelbo import GaussianPosterior, IsotropicPrior, LowRankPrior
from hf_deelbo.plots import (
    FixedPosterior,
    PriorFit,
    plot_elbo_comparison,
    plot_groups,
    plot_out_of_distribution,
    plot_reliability,
    plot_risk_coverage,
    plot_training_curves,
    save_figure,
)


def drawn(axes: Axes) -> dict[str, tuple[list, list]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines}


# ---- Training curves -----------------------------------------------------------------------------------------------


def log_line(step: int, **numbers: float) -> dict:
    usual = {"nll": 2 / step, "kl_backbone": 50.0 * step, "kl_head": 7.0, "lambda": 0.01 * step, "tau": 0.5 / step}
    return {"step": step, "sigma": 0.1 + step, "loss": 99.0} | usual | numbers


def test_training_curves_draw_the_log_lines_and_leave_out_the_others():
    history = [log_line(1), {"step": 1, "eval_loss": 3.0}, log_line(2), log_line(4), {"step": 4, "train_runtime": 1.0}]
    panels = [drawn(axes) for axes in plot_training_curves(history).axes]
    assert panels == [
        {"lambda": ([1, 2, 4], [0.01, 0.02, 0.04])},
        {"tau": ([1, 2, 4], [0.5, 0.25, 0.125])},
        {"sigma": ([1, 2, 4], [1.1, 2.1, 4.1])},
        {"nll": ([1, 2, 4], [2.0, 1.0, 0.5])},
        {"kl_backbone": ([1, 2, 4], [50.0, 100.0, 200.0]), "kl_head": ([1, 2, 4], [7.0, 7.0, 7.0])},
    ]


def test_training_curves_name_each_quantity_by_word_and_symbol():
    panels = plot_training_curves([log_line(1), log_line(2)]).axes
    expected = ["backbone, $\\lambda$", "head, $\\tau$", "posterior, $\\sigma$", "example, NLL", "prior, KL"]
    assert all(axes.get_ylabel().endswith(label) for axes, label in zip(panels, expected, strict=True))
    assert {axes.get_xlabel() for axes in panels} == {"step"}
    assert [axes.get_yscale() for axes in panels] == ["log", "log", "log", "linear", "log"]
    assert [text.get_text() for text in panels[4].get_legend().get_texts()] == ["backbone", "head"]


def test_training_curves_of_a_real_run(make_trainer):
    trainer = make_trainer(logging_steps=1, max_steps=3)
    trainer.train()
    panels = plot_training_curves(trainer.state.log_history).axes
    steps, nlls = drawn(panels[3])["nll"]
    assert steps == [1, 2, 3]
    assert nlls == [line["nll"] for line in trainer.state.log_history[:3]]


@pytest.mark.parametrize("start", [0.0, -1e-12, 1e-12])
def test_a_kl_that_starts_at_zero_does_not_stretch_the_log_scale(start):
    history = [log_line(1, kl_backbone=start), log_line(2), log_line(3)]
    axes = plot_training_curves(history).axes[4]
    bottom, top = axes.get_ylim()
    assert axes.get_yscale() == "log"
    assert 5 < bottom < 7 < 150 < top < 200
    assert drawn(axes)["kl_backbone"][1] == [start, 100.0, 150.0]


def test_without_a_positive_number_the_scale_is_linear():
    axes = plot_training_curves([log_line(1, kl_backbone=0.0, kl_head=0.0)]).axes[4]
    assert axes.get_yscale() == "linear"


@pytest.mark.parametrize(("low", "high"), [(1, 1), (1.02e-4, 1.03e-4), (0.011, 0.06), (2, 150), (1e-8, 10)])
def test_a_log_scale_has_some_ticks_over_any_range(low, high):
    axes = plot_training_curves([log_line(1, tau=low), log_line(2, tau=high)]).axes[1]
    bottom, top = axes.get_ylim()
    assert bottom < low <= high < top
    assert 2 <= sum(bottom <= tick <= top for tick in axes.get_yticks()) <= 7


def test_a_single_log_line_is_visible():
    for axes in plot_training_curves([log_line(5)]).axes:
        assert all(line.get_marker() != "" and line.get_markevery() == [-1] for line in axes.lines)


@pytest.mark.parametrize("history", [[], [{"step": 1, "loss": 0.3}]])
def test_training_curves_need_a_line_with_nll(history):
    with pytest.raises(ValueError, match="nll"):
        plot_training_curves(history)


# ---- Groups --------------------------------------------------------------------------------------------------------


def group_rows(number: int, in_head: int = 1) -> list[dict]:
    """Of which the last `in_head` are of the head."""
    return [
        {
            "name": f"encoder.layer.{index}",
            "in_head": index >= number - in_head,
            "num_parameters": 10,
            "sigma": 1e-4 * 1.05**index,
            "prior_variance": 1e-6 * 1.1**index,
        }
        for index in range(number)
    ]


def test_groups_are_drawn_from_the_first_to_the_head():
    rows = group_rows(4)
    (axes,) = plot_groups(rows).axes
    sigma, width = drawn(axes).values()
    assert sigma == ([row["sigma"] for row in rows], [1, 2, 3, 4])
    assert width == (pytest.approx([row["prior_variance"] ** 0.5 for row in rows]), [1, 2, 3, 4])
    bottom, top = axes.get_ylim()
    assert bottom > 4 > 1 > top  # the first is on top
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert [label.get_text() for label in axes.get_yticklabels()] == [row["name"] for row in rows]
    assert "\\sigma" in axes.lines[0].get_label()
    assert "\\sqrt{\\lambda}" in axes.lines[1].get_label()
    (head,) = axes.patches
    assert (head.get_y(), head.get_height()) == (3.5, 1)


@pytest.mark.parametrize("number", [2, 12, 16, 17, 150])
def test_groups_are_readable_whatever_their_number(number):
    figure = plot_groups(group_rows(number, in_head=2 if number > 2 else 1))
    (axes,) = figure.axes
    labels = [label for label in axes.get_yticklabels() if label.get_text()]
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    assert all(lower.y1 < upper.y0 for lower, upper in pairwise(boxes))
    assert all(box.x0 >= 0 for box in boxes)
    assert len(labels) == number if number <= 16 else len(labels) < 12
    assert axes.get_window_extent().width > 0.4 * figure.bbox.width
    left, right = axes.get_xlim()
    assert 2 <= sum(left <= tick <= right for tick in axes.get_xticks()) <= 8


@pytest.mark.parametrize("name", ["$bad_{$", "model." * 40, "a\\b", "100 %"])
def test_names_of_groups_are_no_formulas_and_leave_room(name):
    rows = group_rows(3)
    rows[1]["name"] = name
    figure = plot_groups(rows)
    assert figure.axes[0].get_window_extent().width > 0.4 * figure.bbox.width
    assert all(label.get_window_extent().x0 >= 0 for label in figure.axes[0].get_yticklabels())
    shown = figure.axes[0].get_yticklabels()[1].get_text()
    assert shown == name if len(name) < 36 else name.endswith(shown.removeprefix("…"))


def test_groups_of_a_real_run(make_trainer):
    trainer = make_trainer("vit", grouping="layer", sigma_update="closed-form", max_steps=3)
    trainer.train()
    posterior = trainer.posterior
    with torch.no_grad():
        posterior.rho += 0.1 * torch.arange(len(posterior.groups))
    posterior.update_prior_variances()
    (axes,) = plot_groups(posterior.group_table()).axes
    (sigmas, places), (widths, _) = drawn(axes).values()
    assert len(set(sigmas)) == len(set(widths)) == len(posterior.groups) > 2
    for group, sigma, width, place in zip(posterior.groups, sigmas, widths, places, strict=True):
        assert axes.get_yticklabels()[place - 1].get_text() == group.name
        start = {name: p for name, p in make_model("vit").named_parameters() if not group.in_head}
        distances = [
            (posterior.parameters()[name].detach() - start.get(name, torch.tensor(0.0))).flatten().double()
            for name in group.parameters
        ]
        # lambda* = sigma^2 + |w_bar - mu_p|^2 / D of the group
        assert width**2 == pytest.approx(sigma**2 + torch.cat(distances).square().mean().item(), rel=1e-4)


def test_groups_need_a_row():
    with pytest.raises(ValueError, match="there are none"):
        plot_groups([])


# ---- Calibration ---------------------------------------------------------------------------------------------------


def two_classes(*confidences: float) -> list[list[float]]:
    return [[c, 1 - c] for c in confidences]


def test_reliability_by_hand():
    probabilities = two_classes(0.55, 0.6, 0.95, 0.65, 1.0)
    figure = plot_reliability(probabilities, labels=[0, 1, 0, 0, 0], num_bins=5)
    diagram, histogram = figure.axes
    confidence, accuracy = drawn(diagram)["predictions"]
    assert confidence == pytest.approx([(0.55 + 0.6) / 2, 0.65, (0.95 + 1) / 2])
    assert accuracy == [0.5, 1.0, 1.0]
    assert drawn(diagram)["perfect calibration"] == ([0, 1], [0, 1])
    upper_edges, shares = drawn(histogram)["predictions"]
    assert upper_edges == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert shares == [0, 0, 0, 0.4, 0.2, 0.4]
    assert histogram.lines[0].get_drawstyle() == "steps-pre"
    # 0.4 * |0.5 - 0.575| + 0.2 * |1 - 0.65| + 0.4 * |1 - 0.975|
    assert figure.get_suptitle() == "ECE 0.110"


def test_reliability_shows_the_gap_to_the_diagonal():
    diagram = plot_reliability(two_classes(0.7, 0.9), labels=[0, 1], num_bins=5).axes[0]
    segments = np.array(diagram.collections[0].get_segments())
    np.testing.assert_allclose(segments, [[[0.7, 0.7], [0.7, 1.0]], [[0.9, 0.9], [0.9, 0.0]]])


@pytest.mark.parametrize(("confidence", "num_bins", "upper_edge"), [(0.7, 10, 0.7), (0.6, 5, 0.6), (1.0, 15, 1.0)])
def test_a_bin_holds_its_upper_edge(confidence, num_bins, upper_edge):
    histogram = plot_reliability(two_classes(confidence), labels=[0], num_bins=num_bins).axes[1]
    edges, shares = drawn(histogram)["predictions"]
    assert edges[shares.index(1)] == upper_edge


def test_reliability_of_many_classes_is_that_of_plain_loops():
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.softmax(3 * torch.randn(300, 4, generator=generator, dtype=torch.float64), dim=1)
    labels = torch.randint(4, (300,), generator=generator)
    rows = zip(probabilities.tolist(), labels.tolist(), strict=True)
    examples = [(max(row), row.index(max(row)) == label) for row, label in rows]
    confidences, accuracies, shares, error = [], [], [0], 0.0
    for b in range(15):
        inside = [(c, right) for c, right in examples if b / 15 < c <= (b + 1) / 15]
        shares.append(len(inside) / 300)
        if inside:
            confidences.append(sum(c for c, _ in inside) / len(inside))
            accuracies.append(sum(right for _, right in inside) / len(inside))
            error += len(inside) / 300 * abs(accuracies[-1] - confidences[-1])
    assert len(confidences) < 15  # with four classes, no confidence is below 1/4

    figure = plot_reliability(probabilities, labels)
    diagram, histogram = figure.axes
    drawn_confidences, drawn_accuracies = drawn(diagram)["predictions"]
    assert drawn_confidences == pytest.approx(confidences, rel=1e-12)
    assert drawn_accuracies == pytest.approx(accuracies, rel=1e-12)
    assert drawn(histogram)["predictions"][1] == pytest.approx(shares, rel=1e-12)
    assert figure.get_suptitle() == f"ECE {error:.3f}"


def test_reliability_compares_named_probabilities():
    named = {"posterior mean": two_classes(0.9, 0.9), "average": torch.tensor(two_classes(0.55, 0.55))}
    figure = plot_reliability(named, labels=np.array([0, 1]), num_bins=10)
    curves = drawn(figure.axes[0])
    assert list(curves) == ["perfect calibration", "posterior mean", "average"]
    assert curves["posterior mean"] == ([0.9], [0.5])
    assert curves["average"] == (pytest.approx([0.55]), [0.5])
    assert figure.get_suptitle() == "ECE 0.400, posterior mean\nECE 0.050, average"
    styles = {(line.get_color(), line.get_linestyle(), line.get_marker()) for line in figure.axes[0].lines}
    assert len(styles) == 3


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        (two_classes(0.9, 0.8), [0], "1 for 2 rows"),
        (torch.zeros(0, 2), [], "0 for 0 rows"),
        ([0.9, 0.8], [0, 1], "shapes"),
        (two_classes(0.9), [[1, 0]], "shapes"),
        ([[2.0, -1.0]], [0], "softmax"),
        ([[0.9, 0.9]], [0], "softmax"),
        (two_classes(0.9), [2], "0 to 1"),
        (two_classes(0.9), [-100], "0 to 1"),
        ({}, [0], "there are none"),
    ],
)
def test_reliability_refuses_bad_input(probabilities, labels, message):
    with pytest.raises(ValueError, match=message):
        plot_reliability(probabilities, labels)


def test_reliability_needs_a_bin():
    with pytest.raises(ValueError, match="num_bins"):
        plot_reliability(two_classes(0.9), [0], num_bins=0)


# ---- Uncertainty ---------------------------------------------------------------------------------------------------


def test_risk_coverage_by_hand():
    figure = plot_risk_coverage({"doubt": ([0.3, 0.1, 0.9, 0.2], [1, 0, 1, 0]), "entropy": ([1, 1], [0, 1])})
    curves = drawn(figure.axes[0])
    assert list(curves) == ["doubt, AURC 0.2083", "entropy, AURC 0.5000"]
    assert curves["doubt, AURC 0.2083"] == ([0.25, 0.5, 0.75, 1.0], pytest.approx([0, 0, 1 / 3, 1 / 2]))
    assert curves["entropy, AURC 0.5000"] == ([0.5, 1.0], [0.5, 0.5])


@pytest.mark.parametrize("levels", [4, 10**6])
def test_roc_curves_are_those_of_scikit_learn(levels):
    generator = np.random.default_rng(0)
    inside = generator.integers(0, levels, 60)
    outside = {"near": generator.integers(0, levels, 40), "far": generator.integers(levels // 2, 2 * levels, 50)}
    shares, curves = map(drawn, plot_out_of_distribution(inside, outside, "doubt", num_bins=5).axes)
    assert [label.split(",")[0] for label in curves] == ["chance", *outside]
    for name, values in outside.items():
        labels, scores = np.repeat([0, 1], [60, len(values)]), np.concatenate([inside, values])
        expected = roc_curve(labels, scores, drop_intermediate=False)[:2]
        [curve] = [curve for label, curve in curves.items() if label.startswith(name)]
        np.testing.assert_allclose(curve, expected, atol=1e-12)
    assert list(shares) == ["inside", "near", "far"]
    for edges, share in shares.values():
        assert share[0] == 0
        assert sum(share) == pytest.approx(1)
        assert (edges[0], edges[-1]) == (
            min(inside.min(), outside["near"].min()),
            outside["far"].max(),
        )


def test_one_other_kind_needs_no_name():
    left, right = plot_out_of_distribution([0.1, 0.2], [0.3, 0.4], "entropy").axes
    assert list(drawn(left)) == ["inside", "outside"]
    assert list(drawn(right)) == ["chance", "outside, AUROC 1.000"]
    assert left.get_xlabel() == "entropy"


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plot_risk_coverage({}), "scores: there are none"),
        (lambda: plot_risk_coverage({"doubt": ([], [])}), "uncertainties: .*one at least"),
        (lambda: plot_out_of_distribution([0.1], {}), "outside: there are none"),
        (lambda: plot_out_of_distribution([0.1], [math.nan]), "outside: .*nan in row 0"),
        (lambda: plot_out_of_distribution([math.inf], [0.1]), "inside, outside: .*infinite"),
        (lambda: plot_out_of_distribution([0.1], [0.1], num_bins=0), "num_bins: must be at least 1, got 0"),
    ],
)
def test_figures_of_uncertainties_refuse_bad_input(draw, message):
    with pytest.raises(ValueError, match=message):
        draw()


# ---- ELBo and DE ELBo ----------------------------------------------------------------------------------------------

SIGMA, NUM_EXAMPLES, NLL = 0.3, 4, 0.7
SEVERAL = ("l2-sp", "tensor")  # the low-rank prior ties the backbone, which then has one sigma


def tiny_posterior(kind: str, grouping: str = "all") -> tuple[GaussianPosterior, MultivariateNormal]:
    """A posterior of 6 + 2 parameters away from its prior, and the backbone's prior at lambda = 1, dense."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    start = {name: p.detach().clone() for name, p in model[0].named_parameters(prefix="0")}
    mean, covariance = torch.cat([p.flatten() for p in start.values()]), torch.eye(6, dtype=torch.float64)
    if kind == "l2-sp":
        prior = IsotropicPrior.l2_sp(start)
    else:
        diagonal = {name: torch.rand(p.shape, generator=generator, dtype=torch.float64) for name, p in start.items()}
        deviations = {
            name: torch.randn(3, *p.shape, generator=generator, dtype=torch.float64) for name, p in start.items()
        }
        prior = LowRankPrior(start, diagonal, deviations, eps=0.1)
        a = torch.cat([d.flatten() for d in diagonal.values()])
        q = torch.cat([d.reshape(3, -1) for d in deviations.values()], dim=1)
        covariance = torch.diag(a / 2 + 0.1) + q.T @ q / 4
    head = ["1.weight"]
    posterior = GaussianPosterior(model, head, prior, grouping=grouping, init_sigma=SIGMA, num_examples=NUM_EXAMPLES)
    with torch.no_grad():
        for p in model[0].parameters():
            p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return posterior, MultivariateNormal(mean, covariance)


def dense_j(
    posterior: GaussianPosterior, prior: MultivariateNormal, lambda_: float, tau: float, kappa: float
) -> float:
    w = torch.cat([p.flatten() for p in posterior.backbone.values()])
    v = torch.cat([p.flatten() for p in posterior.head.values()])
    eye = torch.eye(6, dtype=torch.float64)
    kl_backbone = kl_divergence(
        MultivariateNormal(w, SIGMA**2 * eye), MultivariateNormal(prior.mean, lambda_ * prior.covariance_matrix)
    )
    kl_head = kl_divergence(
        MultivariateNormal(v, SIGMA**2 * eye[:2, :2]), MultivariateNormal(torch.zeros_like(v), tau * eye[:2, :2])
    )
    return -kappa * NUM_EXAMPLES * NLL - float(kl_backbone + kl_head)


@pytest.mark.parametrize("kind", ["l2-sp", "low-rank"])
@pytest.mark.parametrize(("lambda_", "tau", "kappa"), [(1.0, 1.0, 1.0), (0.02, 5.0, 1.0), (30.0, 0.1, 7.5)])
def test_value_is_j_of_dense_gaussians(kind, lambda_, tau, kappa):
    posterior, prior = tiny_posterior(kind)
    value = FixedPosterior.from_posterior("q", posterior, NLL).value(lambda_, tau, kappa)
    assert value == pytest.approx(dense_j(posterior, prior, lambda_, tau, kappa), rel=1e-12)


@pytest.mark.parametrize("kind", ["l2-sp", "low-rank"])
def test_comparison_draws_j_per_parameter_of_dense_gaussians(kind):
    posterior, prior = tiny_posterior(kind)
    figure = plot_elbo_comparison([FixedPosterior.from_posterior("q", posterior, NLL)])
    for axes, kappa in zip(figure.axes, (1, 8 / NUM_EXAMPLES), strict=True):
        variances, values = drawn(axes)["q"]
        expected = [dense_j(posterior, prior, v, v, kappa) / 8 for v in variances]
        assert values == pytest.approx(expected, rel=1e-12)
        assert axes.get_xscale() == "log"
        assert min(variances) * 10 < max(variances) / 10
    assert [axes.get_title() for axes in figure.axes] == ["ELBo, $\\kappa = 1$", "DE ELBo, $\\kappa = D/N$ = 2.0"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"common prior variance, $\\lambda = \\tau$"}
    assert {axes.get_ylabel() for axes in figure.axes} == {"objective per parameter, $J/D$"}


def test_comparison_marks_the_maximum_over_all_common_variances():
    posterior, prior = tiny_posterior("low-rank")
    axes = plot_elbo_comparison([FixedPosterior.from_posterior("q", posterior, NLL)]).axes[1]
    (marked,) = axes.lines[0].get_markevery()
    best, highest = (data[marked] for data in drawn(axes)["q"])
    near = [dense_j(posterior, prior, v, v, 2.0) / 8 for v in (best * 0.9999, best * 1.0001)]
    assert max(near) < highest == max(drawn(axes)["q"][1])


def simple_and_close() -> list[FixedPosterior]:
    """The paper's two: A stays at the prior and does not fit the data, B fits them and leaves the prior."""
    near, far = PriorFit(0.5, 400.0, 0.0, num_parameters=400), PriorFit(20.0, 400.0, 0.0, num_parameters=400)
    nothing = PriorFit(0.0, 0.0, 0.0, num_parameters=0)
    a = FixedPosterior("A", nll=2.3, sigma=0.2, backbone=near, head=nothing, num_examples=20)
    return [a, FixedPosterior("B", nll=0.1, sigma=0.1, backbone=far, head=nothing, num_examples=20)]


def test_elbo_prefers_the_simple_and_de_elbo_the_close_posterior():
    elbo, de_elbo = plot_elbo_comparison(simple_and_close()).axes
    heights = [{name: max(y) for name, (_, y) in drawn(axes).items()} for axes in (elbo, de_elbo)]
    assert heights[0]["A"] > heights[0]["B"]
    assert heights[1]["A"] < heights[1]["B"]
    # By hand, at v* = sigma^2 + distance/D, where KL/D = log(v*/sigma^2)/2
    assert heights[1]["A"] == pytest.approx(-2.3 - math.log((0.04 + 0.5 / 400) / 0.04) / 2)
    assert heights[0]["B"] == pytest.approx(-20 * 0.1 / 400 - math.log((0.01 + 20 / 400) / 0.01) / 2)


def test_comparison_shows_every_maximum_and_cuts_the_cliffs():
    a, b = simple_and_close()
    for axes in plot_elbo_comparison([a, replace(b, sigma=1e-4, backbone=replace(b.backbone, mahalanobis=0.0))]).axes:
        bottom, top = axes.get_ylim()
        assert all(bottom < max(y) < top for _, y in drawn(axes).values())
        assert min(drawn(axes)["A"][1]) < bottom - 1000


@pytest.mark.parametrize(("lambda_", "tau", "kappa"), [(1.0, 1.0, 1.0), (0.02, 5.0, 1.0), (30.0, 0.1, 7.5)])
@pytest.mark.parametrize(("kind", "grouping"), [("l2-sp", "tensor"), ("low-rank", "tensor"), ("l2-sp", "part")])
def test_value_of_several_sigmas_is_j_of_dense_gaussians(kind, grouping, lambda_, tau, kappa):
    """Summed over the groups, each with its own sigma, and lambda in proportion to the learned ones; in float64."""
    posterior, prior = tiny_posterior(kind, grouping)
    with torch.no_grad():
        posterior.rho += torch.arange(len(posterior.groups))
    posterior.update_prior_variances()
    assert len(set(posterior.sigmas.tolist())) == len(posterior.groups) == (3 if (kind, grouping) == SEVERAL else 2)
    means, sigmas, lambdas = [], [], []
    parameters = posterior.parameters()
    for group, sigma, learned in zip(posterior.groups, posterior.sigmas, posterior.prior_variances, strict=True):
        for name in group.parameters:
            means.append(parameters[name].flatten())
            sigmas.append(sigma.expand(parameters[name].numel()))
            lambdas.append(learned.expand(parameters[name].numel()))
    means, variances, lambdas = torch.cat(means), torch.cat(sigmas) ** 2, torch.cat(lambdas)
    w, v = slice(0, 6), slice(6, 8)
    shares = torch.diag(lambdas[w] / lambdas[w].mean())  # all one for the low-rank prior, which is not diagonal
    kl = kl_divergence(
        MultivariateNormal(means[w], torch.diag(variances[w])),
        MultivariateNormal(prior.mean, lambda_ * shares @ prior.covariance_matrix),
    ) + kl_divergence(
        MultivariateNormal(means[v], torch.diag(variances[v])),
        MultivariateNormal(torch.zeros(2).double(), tau * torch.eye(2).double()),
    )
    fixed = FixedPosterior.from_posterior("q", posterior, NLL)
    assert fixed.value(lambda_, tau, kappa) == pytest.approx(-kappa * NUM_EXAMPLES * NLL - float(kl), rel=1e-12)
    best = fixed.best_common_variance
    assert fixed.value(best, best, 2.0) > max(fixed.value(v, v, 2.0) for v in (best * 0.999, best * 1.001))


def test_fixed_posterior_is_that_of_the_trainer_and_stays(make_trainer):
    trainer = make_trainer()
    trainer.train()
    j, posterior = trainer.de_elbo(num_samples=2), trainer.posterior
    fixed = FixedPosterior.from_posterior("q", posterior, j.nll)
    assert fixed.num_parameters == posterior.num_parameters
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.zero_()
    value = fixed.value(float(posterior.lambda_), float(posterior.tau), posterior.kappa)
    assert value == pytest.approx(j.value, rel=1e-9)


def test_a_fixed_posterior_is_not_taken_from_a_sample_or_without_n():
    posterior, _ = tiny_posterior("l2-sp")
    with posterior.sampled(0), pytest.raises(ValueError, match="weight sample"):
        FixedPosterior.from_posterior("q", posterior, NLL)
    posterior.num_examples = None
    with pytest.raises(ValueError, match="num_examples"):
        FixedPosterior.from_posterior("q", posterior, NLL)


def test_comparison_refuses_none_and_those_that_do_not_compare():
    a, b = simple_and_close()
    with pytest.raises(ValueError, match="there are none"):
        plot_elbo_comparison([])
    with pytest.raises(ValueError, match="share D and N"):
        plot_elbo_comparison([a, replace(b, num_examples=21)])
    with pytest.raises(ValueError, match="share D and N"):
        plot_elbo_comparison([a, replace(b, head=b.backbone)])


# ---- Files ---------------------------------------------------------------------------------------------------------


def test_json_holds_the_numbers_of_every_line(tmp_path):
    figure = plot_training_curves([log_line(1), log_line(2, nll=math.nan)])
    png, numbers = save_figure(figure, tmp_path / "new" / "folder" / "lr0.1")
    assert (png, numbers) == (tmp_path / "new/folder/lr0.1.png", tmp_path / "new/folder/lr0.1.json")
    content = json.loads(numbers.read_text())
    assert content["title"] == ""
    assert content["axes"][3]["lines"] == [{"label": "nll", "x": [1, 2], "y": [2.0, None]}]
    assert content["axes"][4] == {
        "title": "",
        "xlabel": "step",
        "ylabel": "divergence from\nthe prior, KL",
        "xscale": "linear",
        "yscale": "log",
        "lines": [
            {"label": "kl_backbone", "x": [1, 2], "y": [50.0, 100.0]},
            {"label": "kl_head", "x": [1, 2], "y": [7.0, 7.0]},
        ],
    }


def test_json_of_a_comparison_has_titles_and_full_precision(tmp_path):
    figure = plot_elbo_comparison(simple_and_close())
    content = json.loads(save_figure(figure, tmp_path / "j")[1].read_text())
    for axes, kept in zip(figure.axes, content["axes"], strict=True):
        assert kept["title"] == axes.get_title()
        assert {line["label"]: (line["x"], line["y"]) for line in kept["lines"]} == drawn(axes)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plot_training_curves([log_line(1), log_line(20), log_line(60)]),
        lambda: plot_reliability(two_classes(0.7, 0.9), [0, 1]),
        lambda: plot_elbo_comparison(simple_and_close()),
        lambda: plot_groups(group_rows(5)),
        lambda: plot_risk_coverage({"doubt": ([0.1, 0.3, 0.2], [0, 1, 0])}),
        lambda: plot_out_of_distribution([0.1, 0.3, 0.2], {"noise": [0.3, 0.7]}),
    ],
    ids=["training", "reliability", "elbo", "groups", "risk", "outside"],
)
def test_the_same_figure_gives_the_same_bytes(draw, tmp_path):
    figure = draw()
    first = [file.read_bytes() for file in save_figure(figure, tmp_path / "one")]
    again = [file.read_bytes() for file in save_figure(figure, tmp_path / "one")]
    anew = [file.read_bytes() for file in save_figure(draw(), tmp_path / "two")]
    assert first == again == anew
    with Image.open(tmp_path / "one.png") as image:
        assert image.info.keys() == {"dpi"}
        assert image.info["dpi"] == pytest.approx((150, 150), abs=0.1)
        assert len(image.convert("RGB").getcolors(maxcolors=10**6)) > 10


def half_written(file: Path, content: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(content[: len(content) // 2])
    raise OSError("disk full")


def not_replaced(source: Path, target: Path) -> None:
    raise OSError("disk full")


@pytest.mark.parametrize(
    ("owner", "name", "failing"), [(Path, "write_bytes", half_written), (os, "replace", not_replaced)]
)
def test_a_failed_write_leaves_the_older_files_and_nothing_else(owner, name, failing, tmp_path, monkeypatch):
    figure = plot_reliability(two_classes(0.7, 0.9), [0, 1])
    older = {file: file.read_bytes() for file in save_figure(figure, tmp_path / "figure")}
    monkeypatch.setattr(owner, name, failing)
    with pytest.raises(OSError, match="disk full"):
        save_figure(plot_reliability(two_classes(0.6), [1]), tmp_path / "figure")
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == older


def test_the_package_does_not_import_matplotlib_and_plots_do_not_import_pyplot():
    code = """
import sys
import hf_deelbo
assert "matplotlib" not in sys.modules
from hf_deelbo.plots import plot_reliability
plot_reliability([[0.9, 0.1]], [0]).draw_without_rendering()
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
