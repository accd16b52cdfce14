"""Searches against what they are defined to be, and against those that were recorded."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
import torch
from conftest import NUM_LABELS, collate, make_dataset, make_model
from lab.map import MAPConfig, MAPTrainer
from lab.searches import (
    Setting,
    Split,
    grid,
    grid_search,
    random_search,
    random_settings,
    search_space,
    tpe_search,
    train_validation_split,
)
from lab.studies import read_lines
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import TrialState
from torch import nn

COMPLETE, FAIL = TrialState.COMPLETE, TrialState.FAIL
RESULTS = Path(__file__).parents[2] / "examples" / "results"


class TestSettings:
    """The numbers of the paper's appendix."""

    @pytest.mark.parametrize("prior", ["l2-zero", "l2-sp"])
    def test_l2(self, prior):
        rates, penalties = [0.1, 0.01, 0.001, 0.0001], [0.01, 0.001, 0.0001, 0.00001, 0.000001, 0.0]
        found = [(s.learning_rate, s.alpha_over_n, s.beta_over_n, s.lambda_) for s in grid(prior)]
        assert found == [(rate, penalty, penalty, None) for rate in rates for penalty in penalties]
        assert len(found) == 24

    def test_ptyl(self):
        found = grid("ptyl")
        assert len(set(found)) == len(found) == 240
        assert {s.learning_rate for s in found} == {0.1, 0.01, 0.001, 0.0001}
        assert sorted({s.lambda_ for s in found}) == list(np.logspace(0, 9, 10))
        assert {s.beta_over_n for s in found} == {0.01, 0.001, 0.0001, 0.00001, 0.000001, 0.0}
        assert {s.alpha_over_n for s in found} == {None}

    def test_random_settings_are_log_uniform(self):
        settings = random_settings("l2-sp", 4000, seed=0)
        for name, (low, high) in {
            "learning_rate": (-4, -1),
            "alpha_over_n": (-6, -2),
            "beta_over_n": (-6, -2),
        }.items():
            logs = np.log10([getattr(setting, name) for setting in settings])
            assert low <= logs.min() < low + 0.01
            assert high - 0.01 < logs.max() <= high
            assert np.histogram(logs, bins=4, range=(low, high))[0] == pytest.approx(1000, abs=120)
        logs = np.log([[s.alpha_over_n, s.beta_over_n] for s in settings])
        assert abs(np.corrcoef(logs.T)[0, 1]) < 0.05
        assert settings[:5] == random_settings("l2-sp", 5, seed=0)
        assert settings[:5] != random_settings("l2-sp", 5, seed=1)
        assert {s.lambda_ is None for s in random_settings("ptyl", 9)} == {False}

    def test_learning_rates_are_the_ends_of_their_range(self):
        rates = [setting.learning_rate for setting in random_settings("l2-sp", 100, learning_rates=[1e-4, 2e-5, 5e-5])]
        assert 2e-5 <= min(rates) < 2.2e-5
        assert 0.9e-4 < max(rates) <= 1e-4

    @pytest.mark.parametrize("function", [grid, search_space, lambda prior: random_settings(prior, 1)])
    def test_an_unknown_prior(self, function):
        with pytest.raises(ValueError, match="prior: unknown prior 'l3'; choose one of"):
            function("l3")


class TestSplit:
    @pytest.mark.parametrize(("num_classes", "of_each"), [(10, 10), (37, 10), (37, 93), (3, 7)])
    def test_a_fifth_class_balanced_and_disjoint(self, num_classes, of_each):
        labels = np.random.default_rng(0).permutation(np.repeat(np.arange(num_classes), of_each))
        split = train_validation_split(labels.tolist(), seed=3)
        assert sorted(split.train + split.validation) == list(range(len(labels)))
        assert len(split.validation) == len(labels) // 5
        counts = np.bincount(labels[split.validation], minlength=num_classes)
        assert counts.max() - counts.min() <= 1
        assert np.all(np.abs(counts - of_each / 5) < 1)

    def test_frequencies_are_kept_and_a_rare_class_is_trained_on(self):
        labels = [0] * 50 + [1] * 25 + [2] * 10 + [3]
        split = train_validation_split(labels, seed=0)
        held_out = np.bincount([labels[i] for i in split.validation], minlength=4).tolist()
        assert held_out == [10, 5, 2, 0]

    def test_the_seed_draws_it(self):
        labels = list(range(5)) * 10
        assert train_validation_split(labels, 1) == train_validation_split(labels, 1)
        assert train_validation_split(labels, 1) != train_validation_split(labels, 2)
        # examples are held out at random: over many seeds each about as often as the others
        counts = np.bincount(np.concatenate([train_validation_split(labels, seed).validation for seed in range(500)]))
        assert counts == pytest.approx(100, abs=45)

    def test_too_few(self):
        with pytest.raises(ValueError, match="labels: of 4 examples no fifth"):
            train_validation_split([0, 0, 1, 1])


LABELS = [i % NUM_LABELS for i in range(30)]
SETTINGS = [
    Setting(rate, alpha_over_n=penalty, beta_over_n=penalty) for rate in (0.1, 0.001) for penalty in (1e-2, 0.0)
]


class Scripted:
    """Stands in for `MAPTrainer`: its validation NLL is given; it knows how often it was asked."""

    def __init__(self, nlls: dict[Setting, float]):
        self.nlls, self.trained, self.splits = nlls, [], []

    def make_trainer(self, setting, output_dir, split):
        self.splits.append(split)
        state = SimpleNamespace(global_step=0, save_to_json=lambda path: None)

        def train():
            self.trained.append(setting)
            if self.nlls[setting] == math.inf:
                state.global_step = 5
                raise FloatingPointError("loss")
            state.global_step = 20

        def predict(dataset, metric_key_prefix):
            assert dataset == split.validation
            labels = np.array([LABELS[i] for i in dataset])
            logits = np.eye(NUM_LABELS)[np.where(labels == 2, 0, labels)]  # the third class is never right
            metrics = {f"{metric_key_prefix}_loss": self.nlls[setting]}
            return SimpleNamespace(metrics=metrics, predictions=logits, label_ids=labels)

        return SimpleNamespace(
            setting=setting,
            state=state,
            train=train,
            predict=predict,
            train_dataset=split.train,
            eval_dataset=split.validation,
            args=SimpleNamespace(world_size=1),
            save_model=lambda folder: None,
            load_checkpoint=lambda folder: None,
        )


def states_of(folder: Path) -> set[TrialState]:
    """What Optuna says of the trials of a search."""
    storage = JournalStorage(JournalFileBackend(str(folder / "search.log")))
    return {trial.state for trial in optuna.load_study(study_name=None, storage=storage).trials}


class TestChoice:
    def test_the_lowest_validation_nll_is_trained_again_on_all(self, tmp_path):
        task = Scripted(dict(zip(SETTINGS, [0.9, 0.5, 0.7, 0.6], strict=True)))
        trainer, result = grid_search(task.make_trainer, SETTINGS, tmp_path, LABELS)
        assert result.best == trainer.setting == SETTINGS[1]
        assert task.trained == [*SETTINGS, SETTINGS[1]]
        assert [trial.validation_nll for trial in result.trials] == [0.9, 0.5, 0.7, 0.6]
        assert [trial.validation_accuracy for trial in result.trials] == pytest.approx([2 / 3] * 4)
        assert task.splits[:4] == [train_validation_split(LABELS, 0)] * 4
        assert task.splits[4].train == list(range(30))
        assert task.splits[4].validation == []
        assert (result.method, result.runs) == ("grid", 5)
        assert result.seconds == sum(trial.seconds for trial in result.trials) + result.final_seconds

    def test_the_paper_s_grid_costs_25_runs(self, tmp_path):
        """16 h 15 of 39 minutes each."""
        task = Scripted(dict.fromkeys(grid("l2-sp"), 1.0))
        _, result = grid_search(task.make_trainer, grid("l2-sp"), tmp_path, LABELS)
        assert result.runs == len(task.trained) == 25

    def test_of_equals_the_first(self, tmp_path):
        task = Scripted(dict(zip(SETTINGS, [0.9, 0.5, 0.5, 0.6], strict=True)))
        assert grid_search(task.make_trainer, SETTINGS, tmp_path, LABELS)[1].best == SETTINGS[1]

    @pytest.mark.parametrize("bad", [math.inf, math.nan, -math.inf])
    def test_what_diverges_loses_and_costs_its_steps(self, tmp_path, bad):
        task = Scripted(dict(zip(SETTINGS, [bad, 0.5, 0.5, 0.6], strict=True)))
        _, result = grid_search(task.make_trainer, SETTINGS, tmp_path, LABELS)
        assert result.best == SETTINGS[1]
        assert result.trials[0].validation_nll == math.inf
        assert math.isnan(result.trials[0].validation_accuracy)
        assert result.runs == (4.25 if bad == math.inf else 5)
        as_json = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        assert [trial["validation_nll"] for trial in as_json["trials"]] == [None, 0.5, 0.5, 0.6]
        assert (as_json["best"]["beta_over_n"], as_json["runs"]) == (0.0, result.runs)
        # read back from the file
        assert grid_search(task.make_trainer, SETTINGS, tmp_path, LABELS)[1].trials[0].validation_nll == math.inf

    def test_all_diverge(self, tmp_path):
        task = Scripted(dict.fromkeys(SETTINGS, math.inf))
        with pytest.raises(FloatingPointError, match="Every setting diverged"):
            grid_search(task.make_trainer, SETTINGS, tmp_path, LABELS)

    @pytest.mark.parametrize("search", ["grid", "random", "tpe"])
    @pytest.mark.parametrize("killed_at", [1, 3, 5])
    def test_a_killed_search_goes_on_where_it_was(self, tmp_path, search, killed_at):
        """Nothing is trained twice but what was at work; `killed_at` 5 is the last run, on all examples."""

        class Nlls(dict):
            def __missing__(self, setting):
                return abs(math.log10(setting.learning_rate) + 2) + setting.beta_over_n

        def run(make_trainer, folder):
            if search == "grid":
                return grid_search(make_trainer, SETTINGS, tmp_path / folder, LABELS)
            function = random_search if search == "random" else tpe_search
            return function(make_trainer, "l2-sp", 4, tmp_path / folder, LABELS, seed=1)

        task = Scripted(Nlls())

        def until_killed(*arguments):
            if len(task.trained) == killed_at - 1:
                raise KeyboardInterrupt
            return task.make_trainer(*arguments)

        with pytest.raises(KeyboardInterrupt):
            run(until_killed, "killed")
        trainer, result = run(task.make_trainer, "killed")
        assert len(task.trained) == 5  # nothing twice
        whole = run(Scripted(Nlls()).make_trainer, "whole")[1]
        assert [(t.setting, t.validation_nll) for t in result.trials] == [
            (t.setting, t.validation_nll) for t in whole.trials
        ]
        assert (result.best, result.runs, result.method) == (whole.best, 5, search)
        assert trainer.setting == result.best
        assert run(task.make_trainer, "killed")[1] == result  # to the second
        assert len(task.trained) == 5
        assert states_of(tmp_path / "killed") == {COMPLETE, FAIL} if killed_at < 5 else {COMPLETE}

    def test_killed_before_a_setting_begins(self, tmp_path, monkeypatch):
        """When Optuna has the next setting, but the study does not tell yet that it is tried."""
        task = Scripted(dict(zip(SETTINGS, [0.9, 0.5, 0.7, 0.6], strict=True)))
        ask, count = optuna.Study.ask, 0

        def until_killed(study, *arguments):
            nonlocal count
            count += 1
            if count == 3:
                raise KeyboardInterrupt
            return ask(study, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(optuna.Study, "ask", until_killed)
            with pytest.raises(KeyboardInterrupt):
                grid_search(task.make_trainer, SETTINGS, tmp_path, LABELS)
        _, result = grid_search(task.make_trainer, SETTINGS, tmp_path, LABELS)
        assert task.trained == [*SETTINGS, SETTINGS[1]]
        assert [trial.setting for trial in result.trials] == SETTINGS
        assert states_of(tmp_path) == {COMPLETE, FAIL}

    def test_tpe_learns_where_to_look(self, tmp_path):
        """Its later proposals are nearer to the optimum than its first ten, which are random; one diverged."""

        class Nlls(dict):
            def __missing__(self, setting):
                away = math.log10(setting.learning_rate) + 2
                return math.inf if away > 0.8 else away**2

        _, result = tpe_search(Scripted(Nlls()).make_trainer, "l2-sp", 40, tmp_path, LABELS, seed=0)
        away = [abs(math.log10(trial.setting.learning_rate) + 2) for trial in result.trials]
        assert np.mean(away[20:]) < 0.6 * np.mean(away[:10])
        assert math.inf in [trial.validation_nll for trial in result.trials]
        assert all(1e-6 <= trial.setting.alpha_over_n <= 1e-2 for trial in result.trials)

    def test_refusals(self, tmp_path):
        task = Scripted(dict.fromkeys(SETTINGS, 1.0))
        for settings in ([], SETTINGS[:1] * 2):
            with pytest.raises(ValueError, match="settings: needs at least one, and none twice"):
                grid_search(task.make_trainer, settings, tmp_path, LABELS)
        grid_search(task.make_trainer, SETTINGS[:1], tmp_path, LABELS)
        for (settings, labels, seed), difference in (
            ((SETTINGS[:2], LABELS, 0), "settings"),
            ((SETTINGS[:1], LABELS + LABELS, 0), "num_examples"),
            ((SETTINGS[:1], LABELS, 1), "seed"),
        ):
            with pytest.raises(ValueError, match=rf"holds another search \(it differs in: {difference}\)"):
                grid_search(task.make_trainer, settings, tmp_path, labels, seed)
        with pytest.raises(ValueError, match="folder: .* holds another search .*method"):
            random_search(task.make_trainer, "l2-sp", 1, tmp_path, LABELS)
        with pytest.raises(ValueError, match="num_trials: must be a whole number of at least 1, got 0"):
            tpe_search(task.make_trainer, "l2-sp", 0, tmp_path, LABELS)

    def test_several_processes(self, tmp_path):
        task = Scripted(dict.fromkeys(SETTINGS, 1.0))

        def one_of_two(*arguments):
            trainer = task.make_trainer(*arguments)
            trainer.args.world_size = 2
            return trainer

        with pytest.raises(ValueError, match="its trainer is one of 2 processes, but a search runs in one"):
            grid_search(one_of_two, SETTINGS, tmp_path, LABELS)

    @pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
    def test_a_trainer_that_ignores_the_split(self, tmp_path, argument):
        task = Scripted(dict.fromkeys(SETTINGS, 1.0))

        def leaks(*arguments):
            trainer = task.make_trainer(*arguments)
            setattr(trainer, argument, LABELS)
            return trainer

        with pytest.raises(ValueError, match=f"make_trainer: the {argument} of its trainer has 30 examples, not the"):
            grid_search(leaks, SETTINGS, tmp_path, LABELS)


class TestRecordedSearches:
    """The lines of examples/results, whose settings were found with other code."""

    LINES = [  # noqa: RUF012
        line
        for name in ("digits", "digits-ptyl")
        for line in read_lines(RESULTS / f"{name}.jsonl")
        if line["config"]["method"].startswith("map")
    ]

    @pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line['config']['method']}-{line['id']}")
    def test_they_try_and_choose_the_same(self, tmp_path, line):
        """Also when they are killed in every fifth trial."""
        config, trials = line["config"], line["trials"]
        nlls = {
            Setting(**trial["setting"]): math.inf if trial["validation_nll"] is None else trial["validation_nll"]
            for trial in trials
        }
        task, last_killed = Scripted(nlls), 0

        def killed_at_times(*arguments):
            nonlocal last_killed
            if len(task.trained) == last_killed + 5:
                last_killed += 5
                raise KeyboardInterrupt
            return task.make_trainer(*arguments)

        def search():
            if config["method"] == "map-grid":
                settings = grid(config["prior"], config["learning_rates"], config["penalties"])
                return grid_search(killed_at_times, settings, tmp_path, LABELS)
            function = random_search if config["method"] == "map-random" else tpe_search
            return function(killed_at_times, config["prior"], config["num_trials"], tmp_path, LABELS)

        for _ in range(len(trials) // 5):
            with pytest.raises(KeyboardInterrupt):
                search()
        _, result = search()
        assert [trial.setting.arguments for trial in result.trials] == [trial["setting"] for trial in trials]
        assert result.best.arguments == line["choice"]


class TestRealSearch:
    @pytest.fixture
    def make_trainer(self):
        data = make_dataset("vit", 30)
        assert [example["labels"] for example in data] == LABELS

        def make(setting, output_dir, split) -> MAPTrainer:
            args = MAPConfig.paper(
                output_dir,
                max_steps=6,
                per_device_train_batch_size=8,
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                disable_tqdm=True,
                **setting.arguments,
            )
            return MAPTrainer(
                make_model("vit"),
                args,
                train_dataset=[data[i] for i in split.train],
                eval_dataset=[data[i] for i in split.validation],
            )

        return make

    def test_numbers_files_and_the_last_model(self, make_trainer, tmp_path, snapshot, assert_same):
        tried = SETTINGS[:2]
        settings = [*tried, Setting(1e30, alpha_over_n=0.0, beta_over_n=0.0)]
        trainer, result = grid_search(make_trainer, settings, tmp_path / "search", LABELS)
        split, expected = train_validation_split(LABELS), []
        for setting in tried:
            alone = make_trainer(setting, str(tmp_path / "alone"), split)
            alone.train()
            batch = collate(alone.eval_dataset)
            with torch.no_grad():
                logits = alone.model.eval()(batch["pixel_values"]).logits
            accuracies = [(logits.argmax(1) == c)[batch["labels"] == c].double().mean() for c in range(NUM_LABELS)]
            nll = nn.functional.cross_entropy(logits, batch["labels"]).item()
            expected.append((nll, float(sum(accuracies)) / NUM_LABELS))
        found = [(trial.validation_nll, trial.validation_accuracy) for trial in result.trials[:2]]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert result.best == tried[np.argmin([nll for nll, _ in expected])]
        assert result.trials[2].validation_nll == math.inf
        assert result.trials[2].steps < 6

        final = make_trainer(result.best, str(tmp_path / "final"), Split(train=range(30), validation=[]))
        final.train()
        assert_same(snapshot(final.model), snapshot(trainer.model))

        folder = tmp_path / "search"
        assert sorted(path.name for path in folder.iterdir()) == ["model", "search.log"]
        again, same = grid_search(make_trainer, settings, folder, LABELS)
        assert same.best == result.best
        assert_same(snapshot(again.model), snapshot(trainer.model))
        assert again.state.log_history == trainer.state.log_history
