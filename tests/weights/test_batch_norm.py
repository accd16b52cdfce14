import copy

import pytest
import torch
from conftest import make_dataset, make_model
from torch import nn

from hf_deelbo.weights.batch_norm import batch_norm_layers, compute_statistics, with_statistics


def images(size: int = 24) -> torch.Tensor:
    return torch.stack([example["pixel_values"] for example in make_dataset("resnet", size)])


def test_one_batch_gives_what_train_mode_computes_on_it():
    model = make_model("resnet").train()
    x = images()
    expected = model(pixel_values=x).logits
    statistics = compute_statistics(model, [x], lambda batch: model(pixel_values=batch))
    with with_statistics(model, statistics):
        logits = model.eval()(pixel_values=x).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    running = make_model("resnet").eval()(pixel_values=x).logits
    assert (running - expected).abs().max() > 0.01


def test_batches_of_different_sizes_are_pooled_by_their_size():
    torch.manual_seed(0)
    layer, x = nn.BatchNorm1d(3), torch.randn(10, 3) * 2 + 5
    ((mean, variance),) = compute_statistics(layer, [x[:7], x[7:]], layer).values()
    torch.testing.assert_close(mean, x.mean(0))
    torch.testing.assert_close(variance, x.var(0, correction=0))


def test_spatial_positions_count_as_values():
    torch.manual_seed(0)
    layer, x = nn.BatchNorm2d(3), torch.randn(4, 3, 5, 6) + 1
    ((mean, variance),) = compute_statistics(layer, [x], layer).values()
    torch.testing.assert_close(mean, x.mean((0, 2, 3)))
    torch.testing.assert_close(variance, x.var((0, 2, 3), correction=0))


def test_only_norm_layers_are_in_train_mode():
    modes = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2)).train()
    compute_statistics(model, [torch.randn(4, 2)], lambda x: modes.append([m.training for m in model]) or model(x))
    assert modes == [[False, False, True]]
    assert all(module.training for module in model.modules())


def test_layers_without_running_statistics_are_not_touched():
    model = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False), nn.LayerNorm(2))
    assert batch_norm_layers(model) == {}
    assert compute_statistics(model, [torch.randn(4, 2)], model) == {}


def everything(model: nn.Module) -> tuple:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = batch_norm_layers(model).values()
    return state, [layer.momentum for layer in layers], [m.training for m in model.modules()]


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was_also_when_the_forward_pass_raises(fails, assert_same):
    model = make_model("resnet").train()
    model(pixel_values=images())  # running statistics that are not the defaults
    before, x, calls = copy.deepcopy(everything(model)), images(), []

    def forward(batch):
        model(pixel_values=batch)
        calls.append(1)
        if fails and len(calls) == 2:
            raise RuntimeError("broken image")

    if fails:
        with pytest.raises(RuntimeError, match="broken image"):
            compute_statistics(model, [x, x], forward)
    else:
        statistics = compute_statistics(model, [x, x], forward)
        with pytest.raises(KeyError), with_statistics(model, statistics):
            raise KeyError
    after = everything(model)
    assert_same(before[0], after[0])
    assert before[1:] == after[1:]
    assert not any(layer._forward_hooks for layer in batch_norm_layers(model).values())
