"""A posterior as files.

| file                                            | holds                                                             |
|-------------------------------------------------|-------------------------------------------------------------------|
| `config.json`, `model.safetensors`, a processor | the posterior mean, an ordinary transformers repository           |
| `posterior_config.json`                         | `PosteriorConfig`: what was learned, and the hashes of the files  |
| `posterior.safetensors`                         | rho, the prior's tensors, batch-norm statistics of weight samples |
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn

from .batch_norm import Statistics, batch_norm_layers
from .blocks import Tensors
from .files import as_json
from .hub import InvalidFilesError, SavedConfig, by_first_word, hashes_of, load_tensors, public_name, save_tensors
from .modeling import auto_class_of, load_mean
from .objective import DEELBo
from .priors import prior_from
from .sharding import is_first_process, whole

if TYPE_CHECKING:
    from .posterior import GaussianPosterior


@strict
@dataclass(kw_only=True)
class PosteriorConfig(SavedConfig):
    """What `posterior_config.json` says of a posterior; its numbers are checked against the tensors when it is loaded.

    Attributes:
        auto_class: the transformers class that loads the mean; `None` for a model that is not a transformers one.
        head_names: the parameters that form the head.
        frozen_names: the parameters that q does not cover.
        prior: its kind, and `eps` if it is of low rank.
        kappa, num_examples, num_parameters: kappa and N (`None` if not known), and D.
        lambda_, tau, sigma: what was learned.
        sample_seeds: weight samples whose batch-norm statistics are saved.
        de_elbo: J and its parts, if they were measured.
        base_model, base_model_revision: what was fine-tuned, if it is on the Hub.
    """

    CONFIG_FILE = "posterior_config.json"
    TENSORS_FILE = "posterior.safetensors"
    WHAT = "posterior"

    auto_class: str | None
    head_names: list[str]
    frozen_names: list[str]
    prior: dict[str, Any]
    kappa: float | None
    num_examples: int | None
    num_parameters: int
    lambda_: float
    tau: float
    sigma: float
    sample_seeds: list[int]
    de_elbo: dict[str, float | int | None] | None
    base_model: str | None
    base_model_revision: str | None

    def validate_numbers(self) -> None:
        """Positive and finite, where they must be."""
        for name in ("kappa", "lambda_", "tau", "sigma", "num_parameters", "num_examples"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a positive number, got {value}.")


def write_posterior(posterior: "GaussianPosterior", folder: str | os.PathLike) -> None:
    """Write `posterior.safetensors` and `posterior_config.json` into a folder that holds the model's own files."""
    posterior.update_prior_variances()
    numbers = {"kappa": posterior.kappa, "num_examples": posterior.num_examples}
    if posterior.de_elbo is not None:
        numbers |= {name: getattr(posterior.de_elbo, name) for name in _MEASURED}
    scalars = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items() if value is not None}
    statistics = {
        f"batch_norm.{seed}.{layer}.{part}": tensor
        for seed, layers in posterior.sample_statistics.items()
        for layer, moments in layers.items()
        for part, tensor in zip(("mean", "variance"), moments, strict=True)
    }
    tensors = {name: whole(tensor) for name, tensor in (posterior.state_dict() | scalars | statistics).items()}
    if not is_first_process(posterior.parameters()):
        return
    save_tensors(tensors, Path(folder) / PosteriorConfig.TENSORS_FILE)

    model = posterior.model
    auto_class = auto_class_of(model)
    base_model = public_name(getattr(getattr(model, "config", None), "name_or_path", None))
    PosteriorConfig(
        sha256=hashes_of(folder),
        auto_class=auto_class and auto_class.__name__,
        head_names=sorted(posterior.head),
        frozen_names=[name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        prior=posterior.prior.config,
        kappa=posterior.kappa,
        num_examples=posterior.num_examples,
        num_parameters=posterior.num_parameters,
        lambda_=float(posterior.lambda_),
        tau=float(posterior.tau),
        sigma=float(posterior.sigma),
        sample_seeds=sorted(posterior.sample_statistics),
        de_elbo=posterior.de_elbo and as_json(posterior.de_elbo.to_dict()),
        base_model=base_model,
        base_model_revision=base_model and getattr(model.config, "_commit_hash", None),
    ).save(folder)


def read_posterior(
    folder: str | os.PathLike, posterior_class: type["GaussianPosterior"], trust_remote_code: bool = False
) -> "GaussianPosterior":
    """The posterior that was saved into a local folder; `InvalidFilesError` says what is wrong with its files."""
    config = PosteriorConfig.load(folder)
    config.check_files(folder)
    tensors = by_first_word(load_tensors(Path(folder) / config.TENSORS_FILE), ("prior", "batch_norm"))
    try:
        model = load_mean(folder, config.auto_class, trust_remote_code)
        posterior = _assemble(posterior_class, model, config, tensors)
        _check_agreement(posterior, config)
    except (ValueError, KeyError, RuntimeError, OSError) as error:
        reason = f"{error.args[0]!r} is missing or unknown" if isinstance(error, KeyError) else str(error)
        raise InvalidFilesError(
            f"{os.fspath(folder)}: the files of the posterior do not fit each other ({reason}). Download or save it "
            "again."
        ) from error
    return posterior


def read_state(folder: str | os.PathLike) -> dict[str, torch.Tensor]:
    """`GaussianPosterior.state_dict` as it was when it was saved into a local folder."""
    config = PosteriorConfig.load(folder)
    config.check_files(folder)
    tensors = load_tensors(Path(folder) / config.TENSORS_FILE)
    return {name: tensor for name, tensor in tensors.items() if name.startswith("prior.") or name in _LEARNED}


# scalar tensors: the posterior's state, and the parts of J that do not follow from it
_LEARNED = ("rho", "lambda_", "tau")
_MEASURED = ("nll", "nll_standard_error")


def _assemble(
    posterior_class: type["GaussianPosterior"],
    model: nn.Module,
    config: PosteriorConfig,
    tensors: Mapping[str, Tensors],
) -> "GaussianPosterior":
    parameters = dict(model.named_parameters())
    for name in config.frozen_names:
        parameters.pop(name).requires_grad_(False)
    backbone = {name: parameter for name, parameter in parameters.items() if name not in set(config.head_names)}
    scalars = tensors[""]
    posterior = posterior_class(
        model,
        config.head_names,
        prior_from(config.prior, tensors["prior"], backbone),
        init_sigma=config.sigma,
        kappa=scalars["kappa"].item() if "kappa" in scalars else "auto",
        num_examples=int(scalars["num_examples"]) if "num_examples" in scalars else None,
    )
    prior = {f"prior.{name}": tensor for name, tensor in tensors["prior"].items()}
    posterior.load_state_dict({name: scalars[name] for name in _LEARNED} | prior)
    posterior.update_prior_variances()
    posterior.sample_statistics = _statistics_of(model, tensors["batch_norm"])
    if _MEASURED[0] in scalars:
        posterior.de_elbo = DEELBo(
            kl_backbone=float(posterior.kl.backbone),
            kl_head=float(posterior.kl.head),
            kappa=posterior.kappa,
            num_examples=posterior.num_examples,
            **{name: scalars[name].item() for name in _MEASURED},
        )
    return posterior


def _statistics_of(model: nn.Module, tensors: Tensors) -> dict[int, Statistics]:
    """By seed, from tensors named `<seed>.<layer>.mean` and `<seed>.<layer>.variance`."""
    layers = batch_norm_layers(model)
    statistics = {}
    for seed in sorted({int(name.partition(".")[0]) for name in tensors}):
        statistics[seed] = {}
        for layer, module in layers.items():
            moments = tuple(tensors[f"{seed}.{layer}.{part}"] for part in ("mean", "variance"))
            if any(tensor.shape != module.running_mean.shape for tensor in moments):
                raise ValueError(f"the batch-norm statistics of {layer!r} have another size than the layer")
            statistics[seed][layer] = moments
    return statistics


def _check_agreement(posterior: "GaussianPosterior", config: PosteriorConfig) -> None:
    """The numbers that people read must be those of the tensors."""
    pairs = [
        ("lambda_", config.lambda_, posterior.lambda_),
        ("tau", config.tau, posterior.tau),
        ("sigma", config.sigma, posterior.sigma),
        ("num_parameters", config.num_parameters, posterior.num_parameters),
        ("kappa", config.kappa, posterior.kappa),
        ("num_examples", config.num_examples, posterior.num_examples),
    ]
    measured = {} if posterior.de_elbo is None else as_json(posterior.de_elbo.to_dict())
    stated = config.de_elbo or {}
    pairs += [(f"de_elbo's {name}", stated.get(name), measured.get(name)) for name in stated.keys() | measured.keys()]
    for name, stated_value, value in pairs:
        if stated_value is None or value is None:
            agree = stated_value is value
        else:
            agree = math.isclose(stated_value, value, rel_tol=1e-6)
        if not agree:
            raise ValueError(f"{name} is stated as {stated_value}, but is {value and float(value)}")
    saved = sorted(posterior.sample_statistics)
    if config.sample_seeds != saved:
        raise ValueError(f"sample_seeds: {config.sample_seeds} are stated, {saved} are saved")
