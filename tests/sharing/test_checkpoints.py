from pathlib import Path

import pytest

from hf_deelbo.sharing.checkpoints import LIST_FILE, break_seal, check_whole, newest_whole, seal
from hf_deelbo.sharing.hub import InvalidFilesError


def checkpoint(folder: Path, step: int) -> Path:
    """A whole one, with a file in a folder of its own."""
    path = folder / f"checkpoint-{step}"
    (path / "deep").mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "deep" / "state.pt").write_bytes(b"")
    seal(path)
    return path


def test_the_newest_is_that_of_most_steps(tmp_path):
    for step in (9, 10, 2):
        checkpoint(tmp_path, step)
    for name in ("checkpoint-best", "checkpoint-11", "runs"):  # no number, not sealed, none
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-12").write_text("a file")
    assert newest_whole(tmp_path) == str(tmp_path / "checkpoint-10")
    assert newest_whole(tmp_path / "runs") is None
    assert newest_whole(tmp_path / "nowhere") is None


@pytest.mark.parametrize("file", ["model.safetensors", "deep/state.pt"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"other")], ids=["missing", "changed"])
def test_a_file_that_is_not_what_it_was(tmp_path, file, damage):
    earlier, later = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    damage(later / file)
    with pytest.raises(InvalidFilesError, match=rf"checkpoint-2/{file} is .*: the checkpoint is damaged"):
        check_whole(later)
    assert newest_whole(tmp_path) == str(earlier)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": '], ids=["empty", "cut", "a list", "cut later"])
def test_a_list_that_cannot_be_read(tmp_path, content):
    (checkpoint(tmp_path, 1) / LIST_FILE).write_text(content)
    with pytest.raises(InvalidFilesError, match=f"{LIST_FILE}: it cannot be read"):
        check_whole(tmp_path / "checkpoint-1")


def test_files_that_come_later_do_no_harm(tmp_path):
    """Such as what a callback adds."""
    path = checkpoint(tmp_path, 1)
    (path / "swag.safetensors").write_bytes(b"moments")
    check_whole(path)


def test_while_it_is_written_anew_it_does_not_count(tmp_path):
    path = checkpoint(tmp_path, 1)
    break_seal(path)
    assert newest_whole(tmp_path) is None
    break_seal(path)  # nothing to take away is no mistake
    seal(path)
    check_whole(path)
