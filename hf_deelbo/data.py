"""Rows of a dataset: their labels, and subsets in which classes are balanced."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import datasets
import torch

LABEL_COLUMNS = ("label", "labels", "fine_label", "target", "class")


def class_balanced_indices(labels: Sequence[int], size: int, seed: int = 0) -> list[int]:
    """At most `size` indices, drawn by `seed`, with classes as equally frequent as the data allow; sorted.

    Example:
        >>> class_balanced_indices([0, 0, 0, 0, 0, 1, 1], size=4, seed=1)
        [0, 1, 5, 6]
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).tolist()
    by_class = defaultdict(list)
    for index in order:
        by_class[labels[index]].append(index)
    # the first of each class, then the second of each, ...
    ranked = sorted((rank, label, index) for label, of in by_class.items() for rank, index in enumerate(of))
    return sorted(index for _, _, index in ranked[:size])


def column_of(dataset: datasets.Dataset, name: str) -> list:
    """A column as a list, without running the dataset's transform on it."""
    return dataset.with_format(None)[name][:]


def column_of_labels(dataset: Any) -> list[int] | None:
    """The labels of a `datasets.Dataset` or `CachedImages`, without decoding images; `None` if they cannot be told."""
    if isinstance(dataset, datasets.Dataset):
        for name in LABEL_COLUMNS:
            if name in dataset.column_names:
                return column_of(dataset, name)
    labels = getattr(dataset, "labels", None)
    return labels if isinstance(labels, list) else None
