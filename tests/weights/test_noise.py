import sys

import pytest
import torch
from conftest import add_noise_
from scipy import stats

from hf_deelbo.weights import blocks
from hf_deelbo.weights.blocks import draw_sample


def draw(shapes: dict, key: tuple[int, ...]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    add_noise_(tensors, torch.tensor(1.0, dtype=torch.float64), key)
    return tensors


def test_it_is_standard_normal():
    noise = draw({"w": (200_000,)}, key=(0, 1))["w"].numpy()
    assert stats.kstest(noise, "norm").pvalue > 1e-3


@pytest.mark.usefixtures("each_kind_of_device")
def test_sigma_scales_it():
    unit, scaled = torch.zeros(100), torch.ones(100)
    add_noise_({"w": unit}, torch.tensor(1.0), key=(3,))
    add_noise_({"w": scaled}, torch.tensor(0.25), key=(3,))
    torch.testing.assert_close(scaled, 1 + 0.25 * unit)


@pytest.mark.parametrize("other", [(0, 2), (1, 1), (0,), (0, 1, 0)])
def test_another_key_is_other_noise(other):
    one, two = draw({"w": (20_000,)}, key=(0, 1))["w"], draw({"w": (20_000,)}, key=other)["w"]
    assert abs(torch.corrcoef(torch.stack([one, two]))[0, 1]) < 0.05


def test_names_and_blocks_have_noise_of_their_own():
    size = blocks.BLOCK_SIZE
    noise = draw({"a": (2 * size,), "b": (size,)}, key=(0, 1))
    correlations = torch.corrcoef(torch.stack([noise["a"][:size], noise["a"][size:], noise["b"]]))
    assert (correlations - torch.eye(3)).abs().max() < 0.02


@pytest.mark.usefixtures("two_threads", "each_kind_of_device")
def test_it_does_not_depend_on_threads_order_layout_or_what_was_drawn_before():
    shapes = {"a": (700, 900), "b": (64, 3, 7, 7), "c": ()}
    expected = draw(shapes, key=(5, 6))
    torch.set_num_threads(1)
    torch.randn(10)
    tensors = {name: torch.zeros(shape) for name, shape in reversed(shapes.items())}
    tensors["b"] = tensors["b"].to(memory_format=torch.channels_last)
    add_noise_(tensors, torch.tensor(1.0), key=(5, 6))
    for name, noise in expected.items():
        assert torch.equal(tensors[name], noise), name


@pytest.mark.parametrize("size", [5_000, sys.maxsize], ids=["small blocks", "one block"])
def test_it_does_not_depend_on_how_tensors_are_cut(size):
    shapes = {"a": (700, 900), "b": (3,)}
    w = {name: torch.zeros(shape) for name, shape in shapes.items()}
    assert len(blocks.blocks_of(w)) > 1
    for block in blocks.blocks_of(w, size):
        draw_sample(w, w, block, torch.tensor(1.0), key=(5, 6))
    for name, noise in draw(shapes, key=(5, 6)).items():
        assert torch.equal(w[name], noise), name


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    expected = torch.randn(3)
    torch.manual_seed(0)
    draw({"w": (10,)}, key=(1,))
    assert torch.equal(torch.randn(3), expected)
