"""What people would do instead of the DE ELBo, on the same data and counted in the same runs and seconds.

Plain fine-tuning is `Trainer` at its own defaults; grid search is MAP with a held-out fifth, small enough to wait for.
"""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

from hf_deelbo.config import PAPER, DEELBoConfig
from hf_deelbo.metrics import named_metrics
from hf_deelbo.reporting import Report
from hf_deelbo.sharing.files import write_json

from .data import NO_LABEL
from .map import MAPConfig, MAPTrainer
from .searches import Setting, Split, grid, grid_search
from .studies import read_lines
from .tasks import Task, quiet

RESULTS = Path(__file__).parents[1] / "results"
# of the small grid, with each of the learning rates that J chooses among
PENALTIES = (1e-2, 1e-4)
PLAIN = "plain Trainer, AdamW 5e-5"
# what plain fine-tuning shares with the run that it is compared with; all else is `Trainer`'s default
_SHARED = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("seed", "data_seed", "use_cpu", "bf16", "fp16", "dataloader_num_workers", "remove_unused_columns"),
    *("dataloader_pin_memory", "report_to", "disable_tqdm"),
)


@dataclass(frozen=True)
class Row:
    """A way to fine-tune: how well it does on the test rows, and what all of it cost.

    Attributes:
        runs: in trainings as long as the DE ELBo's.
        note: what is to be said of it below the table.
    """

    name: str
    test: Mapping[str, float]
    runs: float
    seconds: float
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def comparison_table(rows: Sequence[Row]) -> list[str]:
    """Lines of a table, and its notes.

    Example:
        >>> row = Row("plain", {"accuracy": 0.5, "nll": 1.5, "ece": 0.1}, runs=1, seconds=20, note="not tuned")
        >>> print("\\n".join(comparison_table([row])))
                                            accuracy     NLL     ECE    runs  seconds
        plain (*)                              50.0%   1.500   0.100    1.00       20
        (*) not tuned
    """
    lines, notes = [f"{'':36}{'accuracy':>8}{'NLL':>8}{'ECE':>8}{'runs':>8}{'seconds':>9}"], []
    for row in rows:
        if row.note:
            notes.append(f"({'*' * (len(notes) + 1)}) {row.note}")
        name = row.name + (f" {notes[-1].split()[0]}" if row.note else "")
        quality = f"{row.test['accuracy']:8.1%}{row.test['nll']:8.3f}{row.test['ece']:8.3f}"
        lines.append(f"{name:36}{quality}{row.runs:8.2f}{row.seconds:9,.0f}")
    return lines + notes


def check_labels(task: Task) -> None:
    """Nothing is compared, nor held out, without labels."""
    for split, rows in (("training", task.rows.train), ("test", task.rows.test)):
        labels = rows.with_format(None)[task.rows.label]
        missing = sum(label is None or label == NO_LABEL for label in labels)
        if missing:
            raise ValueError(
                f"compare: {missing} of the {len(labels)} {split} rows of {task.dataset_name!r} have no label in "
                f"column {task.rows.label!r}, and nothing can be tested on them. Remove them, or name the column that "
                "holds labels (label_column_name)."
            )


def num_steps(config: TrainingArguments, num_rows: int) -> int:
    """Of a training with these arguments on so many rows."""
    if config.max_steps > 0:
        return config.max_steps
    batch_size = config.train_batch_size * config.world_size
    if config.dataloader_drop_last:
        batches = num_rows // min(batch_size, num_rows)
    else:
        batches = math.ceil(num_rows / batch_size)
    return math.ceil(config.num_train_epochs * math.ceil(batches / config.gradient_accumulation_steps))


# ---- Plain fine-tuning ----------------------------------------------------------------------------------------------


def plain_trainer(task: Task, config: DEELBoConfig, steps: int, output_dir: str, verbose: bool = False) -> Trainer:
    """`Trainer` at its defaults (AdamW, 5e-5, linear decay), with as many steps and batches as large as the run's."""
    shared = {name: getattr(config, name) for name in _SHARED}
    args = TrainingArguments(output_dir, max_steps=steps, save_strategy="no", **shared)
    return quiet(Trainer(task.load_model(args.seed), args, **task.trainer_arguments), unless=verbose)


def fine_tune_plainly(task: Task, config: DEELBoConfig, folder: Path, report: Report, verbose: bool = False) -> Row:
    """Train and test, or read what that gave."""
    file, steps = folder / "plain_trainer.json", num_steps(config, len(task.train))
    with report.part("plain Trainer", steps):
        if not file.exists():
            report.say(f"Plain Trainer at its defaults: {steps} steps of AdamW from 5e-5, decaying linearly.")
            start = time.perf_counter()
            trainer = plain_trainer(task, config, steps, str(folder / "plain_trainer"), verbose)
            trainer.add_callback(report)
            trainer.train()
            seconds = time.perf_counter() - start
            write_json(file, {"seconds": seconds, "test": metrics_of(trainer)})
    known = json.loads(file.read_text())
    return Row(PLAIN, known["test"], 1.0, known["seconds"])


def metrics_of(trainer: Trainer) -> dict[str, float]:
    """Its metrics on the test rows."""
    return named_metrics(trainer.predict(trainer.eval_dataset).metrics, "test")


# ---- Grid search ----------------------------------------------------------------------------------------------------


def small_grid(config: DEELBoConfig, learning_rates: Sequence[float]) -> tuple[MAPConfig, list[Setting]]:
    """MAP by the run's own optimiser and schedule, each of its learning rates with a strong and a weak penalty.

    A prior that was learned is searched as L2-SP: around its mean, where the model starts.
    """
    names = {part.name for part in fields(TrainingArguments) if part.init}
    shared = {name: getattr(config, name) for name in names}
    nothing_kept = {"save_strategy": "no", "eval_strategy": "no", "load_best_model_at_end": False}
    prior = config.prior if config.prior == "l2-zero" else "l2-sp"
    args = MAPConfig(**(shared | nothing_kept), prior=prior, head_names=config.head_names)
    return args, grid(prior, learning_rates, PENALTIES)


def search_small_grid(
    task: Task,
    config: DEELBoConfig,
    learning_rates: Sequence[float],
    folder: Path,
    report: Report,
    verbose: bool = False,
) -> Row:
    """Search `small_grid` on a held-out fifth, train the best on all rows and test it, or read what that gave."""
    args, settings = small_grid(config, learning_rates)
    steps, start = num_steps(config, len(task.train)), report.done

    def make_trainer(setting: Setting, output_dir: str, split: Split) -> MAPTrainer:
        done = settings.index(setting) if split.validation else len(settings)
        place = f"{done + 1} of {len(settings)}" if split.validation else "the best, on all rows"
        report.begin(f"grid search ({place})", start + done * steps)
        report.say(f"  grid search ({place}): {setting.name}{report.left()}")
        trainer = quiet(task.map_trainer(args, setting, output_dir, split), unless=verbose)
        trainer.add_callback(report)
        return trainer

    report.say(f"Grid search: {len(settings)} settings without a fifth of the rows, and the best on all.")
    trainer, result = grid_search(make_trainer, settings, folder / "grid_search", task.labels, config.seed)
    report.begin("grid search", start + (len(settings) + 1) * steps)
    return Row(f"grid search, {len(settings)} settings", metrics_of(trainer), result.runs, result.seconds)


def recorded_grid_search(task: Task, config: DEELBoConfig) -> Row | None:
    """The paper's grid on the same data and training, if it is among the lines of `examples/results`."""
    data = task.arguments
    same = {
        "method": "map-grid",
        "dataset": data.dataset_name,
        "train_size": data.train_size,
        "subset_seed": data.subset_seed,
        "image_size": data.image_size,
        "horizontal_flip": data.horizontal_flip,
        "model": task.model.model_name_or_path,
        "prior": config.prior,
        "steps": config.max_steps,
        "seed": config.seed,
    }
    if not data.cache_images:
        return None  # other random crops
    protocol = ("optim", "optim_args", "lr_scheduler_type", "per_device_train_batch_size")
    if any(getattr(config, name) != PAPER[name] for name in protocol):
        return None
    for preset, line in _lines():
        is_same = all(line["config"].get(name) == value for name, value in same.items())
        if is_same and line["num_test_examples"] == len(task.test):
            count, machine = round(line["runs"]) - 1, line["machine"]
            note = (
                f"recorded {line['date']}, not run now; {machine['threads']} of {machine['cores']} cores. Again: "
                f"python examples/study.py --preset {preset} --rerun {line['id']}"
            )
            return Row(f"grid search, {count} settings", line["test"]["mean"], line["runs"], line["seconds"], note)
    return None


def _lines() -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(RESULTS.glob("*.jsonl")):
        yield from ((file.stem, line) for line in read_lines(file) if "config" in line and "method" in line["config"])
