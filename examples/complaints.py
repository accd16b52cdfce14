"""Make a dataset of complaints about banks, of eight classes, for `swap_test.py`.

    python examples/complaints.py consumer-complaint-classification-model-0.0.4.tar.gz data/complaints

The texts are what consumers wrote to the Consumer Financial Protection Bureau, which publishes them with names and
dates blanked out as XXXX; the class is the product they are about. 13,000 of them are in the source archive (61 MB) of
Kumar Siddhartha's package `consumer-complaint-classification-model` 0.0.4, whose licence is MIT: download it from the
package's page, as pip would run its `setup.py`. The test set has 125 of each class, drawn from a fixed seed; the
others, of which most are about credit reports, are for training.
"""

import argparse
import csv
import hashlib
import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import datasets

from hf_deelbo.data import class_balanced_indices

SHA256 = "4472187dcaad36cafb754fc44c7f0b10b097a5dda29bae9ee3f1296f636c3b5e"
TABLES = ("datasets/train.csv", "datasets/test.csv")
NUM_TEST = 1000


def checked(archive: Path) -> bytes:
    """The package's source archive, if its hash is right; nothing of it is run."""
    content = archive.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != SHA256:
        raise ValueError(f"archive: the SHA-256 of {archive} is {found}, not {SHA256}; download it again.")
    return content


def read_complaints(archive: bytes) -> list[tuple[str, str]]:
    """Texts and products, from the package's two tables."""
    complaints = []
    with tarfile.open(fileobj=io.BytesIO(archive)) as package:
        for table in TABLES:
            name = next(name for name in package.getnames() if name.endswith(table))
            text = io.TextIOWrapper(package.extractfile(name), encoding="utf-8", newline="")
            complaints += [
                (row["Consumer complaint narrative"].strip(), row["Product"]) for row in csv.DictReader(text)
            ]
    return complaints


def as_dataset(complaints: Sequence[tuple[str, str]], num_test: int) -> datasets.DatasetDict:
    """A training set, and a test set with as many of each class."""
    products = datasets.ClassLabel(names=sorted({product for _, product in complaints}))
    labels = [products.str2int(product) for _, product in complaints]
    rows = datasets.Dataset.from_dict(
        {"text": [text for text, _ in complaints], "label": labels},
        features=datasets.Features({"text": datasets.Value("string"), "label": products}),
    )
    test = class_balanced_indices(labels, num_test)
    train = sorted(set(range(len(rows))) - set(test))
    return datasets.DatasetDict(train=rows.select(train), test=rows.select(test))


def main(argv: Sequence[str] | None = None) -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="the package's source archive")
    parser.add_argument("folder", type=Path, help="where to write the dataset")
    options = parser.parse_args(argv)
    splits = as_dataset(read_complaints(checked(options.archive)), NUM_TEST)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        rows.to_parquet(options.folder / f"{name}.parquet")
        print(f"{name}: {len(rows):,} complaints of {rows.features['label'].num_classes} classes")


if __name__ == "__main__":
    main()
