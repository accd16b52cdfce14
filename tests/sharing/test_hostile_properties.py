"""Whatever a stranger writes into a description or a header is refused in words, or loads what can be used."""

import json
import math
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import low_rank_prior, make_dataset, make_model

from hf_deelbo import GaussianPosterior, LowRankPrior
from hf_deelbo.sharing.files import sha256_of
from hf_deelbo.sharing.reading import InvalidFilesError
from hf_deelbo.weights.parameters import head_parameter_names

hypothesis = pytest.importorskip("hypothesis", reason="an extra of the tests")
st = hypothesis.strategies

CONFIG, TENSORS = "posterior_config.json", "posterior.safetensors"
MODEL, MODEL_CONFIG = "model.safetensors", "config.json"
PRIOR_CONFIG, PRIOR = "prior_config.json", "prior.safetensors"
MOST_SECONDS = 5

NUMBERS = st.one_of(
    st.integers(-3, 5),
    st.sampled_from([255, 4097, 14_000, 20_000, 2**31, 2**53, 10**7, 10**9, 2**63, 10**30, 10**400, -(10**18)]),
    st.floats(),
    st.sampled_from([24.9, 1e308, 5e-324, -0.0]),
)
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["F32", "F64", "I8", "BOOL", "F8_E4M3", "C64", "../outside.safetensors", "l2-zero", "ptyl", "vit"]
    ),
)
# names that count, or that name other files
KEYS = st.sampled_from(
    [
        *("num_labels", "num_classes", "num_hidden_layers", "depths", "hidden_sizes", "hidden_size", "image_size"),
        *("transformers_weights", "auto_map", "architecture", "attn_implementation", "quantization_config", "dtype"),
        *("kind", "eps", "scales", "rank", "shape", "dtype", "data_offsets", "sample_seeds", "groups", "base"),
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(KEYS | TEXTS, parts, max_size=4),
    max_leaves=8,
)


@st.composite
def changes(draw: Any, content: Any) -> Any:
    """The JSON with one part of it, at any depth, replaced, taken away, doubled or added to."""
    content = json.loads(json.dumps(content))
    for _ in range(draw(st.integers(1, 3))):
        part = content
        for _ in range(draw(st.integers(0, 4))):
            inside = list(part.values()) if isinstance(part, dict) else part
            inside = [value for value in inside if isinstance(value, (dict, list)) and value]
            if not inside:
                break
            part = inside[draw(st.integers(0, len(inside) - 1))]
        keys = list(part) if isinstance(part, dict) else list(range(len(part)))
        key = keys[draw(st.integers(0, len(keys) - 1))] if keys else None
        what = draw(st.sampled_from(["replace", "replace", "remove", "copy", "add"]))
        if what == "add" and isinstance(part, dict):
            part[draw(KEYS | TEXTS)] = draw(VALUES)
        elif what == "add":
            part.append(draw(VALUES))
        elif key is not None and what == "remove":
            del part[key]
        elif key is not None:
            other = keys[draw(st.integers(0, len(keys) - 1))]
            part[key] = part[other] if what == "copy" else draw(VALUES)
    return content


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("saved")
    for kind, prior in (("resnet", None), ("vit", low_rank_prior)):
        model = make_model(kind)
        posterior = GaussianPosterior(model, head_parameter_names(model), prior and prior(model), num_examples=24)
        rows = make_dataset(kind, 6)
        posterior.recompute_batch_norm([{"pixel_values": torch.stack([row["pixel_values"] for row in rows])}], 2)
        posterior.save_pretrained(root / kind)
    low_rank_prior(make_model("vit")).save_pretrained(root / "prior")
    return {path.name: path for path in root.iterdir()}


FILES = [
    *(("resnet", name) for name in (CONFIG, MODEL_CONFIG, TENSORS, MODEL)),
    *(("vit", name) for name in (CONFIG, MODEL_CONFIG, TENSORS)),
    *(("prior", name) for name in (PRIOR_CONFIG, PRIOR)),
]


def split(path: Path) -> tuple[Any, bytes]:
    """The JSON of a description or of a header, and the numbers after it."""
    content = path.read_bytes()
    if path.suffix == ".json":
        return json.loads(content), b""
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(path: Path, content: Any, numbers: bytes) -> None:
    text = json.dumps(content).encode()
    path.write_bytes(text if path.suffix == ".json" else struct.pack("<Q", len(text)) + text + numbers)


def make_hashes_fit(folder: Path) -> None:
    for name in (CONFIG, PRIOR_CONFIG):
        if (folder / name).exists():
            content = json.loads((folder / name).read_text())
            hashes = {file.name: sha256_of(file) for file in folder.glob("*.safetensors")}
            (folder / name).write_text(json.dumps(content | {"sha256": hashes}))


def check(folder: Path) -> None:
    """Refused in a line that names the folder, or of finite numbers; in little time either way."""
    kind = LowRankPrior if (folder / PRIOR_CONFIG).exists() else GaussianPosterior
    start, loaded, message = time.process_time(), None, f"{folder}"
    try:
        loaded = kind.from_pretrained(folder)
    except InvalidFilesError as error:
        message = str(error)
    assert time.process_time() - start < MOST_SECONDS
    assert str(folder) in message
    assert len(message.splitlines()) == 1
    assert len(message) < 2000
    if loaded is not None:
        check_usable(loaded)


def check_usable(loaded: GaussianPosterior | LowRankPrior) -> None:
    tensors = list(loaded.state_dict().values())
    if isinstance(loaded, GaussianPosterior):
        tensors += loaded.model.state_dict().values()
        tensors += [part for layers in loaded.sample_statistics.values() for pair in layers.values() for part in pair]
        assert all(math.isfinite(value) and value > 0 for value in (loaded.lambda_, loaded.tau, loaded.sigma))
        assert loaded.num_examples is None or loaded.num_examples == int(loaded.num_examples) > 0
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def try_out(saved: dict[str, Path], root: Path, kind: str, name: str, number: int) -> None:
    folder = shutil.copytree(saved[kind], root / kind)
    whole, numbers = split(folder / name)

    @hypothesis.settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(changes(whole))
    def changed(content: Any) -> None:
        write(folder / name, content, numbers)
        if name.endswith(".safetensors"):
            make_hashes_fit(folder)
        check(folder)

    changed()


@pytest.mark.parametrize(("kind", "name"), FILES)
def test_some_changes(saved, tmp_path, kind, name):
    try_out(saved, tmp_path, kind, name, 25)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), FILES)
def test_two_thousand_changes(saved, tmp_path, kind, name):
    try_out(saved, tmp_path, kind, name, math.ceil(2000 / len(FILES)))
