import os
import subprocess
import sys
import textwrap

import pytest

from hf_deelbo.sharing import files
from hf_deelbo.sharing.files import (
    finish_interrupted,
    replaced_together,
    sha256_of,
    write_json,
    write_whole,
)


def contents(folder) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_replaced_together_keeps_other_files_and_makes_folders(tmp_path):
    folder = tmp_path / "a" / "b"
    with replaced_together(folder) as new:
        (new / "sub").mkdir()
        (new / "sub" / "x").write_text("1")
    (folder / "mine").write_text("kept")
    with replaced_together(folder) as new:
        (new / "sub").mkdir()
        (new / "sub" / "x").write_text("2")
    assert contents(folder) == {"sub/x": "2", "mine": "kept"}


def test_when_the_body_raises_the_folder_is_as_it_was(tmp_path):
    (tmp_path / "x").write_text("old")

    def save_on_a_full_disk():
        with replaced_together(tmp_path) as new:
            (new / "x").write_text("new")
            raise OSError("no space left on the disk")

    with pytest.raises(OSError, match="disk"):
        save_on_a_full_disk()
    assert contents(tmp_path) == {"x": "old"}
    with pytest.raises(KeyboardInterrupt), replaced_together(tmp_path / "fresh"):
        raise KeyboardInterrupt
    assert not (tmp_path / "fresh").exists()


KILLED = """
    import importlib.util, os, sys

    spec = importlib.util.spec_from_file_location("files", sys.argv[3])  # alone, without torch
    files = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(files)
    replace, left = os.replace, int(sys.argv[2])

    def replace_or_die(*args):
        global left
        if left == 0:
            os._exit(9)
        left -= 1
        replace(*args)

    os.replace = replace_or_die
    with files.replaced_together(sys.argv[1]) as new:
        for name in "abc":
            (new / name).write_text("new")
"""


def test_killed_at_any_moment_it_is_the_old_or_the_new(tmp_path):
    outcomes = []
    for moment in range(5):  # before it counts, then before each of the three moves, then never
        folder = tmp_path / str(moment)
        folder.mkdir()
        for name in "abc":
            (folder / name).write_text("old")
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(moment), files.__file__]
        assert subprocess.run(command).returncode == (0 if moment == 4 else 9)
        finish_interrupted(folder)
        if moment == 0:  # what the killed one left is removed by the next
            with pytest.raises(ZeroDivisionError), replaced_together(folder):
                raise ZeroDivisionError
        outcomes.append(contents(folder))
    old, new = dict.fromkeys("abc", "old"), dict.fromkeys("abc", "new")
    assert outcomes == [old, new, new, new, new]


def test_write_whole_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})

    def full_disk(*args):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_json(path, {"a": 2})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="JSON"):
        write_json(path, {"a": float("nan")})
    assert contents(tmp_path) == {"x.json": '{\n  "a": 1\n}\n'}


def test_sha256_is_that_of_the_standard(tmp_path):
    """FIPS 180's example of a million letters."""
    write_whole(tmp_path / "x", b"a" * 1_000_000)
    assert sha256_of(tmp_path / "x") == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
