"""What the posterior's doubt is good for: leaving out wrong answers, and telling other images from digits.

    python examples/uncertainty.py --data_root data              # data/cifar10, instead of the Hub's
    python examples/uncertainty.py --outside noise inverted      # needs no network
    python examples/uncertainty.py --table                       # of the lines that are there

A run learns from 100 digits as `swap_test.py` does, with `DEELBoTrainer` at its defaults, and measures by several
scores, at the posterior's mean and over weight samples, how unsure it is of test digits and of images that are none.
The latter are only tested on. It takes one thread, and is one line of the results; runs that have one are left out.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from lab.data import ChannelStatistics, decode_image, image_transform, load_data
from lab.reports import markdown_table, spread
from lab.studies import commit, machine, read_lines, write_line
from lab.tasks import Task
from PIL import Image, ImageOps
from swap_test import ADAMW, COMMON, DIGITS, IMAGES, SEEDS, id_of, make_trainer, task_of
from transformers import PrinterCallback

from hf_deelbo import GaussianPosterior
from hf_deelbo.metrics import area_under_risk_coverage, out_of_distribution_auroc
from hf_deelbo.plots import plot_out_of_distribution, plot_risk_coverage, save_figure
from hf_deelbo.sharing.files import as_json

RESULTS = Path(__file__).parent / "results" / "uncertainty.jsonl"
NUM_SAMPLES = 10
OUTSIDE = ("cifar10", "noise", "inverted")
# how unsure a prediction is: the key in a line, and in words
SCORES = {
    "mean_max": "1 - largest probability, mean",
    "mean_entropy": "entropy, mean",
    "average_max": "1 - largest probability, average",
    "average_entropy": "entropy, average",
    "doubt": "doubt (mutual information)",
    "disagreement": "1 - agreement of the samples",
}
DRAWN = ("mean_max", "average_entropy", "doubt")
HOW_TO_READ = """\
Digits, N = 100, 100 steps. AURC: the share of wrong answers among the surest, averaged over how many are kept; lower
is better, and a score that knows nothing has the share of wrong answers among all. AUROC: how well the score tells
other images from test digits; higher is better, 50 knows nothing. *mean*: at the posterior mean; *average*, doubt and
agreement: of 10 weight samples. Means over training sets, with the lowest and the highest, in percent."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subset_seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--outside", nargs="+", choices=OUTSIDE, default=list(OUTSIDE), help="what is no digit")
    parser.add_argument("--num_inside", type=int, default=1000, help="how many test digits")
    parser.add_argument("--num_outside", type=int, default=500, help="how many images of each other kind")
    parser.add_argument("--steps", type=int, default=IMAGES["max_steps"])
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of lines")
    parser.add_argument("--figures", type=Path, help="a folder to draw the runs in that are made now")
    parser.add_argument("--data_root", help="a folder with datasets by their names, instead of the Hub")
    parser.add_argument("--cache_dir", help="for resized images; default is the cache of datasets")
    parser.add_argument("--table", action="store_true", help="print a table of the lines instead of running")
    return parser.parse_args(argv)


# ---- Runs -----------------------------------------------------------------------------------------------------------


def configs_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What decides the outcome of each run."""
    data = DIGITS | {"max_eval_samples": options.num_inside}
    arguments = COMMON | IMAGES | ADAMW | {"max_steps": options.steps}
    rest = {"outside": options.outside, "num_outside": options.num_outside, "num_samples": NUM_SAMPLES}
    return [
        {"what": "uncertainty", "subset_seed": subset_seed, "trainer": "deelbo", "data": data}
        | {"arguments": arguments, "deelbo": {}, **rest}
        for subset_seed in options.subset_seeds
    ]


def carry_out(config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Train and test; the line to note."""
    task, start = task_of(config, options), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(config, task, folder)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        trainer.recompute_batch_norm(NUM_SAMPLES)
    posterior, rows = trainer.posterior, task.rows.test
    digits = [decode_image(value) for value in rows[task.rows.inputs]]
    labels = np.asarray(rows[task.rows.label])
    inside, answers = scores_of(posterior, as_inputs(digits, task))
    losses = {at: (found != labels).astype(float) for at, found in answers.items()}
    answered = {name: (inside[name], losses["mean" if name.startswith("mean") else "average"]) for name in SCORES}
    outside = {
        kind: scores_of(posterior, as_inputs(images_of(kind, config["num_outside"], digits, options), task))[0]
        for kind in config["outside"]
    }
    if options.figures is not None:
        draw(answered, outside, options.figures, config["subset_seed"])
    about = {"id": id_of(config), "config": config, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    about |= {"commit": commit(), "machine": machine(), "seconds": time.monotonic() - start}
    about |= {"command": f"python examples/uncertainty.py --data_root DIR --subset_seeds {config['subset_seed']}"}
    return as_json(
        about
        | {"learned": {name: float(getattr(posterior, name)) for name in ("sigma", "lambda_", "tau", "kappa")}}
        | {"wrong": {at: loss.mean() for at, loss in losses.items()}}
        | {"aurc": {name: area_under_risk_coverage(*pair) for name, pair in answered.items()}}
        | {
            "auroc": {
                kind: {name: out_of_distribution_auroc(inside[name], found[name]) for name in SCORES}
                for kind, found in outside.items()
            }
        }
        | {"mean_scores": {kind: averages(found) for kind, found in {"digits": inside, **outside}.items()}}
    )


def images_of(kind: str, count: int, digits: Sequence[Image.Image], options: argparse.Namespace) -> list[Image.Image]:
    """Images that are no digits, or none as they were learned from."""
    if kind == "inverted":
        return [ImageOps.invert(image) for image in digits[:count]]
    if kind == "noise":  # of as many pixels as digits have
        pixels = np.random.default_rng(0).integers(0, 256, (count, 8, 8), dtype=np.uint8)
        return [Image.fromarray(image).convert("RGB") for image in pixels]
    name = kind if options.data_root is None else f"{options.data_root}/{kind}"
    data = load_data(name, cache_dir=options.cache_dir)
    return [decode_image(value) for value in data.test.select(range(count))[data.inputs]]


def as_inputs(images: Sequence[Image.Image], task: Task) -> torch.Tensor:
    """All in the preprocessing of the digits, with the statistics of those that were trained on."""
    statistics = ChannelStatistics(task.preprocessing["mean"], task.preprocessing["std"])
    transform = image_transform(task.preprocessing["image_size"], statistics, augment=False)
    return torch.stack([transform(image) for image in images]).contiguous(memory_format=torch.channels_last)


def scores_of(posterior: GaussianPosterior, pixels: torch.Tensor) -> tuple[dict[str, np.ndarray], dict]:
    """`SCORES` of each image, and the answers at the mean and of the average."""
    found, answers = defaultdict(list), defaultdict(list)
    for batch in pixels.split(250):
        inputs = {"pixel_values": batch}
        mean, known = posterior.predict_proba(inputs).double(), posterior.uncertainty(inputs, NUM_SAMPLES)
        found["mean_max"].append(1 - mean.amax(-1))
        found["mean_entropy"].append(torch.special.entr(mean).sum(-1))
        found["average_max"].append(1 - known.probabilities.double().amax(-1))
        found["average_entropy"].append(known.total)
        found["doubt"].append(known.doubt)
        found["disagreement"].append(1 - known.agreement)
        answers["mean"].append(mean.argmax(-1))
        answers["average"].append(known.probabilities.argmax(-1))
    return tuple({name: torch.cat(parts).numpy() for name, parts in each.items()} for each in (found, answers))


def averages(scores: dict[str, np.ndarray]) -> dict[str, float]:
    """Of each score."""
    return {name: float(values.mean()) for name, values in scores.items()}


def draw(answered: dict[str, tuple], outside: dict[str, dict], folder: Path, subset_seed: int) -> None:
    """Both figures of a run."""
    curves = {SCORES[name]: answered[name] for name in DRAWN}
    save_figure(plot_risk_coverage(curves), folder / f"uncertainty_risk_{subset_seed}")
    doubts = {kind: scores["doubt"] for kind, scores in outside.items()}
    figure = plot_out_of_distribution(answered["doubt"][0], doubts, "doubt (mutual information, nats)")
    save_figure(figure, folder / f"uncertainty_outside_{subset_seed}")


# ---- Table ----------------------------------------------------------------------------------------------------------


def table(lines: Sequence[dict[str, Any]]) -> str:
    """A row for each score; lines of one set of other images and sizes."""
    kinds = list(dict.fromkeys(kind for line in lines for kind in line["auroc"]))
    rows = [["share of wrong answers", _both([line["wrong"] for line in lines]), *[""] * len(kinds)]]
    for name, words in SCORES.items():
        aurocs = [[line["auroc"][kind][name] for line in lines if kind in line["auroc"]] for kind in kinds]
        rows.append([words, spread([line["aurc"][name] for line in lines], 2, 100)])
        rows[-1] += [spread(values, 1, 100) for values in aurocs]
    return markdown_table(["score", "AURC %", *(f"AUROC %, {kind}" for kind in kinds)], rows)


def _both(wrong: Sequence[dict[str, float]]) -> str:
    return ", ".join(f"{100 * fmean(of[at] for of in wrong):.2f} {at}" for at in ("mean", "average"))


def main(argv: Sequence[str] | None = None) -> None:
    """Run, or print the table."""
    options = parse(argv)
    configs = {} if options.table else {id_of(config): config for config in configs_of(options)}
    done = {line["id"] for line in read_lines(options.results)}
    for config in (config for name, config in configs.items() if name not in done):
        write_line(options.results, carry_out(config, options))
        print(f"Training set {config['subset_seed']} is noted.", flush=True)
    print(table(read_lines(options.results)))


if __name__ == "__main__":
    main()
