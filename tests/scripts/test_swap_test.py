"""The swap test: both trainers get the same, and every line says what it is."""

import copy
from dataclasses import fields

import pytest
import torch
from conftest import load_example
from lab.studies import read_lines
from transformers import Trainer, TrainingArguments

from hf_deelbo import DEELBoConfig, DEELBoTrainer

script = load_example("swap_test")

SMOKE = (
    {"dataset_name": "digits", "train_size": 20, "image_size": 16, "max_eval_samples": 20},
    {"max_steps": 2, "per_device_train_batch_size": 10, "learning_rate": 1e-3},
)


@pytest.fixture
def smoke(tmp_path, monkeypatch) -> list[str]:
    """The command line of a small row."""
    monkeypatch.setitem(script.ROWS, "digits-smoke", SMOKE)
    monkeypatch.setattr(script, "NUM_SAMPLES", 2)
    places = ["--results", str(tmp_path / "lines.jsonl"), "--cache_dir", str(tmp_path / "cache")]
    return ["--rows", "digits-smoke", "--subset_seeds", "1001", *places]


def test_settings_are_json_or_strings():
    options = script.parse(["--deelbo", "init_sigma=1e-3", "grouping=layer", "--deelbo", "kappa=auto"])
    assert options.deelbo == [("init_sigma", 1e-3), ("grouping", "layer"), ("kappa", "auto")]


def test_the_settings_of_the_method_are_not_those_of_its_peer():
    plain, deelbo = (
        [script.id_of(config) for config in script.configs_of(script.parse(["--trainers", trainer, *more]))]
        for trainer, more in (("plain", []), ("deelbo", []))
    )
    options = script.parse(["--deelbo", "init_sigma=1e-3"])
    ids = {config["trainer"]: [] for config in script.configs_of(options)}
    for config in script.configs_of(options):
        ids[config["trainer"]].append(script.id_of(config))
    assert ids["plain"] == plain
    assert not set(ids["deelbo"]) & set(deelbo)
    assert len(set(plain + deelbo + ids["deelbo"])) == 3 * len(script.ROWS) * len(script.SEEDS)


@pytest.mark.parametrize("row", script.ROWS)
def test_the_arguments_mean_the_same_to_both(row, tmp_path):
    arguments = script.COMMON | script.ROWS[row][1]
    plain, deelbo = TrainingArguments(str(tmp_path), **arguments), DEELBoConfig(str(tmp_path), **arguments)
    different = [f.name for f in fields(plain) if f.init and getattr(plain, f.name) != getattr(deelbo, f.name)]
    assert different == []


def test_both_trainers_get_the_same_model_and_batches(smoke):
    options = script.parse(smoke)
    seen = {}
    for config in script.configs_of(options):
        task = script.task_of(config, options)
        collate, batches = task.trainer_arguments["data_collator"], []
        task.trainer_arguments["data_collator"] = lambda rows, c=collate, b=batches: b.append(c(rows)) or b[-1]
        trainer = script.make_trainer(config, task, str(options.results.parent / "outputs"))
        weights = copy.deepcopy(trainer.model.state_dict())
        trainer.train()
        seen[type(trainer)] = [weights, *({k: v.clone() for k, v in batch.items()} for batch in batches)]
    assert set(seen) == {Trainer, DEELBoTrainer}
    assert len(seen[Trainer]) == len(seen[DEELBoTrainer]) == 3
    for one, other in zip(seen[Trainer], seen[DEELBoTrainer], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_lines(smoke, capsys, monkeypatch):
    script.main([*smoke, "--deelbo", "init_sigma=1e-3"])
    lines = {line["config"]["trainer"]: line for line in read_lines(script.parse(smoke).results)}
    plain, deelbo = lines["plain"], lines["deelbo"]
    assert set(plain["test"]) == {"mean", "mean_recomputed"}
    assert set(deelbo["test"]) == {"mean", "mean_recomputed", "average"}
    assert plain["test"]["mean"] != plain["test"]["mean_recomputed"]
    assert plain["config"]["arguments"] == deelbo["config"]["arguments"]
    assert (plain["config"]["deelbo"], deelbo["config"]["deelbo"]) == ({}, {"init_sigma": 1e-3})
    assert (deelbo["settings"]["init_sigma"], deelbo["machine"]["threads"]) == (1e-3, 1)
    assert deelbo["learned"]["kappa"] == deelbo["learned"]["num_parameters"] / 20
    assert [entry["step"] for entry in deelbo["history"]] == [entry["step"] for entry in plain["history"]] == [1, 2]
    assert deelbo["history"][0]["sigma"] == pytest.approx(1e-3, rel=0.1)

    monkeypatch.setattr(script, "carry_out", pytest.fail)  # nothing is left to do
    script.main([*smoke, "--deelbo", "init_sigma=1e-3"])
    assert "2 of 2 runs are done" in capsys.readouterr().out
    script.main([*smoke, "--table"])
    assert "| digits-smoke init_sigma=0.001 | 1 | " in capsys.readouterr().out


def line(trainer: str, subset_seed: int, **test: tuple[float, float | None]) -> dict:
    config = {"row": "reviews-default", "subset_seed": subset_seed, "trainer": trainer, "deelbo": {}}
    found = {at: {"accuracy": accuracy, "nll": nll, "ece": 0.1} for at, (accuracy, nll) in test.items()}
    return {"config": config, "test": found}


@pytest.mark.parametrize(
    ("mean", "average", "verdicts"),
    [
        ((0.8, 1.0), (0.7, 1.01), "yes | yes | yes"),  # NLL within 2 %
        ((0.795, 1.0), (0.7, 1.03), "yes | no | no"),
        ((0.78, 1.0), (0.7, None), "no | no | no"),  # an infinite NLL
    ],
)
def test_the_table_compares_the_sets_that_both_have(mean, average, verdicts):
    lines = [line("plain", 1, mean=(0.8, 1.0)), line("deelbo", 1, mean=mean, average=average)]
    lines.append(line("plain", 2, mean=(0.0, 9.0)))
    table = script.table(lines)
    assert table.splitlines()[-1].endswith(f"| {verdicts} |")
    assert "| reviews-default | 1 | 80.0 | 1.000 |" in table
