"""Batch-norm statistics computed over training inputs, for any `Trainer`'s model at its present weights."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset
from transformers import Trainer

from hf_deelbo.data import class_balanced_indices, column_of_labels
from hf_deelbo.weights.batch_norm import compute_statistics, with_statistics


def batch_norm_inputs(trainer: Trainer, dataset: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Batches, without labels, of at most `trainer.args.num_batch_norm_examples` rows, class-balanced, in order.

    They are as equal as they can be, as a single row left over would have no statistics, and the same each time; each
    process takes all of them.

    Args:
        trainer: whose collator, device and batch size they are for.
        dataset: training rows without augmentation.
    """
    args = trainer.args
    loader = trainer.get_test_dataloader(dataset)  # knows which columns the model takes, and how to collate them
    rows = loader.dataset
    if len(rows) > args.num_batch_norm_examples:
        labels = column_of_labels(dataset) or [0] * len(rows)
        rows = Subset(rows, class_balanced_indices(labels, args.num_batch_norm_examples, args.seed))
    num_batches = math.ceil(len(rows) / args.eval_batch_size)
    parts = [part.tolist() for part in torch.arange(len(rows)).tensor_split(num_batches)]
    workers = args.dataloader_num_workers
    for batch in DataLoader(rows, batch_sampler=parts, collate_fn=loader.collate_fn, num_workers=workers):
        yield {name: value.to(args.device) for name, value in batch.items() if name not in trainer.label_names}


@contextmanager
def recomputed_batch_norm(trainer: Trainer, dataset: Any) -> Iterator[None]:
    """Evaluate with the statistics of `batch_norm_inputs(trainer, dataset)`; the model's own come back on exit."""
    model = trainer.model
    with trainer.accelerator.autocast():
        batches = batch_norm_inputs(trainer, dataset)
        statistics = compute_statistics(model, batches, lambda batch: model(**batch))
    with with_statistics(model, statistics):
        yield
