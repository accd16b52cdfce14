"""Which of a run's checkpoints are whole: each ends with a list of its files and their hashes.

`Trainer` writes a checkpoint under its final name, file by file. One that was killed in the middle has no list yet;
one that was damaged does not agree with it.
"""

import json
import os
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .files import sha256_of, write_json
from .hub import InvalidFilesError

LIST_FILE = "checkpoint_files.json"


def seal(checkpoint: str | os.PathLike) -> None:
    """Write the list, which says that the checkpoint is whole.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp(), "checkpoint-1")
        >>> folder.mkdir()
        >>> _ = (folder / "a").write_text("1")
        >>> seal(folder)
        >>> newest_whole(folder.parent) == str(folder)
        True
    """
    write_json(Path(checkpoint) / LIST_FILE, {name: sha256_of(Path(checkpoint) / name) for name in _files(checkpoint)})


def break_seal(checkpoint: str | os.PathLike) -> None:
    """Take the list away, before files of the checkpoint are written anew."""
    (Path(checkpoint) / LIST_FILE).unlink(missing_ok=True)


def check_whole(checkpoint: str | os.PathLike) -> None:
    """Raise an `InvalidFilesError` unless all files are there, and are what they were."""
    path = Path(checkpoint) / LIST_FILE
    if not path.is_file():
        raise InvalidFilesError(
            f"{os.fspath(checkpoint)!r} has no {LIST_FILE}: a run was stopped while it wrote this checkpoint, or an "
            "earlier version wrote it. `train(resume_from_checkpoint=True)` takes the newest one that is whole. If "
            "you know that this one is, call `hf_deelbo.sharing.checkpoints.seal(folder)` first."
        )
    try:
        listed = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise InvalidFilesError(f"{path}: it cannot be read ({error}). Resume from another checkpoint.") from error
    for name, expected in listed.items():
        file = Path(checkpoint) / name
        if not file.is_file() or sha256_of(file) != expected:
            what = "is not what it was when it was saved" if file.is_file() else "is missing"
            raise InvalidFilesError(f"{file} {what}: the checkpoint is damaged. Resume from another one.")


def newest_whole(folder: str | os.PathLike) -> str | None:
    """The checkpoint of most steps among those in `folder` that are whole, or `None`."""
    numbered = {
        int(path.name.rpartition("-")[2]): path
        for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if path.is_dir() and path.name.rpartition("-")[2].isdigit()
    }
    for _, path in sorted(numbered.items(), reverse=True):
        try:
            check_whole(path)
        except InvalidFilesError:
            continue
        return str(path)
    return None


def _files(checkpoint: str | os.PathLike) -> list[str]:
    paths = sorted(path for path in Path(checkpoint).rglob("*") if path.is_file())
    return [path.relative_to(checkpoint).as_posix() for path in paths if path.name != LIST_FILE]
