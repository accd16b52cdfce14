import itertools
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import evaluate
import numpy as np
import pytest
import torch
from conftest import make_dataset
from scipy.stats import mannwhitneyu
from sklearn.metrics import balanced_accuracy_score, log_loss, roc_auc_score
from transformers import EvalPrediction

from hf_deelbo.evaluate_metrics import (
    BrierScore,
    ClassAveragedAccuracy,
    ExpectedCalibrationError,
    NegativeLogLikelihood,
)
from hf_deelbo.metrics import (
    area_under_risk_coverage,
    brier_score,
    class_averaged_accuracy,
    classification_metrics,
    compute_metrics,
    expected_calibration_error,
    negative_log_likelihood,
    out_of_distribution_auroc,
    probabilities_of,
    risk_coverage_curve,
)

METRICS = {
    "accuracy": ClassAveragedAccuracy,
    "nll": NegativeLogLikelihood,
    "ece": ExpectedCalibrationError,
    "brier": BrierScore,
}
FORMULAS = {
    "accuracy": class_averaged_accuracy,
    "nll": negative_log_likelihood,
    "ece": expected_calibration_error,
    "brier": brier_score,
}

# answers: 0 (right), 1 (wrong), 1 (right), 2 (right), 0 (wrong)
SMALL_ROWS = [[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.2, 0.62, 0.18], [0.0, 0.0, 1.0], [0.4, 0.3, 0.3]]
SMALL_LABELS = [0, 0, 1, 2, 1]
SMALL = {
    # of class 0: 1 of 2, of class 1: 1 of 2, of class 2: 1 of 1
    "accuracy": (1 / 2 + 1 / 2 + 1) / 3,
    "nll": -(math.log(0.7) + math.log(0.1) + math.log(0.62) + math.log(1.0) + math.log(0.3)) / 5,
    # 15 bins: 0.7 in (10/15, 11/15]; 0.6 in (8/15, 9/15]; 0.62 in (9/15, 10/15]; 1.0 in the last; 0.4 in (5/15, 6/15]
    "ece": (abs(1 - 0.7) + abs(0 - 0.6) + abs(1 - 0.62) + abs(1 - 1.0) + abs(0 - 0.4)) / 5,
    "brier": (
        (0.3**2 + 0.2**2 + 0.1**2)
        + (0.9**2 + 0.6**2 + 0.3**2)
        + (0.2**2 + 0.38**2 + 0.18**2)
        + 0
        + (0.4**2 + 0.7**2 + 0.3**2)
    )
    / 5,
}


def exactly(expected: float) -> object:
    return pytest.approx(expected, rel=1e-12, abs=1e-12)


def random_problem(seed: int, size: int = 200, num_classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities that know something of the labels, whose classes are unbalanced."""
    generator = np.random.default_rng(seed)
    weights = 2.0 ** -np.arange(num_classes)
    labels = generator.choice(num_classes, size, p=weights / weights.sum())
    logits = generator.normal(size=(size, num_classes)) + 1.5 * np.eye(num_classes)[labels]
    return probabilities_of(logits), labels


def with_confidence(confidence: float, num_classes: int = 2) -> list[float]:
    """A row whose largest number is the first."""
    return [confidence] + [(1 - confidence) / (num_classes - 1)] * (num_classes - 1)


@pytest.fixture
def make_metric(tmp_path) -> Callable[..., evaluate.Metric]:
    return lambda name, **kwargs: METRICS[name](cache_dir=str(tmp_path / "cache"), **kwargs)


class TestNumbers:
    @pytest.mark.parametrize("name", METRICS)
    def test_a_small_problem_is_as_by_hand(self, make_metric, name):
        assert make_metric(name).compute(predictions=SMALL_ROWS, references=SMALL_LABELS) == {
            name: exactly(SMALL[name])
        }
        assert FORMULAS[name](SMALL_ROWS, SMALL_LABELS) == exactly(SMALL[name])

    @pytest.mark.parametrize("seed", range(2))
    def test_accuracy_is_scikit_learns_balanced_accuracy(self, make_metric, seed):
        rows, labels = random_problem(seed)
        expected = balanced_accuracy_score(labels, rows.argmax(axis=1))
        assert expected != pytest.approx((rows.argmax(axis=1) == labels).mean(), abs=1e-3)
        assert make_metric("accuracy").compute(predictions=rows, references=labels)["accuracy"] == exactly(expected)

    @pytest.mark.parametrize("seed", range(2))
    def test_nll_is_scikit_learns_log_loss(self, make_metric, seed):
        rows, labels = random_problem(seed)
        expected = log_loss(labels, rows, labels=range(5))
        assert make_metric("nll").compute(predictions=rows, references=labels)["nll"] == exactly(expected)

    @pytest.mark.parametrize(("seed", "num_bins"), [(0, 15), (1, 7), (2, 1)])
    def test_ece_is_that_of_a_loop_over_bins(self, make_metric, seed, num_bins):
        rows, labels = random_problem(seed)
        confidence, right = rows.max(axis=1), rows.argmax(axis=1) == labels
        expected = 0.0
        for index in range(num_bins):
            inside = (confidence > index / num_bins) & (confidence <= (index + 1) / num_bins)
            if inside.any():
                expected += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
        metric = make_metric("ece", num_bins=num_bins)
        assert metric.compute(predictions=rows, references=labels)["ece"] == exactly(expected)

    def test_ece_has_15_bins_unless_told(self, make_metric):
        rows, labels = random_problem(0)
        by_bins = {num_bins: expected_calibration_error(rows, labels, num_bins) for num_bins in (10, 14, 15, 16)}
        assert len(set(by_bins.values())) == 4
        assert expected_calibration_error(rows, labels) == by_bins[15]
        assert make_metric("ece").compute(predictions=rows, references=labels) == {"ece": by_bins[15]}

    @pytest.mark.parametrize("seed", range(2))
    def test_brier_score_is_that_of_a_loop_over_examples(self, make_metric, seed):
        rows, labels = random_problem(seed)
        errors = [(p - (c == y)) ** 2 for row, y in zip(rows, labels, strict=True) for c, p in enumerate(row)]
        expected = math.fsum(errors) / len(labels)
        assert make_metric("brier").compute(predictions=rows, references=labels)["brier"] == exactly(expected)

    @pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true:UserWarning")
    @pytest.mark.parametrize("absent", [0, 2, 4])
    def test_a_class_absent_from_the_references(self, make_metric, absent):
        rows, labels = random_problem(0)
        rows, labels = rows[labels != absent], labels[labels != absent]
        assert absent in rows.argmax(axis=1)
        metrics = {name: make_metric(name).compute(predictions=rows, references=labels)[name] for name in METRICS}
        assert metrics["accuracy"] == exactly(balanced_accuracy_score(labels, rows.argmax(axis=1)))
        assert metrics["nll"] == exactly(log_loss(labels, rows, labels=range(5)))
        assert metrics == classification_metrics(rows, labels)

    def test_perfect_and_worst(self):
        assert classification_metrics(np.eye(3), [0, 1, 2]) == {"accuracy": 1, "nll": 0, "ece": 0, "brier": 0}
        worst = classification_metrics(np.eye(3), [1, 2, 0])
        assert worst == {"accuracy": 0, "nll": math.inf, "ece": 1, "brier": 2}

    @pytest.mark.filterwarnings("error")
    def test_a_label_of_probability_0_has_infinite_nll(self, make_metric):
        metric = make_metric("nll")
        assert metric.compute(predictions=[[1.0, 0.0], [0.5, 0.5]], references=[1, 0]) == {"nll": math.inf}

    def test_of_equal_probabilities_the_first_is_the_answer(self):
        assert class_averaged_accuracy([[0.5, 0.5]], [0]) == 1
        assert class_averaged_accuracy([[0.5, 0.5]], [1]) == 0

    def test_the_input_is_left_alone(self):
        rows, labels = random_problem(0)
        kept = rows.copy(), labels.copy()
        classification_metrics(rows, labels)
        assert np.array_equal(rows, kept[0])
        assert np.array_equal(labels, kept[1])


class TestBinEdges:
    """The gaps of a wrong and a right example cancel in one bin and add up in two."""

    @staticmethod
    def share_a_bin(one: float, other: float, num_bins: int = 15) -> bool:
        rows = [with_confidence(one, 30), with_confidence(other, 30)]
        ece = expected_calibration_error(rows, [1, 0], num_bins)
        together, apart = abs(1 - one - other) / 2, (one + 1 - other) / 2
        assert ece == exactly(together) or ece == exactly(apart)
        assert together != exactly(apart)
        return ece == exactly(together)

    def test_an_edge_belongs_to_the_bin_below(self):
        for edge in range(2, 15):
            assert self.share_a_bin(edge / 15, edge / 15 - 0.01), edge
            assert not self.share_a_bin(edge / 15, edge / 15 + 0.01), edge
            assert not self.share_a_bin(edge / 15, np.nextafter(edge / 15, 1)), edge

    @pytest.mark.parametrize("num_bins", [10, 107])
    def test_an_edge_belongs_to_the_bin_below_however_it_is_rounded(self, num_bins):
        least = math.ceil(num_bins / 10)  # the largest of 30 probabilities is not much smaller
        for edge in range(least, num_bins):
            assert self.share_a_bin(edge / num_bins, (edge - 0.5) / num_bins, num_bins)
            assert not self.share_a_bin(edge / num_bins, (edge + 0.5) / num_bins, num_bins)

    def test_confidence_1_is_in_the_last_bin(self):
        assert self.share_a_bin(1.0, 14.5 / 15)
        assert not self.share_a_bin(1.0, 14 / 15)

    def test_confidence_that_rounding_puts_above_1_is_in_the_last_bin(self):
        rows = [[1.0000005, 0.0], [0.95, 0.05]]
        assert expected_calibration_error(rows, [1, 0]) == exactly(abs(1 - 1.0000005 - 0.95) / 2)

    @pytest.mark.parametrize("num_classes", [2, 3, 15, 1000])
    def test_the_least_confidence(self, num_classes):
        rows = np.full((4, num_classes), 1 / num_classes)
        assert expected_calibration_error(rows, [0, 1, 1, 1]) == exactly(abs(1 / 4 - 1 / num_classes))

    def test_one_third_is_an_edge_of_15_bins(self):
        rows = [[1 / 3, 1 / 3, 1 / 3], [0.34, 0.33, 0.33]]
        assert expected_calibration_error(rows, [0, 1]) == exactly((2 / 3 + 0.34) / 2)


class TestEvaluate:
    @pytest.mark.parametrize("name", METRICS)
    def test_batches_and_single_examples_are_as_all_at_once(self, make_metric, name):
        rows, labels = random_problem(1)
        expected = make_metric(name).compute(predictions=rows, references=labels)
        metric = make_metric(name)
        metric.add_batch(predictions=rows[:7], references=labels[:7])
        for row, label in zip(rows[7:10], labels[7:10], strict=True):
            metric.add(prediction=row, reference=label)
        metric.add_batch(predictions=torch.tensor(rows[10:150]), references=torch.tensor(labels[10:150]))
        assert metric.compute(predictions=rows[150:].tolist(), references=labels[150:].tolist()) == expected
        assert metric.compute(predictions=rows, references=labels) == expected, "the first examples are gone"

    def test_combine(self, make_metric):
        rows, labels = random_problem(2)
        expected = {name: exactly(value) for name, value in classification_metrics(rows, labels).items()}
        combined = evaluate.combine([make_metric(name) for name in METRICS])
        assert combined.compute(predictions=rows, references=labels) == expected
        for start in range(0, 200, 50):
            combined.add_batch(predictions=rows[start : start + 50], references=labels[start : start + 50])
        assert combined.compute() == expected

    @pytest.mark.parametrize("name", METRICS)
    def test_neither_network_nor_files(self, make_metric, monkeypatch, tmp_path, name):
        def refuse(*args):
            raise AssertionError("a metric opened a connection")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.chdir(tmp_path)
        metric = make_metric(name)
        metric.add_batch(predictions=SMALL_ROWS, references=SMALL_LABELS)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        metric.compute()
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]

    def test_arguments_of_evaluate_are_passed_on(self, make_metric):
        metric = make_metric("ece", num_bins=3, experiment_id="mine", num_process=2, process_id=1, timeout=7)
        assert (metric.num_bins, metric.experiment_id) == (3, "mine")
        assert (metric.num_process, metric.process_id, metric.timeout, metric.keep_in_memory) == (2, 1, 7, False)
        assert not make_metric("ece", keep_in_memory=False).keep_in_memory
        assert make_metric("ece").keep_in_memory

    def test_two_processes_compute_one_metric(self, make_metric, tmp_path):
        rows, labels = random_problem(3)
        np.savez(tmp_path / "second_half.npz", predictions=rows[100:], references=labels[100:])
        shared = {"experiment_id": "both", "num_process": 2, "timeout": 120}
        script = f"""if True:
            import numpy as np
            from hf_deelbo.evaluate_metrics import ExpectedCalibrationError
            metric = ExpectedCalibrationError(cache_dir={str(tmp_path / "cache")!r}, process_id=1, **{shared})
            assert metric.compute(**np.load({str(tmp_path / "second_half.npz")!r})) is None
        """
        second = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            metric = make_metric("ece", process_id=0, **shared)
            both = metric.compute(predictions=rows[:100], references=labels[:100])
            assert second.wait(timeout=120) == 0
        finally:
            second.kill()
        assert both == {"ece": exactly(expected_calibration_error(rows, labels))}


BAD = {
    "logits": ([[2.0, 1.0], [0.5, 0.5]], [0, 1], r"{rows}: .* row 0 sums to 3\.0; pass probabilities, not logits"),
    "rows that sum to less": ([[0.5, 0.5], [0.5, 0.498]], [0, 1], r"{rows}: .* row 1 sums to 0\.998"),
    "negative": ([[0.5, 0.5], [1.25, -0.25]], [0, 1], r"{rows}: .*negative, got -0\.25 in row 1; pass prob.* logits"),
    "nan": ([[0.5, 0.5], [math.nan, 0.5]], [0, 1], r"{rows}: must be finite, got nan in row 1; check the model"),
    "inf": ([[math.inf, 0.5], [0.5, 0.5]], [0, 1], r"{rows}: must be finite, got inf in row 0; check the model"),
    "too large a label": (
        [[0.5, 0.5], [0.5, 0.5]],
        [0, 2],
        r"{labels}: must be in \[0, 2\), .* got 2 in row 1;",
    ),
    "negative label": ([[0.5, 0.5], [0.5, 0.5]], [-100, 1], r"{labels}: must be in \[0, 2\), .* got -100 in row 0;"),
    "rows of two lengths": ([[0.5, 0.5], [0.5, 0.25, 0.25]], [0, 1], r"{rows}: must be rows of C numbers"),
    "no examples": ([], [], r"{rows}: there are none, .*; pass at least one"),
}


class TestBadInput:
    @pytest.mark.parametrize("kind", BAD)
    def test_metrics_and_formulas_refuse(self, make_metric, kind):
        rows, labels, message = BAD[kind]
        metric = make_metric("nll")
        with pytest.raises(ValueError, match=message.format(rows="predictions", labels="references")):
            metric.compute(predictions=rows, references=labels)
        right = metric.compute(predictions=SMALL_ROWS, references=SMALL_LABELS)
        assert right == {"nll": exactly(SMALL["nll"])}, "the refused examples are gone"
        for formula in (*FORMULAS.values(), classification_metrics):
            with pytest.raises(ValueError, match=message.format(rows="probabilities", labels="labels")):
                formula(rows, labels)

    @pytest.mark.parametrize("name", METRICS)
    def test_no_metric_takes_logits_nothing_or_more_labels_than_rows(self, make_metric, name):
        with pytest.raises(ValueError, match="predictions: .*pass probabilities, not logits"):
            make_metric(name).compute(predictions=[[2.0, 1.0]], references=[0])
        with pytest.raises(ValueError, match="predictions: there are none; pass them here, or to `add`"):
            make_metric(name).compute()
        with pytest.raises(ValueError, match=r"number of predictions \(1\) and references \(2\)"):
            make_metric(name).compute(predictions=[[0.5, 0.5]], references=[0, 1])

    @pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
    def test_shapes_and_types(self, formula):
        with pytest.raises(ValueError, match=r"labels: must have the shape \(1,\), one for each row, got \(2,\)"):
            formula([[0.5, 0.5]], [0, 1])
        with pytest.raises(ValueError, match=r"probabilities: must have the shape \(examples, classes\), got \(2,\)"):
            formula([0.5, 0.5], [0, 1])
        with pytest.raises(ValueError, match="labels: must be whole numbers, got float64; convert"):
            formula([[0.5, 0.5]], [0.7])

    def test_rows_may_miss_1_by_rounding(self):
        half = random_problem(0)[0].astype(np.float16)
        assert np.abs(half.sum(axis=1, dtype=np.float64) - 1).max() > 1e-4
        assert math.isfinite(negative_log_likelihood(half, random_problem(0)[1]))
        assert negative_log_likelihood([[0.5, 0.4991]], [0]) == exactly(math.log(2))
        with pytest.raises(ValueError, match="sums to"):
            negative_log_likelihood([[0.5, 0.4989]], [0])

    @pytest.mark.parametrize("num_bins", [0, -1, 1.5, "15"])
    def test_num_bins(self, num_bins):
        for call in (
            lambda: ExpectedCalibrationError(num_bins),
            lambda: expected_calibration_error([[1.0]], [0], num_bins),
        ):
            with pytest.raises(ValueError, match=f"num_bins: must be a whole number of at least 1, got {num_bins!r}"):
                call()


class TestLogits:
    def test_probabilities_are_softmax_in_float64(self):
        logits = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)) * 20
        ours = probabilities_of(logits.numpy())
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, torch.softmax(logits.double(), dim=-1).numpy(), rtol=1e-12, atol=0)

    @pytest.mark.filterwarnings("error")
    def test_large_logits_neither_overflow_nor_vanish(self):
        expected = [1 / (1 + math.exp(-1)), 1 - 1 / (1 + math.exp(-1))]
        for shift in (1e4, -1e4):
            np.testing.assert_allclose(probabilities_of([[shift + 1, shift]]), [expected], rtol=1e-12)

    @pytest.mark.parametrize("row", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
    def test_logits_without_a_softmax(self, row):
        with pytest.raises(ValueError, match=rf"logits: the largest .* finite, got {max(row)}; check the model"):
            probabilities_of([[0.0, 0.0], row])

    @pytest.mark.parametrize("shape", [(0,), (0, 3)])
    def test_no_logits(self, shape):
        with pytest.raises(ValueError, match=r"logits: there are none, .*; pass at least one example"):
            compute_metrics(EvalPrediction(predictions=np.zeros(shape), label_ids=np.zeros(0, dtype=int)))

    def test_compute_metrics_takes_logits_or_a_tuple_that_starts_with_them(self):
        rows, labels = random_problem(4)
        logits = np.log(rows) + 3
        expected = {name: exactly(formula(rows, labels)) for name, formula in FORMULAS.items()}
        assert compute_metrics(EvalPrediction(logits, labels)) == expected
        assert compute_metrics(EvalPrediction((logits, np.zeros((200, 7))), labels)) == expected

    def test_a_trainer_reports_all_four(self, make_trainer):
        data = make_dataset("vit", 12, seed=2)
        trainer = make_trainer("vit", trainer={"compute_metrics": compute_metrics, "eval_dataset": data})
        metrics = trainer.evaluate()
        logits, labels, _ = trainer.predict(data)
        assert metrics["eval_nll"] == pytest.approx(metrics["eval_loss"], rel=1e-5)
        for name, value in compute_metrics(EvalPrediction(logits, labels)).items():
            assert type(value) is float
            assert metrics[f"eval_{name}"] == value


class TestSelectivePrediction:
    def test_a_small_problem_is_as_by_hand(self):
        coverage, risk = risk_coverage_curve([0.3, 0.1, 0.9, 0.2], [1, 0, 1, 0])  # sorted: 0, 0, 1, 1
        np.testing.assert_allclose(coverage, [0.25, 0.5, 0.75, 1.0])
        np.testing.assert_allclose(risk, [0, 0, 1 / 3, 1 / 2])
        assert area_under_risk_coverage([0.3, 0.1, 0.9, 0.2], [1, 0, 1, 0]) == exactly((1 / 3 + 1 / 2) / 4)

    @pytest.mark.parametrize("seed", range(3))
    def test_ties_have_the_risk_that_is_expected_of_a_random_order(self, seed):
        generator = np.random.default_rng(seed)
        uncertainties, losses = generator.integers(0, 3, 6), generator.random(6)
        orders = [o for o in itertools.permutations(range(6)) if np.all(np.diff(uncertainties[list(o)]) >= 0)]
        assert len(orders) > 1
        risks = [[losses[list(order[:k])].mean() for k in range(1, 7)] for order in orders]
        np.testing.assert_allclose(risk_coverage_curve(uncertainties, losses)[1], np.mean(risks, axis=0), rtol=1e-12)
        assert area_under_risk_coverage(uncertainties, losses) == exactly(np.mean(risks))

    @pytest.mark.parametrize("seed", range(2))
    def test_the_order_of_the_examples_is_no_matter(self, seed):
        generator = np.random.default_rng(seed)
        uncertainties, losses = generator.integers(0, 20, 200), generator.integers(0, 2, 200)
        order = generator.permutation(200)
        expected = area_under_risk_coverage(uncertainties, losses)
        assert area_under_risk_coverage(uncertainties[order], losses[order]) == exactly(expected)
        assert area_under_risk_coverage(np.exp(uncertainties), losses) == exactly(expected)

    def test_what_knows_nothing_has_the_mean_loss_and_what_knows_all_less(self):
        losses = np.repeat([0.0, 1.0], [80, 20])
        assert area_under_risk_coverage(np.zeros(100), losses) == exactly(0.2)
        best = sum(max(0, k - 80) / k for k in range(1, 101)) / 100
        assert area_under_risk_coverage(losses, losses) == exactly(best)
        assert area_under_risk_coverage(-losses, losses) > 0.2

    @pytest.mark.parametrize(
        ("uncertainties", "losses", "message"),
        [
            ([], [], r"uncertainties: .*one at least, got the shape \(0,\)"),
            ([[0.1], [0.2]], [0, 1], r"uncertainties: .*one number for each example.* \(2, 1\)"),
            ([0.1, math.nan], [0, 1], "uncertainties: .*nan in row 1"),
            ([0.1, 0.2], [math.nan, 1], "losses: .*nan in row 0"),
            ([0.1, 0.2], [0, 1, 1], "losses: must be one for each of the 2 uncertainties, got 3"),
            (["sure", "unsure"], [0, 1], "uncertainties: must be one number for each example"),
            ([[0.1], [0.2, 0.3]], [0, 1], "uncertainties: must be one number for each example"),
        ],
    )
    def test_bad_input(self, uncertainties, losses, message):
        with pytest.raises(ValueError, match=message):
            area_under_risk_coverage(uncertainties, losses)


class TestOutOfDistribution:
    @pytest.mark.parametrize("levels", [2, 10, 10**9])
    @pytest.mark.parametrize("seed", range(2))
    def test_auroc_is_that_of_scikit_learn_and_of_scipys_rank_test(self, levels, seed):
        generator = np.random.default_rng(seed)
        inside, outside = generator.integers(0, levels, 150), generator.integers(0, 2 * levels, 70)
        found = out_of_distribution_auroc(inside, outside)
        labels = np.repeat([0, 1], [150, 70])
        assert found == exactly(roc_auc_score(labels, np.concatenate([inside, outside])))
        assert found == exactly(mannwhitneyu(outside, inside).statistic / (150 * 70))
        assert out_of_distribution_auroc(outside, inside) == exactly(1 - found)

    def test_by_hand(self):
        # of the six pairs the outside is above in four, and as high in one
        assert out_of_distribution_auroc([1, 2, 3], [3, 2.5]) == exactly((2 + 1 / 2 + 2) / 6)
        assert out_of_distribution_auroc([1, 2], [math.inf]) == 1.0
        assert out_of_distribution_auroc([0.5] * 3, [0.5] * 4) == 0.5

    @pytest.mark.parametrize(
        ("inside", "outside", "message"),
        [
            ([], [0.1], "inside: .*one at least"),
            ([0.1], [], "outside: .*one at least"),
            ([0.1], [math.nan], "outside: .*nan in row 0"),
            ([[0.1]], [0.1], r"inside: .*the shape \(1, 1\)"),
        ],
    )
    def test_bad_input(self, inside, outside, message):
        with pytest.raises(ValueError, match=message):
            out_of_distribution_auroc(inside, outside)
