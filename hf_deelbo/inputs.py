"""What `hf-deelbo predict` is given: image files and folders of them, texts and CSV files of them; in batches."""

import csv
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
TEXT_COLUMN = "text"
# how many inputs are prepared before they are sorted by shape, and how many go through the model together
AHEAD, BATCH_SIZE = 128, 32

Inputs = Mapping[str, torch.Tensor]
Answer = TypeVar("Answer")


def listed(inputs: Sequence[str], task: str, column: str | None = None) -> list[str]:
    """The images or texts that are meant: a folder stands for the images in it and below, a CSV file for its texts.

    Args:
        inputs: of images, files and folders; of texts, texts and names that end in `.csv`.
        task: what the model does, as transformers calls it.
        column: of CSV files, the column of texts, which are read as UTF-8; default is `text`.

    Example:
        >>> listed(["a.png", "b.png"], "image-classification"), listed(["Well made."], "text-classification")
        (['a.png', 'b.png'], ['Well made.'])
    """
    is_text = task == "text-classification"
    csv_files = [item for item in inputs if item.lower().endswith(".csv")]
    if column is not None and not (is_text and csv_files):
        raise ValueError(f"column: {column!r} is one of a CSV file of texts; give such a file, or no column.")
    if csv_files and not is_text:
        raise ValueError(f"inputs: {csv_files[0]!r} is a CSV file, but the model takes images; give files or folders.")
    found = []
    for item in inputs:
        if item in csv_files:
            found += _texts_of(item, column or TEXT_COLUMN)
        elif is_text:
            found.append(_checked_text(item))
        else:
            found += _images_in(item) if os.path.isdir(item) else [item]
    return found


def answered_in_batches(
    items: Sequence[str], prepare: Callable[[str], Inputs], answer: Callable[[Inputs], Sequence[Answer]]
) -> Iterator[tuple[str, Answer]]:
    """Each item and its answer, in their order; inputs of the same shapes go through the model together.

    Nothing is padded, so that the answers do not depend on what else is asked.

    Args:
        items: what to answer, of which only some are prepared at a time.
        prepare: makes the model's inputs from an item, as a batch of one.
        answer: gives an answer to each row of a batch.

    Example:
        >>> prepare, answer = lambda item: {"n": torch.tensor([len(item)])}, lambda batch: (batch["n"] > 2).tolist()
        >>> list(answered_in_batches(["to", "and", "fro"], prepare, answer))
        [('to', False), ('and', True), ('fro', True)]
    """
    for start in range(0, len(items), AHEAD):
        window = items[start : start + AHEAD]
        prepared = [prepare(item) for item in window]
        alike = defaultdict(list)
        for index, inputs in enumerate(prepared):
            alike[tuple((name, value.shape) for name, value in inputs.items())].append(index)
        answers = {}
        for indices in alike.values():
            for first in range(0, len(indices), BATCH_SIZE):
                batch = indices[first : first + BATCH_SIZE]
                rows = {name: torch.cat([prepared[index][name] for index in batch]) for name in prepared[batch[0]]}
                answers |= zip(batch, answer(rows), strict=True)
        yield from ((item, answers[index]) for index, item in enumerate(window))


def _images_in(folder: str) -> list[str]:
    found = []
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        images = [name for name in files if name.lower().endswith(IMAGE_SUFFIXES) and not name.startswith(".")]
        found += [os.path.join(path, name) for name in sorted(images)]
    if not found:
        raise ValueError(f"inputs: no image is in the folder {folder!r}; it looks for {', '.join(IMAGE_SUFFIXES)}.")
    return found


def _texts_of(path: str, column: str) -> list[str]:
    if not os.path.isfile(path):
        raise ValueError(f"inputs: there is no file {path!r}.")
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            names = rows.fieldnames or []
            if column not in names:
                known = ", ".join(map(repr, names)) or "none"
                raise ValueError(f"column: {path!r} has no column {column!r}; its columns are {known}. Name one.")
            texts = []
            for row in rows:
                if row[column] is None:
                    raise ValueError(f"inputs: line {rows.line_num} of {path!r} ends before the column {column!r}.")
                texts.append(row[column])
    except UnicodeDecodeError as error:
        raise ValueError(f"inputs: {path!r} is not UTF-8 ({error}); save it so.") from None
    except csv.Error as error:
        raise ValueError(f"inputs: {path!r} cannot be read as CSV ({error}).") from None
    if not texts:
        raise ValueError(f"inputs: {path!r} has no row below its header.")
    return texts


def _checked_text(text: str) -> str:
    """A text is a text, also if a folder of this name is there; what is written as a path to images is not."""
    is_image = text.lower().endswith(IMAGE_SUFFIXES) and os.path.isfile(text)
    if is_image or (os.sep in text and os.path.isdir(text)):
        what = "an image" if is_image else "a folder"
        raise ValueError(f"inputs: {text!r} is {what}, but the model takes texts; give these, or CSV files of them.")
    return text
