"""Tiny models and data that need no network."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import datasets
import huggingface_hub
import numpy as np
import pytest
import torch
import transformers.utils.hub
from huggingface_hub import close_session, constants, file_download, hf_api
from huggingface_hub.utils import _http
from loopback_hub import LoopbackHub
from packaging.version import Version
from PIL import Image
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from hf_deelbo import DEELBoConfig, DEELBoTrainer, LowRankPrior
from hf_deelbo.weights.blocks import blocks_of, draw_sample, on_all_cores
from hf_deelbo.weights.parameters import head_parameter_names

# the models are tiny: a second thread only makes them wait for it, long if the machine has other work
torch.set_num_threads(1)

NUM_LABELS = 3
# models that transformers shards when it loads them
TRAINER_KNOWS_SHARDS = Version(transformers.__version__) >= Version("5.19")
# it has huggingface.co validate a card, wherever HF_ENDPOINT points, and does not mend each broken download
IS_HUB_CLIENT_1 = Version(huggingface_hub.__version__).major == 1


def tiny_vit() -> PreTrainedModel:
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        num_labels=NUM_LABELS,
    )
    return ViTForImageClassification(config)


def tiny_resnet() -> PreTrainedModel:
    config = ResNetConfig(
        num_channels=1,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=NUM_LABELS,
    )
    return ResNetForImageClassification(config)


def tiny_bert() -> PreTrainedModel:
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=NUM_LABELS,
    )
    return BertForSequenceClassification(config)


def load_example(name: str) -> ModuleType:
    """A script of `examples/`, as a module."""
    path = Path(__file__).parents[1] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def add_noise_(tensors: dict[str, torch.Tensor], sigma: torch.Tensor, key: tuple[int, ...]) -> None:
    """w = w + sigma * eps, for all tensors."""
    on_all_cores(lambda block: draw_sample(tensors, tensors, block, sigma, key), blocks_of(tensors))


MODELS = {"vit": tiny_vit, "resnet": tiny_resnet, "bert": tiny_bert}


def make_model(kind: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return MODELS[kind]()


def make_dataset(kind: str, size: int = 24, seed: int = 1) -> list[dict]:
    """Random inputs; labels follow the inputs, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "bert":
        inputs = torch.randint(1, 50, (size, 6), generator=generator)
        labels = inputs[:, 0] % NUM_LABELS
        return [{"input_ids": x, "labels": int(y)} for x, y in zip(inputs, labels, strict=True)]
    labels = torch.arange(size) % NUM_LABELS
    inputs = torch.randn(size, 1, 8, 8, generator=generator) + 2 * labels.view(-1, 1, 1, 1)
    return [{"pixel_values": x, "labels": int(y)} for x, y in zip(inputs, labels, strict=True)]


def collate(examples: list[dict]) -> dict[str, torch.Tensor]:
    """A batch of `make_dataset`'s examples."""
    return {key: torch.stack([torch.as_tensor(example[key]) for example in examples]) for key in examples[0]}


class Recorder:
    """A data collator that keeps what it collated."""

    def __init__(self):
        self.batches = []

    def __call__(self, examples: list[dict]) -> dict[str, torch.Tensor]:
        self.batches.append(collate(examples))
        return collate(examples)


def low_rank_prior(model: nn.Module, rank: int = 3) -> LowRankPrior:
    """Around the model's backbone."""
    generator, head = torch.Generator().manual_seed(5), head_parameter_names(model)
    mean = {name: p.detach().clone() for name, p in model.named_parameters() if name not in head}
    diagonal = {name: torch.rand(p.shape, generator=generator) for name, p in mean.items()}
    deviations = {name: torch.randn(rank, *p.shape, generator=generator) for name, p in mean.items()}
    return LowRankPrior(mean, diagonal, deviations, eps=0.1)


@pytest.fixture(scope="module", autouse=True)
def imported_modules_are_no_garbage():
    """`Trainer.train` collects garbage, and would look through all of torch and transformers: half a second a run."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def make_config(tmp_path) -> Callable[..., DEELBoConfig]:
    def make(**kwargs) -> DEELBoConfig:
        defaults = {
            "output_dir": str(tmp_path / "outputs"),
            "max_steps": 4,
            "learning_rate": 0.1,
            "init_sigma": 0.05,
            "per_device_train_batch_size": 8,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
        }
        return DEELBoConfig.paper(**(defaults | kwargs))

    return make


@pytest.fixture
def make_trainer(make_config) -> Callable[..., DEELBoTrainer]:
    """A trainer of a tiny model; keywords of the trainer in `trainer`, all others are the config's."""

    def make(kind: str = "vit", model=None, train_dataset=None, trainer: dict | None = None, **kwargs):
        return DEELBoTrainer(
            make_model(kind) if model is None else model,
            make_config(**kwargs),
            train_dataset=make_dataset(kind) if train_dataset is None else train_dataset,
            **(trainer or {}),
        )

    return make


@pytest.fixture
def drawn_keys(monkeypatch) -> list[tuple[int, ...]]:
    """Keys of the weight samples that were drawn; of models whose backbone is one block."""
    keys = []

    def write(target, tensors, block, sigma, key, on_cpu):
        if block.group == 0:
            keys.append(key)
        draw_sample(target, tensors, block, sigma, key, on_cpu)

    monkeypatch.setattr("hf_deelbo.posterior.draw_sample", write)
    return keys


@pytest.fixture
def as_on_a_gpu(monkeypatch) -> None:
    """Tensors deny that they are on the CPU, so what is done there is what would be done on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)


@pytest.fixture(params=["on the CPU", "as on a GPU"])
def each_kind_of_device(request) -> None:
    if request.param == "as on a GPU":
        request.getfixturevalue("as_on_a_gpu")


class HostWaits(TorchDispatchMode):
    """Counts how often a number of a tensor is read, for which the host would wait if it were on a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.fixture
def two_threads():
    """As many threads as the machine this was written for has cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def snapshot() -> Callable:
    """A copy of all that the model holds."""
    return lambda model: {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture
def assert_same() -> Callable:
    """Equal to the bit."""

    def check(one: dict, other: dict) -> None:
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name

    return check


@pytest.fixture
def shades(tmp_path) -> str:
    """A dataset of dark, middle and bright images, as a folder."""
    random = np.random.default_rng(0)
    for split, size in (("train", 30), ("test", 9)):
        labels = [i % 3 for i in range(size)]
        images = [Image.fromarray(np.uint8(random.integers(0, 60, (10, 12, 3)) + 80 * label)) for label in labels]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])})
        (tmp_path / "shades" / "data").mkdir(parents=True, exist_ok=True)
        rows = datasets.Dataset.from_dict({"image": images, "label": labels}, features=features)
        rows.to_parquet(tmp_path / "shades" / "data" / f"{split}-00000-of-00001.parquet")
    return str(tmp_path / "shades")


@pytest.fixture
def tiny_vit(tmp_path) -> str:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    return str(tmp_path / "vit")


@pytest.fixture
def loopback_hub(tmp_path, monkeypatch) -> Iterator[LoopbackHub]:
    """A Hub inside this process; huggingface_hub and transformers use it, with an empty cache and without waits."""
    with LoopbackHub() as hub:
        for name, value in hub.env(tmp_path / "hf_home").items():
            monkeypatch.setenv(name, value)
        # the client reads its environment at import: read it again, as a new process would
        for name, value in runpy.run_path(constants.__file__).items():
            if name.isupper() and value != getattr(constants, name):
                monkeypatch.setattr(constants, name, value)
        # these hold the endpoint that they were made with
        monkeypatch.setattr(hf_api.api, "endpoint", hub.endpoint)
        monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # older ones have none
        if IS_HUB_CLIENT_1:
            monkeypatch.setattr(huggingface_hub.ModelCard, "validate", lambda card: None)
        # between attempts the client sleeps, 1 to 8 seconds each time
        for module in (_http, file_download):
            monkeypatch.setattr(module, "time", SimpleNamespace(sleep=lambda seconds: None))
        # its open session knows the old proxies
        close_session()
        yield hub
        close_session()
