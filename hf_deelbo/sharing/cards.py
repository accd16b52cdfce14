"""Model cards of learned posteriors and priors: data gathered in training, and a README.md that users can edit.

The words are in `templates/`, those of every card in `card.md`; here is what fills them. Nothing that a name or a
setting contains can become metadata, markdown or HTML, and no path of the author's machine is shown.
"""

import hashlib
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar
from urllib.parse import quote

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import HFValidationError, validate_repo_id, yaml_dump
from jinja2 import Environment, PackageLoader, StrictUndefined

from ..priors import PRIORS
from .files import write_whole
from .models import TASK_OF
from .reading import one_line

# short names of datasets on the Hub
HUB_DATASETS = {"cifar10": "uoft-cs/cifar10", "oxford-iiit-pet": "timm/oxford-iiit-pet"}
CARD_FILE = "README.md"
TAGS = ("hf_deelbo", "deelbo", "bayesian", "variational-inference", "transfer-learning")
UNKNOWN_REPOSITORY = "path/to/this/folder"
UNKNOWN_BASE_MODEL = "path/to/the/base/model"
MOST_GROUPS = 12  # that are shown without a click


@dataclass
class CardData(ABC):
    """What any card tells; what is `None`, `nan` or empty is left out of the card.

    Attributes:
        task: `"image-classification"` or `"text-classification"`.
        base_model, base_model_revision: as the user named it: an id on the Hub, a local folder or an embedded name.
        dataset_name, dataset_config, dataset_split: likewise; the split is the one of `metrics`.
        num_classes: how many classes it tells apart.
        num_examples: N, the size of the training set.
        num_test_examples: how many examples `metrics` were measured on.
        num_parameters: D.
        metrics: `accuracy`, `nll`, `ece` and `brier`, as far as they were measured.
        training: settings, by name: learning rate, steps, batch size, seed, how they were chosen, ...
        preprocessing: what was done to the inputs, by name.
        versions: of packages, by name.
        license, language: as the Hub spells them.
        figures: relative paths inside the folder, such as `"figures/training.png"`.
        repo_id: `"user/name"` on the Hub, once it is known.
    """

    template: ClassVar[str]
    library_name: ClassVar[str] = "transformers"
    tags: ClassVar[tuple[str, ...]] = TAGS

    task: str
    base_model: str | None = None
    base_model_revision: str | None = None
    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_split: str | None = "test"
    num_classes: int | None = None
    num_examples: int | None = None
    num_test_examples: int | None = None
    num_parameters: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    preprocessing: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    license: str | None = None
    language: str | list[str] | None = None
    figures: tuple[str, ...] = ()
    repo_id: str | None = None

    @abstractmethod
    def metric_columns(self) -> dict[str, Mapping[str, float]]:
        """`metrics`, by the name of what they are of: each a column of the table of results."""

    def own_settings(self) -> dict[str, Any]:
        """What stands above `training` in the table of settings."""
        return {}

    @abstractmethod
    def own_variables(self) -> dict[str, Any]:
        """What only the template of this card needs."""


@dataclass
class PosteriorCardData(CardData):
    """What the card of a posterior tells, gathered in training, beside what any card does.

    Attributes:
        prior: `"l2-sp"`, `"l2-zero"`, `"ptyl"`, ...
        kappa, lambda_, tau, sigma: as in the posterior.
        sigma_update: how sigma was learned, as in `DEELBoConfig`.
        groups: `posterior.group_table()`.
        has_adapters: whether only PEFT adapters of the base model are saved.
        de_elbo: `DEELBo.to_dict()` of the training set.
        temperatures: of the `mean` and of the `average`; 1 if predictions were not calibrated.
        metrics: those at the posterior `"mean"`, and those of the `"average"` over samples.
        num_samples: S, the weight samples of that average.
    """

    template: ClassVar[str] = "posterior_card.md"

    prior: str | None = None
    kappa: float | None = None
    lambda_: float | None = None
    tau: float | None = None
    sigma: float | None = None
    sigma_update: str | None = None
    groups: Sequence[Mapping[str, Any]] = ()
    has_adapters: bool = False
    de_elbo: Mapping[str, float] | None = None
    temperatures: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    num_samples: int = 0

    @property
    def library_name(self) -> str:
        """What loads the mean, as the Hub calls it."""
        return "peft" if self.has_adapters else "transformers"

    def metric_columns(self) -> dict[str, Mapping[str, float]]:
        """The posterior mean, and the average of samples."""
        samples = f"average of {self.num_samples} samples" if self.num_samples else "average of samples"
        names = {"mean": "posterior mean", "average": samples}
        return {name: self.metrics[key] for key, name in names.items() if self.metrics.get(key)}

    def own_settings(self) -> dict[str, Any]:
        """The prior, D, and how sigma was learned."""
        num_parameters = _count(self.num_parameters)
        return {
            "prior": _description_of_prior(self.prior, self.has_adapters),
            "trainable parameters": f"{num_parameters:,}" if num_parameters else None,
            "sigma learned": SIGMA_UPDATES_IN_WORDS.get(self.sigma_update, self.sigma_update),
        }

    def own_variables(self) -> dict[str, Any]:
        """What was learned, and what it means."""
        kappa, lambda_, tau, sigma = (_positive(value) for value in (self.kappa, self.lambda_, self.tau, self.sigma))
        num_examples, num_parameters = _count(self.num_examples), _count(self.num_parameters)
        de_elbo = _finite((self.de_elbo or {}).get("de_elbo"))
        groups = self.groups if has_several_sigmas(self.groups) else ()
        temperatures = {name: _positive(value) for name, value in self.temperatures.items()}
        return {
            "has_adapters": self.has_adapters,
            "groups": [_group_row(row) for row in groups],
            "groups_are_many": len(groups) > MOST_GROUPS,
            "several_variances": _are_several_in_a_part(self.groups),
            "num_samples": _count(self.num_samples) or 10,
            "prior": self.prior,
            "kappa": kappa,
            "kappa_is_d_over_n": _is_d_over_n(kappa, num_parameters, num_examples),
            "lambda_": lambda_,
            "root_lambda": math.sqrt(lambda_ or 0),
            "tau": tau,
            "root_tau": math.sqrt(tau or 0),
            "sigma": sigma,
            "weight_decay": _weight_decay(self.prior, lambda_, tau, kappa, num_examples),
            "temperatures": temperatures if any(value != 1 for value in temperatures.values()) else None,
            "de_elbo": de_elbo,
            "de_elbo_per_parameter": de_elbo / num_parameters if de_elbo is not None and num_parameters else None,
        }


@dataclass
class PriorCardData(CardData):
    """What the card of a prior tells that SWAG learned on a source task (`LowRankPrior`), beside what any card does.

    The dataset, its examples and its classes are those of the source task.

    Attributes:
        num_parameters: D_w, of the backbone alone.
        rank: K, how many deviations are kept.
        num_collections: how many times the weights were collected.
        eps: what is added to the diagonal.
        metrics: those of the SWAG mean on the source task.

    Example:
        >>> data = PriorCardData("image-classification", base_model="microsoft/resnet-50", rank=5)
        >>> render_card(data).data.tags[-2:]
        ['prior', 'swag']
    """

    template: ClassVar[str] = "prior_card.md"
    tags: ClassVar[tuple[str, ...]] = (*TAGS, "prior", "swag")

    rank: int | None = None
    num_collections: int | None = None
    eps: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def metric_columns(self) -> dict[str, Mapping[str, float]]:
        """The SWAG mean."""
        return {"SWAG mean": self.metrics} if self.metrics else {}

    def own_variables(self) -> dict[str, Any]:
        """What was collected."""
        return {
            "rank": _count(self.rank),
            "num_collections": _count(self.num_collections),
            "eps": _finite(self.eps),
        }


def has_several_sigmas(groups: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rows of a `group_table` tell more than a summary does, of one sigma, one lambda and one tau.

    Example:
        >>> backbone, head = ({"in_head": in_head, "sigma": 0.1} for in_head in (False, True))
        >>> has_several_sigmas([backbone, head]), has_several_sigmas([backbone, head | {"sigma": 0.2}])
        (False, True)
    """
    return _are_several_in_a_part(groups) or len({row["sigma"] for row in groups}) > 1


def _are_several_in_a_part(groups: Sequence[Mapping[str, Any]]) -> bool:
    return len({row["in_head"] for row in groups}) < len(groups)


def render_card(data: CardData) -> ModelCard:
    """The card as `huggingface_hub` holds it: metadata in `data`, text in `text`; `str` of it is the file.

    Example:
        >>> card = render_card(PosteriorCardData("image-classification", base_model="timm/resnet50.a1_in1k", kappa=1))
        >>> card.data.base_model, card.data.pipeline_tag
        ('timm/resnet50.a1_in1k', 'image-classification')
        >>> "as in the plain ELBo" in card.text
        True
    """
    _check(data)
    metadata = _metadata(data)
    body = _environment().get_template(data.template).render(_variables(data))
    return ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{_marked(body, metadata.to_dict())}\n")


def save_card(folder: str | os.PathLike, data: CardData) -> Path:
    """Write the card to `README.md` in the folder, and keep what users wrote into one that is there.

    The generated text stands between two HTML comments. Text outside of them is always kept. If the text between them
    was edited, or a comment is gone, all text is kept and only the metadata is brought up to date. In the metadata, a
    key that was added, changed or removed by hand stays so, tags are united, and `model-index` is always the new one.

    Args:
        folder: that of the posterior or prior; made if it is not there.
        data: what the card tells.

    Returns:
        The file.

    Example:
        >>> import tempfile
        >>> save_card(tempfile.mkdtemp(), PosteriorCardData("text-classification")).name
        'README.md'
    """
    card, file = render_card(data), Path(folder) / CARD_FILE
    content = _merged(_read(file), card, file) if file.exists() else str(card)
    write_whole(file, content)
    return file


def name_repository(folder: str | os.PathLike, repo_id: str) -> None:
    """In a card that was written before its repository had a name, make the snippets load from `repo_id`.

    A card that someone edited is left as it is.
    """
    file = Path(folder) / CARD_FILE
    content = _read(file) if file.exists() else ""
    mark = _MARKED.search(content)
    if mark and _is_as_generated(mark) and _has_form_of_hub_id(repo_id):
        body = mark["body"].replace(UNKNOWN_REPOSITORY, repo_id)
        of_body = _digest(body.replace("\r\n", "\n").strip())
        renamed = mark[0].replace(mark["body"], body).replace(mark["of_body"], of_body, 1)
        write_whole(file, content[: mark.start()] + renamed + content[mark.end() :])


def _check(data: CardData) -> None:
    if data.task not in TASK_OF.values():
        raise ValueError(f"task: unknown task {data.task!r}; choose one of {', '.join(TASK_OF.values())}.")
    if data.repo_id is not None and not _has_form_of_hub_id(data.repo_id):
        raise ValueError(f'repo_id: must be "user/name", an id on the Hub, or None; got {data.repo_id!r}.')
    for path in data.figures:
        if re.search(r"^[/~]|\\|:|^\.\.(/|$)|/\.\.(/|$)", str(path)):
            raise ValueError(
                f'figures: must be relative paths inside the folder, such as "figures/training.png"; got {path!r}.'
            )


# ---- Metadata ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Metric:
    """A metric as the Hub, a table and a newcomer know it."""

    hub_type: str
    name: str
    meaning: str


_METRICS = {
    "accuracy": _Metric(
        hub_type="accuracy",
        name="class-averaged accuracy",
        meaning="share of right answers in a class, averaged over the classes; higher is better",
    ),
    "nll": _Metric(
        hub_type="nll",
        name="NLL",
        meaning="negative log likelihood: mean of -log(probability of the right class); lower is better",
    ),
    "ece": _Metric(
        hub_type="ece",
        name="ECE",
        meaning="expected calibration error: how far confidence is from accuracy; lower is better",
    ),
    "brier": _Metric(
        hub_type="brier_score",
        name="Brier score",
        meaning="squared error of the probabilities, from 0 to 2; lower is better",
    ),
}


def _metadata(data: CardData) -> ModelCardData:
    base_model, dataset = _PublicName.of(data.base_model), _dataset_of(data)
    results = list(_eval_results(data, dataset))
    return ModelCardData(
        license=_plain(data.license),
        language=[_plain(one) for one in _as_list(data.language)] or None,
        library_name=data.library_name,
        pipeline_tag=data.task,
        base_model=base_model.name if base_model and base_model.on_hub else None,
        datasets=[dataset.name] if dataset and dataset.on_hub else None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        tags=list(data.tags),
        model_name=_model_name(data, base_model, dataset) if results else None,
        eval_results=results or None,
    )


def _eval_results(data: CardData, dataset: "_PublicName | None") -> Iterator[EvalResult]:
    """Finite metrics on a dataset that has a name: the Hub refuses others."""
    if dataset is None:
        return
    for column, values in data.metric_columns().items():
        for key, metric in _METRICS.items():
            value = _finite(values.get(key))
            if value is not None:
                yield EvalResult(
                    task_type=data.task,
                    dataset_type=dataset.name,
                    dataset_name=dataset.name,
                    dataset_config=_plain(data.dataset_config),
                    dataset_split=_plain(data.dataset_split),
                    metric_type=metric.hub_type,
                    metric_name=f"{metric.name} ({column})",
                    metric_value=value,
                )


def _model_name(data: CardData, base_model: "_PublicName | None", dataset: "_PublicName | None") -> str:
    if data.repo_id is not None:
        return data.repo_id.split("/")[-1]
    return "-".join(known.short for known in (base_model, dataset) if known)


# ---- What fills the template ---------------------------------------------------------------------------------------


class _Markdown(str):
    """Text that goes into a template as it is; any other text is escaped."""


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hf_deelbo.sharing"),
        finalize=_escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": lambda value: f"{value:,}",
        "number": lambda value: f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}",
        "scientific": lambda value: f"{value:.2e}",
        "short": lambda value: f"{value:.2g}",
    }
    return environment


def _variables(data: CardData) -> dict[str, Any]:
    base_model, dataset = _PublicName.of(data.base_model), _dataset_of(data)
    revision = _plain(data.base_model_revision)
    columns, num_classes = data.metric_columns(), _count(data.num_classes)
    return {
        "task": data.task,
        "image": data.task == "image-classification",
        "repo": _Markdown(data.repo_id or UNKNOWN_REPOSITORY),
        "base_model": base_model and base_model.linked("https://huggingface.co/", revision and f"revision {revision}"),
        "base_model_name": base_model and base_model.short,
        "base_model_repo": _Markdown(base_model.name if base_model and base_model.on_hub else UNKNOWN_BASE_MODEL),
        "dataset": dataset and dataset.linked("https://huggingface.co/datasets/", _plain(data.dataset_config)),
        "dataset_name": dataset and dataset.short,
        "dataset_split": _plain(data.dataset_split),
        "num_classes": num_classes,
        "num_examples": _count(data.num_examples),
        "num_test_examples": _count(data.num_test_examples),
        "num_parameters": _count(data.num_parameters),
        "metric_columns": list(columns),
        "metric_rows": _metric_rows(list(columns.values()), num_classes),
        "figures": [_figure(path) for path in data.figures],
        "settings": _settings(data),
        "versions": _shown([f"{name} {version}" for name, version in data.versions.items() if version]),
        **data.own_variables(),
    }


def _is_d_over_n(kappa: float | None, num_parameters: int | None, num_examples: int | None) -> bool:
    if not (kappa and num_parameters and num_examples):
        return False
    return math.isclose(kappa, num_parameters / num_examples, rel_tol=1e-4)


def _weight_decay(
    prior: str | None, lambda_: float | None, tau: float | None, kappa: float | None, num_examples: int | None
) -> dict[str, float] | None:
    """What multiplies w_bar - mu_p and V_bar in the gradient of the loss, where Sigma_p = I.

    1 / (lambda kappa N) for the backbone, 1 / (tau kappa N) for the head
    """
    if prior not in ("l2-sp", "l2-zero") or not (lambda_ and tau and kappa and num_examples):
        return None
    return {"backbone": 1 / (lambda_ * kappa * num_examples), "head": 1 / (tau * kappa * num_examples)}


def _group_row(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": _plain(row["name"]) or "",
        "num_parameters": row["num_parameters"],
        "sigma": row["sigma"],
        "width": math.sqrt(row["prior_variance"]),
        "in_head": row["in_head"],
    }


def _metric_rows(columns: list[Mapping[str, float]], num_classes: int | None) -> list[dict[str, Any]]:
    rows = []
    for key, metric in _METRICS.items():
        values = [_number(column.get(key)) for column in columns]
        if any(value is not None for value in values):
            guessing = f" (blind guessing: {math.log(num_classes):.3f})" if key == "nll" and num_classes else ""
            cells = [_metric_cell(key, value) for value in values]
            rows.append({"name": metric.name, "cells": cells, "meaning": metric.meaning + guessing})
    return rows


def _metric_cell(key: str, value: float | None) -> str:
    if value is None:
        return ""
    if math.isinf(value):
        return "infinite"
    return f"{100 * value:.1f} %" if key == "accuracy" else f"{value:.3f}"


_CAPTIONS = {
    "training": "What was learned, over the training steps",
    "reliability": "Accuracy over confidence; on the diagonal, confidence can be taken at its word",
    "groups": "What each group of weights learned, from the first layer to the head",
    "elbo_comparison": "ELBo and DE ELBo of two posteriors, over the prior variance",
}


def _figure(path: str) -> dict[str, str]:
    stem = PurePosixPath(path).stem
    caption = _CAPTIONS.get(stem) or _plain(stem.replace("_", " ")) or "Figure"
    return {"caption": caption, "url": _Markdown(quote(str(path)))}


SIGMA_UPDATES_IN_WORDS = {
    "closed-form": "in closed form, as lambda and tau are",
    "optimizer": "by the optimizer",
}


def _description_of_prior(kind: str, has_adapters: bool) -> str:
    if has_adapters and kind == "l2-sp":
        return "L2-SP: around the adapters as they started"
    return PRIORS[kind].description if kind in PRIORS else kind


def _settings(data: CardData) -> list[tuple[str, str]]:
    """Rows of a table; a value that is missing takes its row along."""
    rows = [*data.own_settings().items(), *data.training.items(), *data.preprocessing.items()]
    shown = [(_plain(str(name).replace("_", " ")), _shown(value)) for name, value in rows]
    return [(name, value) for name, value in shown if name and value]


def _shown(value: Any) -> str:
    """A setting in one line; empty if there is nothing to show."""
    value = value.tolist() if hasattr(value, "tolist") else value.value if isinstance(value, Enum) else value
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        parts = {str(name).replace("_", " "): _shown(part) for name, part in value.items()}
        return ", ".join(f"{_plain(name)} {part}" for name, part in parts.items() if part)
    if isinstance(value, (list, tuple)):
        return ", ".join(filter(None, map(_shown, value)))
    return _plain(_last_folder(str(value)) if isinstance(value, os.PathLike) else str(value)) or ""


def _number(value: Any) -> float | None:
    """A plain float, which YAML can hold; `None` for what is no number."""
    return None if value is None or math.isnan(value) else float(value)


def _finite(value: Any) -> float | None:
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None


def _positive(value: Any) -> float | None:
    number = _finite(value)
    return number if number is not None and number > 0 else None


def _count(value: Any) -> int | None:
    number = _positive(value)
    return None if number is None else int(number)


# ---- Names that can be shown ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PublicName:
    """What a model or dataset is called in public: its id on the Hub, or no more of a path than its last folder."""

    name: str
    on_hub: bool

    @classmethod
    def of(cls, name: str | os.PathLike | None) -> "_PublicName | None":
        """`None` if there is nothing that can be shown."""
        if name is None:
            return None
        if _has_form_of_hub_id(str(name)) and not os.path.exists(name):
            return cls(str(name), on_hub=True)
        last = one_line(_last_folder(str(name)))
        return cls(last, on_hub=False) if last else None

    @property
    def short(self) -> str:
        return self.name.split("/")[-1]

    def linked(self, site: str, detail: str | None) -> _Markdown:
        name = f"[{self.name}]({site}{self.name})" if self.on_hub else _escaped(self.name)
        return _Markdown(f"{name} ({_escaped(detail)})" if detail else name)


def _dataset_of(data: CardData) -> _PublicName | None:
    return _PublicName.of(HUB_DATASETS.get(data.dataset_name, data.dataset_name))


def _has_form_of_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def _last_folder(path: str) -> str:
    """Of a path or URL of any system; nothing of one that is a home folder, which is named after its user."""
    if "://" in path:
        path = re.sub(r"^[^:]*://[^/\\]*|[?#].*$", "", path, flags=re.DOTALL)
    folders = [part for part in re.split(r"[/\\]+", path) if part.strip(". ") and not re.match(r"~|\w+:$", part)]
    if not folders or (len(folders) > 1 and folders[-2].lower() in ("home", "users")):
        return ""
    return folders[-1]


# where a path of a machine begins inside a text: C:\x, ~/x, ../x, /x, \\x, file:..., but not the // of a web address
_PATH = re.compile(
    r"\bfile:|\b[A-Za-z]:[/\\](?!/)|(?<!\w)~[\w.-]*[/\\]|(?<![\w.])\.{1,2}[/\\]"
    r"|(?<![\w./\\)\]}+*-])(?<!http:)(?<!https:)[/\\]+(?=\S)"
)


def _plain(text: str | None) -> str | None:
    """One line of a text, without the folders of a path in it; `None` if nothing is left."""
    if text is None:
        return None
    start = _PATH.search(text)
    if start:
        text = text[: start.start()] + _last_folder(text[start.start() :])
    elif os.path.exists(text):
        text = _last_folder(text)
    return one_line(text) or None


def _escaped(value: Any) -> Any:
    """Characters with a meaning in markdown or HTML become references, which are never taken for markup."""
    if not isinstance(value, str) or isinstance(value, _Markdown):
        return value
    return re.sub(r"[^\w\s.,:;/+=()%'\"?…-]|(?<![^\W_])_|_(?![^\W_])", lambda found: f"&#{ord(found[0])};", value)


# ---- Users' edits --------------------------------------------------------------------------------------------------

_MARKED = re.compile(
    r"<!-- hf_deelbo:begin (?P<of_body>\w+); (?P<of_metadata>[^\n;]*);[^\n]*? -->(?P<body>.*?)<!-- hf_deelbo:end -->",
    re.DOTALL,
)


def _marked(body: str, metadata: Mapping[str, Any]) -> str:
    """The body between two comments; the first holds digests of what was generated, to tell later what was edited."""
    of_metadata = " ".join(f"{key}={_digest(value)}" for key, value in metadata.items() if key != "model-index")
    return (
        f"<!-- hf_deelbo:begin {_digest(body.strip())}; {of_metadata}; what is between this comment and the last one "
        "is written anew with the model, unless you edit it; what is outside stays -->\n\n"
        f"{body.strip()}\n\n<!-- hf_deelbo:end -->"
    )


def _is_as_generated(mark: re.Match) -> bool:
    return _digest(mark["body"].replace("\r\n", "\n").strip()) == mark["of_body"]


def _digest(value: Any) -> str:
    text = value if isinstance(value, str) else yaml_dump(value)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: it is not UTF-8 ({error}). Convert it, or move it away.") from error


def _merged(earlier: str, card: ModelCard, file: Path) -> str:
    """The earlier file, brought up to date where nobody edited it."""
    block, metadata, text = _split(earlier, file)
    found = list(_MARKED.finditer(text)) if text.count("<!-- hf_deelbo:") == 2 else []
    mark = found[0] if found else None
    digests = dict(re.findall(r"([\w-]+)=(\w+)", mark["of_metadata"])) if mark else {}

    line_break = "\r\n" if "\r\n" in earlier else "\n"
    new_metadata = _merged_metadata(metadata, card.data.to_dict(), digests)
    if new_metadata != metadata:
        block = f"---\n{yaml_dump(new_metadata, sort_keys=False)}---\n".replace("\n", line_break)
    new_text = card.text.replace("\n", line_break)
    new_mark = _MARKED.search(new_text)
    if not text.strip():
        text = new_text
    elif mark and _is_as_generated(mark):
        text = text[: mark.start()] + new_mark[0] + text[mark.end() :]
    elif mark:  # edited: only the comment changes, which must know the new metadata
        text = text[: mark.start("of_metadata")] + new_mark["of_metadata"] + text[mark.end("of_metadata") :]
    return block + text


def _split(content: str, file: Path) -> tuple[str, dict, str]:
    """The block of metadata, what it says, and the text after it."""
    match = REGEX_YAML_BLOCK.search(content)
    if match is None:
        if content.lstrip().split("\n")[0].rstrip() == "---":
            raise ValueError(f'{file}: its metadata starts with "---" but has no such line at its end. Repair it.')
        return "", {}, content
    try:
        metadata = yaml.safe_load(match[2])
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{file}: its metadata is not YAML ({error}). Repair it.") from error
    if not isinstance(metadata, dict | None):
        raise ValueError(f"{file}: its metadata must be names with values, got {metadata!r}. Repair it.")
    return match[0], metadata or {}, content[match.end() :]


def _merged_metadata(earlier: dict, new: dict, digests: Mapping[str, str]) -> dict:
    """The new values, but where someone changed or removed an earlier one, theirs."""
    merged = {}
    for key in {**earlier, **new}:
        untouched = _digest(earlier[key]) == digests.get(key) if key in earlier else key not in digests
        if key == "model-index" or untouched:
            value = new.get(key)
        elif key == "tags":
            theirs = _as_list(earlier.get(key))
            value = theirs + [tag for tag in new[key] if tag not in theirs]
        else:
            value = earlier.get(key)
        if value is not None:
            merged[key] = value
    return merged


def _as_list(value: Any) -> list:
    return value if isinstance(value, list) else [] if value is None else [value]
