"""A study: its matrix, its lines, and that it can be stopped anywhere."""

import hashlib
import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from conftest import load_example, low_rank_prior, make_model
from lab.studies import (
    Places,
    StudyRun,
    carry_out,
    commit,
    expand,
    load_task,
    make_deelbo_trainer,
    measure_step,
    read_lines,
    write_line,
)
from transformers import BertTokenizerFast, ResNetConfig, ResNetForImageClassification, Trainer

from hf_deelbo.plots import FixedPosterior, PriorFit

TINY = {"dataset": "digits", "train_size": 50, "image_size": 14, "horizontal_flip": False, "num_test": 40}
SHORT = TINY | {"learning_rates": [0.3, 0.03], "penalties": [1e-2], "num_samples": 2, "steps": 6}


@pytest.fixture(scope="module")
def script():
    return load_example("study")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A small network with batch norm, as if pretrained."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=2)
    ResNetForImageClassification(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def places(tmp_path, cache) -> Places:
    return Places(str(tmp_path / "work"), cache_dir=cache)


class TestRuns:
    def test_the_id_is_of_what_matters(self):
        run = StudyRun("digits", 100, 1001, "map-grid")
        assert run.id == StudyRun("digits", 100, 1001, "map-grid", init_sigma=1e-4, num_trials=7).id
        assert run.id != StudyRun("digits", 100, 1001, "map-grid", steps=151).id
        assert StudyRun.from_config(json.loads(json.dumps(run.config))).id == run.id

    @pytest.mark.parametrize(
        ("method", "runs"),
        # of four rates 40 + 20 steps, and 80 of the last one
        [("deelbo-full", 4), ("deelbo-halving", 1.4), ("elbo", 1.4), ("map-grid", 25), ("map-tpe", 11)],
    )
    def test_cost(self, method, runs):
        assert StudyRun("digits", 100, 1, method, steps=100, num_trials=10).num_runs == runs

    def test_one_candidate_costs_one_run(self):
        assert StudyRun("digits", 100, 1, "deelbo-single", learning_rates=(0.1,)).num_runs == 1

    def test_lists_are_axes_but_for_candidates(self):
        runs = expand(
            {"dataset": "d", "train_size": [10, 20], "subset_seed": 1, "method": "elbo", "learning_rates": [1, 2]}
        )
        assert [(run.train_size, run.learning_rates) for run in runs] == [(10, (1, 2)), (20, (1, 2))]

    @pytest.mark.parametrize(
        ("block", "message"),
        [
            ({"method": "sgd"}, "method: unknown method 'sgd'"),
            ({"method": "elbo", "lr": 1}, "lr: a run has no such field"),
            ({"method": "deelbo-single"}, '"deelbo-single" makes no choice'),
        ],
    )
    def test_mistakes(self, block, message):
        with pytest.raises(ValueError, match=message):
            expand({"dataset": "digits", "train_size": 100, "subset_seed": 1} | block)

    def test_the_presets_are_the_matrix(self, script):
        runs = {name: script.runs_of(script.parse(["--preset", name, "--ptyl_prior", "p"])) for name in script.PRESETS}
        cifar = [(run.method, run.subset_seed) for run in runs["cifar10-100"] if run.prior == "l2-sp"]
        for seed in (1001, 2001, 3001):
            assert {method for method, s in cifar if s == seed} == {
                "deelbo-full",
                "deelbo-halving",
                "elbo",
                "map-grid",
            }
        assert {run.num_runs for run in runs["cifar10-100"] if run.method == "map-grid"} == {25}
        assert {run.prior for run in runs["digits"] + runs["digits-ptyl"]} == {"l2-sp", "l2-zero", "ptyl"}
        assert all(run.num_test >= 2000 for run in runs["cifar10-100"] + runs["cifar10-1000"] + runs["pet"])
        assert {(run.prior, run.method, run.num_runs) for run in runs["digits-closed-form"]} == {
            ("l2-sp", "deelbo-halving", 1.4),
            ("l2-zero", "deelbo-halving", 1.4),
        }
        by_optimizer = {name for name in runs if {run.sigma_update for run in runs[name]} == {"optimizer"}}
        assert by_optimizer == runs.keys() - {"digits-closed-form", "calibrated", "calibrated-ptyl"}
        assert {run.init_sigma for run in runs["paper"] if not run.is_map} == {1e-4}

    def test_the_recorded_lines_are_runs_of_their_presets(self, script):
        recorded = {name: read_lines(script.RESULTS / f"{name}.jsonl") for name in script.PRESETS}
        assert recorded["digits"]
        for name, lines in recorded.items():
            runs = {run.id: run for run in script.runs_of(script.parse(["--preset", name, "--ptyl_prior", "p"]))}
            for line in lines:
                assert runs[line["id"]].config == line["config"]


class TestCommit:
    @pytest.fixture
    def repository(self, tmp_path) -> Path:
        """With a committed file in each folder."""
        for name in ("hf_deelbo", "examples/lab", "examples/results", "tests"):
            (tmp_path / name).mkdir(parents=True)
            (tmp_path / name / "file").write_text("old")
        identity = ["-c", "user.name=n", "-c", "user.email=e"]
        for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "m"]):
            subprocess.run(["git", "-C", tmp_path, *command], check=True)
        return tmp_path

    @pytest.mark.parametrize(
        ("changed", "mark"),
        [
            ([], ""),
            (["hf_deelbo/file"], "+"),
            (["examples/lab/file"], "+"),
            (["examples/new.py"], "+"),
            (["examples/results/file", "examples/results/new.jsonl", "tests/file"], ""),
        ],
    )
    def test_a_plus_tells_that_the_code_was_changed(self, repository, changed, mark):
        command = ["git", "-C", repository, "rev-parse", "HEAD"]
        whole = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for name in changed:
            (repository / name).write_text("new")
        assert commit(repository) == whole[:10] + mark

    def test_without_a_repository(self, tmp_path):
        assert commit(tmp_path) is None


def test_a_line_of_the_de_elbo(model, places):
    changes = {"learning_rates": (0.3, 0.03), "grouping": "all"}
    run = StudyRun(**SHORT | changes, subset_seed=1001, method="deelbo-full", model=model)
    line = carry_out(run, places)
    json.dumps(line, allow_nan=False)
    assert (line["id"], line["config"]["method"], line["num_classes"]) == (run.id, "deelbo-full", 10)
    assert (line["num_test_examples"], line["runs"], len(line["trials"])) == (40, 2, 2)
    assert line["seconds"] == pytest.approx(sum(trial["seconds"] for trial in line["trials"]))
    best = max(line["trials"], key=lambda trial: trial["de_elbo"])
    assert line["de_elbo"]["de_elbo"] == best["de_elbo"]
    assert line["choice"] == {"learning_rate": best["learning_rate"]}
    assert set(line["test"]) == {"mean", "mean_recomputed", "average"}
    assert all(set(metrics) == {"accuracy", "nll", "ece", "brier"} for metrics in line["test"].values())
    assert [step for step, _ in line["training_nll"]] == [1, 2, 3, 4, 5, 6]
    # figure 1 from the line alone: J at the learned lambda and tau
    parts = {name: PriorFit(**line["posterior"][name]) for name in ("backbone", "head")}
    posterior = FixedPosterior(**line["posterior"] | parts)
    learned = {name: line["learned"][name] for name in ("lambda_", "tau", "kappa")}
    assert posterior.value(**learned) == pytest.approx(line["de_elbo"]["de_elbo"], rel=1e-4)
    assert line["learned"]["kappa"] == line["num_parameters"] / 50
    text = json.dumps({name: line[name] for name in ("machine", "commit", "config")} | {"model": None})
    assert str(places.work_dir) not in text


def test_trainers_have_the_papers_protocol_and_the_sigma_of_the_run(model, places):
    run = StudyRun(**TINY, subset_seed=1, method="deelbo-halving", model=model)
    for changes, is_closed_form, num_sigmas in (
        ({"sigma_update": "optimizer", "grouping": "all", "init_sigma": 0.02}, False, 1),
        ({"sigma_update": "closed-form", "grouping": "part", "init_sigma": 0.02}, True, 2),
    ):
        trainer = make_deelbo_trainer(replace(run, **changes), load_task(run, places), places, 0.3, places.work_dir)
        args, posterior = trainer.args, trainer.posterior
        assert (args.optim, args.optim_args, args.learning_rate) == ("sgd", "momentum=0.9,nesterov=True", 0.3)
        assert (args.lr_scheduler_type, args.train_batch_size, args.dataloader_drop_last) == ("cosine", 50, True)
        assert (posterior.curvature is not None) == is_closed_form
        assert posterior.rho.numel() == num_sigmas
        assert posterior.sigma.item() == pytest.approx(0.02)


@pytest.mark.parametrize("method", ["deelbo-single", "map-random"])
def test_a_line_of_a_saved_prior_names_it(model, places, tmp_path, method):
    source, folder = ResNetForImageClassification.from_pretrained(model), tmp_path / "prior"
    low_rank_prior(source).save_pretrained(folder, model=source)
    rate = {"learning_rates": (0.1,), "steps": 2, "num_trials": 2}
    run = StudyRun(**SHORT | rate, subset_seed=1, method=method, prior="ptyl")
    line = carry_out(run, replace(places, ptyl_prior=str(folder)))
    assert line["ptyl_prior"] == hashlib.sha256((folder / "prior.safetensors").read_bytes()).hexdigest()
    assert math.isfinite(line["test"]["mean"]["nll"])


@pytest.mark.parametrize("method", ["deelbo-single", "map-grid"])
def test_texts_and_models_are_found_by_name(places, tmp_path, method):
    folder = tmp_path / "models" / "someone" / "tiny-bert"
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    make_model("bert").save_pretrained(folder)
    rows = tmp_path / "data" / "reviews"
    rows.mkdir(parents=True)
    for split in ("train", "test"):
        lines = [f"{word} {word} bad good,{word}" for word in ("good", "bad") for _ in range(10)]
        (rows / f"{split}.csv").write_text("\n".join(["text,label", *lines]))
    roots = {"data_root": str(tmp_path / "data"), "model_root": str(tmp_path / "models")}
    kind = {"learning_rates": (0.3,), "steps": 2, "max_seq_length": 4, "penalties": (1e-2,), "num_samples": 2}
    run = StudyRun("reviews", 10, 1, method, model="someone/tiny-bert", **kind)
    places = replace(places, **roots)
    line = carry_out(run, places)
    assert (line["config"]["model"], line["config"]["dataset"]) == ("someone/tiny-bert", "reviews")
    assert line["config"]["max_seq_length"] == 4
    assert str(tmp_path) not in json.dumps(line)
    # [CLS] good good [SEP], by the words of that model, cut to four
    assert load_task(run, places).test[0]["input_ids"] == [2, 5, 5, 3]


def test_a_line_of_the_grid(model, places):
    run = StudyRun(
        **SHORT | {"learning_rates": (0.3, 1e30), "penalties": (0.01, 0.0)},
        subset_seed=1,
        method="map-grid",
        model=model,
    )
    line = carry_out(run, places)
    assert [trial["setting"]["learning_rate"] for trial in line["trials"]] == [0.3, 0.3, 1e30, 1e30]
    survived, diverged = line["trials"][:2], line["trials"][2:]
    best = min(survived, key=lambda trial: trial["validation_nll"])
    assert line["choice"] == best["setting"]
    assert all(0 <= trial["measured"]["accuracy"] <= 1 and trial["steps"] == 6 for trial in survived)
    assert [(trial["validation_nll"], trial["measured"]) for trial in diverged] == [(None, None)] * 2
    assert line["test"]["mean"] != line["test"]["mean_recomputed"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("method", ["deelbo-halving", "map-grid"])
def test_a_stopped_study_ends_with_the_same_lines(script, model, tmp_path, cache, monkeypatch, method):
    monkeypatch.setattr("hf_deelbo.selection.LEAST_STEPS", 3)
    matrix = tmp_path / "tiny.yaml"
    matrix.write_text(yaml.safe_dump([SHORT | {"subset_seed": [1001, 2001], "method": method, "model": model}]))

    def study(name: str) -> None:
        places = ["--work_dir", str(tmp_path / f"{name}_work"), "--cache_dir", cache]
        script.main(["--matrix", str(matrix), "--results", str(tmp_path / f"{name}.jsonl"), *places])

    study("whole")
    steps, limit = 0, math.inf
    training_step = Trainer.training_step

    def killed_at_the_limit(*args, **kwargs):
        nonlocal steps
        steps += 1
        if steps > limit:
            raise Killed
        return training_step(*args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", killed_at_the_limit)
    for most in (4, 7, 3):  # halving has 3 + 3 + 3 steps a run, the grid 3 times 6
        steps, limit = 0, most
        with pytest.raises(Killed):
            study("stopped")
    limit = math.inf
    study("stopped")
    whole, stopped = (
        [without_times(line) for line in read_lines(tmp_path / f"{name}.jsonl")] for name in ("whole", "stopped")
    )
    assert len(whole) == 2
    assert stopped == whole
    steps = 0
    study("stopped")  # nothing is left to do
    assert steps == 0
    assert not list((tmp_path / "stopped_work").iterdir())


def without_times(value):
    if isinstance(value, dict):
        return {name: without_times(part) for name, part in value.items() if name != "seconds"}
    return [without_times(part) for part in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_side_by_side_gives_the_same_lines(script, model, tmp_path, cache):
    matrix = tmp_path / "tiny.yaml"
    block = SHORT | {"subset_seed": [1001, 2001], "method": "deelbo-single", "learning_rates": [0.1], "model": model}
    matrix.write_text(yaml.safe_dump([block | {"steps": 3}]))
    lines = {}
    for jobs in ("1", "2"):
        results = tmp_path / f"{jobs}.jsonl"
        places = ["--work_dir", str(tmp_path / "work"), "--cache_dir", cache]
        script.main(["--matrix", str(matrix), "--results", str(results), "--jobs", jobs, *places])
        lines[jobs] = [without_times(line) | {"machine": None} for line in read_lines(results)]
    assert len(lines["1"]) == 2
    assert lines["1"] == lines["2"]


def test_a_failed_run_does_not_stop_the_others(script, model, tmp_path, cache, capsys):
    matrix = tmp_path / "tiny.yaml"
    block = SHORT | {"method": "deelbo-single", "model": model, "steps": 2}
    rates = [block | {"learning_rates": [rate], "subset_seed": 1} for rate in (1e30, 0.1)]
    matrix.write_text(yaml.safe_dump(rates))
    results = tmp_path / "results.jsonl"
    with pytest.raises(SystemExit, match="Failed: "):
        script.main(
            [
                "--matrix",
                str(matrix),
                "--results",
                str(results),
                "--work_dir",
                str(tmp_path / "work"),
                "--cache_dir",
                cache,
            ]
        )
    assert [line["config"]["learning_rates"] for line in read_lines(results)] == [[0.1]]
    (line,) = read_lines(results)
    again = script.rerun(line, Places(str(tmp_path / "again"), cache_dir=cache))
    assert without_times(again) == without_times(line)


def test_the_dry_run_adds_up_steps(script, places, monkeypatch, capsys):
    class Pool:
        def __enter__(self):
            return self

        def __exit__(self, *args):
            return None

        map = staticmethod(map)

    monkeypatch.setattr(script, "workers", lambda jobs: Pool())
    monkeypatch.setattr(script, "measure_step", lambda run, places: 2.0 if run.is_map else 3.0)
    runs = expand(SHORT | {"subset_seed": [1, 2], "method": ["deelbo-full", "map-grid"]})
    # two sets: 2 candidates of 6 steps of 3 s, and 2 settings and a last run of 6 steps of 2 s
    assert script.estimate(runs, places, jobs=1) == 2 * (2 * 6 * 3 + 3 * 6 * 2)
    assert script.estimate(runs, places, jobs=2) == 2 * (2 * 6 * 3 + 3 * 6 * 2) / 2
    script.dry_run(runs, places, Path(places.work_dir) / "none.jsonl")
    assert "4 of 4 runs are left, with 10 trainings" in capsys.readouterr().out


@pytest.mark.parametrize("method", ["elbo", "map-grid"])
def test_a_step_is_measured(model, places, method):
    run = StudyRun(**TINY, subset_seed=1, method=method, model=model)
    assert 0 < measure_step(run, places, steps=3) < 10


def test_lines_stand_in_an_order_of_their_own(tmp_path):
    lines = [{"id": str(i), "config": {"dataset": "d", "n": n}, "value": i} for i, n in enumerate((3, 1, 2))]
    for name, order in (("one", lines), ("other", [lines[2], lines[0] | {"value": 9}, lines[1], lines[0]])):
        for line in order:
            write_line(tmp_path / name, line)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()
    assert [line["config"]["n"] for line in read_lines(tmp_path / "one")] == [1, 2, 3]
