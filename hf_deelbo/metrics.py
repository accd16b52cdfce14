"""How good class probabilities are: accuracy, negative log likelihood, calibration error and Brier score.

Formulas on numbers; `compute_metrics` gives a `Trainer` all four. `evaluate_metrics` has them as `evaluate.Metric`s.
And how good an uncertainty is: whether the surest answers are the right ones, whether what is strange is less sure.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike
from transformers import EvalPrediction

# how far the probabilities of an example may sum from 1: half precision is no mistake, logits are
SUM_TOLERANCE = 1e-3
# as `compute_metrics` calls them
METRICS = ("accuracy", "nll", "ece", "brier")


# ---- Formulas -------------------------------------------------------------------------------------------------------


def class_averaged_accuracy(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """The share of right answers in a class, averaged over the classes that `labels` contains.

        accuracy = 1/K sum_k 1/n_k sum_{i: y_i = k} [ argmax_c p_ic = y_i ]

    Of equal probabilities the first class is the answer.

    Args:
        probabilities: shape (n, C), one row for each example.
        labels: n whole numbers in [0, C).

    Example:
        >>> class_averaged_accuracy([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]], [0, 0, 0, 1])
        0.5
    """
    probabilities, labels = checked(probabilities, labels)
    right = probabilities.argmax(axis=1) == labels
    right_in_class, size_of_class = np.bincount(labels, weights=right), np.bincount(labels)
    present = size_of_class > 0
    return float(np.mean(right_in_class[present] / size_of_class[present]))


def negative_log_likelihood(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """The mean of minus the log probability of the label; `inf` if a label has probability 0.

        nll = -1/n sum_i log p_i,y_i

    Args:
        probabilities: shape (n, C), one row for each example.
        labels: n whole numbers in [0, C).

    Example:
        >>> negative_log_likelihood([[0.5, 0.5], [0.75, 0.25]], [1, 1])
        1.0397207708399179
    """
    probabilities, labels = checked(probabilities, labels)
    with np.errstate(divide="ignore"):  # log 0 is meant
        return float(-np.mean(np.log(probabilities[np.arange(len(labels)), labels])))


def expected_calibration_error(probabilities: ArrayLike, labels: ArrayLike, num_bins: int = 15) -> float:
    """How far confidence is from accuracy, in bins of equal width (Guo et al. 2017).

        ece = sum_b n_b/n | accuracy_b - confidence_b |,    bin b = ( (b-1)/B, b/B ],    b = 1 .. B

    with the mean confidence, max_c p_ic, and the share of right answers of the n_b examples whose confidence is in bin
    b. Examples are averaged, not classes.

    Args:
        probabilities: shape (n, C), one row for each example.
        labels: n whole numbers in [0, C).
        num_bins: B.

    Example:
        >>> expected_calibration_error([[0.75, 0.25], [0.75, 0.25]], [0, 1])
        0.25
    """
    probabilities, labels = checked(probabilities, labels)
    check_num_bins(num_bins)
    confidence = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    bins = confidence_bins(confidence, num_bins)
    gaps = np.bincount(bins, weights=right - confidence)  # n_b (accuracy_b - confidence_b)
    return float(np.abs(gaps).sum() / len(labels))


def confidence_bins(confidence: ArrayLike, num_bins: int) -> np.ndarray:
    """The bin of each confidence, out of B bins of equal width that hold their upper edges, counted from 0.

        b_i = #{ b in 1 .. B-1 : b/B < confidence_i },    bin b = ( b/B, (b+1)/B ]

    What rounding puts above 1 is in the last bin.

    Args:
        confidence: numbers in [0, 1].
        num_bins: B.

    Example:
        >>> confidence_bins([0.1, 0.2, 0.21, 1.0], num_bins=5)
        array([0, 0, 1, 4])
    """
    # not by `linspace`, which rounds twice and so can be below a confidence that is exactly b/B
    return np.searchsorted(np.arange(1, num_bins) / num_bins, confidence, side="left")


def brier_score(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """The mean squared distance between the probabilities and the label as a one-hot vector; 0 to 2.

        brier = 1/n sum_i sum_c ( p_ic - [c = y_i] )^2

    Args:
        probabilities: shape (n, C), one row for each example.
        labels: n whole numbers in [0, C).

    Example:
        >>> brier_score([[0.5, 0.5], [1.0, 0.0]], [1, 1])
        1.25
    """
    probabilities, labels = checked(probabilities, labels)
    differences = probabilities.copy()
    differences[np.arange(len(labels)), labels] -= 1
    return float(np.mean(np.sum(differences**2, axis=1)))


def named_metrics(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The four out of what `Trainer.evaluate` or `predict` returns, without the prefix.

    Example:
        >>> output = {"test_accuracy": 0.5, "test_nll": 1.0, "test_ece": 0.0, "test_brier": 0.5, "epoch": 3}
        >>> named_metrics(output, "test")
        {'accuracy': 0.5, 'nll': 1.0, 'ece': 0.0, 'brier': 0.5}
    """
    return {name: metrics[f"{prefix}_{name}"] for name in METRICS}


def classification_metrics(probabilities: ArrayLike, labels: ArrayLike) -> dict[str, float]:
    """All four, under `accuracy`, `nll`, `ece` and `brier`.

    Args:
        probabilities: shape (n, C), one row for each example.
        labels: n whole numbers in [0, C).

    Example:
        >>> classification_metrics([[0.5, 0.5], [1.0, 0.0]], [0, 0])
        {'accuracy': 1.0, 'nll': 0.34657359027997264, 'ece': 0.25, 'brier': 0.25}
    """
    return {
        "accuracy": class_averaged_accuracy(probabilities, labels),
        "nll": negative_log_likelihood(probabilities, labels),
        "ece": expected_calibration_error(probabilities, labels),
        "brier": brier_score(probabilities, labels),
    }


# ---- Of uncertainties ----------------------------------------------------------------------------------------------


def risk_coverage_curve(uncertainties: ArrayLike, losses: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Selective prediction: the mean loss of the k surest examples, over the share that they are, for k = 1 .. n.

        coverage_k = k/n,    risk_k = 1/k sum_{i <= k} l_(i),    u_(1) <= u_(2) <= .. <= u_(n)

    Equal uncertainties do not say which example is first: each of these has the mean of their losses, which is the
    risk expected of a random order.

    Args:
        uncertainties: u, n numbers; the larger, the less sure.
        losses: l, n numbers; 1 for a wrong answer and 0 for a right one makes the risk the share of wrong answers.

    Returns:
        coverage and risk, n numbers each.

    Example:
        >>> risk_coverage_curve([0.1, 0.9, 0.5, 0.7], [0, 1, 0, 0])
        (array([0.25, 0.5 , 0.75, 1.  ]), array([0.  , 0.  , 0.  , 0.25]))
    """
    uncertainties, losses = _checked_scores(uncertainties, "uncertainties"), _checked_scores(losses, "losses")
    if losses.shape != uncertainties.shape:
        raise ValueError(
            f"losses: must be one for each of the {len(uncertainties)} uncertainties, got {len(losses)} of them."
        )
    _, group, size = np.unique(uncertainties, return_inverse=True, return_counts=True)
    mean_losses = np.repeat(np.bincount(group, weights=losses) / size, size)
    count = np.arange(1, len(losses) + 1)
    return count / len(losses), np.cumsum(mean_losses) / count


def area_under_risk_coverage(uncertainties: ArrayLike, losses: ArrayLike) -> float:
    """AURC, the mean of the risk over all coverages (Geifman et al. 2019); lower is better.

        aurc = 1/n sum_k risk_k

    Uncertainties that tell nothing of the losses have the mean loss, whatever the coverage. See `risk_coverage_curve`.

    Args:
        uncertainties: n numbers; the larger, the less sure.
        losses: n numbers; 1 for a wrong answer and 0 for a right one.

    Example:
        >>> area_under_risk_coverage([0.1, 0.9, 0.5, 0.7], [0, 1, 0, 0])
        0.0625
    """
    return float(np.mean(risk_coverage_curve(uncertainties, losses)[1]))


def out_of_distribution_auroc(inside: ArrayLike, outside: ArrayLike) -> float:
    """How well uncertainties tell a second dataset from the first: 1 if always, 0.5 if they know nothing of it.

        auroc = 1/(n m) sum_ij ( [ v_j > u_i ] + 1/2 [ v_j = u_i ] )

    the chance that an example from outside is less sure than one from inside, which is the area under the ROC curve.

    Args:
        inside: u, uncertainties of n examples of the kind that was learned from; the larger, the less sure.
        outside: v, the same of m examples of another kind.

    Example:
        >>> out_of_distribution_auroc(inside=[0.1, 0.2, 0.3], outside=[0.3, 0.4])
        0.9166666666666666
    """
    inside, outside = np.sort(_checked_scores(inside, "inside")), _checked_scores(outside, "outside")
    below, not_above = (np.searchsorted(inside, outside, side=side) for side in ("left", "right"))
    return float((below + not_above).sum() / (2 * len(inside) * len(outside)))


# ---- From logits ----------------------------------------------------------------------------------------------------


def probabilities_of(logits: ArrayLike) -> np.ndarray:
    """Softmax over the last axis, in float64.

        p_c = exp(z_c - m) / sum_d exp(z_d - m),    m = max_d z_d

    Args:
        logits: one row for each example; -inf is probability 0.

    Example:
        >>> probabilities_of([[1000.0, 1000.0], [0.0, -np.inf]])
        array([[0.5, 0.5],
               [1. , 0. ]])
    """
    logits = np.asarray(logits, dtype=np.float64)
    if logits.size == 0:
        raise ValueError(f"logits: there are none, the shape is {logits.shape}; pass at least one example.")
    largest = logits.max(axis=-1, keepdims=True)
    if not np.isfinite(largest).all():
        wrong = largest[~np.isfinite(largest)][0]
        raise ValueError(
            f"logits: the largest of each example must be finite, got {wrong}; check the model's outputs."
        )
    exponentials = np.exp(logits - largest)
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """`classification_metrics` of the softmax of a model's logits, to be passed to a `Trainer`.

        p_i = softmax(z_i)

    Args:
        prediction: its `predictions` are logits, or a tuple that starts with them; its `label_ids` are labels.

    Example:
        >>> metrics = compute_metrics(EvalPrediction(predictions=np.zeros((2, 2)), label_ids=np.array([0, 0])))
        >>> metrics
        {'accuracy': 1.0, 'nll': 0.6931471805599453, 'ece': 0.5, 'brier': 0.5}
    """
    logits = prediction.predictions
    if isinstance(logits, tuple):
        logits = logits[0]
    return classification_metrics(probabilities_of(logits), prediction.label_ids)


# ---- Checks ---------------------------------------------------------------------------------------------------------


def checked(
    probabilities: ArrayLike, labels: ArrayLike, names: tuple[str, str] = ("probabilities", "labels")
) -> tuple[np.ndarray, np.ndarray]:
    """Both as arrays; `names` are what the caller calls them."""
    rows_name, labels_name = names
    try:
        rows = np.asarray(probabilities, dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"{rows_name}: must be rows of C numbers, with the same C in each; {error}") from None
    labels = np.asarray(labels)
    if rows.size == 0:
        raise ValueError(f"{rows_name}: there are none, the shape is {rows.shape}; pass at least one example.")
    if rows.ndim != 2:
        raise ValueError(f"{rows_name}: must have the shape (examples, classes), got {rows.shape}.")
    if labels.shape != rows.shape[:1]:
        raise ValueError(f"{labels_name}: must have the shape ({len(rows)},), one for each row, got {labels.shape}.")
    _check_probabilities(rows, rows_name)
    if labels.dtype.kind not in "biu":
        raise ValueError(f"{labels_name}: must be whole numbers, got {labels.dtype}; convert them to integers.")
    labels = labels.astype(np.int64)
    num_classes = rows.shape[1]
    outside = (labels < 0) | (labels >= num_classes)
    if outside.any():
        raise ValueError(
            f"{labels_name}: must be in [0, {num_classes}), as {rows_name} have {num_classes} columns, got "
            f"{labels[outside][0]} in row {outside.argmax()}; number the classes from 0, and leave out examples "
            "without a class."
        )
    return rows, labels


def _check_probabilities(rows: np.ndarray, name: str) -> None:
    infinite = ~np.isfinite(rows)
    if infinite.any():
        row = infinite.any(axis=1).argmax()
        raise ValueError(f"{name}: must be finite, got {rows[infinite][0]} in row {row}; check the model's outputs.")
    negative = rows < 0
    if negative.any():
        raise ValueError(
            f"{name}: must not be negative, got {rows[negative][0]} in row {negative.any(axis=1).argmax()}; pass "
            "probabilities, not logits (`probabilities_of` converts them)."
        )
    sums = rows.sum(axis=1)
    off = np.abs(sums - 1) > SUM_TOLERANCE
    if off.any():
        raise ValueError(
            f"{name}: each row must sum to 1, row {off.argmax()} sums to {sums[off][0]}; pass probabilities, not "
            "logits (`probabilities_of` converts them)."
        )


def _checked_scores(scores: ArrayLike, name: str) -> np.ndarray:
    """As an array of one number for each example; `inf` has a place in an order, what is no number has none."""
    try:
        scores = np.asarray(scores, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: must be one number for each example; {error}") from None
    if scores.ndim != 1 or len(scores) == 0:
        raise ValueError(
            f"{name}: must be one number for each example, and one at least, got the shape {scores.shape}."
        )
    if np.isnan(scores).any():
        raise ValueError(f"{name}: must be numbers, got nan in row {np.isnan(scores).argmax()}; check what made them.")
    return scores


def check_num_bins(num_bins: int) -> None:
    """Raise a `ValueError` unless it is a whole number of at least 1."""
    if not isinstance(num_bins, int) or num_bins < 1:
        raise ValueError(f"num_bins: must be a whole number of at least 1, got {num_bins!r}.")
