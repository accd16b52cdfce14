from collections import Counter

import datasets
import pytest

from hf_deelbo.data import class_balanced_indices, column_of_labels

LABELS = [0] * 50 + [1] * 30 + [2] * 3


@pytest.mark.parametrize(("size", "expected"), [(6, [2, 2, 2]), (9, [3, 3, 3]), (23, [10, 10, 3]), (999, [50, 30, 3])])
def test_classes_are_as_equal_as_the_data_allow(size, expected):
    indices = class_balanced_indices(LABELS, size)
    counts = Counter(LABELS[index] for index in indices)
    assert [counts[label] for label in range(3)] == expected
    assert len(set(indices)) == len(indices)


def test_the_seed_decides():
    assert class_balanced_indices(LABELS, 9, seed=1) == class_balanced_indices(LABELS, 9, seed=1)
    assert class_balanced_indices(LABELS, 9, seed=1) != class_balanced_indices(LABELS, 9, seed=2)


@pytest.mark.parametrize("column", ["label", "labels"])
def test_labels_are_read_without_the_transform(column):
    dataset = datasets.Dataset.from_dict({"x": [1, 2, 3], column: [0, 1, 1]})

    def fail(_):
        raise AssertionError("decoded")

    dataset.set_transform(fail)
    assert column_of_labels(dataset) == [0, 1, 1]


def test_labels_that_cannot_be_told():
    assert column_of_labels(datasets.Dataset.from_dict({"x": [1]})) is None
    assert column_of_labels([{"labels": 1}]) is None
