import io
from collections import Counter

import datasets
import numpy as np
import pytest
import sklearn.datasets
import torch
from lab.data import (
    ChannelStatistics,
    as_images,
    as_tokens,
    channel_statistics,
    class_balanced_subset_indices,
    decode_image,
    image_processor,
    image_transform,
    load_data,
)
from PIL import Image
from transformers import AutoImageProcessor

from hf_deelbo.data import class_balanced_indices, column_of_labels

LABELS = [0] * 50 + [1] * 30 + [2] * 3


def png(mode: str = "RGB", size: tuple[int, int] = (6, 4), color: int = 0) -> dict:
    buffer = io.BytesIO()
    Image.new(mode, size, color if mode in ("L", "P") else None).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": f"{mode}.png"}


def image_rows(labels: list, column: str = "image", **columns: list) -> datasets.Dataset:
    rows = datasets.Dataset.from_dict({column: [png() for _ in labels], "label": labels, **columns})
    return rows.cast_column(column, datasets.Image())


@pytest.fixture
def folder(tmp_path):
    """Writes splits in the layout of a dataset repository."""

    def write(**splits: datasets.Dataset) -> str:
        for name, rows in splits.items():
            (tmp_path / "data").mkdir(exist_ok=True)
            rows.to_parquet(tmp_path / "data" / f"{name}-00000-of-00001.parquet")
        return str(tmp_path)

    return write


class TestSubsets:
    @pytest.mark.parametrize(
        ("size", "expected"), [(6, [2, 2, 2]), (9, [3, 3, 3]), (23, [10, 10, 3]), (999, [50, 30, 3])]
    )
    def test_classes_are_as_equal_as_the_data_allow(self, size, expected):
        indices = class_balanced_indices(LABELS, size)
        counts = Counter(LABELS[index] for index in indices)
        assert [counts[label] for label in range(3)] == expected
        assert len(set(indices)) == len(indices)

    def test_the_seed_decides(self):
        assert class_balanced_indices(LABELS, 9, seed=1) == class_balanced_indices(LABELS, 9, seed=1)
        assert class_balanced_indices(LABELS, 9, seed=1) != class_balanced_indices(LABELS, 9, seed=2)

    def test_a_subset_has_the_same_number_of_each_class(self):
        rows = datasets.Dataset.from_dict({"label": LABELS})
        counts = Counter(LABELS[index] for index in class_balanced_subset_indices(rows, 9, seed=1001))
        assert counts == {0: 3, 1: 3, 2: 3}

    @pytest.mark.parametrize(
        ("size", "message"),
        [
            (84, "between 1 and the 83 rows there are, got 84"),
            (0, "got 0"),
            (10, "10 rows cannot be shared out to 3 classes; take 9 or 12"),
            (2, "2 rows cannot be shared out to 3 classes; take 3"),
            (12, "12 rows need 4 of each class, but class 'cat' has 3. The most that is balanced is 9"),
        ],
    )
    def test_sizes_that_cannot_be(self, size, message):
        features = datasets.Features({"label": datasets.ClassLabel(names=["ant", "bee", "cat"])})
        rows = datasets.Dataset.from_dict({"label": LABELS}, features=features)
        with pytest.raises(ValueError, match=message):
            class_balanced_subset_indices(rows, size, seed=1)


class TestLoading:
    def test_the_embedded_digits(self):
        data = load_data("digits", train_size=100, subset_seed=1001)
        assert (data.kind, data.inputs, data.label) == ("image", "image", "label")
        assert (len(data.train), len(data.test)) == (100, 1697)
        assert set(Counter(data.train["label"]).values()) == {10}
        encoded = [{value["bytes"] for value in rows["image"]} for rows in (data.train, data.test)]
        assert len(encoded[0] & encoded[1]) == 0  # no digit is in both

    def test_pixels_of_the_digits_are_scikit_learns(self):
        data = load_data("digits")
        assert len(data.test) == 360  # a fifth, as there is no test split
        expected = {tuple(np.uint8(row * 255 / 16)) for row in sklearn.datasets.load_digits().data}
        for row in data.train.select(range(20)):
            pixels = np.asarray(decode_image(row["image"]))
            assert tuple(pixels[..., 0].ravel()) in expected

    def test_a_folder_like_a_hub_repository(self, folder):
        path = folder(train=image_rows([0, 1] * 6), test=image_rows([1, 0, 1]))
        data = load_data(path, train_size=4)
        assert (len(data.train), len(data.test), data.class_names) == (4, 3, ["0", "1"])

    def test_an_image_folder(self, tmp_path):
        for split in ("train", "validation"):
            for name in ("cat", "dog"):
                (tmp_path / split / name).mkdir(parents=True)
                for i in range(3):
                    Image.new("L", (5, 5), 10 * i).save(tmp_path / split / name / f"{i}.png")
        data = load_data(None, train_dir=str(tmp_path / "train"), validation_dir=str(tmp_path / "validation"))
        assert (data.class_names, len(data.train), len(data.test)) == (["cat", "dog"], 6, 6)

    @pytest.mark.parametrize(("labels", "names"), [(["b", "a"], ["a", "b"]), ([7, 3], ["3", "7"])])
    def test_strings_and_integers_are_understood_as_labels(self, folder, labels, names):
        path = folder(train=image_rows(labels * 5), test=image_rows(labels))
        data = load_data(path)
        assert data.class_names == names
        assert data.test["label"][:] == [1, 0]

    def test_text(self, folder):
        rows = datasets.Dataset.from_dict({"sentence": ["a", "b"] * 5, "idx": range(10), "label": [0, 1] * 5})
        data = load_data(folder(train=rows, test=rows))
        assert (data.kind, data.inputs) == ("text", "sentence")

    def test_a_test_split_without_labels_is_passed_over(self, folder):
        rows = image_rows([0, 1] * 5)
        data = load_data(folder(train=rows, validation=rows, test=image_rows([-1, -1, -1])))
        assert len(data.test) == 10

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"input_column": "picture"}, ValueError, "image_column_name: there is no column 'picture'; there are"),
            ({"label_column": "class"}, ValueError, "label_column_name: there is no column 'class'"),
            ({"input_column": "weight"}, ValueError, "'weight' holds .* neither images nor text"),
            ({"label_column": "weight"}, ValueError, "'weight' holds .*Continuous targets are not classes"),
        ],
    )
    def test_columns_that_will_not_do(self, folder, arguments, error, message):
        path = folder(train=image_rows([0, 1] * 5, weight=[0.5] * 10), test=image_rows([0, 1], weight=[0.5] * 2))
        with pytest.raises(error, match=message):
            load_data(path, **arguments)

    @pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all"])
    def test_a_folder_that_is_not_there(self, name):
        with pytest.raises(FileNotFoundError, match=f"dataset_name: there is no folder '{name}'"):
            load_data(name)

    def test_a_train_dir_that_is_not_there(self):
        with pytest.raises(FileNotFoundError, match="train_dir: there is no folder"):
            load_data(None, train_dir="./nowhere")

    def test_a_hub_out_of_reach(self):
        with pytest.raises(
            ConnectionError, match=r"cannot load 'cifar10' .*'digits' is embedded and needs no network"
        ):
            load_data("cifar10")


class TestImages:
    @pytest.mark.parametrize("mode", ["L", "RGBA", "P", "RGB", "1"])
    def test_all_modes_become_rgb(self, mode):
        assert decode_image(png(mode)).mode == "RGB"

    def test_a_broken_image_is_named(self):
        broken = {"bytes": png()["bytes"][:40], "path": "cats/7.png"}
        with pytest.raises(ValueError, match=r"cats/7.png is broken"):
            decode_image(broken)
        rows = datasets.Dataset.from_dict({"image": [png(), {"bytes": b"no image", "path": None}]})
        with pytest.raises(ValueError, match="Image 1 is broken"):
            channel_statistics(rows.cast_column("image", datasets.Image(decode=False)), "image", disable_tqdm=True)

    def test_channel_statistics_are_those_of_all_pixels(self):
        random = np.random.default_rng(0)
        arrays = [random.integers(0, 256, (h, w, 3), dtype=np.uint8) for h, w in ((4, 6), (5, 5), (1, 9))]
        rows = datasets.Dataset.from_dict({"image": [Image.fromarray(a) for a in arrays]})
        rows = rows.cast_column("image", datasets.Image(decode=False))
        statistics = channel_statistics(rows, "image", disable_tqdm=True)
        pixels = np.concatenate([a.reshape(-1, 3) for a in arrays]) / 255
        np.testing.assert_allclose(statistics.mean, pixels.mean(0), rtol=1e-12)
        np.testing.assert_allclose(statistics.std, pixels.std(0), rtol=1e-9)

    def test_the_paper_resizes_to_256_and_crops_224(self):
        statistics = ChannelStatistics((0.1, 0.2, 0.3), (0.5, 0.6, 0.7))
        # columns of growing brightness, wider than high: the aspect is not kept
        ramp = np.tile(np.linspace(0, 255, 512).astype(np.uint8)[None, :, None], (256, 1, 3))
        image = Image.fromarray(ramp)
        plain = image_transform(224, statistics, augment=False)(image)
        assert plain.shape == (3, 224, 224)
        expected = np.asarray(image.resize((256, 256), Image.Resampling.BILINEAR))[16:240, 16:240] / 255
        expected = (expected - np.array(statistics.mean)) / np.array(statistics.std)
        np.testing.assert_allclose(plain.permute(1, 2, 0).numpy(), expected, atol=0.02)

        torch.manual_seed(0)
        augmented = [image_transform(224, statistics, augment=True)(image) for _ in range(20)]
        assert len({round(float(x[0, 0, 0]), 4) for x in augmented}) > 5  # random crops
        slopes = [bool(x[0, 0, 100] > x[0, 0, 50]) for x in augmented]
        assert len(set(slopes)) == 2  # flipped, or not
        unflipped = image_transform(224, statistics, augment=True, horizontal_flip=False)
        assert all(x[0, 0, 100] > x[0, 0, 50] for x in (unflipped(image) for _ in range(20)))

    def test_rows_are_made_when_they_are_read(self):
        calls = []

        def transform(image):
            calls.append(image.size)
            return torch.zeros(3, 2, 2)

        rows = image_rows([0, 1, 1]).cast_column("image", datasets.Image(decode=False))
        rows = as_images(rows, "image", "label", transform)
        assert calls == []
        assert rows[1]["labels"] == 1
        assert calls == [(6, 4)]
        assert rows.column_names == ["pixel_values", "labels"]
        assert column_of_labels(rows) == [0, 1, 1]
        assert len(calls) == 1


def test_texts_are_tokenized_when_they_are_read():
    rows = datasets.Dataset.from_dict({"text": ["a b", "c"], "label": [0, 1]})

    def tokenizer(texts, truncation, max_length):
        return {"input_ids": [[len(text)] * min(len(text), max_length) for text in texts]}

    rows = as_tokens(rows, "text", "label", tokenizer, max_length=2)
    assert rows[0] == {"input_ids": [3, 3], "labels": 0}


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


class TestClasses:
    def test_rows_of_the_classes_with_new_labels(self):
        digits = sklearn.datasets.load_digits()
        data = load_data("digits", classes=["7", "2"], train_size=20)
        assert data.class_names == ["7", "2"]
        assert len(data.train) + len(data.test) == np.isin(digits.target, [7, 2]).sum()
        of_seven = {digits.images[i].tobytes() for i in np.flatnonzero(digits.target == 7)}
        for row in data.test.select(range(40)):
            pixels = np.float64(np.asarray(decode_image(row["image"]))[..., 0]) * 16 / 255
            assert (pixels.round().tobytes() in of_seven) == (row["label"] == 0)

    @pytest.mark.parametrize("classes", [["7"], ["7", "7"], ["7", "ten"]])
    def test_wrong_classes(self, classes):
        with pytest.raises(ValueError, match="classes: .*The classes are 0, 1, 2"):
            load_data("digits", classes=classes)


@pytest.mark.parametrize("size", [48, 64, 224])
@pytest.mark.parametrize("shape", [(8, 8), (300, 200), (64, 500)])
def test_image_processor_is_the_plain_transform(size, shape, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    statistics = ChannelStatistics((0.4, 0.5, 0.6), (0.2, 0.3, 0.25))
    image_processor(size, statistics).save_pretrained(tmp_path)
    loaded = AutoImageProcessor.from_pretrained(tmp_path)
    processed = loaded(Image.fromarray(pixels), return_tensors="pt")["pixel_values"][0]
    expected = image_transform(size, statistics, augment=False)(Image.fromarray(pixels))
    torch.testing.assert_close(processed, expected, rtol=0, atol=1e-6)
