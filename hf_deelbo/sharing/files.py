"""Files that are written whole or not at all, and told apart by their hash."""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_STAGING = ".saving-"
_COMPLETE = ".saved"
# what is worked with in a folder; no part of what it holds
WORKING_FOLDERS = (f"{_STAGING}*", _COMPLETE)


def write_whole(path: str | os.PathLike, content: str | bytes) -> None:
    """Write a file so that a reader, or a crash, meets the old content or the new, never a part.

    Example:
        >>> path = Path(tempfile.mkdtemp()) / "note.txt"
        >>> write_whole(path, "new")
        >>> path.read_text()
        'new'
    """
    with whole_file(path) as new:
        new.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[Path]:
    """`write_whole` for content that comes in parts: where to write it, which becomes `path` once the body is done."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: str | os.PathLike, content: Any) -> None:
    """`write_whole` of JSON; numbers that JSON does not have (nan, infinity) are refused: see `as_json`."""
    write_whole(path, json.dumps(content, indent=2, allow_nan=False) + "\n")


def as_json(value: Any) -> Any:
    """Mappings, sequences and numbers as JSON has them: what is not finite becomes null.

    Example:
        >>> as_json({"trials": (1.5, float("-inf"))})
        {'trials': [1.5, None]}
    """
    if isinstance(value, Mapping):
        return {key: as_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def replaced_together(folder: str | os.PathLike) -> Iterator[Path]:
    """An empty folder to write files into; on exit they replace those of `folder`, all of them or none.

    When the body raises, or the process is killed, `folder` is as it was. Once all files are there, the working folder
    is renamed, which makes the new files count; a move that was interrupted after that is completed by the next
    `finish_interrupted`. Other files of `folder` stay.

    Example:
        >>> folder = tempfile.mkdtemp()
        >>> with replaced_together(folder) as new:
        ...     _ = (new / "a.txt").write_text("1")
        >>> os.listdir(folder)
        ['a.txt']
    """
    folder = Path(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    finish_interrupted(folder)
    for left_over in folder.glob(f"{_STAGING}*"):
        shutil.rmtree(left_over)
    staging = Path(tempfile.mkdtemp(dir=folder, prefix=_STAGING))
    try:
        yield staging
        os.replace(staging, folder / _COMPLETE)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
        raise
    finish_interrupted(folder)


def finish_interrupted(folder: str | os.PathLike) -> None:
    """Complete a `replaced_together` that was stopped after all its files were written."""
    complete = Path(folder) / _COMPLETE
    if not complete.is_dir():
        return
    for path in sorted(complete.rglob("*")):
        if path.is_file():
            target = Path(folder) / path.relative_to(complete)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    shutil.rmtree(complete)


def sha256_of(path: str | os.PathLike) -> str:
    """The SHA-256 of a file's content, in hexadecimal.

    Example:
        >>> path = Path(tempfile.mkdtemp()) / "empty"
        >>> path.touch()
        >>> sha256_of(path)[:8]
        'e3b0c442'
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ResultsFile:
    """A JSON file that is always whole and belongs to one search.

    Args:
        path: where it is.
        search: what is searched; a file of another search is refused.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = ResultsFile(Path(folder.name) / "results.json", {"rates": [0.1, 0.01]})
        >>> file.read()
        {}
        >>> file.write({"trials": [1.5]})
        >>> file.read()
        {'rates': [0.1, 0.01], 'trials': [1.5]}
        >>> folder.cleanup()
    """

    def __init__(self, path: Path, search: dict[str, Any]):
        self.path = path
        self.search = json.loads(json.dumps(search))  # as it will be read: tuples become lists

    def read(self) -> dict[str, Any]:
        """The search and its results; nothing if there is no file yet."""
        if not self.path.exists():
            return {}
        content = json.loads(self.path.read_text())
        different = sorted(name for name, value in self.search.items() if content.get(name) != value)
        if different:
            raise ValueError(
                f"folder: {self.path.parent} holds another search (it differs in: {', '.join(different)}). Choose "
                "another folder, or remove it."
            )
        return content

    def write(self, results: dict[str, Any]) -> None:
        """Replace the file at once: whoever is killed here leaves the old file or the new one, never a part."""
        write_whole(self.path, json.dumps(self.search | results, indent=2))  # -Infinity is read back by Python
