"""Cached images against the transform of one image at a time."""

import tracemalloc

import datasets
import numpy as np
import pytest
import torch
from lab.cached_images import CachedImages, resized_images
from lab.data import (
    ChannelStatistics,
    collate_images,
    decode_image,
    image_transform,
    load_data,
)
from lab.tasks import DataArguments, ModelArguments, Task
from PIL import Image
from torch.utils.data import DataLoader, Subset

from hf_deelbo.data import column_of_labels

STATISTICS = ChannelStatistics((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))


def random_images(count: int, side: int = 12) -> datasets.Dataset:
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 256, (side, side + 3, 3), dtype=np.uint8)) for _ in range(count)]
    rows = datasets.Dataset.from_dict(
        {"image": images, "label": [index % 3 for index in range(count)]},
        features=datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=3)}),
    )
    return rows.cast_column("image", datasets.Image(decode=False))


@pytest.fixture(scope="module")
def rows() -> datasets.Dataset:
    return random_images(9)


@pytest.fixture
def pixels(rows, tmp_path) -> np.memmap:
    return resized_images(rows, "image", 28, tmp_path, disable_tqdm=True)


@pytest.mark.parametrize("size", [8, 28, 48])
def test_without_augmentation_it_is_the_plain_transform(rows, tmp_path, size):
    images = CachedImages(resized_images(rows, "image", size, tmp_path), rows["label"], size, STATISTICS)
    transform = image_transform(size, STATISTICS, augment=False)
    expected = torch.stack([transform(decode_image(value)) for value in rows["image"]])
    torch.testing.assert_close(images.__getitems__(range(9))["pixel_values"], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(images[4]["pixel_values"], expected[4], rtol=0, atol=1e-6)


@pytest.mark.parametrize("flip", [True, False])
def test_augmented_images_are_all_crops_and_mirrors_equally_often(pixels, rows, flip):
    images = CachedImages(pixels, rows["label"], 28, STATISTICS, augment=True, horizontal_flip=flip)
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (STATISTICS.mean, STATISTICS.std))
    index = {}  # of each crop and mirror, made one by one
    for image in (3, 7):
        for top in range(5):
            for left in range(5):
                crop = (pixels[image, :, top : top + 28, left : left + 28].astype(np.float32) / 255 - mean) / std
                for mirrored in (False, True) if flip else (False,):
                    made = crop[:, :, ::-1] if mirrored else crop
                    index[np.round(made, 4).tobytes()] = (image, top, left, mirrored)
    torch.manual_seed(0)
    draws = 4000
    batch = images.__getitems__([3, 7] * (draws // 2))["pixel_values"].numpy()
    found = [index[np.round(image, 4).tobytes()] for image in batch]
    assert [image for image, *_ in found] == [3, 7] * (draws // 2)  # an image stays at its place
    counts = np.unique(found, axis=0, return_counts=True)[1]
    assert len(counts) == len(index)
    expected = draws / len(index)
    chi_square = ((counts - expected) ** 2 / expected).sum() / (len(index) - 1)
    assert chi_square == pytest.approx(1, abs=5 * np.sqrt(2 / (len(index) - 1)))


def test_torch_seeds_the_augmentation(pixels, rows):
    images = CachedImages(pixels, rows["label"], 28, STATISTICS, augment=True)
    batches = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        batches.append(images.__getitems__(range(9))["pixel_values"])
    assert torch.equal(batches[0], batches[1])
    assert not torch.equal(batches[0], batches[2])


def test_a_loader_takes_whole_batches_of_selected_images(pixels, rows):
    images = CachedImages(pixels, rows["label"], 28, STATISTICS).select([8, 0, 4, 2]).select([1, 2, 3])
    assert images.labels == column_of_labels(images) == [0, 1, 2]
    loader = DataLoader(Subset(images, [2, 0]), batch_size=2, collate_fn=collate_images)
    (batch,) = loader
    assert batch["labels"].tolist() == [2, 0]
    all_images = CachedImages(pixels, rows["label"], 28, STATISTICS)
    torch.testing.assert_close(batch["pixel_values"], all_images.__getitems__([2, 0])["pixel_values"])


class TestFile:
    def test_it_is_read_again_for_the_same_rows_and_size_only(self, rows, tmp_path):
        def files():
            return {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

        resized_images(rows, "image", 28, tmp_path)
        made = files()
        resized_images(rows, "image", 28, tmp_path)
        assert files() == made
        resized_images(rows, "image", 14, tmp_path)
        other = resized_images(rows.select([5, 1]), "image", 28, tmp_path)
        assert len(files()) == 3
        np.testing.assert_array_equal(other, resized_images(rows, "image", 28, tmp_path)[[5, 1]])

    def test_a_broken_image_is_named_and_leaves_no_file(self, rows, tmp_path):
        broken = datasets.Dataset.from_dict({"image": [rows[0]["image"], {"bytes": b"no image", "path": None}]})
        with pytest.raises(ValueError, match="Image 1 is broken"):
            resized_images(broken, "image", 28, tmp_path)
        assert not list(tmp_path.iterdir())

    def test_one_image_at_a_time_is_in_memory(self, tmp_path):
        rows = random_images(600)
        tracemalloc.start()
        pixels = resized_images(rows, "image", 112, tmp_path, disable_tqdm=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert pixels.nbytes == 600 * 3 * 128 * 128  # 29 MB
        assert peak < 4e6


def test_a_task_reads_the_same_rows_with_and_without_files(tmp_path):
    tasks = []
    for cached in (False, True):
        data = DataArguments("digits", train_size=50, image_size=14, max_eval_samples=20, cache_images=cached)
        tasks.append(Task(ModelArguments(cache_dir=str(tmp_path)), data, disable_tqdm=True))
    plain, cached = tasks
    for part in ("unaugmented", "test"):
        batch, rows = getattr(cached, part).__getitems__(range(20)), getattr(plain, part)[:20]
        torch.testing.assert_close(batch["pixel_values"], torch.stack(rows["pixel_values"]), rtol=0, atol=1e-6)
        assert batch["labels"].tolist() == rows["labels"]
    assert len(cached.train) == 50
    assert cached.trainer_arguments["data_collator"] is collate_images
    assert sorted(cached.train.labels) == sorted(load_data("digits", train_size=50).train["label"])
