import threading

import pytest
import torch

from hf_deelbo.blocks import Block, blocks_of, on_all_cores


@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (1, 40), (4, 3, 2, 2), (0,), (3, 0)])
@pytest.mark.parametrize("size", [1, 6, 1000])
def test_blocks_cover_every_number_once(shape, size):
    tensors = {"a": torch.zeros(shape), "b": torch.zeros(2)}
    for block in blocks_of(tensors, size):
        block.of(tensors).add_(1)
    assert all(bool((tensor == 1).all()) for tensor in tensors.values())


def test_a_block_is_a_view_in_channels_last_too():
    weight = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    Block("w", slice(1, 2)).of({"w": weight}).fill_(1)
    assert weight.sum() == 12
    assert weight[1].sum() == 12


def test_results_keep_the_order_of_the_blocks():
    blocks = [Block("w", slice(i, i + 1)) for i in range(100)]
    assert on_all_cores(lambda block: block.rows.start, blocks) == list(range(100))


def test_an_error_is_raised_after_all_threads_have_stopped():
    blocks = [Block("w", slice(i, i + 1)) for i in range(100)]
    at_work = []

    def fail(block):
        at_work.append(threading.get_ident())
        try:
            raise KeyError(block.rows.start)
        finally:
            at_work.remove(threading.get_ident())

    with pytest.raises(KeyError):
        on_all_cores(fail, blocks)
    assert at_work == []


def test_no_gradient_is_recorded_in_any_thread():
    modes = on_all_cores(lambda block: torch.is_grad_enabled(), [Block("w", slice(i, i + 1)) for i in range(100)])
    assert not any(modes)
