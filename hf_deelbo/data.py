"""Rows of a dataset: their labels, subsets in which classes are balanced, batches as equal as can be."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset
from transformers import TrainingArguments
from transformers.trainer_utils import has_length

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
    """The labels of a `datasets.Dataset`, or the list `labels` of another; `None` if they cannot be told."""
    if isinstance(dataset, datasets.Dataset):
        for name in LABEL_COLUMNS:
            if name in dataset.column_names:
                return column_of(dataset, name)
    labels = getattr(dataset, "labels", None)
    return labels if isinstance(labels, list) else None


def some_of(dataset: Any, indices: Sequence[int]) -> Any:
    """Rows of a dataset, as a dataset.

    Example:
        >>> list(some_of(["a", "b", "c"], [0, 2]))
        ['a', 'c']
    """
    return dataset.select(indices) if hasattr(dataset, "select") else Subset(dataset, indices)


def digests_of(dataset: Any, without: Collection[str] = ()) -> list[bytes]:
    """A hash of what each row holds but for some columns, to find the same rows in another dataset.

    Example:
        >>> rows = [{"text": "a", "label": 0}, {"text": "a", "label": 1}, {"text": "b", "label": 0}]
        >>> a, also_a, b = digests_of(rows, without=["label"])
        >>> a == also_a, a == b
        (True, False)
    """

    def digest(row: Mapping[str, Any]) -> bytes:
        content = hashlib.sha256()
        for name in sorted(row.keys() - set(without)):
            value = row[name]
            is_array = isinstance(value, (torch.Tensor, np.ndarray, Image.Image))
            content.update(name.encode() + (np.asarray(value).tobytes() if is_array else repr(value).encode()))
        return content.digest()

    return [digest(dataset[index]) for index in range(len(dataset))]


@contextmanager
def nothing_dropped(args: TrainingArguments) -> Iterator[None]:
    """Within it `dataloader_drop_last` is off: it is for training, and an evaluation wants every example.

    Example:
        >>> args = TrainingArguments("outputs", dataloader_drop_last=True)
        >>> with nothing_dropped(args):
        ...     args.dataloader_drop_last
        False
        >>> args.dataloader_drop_last
        True
    """
    drop_last, args.dataloader_drop_last = args.dataloader_drop_last, False
    try:
        yield
    finally:
        args.dataloader_drop_last = drop_last


def in_equal_batches(
    loader: DataLoader, batch_size: int, indices: Sequence[int] | None = None, num_batches: int | None = None
) -> DataLoader:
    """The rows of a loader again, or some of them: in order, all on each process, in batches as equal as can be.

    Batch norm has no statistics of a single example left over, and no example may be left out.

    Args:
        loader: of `Trainer`, which has the dataset without the columns that the model does not take, and the collator.
        batch_size: no batch is larger.
        indices: which rows; default is all.
        num_batches: make so many instead.

    Example:
        >>> loader = DataLoader(range(5), batch_size=2)
        >>> [batch.tolist() for batch in in_equal_batches(loader, batch_size=3)]
        [[0, 1, 2], [3, 4]]
    """
    if not has_length(loader.dataset):
        batching = {"batch_size": batch_size}
    else:
        rows = torch.arange(len(loader.dataset)) if indices is None else torch.tensor(indices)
        parts = rows.tensor_split(num_batches or math.ceil(len(rows) / batch_size))
        batching = {"batch_sampler": [part.tolist() for part in parts]}
    return DataLoader(
        loader.dataset, **batching, collate_fn=loader.collate_fn, num_workers=loader.num_workers, pin_memory=False
    )
