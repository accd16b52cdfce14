"""From data to a learned posterior, in one command.

    accelerate launch examples/run_deelbo.py                        # embedded data and model, no network
    accelerate launch examples/run_deelbo.py --preset paper --dataset_name cifar10 --train_size 1000 \
        --model_name_or_path microsoft/resnet-50                    # the paper's protocol
    accelerate launch examples/run_deelbo.py config.yaml            # all arguments in a file

The options are those of transformers' image-classification example where it has one, all of `TrainingArguments`, and
the method's own (`DEELBoConfig`). `--help` lists them.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from transformers import AutoTokenizer, DataCollatorWithPadding, HfArgumentParser, set_seed
from transformers.utils import logging

from hf_deelbo import DEELBoConfig, DEELBoTrainer
from hf_deelbo.data import (
    EMBEDDED_DATASET,
    as_images,
    as_tokens,
    channel_statistics,
    image_transform,
    load_data,
)
from hf_deelbo.metrics import compute_metrics, probabilities_of
from hf_deelbo.modeling import load_classifier
from hf_deelbo.plots import FixedPosterior, plot_elbo_comparison, plot_reliability, plot_training_curves, save_figure
from hf_deelbo.selection import METHODS, Candidate, Selection, select

logger = logging.get_logger(__name__)

GRID_SEARCH_RUNS = 24  # four learning rates by six penalties, of the paper's baseline, and one to train on all data
# the protocol of the paper; what the command line gives goes before it
PRESETS = {
    "paper": {
        "image_size": 224,
        "max_steps": 6000,
        "per_device_train_batch_size": 128,
        "learning_rates": [0.1, 0.01, 0.001, 0.0001],
        "init_sigmas": [1e-4],
        "selection": "full",
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
    "learning_rates": [0.1, 0.01, 0.001, 0.0001],
    "init_sigmas": [1e-3],
    "num_elbo_samples": 3,
    "num_average_samples": 5,
    "compare_elbo": True,
}


@dataclass
class ModelArguments:
    """Which model to fine-tune."""

    model_name_or_path: str = field(
        default="efficientnet-lite0", metadata={"help": "Embedded name, id on the Hub or local folder."}
    )
    model_revision: str = field(default="main", metadata={"help": "Branch, tag or commit of the model on the Hub."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloads are kept."})
    token: str | None = field(default=None, metadata={"help": "Access token of the Hub."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})


@dataclass
class DataArguments:
    """What to learn from."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "digits (embedded), cifar10, oxford-iiit-pet, an id on the Hub or a folder."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "The dataset's configuration."})
    train_dir: str | None = field(default=None, metadata={"help": "A folder with a folder of images per class."})
    validation_dir: str | None = field(default=None, metadata={"help": "The same, of test images."})
    image_column_name: str | None = field(default=None, metadata={"help": "The column of images or texts."})
    label_column_name: str | None = field(default=None, metadata={"help": "The column of labels."})
    train_size: int | None = field(default=None, metadata={"help": "Size of a class-balanced subset to train on."})
    subset_seed: int = field(default=1001, metadata={"help": "Decides the subset."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "At most so many test rows."})
    image_size: int | None = field(default=None, metadata={"help": "Pixels of the crop; default is 224."})
    horizontal_flip: bool = field(default=True, metadata={"help": "Mirror half of the images in training."})
    max_seq_length: int = field(default=128, metadata={"help": "Tokens of a text; more are cut off."})


@dataclass
class RunArguments:
    """How to choose, and what to compare."""

    preset: str | None = field(default=None, metadata={"help": f"Protocol: {', '.join(PRESETS)}."})
    learning_rates: list[float] | None = field(
        default=None, metadata={"help": "Candidates, chosen by J on the training set; default is --learning_rate."}
    )
    init_sigmas: list[float] | None = field(
        default=None, metadata={"help": "Candidates for the start of sigma; default is --init_sigma."}
    )
    selection: str = field(default="halving", metadata={"help": f"How to choose: {', '.join(METHODS)}."})
    num_average_samples: int = field(
        default=10, metadata={"help": "Weight samples averaged in the test, beside the posterior mean; 0 for none."}
    )
    compare_elbo: bool = field(default=False, metadata={"help": "Also train by the plain ELBo, kappa = 1."})


Arguments = tuple[ModelArguments, DataArguments, RunArguments, DEELBoConfig]


def parse_arguments(argv: list[str]) -> Arguments:
    """From the command line, or a JSON or YAML file as the only argument; presets fill in what is not given."""
    parser = HfArgumentParser((ModelArguments, DataArguments, RunArguments, DEELBoConfig))
    if len(argv) == 1 and argv[0].endswith((".json", ".yaml", ".yml")):
        read = parser.parse_json_file if argv[0].endswith(".json") else parser.parse_yaml_file
        parsed = read(os.path.abspath(argv[0]))
        given = set(json.loads(Path(argv[0]).read_text()) if argv[0].endswith(".json") else _yaml_keys(argv[0]))
    else:
        parsed = parser.parse_args_into_dataclasses(argv)
        given = {argument[2:].split("=")[0] for argument in argv if argument.startswith("--")}
    model, data, run, config = parsed
    if run.preset is not None and run.preset not in PRESETS:
        raise ValueError(f"preset: unknown preset {run.preset!r}; there is {', '.join(PRESETS)}.")
    if run.selection not in METHODS:
        raise ValueError(f"selection: unknown method {run.selection!r}; choose one of {', '.join(METHODS)}.")
    defaults = {"logging_steps": 10, "save_total_limit": 1}
    if data.dataset_name is None and data.train_dir is None:
        data.dataset_name = EMBEDDED_DATASET
        defaults |= DEMO
    defaults |= PRESETS.get(run.preset, {})
    for name, value in defaults.items():
        for arguments in parsed:
            if hasattr(arguments, name) and name not in given:
                setattr(arguments, name, value)
    if config.output_dir is None or "output_dir" not in given:
        config.output_dir = "outputs/run_deelbo"
    return model, data, run, config


def _yaml_keys(path: str) -> list[str]:
    import yaml

    return list(yaml.safe_load(Path(path).read_text()))


def claim_output_dir(arguments: Arguments) -> Path:
    """The output folder, with the run's arguments in it; a folder of another run is refused."""
    folder = Path(arguments[-1].output_dir)
    settings = {}
    for part in arguments:
        settings |= part.to_dict() if isinstance(part, DEELBoConfig) else asdict(part)
    settings.pop("token", None)
    content = {name: value for name, value in settings.items() if value is not None}
    file = folder / "run_config.json"
    if file.exists():
        earlier = json.loads(file.read_text())
        different = sorted(k for k in earlier.keys() | content.keys() if earlier.get(k) != content.get(k))
        if different:
            raise ValueError(
                f"output_dir: {folder} holds a run with another {different[0]} ({earlier.get(different[0])}). Choose "
                "another folder, or remove it."
            )
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"output_dir: {folder} is not empty and holds no run of this script. Choose another folder.")
    if arguments[-1].process_index == 0:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=2))
    return folder


class Task:
    """The data as model inputs, and trainers for it."""

    def __init__(self, arguments: Arguments):
        self.model, self.data_arguments, _, self.config = arguments
        given = self.data_arguments
        data = load_data(
            given.dataset_name,
            given.dataset_config_name,
            train_dir=given.train_dir,
            validation_dir=given.validation_dir,
            input_column=given.image_column_name,
            label_column=given.label_column_name,
            train_size=given.train_size,
            subset_seed=given.subset_seed,
            cache_dir=self.model.cache_dir,
            token=self.model.token,
        )
        if given.max_eval_samples is not None:
            data = replace(data, test=data.test.select(range(min(given.max_eval_samples, len(data.test)))))
        self.data = data
        self.tokenizer = None
        prepare = self._prepare_images if data.kind == "image" else self._prepare_texts
        self.train, self.unaugmented, self.test = prepare()
        self.config.remove_unused_columns = False  # they are read by the transform
        self.config.dataloader_pin_memory &= self.config.device.type != "cpu"

    def _prepare_images(self) -> tuple:
        data, size = self.data, self.data_arguments.image_size or 224
        statistics = channel_statistics(data.train, data.inputs, disable_tqdm=self.config.disable_tqdm)
        flip = self.data_arguments.horizontal_flip
        augmented = image_transform(size, statistics, augment=True, horizontal_flip=flip)
        plain = image_transform(size, statistics, augment=False)
        self.preprocessing = {"image_size": size, **asdict(statistics)}
        return (
            as_images(data.train, data.inputs, data.label, augmented),
            as_images(data.train, data.inputs, data.label, plain),
            as_images(data.test, data.inputs, data.label, plain),
        )

    def _prepare_texts(self) -> tuple:
        data, model = self.data, self.model
        self.tokenizer = AutoTokenizer.from_pretrained(
            model.model_name_or_path, revision=model.model_revision, token=model.token, cache_dir=model.cache_dir
        )
        self.preprocessing = {"max_seq_length": self.data_arguments.max_seq_length}
        train, test = (
            as_tokens(rows, data.inputs, data.label, self.tokenizer, self.data_arguments.max_seq_length)
            for rows in (data.train, data.test)
        )
        return train, train, test

    def make_trainer(self, candidate: Candidate, output_dir: str, **changes: object) -> DEELBoTrainer:
        """A trainer with a fresh model."""
        args = replace(
            self.config,
            output_dir=output_dir,
            learning_rate=candidate.learning_rate,
            init_sigma=candidate.init_sigma,
            **changes,
        )
        set_seed(args.seed)
        model = load_classifier(
            self.model.model_name_or_path,
            self.data.class_names,
            self.data.kind,
            revision=self.model.model_revision,
            token=self.model.token,
            cache_dir=self.model.cache_dir,
            trust_remote_code=self.model.trust_remote_code,
        )
        return DEELBoTrainer(
            model,
            args,
            train_dataset=self.train,
            eval_dataset=self.test,
            elbo_dataset=self.unaugmented,
            processing_class=self.tokenizer,
            data_collator=DataCollatorWithPadding(self.tokenizer) if self.tokenizer else None,
            compute_metrics=compute_metrics,
        )


def evaluate(trainer: DEELBoTrainer, num_samples: int) -> dict[str, dict]:
    """Test metrics, and probabilities, at the posterior mean and averaged over weight samples."""
    results = {}
    for name, samples in (("mean", 0), ("average", num_samples)):
        if name == "mean" or samples:
            trainer.args.num_eval_samples = samples
            output = trainer.predict(trainer.eval_dataset)
            metrics = {key: output.metrics[f"test_{key}"] for key in ("accuracy", "nll", "ece", "brier")}
            results[name] = {"metrics": metrics, "probabilities": probabilities_of(output.predictions)}
            labels = output.label_ids
    trainer.args.num_eval_samples = 0
    return {"labels": labels, **results}


def main() -> None:
    """Run."""
    arguments = parse_arguments(sys.argv[1:])
    _, _, run, config = arguments
    folder = claim_output_dir(arguments)
    task = Task(arguments)
    candidates = [
        Candidate(rate, sigma)
        for rate in run.learning_rates or [config.learning_rate]
        for sigma in run.init_sigmas or [config.init_sigma]
    ]
    try:
        trainer, selection = select(task.make_trainer, candidates, folder / "selection", run.selection)
    except KeyboardInterrupt:
        print(f"\nStopped. The last checkpoint is in {folder}; the same command goes on from there.")
        sys.exit(130)
    results = evaluate(trainer, run.num_average_samples)
    elbo = trainer.de_elbo()
    posteriors = [FixedPosterior.from_posterior("DE ELBo", trainer.posterior, elbo.nll)]
    rows = {"DE ELBo": summary(trainer, elbo.value, results)}
    if run.compare_elbo:
        plain = task.make_trainer(selection.best, str(folder / "plain_elbo"), kappa=1, save_strategy="no")
        plain.train()
        plain_elbo = plain.de_elbo()
        posteriors.insert(0, FixedPosterior.from_posterior("plain ELBo", plain.posterior, plain_elbo.nll))
        rows["plain ELBo"] = summary(plain, plain_elbo.value, evaluate(plain, 0))
    if trainer.is_world_process_zero():
        write_results(folder, task, trainer, selection, rows, results, posteriors)
        print(table(folder, task, selection, rows))


def summary(trainer: DEELBoTrainer, de_elbo: float, results: dict) -> dict:
    """What was learned, and how well it does, in plain numbers."""
    posterior = trainer.posterior
    learned = {name: float(getattr(posterior, name)) for name in ("lambda_", "tau", "sigma", "kappa")}
    sizes = {"num_parameters": posterior.num_parameters, "num_examples": posterior.num_examples}
    tests = {name: results[name]["metrics"] for name in ("mean", "average") if name in results}
    return {**learned, **sizes, "de_elbo": de_elbo, "test": tests}


def write_results(
    folder: Path,
    task: Task,
    trainer: DEELBoTrainer,
    selection: Selection,
    rows: dict[str, dict],
    results: dict,
    posteriors: list[FixedPosterior],
) -> None:
    """The posterior, the metrics and the figures."""
    trainer.save_model(str(folder / "posterior"))
    metrics = {"results": rows, "selection": asdict(selection), "preprocessing": task.preprocessing}
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2))
    names = {"mean": "posterior mean", "average": "averaged over samples"}
    probabilities = {name: results[key]["probabilities"] for key, name in names.items() if key in results}
    save_figure(plot_training_curves(trainer.state.log_history), folder / "figures" / "training")
    save_figure(plot_reliability(probabilities, results["labels"]), folder / "figures" / "reliability")
    if len(posteriors) > 1:
        save_figure(plot_elbo_comparison(posteriors), folder / "figures" / "elbo_comparison")


def table(folder: Path, task: Task, selection: Selection, rows: dict[str, dict]) -> str:
    """What a person wants to know."""
    best = rows["DE ELBo"]
    lines = [
        "",
        f"Learned from {best['num_examples']} examples of {len(task.data.class_names)} classes "
        f"(D = {best['num_parameters']:,} parameters), tested on {len(task.test)}:",
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
    chosen = f"learning rate {selection.best.learning_rate:g}, sigma from {selection.best.init_sigma:g}"
    lines += [
        "",
        f"Chosen by J, without a validation set: {chosen}.",
        f"This took {selection.runs:.2f} runs; the paper's grid search takes {GRID_SEARCH_RUNS} and one more.",
        f"Written to {folder}: posterior/, metrics.json, figures/, run_config.json, selection/.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
