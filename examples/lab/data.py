"""Datasets by name, class-balanced subsets, channel statistics, and what turns a row into a model's input.

Rows are decoded and transformed when they are read, in the data loader's workers: nothing is held decoded.
"""

import io
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torchvision.transforms import v2
from tqdm.auto import tqdm
from transformers import BaseImageProcessor, ViTImageProcessor, default_data_collator

from hf_deelbo.data import (
    LABEL_COLUMNS,
    class_balanced_indices,
    column_of,
)
from hf_deelbo.sharing.cards import HUB_DATASETS

EMBEDDED_DATASET = "digits"

IMAGE_COLUMNS = ("image", "img", "pixel_values")
TEXT_COLUMNS = ("text", "sentence", "sentence1", "content", "question")
NO_LABEL = -1  # of a row, as `datasets` has it
EVALUATION_SPLITS = ("test", "validation", "valid", "dev")


@dataclass(frozen=True)
class ClassificationData:
    """Training and test rows whose labels are class labels.

    Attributes:
        train, test: the rows; images are still encoded.
        inputs: the column of images or texts.
        kind: `"image"` or `"text"`.
        label: the column of labels, a `datasets.ClassLabel`.
    """

    train: datasets.Dataset
    test: datasets.Dataset
    inputs: str
    kind: str
    label: str

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, in the order of their labels."""
        return self.train.features[self.label].names


# ---- Where the rows come from --------------------------------------------------------------------------------------


def load_data(
    name: str | None = EMBEDDED_DATASET,
    config_name: str | None = None,
    *,
    train_dir: str | None = None,
    validation_dir: str | None = None,
    input_column: str | None = None,
    label_column: str | None = None,
    classes: Sequence[str] | None = None,
    train_size: int | None = None,
    subset_seed: int = 1001,
    cache_dir: str | None = None,
    token: str | None = None,
) -> ClassificationData:
    """Load a dataset of images or texts with class labels.

    Args:
        name: `"digits"` (embedded, no network), `"cifar10"`, `"oxford-iiit-pet"`, any other id on the Hub, or a local
            folder in the layout of a dataset repository.
        config_name: the dataset's configuration.
        train_dir, validation_dir: folders with one folder of images per class, instead of `name`.
        input_column: the column of images or texts; found by its type and usual names if not given.
        label_column: likewise; integers and strings are understood beside class labels.
        classes: keep only the rows of these classes, by name, which then have the labels 0, 1, ... in this order.
        train_size: N, for a class-balanced subset of the training rows; default is all of them.
        subset_seed: decides the subset.
        cache_dir, token: as for `datasets.load_dataset`.

    Where the dataset has no test split, the test rows are those that are not trained on: all others of a subset, else
    a fifth that is held out.

    Example:
        >>> data = load_data("digits", train_size=100)
        >>> data.kind, len(data.class_names), len(data.train), len(data.test)
        ('image', 10, 100, 1697)
    """
    splits = _load_splits(name, config_name, train_dir, validation_dir, cache_dir, token)
    train = splits["train"]
    inputs, kind = _find_inputs(train, input_column)
    label = _find_label(train, label_column)
    splits = _with_class_labels(_train_and_labelled_test(splits, label), label)
    if classes is not None:
        splits = _of_classes(splits, label, classes)
    if kind == "image":
        splits = splits.cast_column(inputs, datasets.Image(decode=False))
    train, test = _chosen_rows(splits, label, train_size, subset_seed)
    return ClassificationData(train, test, inputs, kind, label)


def load_digits() -> datasets.DatasetDict:
    """scikit-learn's 1,797 handwritten digits, 8x8 pixels, as a dataset of images; no network."""
    try:
        from sklearn.datasets import load_digits as load_from_sklearn
    except ImportError as error:
        raise ImportError("The embedded dataset comes with scikit-learn: pip install 'hf-deelbo[demo]'.") from error
    pixels, labels = load_from_sklearn(return_X_y=True)
    images = [Image.fromarray(np.uint8(row.reshape(8, 8) * 255 / 16)) for row in pixels]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)})
    rows = datasets.Dataset.from_dict({"image": images, "label": labels.tolist()}, features=features)
    return datasets.DatasetDict(train=rows)


def _load_splits(
    name: str | None,
    config_name: str | None,
    train_dir: str | None,
    validation_dir: str | None,
    cache_dir: str | None,
    token: str | None,
) -> datasets.DatasetDict:
    if train_dir is not None:
        folders = {"train": train_dir, "test": validation_dir}
        for argument, folder in (("train_dir", train_dir), ("validation_dir", validation_dir)):
            if folder is not None and not os.path.isdir(folder):
                raise FileNotFoundError(f"{argument}: there is no folder {folder!r}.")
        files = {split: os.path.join(folder, "**") for split, folder in folders.items() if folder is not None}
        return datasets.load_dataset("imagefolder", data_files=files, cache_dir=cache_dir)
    if name == EMBEDDED_DATASET:
        return load_digits()
    if name.startswith((".", "/", "~")) and not os.path.exists(os.path.expanduser(name)):
        raise FileNotFoundError(f"dataset_name: there is no folder {name!r}.")
    try:
        splits = datasets.load_dataset(HUB_DATASETS.get(name, name), config_name, cache_dir=cache_dir, token=token)
    except (ConnectionError, datasets.exceptions.DatasetNotFoundError) as error:
        raise ConnectionError(
            f"dataset_name: cannot load {name!r} ({error}). Check the name and the connection, or give a local "
            f"folder; {EMBEDDED_DATASET!r} is embedded and needs no network."
        ) from error
    if "train" not in splits:
        raise ValueError(f"dataset_name: {name!r} has no split 'train', only {', '.join(splits)}.")
    return splits


def _train_and_labelled_test(splits: datasets.DatasetDict, label: str) -> datasets.DatasetDict:
    """The training split, and the first to test on whose labels are not hidden (as -1)."""
    for split in EVALUATION_SPLITS:
        if split in splits and set(splits[split].unique(label)) not in ({-1}, {None}):
            return datasets.DatasetDict(train=splits["train"], test=splits[split])
    return datasets.DatasetDict(train=splits["train"])


def _chosen_rows(
    splits: datasets.DatasetDict, label: str, train_size: int | None, seed: int
) -> tuple[datasets.Dataset, datasets.Dataset]:
    rows, test = splits["train"], splits.get("test")
    if train_size is None:
        if test is None:
            splits = rows.train_test_split(test_size=0.2, stratify_by_column=label, seed=seed)
        return splits["train"], splits["test"]
    chosen = class_balanced_subset_indices(rows, train_size, seed, label)
    if test is None:
        test = rows.select(sorted(set(range(len(rows))) - set(chosen)))
    return rows.select(chosen), test


# ---- Columns -------------------------------------------------------------------------------------------------------


def _find_inputs(dataset: datasets.Dataset, wanted: str | None) -> tuple[str, str]:
    """The column of images or texts, and which of the two it is."""
    kinds = {}
    for name, feature in dataset.features.items():
        if isinstance(feature, datasets.Image):
            kinds[name] = "image"
        elif isinstance(feature, datasets.Value) and feature.dtype in ("string", "large_string"):
            kinds[name] = "text"
    if wanted is not None:
        _check_column(dataset, "image_column_name", wanted)
        if wanted not in kinds:
            raise ValueError(
                f"image_column_name: {wanted!r} holds {dataset.features[wanted]}, neither images nor text. "
                f"Columns that do: {', '.join(kinds) or 'none'}."
            )
        return wanted, kinds[wanted]
    usual = [name for name in (*IMAGE_COLUMNS, *TEXT_COLUMNS) if name in kinds]
    images = [name for name, kind in kinds.items() if kind == "image"]
    candidates = usual or images
    if not candidates:
        raise ValueError(
            f"image_column_name: cannot tell which column holds images or text; the columns are "
            f"{', '.join(dataset.column_names)}. Name it."
        )
    return candidates[0], kinds[candidates[0]]


def _find_label(dataset: datasets.Dataset, wanted: str | None) -> str:
    if wanted is not None:
        _check_column(dataset, "label_column_name", wanted)
        return wanted
    usual = [name for name in LABEL_COLUMNS if name in dataset.column_names]
    typed = [name for name, feature in dataset.features.items() if isinstance(feature, datasets.ClassLabel)]
    if not usual and len(typed) != 1:
        raise ValueError(
            "label_column_name: cannot tell which column holds the labels; the columns are "
            f"{', '.join(dataset.column_names)}. Name it; from a dataset without labels no classifier is learned, and "
            "nothing is compared."
        )
    return (usual or typed)[0]


def _check_column(dataset: datasets.Dataset, argument: str, wanted: str) -> None:
    if wanted not in dataset.column_names:
        raise ValueError(f"{argument}: there is no column {wanted!r}; there are {', '.join(dataset.column_names)}.")


def _with_class_labels(splits: datasets.DatasetDict, label: str) -> datasets.DatasetDict:
    """Turn integers and strings into class labels, the same in all splits."""
    feature = splits["train"].features[label]
    if isinstance(feature, datasets.ClassLabel):
        return splits
    dtype = getattr(feature, "dtype", None)
    if dtype is None or not (dtype.startswith(("int", "uint")) or dtype in ("string", "large_string", "bool")):
        raise ValueError(
            f"label_column_name: {label!r} holds {feature}; labels are class labels, integers or strings. "
            "Continuous targets are not classes."
        )
    values = sorted({value for split in splits.values() for value in split.unique(label) if value is not None})
    labels = datasets.ClassLabel(names=[str(value) for value in values])
    index = {value: position for position, value in enumerate(values)}

    def encode(column: list) -> dict[str, list[int]]:
        return {label: [index.get(value, NO_LABEL) for value in column]}

    encoded = splits.map(encode, input_columns=label, batched=True, remove_columns=label, desc="Encoding labels")
    return encoded.cast_column(label, labels)


def _of_classes(splits: datasets.DatasetDict, label: str, classes: Sequence[str]) -> datasets.DatasetDict:
    names = splits["train"].features[label].names
    unknown = [name for name in classes if name not in names]
    if unknown or len(set(classes)) != len(classes) or len(classes) < 2:
        wrong = f"there is no class {unknown[0]!r}" if unknown else f"got {list(classes)}"
        raise ValueError(f"classes: give at least two different ones; {wrong}. The classes are {', '.join(names)}.")
    new_label = {names.index(name): index for index, name in enumerate(classes)}
    labels = datasets.ClassLabel(names=list(classes))

    def of_classes(rows: datasets.Dataset) -> datasets.Dataset:
        old = column_of(rows, label)
        kept = [index for index, value in enumerate(old) if value in new_label]
        without = rows.select(kept).remove_columns(label)
        return without.add_column(label, [new_label[old[index]] for index in kept]).cast_column(label, labels)

    return datasets.DatasetDict({name: of_classes(rows) for name, rows in splits.items()})


# ---- Subsets -------------------------------------------------------------------------------------------------------


def class_balanced_subset_indices(dataset: datasets.Dataset, size: int, seed: int, label: str = "label") -> list[int]:
    """The indices of `size` rows, the same number of each class, drawn by `seed`.

    Example:
        >>> rows = datasets.Dataset.from_dict({"x": range(6), "label": [0, 0, 0, 1, 1, 1]})
        >>> len(class_balanced_subset_indices(rows, size=4, seed=1001))
        4
    """
    labels = column_of(dataset, label)
    counts = Counter(labels)
    if size < 1 or size > len(labels):
        raise ValueError(f"train_size: must be between 1 and the {len(labels)} rows there are, got {size}.")
    if size % len(counts):
        below = size - size % len(counts)
        near = f"{below} or {below + len(counts)}" if below else f"{len(counts)}"
        raise ValueError(f"train_size: {size} rows cannot be shared out to {len(counts)} classes; take {near}.")
    needed = size // len(counts)
    scarcest, fewest = min(counts.items(), key=lambda item: item[1])
    if fewest < needed:
        feature = dataset.features[label]
        name = feature.int2str(scarcest) if isinstance(feature, datasets.ClassLabel) else scarcest
        raise ValueError(
            f"train_size: {size} rows need {needed} of each class, but class {name!r} has {fewest}. The most that is "
            f"balanced is {fewest * len(counts)}."
        )
    return class_balanced_indices(labels, size, seed)


# ---- Images --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChannelStatistics:
    """Mean and standard deviation of each colour channel, of pixels between 0 and 1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def decode_image(value: dict[str, Any] | Image.Image, row: str = "") -> Image.Image:
    """An RGB image from what a dataset holds undecoded; grey, palette and transparent ones are converted.

    Args:
        value: `{"bytes": ..., "path": ...}`.
        row: how to call it in an error.
    """
    if isinstance(value, Image.Image):
        return value.convert("RGB")
    try:
        source = io.BytesIO(value["bytes"]) if value.get("bytes") else value["path"]
        with Image.open(source) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise ValueError(
            f"{value.get('path') or row or 'an image'} is broken ({error}). Remove or replace it."
        ) from error


def channel_statistics(dataset: datasets.Dataset, image_column: str, disable_tqdm: bool = False) -> ChannelStatistics:
    """Mean and standard deviation of each channel over all pixels of all images.

    It reads every image once, so a broken one is found here, before any training.
    """
    count, first, second = 0, np.zeros(3), np.zeros(3)
    rows = dataset.with_format(None).select_columns(image_column)
    for index, row in enumerate(tqdm(rows, desc="Channel statistics", disable=disable_tqdm or None, leave=False)):
        pixels = np.asarray(decode_image(row[image_column], f"Image {index}"), dtype=np.float64).reshape(-1, 3) / 255
        count += len(pixels)
        first += pixels.sum(0)
        second += np.square(pixels).sum(0)
    mean = first / count
    std = np.sqrt(np.maximum(second / count - mean**2, 0))
    if not std.all():
        std = np.where(std == 0, 1, std)  # a channel that never changes carries nothing to scale
    return ChannelStatistics(tuple(mean.tolist()), tuple(std.tolist()))


def check_images(dataset: datasets.Dataset, image_column: str, disable_tqdm: bool = False) -> None:
    """Read every image once, so that a broken one is named before any training."""
    rows = dataset.with_format(None).select_columns(image_column)
    for index, row in enumerate(tqdm(rows, desc="Checking test images", disable=disable_tqdm or None, leave=False)):
        decode_image(row[image_column], f"Test image {index}")


def image_transform(
    size: int, statistics: ChannelStatistics, augment: bool, horizontal_flip: bool = True
) -> Callable[[Image.Image], torch.Tensor]:
    """The paper's preprocessing, in proportion to its 256 and 224 pixels.

    Resize to a square with a margin of `size`/14 on each side, whatever the aspect; a random crop of `size` and a
    random horizontal flip (if a mirrored image means the same) to augment, the centre crop otherwise; normalise. See
    `image_processor` for the same, un-augmented, as transformers saves and loads it.

    Example:
        >>> transform = image_transform(224, ChannelStatistics((0.5,) * 3, (0.5,) * 3), augment=False)
        >>> transform(Image.new("RGB", (100, 50))).shape
        torch.Size([3, 224, 224])
    """
    resized = size_before_crop(size)
    crops = [v2.RandomCrop(size) if augment else v2.CenterCrop(size)]
    if augment and horizontal_flip:
        crops.append(v2.RandomHorizontalFlip())
    return v2.Compose(
        [
            v2.ToImage(),
            v2.Resize((resized, resized)),
            *crops,
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(statistics.mean, statistics.std),
        ]
    )


def image_processor(size: int, statistics: ChannelStatistics) -> BaseImageProcessor:
    """The un-augmented `image_transform` as an image processor, for `pipeline` and all who load the model later.

    Example:
        >>> statistics = ChannelStatistics((0.5,) * 3, (0.5,) * 3)
        >>> image = Image.new("RGB", (100, 50), "teal")
        >>> processed = image_processor(224, statistics)(image, return_tensors="pt")["pixel_values"][0]
        >>> torch.allclose(processed, image_transform(224, statistics, augment=False)(image), atol=1e-6)
        True
    """
    resized = size_before_crop(size)
    return ViTImageProcessor(
        size={"height": resized, "width": resized},
        do_center_crop=True,
        crop_size={"height": size, "width": size},
        image_mean=list(statistics.mean),
        image_std=list(statistics.std),
    )


def size_before_crop(size: int) -> int:
    """224 becomes 256; the margin is whole on both sides, so that all libraries cut out the same centre."""
    return size + 2 * round(size / 14)


def as_images(
    dataset: datasets.Dataset, image_column: str, label: str, transform: Callable[[Image.Image], torch.Tensor]
) -> datasets.Dataset:
    """Rows of `pixel_values` and `labels`, made when they are read."""
    dataset = dataset.select_columns([image_column, label]).rename_column(label, "labels")
    if image_column != "pixel_values":
        dataset = dataset.rename_column(image_column, "pixel_values")

    def read(rows: dict[str, list]) -> dict[str, list]:
        images = [transform(decode_image(value)) for value in rows["pixel_values"]]
        return {"pixel_values": images, **({"labels": rows["labels"]} if "labels" in rows else {})}

    return dataset.with_transform(read)


def collate_images(rows: Sequence[Mapping[str, Any]] | Mapping[str, Any]) -> dict[str, Any]:
    """The collator for rows of `as_images`, or for the whole batches that `CachedImages` makes.

    The pixels have their channels last in memory, which changes no number: convolutional networks keep that order
    from layer to layer, and are about twice as fast with it on a CPU.

    Example:
        >>> batch = collate_images([{"pixel_values": torch.zeros(3, 8, 8), "labels": 1}] * 2)
        >>> batch["pixel_values"].shape, batch["pixel_values"].stride(), batch["labels"]
        (torch.Size([2, 3, 8, 8]), (192, 1, 24, 3), tensor([1, 1]))
    """
    batch = rows if isinstance(rows, Mapping) else default_data_collator(list(rows))
    return {**batch, "pixel_values": batch["pixel_values"].contiguous(memory_format=torch.channels_last)}


# ---- Text ----------------------------------------------------------------------------------------------------------


def as_tokens(
    dataset: datasets.Dataset, text_column: str, label: str, tokenizer: Any, max_length: int
) -> datasets.Dataset:
    """Rows of token ids and `labels`, made when they are read; the tokenizer's collator pads them."""
    dataset = dataset.select_columns([text_column, label]).rename_column(label, "labels")
    if text_column != "input_ids":
        dataset = dataset.rename_column(text_column, "input_ids")

    def read(rows: dict[str, list]) -> dict[str, list]:
        tokens = tokenizer(rows["input_ids"], truncation=True, max_length=max_length)
        return {**tokens, **({"labels": rows["labels"]} if "labels" in rows else {})}

    return dataset.with_transform(read)
