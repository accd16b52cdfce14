"""Whatever moment an interrupt comes at: afterwards the model is the posterior mean, in its modes and statistics."""

import contextlib
import inspect
import linecache
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch
from conftest import collate, make_dataset, make_model

import hf_deelbo
from hf_deelbo import GaussianPosterior
from hf_deelbo.weights.parameters import head_parameter_names

LIBRARY = Path(hf_deelbo.__file__).parent


class Interrupt:
    """Raises `KeyboardInterrupt` at the k-th point of our code: a function's start, a line, a C function's return.

    Python handles signals at a function's start, after a call and at a jump back, never between a lock and the body of
    its `with`; so lines of `with` and `try` are no points of their own. Nor is that a generator goes on: what a tracer
    raises there passes by its `finally`, and a signal does not.
    """

    def __init__(self, at: int):
        self.at, self.count = at, 0

    def __enter__(self) -> None:
        sys.settrace(self.trace)
        sys.setprofile(self.profile)

    def __exit__(self, *_) -> None:
        sys.settrace(None)
        sys.setprofile(None)

    def trace(self, frame: FrameType, event: str, arg: object) -> Callable | None:
        if not is_ours(frame):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR
        if (event == "call" and not is_generator) or (event == "line" and not line.startswith(("with ", "try:"))):
            self.pass_by()
        return self.trace

    def profile(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "c_return" and is_ours(frame):
            self.pass_by()

    def pass_by(self) -> None:
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt


def is_ours(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return path == contextlib.__file__ or LIBRARY in Path(path).parents


def fresh() -> SimpleNamespace:
    """A posterior of a model with batch norm whose modules are in both modes, and what is known of it."""
    model = make_model("resnet").train()
    model.resnet.encoder.eval()
    posterior = GaussianPosterior(model, head_parameter_names(model), init_sigma=0.05, num_examples=24)
    inputs = {"pixel_values": collate(make_dataset("resnet", 8))["pixel_values"]}
    posterior.recompute_batch_norm([inputs], num_samples=5)
    expected = {num_samples: posterior.predict_proba(inputs, num_samples) for num_samples in (0, 2, 5)}
    return SimpleNamespace(
        posterior=posterior,
        model=model,
        inputs=inputs,
        expected=expected,
        state={name: tensor.clone() for name, tensor in model.state_dict().items()},
        addresses=[tensor.data_ptr() for tensor in model.state_dict().values()],
        modes=[module.training for module in model.modules()],
        momenta=[getattr(module, "momentum", None) for module in model.modules()],
        hooks=[len(module._forward_hooks) for module in model.modules()],
    )


def check(known: SimpleNamespace, at_once: bool = False) -> None:
    posterior, model = known.posterior, known.model
    if not at_once:
        assert torch.equal(posterior.predict_proba(known.inputs), known.expected[0])
    assert not posterior.is_sampled
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in known.state.items())
    assert [tensor.data_ptr() for tensor in state.values()] == known.addresses
    assert [module.training for module in model.modules()] == known.modes
    assert [getattr(module, "momentum", None) for module in model.modules()] == known.momenta
    assert [len(module._forward_hooks) for module in model.modules()] == known.hooks
    assert posterior.lock.acquire(blocking=False)
    posterior.lock.release()


def predict(known: SimpleNamespace) -> None:
    known.posterior.predict_proba(known.inputs, num_samples=2)


def predict_at_the_mean(known: SimpleNamespace) -> None:
    known.posterior.predict_proba(known.inputs)


def sample(known: SimpleNamespace) -> None:
    with known.posterior.sampled(3):
        pass


def evaluate(known: SimpleNamespace) -> None:
    with known.posterior.evaluated_at(1):
        pass


def recompute(known: SimpleNamespace) -> None:
    known.posterior.sample_statistics.pop(1, None)
    known.posterior.recompute_batch_norm([known.inputs], num_samples=5)


USES = [predict, predict_at_the_mean, sample, evaluate, recompute]


def interrupt_everywhere(use: Callable[[SimpleNamespace], None], step: int) -> tuple[int, int]:
    """At each `step`-th point of `use`: how many points were tried, and after how many the mean was back at once."""
    known = fresh()
    use(known)
    at, num_points, num_at_once, is_through = 1, 0, 0, False
    while not is_through:
        try:
            with Interrupt(at):
                use(known)
            is_through = True
        except KeyboardInterrupt:
            pass
        torch.set_grad_enabled(True)  # torch's own `no_grad` may have been cut short
        try:
            check(known, at_once=True)
            num_at_once += 1
        except AssertionError:
            pass
        check(known)
        recompute(known)
        assert torch.equal(known.posterior.predict_proba(known.inputs, 2), known.expected[2])
        num_points, at = num_points + 1, at + step
    return num_points, num_at_once


@pytest.mark.parametrize("use", USES)
def test_at_some_points(use):
    interrupt_everywhere(use, step=53)


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
def test_at_every_point(use, capsys):
    num_points, num_at_once = interrupt_everywhere(use, step=1)
    with capsys.disabled():
        print(f"\n{use.__name__}: interrupted at {num_points} points, the mean back at once after {num_at_once}")


def interrupted(function: Callable[[], object], seconds: float) -> bool:
    """Whether a real signal came before the end."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        function()
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return True
    return False


def send_signals(number: int, tmp_path) -> None:
    def raise_interrupt(*_):
        raise KeyboardInterrupt

    known, generator, num_interrupted = fresh(), random.Random(0), 0
    start = time.perf_counter()
    for _ in range(5):
        known.posterior.predict_proba(known.inputs, 5)
    duration = (time.perf_counter() - start) / 5
    before = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        while num_interrupted < number:
            seconds = generator.uniform(1e-5, 1.2 * duration)
            num_interrupted += interrupted(lambda: known.posterior.predict_proba(known.inputs, 5), seconds)
            torch.set_grad_enabled(True)
            check(known)
            if num_interrupted % 50 == 0 and num_interrupted:
                assert torch.equal(known.posterior.predict_proba(known.inputs, 5), known.expected[5])
                known.posterior.save_pretrained(tmp_path)
                check_saved(known, tmp_path)
    finally:
        signal.signal(signal.SIGALRM, before)


def check_saved(known: SimpleNamespace, folder) -> None:
    saved = GaussianPosterior.from_pretrained(folder).model.state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in known.state.items())


def test_a_hundred_signals(tmp_path):
    send_signals(100, tmp_path)


@pytest.mark.slow
def test_5000_signals(tmp_path):
    send_signals(5000, tmp_path)


@pytest.mark.parametrize("next_use", ["predict_proba", "save_pretrained", "sampled", "parameters", "update_variances"])
def test_what_two_interrupts_left_is_completed_by_the_next_use(next_use, tmp_path):
    known, times = fresh(), []
    posterior = known.posterior

    def interrupted_twice():
        times.append(1)
        if len(times) <= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), posterior.evaluated_at(1):
        posterior._undo = (interrupted_twice, *posterior._undo)
    with pytest.raises(AssertionError):
        check(known, at_once=True)
    assert not posterior.is_sampled
    if next_use == "predict_proba":
        assert torch.equal(posterior.predict_proba(known.inputs, 2), known.expected[2])
    elif next_use == "save_pretrained":
        posterior.save_pretrained(tmp_path)
        check_saved(known, tmp_path)
    elif next_use == "sampled":
        with posterior.sampled(0):
            pass
    else:
        getattr(posterior, next_use)()
    check(known, at_once=True)


@pytest.mark.parametrize("at", range(1, 40, 3))
def test_a_training_step_that_is_interrupted_leaves_weights_and_statistics(at, make_trainer, snapshot, assert_same):
    trainer = make_trainer("resnet", max_steps=2)
    calls = []

    def interrupt(module, *_):
        calls.append(1)
        if len(calls) == at:
            raise KeyboardInterrupt

    for module in trainer.model.modules():
        module.register_forward_hook(interrupt)
    before = snapshot(trainer.model)
    trainer.begin_training()
    trainer.posterior.trained_by = None
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    if len(calls) == at and trainer.state.global_step == 0:
        assert_same(before, snapshot(trainer.model))
    assert not trainer.posterior.is_sampled
    assert trainer.posterior.trained_by is None
