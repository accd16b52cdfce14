"""What a person reads while runs are trained: lines, and one bar over the steps of all of them."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

# without a bar, so many seconds of silence are followed by a line
SILENCE = 30.0


class Report(TrainerCallback):
    """Lines on how some runs go on and, on a terminal, one bar over the steps of all of them.

    `selection.select(..., report=Report())` has both. `Trainer`'s own bars and logs go on beside it, unless its
    `disable_tqdm` is true and `PrinterCallback` is removed from it. Of several processes only the first reports.

    Runs of your own are reported too: tell how many steps there will be, and give it to each trainer as a callback.

    Args:
        write: takes a line; default is to print it, above the bar.
        bar: whether to show one; default is where standard error is a terminal.

    Example:
        >>> report = Report(bar=False)
        >>> report.expect(200)
        >>> with report.part("plain fine-tuning", steps=100):
        ...     report.say("100 of 200 steps")  # trainer.add_callback(report), trainer.train()
        100 of 200 steps
        >>> report.done
        100
    """

    def __init__(self, write: Callable[[str], None] | None = None, bar: bool | None = None):
        self.write = _print if write is None else write
        self._wants_bar, self._bar = bar, None
        self.total, self.done = 0, 0
        self._made, self._start, self._last_said = 0, time.perf_counter(), time.perf_counter()
        self._what, self._value = "", ""

    def expect(self, steps: int) -> None:
        """So many more steps are to come; fewer, if negative."""
        self.total += steps
        self._show()

    def begin(self, what: str, done: int) -> None:
        """A run begins after so many of the steps, whoever made those before it."""
        self._what, self._value, self.done = what, "", done
        self._show()
        if done >= self.total:
            self.close()

    @contextmanager
    def part(self, what: str, steps: int) -> Iterator[None]:
        """A run of so many of the steps; what it does not make of them, as it diverged or was known, is skipped."""
        end = self.done + steps
        self.begin(what, self.done)
        yield
        self.begin(what, end)

    def say(self, line: str) -> None:
        """A line."""
        if not _is_another_process():
            self.write(line)
        self._last_said = time.perf_counter()

    def left(self) -> str:
        """The time left, to end a line with, from the steps made so far; nothing where it cannot be told."""
        if self._made == 0 or self.done >= self.total:
            return ""
        seconds = (time.perf_counter() - self._start) / self._made * (self.total - self.done)
        return f"; about {duration(seconds)} left"

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        model: torch.nn.Module,
        **kwargs: Any,
    ) -> None:
        """J so far."""
        if "de_elbo" in logs:
            num_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
            self._value = f", J/D {logs['de_elbo'] / num_parameters:.4f}"

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A step was made."""
        self.done += 1
        self._made += 1
        self._show()
        if self._bar is None and time.perf_counter() - self._last_said > SILENCE:
            self.say(f"  {self._what}: at step {state.global_step} of {state.max_steps}{self._value}{self.left()}")

    def _show(self) -> None:
        if self._bar is None:
            if self._wants_bar is False or _is_another_process() or self.done >= self.total:
                return
            disable = None if self._wants_bar is None else False
            layout = "{desc} {percentage:3.0f}%|{bar:24}| {n_fmt} of {total_fmt} steps{postfix}"
            bar = tqdm(total=self.total, disable=disable, leave=False, bar_format=layout, dynamic_ncols=True)
            if bar.disable:  # no terminal
                self._wants_bar = False
                return
            self._bar = bar
        self._bar.total, self._bar.n = self.total, self.done
        self._bar.set_description_str(f"{self._what}{self._value}", refresh=False)
        self._bar.set_postfix_str(self.left().removeprefix("; "), refresh=False)
        self._bar.refresh()


def duration(seconds: float) -> str:
    """As a person says it.

    Example:
        >>> duration(8.4), duration(110), duration(1830), duration(7500)
        ('8 s', '1 min 50 s', '30 min', '2 h 05 min')
    """
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    if seconds < 3600:
        return f"{seconds // 60} min"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def _print(line: str) -> None:
    tqdm.write(line)
    sys.stdout.flush()  # into a pipe it would be kept back for long


def _is_another_process() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_rank() > 0
