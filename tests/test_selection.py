import gc
import json
import math
import re
import weakref

import optuna
import pytest
import torch
from conftest import make_dataset, make_model

from hf_deelbo import DEELBoConfig, DEELBoTrainer
from hf_deelbo import selection as selection_module
from hf_deelbo.data import class_balanced_indices
from hf_deelbo.reporting import Report
from hf_deelbo.selection import (
    elbo_objective,
    halving_runs,
    halving_steps,
    select,
)
from hf_deelbo.temperature import Temperatures, fit_temperature

RATES = [0.1, 0.01, 0.001, 0.0001]


@pytest.fixture
def task(make_config, tmp_path, monkeypatch):
    """A factory of trainers that counts the steps it was asked to make; halving may drop after three of their 20."""
    monkeypatch.setattr("hf_deelbo.selection.LEAST_STEPS", 3)

    class Task:
        folder = tmp_path / "selection"

        def __init__(self):
            self.steps = 0

        def make_trainer(self, learning_rate: float, output_dir: str) -> DEELBoTrainer:
            args = make_config(
                output_dir=output_dir,
                max_steps=20,
                learning_rate=learning_rate,
                sigma_update="closed-form",
                kl_warmup_epochs=0,
                save_strategy="steps",
                save_steps=5,
                num_elbo_samples=3,
                logging_steps=1,
            )
            trainer = DEELBoTrainer(make_model("vit"), args, train_dataset=make_dataset("vit"))
            training_step = trainer.training_step

            def counted(*arguments, **kwargs):
                self.steps += 1
                return training_step(*arguments, **kwargs)

            trainer.training_step = counted
            return trainer

    return Task()


def cost_of(steps: list[int], number: int, max_steps: int) -> int:
    """Steps of all rates, half of which are dropped each time."""
    left, done, cost = number, 0, 0
    for rung in [*steps, max_steps]:
        cost += left * (rung - done)
        left, done = math.ceil(left / 2), rung
    return cost


class TestHalvingSteps:
    @pytest.mark.parametrize("number", [2, 3, 4, 5, 8, 12])
    def test_a_long_training_costs_1_3_runs(self, number):
        steps = halving_steps(number, 60_000)
        cost = cost_of(steps, number, 60_000) / 60_000
        assert cost == pytest.approx(1.3, abs=1e-3)
        assert cost <= 1.3
        assert halving_runs(number, 60_000) == cost
        assert len(steps) == math.ceil(math.log2(number))

    @pytest.mark.parametrize(
        ("max_steps", "steps", "runs"),
        [
            (200, [15, 30], 1.3),
            (100, [10, 20], 1.4),
            (50, [10, 20], 1.8),
            (15, [10], 50 / 15),
        ],
    )
    def test_in_a_short_one_none_is_dropped_before_ten_steps(self, max_steps, steps, runs):
        assert halving_steps(4, max_steps) == steps
        assert cost_of(steps, 4, max_steps) / max_steps == pytest.approx(runs)
        assert halving_runs(4, max_steps) == pytest.approx(runs)

    @pytest.mark.parametrize(
        ("number", "max_steps", "warmup_steps", "steps"),
        [
            (4, 130, 63, [32, 64]),
            (4, 6000, 63, [450, 900]),  # far behind it
            (2, 130, 63, [63]),
            (8, 130, 63, [16, 32, 64]),
            (4, 38, 63, [32]),  # ends within it
        ],
    )
    def test_the_last_choice_is_not_within_the_warm_up(self, number, max_steps, warmup_steps, steps):
        assert halving_steps(number, max_steps, warmup_steps) == steps
        cost = cost_of(steps, number, max_steps) / max_steps
        assert halving_runs(number, max_steps, warmup_steps) == pytest.approx(cost)

    @pytest.mark.parametrize(("number", "max_steps"), [(1, 6000), (4, 10)])
    def test_where_there_is_nothing_to_drop_all_are_trained_in_full(self, number, max_steps):
        assert halving_steps(number, max_steps) == []
        assert halving_runs(number, max_steps) == number


class TestFull:
    def test_the_highest_j_is_taken(self, task):
        trainer, selection = select(task.make_trainer, RATES, task.folder, method="full")
        values = {}
        for rate in RATES:
            alone = task.make_trainer(rate, str(task.folder.parent / str(rate)))
            alone.train()
            values[rate] = alone.de_elbo().value
        assert {trial.learning_rate: trial.de_elbo for trial in selection.trials} == pytest.approx(values, rel=1e-9)
        assert selection.best_learning_rate == max(values, key=values.get)
        assert selection.runs == 4
        assert trainer.de_elbo().value == pytest.approx(values[selection.best_learning_rate], rel=1e-9)

    def test_there_is_one_model_in_memory(self, task):
        trainers = []

        def make_trainer(learning_rate, output_dir):
            gc.collect()
            assert not any(trainer() for trainer in trainers)
            trainer = task.make_trainer(learning_rate, output_dir)
            trainers.append(weakref.ref(trainer))
            return trainer

        rates = [RATES[1], RATES[3]]  # the best is not the last
        trainer, selection = select(make_trainer, rates, task.folder, method="full")
        assert selection.best_learning_rate == RATES[1]
        assert trainer.de_elbo().value == pytest.approx(selection.trials[0].de_elbo, rel=1e-9)


class TestHalving:
    def test_it_drops_the_lower_half_and_ends_as_an_uninterrupted_run(self, task):
        trainer, selection = select(task.make_trainer, RATES, task.folder)
        assert [trial.steps for trial in selection.trials] == [3] * 4 + [6] * 2 + [20]
        assert task.steps == 4 * 3 + 2 * 3 + 14
        assert selection.runs == pytest.approx(task.steps / 20)
        first = {trial.learning_rate: trial.de_elbo for trial in selection.trials[:4]}
        kept = {trial.learning_rate for trial in selection.trials[4:6]}
        assert min(first[rate] for rate in kept) > max(first[rate] for rate in RATES if rate not in kept)

        whole = task.make_trainer(selection.best_learning_rate, str(task.folder.parent / "whole"))
        whole.train()
        for name, tensor in whole.model.state_dict().items():
            assert torch.equal(trainer.model.state_dict()[name], tensor), name
        assert [line["step"] for line in trainer.state.log_history if "nll" in line] == list(range(1, 21))
        # only the best keeps its checkpoints
        folders = [path.name for path in task.folder.iterdir() if path.is_dir()]
        assert folders == [f"lr{selection.best_learning_rate}"]

    def test_in_a_short_training_the_last_two_are_trained_in_full(self, task, monkeypatch):
        monkeypatch.setattr("hf_deelbo.selection.LEAST_STEPS", 10)
        trainer, selection = select(task.make_trainer, RATES, task.folder)
        assert [trial.steps for trial in selection.trials] == [10] * 4 + [20] * 2
        last = {trial.learning_rate: trial.de_elbo for trial in selection.trials[4:]}
        assert selection.best_learning_rate == max(last, key=last.get)
        assert trainer.de_elbo().value == pytest.approx(last[selection.best_learning_rate], rel=1e-9)

    def test_the_last_choice_waits_for_the_whole_kl(self, task):
        """Batches of 8 of 24 examples: 5 epochs are 15 steps."""

        def make_trainer(learning_rate, output_dir):
            trainer = task.make_trainer(learning_rate, output_dir)
            trainer.args.kl_warmup_epochs = 5.0
            return trainer

        _, selection = select(make_trainer, RATES, task.folder)
        assert [trial.steps for trial in selection.trials] == [8] * 4 + [16] * 2 + [20]
        again = select(make_trainer, RATES, task.folder)[1]
        assert again == selection

    def test_j_on_the_way_is_rough(self, task):
        calls = []

        def make_trainer(learning_rate, output_dir):
            trainer = task.make_trainer(learning_rate, output_dir)
            de_elbo = trainer.de_elbo
            trainer.de_elbo = lambda **kwargs: calls.append(kwargs) or de_elbo(**kwargs)
            return trainer

        select(make_trainer, RATES, task.folder, num_samples=4)
        assert calls == [{"num_samples": 1, "num_examples": 512}] * 6 + [{"num_samples": 4}]

    def test_with_adamw_it_keeps_the_rate_that_ends_with_the_highest_j(self, tmp_path):
        """At `Trainer`'s defaults; where the optimiser moves sigma, the rate that learns has the lower J at first."""

        def make_trainer(learning_rate, output_dir):
            settings = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
            args = DEELBoConfig(output_dir, max_steps=40, learning_rate=learning_rate, num_elbo_samples=3, **settings)
            return DEELBoTrainer(make_model("resnet"), args, train_dataset=make_dataset("resnet", 48))

        rates = [1e-3, 3e-4, 1e-4, 1e-5]
        _, in_full = select(make_trainer, rates, tmp_path / "full", method="full")
        _, halved = select(make_trainer, rates, tmp_path / "halving")
        assert [trial.learning_rate for trial in halved.trials] == [*rates, *rates[:2], rates[0]]
        assert halved.best_learning_rate == in_full.best_learning_rate
        assert halved.trials[-1].de_elbo == pytest.approx(max(trial.de_elbo for trial in in_full.trials), rel=1e-9)

    def test_no_samples_are_refused_before_anything_is_trained(self, task):
        with pytest.raises(ValueError, match="num_samples: must be a whole number of at least 1, got 0"):
            select(task.make_trainer, RATES, task.folder, num_samples=0)
        assert task.steps == 0

    # before its first checkpoint, between two rates, with the half that is left, with the last
    @pytest.mark.parametrize(("killed_after", "lost"), [(1, 1), (6, 0), (13, 1), (24, 2)])
    def test_a_killed_selection_goes_on_where_it_was(self, task, killed_after, lost):
        expected = select(task.make_trainer, RATES, task.folder.parent / "uninterrupted")[1]
        task.steps = 0

        class Killed(BaseException):
            pass

        def until_killed(learning_rate, output_dir):
            trainer = task.make_trainer(learning_rate, output_dir)
            training_step = trainer.training_step

            def step(*arguments, **kwargs):
                if task.steps >= killed_after:
                    raise Killed
                return training_step(*arguments, **kwargs)

            trainer.training_step = step
            return trainer

        with pytest.raises(Killed):
            select(until_killed, RATES, task.folder)
        trainer, selection = select(task.make_trainer, RATES, task.folder)
        assert [(t.learning_rate, t.steps, t.de_elbo) for t in selection.trials] == [
            (t.learning_rate, t.steps, t.de_elbo) for t in expected.trials
        ]
        assert task.steps == 4 * 3 + 2 * 3 + 14 + lost  # only what was done since a checkpoint is done again
        steps = task.steps
        again = select(task.make_trainer, RATES, task.folder)
        assert task.steps == steps  # all was known
        assert again[1].best_learning_rate == selection.best_learning_rate
        for name, tensor in trainer.model.state_dict().items():
            assert torch.equal(again[0].model.state_dict()[name], tensor), name
        assert again[0].posterior.sigma == trainer.posterior.sigma

    def test_a_rate_that_diverges_loses(self, task):
        _, selection = select(task.make_trainer, [1e30, 0.01], task.folder)
        assert selection.best_learning_rate == 0.01
        assert selection.trials[0].de_elbo == -math.inf
        with pytest.raises(FloatingPointError, match="Every learning rate diverged"):
            select(task.make_trainer, [1e30], task.folder.parent / "other")

    def test_a_nan_among_the_data_of_j_is_no_rate_that_diverged(self, task):
        def make_trainer(*args) -> DEELBoTrainer:
            trainer, bad = task.make_trainer(*args), make_dataset("vit")
            bad[3]["pixel_values"] = bad[3]["pixel_values"] * math.nan
            trainer._elbo_dataset = bad
            return trainer

        with pytest.raises(ValueError, match="elbo_dataset: 'pixel_values' has values that are nan or infinite"):
            select(make_trainer, RATES[:2], task.folder)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_j_that_is_not_finite_is_never_the_best(self, task, value):
        """As an earlier version may have written it."""
        trials = [
            {"learning_rate": rate, "steps": 20, "de_elbo": j, "seconds": 1.0}
            for rate, j in zip(RATES, [value, -5.0, value, -7.0], strict=True)
        ]
        task.folder.mkdir()
        known = {"method": "full", "learning_rates": RATES, "max_steps": 20, "warmup_steps": 0, "trials": trials}
        (task.folder / "selection.json").write_text(json.dumps(known))
        report = Report(write=lambda line: None, bar=False)
        session = selection_module._Session(task.make_trainer, task.folder, "full", RATES, None, False, report)
        ordered = selection_module._best_first(session.try_all(RATES, rung=0))
        assert [trial.learning_rate for trial in ordered[:2]] == [0.01, 0.0001]

    def test_one_rate_is_one_run(self, task):
        _, selection = select(task.make_trainer, RATES[:1], task.folder)
        assert (selection.best_learning_rate, selection.runs, len(selection.trials)) == (RATES[0], 1.0, 1)


class TestRefusals:
    def test_an_unknown_method(self, task):
        with pytest.raises(ValueError, match="unknown method 'best'; choose one of full, halving"):
            select(task.make_trainer, RATES, task.folder, method="best")

    @pytest.mark.parametrize("rates", [[], RATES[:1] * 2])
    def test_no_rate_or_one_twice(self, task, rates):
        with pytest.raises(ValueError, match="learning_rates: needs at least one, and none twice"):
            select(task.make_trainer, rates, task.folder)

    def test_trainers_of_different_kappas(self, task):
        def make_trainer(learning_rate, output_dir):
            trainer = task.make_trainer(learning_rate, output_dir)
            trainer.posterior.kappa *= 1 + learning_rate
            return trainer

        with pytest.raises(ValueError, match="make_trainer: its trainers have different kappas"):
            select(make_trainer, RATES, task.folder)

    def test_the_folder_of_another_selection(self, task):
        select(task.make_trainer, RATES[:1], task.folder)
        assert json.loads((task.folder / "selection.json").read_text())["method"] == "halving"
        with pytest.raises(ValueError, match=r"holds another search \(it differs in: learning_rates\)"):
            select(task.make_trainer, RATES[:2], task.folder)

    def test_a_selection_of_before_learning_rates_were_all_there_is_to_choose(self, task):
        task.folder.mkdir()
        candidates = [{"learning_rate": rate, "init_sigma": 0.01} for rate in RATES]
        old = {"method": "halving", "candidates": candidates, "max_steps": 20, "trials": []}
        (task.folder / "selection.json").write_text(json.dumps(old))
        with pytest.raises(ValueError, match=r"holds another search \(it differs in: learning_rates\)"):
            select(task.make_trainer, RATES, task.folder)


class TestCalibration:
    def test_it_is_that_of_a_run_without_a_fifth_and_the_posterior_has_all_rows(self, task):
        trainer, selection = select(task.make_trainer, [0.1], task.folder, calibrate=True)
        plain, _ = select(task.make_trainer, [0.1], task.folder.with_name("plain"))
        assert selection.runs == 2.0
        assert trainer.posterior.temperatures == selection.temperatures != Temperatures()
        assert_same_weights(trainer, plain)

        by_hand = task.make_trainer(0.1, str(task.folder.with_name("by_hand")))
        labels = torch.tensor([row["labels"] for row in by_hand.train_dataset])
        held_out = class_balanced_indices([0] * 24, 4, by_hand.args.seed)
        rows = by_hand.train_dataset
        by_hand = DEELBoTrainer(
            make_model("vit"), by_hand.args, train_dataset=[row for i, row in enumerate(rows) if i not in held_out]
        )
        by_hand.train()
        inputs = {"pixel_values": torch.stack([rows[i]["pixel_values"] for i in held_out])}
        for num_samples, temperature in zip((0, 3), selection.temperatures, strict=True):
            probabilities = by_hand.posterior.predict_proba(inputs, num_samples)
            assert temperature == pytest.approx(fit_temperature(probabilities.log(), labels[held_out]), rel=1e-4)

    def test_it_is_not_done_twice(self, task):
        _, first = select(task.make_trainer, [0.1], task.folder, calibrate=True)
        task.steps = 0
        trainer, again = select(task.make_trainer, [0.1], task.folder, calibrate=True)
        assert (task.steps, again) == (0, first)
        assert trainer.posterior.temperatures == first.temperatures

    def test_it_needs_rows_to_hold_out(self, task):
        def make_trainer(learning_rate, output_dir):
            trainer = task.make_trainer(learning_rate, output_dir)
            return DEELBoTrainer(trainer.model, trainer.args, train_dataset=make_dataset("vit", size=4))

        with pytest.raises(ValueError, match="calibrate: needs a training set .* of at least five rows"):
            select(make_trainer, [0.1], task.folder, calibrate=True)


class TestReport:
    def test_each_line_is_what_was_measured(self, task):
        lines = []
        trainer, selection = select(
            task.make_trainer, RATES[:3], task.folder, calibrate=True, report=Report(lines.append, bar=False)
        )
        by_steps = {(trial.learning_rate, trial.steps): trial.de_elbo for trial in selection.trials}
        best, size = selection.best_learning_rate, trainer.posterior.num_parameters
        second = sorted((rate for rate, steps in by_steps if steps == 6), key=RATES.index)
        third = next(rate for rate in RATES[:3] if rate not in second)

        def tried(rate, place, steps):
            return f"  learning rate {rate:g} ({place}): {steps} of 20 steps, J/D {by_steps[rate, steps] / size:.4f}"

        told = [line.partition("; about")[0] for line in lines]
        assert told[0] == (
            "Training with 3 learning rates, half of those left are dropped after 3 and 6 steps: 29 steps, and 20 to "
            "calibrate."
        )
        assert told[1:4] == [tried(rate, f"{place} of 3", 3) for place, rate in enumerate(RATES[:3], 1)]
        by_j = sorted(second, key=lambda rate: -by_steps[rate, 3])
        assert told[4] == f"Kept {by_j[0]:g} and {by_j[1]:g}, dropped {third:g}: the lower J after 3 steps."
        assert told[5:7] == [tried(rate, f"{place} of 2", 6) for place, rate in enumerate(by_j, 1)]
        (lost,) = set(second) - {best}
        assert told[7] == f"Kept {best:g}, dropped {lost:g}: the lower J after 6 steps."
        assert told[8] == tried(best, "1 of 1", 20)
        mean, average = selection.temperatures
        assert told[9:] == [
            "Calibration: one more run, without 4 rows, to see how sure it may be of them.",
            f"  temperature of its probabilities {mean:.2f} at the mean, {average:.2f} averaged",
        ]
        assert task.steps == 29 + 20

    def test_without_one_it_is_logged(self, task, monkeypatch):
        lines = []
        monkeypatch.setattr("hf_deelbo.selection.logger.info", lines.append)
        select(task.make_trainer, RATES[:1], task.folder)
        assert lines[0] == "Training with one learning rate: 20 steps."

    def test_one_bar_counts_all_steps_and_is_gone_at_the_end(self, task, capsys):
        report, shown = Report(lambda line: None, bar=True), []
        show = report._show

        def look():
            show()
            shown.append((report._bar.n, report._bar.total) if report._bar is not None else None)

        report._show = look
        select(task.make_trainer, RATES[:2], task.folder, calibrate=True, report=report)
        counts = [n for n, _ in filter(None, shown)]
        assert sorted(set(counts)) == list(range(46 + 1))
        assert counts == sorted(counts)
        # two rates for 6 of 20 steps, one for the others, and one run to calibrate
        assert {total for _, total in filter(None, shown)} == {46}
        assert report._bar is None
        bar = capsys.readouterr().err
        assert "46 of 46 steps" in bar
        assert "learning rate 0.1 (1 of 2), J/D -" in bar
        assert re.search(r"20 of 46 steps, about [\d ]+ s left", bar)

    def test_a_selection_that_goes_on_tells_what_is_known_and_counts_it(self, task):
        select(task.make_trainer, RATES[:2], task.folder, calibrate=True)
        lines = []
        report = Report(lines.append, bar=False)
        select(task.make_trainer, RATES[:2], task.folder, calibrate=True, report=report)
        assert sum(line.endswith(", known from before") for line in lines) == 3
        assert report.done == report.total == 46
        assert not any("about" in line for line in lines)

    def test_a_rate_that_diverges_is_told_and_its_steps_are_skipped(self, task):
        lines = []
        report = Report(lines.append, bar=False)
        select(task.make_trainer, [1e30, 0.01], task.folder, report=report)
        assert re.match(r"  learning rate 1e\+30 \(1 of 2\): 6 of 20 steps, diverged; about", lines[1])
        assert lines[3] == "Kept 0.01, dropped 1e+30: the lower J after 6 steps."
        assert report.done == report.total == 26

    def test_long_silence_is_broken_where_there_is_no_bar(self, task, monkeypatch):
        monkeypatch.setattr("hf_deelbo.reporting.SILENCE", 0.0)
        lines = []
        select(task.make_trainer, RATES[:1], task.folder, report=Report(lines.append, bar=False))
        assert [line.partition(" of 20")[0] for line in lines[1:-1]] == [
            f"  learning rate 0.1 (1 of 1): at step {step}" for step in range(1, 21)
        ]
        assert all("J/D -" in line for line in lines[2:-1])

    def test_the_time_left_is_that_of_the_steps_so_far(self, monkeypatch):
        now = 1000.0
        monkeypatch.setattr("hf_deelbo.reporting.time.perf_counter", lambda: now)
        report = Report(bar=False)
        report.expect(50)
        assert report.left() == ""
        with report.part("a", steps=20):
            for _ in range(10):
                now += 2.0
                report.on_step_end(None, None, None)
            assert report.left() == "; about 1 min 20 s left"  # 40 steps of 2 s
        assert report.left() == "; about 1 min 00 s left"  # ten were skipped


def test_the_cost_in_seconds_is_that_of_all(task):
    _, selection = select(task.make_trainer, RATES[:2], task.folder, calibrate=True)
    calibration = json.loads((task.folder / "selection.json").read_text())["calibration"]["seconds"]
    assert selection.seconds == pytest.approx(sum(trial.seconds for trial in selection.trials) + calibration)
    assert calibration > 0


def assert_same_weights(trainer: DEELBoTrainer, other: DEELBoTrainer) -> None:
    for name, w in trainer.posterior.parameters().items():
        assert torch.equal(w, other.posterior.parameters()[name])


def test_j_is_an_objective_of_hyperparameter_search(make_config):
    trainer = DEELBoTrainer(
        args=make_config(max_steps=3, num_elbo_samples=2),
        train_dataset=make_dataset("vit"),
        eval_dataset=make_dataset("vit", 6),
        model_init=lambda: make_model("vit"),
    )
    values = {}

    def space(trial) -> dict[str, float]:
        return {"learning_rate": trial.suggest_categorical("learning_rate", [0.1, 1e-5])}

    objective = elbo_objective(trainer)

    def noted(metrics):
        values[trainer.args.learning_rate] = objective(metrics)
        return values[trainer.args.learning_rate]

    best = trainer.hyperparameter_search(
        hp_space=space,
        compute_objective=noted,
        n_trials=2,
        direction="maximize",
        backend="optuna",
        sampler=optuna.samplers.GridSampler({"learning_rate": [0.1, 1e-5]}),
    )
    assert len(values) == 2
    assert best.objective == max(values.values())
    assert best.hyperparameters["learning_rate"] == max(values, key=values.get)


def test_j_is_no_objective_of_a_search_over_kappa(make_config):
    trainer = DEELBoTrainer(make_model("vit"), make_config(), train_dataset=make_dataset("vit"))
    objective = elbo_objective(trainer)
    objective({})
    trainer.posterior.kappa *= 2
    with pytest.raises(ValueError, match="hp_space: J of different kappas"):
        objective({})
