"""Which of a model's parameters are its head V, the others being the backbone w; and models in eval mode."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

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
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = _named_head(base, head_names) if head_names is not None else _found_head(base)
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) in head]


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
