"""Make a dataset of film reviews, one sentence each, for `study.py --preset text`.

    python examples/movie_snippets.py data/movie-snippets     # downloads 2.5 MB, by pip
    python examples/study.py --preset text --data_root data

The sentences are Pang and Lee's, from Rotten Tomatoes. At least twenty people rated each from -4 to 4 for Hutto and
Gilbert's VADER (ICWSM 2014), whose source package holds them, under the MIT licence. A sentence is positive or
negative by the mean of its ratings; 2,000 sentences, drawn from a fixed seed, are for the test.
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import datasets

PACKAGE = "vaderSentiment==3.3.2"
INNER_ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
RATINGS = "movieReviewSnippets_GroundTruth.txt"
NUM_TEST = 2000


def download(folder: str) -> Path:
    """The package's source archive, fetched into `folder`; nothing of it is run."""
    source = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", folder, PACKAGE]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *source], check=True)
    return next(Path(folder).glob("*.tar.gz"))


def read_ratings(archive: Path) -> str:
    """The table of sentences, from the archive within the archive."""
    with tarfile.open(archive) as package:
        inner = next(name for name in package.getnames() if name.endswith(INNER_ARCHIVE))
        with tarfile.open(fileobj=io.BytesIO(package.extractfile(inner).read())) as resources:
            table = next(name for name in resources.getnames() if name.endswith(RATINGS))
            return resources.extractfile(table).read().decode("utf-8", errors="replace")


def as_dataset(table: str) -> datasets.DatasetDict:
    """Lines of number, mean rating and sentence, as a training and a test set; those rated 0 are left out."""
    columns = [line.split("\t", 2) for line in table.splitlines() if line.strip()]
    rated = [(text.strip(), float(rating)) for _, rating, text in columns if float(rating) != 0]
    names = datasets.ClassLabel(names=["negative", "positive"])
    rows = datasets.Dataset.from_dict(
        {"text": [text for text, _ in rated], "label": [int(rating > 0) for _, rating in rated]},
        features=datasets.Features({"text": datasets.Value("string"), "label": names}),
    )
    return rows.train_test_split(test_size=NUM_TEST, seed=0)


def main(argv: Sequence[str] | None = None) -> None:
    """Write `train.parquet` and `test.parquet`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the dataset")
    parser.add_argument("--archive", type=Path, help=f"the source archive of {PACKAGE}, if it is here already")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        splits = as_dataset(read_ratings(options.archive or download(folder)))
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        rows.to_parquet(options.folder / f"{name}.parquet")
        print(f"{name}: {len(rows):,} sentences, {sum(rows['label']) / len(rows):.1%} positive")


if __name__ == "__main__":
    main()
