"""Images that are decoded and resized once, into a file, and then read, cropped and mirrored a batch at a time."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import datasets
import numpy as np
import torch
from numpy.lib.format import write_array_header_1_0
from numpy.lib.stride_tricks import sliding_window_view
from torch.utils.data import Dataset
from torchvision.transforms import v2
from tqdm.auto import tqdm

from hf_deelbo.sharing.files import whole_file

from .data import ChannelStatistics, decode_image, size_before_crop


class CachedImages(Dataset):
    """Rows of `pixel_values` and `labels` from a memory map, the same as those of `data.image_transform`.

    A batch is made in a few operations on all of its images, without a loop over them. To augment, each image gets a
    crop and (half of them) a mirror of its own, drawn from torch's global generator as torchvision does. Give a
    `DataLoader` or `Trainer` `data.collate_images` as its collator.

    Args:
        pixels: bytes of shape (n, 3, R, R), as `resized_images` gives them.
        labels: the n classes.
        size: pixels of the crop, at most R.
        statistics: to normalise with.
        augment: take random crops rather than the centre.
        horizontal_flip: also mirror half of the images, where `augment`.
        indices: which of the images, in which order; default is all.

    Example:
        >>> pixels = np.zeros((5, 3, 10, 10), np.uint8)
        >>> images = CachedImages(pixels, [0, 1, 2, 3, 4], 8, ChannelStatistics((0.5,) * 3, (0.5,) * 3))
        >>> batch = images.select([4, 1]).__getitems__([0, 1])
        >>> batch["pixel_values"].shape, batch["labels"]
        (torch.Size([2, 3, 8, 8]), tensor([4, 1]))
    """

    def __init__(
        self,
        pixels: np.ndarray,
        labels: Sequence[int],
        size: int,
        statistics: ChannelStatistics,
        augment: bool = False,
        horizontal_flip: bool = True,
        indices: Sequence[int] | None = None,
    ):
        self._pixels, self._labels, self._size, self._statistics = pixels, np.asarray(labels), size, statistics
        self._augment, self._flip = augment, augment and horizontal_flip
        self._indices = np.arange(len(pixels)) if indices is None else np.asarray(indices, dtype=np.int64)
        self._margin = pixels.shape[-1] - size
        self._mean, self._std = (torch.tensor(values).view(3, 1, 1) for values in (statistics.mean, statistics.std))

    @property
    def labels(self) -> list[int]:
        """The class of each image."""
        return self._labels[self._indices].tolist()

    def select(self, indices: Sequence[int]) -> "CachedImages":
        """Some of the images, of the same file."""
        options = (self._size, self._statistics, self._augment, self._flip)
        return CachedImages(self._pixels, self._labels, *options, self._indices[np.asarray(indices, dtype=np.int64)])

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[0] for name, values in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """A whole batch, which `DataLoader` asks for by this name."""
        rows = self._indices[np.asarray(indices)]
        if self._augment:
            top, left = torch.randint(0, self._margin + 1, (2, len(rows))).numpy()
        else:
            top = left = np.full(len(rows), self._margin // 2)
        # a view of all crops: (n, 3, margin + 1, margin + 1, size, size)
        crops = sliding_window_view(self._pixels, (self._size, self._size), axis=(2, 3))
        images = torch.from_numpy(crops[rows, :, top, left])
        if self._flip:
            mirrored = torch.rand(len(rows)) < 0.5
            images = torch.where(mirrored.view(-1, 1, 1, 1), images.flip(-1), images)
        normalised = images.float().div_(255).sub_(self._mean).div_(self._std)
        return {"pixel_values": normalised, "labels": torch.from_numpy(self._labels[rows])}


def resized_images(
    dataset: datasets.Dataset, image_column: str, size: int, folder: str | os.PathLike, disable_tqdm: bool = False
) -> np.memmap:
    """All images in the size that crops of `size` are taken from, as a memory map of shape (n, 3, R, R).

    Its file in `folder` is named by the hash of the dataset's fingerprint, the column and R, and is made if it is not
    there; one image at a time is in memory. A broken image is named.
    """
    resized = size_before_crop(size)
    key = json.dumps([dataset._fingerprint, image_column, resized])
    path = Path(folder) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npy"
    if not path.exists():
        to_bytes = v2.Compose([v2.ToImage(), v2.Resize((resized, resized))])
        rows = dataset.with_format(None).select_columns(image_column)
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(rows), 3, resized, resized)}
        with whole_file(path) as new, open(new, "wb") as file:
            write_array_header_1_0(file, header)
            for index, row in enumerate(tqdm(rows, desc="Resizing images", disable=disable_tqdm or None, leave=False)):
                file.write(to_bytes(decode_image(row[image_column], f"Image {index}")).numpy().tobytes())
    return np.load(path, mmap_mode="r")
