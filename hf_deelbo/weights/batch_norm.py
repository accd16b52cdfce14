"""Batch-norm statistics that belong to one weight sample.

The running statistics of a network trained with sampled weights are averages over many samples and fit none of them:
evaluated with them, a sample looks far worse than it is. So they are computed anew, over training inputs, for each
sample that is evaluated (Maddox et al. 2019 do the same for SWAG).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

# mean and (biased) variance, by the name of the layer
Statistics = dict[str, tuple[torch.Tensor, torch.Tensor]]


def batch_norm_layers(model: nn.Module) -> dict[str, _BatchNorm]:
    """The batch-norm layers that keep running statistics, by name.

    Example:
        >>> list(batch_norm_layers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LayerNorm(2))))
        ['1']
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }


def weights_and_statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """What training changes, by name: the parameters, frozen ones too, and the running statistics of batch norm.

    Example:
        >>> list(weights_and_statistics(nn.BatchNorm1d(2)))
        ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    """
    layers = batch_norm_layers(model)
    buffers = {n: buffer for n, buffer in model.named_buffers() if n.rpartition(".")[0] in layers}
    return dict(model.named_parameters()) | buffers


@torch.no_grad()
def compute_statistics(model: nn.Module, batches: Iterable[Any], forward: Callable[[Any], Any]) -> Statistics:
    """Mean and variance of what each batch-norm layer receives, over all `batches` at the present weights.

    Only the batch-norm layers are in train mode, so dropout is off. Batches are pooled by their number of values m:

        mean = sum_b m_b mean_b / sum_b m_b,    var = sum_b m_b (var_b + mean_b^2) / sum_b m_b - mean^2

    with the biased variances that train mode normalises by, so that one batch gives just what train mode computes on
    it. The model's own statistics are put back, also when `forward` raises.

    Args:
        model: the model, left as it was.
        batches: what `forward` takes.
        forward: runs the model on one of them.

    Example:
        >>> model = nn.BatchNorm1d(1)
        >>> statistics = compute_statistics(model, [torch.tensor([[1.0], [3.0]]), torch.tensor([[5.0]] * 2)], model)
        >>> statistics[""]
        (tensor([3.5000]), tensor([2.7500]))
        >>> model.running_mean
        tensor([0.])
    """
    layers = batch_norm_layers(model)
    sums = {name: _Moments() for name in layers}

    def add_moments(name: str) -> Callable:
        def hook(layer: _BatchNorm, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            count = inputs[0].numel() // inputs[0].shape[1]
            sums[name].add(count, layer.running_mean, layer.running_var * ((count - 1) / count))

        return hook

    put_back = as_it_is(model)
    try:
        model.eval()
        for name, layer in layers.items():
            for buffer in layer.buffers():
                buffer.data = buffer.clone()
            layer.train()
            layer.momentum = 1.0  # the running statistics are then those of the last batch
            layer.register_forward_hook(add_moments(name))
        for batch in batches:
            forward(batch)
    finally:
        put_back()
    return {name: moments.pooled() for name, moments in sums.items() if moments.count}


@contextmanager
def with_statistics(model: nn.Module, statistics: Statistics) -> Iterator[None]:
    """Evaluate with these statistics; the model's own come back on exit, also when the body raises.

    Example:
        >>> model = nn.BatchNorm1d(1)
        >>> with with_statistics(model, {"": (torch.ones(1), torch.ones(1))}):
        ...     model.running_mean
        tensor([1.])
        >>> model.running_mean
        tensor([0.])
    """
    use, put_back = ways_between(model, statistics)
    try:
        use()
        yield
    finally:
        put_back()


def ways_between(model: nn.Module, statistics: Statistics) -> tuple[Callable[[], None], Callable[[], None]]:
    """Two functions: one lets the batch-norm layers hold these statistics, the other what they hold now.

    The layers point to other memory then, and no numbers are moved: a call that was interrupted can be repeated.

    Example:
        >>> model = nn.BatchNorm1d(1)
        >>> use, put_back = ways_between(model, {"": (torch.ones(1), torch.ones(1))})
        >>> use()
        >>> model.running_mean
        tensor([1.])
        >>> put_back()
        >>> model.running_mean
        tensor([0.])
    """
    layers = batch_norm_layers(model)
    buffers = [buffer for name in statistics for buffer in (layers[name].running_mean, layers[name].running_var)]
    present = [buffer.data for buffer in buffers]
    given = [values.to(own, copy=True) for values, own in zip(chain(*statistics.values()), present, strict=True)]
    return partial(_point_to, given, buffers), partial(_point_to, present, buffers)


def as_it_is(model: nn.Module) -> Callable[[], None]:
    """A function that puts back the mode of every module, and what the batch-norm layers hold and do now.

    It goes by references, as `ways_between` does, and may be called again. So the layers must be given memory of their
    own before anything is written into it.

    Example:
        >>> model = nn.Dropout().eval()
        >>> put_back = as_it_is(model)
        >>> _ = model.train()
        >>> put_back()
        >>> model.training
        False
    """
    modes = [(module, module.training) for module in model.modules()]
    layers = batch_norm_layers(model).values()
    states = [(layer, layer.momentum, dict(layer._forward_hooks)) for layer in layers]
    buffers = [buffer for layer in layers for buffer in layer.buffers()]
    present = [buffer.data for buffer in buffers]

    def put_back() -> None:
        _point_to(present, buffers)
        for layer, momentum, hooks in states:
            layer.momentum = momentum
            for hook in layer._forward_hooks.keys() - hooks.keys():
                del layer._forward_hooks[hook]
        for module, mode in modes:
            if module.training != mode:
                module.training = mode

    return put_back


def _point_to(tensors: list[torch.Tensor], buffers: list[torch.Tensor]) -> None:
    for tensor, buffer in zip(tensors, buffers, strict=True):
        buffer.data = tensor


class _Moments:
    """Sums of m, m * mean and m * (var + mean^2) over batches, in float64."""

    def __init__(self):
        self.count = 0
        self.first = self.second = 0.0

    def add(self, count: int, mean: torch.Tensor, variance: torch.Tensor) -> None:
        self.dtype, mean, variance = mean.dtype, mean.double(), variance.double()
        self.count += count
        self.first = self.first + count * mean
        self.second = self.second + count * (variance + mean**2)

    def pooled(self) -> tuple[torch.Tensor, torch.Tensor]:
        mean = self.first / self.count
        variance = (self.second / self.count - mean**2).clamp_min(0)
        return mean.to(self.dtype), variance.to(self.dtype)
