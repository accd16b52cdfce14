"""The posterior as users meet it: one that is saved, pushed, loaded and told of in a card."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from ..posterior import Posterior, at_the_mean
from ..weights.parameters import has_adapters
from ..weights.shards import is_first_process
from .cards import PosteriorCardData, save_card
from .files import replaced_together
from .hub import Shareable, library_versions
from .models import TASK_OF, auto_class_of, source_of, why_not_loadable
from .posterior_files import PosteriorConfig, read_posterior, write_posterior


class GaussianPosterior(Posterior, Shareable):
    """`Posterior`, which holds the mathematics, with files, the Hub and a card.

    Example:
        ```python
        posterior = GaussianPosterior.from_pretrained("user/repo")
        posterior.predict_proba(inputs, num_samples=10)
        posterior.save_pretrained("folder")
        ```
    """

    config_class = PosteriorConfig

    @at_the_mean
    def save_pretrained(self, folder: str | os.PathLike, processing_class: Any = None) -> None:
        """Save it as a transformers repository of the posterior mean, with two files of ours; see `posterior_files`.

        Of a model with adapters (peft's), the adapters are saved; their base model is loaded again from where it came
        from. A crash or a full disk leaves what was in the folder before.

        Args:
            folder: where; made if need be. Other files there are kept.
            processing_class: the image processor or tokenizer, saved beside the model.

        If the model is sharded, all its processes must call this, and the first one writes.

        Example:
            ```python
            trainer.posterior.save_pretrained("posterior", image_processor)
            GaussianPosterior.from_pretrained("posterior").predict_proba(image_processor(image, return_tensors="pt"))
            ```
        """
        if reason := why_not_loadable(self.model):
            raise ValueError(f"save_pretrained: {reason}.")
        with self.new_files_of(folder) as new:
            self.model.save_pretrained(new)
            if processing_class is not None:
                processing_class.save_pretrained(new)
            write_posterior(self, new)

    @contextmanager
    def new_files_of(self, folder: str | os.PathLike) -> Iterator[Path]:
        """`replaced_together` for the process that writes; others only give it their rows, and write to nowhere."""
        with self.lock:
            self.ensure_mean("save")
            writes = is_first_process(self.parameters())
            with replaced_together(folder) if writes else tempfile.TemporaryDirectory() as new:
                yield Path(new)

    def card_data(self) -> PosteriorCardData:
        """What a model card tells of it."""
        base_model, revision = source_of(self.model)
        return PosteriorCardData(
            task=TASK_OF[auto_class_of(self.model)],
            base_model=base_model,
            base_model_revision=revision,
            num_classes=self.model.config.num_labels,
            num_examples=self.num_examples,
            num_parameters=self.num_parameters,
            prior=self.prior.config["kind"],
            kappa=self.kappa,
            lambda_=float(self.lambda_),
            tau=float(self.tau),
            sigma=float(self.sigma),
            sigma_update=self.sigma_update,
            groups=self.group_table(),
            has_adapters=has_adapters(self.model),
            de_elbo=self.de_elbo and self.de_elbo.to_dict(),
            temperatures=self.temperatures._asdict(),
            versions=library_versions(*(["peft"] if has_adapters(self.model) else [])),
        )

    def _write_card(self, folder: str | os.PathLike, repo_id: str | None, **kwargs: Any) -> None:
        """`DEELBoTrainer.push_to_hub` writes one that also tells of the training and the test."""
        save_card(folder, replace(self.card_data(), repo_id=repo_id))

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike,
        *,
        base_model: str | os.PathLike | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike | None = None,
        local_files_only: bool = False,
        **kwargs: Any,
    ) -> Self:
        """What was saved, from a folder or from the Hub.

        Every file is checked against its hash, every number against the tensors; nothing is unpickled.

        Args:
            name_or_path: a folder, or an id on the Hub.
            base_model: where the base model of adapters is, a folder or an id, if it was moved. Its weights must be
                those that they were trained on.
            token, cache_dir, local_files_only: as everywhere in `huggingface_hub`, for the base model too.
            **kwargs: `revision`, `force_download`; `trust_remote_code=True` lets the model run code that comes with
                it.
        """
        hub_options = {"token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        return super().from_pretrained(
            name_or_path, **hub_options, **kwargs, base_model=base_model, hub_options=hub_options
        )

    @classmethod
    def _read(cls, folder: Path, config: PosteriorConfig, trust_remote_code: bool = False, **of_base: Any) -> Self:
        return read_posterior(folder, config, cls, trust_remote_code, **of_base)
