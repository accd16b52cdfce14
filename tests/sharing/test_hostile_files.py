"""What a stranger may publish: files whose hashes agree, as he computes them too, and which must not be used."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import low_rank_prior, make_dataset, make_model
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import BertTokenizerFast, ResNetConfig, ResNetForImageClassification, ViTImageProcessor

from hf_deelbo import DEELBo, GaussianPosterior, LowRankPrior
from hf_deelbo.cli import main
from hf_deelbo.sharing.files import sha256_of
from hf_deelbo.sharing.reading import InvalidFilesError, blaming
from hf_deelbo.weights.parameters import head_parameter_names

CONFIG, TENSORS = "posterior_config.json", "posterior.safetensors"
MODEL, MODEL_CONFIG = "model.safetensors", "config.json"
PRIOR_CONFIG, PRIOR = "prior_config.json", "prior.safetensors"
NAN, INF = float("nan"), float("inf")
MOST_SECONDS, MOST_MEGABYTES = 5, 200


def save_posterior(folder: Path, kind: str, processing_class=None, prior=None) -> None:
    model = make_model(kind)
    posterior = GaussianPosterior(
        model, head_parameter_names(model), prior and prior(model), init_sigma=0.02, num_examples=24
    )
    rows = make_dataset(kind, 6)
    posterior.recompute_batch_norm(
        [{name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "labels"}], num_samples=2
    )
    kl = {"kl_backbone": float(posterior.kl.backbone), "kl_head": float(posterior.kl.head)}
    posterior.de_elbo = DEELBo(1.25, **kl, kappa=posterior.kappa, num_examples=24, nll_standard_error=0.1)
    posterior.save_pretrained(folder, processing_class)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    """Copy what is in them before changing it."""
    root = tmp_path_factory.mktemp("saved")
    processor = ViTImageProcessor(size={"height": 8, "width": 8})
    save_posterior(root / "resnet", "resnet", processor)
    save_posterior(root / "vit", "vit")
    colours = {"num_channels": 3, "embedding_size": 8, "hidden_sizes": [8], "depths": [1], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(**colours, num_labels=3))
    GaussianPosterior(model, head_parameter_names(model), num_examples=9).save_pretrained(root / "colours", processor)
    save_posterior(root / "ptyl", "vit", prior=low_rank_prior)
    words = root / "vocab.txt"
    words.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
    save_posterior(root / "bert", "bert", BertTokenizerFast(str(words), model_max_length=16))
    low_rank_prior(make_model("vit")).save_pretrained(root / "prior")
    return {path.name: path for path in root.iterdir() if path.is_dir()}


@pytest.fixture
def copy_of(saved, tmp_path) -> Callable[[str], Path]:
    return lambda kind: shutil.copytree(saved[kind], tmp_path / kind)


@pytest.fixture
def folder(copy_of) -> Path:
    return copy_of("resnet")


def rewrite(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_hashes_fit(folder: Path) -> None:
    for name in (CONFIG, PRIOR_CONFIG):
        if (folder / name).exists():
            hashes = json.loads((folder / name).read_text())["sha256"]
            known = {file: sha256_of(folder / file) for file in hashes if (folder / file).is_file()}
            rewrite(folder / name, sha256=hashes | known)


def replace_tensors(folder: Path, file: str, **changes: torch.Tensor) -> None:
    save_file(load_file(folder / file) | changes, folder / file, {"format": "pt"})
    make_hashes_fit(folder)


def filled(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """One of its numbers is another."""
    tensor = tensor.clone()
    tensor.view(-1)[-1] = value
    return tensor


def refused(load: Callable, folder: Path, *in_message: str) -> str:
    with pytest.raises(InvalidFilesError) as caught:
        load(folder)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 2000
    for part in (str(folder), *in_message):
        assert part in message
    return message


# ---- Tensors whose hashes agree ------------------------------------------------------------------------------------

MEAN, VARIANCE = (f"batch_norm.1.resnet.embedder.embedder.normalization.{part}" for part in ("mean", "variance"))
PRIOR_MEAN = "prior.mean.resnet.embedder.embedder.convolution.weight"
NO_NUMBERS = (NAN, INF, -INF)
WRONG_VALUES = (
    *((name, value) for name in ("lambda_", "tau", "kappa") for value in (*NO_NUMBERS, -0.5, 0.0)),
    *(("num_examples", value) for value in (*NO_NUMBERS, -24.0, 0.0, 24.9)),
    *((name, value) for name in ("rho", "curvature", MEAN, PRIOR_MEAN) for value in NO_NUMBERS),
    *((name, value) for name in (VARIANCE, "nll") for value in (*NO_NUMBERS, -1.0)),
    *(("nll_standard_error", value) for value in (INF, -INF, -1.0)),
)
WRONG_TYPES = (
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@pytest.mark.parametrize(("name", "value"), WRONG_VALUES)
def test_numbers_that_cannot_be(folder, name, value):
    replace_tensors(folder, TENSORS, **{name: filled(load_file(folder / TENSORS)[name], value)})
    refused(GaussianPosterior.from_pretrained, folder, name)


@pytest.mark.parametrize("dtype", WRONG_TYPES, ids=str)
@pytest.mark.parametrize("name", ["rho", "lambda_", "kappa", "num_examples", "nll", MEAN, VARIANCE, PRIOR_MEAN])
def test_types_that_cannot_be(folder, name, dtype):
    replace_tensors(folder, TENSORS, **{name: load_file(folder / TENSORS)[name].abs().to(dtype)})
    refused(GaussianPosterior.from_pretrained, folder, TENSORS, name, "must be of type")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("classifier.1.weight", value) for value in NO_NUMBERS),
        *(("resnet.embedder.embedder.normalization.running_mean", value) for value in NO_NUMBERS),
        *(("resnet.embedder.embedder.normalization.running_var", value) for value in (*NO_NUMBERS, -1.0)),
    ],
)
def test_numbers_that_no_model_has(folder, name, value):
    replace_tensors(folder, MODEL, **{name: filled(load_file(folder / MODEL)[name], value)})
    refused(GaussianPosterior.from_pretrained, folder, name)


@pytest.mark.parametrize("dtype", WRONG_TYPES, ids=str)
@pytest.mark.parametrize("name", ["classifier.1.weight", "resnet.embedder.embedder.normalization.running_var"])
def test_types_that_no_model_has(folder, name, dtype):
    replace_tensors(folder, MODEL, **{name: load_file(folder / MODEL)[name].to(dtype)})
    refused(GaussianPosterior.from_pretrained, folder, name)


@pytest.mark.parametrize("part", ["mean", "diagonal", "deviations"])
@pytest.mark.parametrize("value", NO_NUMBERS)
def test_numbers_that_no_prior_has(copy_of, part, value):
    for kind, file, load, prefix in (
        ("prior", PRIOR, LowRankPrior.from_pretrained, ""),
        ("ptyl", TENSORS, GaussianPosterior.from_pretrained, "prior."),
    ):
        folder, name = copy_of(kind), f"{prefix}{part}.vit.layernorm.weight"
        replace_tensors(folder, file, **{name: filled(load_file(folder / file)[name], value)})
        refused(load, folder, file, name)


@pytest.mark.parametrize("dtype", WRONG_TYPES, ids=str)
def test_types_that_no_prior_has(copy_of, dtype):
    folder, name = copy_of("prior"), "deviations.vit.layernorm.weight"
    replace_tensors(folder, PRIOR, **{name: load_file(folder / PRIOR)[name].to(dtype)})
    refused(LowRankPrior.from_pretrained, folder, PRIOR, name, "must be of type")


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "lambda",
        "prior.mean.x",
        "prior.scale.x",
        "batch_norm.7.x.mean",
        "batch_norm.x.y.mean",
        "model.x",
        "\x1b[2J\n",
    ],
)
def test_tensors_that_nobody_asked_for(folder, name):
    replace_tensors(folder, TENSORS, **{name: torch.ones(2)})
    assert "\x1b" not in refused(GaussianPosterior.from_pretrained, folder)


@pytest.mark.parametrize("name", ["rho", "lambda_", "tau", "curvature", MEAN, PRIOR_MEAN])
def test_tensors_that_are_not_there(folder, name):
    tensors = load_file(folder / TENSORS)
    tensors.pop(name)
    save_file(tensors, folder / TENSORS)
    make_hashes_fit(folder)
    refused(GaussianPosterior.from_pretrained, folder)


@pytest.mark.parametrize("shape", [(), (1,), (9,), (8, 1), (0,)])
def test_statistics_of_another_shape(folder, shape):
    replace_tensors(folder, TENSORS, **{VARIANCE: torch.ones(shape)})
    refused(GaussianPosterior.from_pretrained, folder, TENSORS, VARIANCE, "must have shape (8,)")


def header(**entries) -> bytes:
    content = json.dumps(entries).encode()
    return struct.pack("<Q", len(content)) + content


def entry(dtype="F32", shape=(2,), data_offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


HEADERS = {
    "nothing": b"",
    "a length alone": struct.pack("<Q", 8),
    "a length beyond the end": struct.pack("<Q", 2**62) + b"{}",
    "no JSON": struct.pack("<Q", 4) + b"\xff\xfe{}",
    "a list": struct.pack("<Q", 2) + b"[]",
    "nesting": struct.pack("<Q", 100_000) + b"[" * 100_000,
    "a number for a tensor": header(rho=3),
    "no shape": header(rho={"dtype": "F64", "data_offsets": [0, 8]}),
    "a negative length": header(rho=entry(shape=(-2,))) + bytes(8),
    "a truth value for a length": header(rho=entry(shape=(True,))) + bytes(8),
    "a length of 10^30": header(rho=entry(shape=(10**30,))) + bytes(8),
    "many lengths": header(rho=entry(shape=[2**62] * 10_000)) + bytes(8),
    "a size that the file has not": header(rho=entry(shape=(10**9, 10**9))) + bytes(8),
    "a type of another kind": header(rho=entry(dtype=7)) + bytes(8),
    "offsets that overlap": header(rho=entry(), tau=entry()) + bytes(8),
    "offsets beyond the end": header(rho=entry(data_offsets=(0, 80))) + bytes(8),
    "a hole": header(rho=entry(data_offsets=(8, 16))) + bytes(16),
}


@pytest.mark.parametrize("kind", HEADERS)
@pytest.mark.parametrize("file", [TENSORS, MODEL, PRIOR])
def test_headers_that_are_none(copy_of, file, kind):
    folder = copy_of("prior" if file == PRIOR else "resnet")
    (folder / file).write_bytes(HEADERS[kind])
    make_hashes_fit(folder)
    load = LowRankPrior.from_pretrained if file == PRIOR else GaussianPosterior.from_pretrained
    refused(load, folder, file)


# ---- Weights from elsewhere ----------------------------------------------------------------------------------------


def forget_hash(folder: Path, name: str = MODEL) -> None:
    hashes = json.loads((folder / CONFIG).read_text())["sha256"]
    rewrite(folder / CONFIG, sha256={file: value for file, value in hashes.items() if file != name})


def in_shards(folder: Path, **files: str) -> dict[str, str]:
    """Cut the model in two; names in the index in place of those of the files."""
    weights = load_file(folder / MODEL)
    os.remove(folder / MODEL)
    parts = {"a.safetensors": list(weights)[::2], "b.safetensors": list(weights)[1::2]}
    for file, names in parts.items():
        save_file({name: weights[name] for name in names}, folder / file, {"format": "pt"})
    index = {name: files.get(file[0], file) for file, names in parts.items() for name in names}
    content = {"metadata": {"total_size": 1}, "weight_map": index}
    (folder / f"{MODEL}.index.json").write_text(json.dumps(content))
    forget_hash(folder)
    hashes = json.loads((folder / CONFIG).read_text())["sha256"]
    rewrite(folder / CONFIG, sha256=hashes | {file: sha256_of(folder / file) for file in parts})
    return index


def test_weights_in_shards_are_loaded(saved, folder, assert_same):
    in_shards(folder)
    expected = GaussianPosterior.from_pretrained(saved["resnet"]).model.state_dict()
    assert_same(GaussianPosterior.from_pretrained(folder).model.state_dict(), expected)


@pytest.mark.parametrize("changed", [False, True])
def test_weights_without_a_hash(folder, changed):
    if changed:
        replace_tensors(folder, MODEL, **{"classifier.1.bias": torch.ones(3)})
    forget_hash(folder)
    refused(GaussianPosterior.from_pretrained, folder, f"{MODEL}: it has no hash")


def test_a_shard_without_a_hash(folder):
    in_shards(folder)
    forget_hash(folder, "b.safetensors")
    refused(GaussianPosterior.from_pretrained, folder, "b.safetensors: it has no hash")


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/b.safetensors", "b.bin", "", "b\x00"])
def test_an_index_that_leads_elsewhere(folder, name):
    in_shards(folder, b=name)
    shutil.copy(folder / "b.safetensors", folder.parent / "outside.safetensors")
    refused(GaussianPosterior.from_pretrained, folder, f"{MODEL}.index.json", "is not the name of a safetensors file")


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "{", "", "null"])
def test_an_index_that_is_none(folder, content):
    in_shards(folder)
    (folder / f"{MODEL}.index.json").write_text(content)
    refused(GaussianPosterior.from_pretrained, folder, f"{MODEL}.index.json")


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("with_code", [False, True])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.bin", "pytorch_model.bin.index.json"])
def test_pickled_weights_are_not_read(folder, tmp_path, name, with_code):
    weights = load_file(folder / MODEL)
    torch.save(Code(tmp_path / "ran") if with_code else weights, folder / name)
    os.remove(folder / MODEL)
    forget_hash(folder)
    refused(GaussianPosterior.from_pretrained, folder, f"it has no {MODEL}", "pickles")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"transformers_weights": "other.safetensors"},
        {"transformers_weights": "../outside.safetensors"},
        {"model_args": {"checkpoint_path": "../outside.pth"}},
        {"architecture": "hf-hub:someone/else"},
        {"architecture": "local-dir:/tmp"},
    ],
)
def test_a_configuration_that_names_other_files(folder, changes):
    rewrite(folder / MODEL_CONFIG, **changes)
    refused(GaussianPosterior.from_pretrained, folder, MODEL_CONFIG, "no files are read but those that were saved")


def test_adapters_that_would_take_the_place_of_the_model(folder, saved):
    """transformers would load the model that they name, whose hashes nobody knows."""
    content = {"base_model_name_or_path": str(saved["vit"]), "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    refused(GaussianPosterior.from_pretrained, folder, "adapter_config.json", "Remove it")


@pytest.mark.parametrize("name", [MODEL, TENSORS, CONFIG, MODEL_CONFIG, "preprocessor_config.json"])
@pytest.mark.parametrize(
    "target", ["/dev/zero", "/dev/random", "/dev/null", "/proc/self/environ", "a pipe", "a folder"]
)
def test_what_is_no_regular_file(folder, name, target):
    os.remove(folder / name)
    if target == "a pipe":
        os.mkfifo(folder / name)
    elif target == "a folder":
        (folder / name).mkdir()
    else:
        os.symlink(target, folder / name)
    refused(GaussianPosterior.from_pretrained, folder)


# ---- Files that fill the memory, or the time -----------------------------------------------------------------------

MEASURE = """
import json, os, re, signal, sys, time
from hf_deelbo import GaussianPosterior, LowRankPrior
valid, *folders = sys.argv[1:]

def megabytes(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

def give_up(*_):
    raise KeyboardInterrupt("it took more than 300 seconds")

signal.signal(signal.SIGALRM, give_up)
GaussianPosterior.from_pretrained(valid)
baseline = megabytes("VmRSS")
for folder in folders:
    kind = LowRankPrior if os.path.exists(os.path.join(folder, "prior_config.json")) else GaussianPosterior
    open("/proc/self/clear_refs", "w").write("5")  # the peak is then the present size
    signal.alarm(300)
    start, error = time.process_time(), None
    try:
        kind.from_pretrained(folder)
    except BaseException as caught:
        error = caught
    signal.alarm(0)
    row = [time.process_time() - start, megabytes("VmHWM") - baseline, type(error).__name__, str(error)]
    print(json.dumps([os.path.basename(folder), *row]), flush=True)
"""


def of_config(**changes) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder / MODEL_CONFIG, **changes)


def of_text(name: str, make: Callable[[], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(make()) and None


def of_zeros(name: str, size: int) -> Callable[[Path], None]:
    """Sparse: it takes no room on the disk."""
    return lambda folder: os.truncate(folder / name, size)


def of_groups(number: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        groups = json.loads((folder / CONFIG).read_text())["groups"]
        rewrite(folder / CONFIG, groups=groups * number)

    return change


def of_deviations(rank: int) -> Callable[[Path], None]:
    """Of 16 weights: a file of 64 K bytes, and matrices of K x K."""

    def change(folder: Path) -> None:
        parts = {"mean.w": torch.zeros(16), "diagonal.w": torch.ones(16), "deviations.w": torch.ones(rank, 16)}
        save_file(parts, folder / PRIOR)
        rewrite(folder / PRIOR_CONFIG, rank=rank, num_parameters=16)
        make_hashes_fit(folder)

    return change


def of_deviations_in_a_posterior(rank: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / TENSORS)
        for name, tensor in tensors.items():
            if name.startswith("prior.deviations."):
                tensors[name] = tensor[:1].repeat(rank, *[1] * (tensor.dim() - 1))
        save_file(tensors, folder / TENSORS)
        make_hashes_fit(folder)

    return change


def of_tensors(file: str, number: int, size: int = 1) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        many = {f"nobody.asked.{index}": torch.zeros(size) for index in range(number)}
        replace_tensors(folder, file, **many)

    return change


HUNGRY = {
    "10 million classes": ("resnet", of_config(num_labels=10**7)),
    "1e9 classes": ("resnet", of_config(num_labels=10**9)),
    "10^18 classes": ("resnet", of_config(num_labels=10**18)),
    "classes in a part": ("resnet", of_config(text_config={"num_labels": 10**8})),
    "classes of timm": ("resnet", of_config(num_classes=10**8)),
    "depths of 20,000": ("resnet", of_config(depths=[20_000, 1])),
    "depths of 10^6": ("resnet", of_config(depths=[10**6] * 2)),
    "depths of 10^9": ("resnet", of_config(depths=[10**9, 10**9])),
    "many stages": ("resnet", of_config(depths=[1] * 10**5, hidden_sizes=[8] * 10**5)),
    "wide stages": ("resnet", of_config(hidden_sizes=[10**6, 10**6])),
    "20,000 layers": ("vit", of_config(num_hidden_layers=20_000)),
    "50,000 layers": ("bert", of_config(num_hidden_layers=50_000)),
    "10^6 layers": ("vit", of_config(num_hidden_layers=10**6)),
    "10^12 layers": ("vit", of_config(num_hidden_layers=10**12)),
    "wide layers": ("vit", of_config(hidden_size=10**6)),
    "a large picture": ("vit", of_config(image_size=10**6)),
    "many channels": ("vit", of_config(num_channels=10**6)),
    "a large vocabulary": ("bert", of_config(vocab_size=10**9)),
    "long texts": ("bert", of_config(max_position_embeddings=10**9)),
    "a config.json of 2 GB": ("resnet", of_zeros(MODEL_CONFIG, 2 * 2**30)),
    "a preprocessor_config.json of 2 GB": ("resnet", of_zeros("preprocessor_config.json", 2 * 2**30)),
    "a posterior_config.json of 2 GB": ("resnet", of_zeros(CONFIG, 2 * 2**30)),
    "a tokenizer.json of 2 GB": ("bert", of_zeros("tokenizer.json", 2 * 2**30)),
    "a posterior_config.json of 50 MB": ("resnet", of_groups(200_000)),
    "a posterior_config.json of 6 MB": ("resnet", of_groups(20_000)),
    "values in 8 MB": ("resnet", of_text(CONFIG, lambda: b'{"a": [' + b"[]," * (2 * 10**6) + b"[]]}")),
    "values in 8 MB of the model": ("resnet", of_text(MODEL_CONFIG, lambda: b'{"a": [' + b"{}," * 2 * 10**6 + b"1]}")),
    "nested a million times": ("resnet", of_text(MODEL_CONFIG, lambda: b'{"a": ' + b"[" * 10**6)),
    "a number of 5 MB": ("resnet", of_text(MODEL_CONFIG, lambda: b'{"a": ' + b"9" * 5 * 10**6 + b"}")),
    "a type of 5 MB": ("resnet", of_config(model_type="x" * 5 * 10**6)),
    "rank 14,000": ("prior", of_deviations(14_000)),
    "rank 14,000 in a posterior": ("ptyl", of_deviations_in_a_posterior(14_000)),
    "10^9 samples are stated": ("resnet", lambda folder: rewrite(folder / CONFIG, sample_seeds=[0, 10**9])),
    "100,000 samples are stated": ("resnet", lambda folder: rewrite(folder / CONFIG, sample_seeds=[*range(10**5)])),
    "20,000 tensors": ("resnet", of_tensors(TENSORS, 20_000)),
    "20,000 weights": ("resnet", of_tensors(MODEL, 20_000)),
    "20,000 tensors of a prior": ("prior", of_tensors(PRIOR, 20_000)),
}
HUNGRY_AND_LONG = {
    "200,000 tensors of 1 GB": ("resnet", of_tensors(TENSORS, 200_000, 1300)),
    "200,000 weights of 1 GB": ("resnet", of_tensors(MODEL, 200_000, 1300)),
    "40,000 tensors of 1 GB": ("resnet", of_tensors(TENSORS, 40_000, 6500)),
    "40,000 weights of 1 GB": ("resnet", of_tensors(MODEL, 40_000, 6500)),
    "one tensor of 1 GB": ("resnet", of_tensors(TENSORS, 1, 2**28)),
    "one tensor of 1 GB of a prior": ("prior", of_tensors(PRIOR, 1, 2**28)),
}


def measured(cases: dict, saved: dict[str, Path], root: Path) -> dict[str, list]:
    """Of each: seconds of the processor, megabytes over the baseline, type and message of its error."""
    folders = []
    for name, (kind, change) in cases.items():
        folder = shutil.copytree(saved[kind], root / name)
        change(folder)
        folders.append(str(folder))
    command = [sys.executable, "-c", MEASURE, str(saved["resnet"]), *folders]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(rows) == len(cases), ended.stderr[-2000:]
    return {name: row for name, *row in rows}


@pytest.fixture(scope="module")
def costs(saved, tmp_path_factory) -> dict[str, list]:
    return measured(HUNGRY, saved, tmp_path_factory.mktemp("hungry"))


@pytest.mark.parametrize("case", HUNGRY)
def test_it_is_refused_at_little_cost(costs, case):
    seconds, megabytes, error, message = costs[case]
    assert error == "InvalidFilesError", message
    assert seconds < MOST_SECONDS
    assert megabytes < MOST_MEGABYTES
    assert len(message) < 1500


@pytest.mark.slow
def test_a_gigabyte_is_refused_at_little_cost(saved, tmp_path):
    for case, (seconds, megabytes, error, message) in measured(HUNGRY_AND_LONG, saved, tmp_path).items():
        assert error == "InvalidFilesError", (case, message)
        assert seconds < MOST_SECONDS, case
        assert megabytes < MOST_MEGABYTES, case


def test_large_files_that_are_right_are_loaded(folder):
    """10,000 classes with long names, and files of others beside them."""
    names = {index: f"class {index}, also called " + "x" * 60 for index in range(10_000)}
    model = make_model("vit")
    model.classifier = nn.Linear(16, 10_000)
    model.config.id2label, model.config.label2id = names, {name: index for index, name in names.items()}
    (folder.parent / "large").mkdir()
    (folder.parent / "large" / "rows.json").write_text(json.dumps(["x"] * 3 * 10**6))
    GaussianPosterior(model, head_parameter_names(model), num_examples=9).save_pretrained(folder.parent / "large")
    assert GaussianPosterior.from_pretrained(folder.parent / "large").model.config.id2label == names


# ---- Raw errors, and questions -------------------------------------------------------------------------------------

MALFORMED = {
    MODEL_CONFIG: [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'"x"',
        b"\xff\xfe",
        b"\x00" * 100,
        b"{}",
        *(
            {"model_type": value}
            for value in (None, 3, [], {}, "", "no_such_type", "vit", "bert", "timm_wrapper", "../x")
        ),
        *({"architectures": value} for value in (3, {"a": 1}, [3])),
        *({"depths": value} for value in (None, "x", [], [-1, 1], ["a", "b"], [1.5, 1], {"a": 1}, 3)),
        *({"hidden_sizes": value} for value in (None, [], [0, 0], [-8, 16], ["8", "16"], [8], [1e308, 2])),
        *({"embedding_size": value} for value in (None, -1, 0, "8", 1e308, [8])),
        *({"num_channels": value} for value in (None, -3, "x", 2.5)),
        *({"layer_type": value} for value in (None, "x", 3)),
        *({"hidden_act": value} for value in (None, "x", 3, {"a": 1})),
        *({"id2label": value} for value in (3, "x", [1, 2], {"a": "b"}, {"0": ["x"]}, {"1e9": "x"})),
        *({"label2id": value} for value in (3, [1])),
        *({"num_labels": value} for value in (None, -1, "x", 1e308, 0.5, [3])),
        *({"dtype": value} for value in (3, "no_such", "int8", "float8_e4m3fn", [])),
        *({"problem_type": value} for value in ("x", 3)),
        {"quantization_config": {"quant_method": "no_such"}},
        {"quantization_config": 3},
        {"attn_implementation": "someone/kernel"},
        {"_attn_implementation": "no_such"},
        {"out_features": ["x"]},
        {"auto_map": 3},
        {"auto_map": {"AutoConfig": "code.Config"}},
        {"transformers_version": 3},
        {"return_dict": "x"},
        {"tie_word_embeddings": "x"},
        {"is_encoder_decoder": []},
    ],
    "preprocessor_config.json": [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        b"{}",
        *({"image_processor_type": value} for value in (None, 3, "NoSuchProcessor", "os.system", [])),
        *({"size": value} for value in (None, "x", -3, 0, {"height": "x"}, {"height": -8, "width": 8}, {"depth": 3})),
        *({"size": {"height": value, "width": 8}} for value in (10**5, 10**9, 1e308)),
        *({"image_mean": value} for value in ("x", [], [0.5], [None] * 3, {"a": 1})),
        *({"image_std": value} for value in ([0, 0, 0], "x", [1e-320] * 3)),
        *({"rescale_factor": value} for value in ("x", 1e308, [])),
        *({"resample": value} for value in ("x", -1, 99, 10**9)),
        {"do_crop": True, "do_center_crop": True, "crop_size": 10**9},
    ],
    "tokenizer_config.json": [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff",
        *({"tokenizer_class": value} for value in (3, "NoSuchTokenizer", [], "os")),
        *({"added_tokens_decoder": value} for value in (3, [], {"x": 3}, {"-1": {"content": "x"}})),
        *({"model_max_length": value} for value in ("x", -5, [])),
        *({"cls_token": value} for value in (3, [], {"content": 3})),
        *({"padding_side": value} for value in (3, "middle")),
        {"extra_special_tokens": 3},
        {"unk_token": {"__type": "AddedToken"}},
    ],
    "tokenizer.json": [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b"\xff" * 10,
        *({"model": value} for value in (None, 3, {}, {"type": "NoSuch"}, {"type": "WordPiece"}, {"type": "BPE"})),
        *({"added_tokens": value} for value in (3, [3], [{"id": 2**40, "content": "x"}], [{"id": -1}])),
        *({"pre_tokenizer": value} for value in (3, {"type": "NoSuch"}, {"type": "Split", "pattern": {"Regex": "("}})),
        *({"post_processor": value} for value in (3, {"type": "TemplateProcessing", "single": "$A"})),
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
        {"version": "99"},
    ],
}
MALFORMED_CASES = [(file, index) for file, contents in MALFORMED.items() for index in range(len(contents))]


@pytest.fixture
def image(tmp_path) -> str:
    Image.effect_noise((20, 30), 90).convert("L").save(tmp_path / "noise.png")
    return str(tmp_path / "noise.png")


@pytest.mark.parametrize(("file", "index"), MALFORMED_CASES)
def test_malformed_files_are_told_in_a_line(copy_of, image, capsys, monkeypatch, file, index):
    """They are refused, or do no harm: no traceback, no question, one line."""
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    kind, item = ("bert", "good bad") if file.startswith("tokenizer") else ("colours", image)
    folder, content = copy_of(kind), MALFORMED[file][index]
    if isinstance(content, dict):
        rewrite(folder / file, **content)
    else:
        (folder / file).write_bytes(content)
    code = main(["predict", str(folder), item, "--num_samples", "0"])
    printed = capsys.readouterr()
    if code == 0:
        assert "at the posterior mean" in printed.out
    else:
        assert code == 1
        lines = [line for line in printed.err.splitlines() if line.startswith("hf-deelbo")]
        assert len(lines) == 1
        assert len(lines[0]) < 1500
        assert str(folder) in lines[0]
    if file == MODEL_CONFIG and code:
        refused(GaussianPosterior.from_pretrained, folder)


@pytest.mark.parametrize(
    ("file", "auto_map", "kind"),
    [
        ("preprocessor_config.json", {"AutoImageProcessor": "code.Evil"}, "colours"),
        ("preprocessor_config.json", {"AutoImageProcessor": ["code.Evil", "code.Evil"]}, "colours"),
        ("tokenizer_config.json", {"AutoTokenizer": ["code.Evil", None]}, "bert"),
        ("tokenizer_config.json", {"AutoTokenizer": ["code.Evil", "code.Evil"]}, "bert"),
        (MODEL_CONFIG, {"AutoConfig": "code.Evil"}, "colours"),
        (MODEL_CONFIG, {"AutoModelForImageClassification": "code.Evil"}, "colours"),
        (MODEL_CONFIG, {"AutoImageProcessor": "code.Evil", "AutoTokenizer": ["code.Evil", None]}, "colours"),
        (MODEL_CONFIG, {"AutoImageProcessor": "code.Evil", "AutoTokenizer": ["code.Evil", None]}, "bert"),
    ],
)
@pytest.mark.parametrize("known_class", [True, False])
def test_code_of_a_repository_is_not_run_and_nobody_is_asked(
    copy_of, image, tmp_path, monkeypatch, capsys, file, auto_map, kind, known_class
):
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    folder = copy_of(kind)
    (folder / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass Evil: pass\n")
    rewrite(folder / file, auto_map=auto_map)
    if not known_class:
        content = json.loads((folder / file).read_text())
        for name in ("image_processor_type", "tokenizer_class", "model_type"):
            content.pop(name, None)
        (folder / file).write_text(json.dumps(content))
    main(["predict", str(folder), image if kind == "colours" else "good", "--num_samples", "0"])
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_code_of_a_repository_is_run_if_it_is_trusted(copy_of, image, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    folder = copy_of("colours")
    (folder / "code.py").write_text(
        f"import os\nfrom transformers import ViTImageProcessor\nos.mkdir({str(tmp_path / 'ran')!r})\n"
        "class Own(ViTImageProcessor): pass\n"
    )
    rewrite(folder / "preprocessor_config.json", auto_map={"AutoImageProcessor": "code.Own"})
    rewrite(folder / "preprocessor_config.json", image_processor_type="Own")
    assert main(["predict", str(folder), image, "--num_samples", "0", "--trust_remote_code"]) == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "label", ["\x1b[2J", "a\nb", "\u202e", "x" * 10_000, "<script>", "--- {{ 7 * 7 }}", ["x"], None, 3]
)
def test_labels_of_strangers_are_printed_in_a_line(copy_of, image, capsys, label):
    folder = copy_of("colours")
    rewrite(folder / MODEL_CONFIG, id2label={"0": label, "1": "b", "2": "c"})
    main(["predict", str(folder), image, "--num_samples", "0"])
    printed = "".join(capsys.readouterr())
    assert all(character.isprintable() or character == "\n" for character in printed)
    assert max(map(len, printed.splitlines())) < 1500


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("de_elbo", {}),
        ("de_elbo", {"de_elbo": None}),
        ("prior", {"kind": []}),
        ("prior", {"kind": {"a": 1}}),
        ("prior", {}),
        ("auto_class", "x" * 10**6),
        ("library_versions", {"\x1b[2J": "\n"}),
        ("base", {"config": {"num_labels": 10**9}, "sha256": "x"}),
        ("groups", [{}]),
        ("num_parameters", 2**62),
        ("lambda_", 1e-320),
    ],
)
def test_info_of_a_stranger_ends_in_lines(folder, capsys, name, value):
    rewrite(folder / CONFIG, **{name: value})
    assert main(["info", str(folder)]) in (0, 1)
    printed = "".join(capsys.readouterr())
    assert all(character.isprintable() or character == "\n" for character in printed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_parameters", 0),
        ("num_parameters", -5),
        ("rank", 0),
        ("rank", 10**9),
        ("trace_inverse", 1e308),
        ("eps", 0),
    ],
)
def test_info_of_a_prior_of_a_stranger_ends_in_lines(copy_of, capsys, name, value):
    folder = copy_of("prior")
    rewrite(folder / PRIOR_CONFIG, **{name: value})
    assert main(["info", str(folder)]) in (0, 1)
    refused(LowRankPrior.from_pretrained, folder)


class Panic(BaseException):
    """As a library in Rust raises."""


Panic.__name__ = "PanicException"


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (MemoryError("no room"), MemoryError),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"), MemoryError),
        (OSError(12, "Cannot allocate memory"), MemoryError),
        (torch.OutOfMemoryError("CUDA out of memory"), MemoryError),
        (ImportError("no timm"), ImportError),
        (KeyError("model_type"), InvalidFilesError),
        (OverflowError("math range error"), InvalidFilesError),
        (RecursionError("too deep"), InvalidFilesError),
        (Panic("in Rust"), InvalidFilesError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_a_lack_of_memory_is_not_the_fault_of_a_file(error, becomes):
    with pytest.raises(becomes) as caught, blaming("folder"):
        raise error
    if not isinstance(error, KeyboardInterrupt):
        assert caught.value.__cause__ is error or caught.value is error
        assert str(caught.value).startswith("folder: ")


def test_a_lack_of_memory_is_told_in_a_line(folder, image, monkeypatch, capsys):
    def from_pretrained(*args, **kwargs):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes")

    monkeypatch.setattr("hf_deelbo.sharing.models.AutoConfig.from_pretrained", from_pretrained)
    assert main(["predict", str(folder), image]) == 1
    printed = capsys.readouterr().err.strip()
    assert printed.endswith("there is not enough memory to load it.")
    assert len(printed.splitlines()) == 1


# ---- Priors by name ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["nan", "another shape", "no hash", "a pipe", "a pickle"])
@pytest.mark.parametrize("prior", ["ptyl", "posterior"])
def test_a_prior_of_a_stranger_is_refused_by_the_trainer(copy_of, make_trainer, prior, case):
    folder = copy_of("prior" if prior == "ptyl" else "vit")
    file = PRIOR if prior == "ptyl" else TENSORS
    name = ("" if prior == "ptyl" else "prior.") + "mean.vit.layernorm.weight"
    if case == "nan":
        replace_tensors(folder, file, **{name: filled(load_file(folder / file)[name], NAN)})
    elif case == "another shape":
        replace_tensors(folder, file, **{name: torch.zeros(3)})
    elif case == "no hash":
        rewrite(folder / (PRIOR_CONFIG if prior == "ptyl" else CONFIG), sha256={})
    else:
        os.remove(folder / file)
        if case == "a pipe":
            os.mkfifo(folder / file)
        else:
            torch.save({}, folder / file)
            make_hashes_fit(folder)
    with pytest.raises(InvalidFilesError, match=str(folder)):
        make_trainer("vit", prior=prior, prior_name_or_path=str(folder))
