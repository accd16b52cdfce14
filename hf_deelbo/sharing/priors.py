"""Priors that are saved: PTYL's with files, the Hub and a card; and the backbone's prior by its name."""

import os
from pathlib import Path
from typing import Any, Self

from transformers import PreTrainedModel
from transformers.utils import logging

from ..priors import GaussianPrior, IsotropicPrior, LowRankGaussian, prior_from
from ..weights.blocks import Tensors
from .cards import PriorCardData, save_card
from .files import replaced_together
from .hub import Shareable, library_versions
from .models import TASK_OF, auto_class_of
from .posteriors import GaussianPosterior
from .prior_files import PriorConfig, read_prior, write_prior

logger = logging.get_logger(__name__)


class LowRankPrior(LowRankGaussian, Shareable):
    """`LowRankGaussian`, which holds the mathematics, with files, the Hub and a card: PTYL's prior.

    Example:
        ```python
        prior = LowRankPrior.from_pretrained("user/prior")
        prior.save_pretrained("folder", model=model)
        ```
    """

    config_class = PriorConfig

    def save_pretrained(
        self, folder: str | os.PathLike, model: PreTrainedModel | None = None, processing_class: Any = None
    ) -> None:
        """Save it as `prior.safetensors` and `prior_config.json`; see `prior_files`.

        A crash or a full disk leaves what was in the folder before.

        Args:
            folder: where; made if need be. Other files there are kept.
            model: saved beside it: the network at the prior's mean, which a target task starts from.
            processing_class: the model's image processor or tokenizer.
        """
        with replaced_together(folder) as new:
            for part in (model, processing_class):
                if part is not None:
                    part.save_pretrained(new)
            write_prior(self, new)

    @classmethod
    def _read(cls, folder: Path, config: PriorConfig, like: Tensors | None = None) -> Self:
        return read_prior(folder, config, cls, like)

    def _write_card(
        self,
        folder: str | os.PathLike,
        repo_id: str | None,
        model: PreTrainedModel | None = None,
        processing_class: Any = None,
    ) -> None:
        """Of a prior with its model; `examples/run_swag.py` writes one that also tells of the source task."""
        if model is None or auto_class_of(model) is None:
            return
        data = PriorCardData(
            task=TASK_OF[auto_class_of(model)],
            base_model=model.config.name_or_path or None,
            num_classes=model.config.num_labels,
            num_parameters=self.num_parameters,
            rank=self.rank,
            eps=self.eps,
            versions=library_versions(),
            repo_id=repo_id,
        )
        save_card(folder, data)


def load_prior(kind: str, backbone: Tensors, name_or_path: str | None = None, **hub_options: Any) -> GaussianPrior:
    """The prior over `backbone` that `DEELBoConfig.prior` names.

    Args:
        kind: `"l2-zero"`, `"l2-sp"` (at the present weights), `"ptyl"` or `"posterior"`.
        backbone: the weights it is over, by name.
        name_or_path: where the last two are, a folder or an id on the Hub.
        **hub_options: of `from_pretrained`: `revision`, `token`.

    Example:
        >>> import torch
        >>> load_prior("l2-sp", {"w": torch.ones(2)}).config
        {'kind': 'l2-sp'}
    """
    if kind == "l2-zero":
        return IsotropicPrior.l2_zero(backbone)
    if kind == "l2-sp":
        return IsotropicPrior.l2_sp(backbone)
    if name_or_path is None:
        raise ValueError(
            f'prior: "{kind}" needs the prior itself. Set `prior_name_or_path` to where it was saved, or pass '
            "`prior=LowRankPrior(...)` to the trainer."
        )
    if kind == "ptyl":
        prior = LowRankPrior.from_pretrained(name_or_path, like=backbone, **hub_options)
        prior.check_matches(backbone)
    else:
        earlier = GaussianPosterior.from_pretrained(name_or_path, **hub_options).as_prior()
        earlier.check_matches(backbone)
        state = {
            name: tensor.to(backbone[name.removeprefix("mean.")].device)
            for name, tensor in earlier.state_dict().items()
        }
        prior = prior_from(earlier.config, state, backbone)
    if prior.mahalanobis(backbone) > 0:
        logger.warning(
            f"The model does not start at the prior's mean; load it from {name_or_path!r}, as the prior is."
        )
    return prior
