"""Which parameters share a sigma and a prior variance, and how sigma may be learned."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

GROUPINGS = ("all", "part", "layer", "tensor")
SIGMA_UPDATES = ("closed-form", "optimizer")
MOST_LINES = 30


class Group(NamedTuple):
    """Parameters of the backbone, or of the head, with one prior variance (lambda or tau).

    Attributes:
        name: `"backbone"`, `"head"`, or what the names of its parameters have in common.
        parameters: their names.
        num_parameters: D_g, how many numbers they are.
        in_head: whether they are V, not w.
    """

    name: str
    parameters: tuple[str, ...]
    num_parameters: int
    in_head: bool


def groups_of(
    shapes: Mapping[str, torch.Size], head_names: Collection[str], grouping: str, whole_backbone: bool = False
) -> list[Group]:
    """Cut the parameters into groups: those of the backbone first, each part in the order of its parameters.

    Args:
        shapes: of all trainable parameters, by name.
        head_names: which of them are the head.
        grouping: `"tensor"` makes each a group, `"layer"` those of a numbered layer or of another module near the
            top, `"part"` and `"all"` backbone and head.
        whole_backbone: keep the backbone in one group whatever the grouping.

    Example:
        >>> names = ["bert.embeddings.LayerNorm.bias", "bert.encoder.layer.0.output.dense.weight", "classifier.bias"]
        >>> shapes = dict.fromkeys(names, torch.Size([2, 2]))
        >>> [group.name for group in groups_of(shapes, ["classifier.bias"], "layer")]
        ['bert.embeddings', 'bert.encoder.layer.0', 'classifier']
    """
    if grouping not in GROUPINGS:
        raise ValueError(f"grouping: unknown value {grouping!r}; choose one of {', '.join(GROUPINGS)}.")
    members: dict[tuple[bool, str], list[str]] = {}
    for in_head in (False, True):
        for name in shapes:
            if (name in head_names) == in_head and shapes[name].numel():
                group_name = _group_name(name, in_head, "part" if whole_backbone and not in_head else grouping)
                members.setdefault((in_head, group_name), []).append(name)
    return [
        Group(group_name, tuple(names), sum(shapes[name].numel() for name in names), in_head)
        for (in_head, group_name), names in members.items()
    ]


def _group_name(name: str, in_head: bool, grouping: str) -> str:
    if grouping == "tensor":
        return name
    if grouping == "layer":
        return layer_of(name)
    return "head" if in_head else "backbone"


def layer_of(name: str) -> str:
    """The layer of a parameter: its name up to the first number, or else the module below the top one.

    Example:
        >>> layer_of("timm_model.blocks.2.0.conv_pw.weight"), layer_of("vit.embeddings.patch_embeddings.bias")
        ('timm_model.blocks.2', 'vit.embeddings')
        >>> layer_of("classifier.weight")
        'classifier'
    """
    modules: Sequence[str] = name.split(".")[:-1]
    numbers = [index for index, module in enumerate(modules) if module.isdigit()]
    return ".".join(modules[: numbers[0] + 1] if numbers else modules[:2]) or name


def table_lines(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What each group learned, in the order of the layers; of more than `MOST_LINES`, those of most weights.

    Args:
        groups: rows of `GaussianPosterior.group_table`.

    Example:
        >>> learned = {"num_parameters": 1000, "sigma": 0.002, "prior_variance": 9e-6}
        >>> rows = [{"name": "stem", "in_head": False} | learned, {"name": "fc", "in_head": True} | learned]
        >>> for line in table_lines(rows):
        ...     print(line)
        group      weights  sigma  sqrt(lambda or tau)
        stem         1,000  0.002                0.003
        fc (head)    1,000  0.002                0.003
    """
    by_size = sorted(range(len(groups)), key=lambda index: -groups[index]["num_parameters"])
    rows = [("group", "weights", "sigma", "sqrt(lambda or tau)")]
    for index in sorted(by_size[:MOST_LINES]):
        row = groups[index]
        width = math.sqrt(row["prior_variance"])
        name = row["name"] + (" (head)" if row["in_head"] else "")
        rows.append((name, f"{row['num_parameters']:,}", f"{row['sigma']:.4g}", f"{width:.4g}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers in rows:
        aligned = [f"{number:>{width}}" for number, width in zip(numbers, widths[1:], strict=True)]
        yield "  ".join([f"{name:{widths[0]}}", *aligned])
    if len(groups) > MOST_LINES:
        yield f"and {len(groups) - MOST_LINES} more"
