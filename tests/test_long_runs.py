"""A long run needs no more memory at its end than at its start."""

import gc
import os

import numpy as np
import pytest
from conftest import make_dataset
from transformers import TrainerCallback

MEGABYTE = 2**20


def resident_memory() -> int:
    """Bytes of this process that are in memory now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watch(TrainerCallback):
    """Notes the memory every 50 steps."""

    def __init__(self):
        self.steps, self.memory = [], []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % 50 == 0:
            gc.collect()
            self.steps.append(state.global_step)
            self.memory.append(resident_memory())


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read as Linux tells it")
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_memory_is_flat(make_trainer, kind):
    watch = Watch()
    trainer = make_trainer(
        kind,
        sigma_update="closed-form",
        grouping="layer",
        max_steps=2000,
        logging_steps=100,
        eval_strategy="steps",
        eval_steps=100,
        num_eval_samples=2,
        save_strategy="steps",
        save_steps=100,
        save_total_limit=2,
        trainer={"callbacks": [watch], "eval_dataset": make_dataset(kind, 10, seed=2)},
    )
    trainer.train()
    settled = [step > 400 for step in watch.steps]  # buffers and caches are made in the first steps
    steps, memory = (np.compress(settled, values).astype(float) for values in (watch.steps, watch.memory))
    slope = np.polyfit(steps / 1000, memory / MEGABYTE, 1)[0]
    print(f"\n{kind}: {slope:+.3f} MB per 1,000 steps, {memory[-1] / MEGABYTE:.0f} MB at the end")
    assert slope < 1
