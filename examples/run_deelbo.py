"""From data to a learned posterior, in one command.

    accelerate launch examples/run_deelbo.py                        # embedded data and model, no network
    accelerate launch examples/run_deelbo.py --preset paper --dataset_name cifar10 --train_size 1000 \
        --model_name_or_path microsoft/resnet-50                    # the paper's protocol
    accelerate launch examples/run_deelbo.py config.yaml            # all arguments in a file
    python examples/run_deelbo.py --train_dir photos/train --compare --dry-run  # what a comparison would cost
    python examples/run_deelbo.py --train_dir photos/train --compare            # with plain `Trainer` and a small grid

The options are those of transformers' image-classification example where it has one, all of `TrainingArguments`, and
the method's own (`DEELBoConfig`). `--help` lists them. Where they are not given, images are learned by SGD as in the
paper, and texts by AdamW as is usual for transformers (`DEFAULTS` in `lab/tasks.py`).
"""

import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from lab.comparison import (
    PLAIN,
    Row,
    check_labels,
    comparison_table,
    fine_tune_plainly,
    num_steps,
    plain_trainer,
    recorded_grid_search,
    search_small_grid,
    small_grid,
)
from lab.figures import plot_comparison
from lab.searches import LEARNING_RATES, Split
from lab.studies import seconds_of_a_step
from lab.tasks import (
    Arguments,
    DataArguments,
    ModelArguments,
    ScriptRun,
    parse_arguments,
    quiet,
    quiet_libraries,
    without_warning,
)

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
from hf_deelbo.reporting import Report, duration
from hf_deelbo.selection import METHODS, Selection, planned_runs, select
from hf_deelbo.sharing.cards import has_several_sigmas, save_card
from hf_deelbo.sharing.files import write_json
from hf_deelbo.sharing.hub import public_name

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
# the embedded demonstration: small images, for two cores, and steps until it comes to rest; a mirrored digit is no
# digit. It is `DIGITS` of study.py, whose grid search is recorded
DEMO = {
    "horizontal_flip": False,
    "logging_steps": 5,
    "train_size": 100,
    "image_size": 32,
    "cache_images": True,
    "max_steps": 100,
    "num_elbo_samples": 3,
    "num_average_samples": 5,
    "num_saved_samples": 5,
    "compare_plain": True,
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
    compare: bool = field(
        default=False, metadata={"help": "Also fine-tune by plain Trainer, and by a small grid search."}
    )
    compare_plain: bool = field(default=False, metadata={"help": "Also fine-tune by plain Trainer at its defaults."})
    compare_elbo: bool = field(
        default=False, metadata={"help": "Also train by the plain ELBo, kappa = 1, for a figure."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Only say what it would cost; measures a few steps."})
    verbose: bool = field(default=False, metadata={"help": "The logs and bars of Trainer."})


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

    def __init__(self, arguments: Arguments):
        super().__init__(arguments, claim=not arguments[2].dry_run)
        options = self.options
        self.report = Report(bar=False if options.verbose else None)
        self.learning_rates = options.learning_rates or [self.config.learning_rate]
        if options.compare:
            check_labels(self.task)
            if self.config.world_size > 1:
                raise ValueError(
                    f"compare: a grid search runs in one process, and this is one of {self.config.world_size}. Start "
                    "the script with `python`."
                )

    def make_trainer(self, learning_rate: float, output_dir: str, **changes: Any) -> DEELBoTrainer:
        """A trainer with a fresh model, that pushes nothing."""
        args = replace(self.config, output_dir=output_dir, learning_rate=learning_rate, push_to_hub=False, **changes)
        model = self.task.load_model(args.seed)
        trainer = DEELBoTrainer(model, args, elbo_dataset=self.task.unaugmented, **self.task.trainer_arguments)
        return quiet(trainer, unless=self.options.verbose)

    def select(self) -> tuple[DEELBoTrainer, Selection]:
        """Train with the learning rates, and choose by J."""
        folder, options = self.folder / "selection", self.options
        return select(
            self.make_trainer,
            self.learning_rates,
            folder,
            options.selection,
            calibrate=options.calibrate,
            report=self.report,
        )

    def train_by_plain_elbo(self, learning_rate: float) -> DEELBoTrainer:
        """The same with kappa = 1."""
        trainer = self.make_trainer(learning_rate, str(self.folder / "plain_elbo"), kappa=1, save_strategy="no")
        trainer.add_callback(self.report)
        # that is what the figure shows
        with (
            self.report.part("plain ELBo", self.num_steps),
            without_warning("hf_deelbo.callbacks", "The prior holds the weights"),
        ):
            self.report.say(f"Plain ELBo, kappa = 1: {self.num_steps} steps at learning rate {learning_rate:g}.")
            trainer.train()
        return trainer

    @property
    def num_steps(self) -> int:
        """Of a training."""
        return num_steps(self.config, len(self.task.train))

    def others(self) -> list[Row]:
        """What people would do instead: trained, or recorded."""
        options, rows = self.options, []
        rest = (self.folder / "comparison", self.report, options.verbose)
        if options.compare or options.compare_plain:
            rows.append(fine_tune_plainly(self.task, self.config, *rest))
        if options.compare:
            rows.append(search_small_grid(self.task, self.config, self.learning_rates, *rest))
        elif recorded := recorded_grid_search(self.task, self.config):
            rows.append(recorded)
        return rows

    def expect_others(self) -> None:
        """Tell the report of the steps that come beside those of the selection."""
        options, trainings = self.options, 0
        if options.compare or options.compare_plain:
            trainings += 1
        if options.compare:
            trainings += len(small_grid(self.config, self.learning_rates)[1]) + 1
        self.report.expect((trainings + options.compare_elbo) * self.num_steps)


@dataclass
class Result:
    """A trained posterior and its test: metrics and probabilities, at the mean and averaged over samples."""

    trainer: DEELBoTrainer
    de_elbo: DEELBo
    metrics: dict[str, dict[str, float]]
    probabilities: dict[str, Any]
    labels: Any
    num_samples: int

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
        return cls(trainer, de_elbo, metrics, probabilities, output.label_ids, num_samples)

    def rows(self, selection: Selection) -> list[Row]:
        """Of the table, with the cost of the whole choice."""
        samples = self.num_samples
        names = {"mean": "DE ELBo, posterior mean", "average": f"DE ELBo, averaged over {samples} samples"}
        return [Row(names[at], metrics, selection.runs, selection.seconds) for at, metrics in self.metrics.items()]

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
    with quiet_libraries():
        arguments = parse(sys.argv[1:])
    _, _, options, _ = arguments
    with nullcontext() if options.verbose else quiet_libraries():
        run = Run(arguments)
        if options.dry_run:
            print(dry_run(run))
        else:
            carry_out(run)


def carry_out(run: Run) -> None:
    """Train, choose, compare and write."""
    say, task = run.report.say, run.task
    say(f"Learning from {len(task.train)} examples of {len(task.class_names)} classes.")
    run.expect_others()
    try:
        trainer, selection = run.select()
        say(f"Testing on {len(task.test)} other examples.")
        results = {"DE ELBo": Result.of(trainer, run.options.num_average_samples)}
        rows = [*run.others(), *results["DE ELBo"].rows(selection)]
        if run.options.compare_elbo:
            results["plain ELBo"] = Result.of(run.train_by_plain_elbo(selection.best_learning_rate), num_samples=0)
    except KeyboardInterrupt:
        run.report.close()
        print(f"\nStopped. What was learned so far is in {run.folder}; the same command goes on from there.")
        sys.exit(130)
    if trainer.is_world_process_zero():
        write_results(run, results, rows, selection)
        print(table(run, results["DE ELBo"], rows, selection))
        if run.config.push_to_hub:
            run.push("posterior", commit_message="Posterior learned by run_deelbo.py")


def dry_run(run: Run) -> str:
    """What the run would cost, from a few steps of each way that are made in a folder that is thrown away."""
    options, steps, rates = run.options, run.num_steps, run.learning_rates
    short = {"max_steps": 4, "save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False}
    costs = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = run.make_trainer(min(rates), folder, **short)
        runs = planned_runs(trainer, len(rates), steps, options.selection) + options.calibrate
        costs.append(("DE ELBo", runs, seconds_of_a_step(trainer)))
        if options.compare_elbo:
            costs.append(("plain ELBo", 1.0, costs[0][2]))
        if options.compare or options.compare_plain:
            trainer = plain_trainer(run.task, run.config, short["max_steps"], folder)
            costs.append((PLAIN, 1.0, seconds_of_a_step(trainer)))
        if options.compare:
            args, settings = small_grid(run.config, rates)
            everything = Split(list(range(len(run.task.train))), [])
            trainer = quiet(run.task.map_trainer(replace(args, **short), settings[-1], folder, everything))
            costs.append((f"grid search, {len(settings)} settings", len(settings) + 1.0, seconds_of_a_step(trainer)))
    lines = [f"{'':36}{'runs':>8}{'steps':>9}{'s/step':>9}  {'training'}"]
    for name, runs, seconds in costs:
        lines.append(f"{name:36}{runs:8.2f}{runs * steps:9,.0f}{seconds:9.3f}  {duration(runs * steps * seconds)}")
    total = sum(runs * steps * seconds for _, runs, seconds in costs)
    return "\n".join(["", *lines, "", f"About {duration(total)} of training, without tests and J. Nothing was kept."])


def write_results(run: Run, results: dict[str, Result], rows: Sequence[Row], selection: Selection) -> None:
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
    if len(rows) > len(learned.metrics):
        # seconds that were recorded are those of another machine, or of other work beside
        cost = "runs" if any(row.note for row in rows) else "seconds"
        points = {row.name: (getattr(row, cost), row.test["accuracy"], row.test["nll"]) for row in rows}
        save_figure(plot_comparison(points, cost), run.folder / "comparison" / "accuracy_and_nll")
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
    numbers["comparison"] = [row.to_dict() for row in rows]
    write_json(run.folder / "metrics.json", numbers)


def table(run: Run, learned: Result, rows: Sequence[Row], selection: Selection) -> str:
    """What a person wants to know."""
    posterior = learned.trainer.posterior
    best = learned.summary()
    per_tensor = ", the means of all tensors" if has_several_sigmas(posterior.group_table()) else ""
    lines = [
        "",
        f"Learned from {best['num_examples']} examples of {len(run.task.class_names)} classes "
        f"(D = {best['num_parameters']:,} parameters), tested on {len(run.task.test)}:",
        "",
        *comparison_table(rows),
        "",
        f"Learned: lambda {best['lambda_']:.2e}, tau {best['tau']:.2e}, sigma {best['sigma']:.2e}{per_tensor}; "
        f"kappa {best['kappa']:.0f}, J/D {best['de_elbo'] / best['num_parameters']:.4f}.",
        f"Chosen by J, without a validation set: learning rate {selection.best_learning_rate:g}.",
    ]
    if run.options.calibrate:
        mean, average = selection.temperatures
        lines.append(
            f"Calibrated by a run without a fifth of the rows: temperature {mean:.2f}, averaged {average:.2f}."
        )
    if len(rows) == len(learned.metrics):
        lines.append("Plain Trainer and a grid search beside it, on this data: --compare; what that costs: --dry-run.")
    lines.append(f"Written to {run.folder}: posterior/ (model, card and figures), metrics.json, run_config.json.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
