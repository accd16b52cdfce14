"""The benchmark of a step's cost measures what it says."""

import json
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from dataclasses import replace
from functools import wraps
from itertools import count
from pathlib import Path

import pytest
import torch
from transformers import ResNetConfig, ResNetForImageClassification, Trainer

from hf_deelbo import GaussianPosterior

FOLDER = Path(__file__).parents[2] / "examples" / "benchmarks"
sys.path.insert(0, str(FOLDER))
import step_cost  # noqa: E402
import turns  # noqa: E402
import workloads  # noqa: E402

SLEEP = 0.3  # longer than any step here


def tiny_resnet() -> ResNetForImageClassification:
    sizes = {"embedding_size": 4, "hidden_sizes": [4], "depths": [1]}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=workloads.NUM_LABELS))


@pytest.fixture
def tiny(monkeypatch) -> dict[str, workloads.Workload]:
    """Tiny workloads, which the sweeps find by name, and their players in this process."""
    tiny = [
        workloads.images("resnet", tiny_resnet, batch_size=4, size=8),
        workloads.bert("bert", layers=1, hidden=32, batch_size=2, tokens=4, vocabulary=20),
    ]
    tiny = {workload.name: workload for workload in tiny}
    monkeypatch.setattr(step_cost, "WORKLOADS", tiny)
    monkeypatch.setattr(turns, "PlayerProcess", lambda *args, **kwargs: turns.Player(*args[:4]))
    return tiny


def arguments(**kwargs) -> Namespace:
    return Namespace(**({"models": None, "batch_sizes": [2, 4], "rounds": 1, "steps": 1, "restarts": 1} | kwargs))


def sleep_in(monkeypatch, owner: type, method: str, times: int | None = None) -> None:
    """In each call of the method, or in the first so many."""
    function = getattr(owner, method)
    calls = count()

    @wraps(function)
    def sleepy(*args, **kwargs):
        if times is None or next(calls) < times:
            time.sleep(SLEEP)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, method, sleepy)


def assert_consistent(record: dict) -> None:
    """Its figures follow from its seconds."""
    for seconds, ratios in (("seconds", "ratios"), ("cpu_seconds", "cpu_ratios")):
        plain, deelbo = record[seconds]["plain"], record[seconds]["deelbo"]
        expected = statistics.median(d / p for d, p in zip(deelbo, plain, strict=True))
        assert record[ratios]["deelbo/plain"][1] == pytest.approx(expected)
    plain, deelbo = record["seconds"]["plain"], record["seconds"]["deelbo"]
    overheads = [1e9 * (d - p) / record["num_parameters"] for d, p in zip(deelbo, plain, strict=True)]
    assert record["overhead_ns_per_parameter"] == pytest.approx(statistics.median(overheads))
    json.dumps(record, allow_nan=False)


def num_trainable(workload: workloads.Workload) -> int:
    return sum(p.numel() for p in workload.make_model().parameters() if p.requires_grad)


@pytest.mark.parametrize("phase", ["update_variances", "complete_gradients"])
def test_a_step_has_all_that_is_added_in_it(tiny, monkeypatch, phase):
    sleep_in(monkeypatch, GaussianPosterior, phase)
    record = turns.measure_steps(tiny["bert"], rounds=2, steps=1)
    assert_consistent(record)
    assert len(record["seconds"]["deelbo"]) == 2
    assert min(record["seconds"]["deelbo"]) > SLEEP > min(record["seconds"]["plain"])
    assert max(record["phases"]["deelbo"].values()) > SLEEP
    assert 0 < min(record["cpu_seconds"]["deelbo"]) < SLEEP  # who sleeps takes no CPU time


def test_the_warm_up_is_not_counted(tiny, monkeypatch):
    sleep_in(monkeypatch, Trainer, "training_step", times=2)  # the first of both methods
    seconds = turns.measure_steps(tiny["bert"], rounds=1, steps=1)["seconds"]
    assert max(*seconds["plain"], *seconds["deelbo"]) < SLEEP


def test_restarted_methods_warm_up_again(tiny, monkeypatch):
    started = []

    class Noted(turns.Player):
        def __init__(self, method, *args):
            super().__init__(method, *args)
            started.append(method)

    monkeypatch.setattr(turns, "PlayerProcess", lambda *args: Noted(*args[:4]))
    record = turns.measure_steps(tiny["bert"], rounds=2, steps=1, restarts=3)
    assert started == ["plain", "deelbo"] * 3
    assert_consistent(record)
    assert len(record["seconds"]["plain"]) == 6


def test_models(tiny, monkeypatch):
    peaks = iter([2**10] * 6 + [2**20, 2**21, 2**22])  # of two rounds, which do not count, and of memory
    monkeypatch.setattr(turns, "peak_memory", lambda: next(peaks))
    (record,) = step_cost.sweep_models(arguments(models=["resnet"]))
    assert_consistent(record)
    assert record["ratios"]["ptyl/deelbo"][1] == pytest.approx(
        record["seconds"]["ptyl"][0] / record["seconds"]["deelbo"][0]
    )
    assert record["phases"].keys() == {"deelbo", "ptyl"}
    size = 4 * num_trainable(tiny["resnet"])
    row = step_cost.row_of_memory(record)
    assert row["DE ELBo over plain and L2-SP's mu"].startswith(f"{2**20 / size - 1:.2f} D floats")
    assert row["PTYL over L2-SP"].startswith(f"{2**21 / size:.2f} D floats")


def test_memory_is_that_in_use_in_a_process_of_its_own():
    workload = workloads.WORKLOADS["bert-4m"]
    peaks = turns.measure_memory(workload, steps=1, methods=("plain", "deelbo"))
    d_floats = (peaks["deelbo"] - peaks["plain"]) / (4 * num_trainable(workload))
    assert 2 <= d_floats < 3  # mu and the sample, and what a step needs for a moment


def test_the_ratio_by_parts():
    phases = {"deelbo": {"draw": 0.02, "lambda": 0.01}, "ptyl": {"draw": 9.0}}
    record = {"phases": phases, "seconds": {"plain": [0.1, 0.3, 0.9], "deelbo": [9.0]}}
    assert step_cost.ratio_by_parts(record) == pytest.approx(1.1)


def test_size(tiny, monkeypatch):
    monkeypatch.setattr(step_cost, "BY_SIZE", tiny.values())
    records = list(step_cost.sweep_size(arguments()))
    for record, workload in zip(records, tiny.values(), strict=True):
        assert_consistent(record)
        assert record["num_parameters"] == num_trainable(workload)
        seconds = record["own_work"]["seconds"]
        expected = seconds["posterior"][0] / (seconds["draw"][0] + seconds["sgd"][0])
        assert record["own_work"]["ratio"] == pytest.approx([expected] * 3)
    assert f"| {num_trainable(tiny['bert']):,} " in step_cost.tables_of("size", records)


def test_the_models_by_size_are_from_1_to_110_million_parameters():
    with torch.device("meta"):
        sizes = [num_trainable(workload) for workload in workloads.BY_SIZE]
    assert [round(size / 1e6) for size in sizes] == [1, 4, 23, 60, 109]


@pytest.mark.parametrize("phase", ["update_variances", "complete_gradients"])
def test_the_own_work_is_that_of_a_step(tiny, monkeypatch, phase):
    sleep_in(monkeypatch, GaussianPosterior, phase)
    seconds = turns.measure_posterior(tiny["bert"], rounds=2)["seconds"]
    assert min(seconds["posterior"]) > SLEEP > min(seconds["draw"] + seconds["sgd"])
    assert min(seconds["of one tensor"]) > SLEEP
    assert [len(values) for values in seconds.values()] == [2, 2, 2, 2]


def test_the_own_work_of_one_tensor_is_over_as_many_numbers(tiny, monkeypatch):
    drawn = Counter()
    sampled = GaussianPosterior.sampled

    def spy(posterior, *key):
        drawn[sum(w.numel() for w in posterior.parameters().values())] += len(posterior.parameters()) == 2
        return sampled(posterior, *key)

    monkeypatch.setattr(GaussianPosterior, "sampled", spy)
    turns.measure_posterior(tiny["bert"], rounds=2)
    assert drawn == {num_trainable(tiny["bert"]): 3}  # and the warm-up


@pytest.mark.parametrize("is_last", [False, True])
def test_batch(tiny, monkeypatch, is_last):
    resnet = workloads.channels_last(tiny["resnet"]) if is_last else tiny["resnet"]
    monkeypatch.setitem(tiny, "resnet", resnet)
    seen = []
    forward = ResNetForImageClassification.forward

    @wraps(forward)
    def spy(self, pixel_values, **kwargs):
        seen.append((len(pixel_values), pixel_values.is_contiguous(memory_format=torch.channels_last)))
        return forward(self, pixel_values, **kwargs)

    monkeypatch.setattr(ResNetForImageClassification, "forward", spy)
    records = list(step_cost.sweep_batch(arguments(models=["resnet"])))
    assert [record["batch_size"] for record in records] == [2, 4]
    assert seen == [(2, is_last)] * 4 + [(4, is_last)] * 4  # two methods, one round and the warm-up
    for record in records:
        assert_consistent(record)


def test_pixels(tiny, monkeypatch):
    by_pixels = [workloads.images(f"{size}px", tiny_resnet, batch_size=2, size=size) for size in (8, 16)]
    monkeypatch.setattr(step_cost, "BY_PIXELS", by_pixels)
    records = list(step_cost.sweep_pixels(arguments()))
    assert [record["model"] for record in records] == ["8px", "16px"]
    for record in records:
        assert_consistent(record)
    shapes = [workload.examples(1)[0]["pixel_values"].shape for workload in workloads.BY_PIXELS]
    assert shapes == [(3, size, size) for size in (64, 128, 224)]


def test_a_sweep_that_is_stopped_leaves_what_it_has(tiny, tmp_path, monkeypatch):
    output = tmp_path / "cost.json"
    measured = iter([{"model": "one"}])
    monkeypatch.setattr(step_cost, "measure_steps", lambda *args, **kwargs: next(measured))
    command = ["step_cost.py", "--sweep", "batch", "--models", "bert", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(RuntimeError):  # a generator's StopIteration
        step_cost.main()
    assert json.loads(output.read_text()) == {"batch": [{"model": "one"}]}


def test_the_command_prints_what_it_writes(tiny, tmp_path, monkeypatch, capsys):
    output = tmp_path / "cost.json"
    command = ["step_cost.py", "--sweep", "size", "--models", "bert", "--rounds", "1", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", [*command, "--output", str(output)])
    step_cost.main()
    (record,) = json.loads(output.read_text())["size"]
    printed = capsys.readouterr().out
    assert f"{record['ratios']['deelbo/plain'][1]:.3f} (" in printed
    assert f"{record['own_work']['ratio'][1]:.3f} (" in printed


def test_each_method_has_a_process_of_its_own():
    workload = workloads.WORKLOADS["bert-1m"]
    record = turns.measure_steps(workload, rounds=2, steps=1)
    assert_consistent(record)
    assert len(record["seconds"]["plain"]) == 2
    assert record["num_parameters"] == num_trainable(workload)


def test_a_process_that_fails_is_told(capfd):
    workload = replace(workloads.WORKLOADS["bert-1m"], name="bert-of-no-size")
    with pytest.raises(RuntimeError, match="plain: its process ended with exit code 1"):
        turns.measure_steps(workload, rounds=1, steps=1)
    assert "bert-of-no-size" in capfd.readouterr().err


@pytest.mark.slow
def test_processes(tmp_path):
    output = tmp_path / "cost.json"
    command = [sys.executable, FOLDER / "step_cost.py", "--sweep", "processes", "--models", "bert-1m"]
    command += ["--rounds", "2", "--steps", "1", "--output", output]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    records = json.loads(output.read_text())["processes"]
    assert [record["world_size"] for record in records] == [1, 2]
    assert [record["batch_size"] for record in records] == [8, 8]
    assert records[1]["threads"] == max(1, records[0]["threads"] // 2)
    for record in records:
        assert_consistent(record)
        assert f"{record['ratios']['deelbo/plain'][1]:.3f}" in printed


def test_a_batch_that_processes_cannot_share(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(turns.TrainingArguments, "world_size", 3)
    with pytest.raises(ValueError, match="batch_size: 4 examples cannot be shared by 3 processes"):
        turns.make_trainer("plain", tiny["resnet"], 4, 1, str(tmp_path))


def test_a_table_is_markdown():
    lines = step_cost.table([{"a": "1", "long": "2"}, {"a": "333", "long": "4"}]).splitlines()
    assert lines == ["| a   | long |", "| --- | ---- |", "| 1   | 2    |", "| 333 | 4    |"]
