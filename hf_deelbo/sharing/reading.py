"""Reading what a stranger may have written: bounded before it is read, checked before it is used, blamed by its name.

Whoever changes a file can make its hash fit. So a hash only tells damage; the rules here tell what may be in a file:

| what               | rule                                                                                           |
|--------------------|------------------------------------------------------------------------------------------------|
| any file           | a regular one, not larger than such a file can be                                              |
| JSON               | at most `MOST_BYTES` and `MOST_VALUES`, so that reading it takes less than a second            |
| tensors            | names, shapes and types as in a `TensorRule`, read from the header; then finite, with its sign |
| whatever is raised | becomes an error that names the file; a lack of memory stays one                               |
"""

import errno
import json
import math
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ..weights.blocks import Tensors

# a description of 10,000 groups has 2 MB, labels of 20,000 classes 3 MB
MOST_BYTES, MOST_VALUES = 8 * 2**20, 500_000
# a header of 100,000 tensors, such as the batch-norm statistics of 300 samples of a large network
_LARGEST_HEADER, _MOST_VALUES_OF_HEADER = 2 * MOST_BYTES, 2 * MOST_VALUES
LONGEST_LINE, LONGEST_REASON = 200, 600
# regular files by name, which block or never end
_SYSTEM_FOLDERS = (Path("/proc"), Path("/sys"))
# as a safetensors header spells them
FLOATS = ("F16", "BF16", "F32", "F64")
WHOLE_NUMBERS = ("U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "BOOL")


class InvalidFilesError(ValueError):
    """Saved files that are missing, damaged, changed, or not what they are taken for."""

    @classmethod
    def at(cls, where: str | os.PathLike, what: str, remedy: str = "Download or save it again.") -> Self:
        """The error that says which file it is about, what is wrong with it, and what to do."""
        return cls(f"{os.fspath(where)}: {what}. {remedy}")


@contextmanager
def blaming(
    where: str | os.PathLike,
    what: str = "it cannot be read",
    remedy: str = "Download or save it again.",
    leaving: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Whatever the body raises becomes an `InvalidFilesError` that says which file it is about, with its cause.

    Libraries do not check all that they read, and stumble over wrong values in many ways. What is not the file's fault
    keeps its type: a lack of memory, and a package that is not installed.

    Args:
        where: the file or the folder.
        what: what is wrong with it; the reason follows in brackets.
        remedy: what to do.
        leaving: errors that go through as they are.

    Example:
        >>> with blaming("folder/config.json"):
        ...     {}["model_type"]
        Traceback (most recent call last):
        hf_deelbo.sharing.reading.InvalidFilesError: folder/config.json: it cannot be read (KeyError: 'model_type'). \
Download or save it again.
    """
    where = os.fspath(where)
    try:
        yield
    except (InvalidFilesError, *leaving):
        raise
    except ImportError as error:
        raise ImportError(f"{where}: {one_line(str(error), LONGEST_REASON)}") from error
    except BaseException as error:
        if _is_lack_of_memory(error):
            raise MemoryError(f"{where}: there is not enough memory to load it.") from error
        # a panic of a library in Rust is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InvalidFilesError.at(where, f"{what} ({_reason(error)})", remedy) from error


def _is_lack_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    # torch's allocator on the CPU, and safetensors' map of a file
    return "allocate memory" in str(error) and isinstance(error, Exception)


def _reason(error: BaseException) -> str:
    says_enough = type(error) in (ValueError, OSError, RuntimeError) or isinstance(error, FileNotFoundError)
    return one_line(str(error) if says_enough else f"{type(error).__name__}: {error}", LONGEST_REASON).rstrip(".")


def one_line(text: str, longest: int = LONGEST_LINE) -> str:
    """A text of someone else as one line that can be shown: printable, and not longer than this.

    Example:
        >>> one_line("a\\n\\x1b[31mb")
        'a [31mb'
    """
    text = text[: 20 * longest]  # it may have megabytes
    printable = "".join(character if character.isprintable() else " " for character in text)
    line = " ".join(printable.split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def check_regular(path: str | os.PathLike, most_bytes: int | None = None) -> int:
    """The size of a file that can be read to its end: no folder, device or pipe, and not larger than `most_bytes`.

    Example:
        >>> check_regular("/dev/zero")
        Traceback (most recent call last):
        hf_deelbo.sharing.reading.InvalidFilesError: /dev/zero: it is no regular file. Replace it by the file itself.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise InvalidFilesError.at(path, f"it cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode) or _is_of_the_system(path):
        raise InvalidFilesError.at(path, "it is no regular file", "Replace it by the file itself.")
    if most_bytes is not None and status.st_size > most_bytes:
        raise InvalidFilesError.at(
            path, f"it has {status.st_size:,} bytes, where such a file has at most {most_bytes:,}"
        )
    return status.st_size


def _is_of_the_system(path: str | os.PathLike) -> bool:
    parents = Path(path).resolve().parents
    return any(folder in parents for folder in _SYSTEM_FOLDERS)


def read_json(path: str | os.PathLike, strictly: bool = False) -> dict[str, Any]:
    """The JSON object in a file of at most `MOST_BYTES`; `InvalidFilesError` says what is wrong with it.

    Args:
        path: the file.
        strictly: refuse numbers that are not finite, or that a float cannot be compared with.
    """
    check_regular(path, MOST_BYTES)
    with blaming(path):
        content = Path(path).read_bytes()
    if _num_values(content) > MOST_VALUES:
        raise InvalidFilesError.at(path, "it has more values than such a file can have")
    return _parsed(content, path, strictly)


def _num_values(content: bytes) -> int:
    """About how many values a JSON has, before they take memory; nothing of it is parsed."""
    return sum(map(content.count, (b",", b"[", b"{")))


def _parsed(content: bytes, path: str | os.PathLike, strictly: bool) -> dict[str, Any]:
    strict = {"parse_constant": _refuse_constant, "parse_int": _whole_number} if strictly else {}
    with blaming(path, "it is no JSON"):
        parsed = json.loads(content.decode("utf-8"), **strict)
    if not isinstance(parsed, dict):
        raise InvalidFilesError.at(path, f"expected a JSON object, found {type(parsed).__name__}")
    return parsed


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _whole_number(digits: str) -> int:
    """One that a float can be compared with."""
    number = int(digits)
    if abs(number) >= 2**63:
        raise ValueError(f"{digits[:20]}... has more than 64 bits")
    return number


# ---- Tensors -------------------------------------------------------------------------------------------------------


class SavedTensor(NamedTuple):
    """What the header of a safetensors file says of a tensor: its type there, such as `"F32"`, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)


class TensorRule(NamedTuple):
    """What a tensor in a file must be.

    Attributes:
        shape: its shape; any if `None`.
        dtypes: the types that it may have, as a header spells them.
        least: what its numbers must not be below; all of them must be finite.
        is_above: whether they must be above that.
        may_be_nan: whether `nan` says that a number is not known.
    """

    shape: tuple[int, ...] | None = None
    dtypes: tuple[str, ...] = FLOATS
    least: float = -math.inf
    is_above: bool = False
    may_be_nan: bool = False

    def check(self, name: str, tensor: torch.Tensor, where: str | os.PathLike) -> None:
        """Compare the values of a tensor; its shape and type are those of the header.

        Example:
            >>> TensorRule(least=0.0).check("variance", torch.tensor([1.0, -1.0]), "file")
            Traceback (most recent call last):
            hf_deelbo.sharing.reading.InvalidFilesError: file: the tensor 'variance' must not be below 0, and holds \
-1. Download or save it again.
        """
        if not (tensor.is_floating_point() and tensor.numel()):
            return
        low, high = (bound.item() for bound in torch.aminmax(tensor.detach()))  # nan if there is one
        if math.isnan(low) and self.may_be_nan:
            return
        if not (math.isfinite(low) and math.isfinite(high)):
            wrong, found = "must be finite", high if math.isfinite(low) else low
        elif low < self.least or (self.is_above and low == self.least):
            wrong, found = f"must {'be above' if self.is_above else 'not be below'} {self.least:g}", low
        else:
            return
        raise InvalidFilesError.at(where, f"the tensor {one_line(name)!r} {wrong}, and holds {found:g}")


POSITIVE, NOT_NEGATIVE = {"least": 0.0, "is_above": True}, {"least": 0.0}


def header_of(path: str | os.PathLike) -> dict[str, SavedTensor]:
    """Name, type and shape of each tensor in a safetensors file, of which no more than the header is read."""
    size = check_regular(path)
    with blaming(path), open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            raise ValueError(f"its header cannot have {length:,} bytes")
        content = file.read(length)
        if _num_values(content) > _MOST_VALUES_OF_HEADER:
            raise ValueError("it has more tensors than such a file can have")
        parsed = _parsed(content, path, strictly=True)
        parsed.pop("__metadata__", None)
        tensors = {name: _saved_tensor(name, entry) for name, entry in parsed.items()}
        most = sum(tensor.size for tensor in tensors.values())
        if most > 2 * (size - 8 - length):  # two numbers of four bits fit into a byte
            raise ValueError(f"its header tells of {most:,} numbers, which it is too small for")
        with safe_open(path, framework="pt"):  # checks where each tensor lies, now that the header is bounded
            pass
    return tensors


def _saved_tensor(name: str, entry: Any) -> SavedTensor:
    fits = isinstance(entry, dict) and isinstance(entry.get("dtype"), str) and isinstance(entry.get("shape"), list)
    # of more dimensions even the product of the lengths takes long
    if not fits or len(entry["shape"]) > 64 or any(type(n) is not int or n < 0 for n in entry["shape"]):
        raise ValueError(f"its header describes no tensor {one_line(name)!r}")
    return SavedTensor(entry["dtype"], tuple(entry["shape"]))


def check_header(header: Mapping[str, SavedTensor], rules: Mapping[str, TensorRule], where: str | os.PathLike) -> None:
    """Compare names, shapes and types; each error names the tensor."""
    if missing := sorted(rules.keys() - header.keys()):
        raise InvalidFilesError.at(where, f"it has no tensor {_first_of(missing)}")
    if unknown := sorted(header.keys() - rules.keys()):
        raise InvalidFilesError.at(where, f"nothing asks for its tensor {_first_of(unknown)}")
    for name, rule in rules.items():
        dtype, shape = header[name]
        if dtype not in rule.dtypes:
            types = ", ".join(rule.dtypes)
            raise InvalidFilesError.at(where, f"the tensor {name!r} must be of type {types}, and is {one_line(dtype)}")
        if rule.shape is not None and shape != rule.shape:
            raise InvalidFilesError.at(where, f"the tensor {name!r} must have shape {rule.shape}, and has {shape}")


def _first_of(names: list[str]) -> str:
    return repr(one_line(names[0])) + (f" and {len(names) - 1:,} more" if len(names) > 1 else "")


def read_tensors(
    path: str | os.PathLike, rules: Mapping[str, TensorRule], optional: Mapping[str, TensorRule] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, which must be those that `rules` name, each as its rule says.

    Args:
        path: the file.
        rules: by the name of the tensor.
        optional: likewise, of tensors that need not be there.
    """
    header = header_of(path)
    rules = {**rules, **{name: rule for name, rule in (optional or {}).items() if name in header}}
    check_header(header, rules, path)
    tensors = load_tensors(path)
    for name, tensor in tensors.items():
        rules[name].check(name, tensor, path)
    return tensors


def load_tensors(path: str | os.PathLike) -> Tensors:
    """All tensors of a safetensors file, as they are."""
    with blaming(path):
        return load_file(path)
