"""The text dataset of the study, from an archive like the package's own."""

import io
import tarfile
from pathlib import Path

import pytest
from conftest import load_example
from lab.data import load_data

TABLE = "".join(f"{i}\t{(-1) ** i * 0.5}\tSentence {i}.\n" for i in range(2100)) + "2100\t0.0\tNeither.\n\n"


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


@pytest.fixture
def archive(tmp_path) -> Path:
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as resources:
        add(resources, "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt", TABLE.encode())
    path = tmp_path / "vaderSentiment-3.3.2.tar.gz"
    with tarfile.open(path, "w:gz") as package:
        add(package, "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz", inner.getvalue())
    return path


def test_sentences_are_split_into_training_and_test_set(archive, tmp_path):
    script, folder = load_example("movie_snippets"), tmp_path / "movie-snippets"
    script.main([str(folder), "--archive", str(archive)])
    data = load_data(str(folder), train_size=10)
    assert (data.kind, data.class_names, len(data.test)) == ("text", ["negative", "positive"], 2000)
    sentences = {row["text"]: row["label"] for split in script.as_dataset(TABLE).values() for row in split}
    assert len(sentences) == 2100
    assert all(label == (int(text.split()[1][:-1]) % 2 == 0) for text, label in sentences.items())
    assert sum(data.train["label"]) == 5
    assert not set(data.train["text"]) & set(data.test["text"])
