"""The functions of ours that one batch of training crosses are those that CONTRIBUTING.md lists, in this order."""

import re
import sys
import threading
from pathlib import Path
from types import FrameType

from transformers import TrainerCallback

import hf_deelbo
from hf_deelbo.weights import blocks

LIBRARY = Path(hf_deelbo.__file__).parent
CONTRIBUTING = Path(__file__).parents[1] / "CONTRIBUTING.md"
MOST_FILES, MOST_FUNCTIONS = 6, 30

Function = tuple[str, str]


class Walk(TrainerCallback):
    """Notes the functions that the fifth step calls, each once: of the calling thread in order, and of the others."""

    def __init__(self):
        self.is_on = False
        self.own: dict[Function, None] = {}
        self.of_threads: set[Function] = set()

    def on_step_end(self, args, state, control, **kwargs):
        self.is_on = state.global_step == 4

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        if self.is_on and event == "call" and LIBRARY in path.parents and "<" not in name:
            function = path.relative_to(LIBRARY).as_posix(), name
            if threading.current_thread() is threading.main_thread():
                self.own[function] = None
            else:
                self.of_threads.add(function)


def walk_of_a_step(make_trainer) -> Walk:
    walk = Walk()
    settings = {"sigma_update": "closed-form", "grouping": "tensor", "max_steps": 5, "logging_steps": 100}
    trainer = make_trainer("resnet", **settings, trainer={"callbacks": [walk]})
    blocks._tasks.cache_clear()  # its threads start anew, with the profiler
    threading.setprofile(walk)
    sys.setprofile(walk)
    try:
        trainer.train()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        blocks._tasks.cache_clear()
    return walk


def listed(heading: str) -> list[Function]:
    """The first two columns of the table below a heading."""
    section = CONTRIBUTING.read_text().partition(f"{heading}\n")[2].partition("\n#")[0]
    return re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \|", section, flags=re.MULTILINE)


def test_the_walk_is_the_one_that_is_described(make_trainer):
    walk = walk_of_a_step(make_trainer)
    own = list(walk.own)
    assert own == listed("## The walk of one batch")
    assert sorted(walk.of_threads) == sorted(listed("### In the threads"))
    assert len({file for file, _ in own} | {file for file, _ in walk.of_threads}) <= MOST_FILES
    assert len(own) <= MOST_FUNCTIONS
