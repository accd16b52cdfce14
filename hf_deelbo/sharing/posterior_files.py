"""A posterior as files.

| file                                            | holds                                                             |
|-------------------------------------------------|-------------------------------------------------------------------|
| `config.json`, `model.safetensors`, a processor | the posterior mean, an ordinary transformers repository           |
| `posterior_config.json`                         | `PosteriorConfig`: what was learned, and the hashes of the files  |
| `posterior.safetensors`                         | rho, the prior's tensors, batch-norm statistics of weight samples |

Of a model with adapters, what peft saves stands in place of the mean (`adapter_config.json`,
`adapter_model.safetensors`), and the base model is loaded from where it came from.

Since format 2 the weights may have several sigmas and prior variances, by group; in files of format 1 there is one
sigma, which the optimiser learned.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedModel

from ..groups import GROUPINGS, SIGMA_UPDATES, groups_of
from ..objective import DEELBo
from ..posterior import Posterior
from ..priors import MOST_DEVIATIONS, prior_from
from ..temperature import Temperatures
from ..weights.batch_norm import Statistics, batch_norm_layers, weights_and_statistics
from ..weights.blocks import Tensors, check_finite, parameters_by_name
from ..weights.parameters import backbone_of, base_of, has_adapters
from ..weights.shards import is_first_process, whole
from .cards import CARD_FILE
from .files import as_json
from .hub import (
    SavedConfig,
    by_first_word,
    hashes_of,
    library_versions,
    public_name,
    save_tensors,
)
from .model_files import adapters_header, check_config, header_of_base, no_larger_than
from .models import (
    auto_class_of,
    frozen_weights,
    import_peft,
    load_adapters,
    load_base,
    load_loose_tensors,
    load_mean,
    loose_tensors,
    source_of,
)
from .reading import (
    FLOATS,
    NOT_NEGATIVE,
    POSITIVE,
    SavedTensor,
    TensorRule,
    blaming,
    header_of,
    load_tensors,
    one_line,
    read_tensors,
)


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
        lambda_, tau, sigma: what was learned, over all weights.
        grouping, sigma_update: as in `DEELBoConfig`.
        groups: each with its `name`, whether it is `in_head`, `num_parameters`, `sigma` and `prior_variance`.
        sample_seeds: weight samples whose batch-norm statistics are saved.
        de_elbo: J and its parts, if they were measured.
        temperatures: what predictions are tempered by, `mean` and `average`; 1 if they were not calibrated.
        base_model, base_model_revision: what was fine-tuned, if it is on the Hub.
        base: where only adapters are saved, the `config` of their base model and the `sha256` of its weights.
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
    grouping: str = "all"
    sigma_update: str = "optimizer"
    groups: list[dict[str, Any]] = field(default_factory=list)
    temperatures: dict[str, float] = field(default_factory=Temperatures()._asdict)
    base: dict[str, Any] | None = None

    def validate_numbers(self) -> None:
        """Positive and finite, where they must be."""
        for name in ("kappa", "lambda_", "tau", "sigma", "num_parameters", "num_examples"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: must be a positive number, got {value}.")

    def validate_settings(self) -> None:
        """Those that this version knows."""
        for name, known in (("grouping", GROUPINGS), ("sigma_update", SIGMA_UPDATES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: unknown value {getattr(self, name)!r}; known are {', '.join(known)}.")
        if self.prior.get("kind") not in _KINDS_OF_PRIOR:
            known = ", ".join(_KINDS_OF_PRIOR)
            raise ValueError(f"prior: unknown kind {self.prior.get('kind')!r}; known are {known}.")
        if not isinstance(self.prior.get("scales", {}), dict):
            raise ValueError(f"prior: its scales must be numbers by name, got {self.prior['scales']!r}.")
        if self.de_elbo is not None and self.de_elbo.keys() != _PARTS_OF_J:
            raise ValueError(f"de_elbo: must have {', '.join(sorted(_PARTS_OF_J))}, got {', '.join(self.de_elbo)}.")

    def validate_groups(self) -> None:
        """Rows of `GaussianPosterior.group_table`; format 1 has none."""
        if self.format_version > 1 and not self.groups:
            raise ValueError("groups: there are none.")
        for row in self.groups:
            if row.keys() != _GROUP.keys():
                raise ValueError(f"groups: each must have {', '.join(_GROUP)}, got {', '.join(row)}.")
            for name, kind in _GROUP.items():
                value = row[name]
                is_good = type(value) is kind and (kind in (str, bool) or (math.isfinite(value) and value > 0))
                if not is_good:
                    raise ValueError(f"groups: {name} must be a {_KINDS[kind]}, got {value!r}.")

    def validate_temperatures(self) -> None:
        """One of the mean, one of the average."""
        if self.temperatures.keys() != set(Temperatures._fields):
            raise ValueError(f"temperatures: must be of mean and average, got {', '.join(self.temperatures)}.")
        for name, value in self.temperatures.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"temperatures: that of the {name} must be a positive number, got {value}.")

    def validate_base(self) -> None:
        """Its two parts."""
        if self.base is not None:
            kinds = {name: type(value) for name, value in self.base.items()}
            if kinds != {"config": dict, "sha256": str}:
                raise ValueError(f"base: must have a config and a sha256, got {', '.join(kinds)}.")


# the tensors of each kind of prior, by the first word of their names
_KINDS_OF_PRIOR = {"l2-zero": (), "l2-sp": ("mean",), "ptyl": ("mean", "diagonal", "deviations")}
_PARTS_OF_J = {part.name for part in fields(DEELBo)} | {"de_elbo", "log_likelihood"}
# what a row of `groups` holds
_GROUP = {"name": str, "in_head": bool, "num_parameters": int, "sigma": float, "prior_variance": float}
_KINDS = {str: "text", bool: "truth value", int: "positive whole number", float: "positive number"}


def write_posterior(posterior: Posterior, folder: str | os.PathLike) -> None:
    """Write `posterior.safetensors` and `posterior_config.json` into a folder that holds the model's own files."""
    check_finite(weights_and_statistics(posterior.model), "model")
    posterior.update_prior_variances()
    numbers = {"kappa": posterior.kappa, "num_examples": posterior.num_examples}
    if posterior.de_elbo is not None:
        numbers |= {name: getattr(posterior.de_elbo, name) for name in ("nll", "nll_standard_error")}
    scalars = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items() if value is not None}
    statistics = {
        f"batch_norm.{seed}.{layer}.{part}": tensor
        for seed, layers in posterior.sample_statistics.items()
        for layer, moments in layers.items()
        for part, tensor in zip(("mean", "variance"), moments, strict=True)
    }
    model, auto_class = posterior.model, auto_class_of(posterior.model)
    only_adapters = auto_class is not None and has_adapters(model)
    loose = {f"model.{name}": tensor.clone() for name, tensor in loose_tensors(model).items()} if only_adapters else {}
    own = posterior.state_dict() | scalars | statistics | loose
    tensors = {name: whole(tensor) for name, tensor in own.items()}
    if not is_first_process(posterior.parameters()):
        return
    save_tensors(tensors, Path(folder) / PosteriorConfig.TENSORS_FILE)
    if only_adapters:
        (Path(folder) / CARD_FILE).unlink(missing_ok=True)  # peft's, which would take the place of ours

    source, revision = source_of(model)
    base_model = public_name(source)
    PosteriorConfig(
        sha256=hashes_of(folder),
        library_versions=library_versions(*(["peft"] if only_adapters else [])),
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
        base_model_revision=base_model and revision,
        grouping=posterior.grouping,
        sigma_update=posterior.sigma_update,
        groups=posterior.group_table(),
        temperatures=posterior.temperatures._asdict(),
        base=_description_of_base(model) if only_adapters else None,
    ).save(folder)


def read_posterior(
    folder: str | os.PathLike,
    config: PosteriorConfig,
    posterior_class: type[Posterior],
    trust_remote_code: bool = False,
    base_model: str | os.PathLike | None = None,
    hub_options: Mapping[str, Any] | None = None,
) -> Posterior:
    """The posterior that was saved into a local folder; `InvalidFilesError` says what is wrong with its files.

    Args:
        folder: where it was saved.
        config: what its JSON file says.
        posterior_class: `GaussianPosterior`.
        trust_remote_code: as for `from_pretrained`.
        base_model: where the base model of adapters is, if not where they say.
        hub_options: of `from_pretrained`, to load that.
    """
    config.check_files(folder)
    path = Path(folder) / config.TENSORS_FILE
    header = header_of(path)
    of_adapters = {} if config.base is None else adapters_header(folder, config.sha256)
    base = None if config.base is None else _load_base(folder, config, base_model, hub_options or {})
    with blaming(folder, _MISFIT):
        if base is None:
            model = load_mean(folder, config.auto_class, config.sha256, trust_remote_code)
        else:
            model = load_adapters(base, folder, of_adapters)
        parameters = dict(model.named_parameters())
        for name in config.frozen_names:
            if name not in parameters:
                raise ValueError(f"frozen_names: {name!r} is missing or unknown")
            parameters[name].requires_grad_(False)
        tensors = read_tensors(path, _rules(model, config, header), _MEASURED)
        tensors = by_first_word(tensors, ("prior", "batch_norm", "model"))
        if base is not None:
            load_loose_tensors(model, tensors["model"])
            _check_base(model, config.base["sha256"])
        check_finite(weights_and_statistics(model), "model")
        posterior = _assemble(posterior_class, model, config, tensors)
        _check_agreement(posterior, config)
    return posterior


_MISFIT = "the files of the posterior do not fit each other"


def _load_base(
    folder: str | os.PathLike,
    config: PosteriorConfig,
    name: str | os.PathLike | None,
    hub_options: Mapping[str, Any],
) -> PreTrainedModel:
    """The base model of adapters, from `name` or from where they say that it is."""
    peft = import_peft()
    try:
        with blaming(folder, _MISFIT, leaving=(OSError,)):
            stated = peft.PeftConfig.from_pretrained(os.fspath(folder)).base_model_name_or_path
            name = os.fspath(name or stated)
            options = {"revision": config.base_model_revision if name == config.base_model else None, **hub_options}
            header = header_of_base(name, **options)
            check_config(config.base["config"], header, Path(folder) / config.CONFIG_FILE)
            with no_larger_than(header, folder):
                return load_base(name, config.auto_class, config.base["config"], **options)
    except OSError as error:
        raise OSError(
            f"{os.fspath(folder)}: these are adapters, and their base model {name!r} cannot be loaded "
            f"({str(error).splitlines()[0]}). Check the connection, or say where it is: "
            "`GaussianPosterior.from_pretrained(..., base_model=...)`."
        ) from error


def _check_base(model: nn.Module, sha256: str) -> None:
    if hash_of(frozen_weights(model)) != sha256:
        raise ValueError(
            f"the base model {source_of(model)[0]!r} has other weights than the one that the adapters were trained "
            "on; say where that is: `GaussianPosterior.from_pretrained(..., base_model=...)`"
        )


def _description_of_base(model: nn.Module) -> dict[str, Any]:
    """`PosteriorConfig.base` of a model with adapters."""
    config = json.loads(base_of(model).config.to_json_string())
    return {"config": as_json(config), "sha256": hash_of(frozen_weights(model))}


def hash_of(tensors: Tensors) -> str:
    """The SHA-256 of tensors by name: of their values to the bit, types and shapes.

    Example:
        >>> hash_of({"w": torch.ones(2)}) == hash_of({"w": torch.tensor([1.0, 1.0000001])})
        False
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def read_state(folder: str | os.PathLike) -> dict[str, torch.Tensor]:
    """`GaussianPosterior.state_dict` as it was when it was saved into a local folder."""
    config = PosteriorConfig.load(folder)
    config.check_files(folder)
    path = Path(folder) / config.TENSORS_FILE
    tensors = load_tensors(path)
    state = {name: tensor for name, tensor in tensors.items() if name.startswith("prior.") or name in _LEARNED}
    for name, tensor in state.items():
        _LEARNED.get(name, TensorRule()).check(name, tensor, path)
    return state


_WIDE = ("F64", "F32")  # as `priors.wide_dtype`
# the posterior's state, and scalars: kappa and N, and the parts of J that do not follow from it
_LEARNED = {
    "rho": TensorRule(dtypes=_WIDE),
    "lambda_": TensorRule(dtypes=_WIDE, **POSITIVE),
    "tau": TensorRule(dtypes=_WIDE, **POSITIVE),
    "curvature": TensorRule(dtypes=_WIDE),
}
_MEASURED = {
    "kappa": TensorRule((), _WIDE, **POSITIVE),
    "num_examples": TensorRule((), _WIDE, **POSITIVE),
    "nll": TensorRule((), _WIDE, **NOT_NEGATIVE),
    "nll_standard_error": TensorRule((), _WIDE, **NOT_NEGATIVE, may_be_nan=True),
}


def _rules(model: nn.Module, config: PosteriorConfig, header: Mapping[str, SavedTensor]) -> dict[str, TensorRule]:
    """What must be in `posterior.safetensors`, beside `_MEASURED`, with this model and configuration."""
    of_model = {name: w.shape for name, w in parameters_by_name(model).items()}
    kind = config.prior["kind"]
    groups = groups_of(of_model, config.head_names, config.grouping, whole_backbone=kind == "ptyl")
    numbers = [sum(group.in_head == in_head for group in groups) for in_head in (False, True)]
    lambdas, taus = [() if number == 1 else (number,) for number in numbers]
    sigmas = () if config.grouping == "all" else (len(groups),)
    shapes = {"rho": sigmas, "curvature": (3, *sigmas), "lambda_": lambdas, "tau": taus}
    if config.sigma_update == "optimizer":
        del shapes["curvature"]
    rules = {name: _LEARNED[name]._replace(shape=shape) for name, shape in shapes.items()}
    rules |= _rules_of_prior(backbone_of(model, config.head_names), kind, header)
    rules |= _rules_of_statistics(model, config.sample_seeds, header)
    if config.base is not None:
        rules |= {f"model.{name}": _rule_like(name, tensor) for name, tensor in loose_tensors(model).items()}
    return rules


def _rules_of_prior(backbone: Tensors, kind: str, header: Mapping[str, SavedTensor]) -> dict[str, TensorRule]:
    ranks = {tensor.shape[:1] for name, tensor in header.items() if name.startswith("prior.deviations.")}
    rank = min(ranks, default=())
    if rank and rank[0] > MOST_DEVIATIONS:
        raise ValueError(f"prior: its rank is {rank[0]:,}, and at most {MOST_DEVIATIONS:,} is supported")
    return {
        f"prior.{part}.{name}": TensorRule((*rank, *w.shape) if part == "deviations" else tuple(w.shape))
        for part in _KINDS_OF_PRIOR[kind]
        for name, w in backbone.items()
    }


def _rules_of_statistics(
    model: nn.Module, stated: list[int], header: Mapping[str, SavedTensor]
) -> dict[str, TensorRule]:
    """`batch_norm.<seed>.<layer>.mean` and `batch_norm.<seed>.<layer>.variance`."""
    of_samples = [name for name in header if name.startswith("batch_norm.")]
    layers = batch_norm_layers(model)
    saved = sorted({int(name.split(".")[1]) for name in of_samples})
    if sorted(stated) != saved:
        raise ValueError(f"sample_seeds: {one_line(str(stated))} are stated, {one_line(str(saved))} are saved")
    if len(of_samples) != 2 * len(saved) * len(layers):  # before as many rules are made as someone states
        raise ValueError(f"there are {len(of_samples)} batch-norm statistics, of {len(saved)} samples")
    return {
        f"batch_norm.{seed}.{layer}.{part}": TensorRule(tuple(module.running_mean.shape), **sign)
        for seed in saved
        for layer, module in layers.items()
        for part, sign in (("mean", {}), ("variance", NOT_NEGATIVE))
    }


def _rule_like(name: str, tensor: torch.Tensor) -> TensorRule:
    """For a tensor of a model, which is saved as it is."""
    if not tensor.is_floating_point():
        return TensorRule(tuple(tensor.shape), ("I64", "I32", "U8", "BOOL"))
    return TensorRule(tuple(tensor.shape), FLOATS, **(NOT_NEGATIVE if name.endswith("running_var") else {}))


def _assemble(
    posterior_class: type[Posterior],
    model: nn.Module,
    config: PosteriorConfig,
    tensors: Mapping[str, Tensors],
) -> Posterior:
    backbone, scalars = backbone_of(model, config.head_names), tensors[""]
    if "num_examples" in scalars and not scalars["num_examples"].item().is_integer():
        raise ValueError(f"num_examples: must be a whole number, got {scalars['num_examples'].item()}")
    posterior = posterior_class(
        model,
        config.head_names,
        prior_from(config.prior, tensors["prior"], backbone),
        grouping=config.grouping,
        sigma_update=config.sigma_update,
        init_sigma=config.sigma,
        kappa=scalars["kappa"].item() if "kappa" in scalars else "auto",
        num_examples=int(scalars["num_examples"]) if "num_examples" in scalars else None,
    )
    prior = {f"prior.{name}": tensor for name, tensor in tensors["prior"].items()}
    posterior.load_state_dict({name: scalars[name] for name in _LEARNED if name in scalars} | prior)
    posterior.update_prior_variances()
    posterior.sample_statistics = _statistics_of(model, tensors["batch_norm"])
    posterior.temperatures = Temperatures(**config.temperatures)
    if parts := {name: scalars[name].item() for name in ("nll", "nll_standard_error") if name in scalars}:
        posterior.de_elbo = DEELBo(
            kl_backbone=float(posterior.kl.backbone),
            kl_head=float(posterior.kl.head),
            kappa=posterior.kappa,
            num_examples=posterior.num_examples,
            **parts,
        )
    return posterior


def _statistics_of(model: nn.Module, tensors: Tensors) -> dict[int, Statistics]:
    """By seed, from tensors that follow `_rules_of_statistics`."""
    statistics: dict[int, Statistics] = {}
    for seed in sorted({int(name.partition(".")[0]) for name in tensors}):
        statistics[seed] = {
            layer: (tensors[f"{seed}.{layer}.mean"], tensors[f"{seed}.{layer}.variance"])
            for layer in batch_norm_layers(model)
        }
    return statistics


def _check_agreement(posterior: Posterior, config: PosteriorConfig) -> None:
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
    if config.groups:
        _check_groups(config.groups, posterior.group_table())
    saved = sorted(posterior.sample_statistics)
    if config.sample_seeds != saved:
        raise ValueError(f"sample_seeds: {config.sample_seeds} are stated, {saved} are saved")


def _check_groups(stated: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """The same names and numbers, in the same order."""
    if len(stated) != len(groups):
        raise ValueError(f"groups: {len(stated)} are stated, but there are {len(groups)}")
    for row, group in zip(stated, groups, strict=True):
        for name, value in group.items():
            agree = math.isclose(row[name], value, rel_tol=1e-6) if isinstance(value, float) else row[name] == value
            if not agree:
                raise ValueError(f"groups: {name} of {group['name']!r} is stated as {row[name]}, but is {value}")
