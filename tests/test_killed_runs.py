"""A run that is killed at any moment resumes to what the uninterrupted run learns, to the bit."""

import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import make_dataset, make_model
from torch import nn
from tqdm import auto, std

from hf_deelbo import DEELBoConfig, DEELBoTrainer
from hf_deelbo.sharing.checkpoints import LIST_FILE, newest_whole

# a sigma for each layer in closed form, by AdamW, and the paper's way
CONFIGS = {
    "closed-form": partial(DEELBoConfig, grouping="layer", learning_rate=0.01),
    "paper": partial(DEELBoConfig.paper, init_sigma=0.05, learning_rate=0.1),
}
FILES_OF_CHECKPOINT = {
    LIST_FILE,
    "config.json",
    "model.safetensors",
    "optimizer.pt",
    "posterior.safetensors",
    "posterior_config.json",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
}
# what changes the names in a folder, among Python's audit events; a file's content is written after "open"
FILE_EVENTS = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "shutil.rmtree"}


def train(make_config: Callable[..., DEELBoConfig], folder: Path) -> None:
    """Train or resume in `folder`, and write what was learned into it."""
    model = make_model("vit")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1  # so that torch's own random numbers matter too
    args = make_config(
        str(folder / "run"),
        max_steps=6,
        per_device_train_batch_size=8,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        metric_for_best_model="loss",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = DEELBoTrainer(
        model, args, train_dataset=make_dataset("vit"), eval_dataset=make_dataset("vit", 4, seed=2)
    )
    trainer.train(resume_from_checkpoint=newest_whole(args.output_dir))
    momentum = list(trainer.optimizer.state.values())
    best = os.path.basename(trainer.state.best_model_checkpoint)
    learned = (model.state_dict(), trainer.posterior.state_dict(), momentum, best, trainer.state.best_metric)
    torch.save(learned, folder / "learned.pt")


def started(work: Callable[[], None]) -> int:
    """A child process that does the work; it starts with all that is imported here."""
    gc.freeze()  # else the child's first collection copies all that the parent ever made
    child = os.fork()
    if child:
        gc.unfreeze()
        return child
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        for bar in (std.tqdm, auto.tqdm):  # theirs is shared by all children, and one that is killed may hold it
            bar.set_lock(threading.RLock())
        work()
        os._exit(0)
    finally:
        os._exit(1)  # whatever was raised must not reach pytest, which is here twice


def signal_that_ended(child: int) -> int:
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def count_file_events(folder: Path, at_event: Callable[[int], None]) -> None:
    """From now on, call `at_event` with 1, 2, 3 ... just before each event on files of `folder`."""
    count = 0

    def look(event: str, args: tuple) -> None:
        nonlocal count
        if event in FILE_EVENTS and str(args[0]).startswith(str(folder)):
            count += 1
            at_event(count)

    sys.addaudithook(look)


@pytest.fixture(scope="module", params=CONFIGS)
def whole(request, tmp_path_factory) -> dict:
    """The uninterrupted run: how to make it, what it learned, how many file events it had, how long it took."""
    train_in = partial(train, CONFIGS[request.param])
    folder, file = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("count") / "count"

    def work() -> None:
        count_file_events(folder, lambda count: file.write_text(str(count)))
        train_in(folder)

    start = time.perf_counter()
    assert signal_that_ended(started(work)) == 0
    seconds = time.perf_counter() - start
    learned, num_events = torch.load(folder / "learned.pt"), int(file.read_text())
    return {"train_in": train_in, "learned": learned, "events": num_events, "seconds": seconds}


def killed_at_event(train_in: Callable[[Path], None], folder: Path, event: int) -> bool:
    def kill_myself_at(count: int) -> None:
        if count == event:
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        count_file_events(folder, kill_myself_at)
        train_in(folder)

    return signal_that_ended(started(work)) == signal.SIGKILL


def killed_after(train_in: Callable[[Path], None], folder: Path, seconds: float) -> bool:
    child = started(lambda: train_in(folder))
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    return signal_that_ended(child) == signal.SIGKILL


def assert_equal_to_the_bit(one, other) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        assert_equal_to_the_bit(list(one.values()), list(other.values()))
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            assert_equal_to_the_bit(a, b)
    else:
        assert one == other


def assert_resumes(folder: Path, whole: dict) -> None:
    if newest := newest_whole(folder / "run"):
        assert set(os.listdir(newest)) == FILES_OF_CHECKPOINT
    assert signal_that_ended(started(lambda: whole["train_in"](folder))) == 0
    assert_equal_to_the_bit(torch.load(folder / "learned.pt"), whole["learned"])


def kill_and_resume(tmp_path: Path, whole: dict, num_kills: int, seed: int) -> None:
    moments, num_killed = random.Random(seed), 0
    while num_killed < num_kills:
        folder = tmp_path / str(num_killed)
        folder.mkdir()
        if num_killed % 2:
            killed = killed_after(whole["train_in"], folder, moments.uniform(0, whole["seconds"]))
        else:
            killed = killed_at_event(whole["train_in"], folder, moments.randint(1, whole["events"]))
        if killed:  # else it was over before
            assert_resumes(folder, whole)
            num_killed += 1
        else:
            folder.rename(tmp_path / f"over-before-{num_killed}-{moments.random()}")


def test_ten_kills(tmp_path, whole):
    kill_and_resume(tmp_path, whole, num_kills=10, seed=0)


@pytest.mark.slow
def test_fifty_kills(tmp_path, whole):
    kill_and_resume(tmp_path, whole, num_kills=50, seed=1)
