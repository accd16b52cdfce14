"""Models with random weights, and batches of random inputs, whose training steps are measured."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import (
    AutoModelForImageClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    TimmWrapperConfig,
    default_data_collator,
)

NUM_LABELS = 10


@dataclass(frozen=True)
class Workload:
    """A model and what it is trained on.

    Args:
        name: what tables and `--models` call it.
        make_model: returns it, with random weights.
        make_inputs: returns the inputs of so many examples, by name.
        batch_size: the usual one.
        collate: makes a batch of examples; default is `Trainer`'s.
        target: the ratio of DE ELBo to plain seconds that the project allows itself at that batch size.
    """

    name: str
    make_model: Callable[[], PreTrainedModel]
    make_inputs: Callable[[int], dict[str, torch.Tensor]]
    batch_size: int
    collate: Callable[[list[dict]], dict] | None = None
    target: float | None = None

    def examples(self, number: int) -> list[dict[str, torch.Tensor]]:
        """Random examples with labels, as a dataset."""
        columns = self.make_inputs(number) | {"labels": torch.randint(0, NUM_LABELS, (number,))}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def images(
    name: str, make_model: Callable[[], PreTrainedModel], batch_size: int, target: float | None = None, size: int = 64
) -> Workload:
    """A workload of square images, as `Trainer`'s own collator gives them: with their channels first."""
    return Workload(
        name,
        make_model,
        lambda n: {"pixel_values": torch.randn(n, 3, size, size)},
        batch_size,
        target=target,
    )


def channels_last(workload: Workload) -> Workload:
    """The same images as this project's collator gives them, with which convolutions are faster on a CPU.

    What the DE ELBo adds stays the same, so its ratio is higher; the targets are those of the usual order.
    """
    return replace(workload, name=f"{workload.name}-channels-last", collate=_collate_channels_last, target=None)


def _collate_channels_last(rows: list) -> dict:
    batch = default_data_collator(rows)
    return {**batch, "pixel_values": batch["pixel_values"].contiguous(memory_format=torch.channels_last)}


def bert(
    name: str,
    layers: int,
    hidden: int,
    batch_size: int,
    tokens: int,
    vocabulary: int = 30522,
    target: float | None = None,
) -> Workload:
    """A BERT of some size on texts of equal length."""
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        intermediate_size=4 * hidden,
        num_labels=NUM_LABELS,
    )
    return Workload(
        name,
        lambda: BertForSequenceClassification(config),
        lambda n: {"input_ids": torch.randint(0, vocabulary, (n, tokens))},
        batch_size,
        target=target,
    )


def efficientnet_lite0() -> PreTrainedModel:
    """EfficientNet-Lite0 as timm builds it."""
    config = TimmWrapperConfig(architecture="tf_efficientnet_lite0", num_labels=NUM_LABELS)
    return AutoModelForImageClassification.from_config(config)


def resnet50() -> PreTrainedModel:
    """ResNet-50."""
    return ResNetForImageClassification(ResNetConfig(num_labels=NUM_LABELS))


USUAL = (
    images("efficientnet-lite0", efficientnet_lite0, batch_size=100, target=1.10),
    images("resnet50", resnet50, batch_size=32, target=1.20),
    bert("minilm", layers=6, hidden=384, batch_size=32, tokens=64, target=1.20),
)
CHANNELS_LAST = tuple(channels_last(workload) for workload in USUAL[:2])
# few and short texts: a step's time is then what grows with D
BY_SIZE = (
    bert("bert-1m", layers=2, hidden=128, batch_size=8, tokens=32, vocabulary=4096),
    bert("bert-4m", layers=2, hidden=128, batch_size=8, tokens=32),
    bert("bert-23m", layers=6, hidden=384, batch_size=8, tokens=32),
    bert("bert-60m", layers=8, hidden=640, batch_size=8, tokens=32),
    bert("bert-110m", layers=12, hidden=768, batch_size=8, tokens=32),
)
BY_PIXELS = tuple(
    channels_last(images(f"resnet50-{size}px", resnet50, batch_size=32, size=size)) for size in (64, 128, 224)
)
WORKLOADS = {workload.name: workload for workload in (*USUAL, *CHANNELS_LAST, *BY_SIZE, *BY_PIXELS)}
