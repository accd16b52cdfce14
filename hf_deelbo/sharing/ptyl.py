"""Priors in the files that "Pre-Train Your Loss" (PTYL, Shwartz-Ziv et al. 2022) released."""

import os
import pickletools
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageClassification, PreTrainedModel
from transformers.utils import logging

from ..priors import MOST_DEVIATIONS
from ..weights.parameters import head_parameter_names
from .priors import LowRankPrior
from .reading import NOT_NEGATIVE, InvalidFilesError, TensorRule, blaming, check_regular, one_line

logger = logging.get_logger(__name__)

FILES = ("model", "mean", "variance", "covmat")
_PLAIN = "Use a file of plain tensors, as `torch.save` writes it since torch 1.6."
_LONGEST_NAME = 1000  # all of its prefixes are tried
_MOST_PICKLED_BYTES = 2**20  # without the numbers, which lie beside it: some thousand tensors
_IS_OF_TENSORS = re.compile(
    r"collections OrderedDict|torch \w+Storage|torch\._utils _rebuild_(tensor_v2|parameter)", flags=re.ASCII
)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHAT_TO_DO = "Use a model of the architecture that the prior is for, and check `head_names`."


def load_ptyl(
    folder: str | os.PathLike,
    model: nn.Module,
    name: str | None = None,
    *,
    head_names: Iterable[str] | None = None,
    num_deviations: int = 5,
    eps: float = 0.1,
) -> tuple[LowRankPrior, nn.Module]:
    """Read a released prior for the backbone of `model`, and put the weights it belongs to into the model.

    | file                | holds                                                        |
    |---------------------|--------------------------------------------------------------|
    | `{name}_model.pt`   | state dict of the backbone, batch-norm statistics included   |
    | `{name}_mean.pt`    | mu, D numbers in the order of the backbone's parameters      |
    | `{name}_variance.pt`| S_diag, likewise                                             |
    | `{name}_covmat.pt`  | Q^T, K x D                                                   |

    The prior is N(mu, lambda Sigma_p) with Sigma_p = S_diag/2 + eps I + Q Q^T / (2K - 2). Files made by supervised and
    by self-supervised pretraining (SimCLR) look the same; those released are for torchvision's ResNet-50 (also timm's,
    and transformers' wrapper of it), D = 23,508,032. The names in the state dict, less a prefix, must be those of the
    model, in the same order: flat numbers say nothing of where they belong.

    Args:
        folder: where the files are.
        model: a model of that architecture, with a head of its own, which is left as it is.
        name: what the files' names start with; not needed if the folder has only one such set.
        head_names: modules or parameters that form the head; found if not given, `[]` for a model without one.
        num_deviations: K; the first so many of the file's deviations are used, 5 as in the paper.
        eps: what is added to the diagonal.

    Returns:
        The prior, and the model itself.

    Example:
        ```python
        model = load_classifier("timm/resnet50.a1_in1k", class_names)
        prior, model = load_ptyl("resnet50_torchvision", model)
        trainer = DEELBoTrainer(model, DEELBoConfig("outputs", prior="ptyl"), train_dataset=train, prior=prior)
        ```
    """
    paths = _paths(Path(folder), name)
    head = head_parameter_names(model, head_names)
    backbone = {name: parameter for name, parameter in model.named_parameters() if name not in head}
    prior = _read_prior(paths, backbone, num_deviations, eps)
    weights = _weights_by_own_name(paths["model"], model, backbone, head)
    model.load_state_dict(weights, strict=False)
    return prior, model


def _paths(folder: Path, name: str | None) -> dict[str, Path]:
    """The four files; an error says which are missing."""
    found = sorted({path.name.rsplit("_", 1)[0] for part in FILES for path in folder.glob(f"*_{part}.pt")})
    if name is None and len(found) != 1:
        raise ValueError(
            f"name: {folder} has files of {len(found)} priors ({', '.join(found) or 'none'}), so say which one; it is "
            "what comes before _mean.pt."
        )
    name = found[0] if name is None else name
    paths = {part: folder / f"{name}_{part}.pt" for part in FILES}
    missing = [path.name for path in paths.values() if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"folder: {folder} lacks {', '.join(missing)} of the prior {name!r}. Found: {', '.join(found) or 'none'}."
        )
    return paths


def _read(path: Path, kind: type) -> Any:
    """The tensors in a file of `torch.save`, which is refused if it holds anything else or grows in being read."""
    size = check_regular(path)
    with blaming(path, "it is broken", _PLAIN), zipfile.ZipFile(path) as records:
        parts = records.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise ValueError("its parts are compressed")
        if sum(part.file_size for part in parts) > size:
            raise ValueError("its parts lie in each other")
        pickled = [part for part in parts if part.filename.endswith(".pkl")]
        if sum(part.file_size for part in pickled) > _MOST_PICKLED_BYTES:
            raise ValueError("its description is too large")
        called = {str(name) for part in pickled for name in _called_by(records.read(part))}
    with blaming(path, "it holds more than tensors, and was not loaded, as that could run code from the file", _PLAIN):
        if unknown := sorted(name for name in called if not _IS_OF_TENSORS.fullmatch(name)):
            raise ValueError(unknown[0])
        value = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(value, kind):
        raise ValueError(f"{path.name}: expected a {kind.__name__}, found a {type(value).__name__}.")
    for name, tensor in value.items() if isinstance(value, dict) else [(path.name, value)]:
        if not (isinstance(name, str) and len(name) <= _LONGEST_NAME and isinstance(tensor, torch.Tensor)):
            raise InvalidFilesError.at(path, f"{one_line(str(name))!r} is no tensor, or no name of one", _PLAIN)
    return value


def _called_by(pickled: bytes) -> Iterator[str]:
    """What a pickle calls by name; torch allows more than tensors need, such as `bytearray(10**11)`."""
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name in ("GLOBAL", "INST", "STACK_GLOBAL") or operation.name.startswith("EXT"):
            yield argument or operation.name


def _check_numbers(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Real and finite, and as many as they say; a few bytes can stand for 10^9 equal rows."""
    for name, tensor in tensors.items():
        is_count = name.endswith("num_batches_tracked")
        if tensor.layout != torch.strided or not (is_count or tensor.dtype in _FLOATS):
            raise InvalidFilesError.at(path, f"{one_line(name)!r} is of type {tensor.dtype}, {tensor.layout}", _PLAIN)
        TensorRule(**(NOT_NEGATIVE if name.endswith("running_var") else {})).check(name, tensor, path)


def _read_prior(
    paths: Mapping[str, Path], backbone: Mapping[str, nn.Parameter], num_deviations: int, eps: float
) -> LowRankPrior:
    if not 2 <= num_deviations <= MOST_DEVIATIONS:
        raise ValueError(f"num_deviations: must be 2 to {MOST_DEVIATIONS:,}, got {num_deviations}.")
    size = sum(parameter.numel() for parameter in backbone.values())
    mean, variance, covmat = (_read(paths[part], torch.Tensor) for part in ("mean", "variance", "covmat"))
    for part, vector in (("mean", mean), ("variance", variance)):
        if vector.shape != (size,):
            raise ValueError(
                f"{paths[part].name}: expected D = {size:,} numbers, found {tuple(vector.shape)}. {_WHAT_TO_DO}"
            )
    if covmat.dim() != 2 or covmat.shape[1] != size or covmat.shape[0] < num_deviations:
        raise ValueError(
            f"{paths['covmat'].name}: expected K x D with K >= {num_deviations} (`num_deviations`) and D = {size:,}, "
            f"found {tuple(covmat.shape)}. {_WHAT_TO_DO}"
        )
    deviations = covmat[:num_deviations]
    for part, tensor in (("mean", mean), ("variance", variance), ("covmat", deviations)):
        _check_numbers({part: tensor}, paths[part])
    return LowRankPrior(_split(mean, backbone), _split(variance, backbone), _split(deviations, backbone), eps)


def _split(flat: torch.Tensor, backbone: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The last dimension by parameter, in the model's order; copies, so that the file's memory can be freed."""
    parts = flat.split([parameter.numel() for parameter in backbone.values()], dim=-1)
    return {
        name: part.reshape(*flat.shape[:-1], *parameter.shape).to(parameter.device, copy=True)
        for (name, parameter), part in zip(backbone.items(), parts, strict=True)
    }


def _weights_by_own_name(
    path: Path, model: nn.Module, backbone: Mapping[str, nn.Parameter], head: list[str]
) -> dict[str, torch.Tensor]:
    """The state dict in the file, under the model's names; a `ValueError` says what does not match."""
    weights = _renamed(_read(path, dict), list(backbone), path)
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in head}
    missing = [name for name in own if name not in weights and not name.endswith(".num_batches_tracked")]
    shapes = [name for name in own if name in weights and weights[name].shape != own[name].shape]
    if missing or shapes:
        name = (missing or shapes)[0]
        found = tuple(weights[name].shape) if name in weights else "nothing"
        raise ValueError(
            f"{path.name}: expected {name!r} of shape {tuple(own[name].shape)}, found {found} ({len(missing)} tensors "
            f"missing, {len(shapes)} of other shapes). {_WHAT_TO_DO}"
        )
    _check_numbers({name: tensor for name, tensor in weights.items() if name in own}, path)
    order = [name for name in weights if name in backbone]
    if order != list(backbone):
        name, other = next((one, two) for one, two in zip(backbone, order, strict=True) if one != two)
        raise ValueError(
            f"{path.name}: its parameters come in another order, {other!r} where the model has {name!r}, and the flat "
            f"numbers of the prior with them. {_WHAT_TO_DO}"
        )
    unused = [name for name in weights if name not in own]
    if unused:
        logger.warning(f"{path.name}: {len(unused)} tensors are not of the backbone and left out: {unused[:3]}.")
    return {name: tensor for name, tensor in weights.items() if name in own}


def _renamed(weights: Mapping[str, torch.Tensor], names: list[str], path: Path) -> dict[str, torch.Tensor]:
    """`weights` with the prefix of the model's names (`timm_model.`) in place of the file's (`module.backbone.`)."""
    for theirs in _prefixes(next(iter(weights), "")):
        for ours in _prefixes(names[0]):
            if all(name.startswith(ours) and theirs + name.removeprefix(ours) in weights for name in names):
                return {
                    ours + name.removeprefix(theirs) if name.startswith(theirs) else name: tensor
                    for name, tensor in weights.items()
                }
    raise ValueError(
        f"{path.name}: its names ({', '.join(list(weights)[:3])}, ...) are not those of the model's backbone "
        f"({', '.join(names[:3])}, ...), with or without a prefix. {_WHAT_TO_DO}"
    )


def _prefixes(name: str) -> Iterator[str]:
    """Nothing, the first module, the first two, ...

    Example:
        >>> list(_prefixes("module.backbone.weight"))
        ['', 'module.', 'module.backbone.']
    """
    parts = name.split(".")
    for length in range(len(parts)):
        yield "".join(f"{part}." for part in parts[:length])


def load_architecture(name: str) -> PreTrainedModel:
    """A classifier whose weights are to be replaced: an architecture of timm, untrained, or any pretrained model.

    Example:
        >>> load_architecture("resnet10t").timm_model.conv1[0].weight.shape
        torch.Size([24, 3, 3, 3])
    """
    import timm  # they take a second
    from transformers import TimmWrapperConfig

    if name in timm.list_models():
        return AutoModelForImageClassification.from_config(TimmWrapperConfig(architecture=name))
    return AutoModelForImageClassification.from_pretrained(
        name, num_labels=2, ignore_mismatched_sizes=True, dtype=torch.float32
    )
