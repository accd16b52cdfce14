"""A low-rank prior as files, in the folder of a transformers repository that holds its mean, or alone.

| file                | holds                                                                                  |
|---------------------|----------------------------------------------------------------------------------------|
| `prior_config.json` | `PriorConfig`: K, eps, D_w, what checks the tensors, where it comes from, the hashes   |
| `prior.safetensors` | `mean.<name>`, `diagonal.<name>` (S_diag) and `deviations.<name>` (Q) of the backbone  |
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.dataclasses import strict

from ..priors import MOST_DEVIATIONS, LowRankGaussian
from ..weights.blocks import Tensors
from .hub import SavedConfig, by_first_word, hashes_of, save_tensors
from .reading import SavedTensor, TensorRule, blaming, header_of, read_tensors


@strict
@dataclass(kw_only=True)
class PriorConfig(SavedConfig):
    """What `prior_config.json` says of a prior; its numbers are checked against the tensors when it is loaded.

    Attributes:
        kind: `"ptyl"`.
        rank: K.
        eps: what is added to the diagonal.
        num_parameters: D_w.
        trace_inverse, log_det: tr(Sigma_p^-1) and log det Sigma_p.
    """

    CONFIG_FILE = "prior_config.json"
    TENSORS_FILE = "prior.safetensors"
    WHAT = "prior"

    kind: str
    rank: int
    eps: float
    num_parameters: int
    trace_inverse: float
    log_det: float

    def validate_numbers(self) -> None:
        """The kind that is known, and finite numbers."""
        if self.kind != "ptyl":
            raise ValueError(f"kind: a saved prior is of kind 'ptyl', got {self.kind!r}.")
        for name in ("eps", "trace_inverse", "log_det"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}: must be a finite number, got {getattr(self, name)}.")
        if not 2 <= self.rank <= MOST_DEVIATIONS:
            raise ValueError(f"rank: must be 2 to {MOST_DEVIATIONS:,}, got {self.rank}.")
        if self.num_parameters < 1:
            raise ValueError(f"num_parameters: must be at least 1, got {self.num_parameters}.")


def write_prior(prior: LowRankGaussian, folder: str | os.PathLike) -> None:
    """Write `prior.safetensors` and `prior_config.json` into a folder."""
    save_tensors(prior.state_dict(), Path(folder) / PriorConfig.TENSORS_FILE)
    PriorConfig(
        sha256=hashes_of(folder),
        kind=prior.config["kind"],
        rank=prior.rank,
        eps=prior.eps,
        num_parameters=prior.num_parameters,
        trace_inverse=float(prior.trace_inverse),
        log_det=float(prior.log_det),
    ).save(folder)


def read_prior(
    folder: str | os.PathLike, config: PriorConfig, prior_class: type[LowRankGaussian], like: Tensors | None = None
) -> LowRankGaussian:
    """The prior that was saved into a local folder; `InvalidFilesError` says what is wrong with its files.

    Args:
        folder: where it was saved.
        config: what its JSON file says.
        prior_class: `LowRankPrior`.
        like: weights by name, whose order and device it gets if it is over them: sums depend on both in their last
            bit.
    """
    config.check_files(folder)
    path = Path(folder) / config.TENSORS_FILE
    with blaming(folder, "the files of the prior do not fit each other"):
        parts = by_first_word(read_tensors(path, _rules(header_of(path), config)), _PARTS)
        del parts[""]
        if like is not None and like.keys() == parts["mean"].keys():
            parts = {
                part: {name: tensors[name].to(w.device) for name, w in like.items()} for part, tensors in parts.items()
            }
        prior = prior_class(**parts, eps=config.eps)
        for name in ("rank", "num_parameters", "trace_inverse", "log_det"):
            stated, value = getattr(config, name), float(getattr(prior, name))
            if not math.isclose(stated, value, rel_tol=1e-6, abs_tol=1e-6):
                raise ValueError(f"{name} is stated as {stated}, but is {value}")
    return prior


_PARTS = ("mean", "diagonal", "deviations")


def _rules(header: Mapping[str, SavedTensor], config: PriorConfig) -> dict[str, TensorRule]:
    """What must be in `prior.safetensors`, if its means are those of the backbone."""
    shapes = {name.removeprefix("mean."): saved.shape for name, saved in header.items() if name.startswith("mean.")}
    ranks = {saved.shape[:1] for name, saved in header.items() if name.startswith("deviations.")}
    for rank in ranks - {(config.rank,)}:
        raise ValueError(f"rank is stated as {config.rank}, but is {', '.join(map(str, rank))}")
    return {
        f"{part}.{name}": TensorRule((config.rank, *shape) if part == "deviations" else shape)
        for part in _PARTS
        for name, shape in shapes.items()
    }
