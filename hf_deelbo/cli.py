"""The command `hf-deelbo`: look at a saved posterior or prior, predict with it, publish it, import one."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from tqdm.auto import tqdm
from transformers.utils import logging

from .groups import table_lines
from .inputs import TEXT_COLUMN, answered_in_batches, listed
from .sharing.cards import SIGMA_UPDATES_IN_WORDS, has_several_sigmas, name_repository
from .sharing.files import as_json
from .sharing.hub import (
    NotSavedError,
    SavedConfig,
    fetch,
    push_folder,
)
from .sharing.model_files import PROCESSOR_FILE
from .sharing.models import AUTO_CLASSES, TASK_OF, auto_class_of
from .sharing.posterior_files import PosteriorConfig
from .sharing.posteriors import GaussianPosterior
from .sharing.prior_files import PriorConfig
from .sharing.priors import LowRankPrior
from .sharing.ptyl import load_architecture, load_ptyl
from .sharing.reading import LONGEST_REASON, blaming, one_line
from .uncertainty import uncertainty_of
from .weights.batch_norm import batch_norm_layers

DEFAULT_NUM_SAMPLES = 10
# as shells have them: 128 + the number of the signal
INTERRUPTED, PIPE_CLOSED = 130, 141
EXIT_CODES = "exit codes: 0 done; 1 an error, which is told on stderr; 2 a wrong command line; 130 interrupted"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns one of `EXIT_CODES`, or 141 if what reads the output went away."""
    arguments = _parser().parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        for line in arguments.run(arguments):
            print(line, flush=True)
    except BrokenPipeError:
        # what is left in the buffer would be tried again, and told of, when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError, ImportError, MemoryError) as error:
        print(f"hf-deelbo {arguments.command}: {one_line(str(error), 2 * LONGEST_REASON)}", file=sys.stderr)
        return 1
    return 0


def info(arguments: argparse.Namespace) -> Iterator[str]:
    """What a saved posterior or prior is, from its small JSON file alone; a figure of what its layers learned."""
    config = _saved_config(arguments.repo, **_hub_options(arguments))
    if arguments.json:
        yield json.dumps(as_json({"what": config.WHAT, **asdict(config)}), allow_nan=False)
        return
    rows = _posterior_rows(config) if isinstance(config, PosteriorConfig) else _prior_rows(config)
    rows["written with"] = ", ".join(f"{name} {number}" for name, number in config.library_versions.items())
    known = {name: one_line(str(value)) for name, value in rows.items() if value is not None}
    width = max(len(name) for name in known)
    for name, value in known.items():
        yield f"{name:{width}}  {value}"
    groups = config.groups if isinstance(config, PosteriorConfig) and has_several_sigmas(config.groups) else []
    groups = [row | {"name": one_line(row["name"])} for row in groups]
    if groups:
        yield from ("", *table_lines(groups))
    if arguments.figure is not None:
        if not groups:
            raise ValueError("figure: there is nothing to draw, as all weights have the same sigma and lambda.")
        from .plots import plot_groups, save_figure  # an extra

        image, numbers = save_figure(plot_groups(groups), arguments.figure.removesuffix(".png"))
        yield from ("", f"{image}: the same as a figure; {numbers}: its numbers")


def predict(arguments: argparse.Namespace) -> Iterator[str]:
    """Class probabilities of images (or texts), also of whole folders (or CSV files), averaged over weight samples."""
    folder, _ = fetch(arguments.repo, PosteriorConfig, **_hub_options(arguments))
    trust = {"trust_remote_code": arguments.trust_remote_code}
    posterior = GaussianPosterior.from_pretrained(
        folder, token=arguments.token, cache_dir=arguments.cache_dir, **trust
    )
    task = TASK_OF[auto_class_of(posterior.model)]
    prepare = _preparation(folder, task, **trust)
    num_samples = _num_samples(posterior, arguments.num_samples)
    items = listed(arguments.inputs, task, arguments.column)
    no_bar = len(items) < 2 or not sys.stderr.isatty()
    for item in tqdm(items, desc="Checking", disable=no_bar, leave=False):
        prepare(item)  # a bad one is told before the first answer
    if not arguments.json:
        yield f"{'probability':>11}  {'+- spread':>9}  class" if num_samples else f"{'probability':>11}  class"
    answer = partial(_answers, folder, posterior, num_samples, arguments.top_k)
    answers = answered_in_batches(items, prepare, answer)
    no_bar |= sys.stdout.isatty()  # where the answers would be written into the bar, and tell as much
    for item, found in tqdm(answers, total=len(items), desc="Predicting", disable=no_bar, leave=False):
        if arguments.json:
            yield json.dumps(as_json({"input": item, **found}), allow_nan=False)
            continue
        yield one_line(item)
        for row in found["predictions"]:
            spread = "" if row["spread"] is None else f"  {row['spread']:>9.4f}"
            yield f"{row['probability']:>11.4f}{spread}  {row['label']}"
    if not arguments.json:
        how = f"averaged over {num_samples} weight samples" if num_samples else "at the posterior mean"
        yield f"({how})"


def _answers(
    folder: Path, posterior: GaussianPosterior, num_samples: int, top_k: int, inputs: Mapping[str, torch.Tensor]
) -> list[dict[str, Any]]:
    """Of each row of a batch, in plain numbers: the most probable classes by name, and the uncertainty."""
    known = spread = None
    with blaming(folder, "the inputs cannot be predicted", "Check how they are prepared, and --num_samples."):
        if num_samples > 1:
            samples = posterior.sample_proba(inputs, num_samples)
            known, spread = uncertainty_of(samples, posterior.temperatures.average), samples.std(0)
        probabilities = posterior.predict_proba(inputs, num_samples) if known is None else known.probabilities
    answers = []
    for index, row in enumerate(probabilities):
        predictions = [
            {
                "label": one_line(str(posterior.model.config.id2label.get(label, label))),
                "probability": float(row[label]),
                "spread": None if spread is None else float(spread[index, label]),
            }
            for label in row.topk(min(top_k, len(row))).indices.tolist()
        ]
        parts = ("total", "data", "doubt", "agreement")
        uncertainty = None if known is None else {name: float(getattr(known, name)[index]) for name in parts}
        answers.append({"predictions": predictions, "uncertainty": uncertainty, "num_samples": num_samples})
    return answers


def push(arguments: argparse.Namespace) -> Iterator[str]:
    """Publish a folder that holds a whole posterior or prior; nothing is sent if it does not."""
    config = _saved_config(_existing_folder(arguments.folder))
    (GaussianPosterior if isinstance(config, PosteriorConfig) else LowRankPrior).from_pretrained(arguments.folder)
    name_repository(arguments.folder, arguments.repo)
    commit = push_folder(
        arguments.folder,
        arguments.repo,
        commit_message=arguments.commit_message or f"Upload {config.WHAT}",
        private=arguments.private or None,
        token=arguments.token,
        revision=arguments.revision,
        create_pr=arguments.create_pr,
    )
    yield f"Published: {commit.pr_url or commit.commit_url}"


def import_ptyl(arguments: argparse.Namespace) -> Iterator[str]:
    """Convert a prior that "Pre-Train Your Loss" released (NAME_model.pt, _mean.pt, _variance.pt, _covmat.pt)."""
    if os.path.exists(arguments.output) and (not os.path.isdir(arguments.output) or os.listdir(arguments.output)):
        raise ValueError(f"--output: {arguments.output!r} is there already; choose another folder.")
    model = load_architecture(arguments.model)
    prior, model = load_ptyl(
        _existing_folder(arguments.folder),
        model,
        arguments.name,
        num_deviations=arguments.num_deviations,
        eps=arguments.eps,
    )
    prior.save_pretrained(arguments.output, model=model)
    yield f"{arguments.output}: a prior of rank {prior.rank} over {prior.num_parameters:,} backbone weights"
    yield f'Use it: DEELBoConfig(..., prior="ptyl", prior_name_or_path="{arguments.output}")'


def _posterior_rows(config: PosteriorConfig) -> dict[str, Any]:
    start = "pretrained weights" if config.base is None else "adapters at the start"
    priors = {
        "l2-zero": "N(0, lambda I)",
        "l2-sp": f"N({start}, lambda I)",
        "ptyl": "N(mean of the source task, lambda Sigma), Sigma of low rank",
    }
    kind = config.prior.get("kind")
    num_sigmas = len(config.groups) if has_several_sigmas(config.groups) else 1
    return {
        "what": "posterior" if config.base is None else "posterior of PEFT adapters, which need the base model",
        "task": TASK_OF.get(AUTO_CLASSES.get(config.auto_class), "unknown"),
        "base model": config.base_model,
        "prior": f"{kind}: {priors[kind]} of the backbone, N(0, tau I) of the head" if kind in priors else kind,
        "D, parameters": f"{config.num_parameters:,}",
        "N, training examples": config.num_examples and f"{config.num_examples:,}",
        "kappa": config.kappa and f"{config.kappa:.6g}",
        "lambda": f"{config.lambda_:.4g}",
        "tau": f"{config.tau:.4g}",
        "sigma": f"{config.sigma:.4g}",
        "sigma learned": SIGMA_UPDATES_IN_WORDS[config.sigma_update],
        "grouping": f"{config.grouping}, {num_sigmas} sigma{'s' if num_sigmas > 1 else ''}",
        "J": config.de_elbo and f"{config.de_elbo['de_elbo']:.6g} (to compare with J of the same kappa)",
        "J per parameter": config.de_elbo and f"{config.de_elbo['de_elbo'] / config.num_parameters:.4f}",
        "temperature": _temperature_in_words(config.temperatures),
        "weight samples with batch-norm statistics": len(config.sample_seeds) or None,
    }


def _temperature_in_words(of: Mapping[str, float]) -> str | None:
    is_calibrated = any(value != 1 for value in of.values())
    return f"{of['mean']:.4g} at the mean, {of['average']:.4g} of averages" if is_calibrated else None


def _prior_rows(config: PriorConfig) -> dict[str, Any]:
    return {
        "what": "prior (PTYL): N(mu, lambda Sigma), Sigma = S_diag/2 + eps I + Q Q^T / (2K - 2)",
        "D, parameters of the backbone": f"{config.num_parameters:,}",
        "K, deviations": config.rank,
        "eps": config.eps,
        "tr(Sigma^-1) / D": f"{config.trace_inverse / config.num_parameters:.4g}",
        "log det Sigma / D": f"{config.log_det / config.num_parameters:.4g}",
    }


def _saved_config(name_or_path: str, **options: Any) -> SavedConfig:
    """What describes the posterior or the prior that is there; the error of a posterior if it is neither."""
    try:
        return fetch(name_or_path, PosteriorConfig, only_config=True, **options)[1]
    except NotSavedError:
        with suppress(NotSavedError):
            return fetch(name_or_path, PriorConfig, only_config=True, **options)[1]
        raise


def _preparation(folder: Path, task: str, trust_remote_code: bool) -> Any:
    """What makes an input of the model from an image's path, or from a text; it never asks whether to run code."""
    from transformers import AutoImageProcessor, AutoTokenizer  # they load timm and torchvision

    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    if task == "text-classification":
        with blaming(folder, "its tokenizer cannot be loaded"):
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)

        def prepare_text(text: str) -> Mapping[str, torch.Tensor]:
            with blaming(folder, f"its tokenizer does not take {one_line(text)!r}"):
                return tokenizer(text, truncation=True, return_tensors="pt")

        return prepare_text
    path = folder / PROCESSOR_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: there is no {PROCESSOR_FILE}, so it is not known how to prepare images.")
    with blaming(path):
        processor = AutoImageProcessor.from_pretrained(folder, **options)

    def prepare(name: str) -> Mapping[str, torch.Tensor]:
        try:
            with Image.open(name) as image:
                pixels = image.convert("RGB")
        except FileNotFoundError as error:
            raise ValueError(f"There is no image {name!r}.") from error
        except (UnidentifiedImageError, OSError) as error:
            raise ValueError(f"{name!r} cannot be read as an image ({error}).") from error
        with blaming(path, f"the image processor that it describes does not take {name!r}"):
            return processor(pixels, return_tensors="pt")

    return prepare


def _num_samples(posterior: GaussianPosterior, wanted: int | None) -> int:
    """As many as asked for; by default as many as can be evaluated rightly."""
    if wanted is not None:
        return wanted
    return len(posterior.sample_statistics) if batch_norm_layers(posterior.model) else DEFAULT_NUM_SAMPLES


def _existing_folder(folder: str) -> str:
    if not os.path.isdir(folder):
        raise ValueError(f"There is no folder {folder!r}.")
    return folder


def _hub_options(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("revision", "token", "cache_dir")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-deelbo", description=__doc__, epilog=EXIT_CODES)
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('hf-deelbo')}")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(run: Any, *positional: tuple[str, str], nargs: str | None = None) -> argparse.ArgumentParser:
        added = commands.add_parser(run.__name__.replace("_", "-"), help=run.__doc__, description=run.__doc__)
        added.set_defaults(run=run)
        for name, description in positional:
            added.add_argument(name, help=description, nargs=nargs if name == "inputs" else None)
        added.add_argument("--revision", help="branch, tag or commit on the Hub")
        added.add_argument("--token", help="access token of the Hub")
        return added

    repo = ("repo", "a folder, or an id on the Hub")
    cache = {"help": "where downloads are kept"}
    added = command(info, repo)
    added.add_argument("--cache_dir", **cache)
    instead = added.add_mutually_exclusive_group()
    instead.add_argument("--figure", metavar="FILE.png", help="draw sigma and lambda by depth, and write that here")
    instead.add_argument("--json", action="store_true", help="what is known of it as one line of JSON")
    inputs = ("inputs", "image files or folders of them; texts or CSV files of them")
    added = command(predict, repo, inputs, nargs="+")
    added.add_argument("--column", help=f"of CSV files, the column of texts; default is {TEXT_COLUMN}")
    added.add_argument("--json", action="store_true", help="a line of JSON for each input, with its uncertainty")
    added.add_argument("--cache_dir", **cache)
    added.add_argument("--num_samples", type=int, help="weight samples to average; 0 is the posterior mean")
    added.add_argument("--trust_remote_code", action="store_true", help="let the repository's own code run")
    added.add_argument("--top_k", type=int, default=5, help="how many classes to show")
    added = command(push, ("folder", "a saved posterior or prior"), ("repo", "user/name on the Hub"))
    added.add_argument("--private", action="store_true", help="make a new repository private")
    added.add_argument("--commit_message", help="what the commit is")
    added.add_argument("--create_pr", action="store_true", help="open a pull request")
    added = commands.add_parser("import-ptyl", help=import_ptyl.__doc__, description=import_ptyl.__doc__)
    added.set_defaults(run=import_ptyl)
    added.add_argument("folder", help="the released files")
    added.add_argument("--model", required=True, help="resnet50, another architecture of timm, or a model by name")
    added.add_argument("--output", required=True, help="where to write the prior")
    added.add_argument("--name", help="what the files' names start with, if there are several")
    added.add_argument("--num_deviations", type=int, default=5, help="K, the rank")
    added.add_argument("--eps", type=float, default=0.1, help="what is added to the diagonal")
    return parser


if __name__ == "__main__":
    sys.exit(main())
