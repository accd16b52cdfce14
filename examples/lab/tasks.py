"""What the scripts in `examples/` share: arguments, the task that they describe, and the folder of a run."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import yaml
from huggingface_hub.utils import enable_progress_bars
from transformers import (
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.utils import logging

from hf_deelbo.config import PAPER, DEELBoConfig
from hf_deelbo.data import column_of
from hf_deelbo.metrics import compute_metrics
from hf_deelbo.sharing.cards import HUB_DATASETS
from hf_deelbo.sharing.files import write_json
from hf_deelbo.sharing.hub import push_folder

from .backbones import EMBEDDED_MODEL, load_classifier
from .cached_images import CachedImages, resized_images
from .data import (
    EMBEDDED_DATASET,
    ChannelStatistics,
    ClassificationData,
    as_images,
    as_tokens,
    channel_statistics,
    check_images,
    collate_images,
    image_processor,
    image_transform,
    load_data,
)
from .map import MAPConfig, MAPTrainer
from .searches import LEARNING_RATES, Setting, Split

RUN_CONFIG = "run_config.json"
# for a kind of data, where nothing else is said: the paper's protocol, and what is usual for transformers
DEFAULTS = {
    "image": PAPER | {"learning_rates": list(LEARNING_RATES)},
    "text": {
        "learning_rates": [2e-4, 1e-4, 5e-5, 2e-5],
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 64,
        "num_train_epochs": 10,
        "warmup_steps": 0.1,  # of all steps
    },
}
# what is printed, and what is trained beside it, makes no other run
_OF_NO_RUN = ("verbose", "dry_run", "compare", "compare_plain", "compare_elbo")
# a default of the first is not meant by who gives the second
_UNLESS_GIVEN = {"learning_rates": "learning_rate", "optim_args": "optim"}


@dataclass
class ModelArguments:
    """Which model to fine-tune."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": f"{EMBEDDED_MODEL} (embedded, the default), an id on the Hub or a folder."}
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
    classes: list[str] | None = field(default=None, metadata={"help": "Keep only these classes, by name."})
    train_size: int | None = field(default=None, metadata={"help": "Size of a class-balanced subset to train on."})
    subset_seed: int = field(default=1001, metadata={"help": "Decides the subset."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "At most so many test rows."})
    image_size: int | None = field(default=None, metadata={"help": "Pixels of the crop; default is 224."})
    horizontal_flip: bool = field(default=True, metadata={"help": "Mirror half of the images in training."})
    cache_images: bool = field(
        default=False,
        metadata={"help": "Decode and resize each image once, into a file, and read batches from there."},
    )
    max_seq_length: int = field(default=128, metadata={"help": "Tokens of a text; more are cut off."})


# those of a script: its model, its data, its own options and its training
Arguments = tuple[ModelArguments, DataArguments, Any, DEELBoConfig | MAPConfig]


def parse_arguments(
    kinds: Sequence[type],
    argv: Sequence[str],
    *,
    defaults: Mapping[str, Any],
    demo: Mapping[str, Any],
    presets: Mapping[str, Mapping[str, Any]],
    output_dir: str,
) -> Arguments:
    """The arguments of a script, from the command line or from a JSON or YAML file as the only argument.

    What is not given there comes from the preset that `--preset` names, from `demo` if no dataset is given, from
    `defaults`, without a preset from `DEFAULTS` for this kind of data, or from the dataclass, in this order. Without a
    model it is that of the saved prior, to start at its mean, or else the embedded one.

    Args:
        kinds: `ModelArguments`, `DataArguments`, the script's own dataclass, and `DEELBoConfig` or `MAPConfig`.
        argv: the command line, without the script's name.
        defaults, demo, presets: values of fields, by name.
        output_dir: where to write, if that is not given.
    """
    parser = HfArgumentParser(kinds)
    names = {part.name for kind in kinds for part in fields(kind)}
    given = _given(parser, names, argv)
    is_demo = given.get("dataset_name") is None and given.get("train_dir") is None
    if is_demo:
        given["dataset_name"] = EMBEDDED_DATASET
    preset = given.get("preset")
    if preset is not None and preset not in presets:
        raise ValueError(f"preset: unknown preset {preset!r}; there is {', '.join(presets)}.")
    chosen = {"output_dir": output_dir, **({} if preset else DEFAULTS[_kind_of_data(given)]), **defaults}
    if is_demo:
        chosen |= demo
    if preset:
        chosen |= presets[preset]
    chosen = {n: value for n, value in chosen.items() if n in names and _UNLESS_GIVEN.get(n) not in given}
    model, _, _, config = parsed = parser.parse_dict(chosen | given)
    if model.model_name_or_path is None:
        model.model_name_or_path = config.prior_name_or_path or EMBEDDED_MODEL
    return parsed


def claim_output_dir(arguments: Arguments) -> Path:
    """The output folder, with the run's arguments in it, without the token; a folder of another run is refused."""
    settings = {}
    for part in arguments:
        settings |= part.to_dict() if isinstance(part, TrainingArguments) else asdict(part)
    left_out = {name for name in settings if "token" in name} | {*_OF_NO_RUN}
    content = {name: value for name, value in settings.items() if value is not None and name not in left_out}
    folder = Path(settings["output_dir"])
    file = folder / RUN_CONFIG
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
    if any(isinstance(part, TrainingArguments) and part.process_index == 0 for part in arguments):
        write_json(file, content)
    return folder


class Task:
    """A dataset as inputs of a model: what a trainer needs beside its own arguments.

    Args:
        model: which model.
        data: which dataset.
        disable_tqdm: no progress bars.

    Attributes:
        train, unaugmented, test: rows of model inputs; the second is `train` without augmentation.
        processing_class: the image processor or tokenizer, to be saved with the model.
        preprocessing: what was done to the inputs, in numbers.
    """

    def __init__(self, model: ModelArguments, data: DataArguments, disable_tqdm: bool = False):
        self.model, self.arguments, self.disable_tqdm = model, data, disable_tqdm
        rows = _load_rows(model, data)
        if data.max_eval_samples is not None:
            rows = replace(rows, test=rows.test.select(range(min(data.max_eval_samples, len(rows.test)))))
        self.rows = rows
        if rows.kind == "image":
            self._prepare_images()
        else:
            self._prepare_texts()

    @property
    def class_names(self) -> list[str]:
        """The names of the classes, in the order of their labels."""
        return self.rows.class_names

    @property
    def dataset_name(self) -> str:
        """As the user gave it."""
        return self.arguments.dataset_name or self.arguments.train_dir

    def load_model(self, seed: int) -> PreTrainedModel:
        """The pretrained model, with a new head drawn from `seed`."""
        set_seed(seed)
        return load_classifier(
            self.model.model_name_or_path,
            self.class_names,
            self.rows.kind,
            revision=self.model.model_revision,
            token=self.model.token,
            cache_dir=self.model.cache_dir,
            trust_remote_code=self.model.trust_remote_code,
        )

    @cached_property
    def trainer_arguments(self) -> dict[str, Any]:
        """Keyword arguments of a `Trainer`."""
        return {
            "train_dataset": self.train,
            "eval_dataset": self.test,
            "processing_class": self.processing_class,
            "data_collator": self._collator(),
            "compute_metrics": compute_metrics,
        }

    def map_trainer(self, config: MAPConfig, setting: Setting, output_dir: str, split: Split) -> MAPTrainer:
        """A trainer with a fresh model for a search of `searches`, that pushes nothing.

        It is evaluated on the rows that are held out or, if there are none, on the test set.
        """
        args = replace(config, output_dir=output_dir, push_to_hub=False, **setting.arguments)
        rows = {
            "train_dataset": self.train.select(split.train),
            "unaugmented_dataset": self.unaugmented.select(split.train),
            "eval_dataset": self.unaugmented.select(split.validation) if split.validation else self.test,
        }
        return MAPTrainer(self.load_model(args.seed), args, **(self.trainer_arguments | rows))

    @property
    def labels(self) -> list[int]:
        """The class of each training row."""
        return column_of(self.rows.train, self.rows.label)

    def _collator(self) -> Callable:
        return collate_images if self.rows.kind == "image" else DataCollatorWithPadding(self.processing_class)

    def configure(self, config: TrainingArguments) -> None:
        """Set what the rows need: their columns are read by a transform, which `Trainer` does not know of."""
        config.remove_unused_columns = False
        config.dataloader_pin_memory &= config.device.type != "cpu"

    def _prepare_images(self) -> None:
        rows, size = self.rows, self.arguments.image_size or 224
        statistics = channel_statistics(rows.train, rows.inputs, disable_tqdm=self.disable_tqdm)
        flip = self.arguments.horizontal_flip
        if self.arguments.cache_images:
            self._read_images_from_files(size, statistics)
        else:
            check_images(rows.test, rows.inputs, disable_tqdm=self.disable_tqdm)
            augmented = image_transform(size, statistics, augment=True, horizontal_flip=flip)
            plain = image_transform(size, statistics, augment=False)
            self.train = as_images(rows.train, rows.inputs, rows.label, augmented)
            self.unaugmented = as_images(rows.train, rows.inputs, rows.label, plain)
            self.test = as_images(rows.test, rows.inputs, rows.label, plain)
        self.processing_class = image_processor(size, statistics)
        self.preprocessing = {"image_size": size, "horizontal_flip": flip, **asdict(statistics)}

    def _read_images_from_files(self, size: int, statistics: ChannelStatistics) -> None:
        rows, flip = self.rows, self.arguments.horizontal_flip
        folder = Path(self.model.cache_dir or datasets.config.HF_DATASETS_CACHE) / "resized_images"
        train, test = (
            (resized_images(split, rows.inputs, size, folder, self.disable_tqdm), column_of(split, rows.label))
            for split in (rows.train, rows.test)
        )
        self.train = CachedImages(*train, size, statistics, augment=True, horizontal_flip=flip)
        self.unaugmented = CachedImages(*train, size, statistics)
        self.test = CachedImages(*test, size, statistics)

    def _prepare_texts(self) -> None:
        rows, model, length = self.rows, self.model, self.arguments.max_seq_length
        self.processing_class = AutoTokenizer.from_pretrained(
            model.model_name_or_path, revision=model.model_revision, token=model.token, cache_dir=model.cache_dir
        )
        self.train = self.unaugmented = as_tokens(rows.train, rows.inputs, rows.label, self.processing_class, length)
        self.test = as_tokens(rows.test, rows.inputs, rows.label, self.processing_class, length)
        self.preprocessing = {"max_seq_length": length}


class ScriptRun:
    """A run of a script: its arguments, its task, and its folder, which no other run may have.

    Args:
        arguments: as `parse_arguments` returns them.
        claim: make the folder its own; without it nothing is to be written there.

    Attributes:
        model, data, options, config: the arguments; the third are the script's own.
        folder: where to write.
        task: what to learn.
    """

    def __init__(self, arguments: Arguments, claim: bool = True):
        self.model, self.data, self.options, self.config = arguments
        self.folder = claim_output_dir(arguments) if claim else Path(self.config.output_dir)
        self.task = Task(self.model, self.data, self.config.disable_tqdm)
        self.task.configure(self.config)

    def push(self, name: str, commit_message: str) -> None:
        """Publish what is in the folder under `name`, as `hub_model_id` or by the folder's own name."""
        config = self.config
        commit = push_folder(
            self.folder / name,
            config.hub_model_id or self.folder.name,
            commit_message=commit_message,
            private=config.hub_private_repo,
            token=config.hub_token,
            revision=config.hub_revision,
        )
        print(f"Published: {commit.commit_url}")


# ---- What is not printed --------------------------------------------------------------------------------------------


def quiet(trainer: Trainer, unless: bool = False) -> Any:
    """The same trainer, without the lines and bars of `Trainer`, unless they are wanted."""
    if unless:
        return trainer
    trainer.args.disable_tqdm = True
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    return trainer


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without the warnings and bars of libraries that tell the reader of a script nothing.

    Downloads have their bars on a terminal.
    """
    level, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # that the head is new, among others
    logging.disable_progress_bar()  # of weights that are read and written, and the Hub's
    if sys.stderr.isatty():
        enable_progress_bars()
    else:
        datasets.disable_progress_bars()
    try:
        # batches of the paper's 128 are asked for whatever the size of the training set
        with without_warning("hf_deelbo.trainer", "The training set is smaller than a batch"):
            yield
    finally:
        logging.set_verbosity(level)
        if has_bars:
            logging.enable_progress_bar()
            datasets.enable_progress_bars()


@contextmanager
def without_warning(logger_name: str, start: str) -> Iterator[None]:
    """Without the warnings of a logger that start like this."""
    logger = logging.get_logger(logger_name)

    def is_other(record: Any) -> bool:
        return not record.getMessage().startswith(start)

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _given(parser: HfArgumentParser, names: Collection[str], argv: Sequence[str]) -> dict[str, Any]:
    """What the command line, or the file that it names, says of these arguments."""
    if len(argv) == 1 and argv[0].endswith((".json", ".yaml", ".yml")):
        return yaml.safe_load(_text_of(argv[0]))  # JSON is YAML
    nothing = object()
    said = parser.parse_args(list(argv), argparse.Namespace(**dict.fromkeys(names, nothing)))
    return {name: value for name, value in vars(said).items() if value is not nothing}


def _kind_of_data(given: Mapping[str, Any]) -> str:
    """`"image"` or `"text"`; what has a short name, or comes as a folder per class, is of images."""
    if given.get("train_dir") is not None or given["dataset_name"] in (EMBEDDED_DATASET, *HUB_DATASETS):
        return "image"
    model, data = HfArgumentParser([ModelArguments, DataArguments]).parse_dict(given, allow_extra_keys=True)
    return _load_rows(model, data).kind


def _load_rows(model: ModelArguments, data: DataArguments) -> ClassificationData:
    return load_data(
        data.dataset_name,
        data.dataset_config_name,
        train_dir=data.train_dir,
        validation_dir=data.validation_dir,
        input_column=data.image_column_name,
        label_column=data.label_column_name,
        classes=data.classes,
        train_size=data.train_size,
        subset_seed=data.subset_seed,
        cache_dir=model.cache_dir,
        token=model.token,
    )


def _text_of(path: str) -> str:
    if not os.path.isfile(path):
        raise FileNotFoundError(f"There is no file {path!r} to read arguments from.")
    return Path(path).read_text(encoding="utf-8")
