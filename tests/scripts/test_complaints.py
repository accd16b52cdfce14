"""The dataset of complaints, from an archive like the package's own."""

import csv
import hashlib
import io
import tarfile

import pytest
from conftest import load_example
from lab.data import load_data

NAME = "consumer-complaint-classification-model-0.0.4/classification_model/datasets/{}.csv"


@pytest.fixture
def archive() -> bytes:
    """Two tables of 900 and 300 rows, a third of them about loans; texts have lines and commas."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as package:
        for table, numbers in (("train", range(900)), ("test", range(900, 1200))):
            text = io.StringIO(newline="")
            writer = csv.writer(text)
            writer.writerow(["Consumer complaint narrative", "Product"])
            writer.writerows([f" Complaint {i},\nin XXXX ", "Debt, cards" if i % 3 else "Loan"] for i in numbers)
            content = text.getvalue().encode()
            info = tarfile.TarInfo(NAME.format(table))
            info.size = len(content)
            package.addfile(info, io.BytesIO(content))
    return whole.getvalue()


@pytest.fixture
def script(monkeypatch):
    script = load_example("complaints")
    monkeypatch.setattr(script, "NUM_TEST", 600)
    return script


@pytest.fixture
def path(archive, tmp_path):
    (tmp_path / "archive.tar.gz").write_bytes(archive)
    return tmp_path / "archive.tar.gz"


def test_the_test_set_is_balanced(script, archive, path, monkeypatch):
    monkeypatch.setattr(script, "SHA256", hashlib.sha256(archive).hexdigest())
    script.main([str(path), str(path.parent / "complaints")])
    data = load_data(str(path.parent / "complaints"), train_size=10)
    assert (data.kind, data.class_names, len(data.test)) == ("text", ["Debt, cards", "Loan"], 600)
    assert sum(data.test["label"]) == 300
    splits = script.as_dataset(script.read_complaints(archive), 600)
    labels = {row["text"]: row["label"] for rows in splits.values() for row in rows}
    assert labels == {f"Complaint {i},\nin XXXX": int(i % 3 == 0) for i in range(1200)}


def test_another_archive_than_it_should_be_is_refused(script, path):
    with pytest.raises(ValueError, match=r"archive: the SHA-256 of .*archive.tar.gz is"):
        script.main([str(path), str(path.parent / "complaints")])
    assert not (path.parent / "complaints").exists()
