"""What the DE ELBo saves you: MAP estimation, with learning rate and penalties searched on held-out data.

    python examples/run_grid_search.py                              # embedded data and model, a small grid, no network
    python examples/run_grid_search.py --preset paper --dataset_name cifar10 --train_size 1000 \
        --model_name_or_path microsoft/resnet-50                    # the paper's grid of 24, and a run on all data
    python examples/run_grid_search.py --search tpe --num_trials 24 --dataset_name cifar10 --train_size 100

The sibling of `run_deelbo.py`, with the same options for model, data and training (`MAPConfig`). `--help` lists them.
"""

import sys
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from lab.map import MAPConfig, MAPTrainer
from lab.searches import (
    LAMBDAS,
    LEARNING_RATES,
    PENALTIES_OVER_N,
    SearchResult,
    grid,
    grid_search,
    random_search,
    tpe_search,
)
from lab.tasks import (
    Arguments,
    DataArguments,
    ModelArguments,
    ScriptRun,
    parse_arguments,
)

from hf_deelbo.config import PAPER
from hf_deelbo.metrics import named_metrics, probabilities_of
from hf_deelbo.plots import plot_reliability, save_figure
from hf_deelbo.sharing.files import write_json

SEARCHES = ("grid", "random", "tpe")
DEFAULTS = {
    "penalties": list(PENALTIES_OVER_N),
    "lambdas": list(LAMBDAS),
    "logging_steps": 10,
    "save_strategy": "no",
}
PRESETS = {"paper": PAPER | {"image_size": 224, "max_steps": 6000, "learning_rates": list(LEARNING_RATES)}}
# the embedded demonstration: that of run_deelbo.py, with a grid of four
DEMO = {
    "learning_rates": [0.1, 0.01],
    "penalties": [1e-2, 1e-4],
    "horizontal_flip": False,
    "train_size": 100,
    "image_size": 32,
    "cache_images": True,
    "max_steps": 100,
}


@dataclass
class SearchArguments:
    """What to search."""

    preset: str | None = field(default=None, metadata={"help": f"Protocol: {', '.join(PRESETS)}."})
    search: str = field(default="grid", metadata={"help": f"How to search: {', '.join(SEARCHES)}."})
    num_trials: int = field(default=24, metadata={"help": "Settings that random and tpe try."})
    learning_rates: list[float] | None = field(
        default=None, metadata={"help": "Of the grid, and the ends of other searches; --learning_rate is one."}
    )
    penalties: list[float] | None = field(
        default=None, metadata={"help": "alpha/N = beta/N of the grid; for ptyl beta/N = 1/(tau N)."}
    )
    lambdas: list[float] | None = field(default=None, metadata={"help": "lambda of the grid, for ptyl."})


def parse(argv: list[str]) -> Arguments:
    """The arguments of the command line, with the preset's or the demonstration's where it gives none."""
    arguments = parse_arguments(
        (ModelArguments, DataArguments, SearchArguments, MAPConfig),
        argv,
        defaults=DEFAULTS,
        demo=DEMO,
        presets=PRESETS,
        output_dir="outputs/run_grid_search",
    )
    _, _, options, config = arguments
    if options.search not in SEARCHES:
        raise ValueError(f"search: unknown search {options.search!r}; choose one of {', '.join(SEARCHES)}.")
    options.learning_rates = options.learning_rates or [config.learning_rate]
    return arguments


class Run(ScriptRun):
    """One run of this script."""

    def search(self) -> tuple[MAPTrainer, SearchResult]:
        """Try the settings, and train the best on all data."""
        options, prior, make_trainer = self.options, self.config.prior, partial(self.task.map_trainer, self.config)
        where = {"folder": self.folder / "search", "labels": self.task.labels, "seed": self.config.seed}
        if options.search == "grid":
            settings = grid(prior, options.learning_rates, options.penalties, options.lambdas)
            return grid_search(make_trainer, settings, **where)
        search = random_search if options.search == "random" else tpe_search
        return search(make_trainer, prior, options.num_trials, learning_rates=options.learning_rates, **where)


def main() -> None:
    """Run."""
    run = Run(parse(sys.argv[1:]))
    try:
        trainer, result = run.search()
        tests = {"running": test(trainer, False), "recomputed": test(trainer, True)}
    except KeyboardInterrupt:
        print(f"\nStopped. What was tried so far is in {run.folder}; the same command goes on from there.")
        sys.exit(130)
    probabilities = {f"{name} batch-norm statistics": output["probabilities"] for name, output in tests.items()}
    figure = plot_reliability(probabilities, tests["running"]["labels"])
    save_figure(figure, run.folder / "figures" / "reliability")
    metrics = {name: output["metrics"] for name, output in tests.items()}
    write_json(run.folder / "metrics.json", numbers(run, result, metrics))
    print(table(run, result, metrics))


def test(trainer: MAPTrainer, recompute_batch_norm: bool) -> dict[str, Any]:
    """The test, with running or recomputed batch-norm statistics."""
    trainer.args.recompute_batch_norm = recompute_batch_norm
    output = trainer.predict(trainer.eval_dataset)
    metrics = named_metrics(output.metrics, "test")
    return {"metrics": metrics, "probabilities": probabilities_of(output.predictions), "labels": output.label_ids}


def numbers(run: Run, result: SearchResult, metrics: dict[str, dict[str, float]]) -> dict[str, Any]:
    """All of it as JSON has it."""
    return {
        "best": result.best.arguments,
        "runs": result.runs,
        "seconds": result.seconds,
        "trials": [trial.to_dict() for trial in result.trials],
        "test": metrics,
        "data": asdict(run.data),
        "preprocessing": run.task.preprocessing,
    }


def table(run: Run, result: SearchResult, metrics: dict[str, dict[str, float]]) -> str:
    """What a person wants to know."""
    lines = ["", f"{'setting':40}{'validation':>12}{'NLL':>9}{'seconds':>9}"]
    for trial in result.trials:
        best = "  <- chosen" if trial.setting == result.best else ""
        quality = f"{trial.validation_accuracy:12.1%}{trial.validation_nll:9.3f}{trial.seconds:9.0f}"
        lines.append(f"{trial.setting.name:40}{quality}{best}")
    lines += ["", f"Trained with it on all {len(run.task.train)} examples, tested on {len(run.task.test)}:", ""]
    for name, values in metrics.items():
        quality = f"accuracy {values['accuracy']:.1%}, NLL {values['nll']:.3f}, ECE {values['ece']:.3f}"
        lines.append(f"{name + ' batch-norm statistics':40}{quality}")
    lines += [
        "",
        f"This took {result.runs:.2f} runs and {result.seconds:.0f} seconds.",
        f"Written to {run.folder}: search/ (with the model), metrics.json, figures/, run_config.json.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
