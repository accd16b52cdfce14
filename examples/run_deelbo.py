"""From data to a learned posterior, in one command.

    accelerate launch examples/run_deelbo.py                        # embedded data and model, no network
    accelerate launch examples/run_deelbo.py --preset paper --dataset_name cifar10 --train_size 1000 \
        --model_name_or_path microsoft/resnet-50                    # the paper's protocol
    accelerate launch examples/run_deelbo.py config.yaml            # all arguments in a file

The options are those of transformers' image-classification example where it has one, all of `TrainingArguments`, and
the method's own (`DEELBoConfig`). `--help` lists them. Where they are not given, images are learned by SGD as in the
paper, and texts by AdamW as is usual for transformers (`DEFAULTS` in `lab/tasks.py`).
"""

import sys
from dataclasses import dataclass, field, replace
from typing import Any

from lab.searches import LEARNING_RATES
from lab.tasks import (
    Arguments,
    DataArguments,
    ModelArguments,
    ScriptRun,
    parse_arguments,
)
from transformers.utils import logging

from hf_deelbo import DEELBo, DEELBoConfig, DEELBoTrainer
from hf_deelbo.config import PAPER, PAPER_SIGMA
from hf_deelbo.metrics import named_metrics, probabilities_of
from hf_deelbo.plots import (
    FixedPosterior,
    plot_elbo_comparison,
    plot_groups,
    plot_reliability,
    plot_training_curves,
    save_figure,
)
from hf_deelbo.selection import METHODS, Selection, select
from hf_deelbo.sharing.cards import has_several_sigmas, save_card
from hf_deelbo.sharing.files import write_json
from hf_deelbo.sharing.hub import public_name

logger = logging.get_logger(__name__)

GRID_SEARCH_RUNS = 24  # four learning rates by six penalties, of the paper's baseline, and one to train on all data
DEFAULTS = {"logging_steps": 10, "save_total_limit": 1}
# the protocol of the paper; what the command line gives goes before it
PRESETS = {
    "paper": PAPER
    | PAPER_SIGMA
    | {
        "image_size": 224,
        "max_steps": 6000,
        "learning_rates": list(LEARNING_RATES),
        "selection": "full",
        "calibrate": False,
        "num_elbo_samples": 10,
    }
}
# the embedded demonstration: small images and few steps, for two cores; a mirrored digit is no digit
DEMO = {
    "horizontal_flip": False,
    "logging_steps": 5,
    "train_size": 100,
    "image_size": 48,
    "max_steps": 50,
    "num_elbo_samples": 3,
    "num_average_samples": 5,
    "num_saved_samples": 5,
    "compare_elbo": True,
}


@dataclass
class RunArguments:
    """How to choose, and what to compare."""

    preset: str | None = field(default=None, metadata={"help": f"Protocol: {', '.join(PRESETS)}."})
    learning_rates: list[float] | None = field(
        default=None,
        metadata={"help": "Candidates, chosen by J on the training set; --learning_rate takes one without a choice."},
    )
    selection: str = field(default="halving", metadata={"help": f"How to choose: {', '.join(METHODS)}."})
    calibrate: bool = field(
        default=True,
        metadata={"help": "Calibrate probabilities by one more run, without a fifth of the training rows."},
    )
    num_average_samples: int = field(
        default=10, metadata={"help": "Weight samples averaged in the test, beside the posterior mean; 0 for none."}
    )
    license: str | None = field(default=None, metadata={"help": "License of what is learned, for its model card."})
    compare_elbo: bool = field(default=False, metadata={"help": "Also train by the plain ELBo, kappa = 1."})


def parse(argv: list[str]) -> Arguments:
    """The arguments of the command line, with the preset's or the demonstration's where it gives none."""
    arguments = parse_arguments(
        (ModelArguments, DataArguments, RunArguments, DEELBoConfig),
        argv,
        defaults=DEFAULTS,
        demo=DEMO,
        presets=PRESETS,
        output_dir="outputs/run_deelbo",
    )
    _, _, options, _ = arguments
    if options.selection not in METHODS:
        raise ValueError(f"selection: unknown method {options.selection!r}; choose one of {', '.join(METHODS)}.")
    return arguments


class Run(ScriptRun):
    """One run of this script."""

    def make_trainer(self, learning_rate: float, output_dir: str, **changes: Any) -> DEELBoTrainer:
        """A trainer with a fresh model, that pushes nothing."""
        args = replace(self.config, output_dir=output_dir, learning_rate=learning_rate, push_to_hub=False, **changes)
        model = self.task.load_model(args.seed)
        return DEELBoTrainer(model, args, elbo_dataset=self.task.unaugmented, **self.task.trainer_arguments)

    def select(self) -> tuple[DEELBoTrainer, Selection]:
        """Train with the learning rates, and choose by J."""
        rates = self.options.learning_rates or [self.config.learning_rate]
        folder, options = self.folder / "selection", self.options
        return select(self.make_trainer, rates, folder, options.selection, calibrate=options.calibrate)

    def train_by_plain_elbo(self, learning_rate: float) -> DEELBoTrainer:
        """The same with kappa = 1."""
        trainer = self.make_trainer(learning_rate, str(self.folder / "plain_elbo"), kappa=1, save_strategy="no")
        trainer.train()
        return trainer


@dataclass
class Result:
    """A trained posterior and its test: metrics and probabilities, at the mean and averaged over samples."""

    trainer: DEELBoTrainer
    de_elbo: DEELBo
    metrics: dict[str, dict[str, float]]
    probabilities: dict[str, Any]
    labels: Any

    @classmethod
    def of(cls, trainer: DEELBoTrainer, num_samples: int) -> "Result":
        """Measure J, and test."""
        metrics, probabilities = {}, {}
        for name, samples in (("mean", 0), ("average", num_samples)):
            if name == "mean" or samples:
                trainer.args.num_eval_samples = samples
                output = trainer.predict(trainer.eval_dataset)
                metrics[name] = named_metrics(output.metrics, "test")
                probabilities[name] = probabilities_of(output.predictions)
        trainer.args.num_eval_samples = 0
        de_elbo = trainer.posterior.de_elbo or trainer.de_elbo()
        return cls(trainer, de_elbo, metrics, probabilities, output.label_ids)

    def summary(self) -> dict[str, Any]:
        """What was learned, and how well it does, in plain numbers."""
        posterior = self.trainer.posterior
        learned = {name: float(getattr(posterior, name)) for name in ("lambda_", "tau", "sigma", "kappa")}
        sizes = {"num_parameters": posterior.num_parameters, "num_examples": posterior.num_examples}
        return {**learned, **sizes, "de_elbo": self.de_elbo.value, "test": self.metrics}

    def at_a_glance(self, name: str) -> FixedPosterior:
        """For the figure of ELBo and DE ELBo."""
        return FixedPosterior.from_posterior(name, self.trainer.posterior, self.de_elbo.nll)


def main() -> None:
    """Run."""
    run = Run(parse(sys.argv[1:]))
    try:
        trainer, selection = run.select()
        results = {"DE ELBo": Result.of(trainer, run.options.num_average_samples)}
        if run.options.compare_elbo:
            results["plain ELBo"] = Result.of(run.train_by_plain_elbo(selection.best_learning_rate), num_samples=0)
    except KeyboardInterrupt:
        print(f"\nStopped. What was learned so far is in {run.folder}; the same command goes on from there.")
        sys.exit(130)
    if trainer.is_world_process_zero():
        write_results(run, results, selection)
        print(table(run, results, selection))
        if run.config.push_to_hub:
            run.push("posterior", commit_message="Posterior learned by run_deelbo.py")


def write_results(run: Run, results: dict[str, Result], selection: Selection) -> None:
    """The posterior with its figures and card, and the numbers."""
    learned, folder = results["DE ELBo"], run.folder / "posterior"
    learned.trainer.save_model(str(folder))
    names = {"mean": "posterior mean", "average": "averaged over samples"}
    probabilities = {names[key]: values for key, values in learned.probabilities.items()}
    figures = {"reliability": plot_reliability(probabilities, learned.labels)}
    logs = learned.trainer.state.log_history
    if any("nll" in line for line in logs):  # not in a run shorter than `logging_steps`
        figures["training"] = plot_training_curves(logs)
    if has_several_sigmas(groups := learned.trainer.posterior.group_table()):
        figures["groups"] = plot_groups(groups)
    if len(results) > 1:
        posteriors = [result.at_a_glance(name) for name, result in reversed(results.items())]
        figures["elbo_comparison"] = plot_elbo_comparison(posteriors)
    for name, figure in figures.items():
        save_figure(figure, folder / "figures" / name)
    data = learned.trainer.card_data()
    chosen_from = sorted({trial.learning_rate for trial in selection.trials}, reverse=True)
    card = replace(
        data,
        base_model=run.model.model_name_or_path,
        dataset_name=run.task.dataset_name,
        dataset_config=run.data.dataset_config_name,
        license=run.options.license,
        training=data.training | {"learning rates tried, chosen by J": chosen_from, "runs this took": selection.runs},
        preprocessing=run.task.preprocessing,
        figures=tuple(f"figures/{name}.png" for name in figures),
        repo_id=public_name(run.config.hub_model_id),
    )
    save_card(folder, card)
    summaries = {name: result.summary() for name, result in results.items()}
    numbers = {"results": summaries, "selection": selection.to_dict(), "preprocessing": run.task.preprocessing}
    write_json(run.folder / "metrics.json", numbers)


def table(run: Run, results: dict[str, Result], selection: Selection) -> str:
    """What a person wants to know."""
    rows = {name: result.summary() for name, result in results.items()}
    best = rows["DE ELBo"]
    lines = [
        "",
        f"Learned from {best['num_examples']} examples of {len(run.task.class_names)} classes "
        f"(D = {best['num_parameters']:,} parameters), tested on {len(run.task.test)}:",
        "",
        f"{'':12}{'kappa':>9}{'lambda':>10}{'tau':>10}{'sigma':>10}{'J/D':>9}   {'test':22}{'accuracy':>8}"
        f"{'NLL':>8}{'ECE':>8}",
    ]
    for name, row in rows.items():
        learned = "".join(f"{row[key]:10.2e}" for key in ("lambda_", "tau", "sigma"))
        learned = f"{name:12}{row['kappa']:9.0f}{learned}{row['de_elbo'] / row['num_parameters']:9.4f}"
        for at, metrics in row["test"].items():
            where = "posterior mean" if at == "mean" else "averaged over samples"
            quality = f"{metrics['accuracy']:8.1%}{metrics['nll']:8.3f}{metrics['ece']:8.3f}"
            lines.append(f"{learned if at == 'mean' else '':{len(learned)}}   {where:22}{quality}")
    mean, average = selection.temperatures
    calibration = [f"Calibrated by a run without a fifth of the rows: temperature {mean:.2f}, averaged {average:.2f}."]
    lines += [
        "",
        f"Chosen by J, without a validation set: learning rate {selection.best_learning_rate:g}.",
        *(calibration if run.options.calibrate else []),
        f"This took {selection.runs:.2f} runs; the paper's grid search takes {GRID_SEARCH_RUNS} and one more.",
        f"Written to {run.folder}: posterior/ (model, card and figures), metrics.json, run_config.json, selection/.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
