"""A low-rank prior as files, in the folder of a transformers repository that holds its mean, or alone.

| file                | holds                                                                                  |
|---------------------|----------------------------------------------------------------------------------------|
| `prior_config.json` | `PriorConfig`: K, eps, D_w, what checks the tensors, where it comes from, the hashes   |
| `prior.safetensors` | `mean.<name>`, `diagonal.<name>` (S_diag) and `deviations.<name>` (Q) of the backbone  |
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.dataclasses import strict

from ..priors import LowRankGaussian
from ..weights.blocks import Tensors
from .hub import (
    InvalidFilesError,
    SavedConfig,
    by_first_word,
    hashes_of,
    load_tensors,
    save_tensors,
)


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
    try:
        parts = by_first_word(load_tensors(Path(folder) / config.TENSORS_FILE), ("mean", "diagonal", "deviations"))
        if unknown := parts.pop(""):
            raise KeyError(next(iter(unknown)).partition(".")[0])
        if like is not None and like.keys() == parts["mean"].keys():
            parts = {
                part: {name: tensors[name].to(w.device) for name, w in like.items()} for part, tensors in parts.items()
            }
        prior = prior_class(**parts, eps=config.eps)
        for name in ("rank", "num_parameters", "trace_inverse", "log_det"):
            stated, value = getattr(config, name), float(getattr(prior, name))
            if not math.isclose(stated, value, rel_tol=1e-6, abs_tol=1e-6):
                raise ValueError(f"{name} is stated as {stated}, but is {value}")
    except (ValueError, KeyError, StopIteration) as error:
        raise InvalidFilesError(
            f"{os.fspath(folder)}: the files of the prior do not fit each other ({error}). Download or save it again."
        ) from error
    return prior
