"""The trainable parameters of a model by name, and which of them are the head V; the others are the backbone w."""

from collections.abc import Collection, Iterable

import torch
from torch import nn

from .blocks import parameters_by_name, values_of

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


def backbone_of(model: nn.Module, head_names: Iterable[str]) -> dict[str, torch.Tensor]:
    """What the trainable parameters hold, by name, but for those named, which are the head.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))
        >>> list(backbone_of(model, ["1.weight", "1.bias"]))
        ['0.weight', '0.bias']
    """
    head = set(head_names)
    return {name: w for name, w in values_of(parameters_by_name(model)).items() if name not in head}


def last_linear(model: nn.Module, head_names: Collection[str]) -> nn.Linear:
    """The layer that computes the logits: the linear layer of the head with one output for each class.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> last_linear(model, [name for name, _ in model.named_parameters()])
        Linear(in_features=8, out_features=2, bias=True)
    """
    of_head = {name.rpartition(".")[0] for name in head_names}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    found = [module for name, module in linear.items() if name in of_head]
    num_classes = getattr(getattr(model, "config", None), "num_labels", found[-1].out_features if found else None)
    found = [module for module in found if module.out_features == num_classes]
    if not found:
        raise ValueError(
            f"model: the head of {type(model).__name__} has no linear layer that computes its logits, so no layer can "
            "be scaled; use `predict_proba`."
        )
    return found[-1]


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
