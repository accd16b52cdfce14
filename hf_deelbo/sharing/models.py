"""The models that are saved and loaded: by which class, and adapters with their base."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.utils import CONFIG_NAME, logging

from ..weights.parameters import base_of, has_adapters, parameters_by_name
from ..weights.shards import class_of, is_sharded
from .hub import public_name
from .model_files import (
    ADAPTER_FILE,
    check_readable,
    check_weights,
    no_larger_than,
    read_config,
    weights_header,
)
from .reading import SavedTensor, blaming

# what a saved classifier is loaded with, and what the Hub calls its task
TASK_OF = {
    AutoModelForImageClassification: "image-classification",
    AutoModelForSequenceClassification: "text-classification",
}
AUTO_CLASSES = {kind.__name__: kind for kind in TASK_OF}
# what peft calls an adapter
ADAPTER = "default"


def auto_class_of(model: nn.Module) -> type | None:
    """The transformers class that loads such a model again (of adapters, their base), or `None` if none does.

    Example:
        >>> auto_class_of(nn.Linear(1, 1)) is None
        True
    """
    return None if why_not_loadable(model) else _auto_class_of(base_of(model))


def why_not_loadable(model: nn.Module) -> str | None:
    """Why `save_pretrained` would write files that nothing could load again, or `None` if all is well."""
    base = base_of(model)
    if _auto_class_of(base) is None:
        return (
            f"{class_of(base).__name__} is no transformers classifier of images or text, and could not be loaded "
            "again by name. Wrap a timm model (`TimmWrapperForImageClassification`), or keep `state_dict()`"
        )
    if getattr(base, "_hf_peft_config_loaded", False):
        return "the adapters were added by transformers. Add them by peft's `get_peft_model(model, config)`"
    return _why_adapters_are_not_loadable(model) if has_adapters(model) else None


def _auto_class_of(model: nn.Module) -> type | None:
    config = getattr(model, "config", None)
    for auto_class in AUTO_CLASSES.values():
        if type(config) in auto_class._model_mapping:
            loaded = auto_class._model_mapping[type(config)]
            if class_of(model) in (loaded if isinstance(loaded, tuple) else (loaded,)):
                return auto_class
    return None


def load_mean(
    folder: str | os.PathLike, auto_class: str | None, hashed: Collection[str], trust_remote_code: bool = False
) -> PreTrainedModel:
    """The classifier that `save_pretrained` wrote into `folder`, all of it: no weight is missing, new or left over.

    Args:
        folder: a local folder.
        auto_class: a name in `AUTO_CLASSES`.
        hashed: the files whose hash is known; all weights must be in these.
        trust_remote_code: as for `from_pretrained`.
    """
    if auto_class not in AUTO_CLASSES:
        raise ValueError(f"auto_class: cannot load a model by {auto_class!r}; known are {', '.join(AUTO_CLASSES)}")
    check_readable(folder)
    header = weights_header(folder, hashed)
    read_config(folder, header)
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    with blaming(os.path.join(folder, CONFIG_NAME)):
        config = AutoConfig.from_pretrained(folder, **options)
    with no_larger_than(header, folder):
        model, report = AUTO_CLASSES[auto_class].from_pretrained(
            folder, config=config, use_safetensors=True, output_loading_info=True, **options
        )
    for what, names in report.items():
        if names:
            raise ValueError(f"the weights of the model do not fit its config.json: {what} {sorted(names)[0]}")
    check_weights(model, header, folder)
    return model


# ---- Adapters ------------------------------------------------------------------------------------------------------


def source_of(model: nn.Module) -> tuple[str | None, str | None]:
    """The folder, or the id on the Hub, that a model was loaded from, and the commit there, if it is known.

    Of adapters, those of their base model: what they say, or else the commit of the default branch in the cache.
    """
    config = getattr(model, "config", None)
    name, commit = getattr(config, "name_or_path", None) or None, getattr(config, "_commit_hash", None)
    if not has_adapters(model):
        return name, commit
    stated = model.active_peft_config
    if stated.base_model_name_or_path not in (None, "", name):
        name, commit = stated.base_model_name_or_path, None
    return name, commit or stated.revision or _cached_commit(name)


def _cached_commit(name: str | None) -> str | None:
    path = try_to_load_from_cache(name, CONFIG_NAME) if public_name(name) else None
    return Path(path).parent.name if isinstance(path, str) else None


def frozen_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of a model with adapters: what a loaded base model must hold again, by name."""
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and _is_used(name)
    }


def loose_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of a model with adapters: what neither these nor the files of a base model may hold.

    That are buffers, such as batch-norm statistics, which training moves, and a frozen part of the head, which may
    have been drawn when the model was loaded.
    """
    base = base_of(model)
    of_backbone = {id(parameter) for parameter in base.base_model.parameters()}
    frozen_head = {
        name
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad and id(parameter) not in of_backbone
    }
    buffers = {name for name, _ in model.named_buffers()}
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if (name in frozen_head or name in buffers) and _is_used(name)
    }


def load_loose_tensors(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put back the `loose_tensors` of a model with adapters, all of them."""
    for name, tensor in loose_tensors(model).items():
        tensor.copy_(tensors[name])


def load_base(name_or_path: str, auto_class: str, config: Mapping[str, Any], **kwargs: Any) -> PreTrainedModel:
    """The base model of adapters, as it was when they were trained; no code of its repository is run.

    Args:
        name_or_path: a folder, or an id on the Hub.
        auto_class: a name in `AUTO_CLASSES`.
        config: of the model that was trained, with its labels.
        **kwargs: of `from_pretrained`: `revision`, `token`, `cache_dir`, `local_files_only`.
    """
    config = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would report that the head is new; adapters have their own
    try:
        model = AUTO_CLASSES[auto_class].from_pretrained(
            name_or_path, config=config, ignore_mismatched_sizes=True, use_safetensors=True, **kwargs
        )
    finally:
        logging.set_verbosity(verbosity)
    model.config._commit_hash = kwargs.get("revision")
    return model


def load_adapters(base: PreTrainedModel, folder: str | os.PathLike, header: Mapping[str, SavedTensor]) -> nn.Module:
    """The base model with the trainable adapters that peft's `save_pretrained` wrote into `folder`, all of them.

    Args:
        base: the model that they belong to.
        folder: a local folder.
        header: what `model_files.adapters_header` found there.
    """
    peft = import_peft()
    with no_larger_than(header, folder):
        model = peft.PeftModel.from_pretrained(base, os.fspath(folder), is_trainable=True, torch_device="cpu")
    stated = model.peft_config[ADAPTER]
    if stated.base_model_name_or_path != base.name_or_path:  # it was moved
        stated.base_model_name_or_path, stated.revision = base.name_or_path, None
    if missing := sorted(_adapter_state(model).keys() - header.keys()):
        raise ValueError(f"{ADAPTER_FILE} has no {missing[0]}")
    check_weights(model, header, folder)
    return model.eval()  # as all that `from_pretrained` returns


def import_peft() -> ModuleType:
    """The package of adapters, or an `ImportError` that says how to get it."""
    try:
        import peft
    except ImportError as error:
        raise ImportError("Adapters come with a package: pip install peft.") from error
    return peft


def _why_adapters_are_not_loadable(model: nn.Module) -> str | None:
    if list(model.peft_config) != [ADAPTER] or model.active_peft_config.is_prompt_learning:
        return f"it takes one adapter of weights, called {ADAPTER!r}. Make it by `peft.get_peft_model(model, config)`"
    if is_sharded(model):
        return "sharded adapters are not supported"
    if source_of(model)[0] is None:
        return (
            "the base model of the adapters has no name, so that it could not be loaded again. Save it into a folder "
            "and load it from there before adding adapters"
        )
    saved = {tensor.data_ptr() for tensor in _adapter_state(model).values()}
    for name, parameter in parameters_by_name(model).items():
        if parameter.data_ptr() not in saved:
            return f"{name!r} is trained, but is no part of the adapters. Name its module in `modules_to_save`"
    return None


def _adapter_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What peft saves, under the names in its file."""
    return import_peft().get_peft_model_state_dict(model, save_embedding_layers=False)


def _is_used(name: str) -> bool:
    """Not by the module that peft keeps beside a trained copy of it."""
    return ".original_module." not in name
