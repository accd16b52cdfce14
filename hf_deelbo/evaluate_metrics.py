"""The `metrics` as `evaluate.Metric`s, which need no Hub: added to batch by batch, combined, on several processes."""

from typing import Any

import datasets
import evaluate
import numpy as np

from .metrics import (
    brier_score,
    check_num_bins,
    checked,
    class_averaged_accuracy,
    expected_calibration_error,
    negative_log_likelihood,
)


class _ProbabilityMetric(evaluate.Metric):
    """A metric of class probabilities."""

    def __init__(self, **kwargs: Any):
        # files only serve to bring several processes together
        kwargs.setdefault("keep_in_memory", kwargs.get("num_process", 1) == 1)
        super().__init__(**kwargs)

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=self.__doc__,
            citation="",
            inputs_description="predictions: rows of class probabilities. references: labels, whole numbers.",
            features=datasets.Features(
                {"predictions": datasets.List(datasets.Value("float64")), "references": datasets.Value("int64")}
            ),
        )

    def compute(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> dict[str, float] | None:
        """The metric of all examples added so far and of these; `None` on all processes but the first."""
        if predictions is None and references is None and len(self) == 0:
            raise ValueError("predictions: there are none; pass them here, or to `add` or `add_batch` before.")
        return super().compute(predictions=predictions, references=references, **kwargs)

    def _compute(self, predictions: list[list[float]], references: list[int]) -> dict[str, float]:
        return self._score(*checked(predictions, references, names=("predictions", "references")))

    def _score(self, probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        raise NotImplementedError


class ClassAveragedAccuracy(_ProbabilityMetric):
    """`class_averaged_accuracy` as an `evaluate.Metric`.

    Args:
        **kwargs: of `evaluate.Metric`, such as `experiment_id`, `num_process` and `process_id`.

    Example:
        >>> ClassAveragedAccuracy().compute(predictions=[[0.9, 0.1], [0.6, 0.4]], references=[0, 1])
        {'accuracy': 0.5}
    """

    def _score(self, probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        return {"accuracy": class_averaged_accuracy(probabilities, labels)}


class NegativeLogLikelihood(_ProbabilityMetric):
    """`negative_log_likelihood` as an `evaluate.Metric`.

    Args:
        **kwargs: of `evaluate.Metric`, such as `experiment_id`, `num_process` and `process_id`.

    Example:
        >>> NegativeLogLikelihood().compute(predictions=[[0.5, 0.5]], references=[0])
        {'nll': 0.6931471805599453}
    """

    def _score(self, probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        return {"nll": negative_log_likelihood(probabilities, labels)}


class ExpectedCalibrationError(_ProbabilityMetric):
    """`expected_calibration_error` as an `evaluate.Metric`.

    Args:
        num_bins: bins of equal width that the confidence is sorted into.
        **kwargs: of `evaluate.Metric`, such as `experiment_id`, `num_process` and `process_id`.

    Example:
        >>> ExpectedCalibrationError(num_bins=10).compute(predictions=[[0.75, 0.25]], references=[0])
        {'ece': 0.25}
    """

    def __init__(self, num_bins: int = 15, **kwargs: Any):
        check_num_bins(num_bins)
        self.num_bins = num_bins
        super().__init__(**kwargs)

    def _score(self, probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        return {"ece": expected_calibration_error(probabilities, labels, self.num_bins)}


class BrierScore(_ProbabilityMetric):
    """`brier_score` as an `evaluate.Metric`.

    Args:
        **kwargs: of `evaluate.Metric`, such as `experiment_id`, `num_process` and `process_id`.

    Example:
        >>> BrierScore().compute(predictions=[[0.5, 0.5]], references=[0])
        {'brier': 0.5}
    """

    def _score(self, probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        return {"brier": brier_score(probabilities, labels)}
