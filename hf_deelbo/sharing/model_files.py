"""The files of a model: which of them hold its weights, and how large a model they can hold.

A few bytes of a `config.json` can ask for a model that fills the memory. So nothing is built that is much larger than
the weights beside it, and no file is followed out of the folder, unpickled, or used without a hash.
"""

import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from transformers.utils import (
    CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
)

from ..weights.batch_norm import batch_norm_layers
from .reading import (
    FLOATS,
    LONGEST_LINE,
    MOST_BYTES,
    NOT_NEGATIVE,
    WHOLE_NUMBERS,
    InvalidFilesError,
    SavedTensor,
    TensorRule,
    check_header,
    check_regular,
    header_of,
    one_line,
    read_json,
)

# peft's description of adapters, which tells where their base model is, and the file of their weights
ADAPTER_CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
PROCESSOR_FILE = "preprocessor_config.json"

# what transformers reads of a folder, by itself; the vocabulary of a tokenizer can be large
_DESCRIPTIONS = (
    CONFIG_NAME,
    "generation_config.json",
    PROCESSOR_FILE,
    "processor_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    ADAPTER_CONFIG_FILE,
)
_VOCABULARIES = (
    *("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja"),
    *("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model"),
)
_LARGEST_VOCABULARY = 64 * 2**20

# numbers that take memory before there is a model: dictionaries of classes, and pictures
_MOST_CLASSES, _LARGEST_PICTURE, _SMALLEST_CROP = 200_000, 4096, 0.5
_MOST_OF = dict.fromkeys(("num_labels", "num_classes"), _MOST_CLASSES) | dict.fromkeys(
    (
        *("size", "image_size", "input_size", "test_input_size", "crop_size", "pad_size", "height", "width"),
        *("shortest_edge", "longest_edge", "max_height", "max_width", "size_divisor", "pad_size_divisor"),
    ),
    _LARGEST_PICTURE,
)
_LEAST_OF = dict.fromkeys(("crop_pct", "test_crop_pct"), _SMALLEST_CROP)
# settings by which a configuration makes transformers or timm read files that it chose
_NAMES_OF_OTHER_FILES = ("transformers_weights", "checkpoint_path")
# where a name such as "user/kernel" makes transformers load code from the Hub, and "hf-hub:..." timm a configuration
_NAMES_OF_CODE = ("architecture", "implementation")
# peft matches names with patterns: a repeated group, or many repetitions, can take longer than anyone waits
_SLOW_PATTERN = re.compile(r"\)[*+{]|([*+{][^*+{]*){5}")
# what a number in a configuration may be, however small the weights are: some are no sizes
_ALWAYS_ALLOWED, _ALWAYS_ALLOWED_OF_ADAPTERS = 2**20, 2**12
# a model may have more tensors than its files: some are tied, or cut into parts; buffers are made anew
_SPARE_FACTOR, _SPARE_TENSORS, _SPARE_NUMBERS = 4, 1000, 2**24


def check_readable(folder: str | os.PathLike) -> None:
    """Refuse a folder in which transformers would meet a file that blocks, or is larger than such a file can be."""
    largest = dict.fromkeys(_DESCRIPTIONS, MOST_BYTES) | dict.fromkeys(_VOCABULARIES, _LARGEST_VOCABULARY)
    there = {name: Path(folder) / name for name in largest if (Path(folder) / name).exists()}
    for name, path in there.items():
        check_regular(path, largest[name])
    for name in {PROCESSOR_FILE, "processor_config.json"} & there.keys():
        _check_numbers(read_json(there[name]), there[name], most=2**31)


def read_config(folder: str | os.PathLike, header: Mapping[str, SavedTensor]) -> dict[str, Any]:
    """The `config.json` of a model whose weights have this header, with no number in it that they cannot hold."""
    path = Path(folder) / CONFIG_NAME
    config = read_json(path)
    check_config(config, header, path)
    return config


def check_config(config: Mapping[str, Any], header: Mapping[str, SavedTensor], where: str | os.PathLike) -> None:
    """Refuse a configuration that asks for other files, or has numbers far beyond what weights with this header hold.

    Example:
        >>> check_config({"num_hidden_layers": 10**9}, {"weight": SavedTensor("F32", (3, 4))}, "file")
        Traceback (most recent call last):
        hf_deelbo.sharing.reading.InvalidFilesError: file: num_hidden_layers is 1000000000, where these weights \
allow at most 1,048,576. Download or save it again.
    """
    _check_numbers(config, where, most=max(_ALWAYS_ALLOWED, sum(tensor.size for tensor in header.values())))


def _check_numbers(content: Mapping[str, Any], where: str | os.PathLike, most: int) -> None:
    def refuse(name: str, value: Any, what: str) -> None:
        raise InvalidFilesError.at(where, f"{one_line(name)} is {one_line(str(value))}, {what}")

    to_do = [("", name, value, False) for name, value in content.items()]
    while to_do:
        above, name, value, is_of_code = to_do.pop()
        path = above + name[:LONGEST_LINE]
        is_of_code = is_of_code or any(part in name for part in _NAMES_OF_CODE)
        is_elsewhere = is_of_code and isinstance(value, str) and re.search("[:/]", value)
        if is_elsewhere or (name in _NAMES_OF_OTHER_FILES and value is not None):
            refuse(path, value, "and no files are read but those that were saved")
        if isinstance(value, dict):
            to_do += [(f"{path[-LONGEST_LINE:]}.", inner, part, is_of_code) for inner, part in value.items()]
        elif isinstance(value, list):
            to_do += [(above, name, part, is_of_code) for part in value]
            total = sum(abs(part) for part in value if type(part) is int)
            if total > most:
                refuse(path, f"{total} in all", f"where these weights allow at most {most:,}")
        elif type(value) in (int, float):
            is_count, most_of_it = type(value) is int or name in _MOST_OF, min(most, _MOST_OF.get(name, most))
            if is_count and abs(value) > most_of_it:
                refuse(path, value, f"where these weights allow at most {most_of_it:,}")
            if value < _LEAST_OF.get(name, value):
                refuse(path, value, f"where it must be at least {_LEAST_OF[name]}")


# ---- Weights -------------------------------------------------------------------------------------------------------


def weights_header(folder: str | os.PathLike, hashed: Collection[str]) -> dict[str, SavedTensor]:
    """What the files of a model's weights in `folder` hold, all of which must be among those that are `hashed`."""
    folder = Path(folder)
    if (folder / ADAPTER_CONFIG_FILE).exists():
        what = "transformers would load adapters and another model by it, where a whole model was saved"
        raise InvalidFilesError.at(folder / ADAPTER_CONFIG_FILE, what, "Remove it.")
    if (folder / SAFE_WEIGHTS_NAME).is_file():
        names = [SAFE_WEIGHTS_NAME]
    elif (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        names = _names_in_index(folder / SAFE_WEIGHTS_INDEX_NAME)
    else:
        what = f"it has no {SAFE_WEIGHTS_NAME}, and no other weights are read, pickles least of all"
        raise InvalidFilesError.at(folder, what, "Save the model by `save_pretrained`.")
    _check_hashed(folder, names, hashed)
    return _joined([folder / name for name in names])


def adapters_header(folder: str | os.PathLike, hashed: Collection[str]) -> dict[str, SavedTensor]:
    """What the file of adapters in `folder` holds, whose description asks for no more; both must be `hashed`."""
    folder = Path(folder)
    check_readable(folder)
    _check_hashed(folder, [ADAPTER_CONFIG_FILE, ADAPTER_FILE], hashed)
    header, path = header_of(folder / ADAPTER_FILE), folder / ADAPTER_CONFIG_FILE
    check_header(header, {name: TensorRule() for name in header}, folder / ADAPTER_FILE)
    # their rank is a side of a tensor
    longest = max((length for tensor in header.values() for length in tensor.shape), default=0)
    described = read_json(path)
    _check_numbers(described, path, most=max(_ALWAYS_ALLOWED_OF_ADAPTERS, longest))
    for text in _texts_in(described):
        if _SLOW_PATTERN.search(text):
            what = f"{one_line(text)!r} as a pattern of names could take for ever"
            raise InvalidFilesError.at(path, what, "Name the modules in a list.")
    return header


def _texts_in(content: Any) -> Iterator[str]:
    """All of a JSON's keys and values that are texts."""
    to_do = [content]
    while to_do:
        value = to_do.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            to_do += [*value, *value.values()]
        elif isinstance(value, list):
            to_do += value


def _check_hashed(folder: Path, names: list[str], hashed: Collection[str]) -> None:
    for name in names:
        if name not in hashed:
            raise InvalidFilesError.at(folder / name, "it has no hash, so that nobody knows what was saved")


def header_of_base(name_or_path: str, **hub_options: Any) -> dict[str, SavedTensor]:
    """What the weights of a model hold that is a folder or on the Hub; nothing if it has no safetensors.

    Args:
        name_or_path: a folder, or an id on the Hub.
        **hub_options: of `from_pretrained`.
    """

    def found(name: str) -> Path | None:
        path = cached_file(name_or_path, name, _raise_exceptions_for_missing_entries=False, **hub_options)
        return path and Path(path)

    if path := found(SAFE_WEIGHTS_NAME):
        return _joined([path])
    index = found(SAFE_WEIGHTS_INDEX_NAME)
    return {} if index is None else _joined([path for name in _names_in_index(index) if (path := found(name))])


def _names_in_index(path: Path) -> list[str]:
    names = read_json(path).get("weight_map")
    names = set(names.values()) if isinstance(names, dict) and all(map(_is_text, names.values())) else set()
    if not names:
        raise InvalidFilesError.at(path, "it names no files of weights")
    for name in sorted(names):
        if name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise InvalidFilesError.at(
                path, f"{one_line(name)!r} is not the name of a safetensors file in the same folder"
            )
    return sorted(names)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _joined(paths: list[Path]) -> dict[str, SavedTensor]:
    joined: dict[str, SavedTensor] = {}
    for path in paths:
        header = header_of(path)
        for name, (dtype, _) in header.items():
            if dtype not in FLOATS and dtype not in WHOLE_NUMBERS:
                what = f"the tensor {one_line(name)!r} is of type {one_line(dtype)}, which no weights have"
                raise InvalidFilesError.at(path, what)
            if name in joined:
                raise InvalidFilesError.at(path, f"the tensor {one_line(name)!r} is in another file too")
        joined |= header
    return joined


@contextmanager
def no_larger_than(header: Mapping[str, SavedTensor], where: str | os.PathLike) -> Iterator[None]:
    """Stop building a model, in this thread, as soon as it is much larger than the weights that are there for it.

    Transformers builds it without memory (on the device "meta"), so that even a matrix of 10^9 rows costs nothing
    before it is counted.

    Example:
        >>> with no_larger_than({"weight": SavedTensor("F32", (3, 4))}, "folder"), torch.device("meta"):
        ...     nn.Linear(10**6, 10**6)
        Traceback (most recent call last):
        hf_deelbo.sharing.reading.InvalidFilesError: folder: its configuration asks for a model of \
1,000,000,000,000 numbers or more, where the weights hold 12. Download or save it again.
    """
    thread, tensors, numbers = threading.get_ident(), 0, 0
    held = sum(tensor.size for tensor in header.values())

    def count(module: nn.Module, name: str, tensor: torch.Tensor | None) -> None:
        nonlocal tensors, numbers
        if tensor is None or threading.get_ident() != thread:
            return
        tensors, numbers = tensors + 1, numbers + tensor.numel()
        if numbers > _SPARE_FACTOR * held + _SPARE_NUMBERS:
            built, there = f"{numbers:,} numbers", f"{held:,}"
        elif tensors > _SPARE_FACTOR * len(header) + _SPARE_TENSORS:
            built, there = f"{tensors:,} tensors", f"{len(header):,}"
        else:
            return
        what = f"its configuration asks for a model of {built} or more, where the weights hold {there}"
        raise InvalidFilesError.at(where, what)

    with ExitStack() as hooks:
        for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
            hooks.callback(register(count).remove)
        yield


def check_weights(model: nn.Module, header: Mapping[str, SavedTensor], where: str | os.PathLike) -> None:
    """Of a model that was loaded from files with this header: whole numbers only where they belong, no nan, signs."""
    state = model.state_dict()
    # saved names may differ from the model's in all but the last word
    of_whole_numbers = {name.rpartition(".")[2] for name, tensor in state.items() if not tensor.is_floating_point()}
    for name, (dtype, _) in header.items():
        if dtype not in FLOATS and name.rpartition(".")[2] not in of_whole_numbers:
            what = f"the tensor {one_line(name)!r} must be of type {', '.join(FLOATS)}, and is {dtype}"
            raise InvalidFilesError.at(where, what)
    variances = {f"{name}.running_var".lstrip(".") for name in batch_norm_layers(model)}
    for name, tensor in state.items():
        TensorRule(**(NOT_NEGATIVE if name in variances else {})).check(name, tensor, where)
