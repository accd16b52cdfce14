import os
import threading
import time

import pytest
import torch

from hf_deelbo.weights import blocks
from hf_deelbo.weights.blocks import (
    Block,
    Piece,
    add_scaled_,
    blocks_of,
    on_all_cores,
    squared_distance,
    subtract,
)

pytestmark = pytest.mark.usefixtures("two_threads")


def many_blocks() -> list[Block]:
    return [Block((Piece("w", slice(i, i + 1)),)) for i in range(100)]


@pytest.mark.parametrize("size", [1, 6, 1000, None])
def test_blocks_cover_every_number_once(size):
    shapes = [(), (1,), (7,), (5, 3), (1, 40), (4, 3, 2, 2), (0,), (3, 0), (2,)]
    tensors = {str(shape): torch.zeros(shape) for shape in shapes}
    for block in blocks_of(tensors, size):
        for piece in block.of(tensors):
            piece.add_(1)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, torch.ones_like(tensor)), name


def test_blocks_are_about_as_large_as_asked():
    tensors = {"matrix": torch.zeros(100, 7), **{f"bias{i}": torch.zeros(5) for i in range(50)}}
    sizes = [sum(piece.numel() for piece in block.of(tensors)) for block in blocks_of(tensors, size=64)]
    assert sum(sizes) == 950
    assert all(57 <= size <= 64 + 63 for size in sizes[:-1])
    assert len(blocks_of({f"bias{i}": torch.zeros(5) for i in range(50)})) == 1


def test_a_block_is_a_view_in_channels_last_too():
    weight = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    Block((Piece("w", slice(1, 2)),)).of({"w": weight})[0].fill_(1)
    assert weight.sum() == 12
    assert weight[1].sum() == 12


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_gpu_is_given_all_at_once():
    assert len(blocks_of({"a": torch.zeros(3, 2**20), "b": torch.zeros(5)})) == 1


@pytest.mark.usefixtures("each_kind_of_device")
@pytest.mark.parametrize("minus", [False, True])
def test_squared_distance_keeps_its_digits_in_float32(minus):
    generator = torch.Generator().manual_seed(0)
    one, other = ([1e-3 * torch.randn(size, generator=generator) for size in ((300_000,), (7, 3), ())] for _ in "ab")
    exact = sum((a.double() - minus * b.double()).square().sum() for a, b in zip(one, other, strict=True))
    ours = squared_distance(one, other if minus else None)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, exact, rtol=1e-7, atol=0)


any_layout = pytest.mark.parametrize(
    "one",
    [
        torch.arange(48.0).view(2, 3, 2, 4),
        torch.arange(48.0).view(2, 3, 2, 4).to(memory_format=torch.channels_last),
        torch.arange(12.0).view(3, 4).T,
        torch.arange(12.0)[::2],
        torch.tensor(3.0),
    ],
    ids=["contiguous", "channels last", "transposed", "strided", "number"],
)


@pytest.mark.usefixtures("each_kind_of_device")
@any_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # beside a tensor of the same type, and of another
def test_differences_of_any_layout(one, dtype):
    beside = torch.arange(3, dtype=dtype)
    differences = [d.clone() for d in subtract([one, beside], [torch.ones_like(one), torch.ones_like(beside)])]
    assert torch.equal(differences[0], one - 1)
    assert torch.equal(differences[1], torch.tensor([-1, 0, 1], dtype=dtype))


@pytest.mark.usefixtures("each_kind_of_device")
@any_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scaled_sums_of_any_layout(one, dtype):
    tensors = [one, torch.arange(3, dtype=dtype)]
    sums = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]
    add_scaled_(sums, [torch.full_like(tensor, 3) for tensor in tensors], torch.tensor(0.5, dtype=torch.float64))
    for result, tensor in zip(sums, tensors, strict=True):
        assert (result.dtype, result.stride()) == (tensor.dtype, torch.empty_like(tensor).stride())
        assert torch.equal(result, tensor + 1.5)


def test_all_threads_take_part():
    both = threading.Barrier(2)
    threads = on_all_cores(lambda block: (both.wait(timeout=10) and None) or threading.get_ident(), many_blocks())
    assert len(set(threads)) == 2
    assert threading.get_ident() not in threads


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_gpu_gets_its_work_from_the_calling_thread():
    tensors = {name: torch.zeros(5) for name in "abc"}
    blocks = blocks_of(tensors, groups=[[name] for name in tensors])
    assert len(blocks) == 3
    assert set(on_all_cores(lambda block: threading.get_ident(), blocks)) == {threading.get_ident()}


def test_results_keep_the_order_of_the_blocks_whichever_is_ready_first():
    def late_at_first(block: Block) -> int:
        if block.pieces[0].rows.start == 0:
            time.sleep(0.1)
        return block.pieces[0].rows.start

    assert on_all_cores(late_at_first, many_blocks()) == list(range(100))


def test_an_error_is_raised_after_all_threads_have_stopped():
    both, finished = threading.Barrier(2), []

    def fail_while_another_works(block: Block) -> None:
        both.wait(timeout=10)
        if block.pieces[0].rows.start == 0:
            raise KeyError(block)
        time.sleep(0.2)
        finished.append(block)

    two_blocks = many_blocks()[:2]
    with pytest.raises(KeyError):
        on_all_cores(fail_while_another_works, two_blocks)
    assert finished == two_blocks[1:]


def test_no_gradient_is_recorded_in_any_thread():
    modes = on_all_cores(lambda block: torch.is_grad_enabled(), many_blocks())
    assert not any(modes)


def in_a_new_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_a_block_is_the_work_of_one_thread_and_the_number_of_threads_comes_back():
    assert on_all_cores(lambda block: torch.get_num_threads(), many_blocks()) == [1] * 100
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError):
        on_all_cores(lambda block: 1 / 0, many_blocks())
    assert torch.get_num_threads() == 2


def test_starting_the_threads_leaves_the_number_for_threads_to_come():
    torch.set_num_threads(3)
    blocks._tasks.cache_clear()
    on_all_cores(lambda block: None, many_blocks())
    assert in_a_new_thread(torch.get_num_threads) == torch.get_num_threads() == 3


@pytest.mark.parametrize("num_given", [1, 2])
def test_whoever_interrupts_a_pass_waits_until_no_thread_is_at_work(num_given, monkeypatch):
    """The interrupt comes when a thread was given its share, and nobody has noted that."""
    tasks, given, done = blocks._tasks(os.getpid(), 2), [], []

    class Tasks:
        def put(self, task) -> None:
            tasks.put(task)
            given.append(task)
            if len(given) == num_given:
                raise KeyboardInterrupt

    monkeypatch.setattr(blocks, "_tasks", lambda *_: Tasks())
    with pytest.raises(KeyboardInterrupt):
        on_all_cores(lambda block: done.append(time.sleep(1e-3)), many_blocks())
    at_the_end = len(done)
    time.sleep(0.1)
    assert len(done) == at_the_end
    monkeypatch.undo()
    assert len(on_all_cores(lambda block: None, many_blocks())) == 100


@pytest.mark.parametrize("product", [torch.dot, lambda a, b: (a * b).sum()], ids=["by BLAS", "by torch"])
def test_sums_do_not_depend_on_the_number_of_threads(product):
    a, b = torch.randn(2, 100_000, generator=torch.Generator().manual_seed(0))
    sums = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        sums += on_all_cores(lambda block: product(a, b), many_blocks())
    assert len(set(map(torch.Tensor.item, sums))) == 1


@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="torch computes without OpenMP here")
def test_threads_that_start_meanwhile_keep_their_number():
    numbers = on_all_cores(lambda block: in_a_new_thread(torch.get_num_threads), many_blocks()[:4])
    assert numbers == [2] * 4
