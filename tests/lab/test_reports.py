"""The report: cells computed by hand, the curve of a search by enumeration, and that it is the same to the byte."""

import itertools
import json
import math
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from conftest import load_example
from lab.reports import (
    compare,
    comparison_table,
    cost_table,
    mean_curve,
    preferred_starts,
    quality_table,
    rows_of,
    search_curve,
    without_repeats,
)
from lab.studies import StudyRun

README = "# A package\n\n<!-- results: begin -->\nold\n<!-- results: end -->\n\nThe rest.\n"


@pytest.fixture(scope="module")
def script():
    return load_example("report")


def trial(nll: float | None, accuracy: float | None, seconds: float) -> dict:
    return {
        "setting": {"learning_rate": 0.1, "alpha_over_n": 0.0, "beta_over_n": 0.0},
        "validation_nll": nll,
        "measured": None if accuracy is None else {"accuracy": accuracy},
        "seconds": seconds,
        "steps": 10,
    }


TRIALS = [trial(1.2, 0.3, 7), trial(0.6, 0.6, 10), trial(0.5, 0.55, 11), trial(None, None, 2), trial(0.9, 0.5, 10)]
CHANGES = ("kappa", "sigma_update", "grouping", "init_sigma", "calibrate")  # what a line's run may have of its own


def line(method: str, seed: int, runs: float, seconds: float, **accuracies_and_nlls) -> dict:
    """A line as `studies.carry_out` makes it; `mean=(accuracy, nll)` and so forth."""
    changes = {name: accuracies_and_nlls.pop(name) for name in CHANGES if name in accuracies_and_nlls}
    changes = {"sigma_update": "optimizer", "init_sigma": 1e-2} | changes
    if method == "deelbo-single":
        changes["learning_rates"] = (0.1,)
    j = accuracies_and_nlls.pop("de_elbo", -200.0 - seed / 100)
    run = StudyRun("cifar10", 100, seed, method, **changes)
    fit = {"mahalanobis": 5.0, "trace_inverse": 500.0, "log_det": 0.0, "num_parameters": 500}
    sigma, nll = (0.3, 2.3) if method == "elbo" else (0.05, 0.1)
    kappa = 1.0 if method == "elbo" else run.kappa if run.kappa != "auto" else 10.0
    of_deelbo = {
        "de_elbo": {"de_elbo": j},
        "learned": {"lambda_": 1e-3, "tau": 1e-2, "sigma": sigma, "kappa": kappa},
        "posterior": {"name": method, "nll": nll, "sigma": sigma, "backbone": fit, "head": fit, "num_examples": 100},
    }
    return {
        "id": run.id,
        "config": run.config,
        "commit": "0123456789",
        "date": "2026-01-02",
        "machine": {"device": "cpu", "cores": 2, "threads": 1, "torch": "2.15.0", "python": "3.12.0"},
        "num_classes": 10,
        "num_test_examples": 2000,
        "num_parameters": 1000,
        "runs": runs,
        "seconds": seconds,
        "test": {
            at: {"accuracy": a, "nll": n, "ece": 0.1, "brier": 0.5} for at, (a, n) in accuracies_and_nlls.items()
        },
        "trials": TRIALS if run.is_map else [],
        **({} if run.is_map else of_deelbo),
    }


GRID = [
    line("map-grid", 1001, 25, 2500, mean=(0.40, 1.8), mean_recomputed=(0.41, 1.7)),
    line("map-grid", 2001, 25, 2700, mean=(0.44, 1.6), mean_recomputed=(0.43, 1.5)),
    line("map-grid", 3001, 25, 2600, mean=(0.45, 2.0), mean_recomputed=(0.45, 1.9)),
]
HALVING = [
    line("deelbo-halving", 1001, 1.6, 160, mean=(0.42, 2.1), mean_recomputed=(0.42, 2.0), average=(0.46, 1.5)),
    line("deelbo-halving", 2001, 1.6, 200, mean=(0.43, 2.3), mean_recomputed=(0.42, 2.0), average=(0.47, 1.4)),
]
PLAIN = [line("elbo", 2001, 1.6, 170, mean=(0.10, None), mean_recomputed=(0.1, 2.3), average=(0.1, 2.3))]
SWEEP = [
    line("deelbo-single", 1001, 1, 100, kappa=kappa, mean=(accuracy, 2.0), average=(accuracy, 1.9))
    for kappa, accuracy in ((1, 0.1), (100, 0.4), ("auto", 0.45))
]


def cells(table: str) -> dict[str, list[str]]:
    """By the name of the row."""
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def test_texts_are_told_in_tokens(script):
    text = HALVING[0] | {"config": HALVING[0]["config"] | {"max_seq_length": 32}}
    images, texts = rows_of([HALVING[0]])[0], rows_of([text])[0]
    assert script.title(images) == "cifar10, N = 100 (efficientnet-lite0, 64 px, 150 steps, 2,000 test examples)"
    assert script.title(texts) == "cifar10, N = 100 (efficientnet-lite0, 32 tokens, 150 steps, 2,000 test examples)"
    assert images.task != texts.task


class TestTables:
    def test_where_j_wants_sigma_to_start(self):
        values = {1e-4: (-30, -20, -10), 1e-2: (-20, -30, -9)}  # of three sets, the second prefers 1e-4
        lines = [
            line("deelbo-full", seed, 4, 400, mean=(0.4, 2.0), init_sigma=sigma, de_elbo=j)
            for sigma, js in values.items()
            for seed, j in zip((1001, 2001, 3001), js, strict=True)
        ]
        (sentence,) = preferred_starts(rows_of(lines + HALVING + GRID))
        assert sentence == (
            "L2-SP, DE ELBo, all in full: of 3 training sets, J is highest with sigma from 0.01 on 2, "
            "sigma from 0.0001 on 1."
        )

    def test_a_sigma_in_closed_form_has_no_start(self):
        groupings = ("all", "layer", StudyRun.grouping)
        lines = [
            line("deelbo-full", seed, 4, 400, mean=(0.4, 2.0), sigma_update="closed-form", grouping=grouping)
            for grouping in groupings
            for seed in (1001, 2001, 3001)
        ]
        rows = rows_of(lines + HALVING + GRID)
        assert [row.name for row in rows] == [
            "L2-SP, MAP, grid search",
            "L2-SP, DE ELBo, all in full, sigma in closed form, one",
            "L2-SP, DE ELBo, all in full, sigma in closed form, by layer",
            "L2-SP, DE ELBo, all in full, sigma in closed form",
            "L2-SP, DE ELBo, halving, sigma from 0.01",
        ]
        assert preferred_starts(rows) == []

    def test_quality(self):
        table = cells(quality_table(rows_of(HALVING + PLAIN + GRID)))
        grid = table["L2-SP, MAP, grid search"]
        ids = " ".join(f"`{run['id']}`" for run in GRID)
        assert grid == [
            *("3", "43.0 (40.0-45.0)", "43.0 (41.0-45.0)", ""),
            *("1.80 (1.60-2.00)", "1.70 (1.50-1.90)", "", "", ids),
        ]
        ours = table["L2-SP, DE ELBo, halving, sigma from 0.01"]
        assert ours[:4] == ["2", "42.5 (42.0-43.0)", "42.0 (42.0-42.0)", "46.5 (46.0-47.0)"]
        assert ours[4:8] == ["2.20 (2.10-2.30)", "2.00 (2.00-2.00)", "1.45 (1.40-1.50)", "-0.215 (-0.220 to -0.210)"]
        assert table["L2-SP, ELBo, kappa = 1, sigma from 0.01"][4] == "inf"

    def test_cost_is_compared_on_the_sets_that_both_have(self):
        ours = cells(cost_table(rows_of(GRID + HALVING)))["L2-SP, DE ELBo, halving, sigma from 0.01"]
        # 25 / 1.6 runs; (2500 + 2700) / (160 + 200) seconds
        assert ours[:5] == ["1.6 (1.6-1.6)", "180 (160-200)", "112 (100-125)", "15.6", "14.4"]

    def test_seconds_are_compared_on_the_same_machine(self):
        other = GRID[0]["machine"] | {"device": "another cpu"}
        elsewhere = [run | {"machine": other} for run in GRID]
        for grid, seconds in (([elsewhere[0], *GRID[1:]], "13.5"), (elsewhere, "")):  # 2700 / 200
            ours = cells(cost_table(rows_of(grid + HALVING)))["L2-SP, DE ELBo, halving, sigma from 0.01"]
            assert ours[3:5] == ["15.6", seconds]

    def test_the_answers(self):
        table = comparison_table(rows_of(GRID + HALVING + PLAIN))
        ours, plain = ([cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:])
        # on the first two sets the grid has 40 and 44 %, NLL 1.7, recomputed 1.6
        assert ours[:7] == [
            *("cifar10", "100", "150", "L2-SP, DE ELBo, halving, sigma from 0.01"),
            *("42.5 (42.0-43.0)", "42.0 (40.0-44.0)", "within"),
        ]
        assert ours[7:11] == ["**worse**: 2.20, 1.70", "better: 1.45, 1.60", "15.6", "14.4"]
        assert plain[6:9] == ["**below**", "**worse**: inf, 1.60", "**worse**: 2.30, 1.50"]

    def test_of_several_grids_it_is_the_one_on_more_sets_then_the_larger(self):
        def grid(seeds, runs, rates):
            lines = [run | {"runs": runs} for run in GRID if run["config"]["subset_seed"] in seeds]
            return [run | {"config": run["config"] | {"learning_rates": rates}} for run in lines]

        on_one, on_both, large = grid([1001], 99, [0.01]), grid([1001, 2001], 7, [0.1]), grid([1001, 2001], 9, [0.001])
        for grids, expected in ((on_one + on_both, on_both), (on_both + large, large)):
            for lines in (grids + HALVING, HALVING + grids[::-1]):
                (comparison,) = filter(None, (compare(row, rows_of(lines)) for row in rows_of(lines)))
                assert comparison.search.config["learning_rates"] == expected[0]["config"]["learning_rates"]
                assert comparison.search.sets == {1001, 2001}

    def test_a_random_search_stands_in_where_there_is_no_grid(self):
        def another(method):
            return [run | {"config": run["config"] | {"method": method}} for run in GRID]

        for searches, expected in (
            (another("map-tpe") + another("map-random"), "map-random"),
            (another("map-random") + GRID[:1], "map-grid"),
        ):
            rows = rows_of(searches + HALVING)
            (comparison,) = filter(None, (compare(row, rows) for row in rows))
            assert comparison.search.config["method"] == expected
        assert "42.0 (40.0-44.0) (random)" in comparison_table(rows_of(another("map-random") + HALVING))

    def test_all_in_full_is_left_out_where_it_repeats_halving(self):
        full = [run | {"config": run["config"] | {"method": "deelbo-full"}} for run in HALVING]
        other_start = [run | {"config": run["config"] | {"init_sigma": 1e-4}} for run in full]
        rows = without_repeats(rows_of(GRID + HALVING + full + other_start))
        assert [(row.config["method"], row.sigma) for row in rows] == [
            ("map-grid", ""),
            ("deelbo-full", "sigma from 0.0001"),
            ("deelbo-halving", "sigma from 0.01"),
        ]
        assert len(without_repeats(rows_of(HALVING[:1] + full))) == 2  # on more sets: no repeat

    def test_another_task_or_prior_is_not_compared(self):
        other = [run | {"config": run["config"] | {"steps": 7}} for run in GRID]
        rows = rows_of(HALVING + other)
        assert all(compare(row, rows) is None for row in rows)
        other = [run | {"config": run["config"] | {"prior": "l2-zero"}} for run in GRID]
        rows = rows_of(HALVING + other)
        assert all(compare(row, rows) is None for row in rows)


class TestCurve:
    def test_it_is_the_mean_over_all_subsets(self):
        curve = search_curve(TRIALS, num_classes=10, num_subsamples=40_000)
        for k, (seconds, accuracy) in enumerate(curve, start=1):
            subsets = list(itertools.combinations(TRIALS, k))
            expected_seconds = statistics.fmean(sum(t["seconds"] for t in subset) for subset in subsets)
            best = [min(subset, key=lambda t: t["validation_nll"] or math.inf) for subset in subsets]
            expected = statistics.fmean(t["measured"]["accuracy"] if t["measured"] else 0.1 for t in best)
            assert seconds == pytest.approx(expected_seconds, rel=0.01)
            assert accuracy == pytest.approx(expected, abs=0.004)
        assert curve[-1] == (40, 0.55)

    def test_the_seed_decides(self):
        assert search_curve(TRIALS, 10) == search_curve(TRIALS, 10)
        assert search_curve(TRIALS, 10) != search_curve(TRIALS, 10, seed=1)

    def test_mean_of_curves(self):
        curve = mean_curve([[(1, 0.2), (3, 0.4)], [(3, 0.4), (5, 0.8), (9, 0.9)]])
        np.testing.assert_allclose(curve, [(2, 0.3), (4, 0.6)])


class TestReport:
    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        results = tmp_path / "results"
        results.mkdir()
        for name, lines in (("a", GRID + HALVING), ("b", PLAIN + SWEEP)):
            (results / f"{name}.jsonl").write_text("".join(json.dumps(run) + "\n" for run in lines))
        (tmp_path / "README.md").write_text(README)
        return tmp_path

    def report(self, script, folder: Path) -> dict[str, bytes]:
        script.main(["--results", str(folder / "results"), "--readme", str(folder / "README.md")])
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def test_it_is_the_same_to_the_byte(self, script, folder):
        files = self.report(script, folder)
        assert self.report(script, folder) == files
        figures = sorted(Path(name).stem for name in files if name.endswith(".png"))
        task = "cifar10_100_efficientnet_lite0_64_150"
        assert figures == [f"compute_{task}_l2-sp", f"elbo_{task}", f"kappa_{task}", f"nll_{task}_l2-sp"]
        text = files["results/REPORT.md"].decode()
        assert all(f"(figures/{name}.png)" in text for name in figures)
        assert all(f"`{run['id']}`" in text for run in GRID + HALVING + PLAIN + SWEEP)
        # nor does the order of lines make a difference
        (folder / "results" / "a.jsonl").write_text("".join(json.dumps(run) + "\n" for run in (HALVING + GRID)[::-1]))
        assert self.report(script, folder)["results/REPORT.md"] == files["results/REPORT.md"]

    def test_the_swap_test_is_in_it_whatever_the_order_of_its_lines(self, script, folder):
        def line(row: str, trainer: str) -> dict:
            config = {"row": row, "subset_seed": 1001, "trainer": trainer, "deelbo": {}}
            found = {"accuracy": 0.5, "nll": 1.0, "ece": 0.1}
            test = {"mean": found} if trainer == "plain" else {"mean": found, "average": found}
            return {"id": f"{row} {trainer}", "config": config, "test": test}

        lines = [line(row, trainer) for row in ("reviews-2e-4", "reviews-default") for trainer in ("plain", "deelbo")]
        reports = []
        for some in (lines, lines[::-1]):
            (folder / "results" / "swap_test.jsonl").write_text("".join(json.dumps(one) + "\n" for one in some))
            reports.append(self.report(script, folder)["results/REPORT.md"].decode())
        assert reports[0] == reports[1]
        found = re.findall(
            r"^\| (reviews\S+) \| 1 \| 50.0 \|", reports[0].partition("## The swap test")[2], re.MULTILINE
        )
        assert found == ["reviews-2e-4", "reviews-default"]

    def test_calibrated_runs_are_told_before_and_after(self, script, folder):
        lines = []
        for subset_seed, temperature in ((1001, 2.0), (2001, 3.0)):
            metrics = {at: {"accuracy": 0.4, "nll": 1.0, "ece": 0.04} for at in ("mean", "mean_recomputed", "average")}
            made = line("deelbo-halving", subset_seed, 2.4, 240, sigma_update="closed-form", calibrate=True)
            made |= {"test": metrics, "temperatures": {"mean": temperature, "average": 1.5}}
            made["uncalibrated"] = {at: found | {"nll": 1.5 + subset_seed / 1e4} for at, found in metrics.items()}
            lines.append(made)
        (folder / "results" / "c.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        text = self.report(script, folder)["results/REPORT.md"].decode().partition("## Calibrated")[2]
        row = next(row for row in text.splitlines() if row.startswith("| cifar10 | 100 | 150 | L2-SP | 2 |"))
        found = [cell.strip() for cell in row.strip("|").split("|")]
        assert found[5:7] == ["40.0 / 40.0 / 42.0", "1.000 / 1.650 / 1.700"]  # 1.7: of the grid on both sets
        assert found[7] == "1.000 / 1.650 / 1.600"  # its recomputed statistics
        assert found[8] == "0.040 / 0.040 / 0.100"
        assert found[10:12] == ["2.50 / 1.50", "2.4 (2.4-2.4)"]

    def test_the_map_of_kappa_is_drawn(self, script, folder):
        lines = []
        for way, nll in (("0.1*D/N", 0.4), ("1*D/N", 0.3), ("gamma", 0.35)):
            config = {"row": "digits", "subset_seed": 1001, "trainer": "deelbo", "kappa": way, "deelbo": {}}
            metrics = {"accuracy": 0.9, "nll": nll, "ece": 0.1, "nll_there": nll - 0.1}
            learned = {"fraction": 0.2, "sigma": 0.01, "gamma_per_parameter": 0.05}
            train = {"nll_of_samples": 0.01}
            numbers = {"learned": learned, "train": train, "test": {"mean": metrics, "average": metrics}}
            lines.append({"id": way, "config": config, "de_elbo_per_parameter": -0.01} | numbers)
        (folder / "results" / "map.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
        files = self.report(script, folder)
        assert "| digits | gamma | 1 | 0.2 |" in files["results/REPORT.md"].decode()
        assert "## The swap test" not in files["results/REPORT.md"].decode()
        drawn = {
            each["label"]: each for each in json.loads(files["results/figures/kappa_map.json"])["axes"][0]["lines"]
        }
        assert (drawn["mean"]["x"], drawn["mean"]["y"]) == ([0.1, 1.0], [0.4, 0.3])
        assert (drawn["gamma"]["x"], drawn["gamma"]["y"]) == ([0.2], [0.35])

    def test_doubt_has_a_table_of_its_own(self, script, folder):
        before = self.report(script, folder)["results/REPORT.md"].decode()
        lines = []
        for seed, aurc, auroc in ((1001, 0.02, 0.9), (2001, 0.04, 0.7)):
            scores = dict.fromkeys(script.uncertainty.SCORES, aurc)
            config = {"what": "uncertainty", "subset_seed": seed, "trainer": "deelbo"}
            wrong = {"mean": 0.1, "average": 0.08}
            found = {"aurc": scores, "auroc": {"noise": dict.fromkeys(scores, auroc)}, "wrong": wrong}
            lines.append(json.dumps({"id": str(seed), "config": config, **found}))
        (folder / "results" / "uncertainty.jsonl").write_text("\n".join(lines))
        report = self.report(script, folder)["results/REPORT.md"].decode()
        assert report.startswith(before.rstrip())
        added = report[len(before.rstrip()) :]
        assert "| doubt (mutual information) | 3.00 (2.00-4.00) | 80.0 (70.0-90.0) |" in added
        assert "10.00 mean, 8.00 average" in added

    def test_figures_hold_the_numbers(self, script, folder):
        self.report(script, folder)
        (path,) = (folder / "results" / "figures").glob("compute_*.json")
        lines = {each["label"]: each for each in json.loads(path.read_text())["axes"][0]["lines"]}
        ours = lines["DE ELBo, halving, sigma from 0.01"]
        assert (ours["x"], ours["y"]) == ([180], [42.5])
        assert lines["MAP, grid search"]["x"] == [2600]
        (path,) = (folder / "results" / "figures").glob("nll_*.json")
        assert "kappa = 1" not in path.read_text()  # would make all others look alike
        curve = lines["MAP, grid search, stopped early"]
        np.testing.assert_allclose(curve["y"], [100 * accuracy for _, accuracy in search_curve(TRIALS, 10)])
        (path,) = (folder / "results" / "figures").glob("kappa_*.json")
        mean = json.loads(path.read_text())["axes"][0]["lines"][1]
        assert mean["x"] == [1, 10, 100]
        assert mean["y"] == pytest.approx([10, 45, 40])

    def test_the_readme_changes_between_the_marks_only(self, script, folder):
        self.report(script, folder)
        text = (folder / "README.md").read_text()
        assert text.startswith("# A package\n\n<!-- results: begin -->\n\n| data |")
        assert text.endswith("<!-- results: end -->\n\nThe rest.\n")
        assert "**worse**: 2.20, 1.70" in text
        assert "old" not in text
        (folder / "README.md").write_text("no marks")
        with pytest.raises(ValueError, match="needs the marks"):
            self.report(script, folder)

    def test_without_lines(self, script, tmp_path):
        (tmp_path / "README.md").write_text(README)
        script.main(["--results", str(tmp_path), "--readme", str(tmp_path / "README.md")])
        assert "No results yet" in (tmp_path / "README.md").read_text()
