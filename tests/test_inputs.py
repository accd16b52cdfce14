"""What `hf-deelbo predict` makes of files, folders and texts, and that batches change no answer."""

import pytest
import torch
from PIL import Image

from hf_deelbo.inputs import AHEAD, BATCH_SIZE, answered_in_batches, listed

IMAGES, TEXTS = "image-classification", "text-classification"


@pytest.fixture
def folder(tmp_path):
    for name in ("b.png", "A.JPG", "sub/c.webp", ".hidden.png", "._a.jpg", ".cache/d.png"):
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def csv_file(tmp_path, content: str | bytes, name: str = "rows.csv") -> str:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


class TestListed:
    def test_a_folder_stands_for_the_images_in_it_and_below(self, folder):
        found = listed(["first.png", str(folder)], IMAGES)
        assert found == ["first.png", *(str(folder / name) for name in ("A.JPG", "b.png", "sub/c.webp"))]

    def test_a_csv_file_stands_for_its_texts(self, tmp_path):
        path = csv_file(tmp_path, '\ufefftext,stars\r\n"Good, and\nlong.",5\r\nBad.,1\r\n\r\n,3\r\n')
        assert listed(["Well.", path], TEXTS) == ["Well.", "Good, and\nlong.", "Bad.", ""]
        assert listed([path], TEXTS, column="stars") == ["5", "1", "3"]

    def test_a_text_may_be_called_as_a_folder_is(self, tmp_path, monkeypatch):
        (tmp_path / "good").mkdir()
        monkeypatch.chdir(tmp_path)
        assert listed(["good", "bad", "and/or", "photo.png"], TEXTS) == ["good", "bad", "and/or", "photo.png"]

    @pytest.mark.parametrize(
        ("content", "column", "message"),
        [
            ("text;stars\nGood.;5\n", None, "column: .* has no column 'text'; its columns are 'text;stars'"),
            ("review\nGood.\n", None, "no column 'text'; its columns are 'review'. Name one"),
            ("text\nGood.\n", "review", "no column 'review'; its columns are 'text'"),
            ("", None, "its columns are none"),
            ("text\n", None, "has no row below its header"),
            ("stars,text\n5,Good.\n4\n", None, "line 3 of .* ends before the column 'text'"),
            ("text\nGr\xfc\xdfe\n".encode("latin-1"), None, "is not UTF-8"),
            ("text\n" + "x" * 200_000 + "\n", None, "cannot be read as CSV"),
        ],
    )
    def test_bad_csv_files(self, tmp_path, content, column, message):
        with pytest.raises(ValueError, match=message):
            listed([csv_file(tmp_path, content)], TEXTS, column)

    def test_what_is_not_there_or_of_another_kind(self, tmp_path, folder):
        (tmp_path / "empty").mkdir()
        for inputs, task, column, message in [
            (["gone.csv"], TEXTS, None, "inputs: there is no file 'gone.csv'"),
            ([str(tmp_path / "empty")], IMAGES, None, "inputs: no image is in the folder .*empty'; it looks for .bmp"),
            ([csv_file(tmp_path, "text\nGood.\n")], IMAGES, None, "is a CSV file, but the model takes images"),
            ([str(folder)], TEXTS, None, "is a folder, but the model takes texts"),
            ([str(folder / "b.png")], TEXTS, None, "is an image, but the model takes texts"),
            (["Good."], TEXTS, "text", "column: 'text' is one of a CSV file"),
            ([str(folder)], IMAGES, "text", "column: 'text' is one of a CSV file"),
        ]:
            with pytest.raises(ValueError, match=message):
                listed(inputs, task, column)


class TestBatches:
    def test_answers_come_in_order_and_inputs_of_one_shape_go_together(self):
        items = [str(10**length) for length in (1, 2, 1, 3) for _ in range(AHEAD // 2 + 3)]
        seen = []

        def answer(inputs: dict[str, torch.Tensor]) -> list[str]:
            seen.append(tuple(inputs["digits"].shape))
            return ["".join(map(str, row.tolist())) for row in inputs["digits"]]

        prepared = []

        def prepare(item: str) -> dict[str, torch.Tensor]:
            prepared.append(item)
            return {"digits": torch.tensor([[int(digit) for digit in item]])}

        answers = answered_in_batches(items, prepare, answer)
        assert next(answers) == ("10", "10")
        assert len(prepared) == AHEAD
        assert list(answers) == [(item, item) for item in items[1:]]
        assert max(rows for rows, _ in seen) == BATCH_SIZE
        assert len(seen) < len(items) / 10
