"""The map of kappa: what sets kappa, and what a line says."""

import math
from types import SimpleNamespace

import pytest
import torch
from conftest import load_example, make_dataset, make_model
from lab.studies import read_lines
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from hf_deelbo import DEELBoTrainer

script = load_example("kappa_map")

SMOKE = (
    {"dataset_name": "digits", "train_size": 20, "image_size": 16, "max_eval_samples": 20},
    {"max_steps": 3, "per_device_train_batch_size": 20, "learning_rate": 1e-3},
    {"kl_warmup_epochs": 1},
)


@pytest.fixture
def smoke(tmp_path, monkeypatch) -> list[str]:
    """The command line of a small task."""
    monkeypatch.setitem(script.TASKS, "smoke", SMOKE)
    monkeypatch.setattr(script, "NUM_SAMPLES", 2)
    monkeypatch.setattr(script, "AT_FIXED_WEIGHTS", (0.1,))
    places = ["--results", str(tmp_path / "lines.jsonl"), "--cache_dir", str(tmp_path / "cache")]
    return ["--tasks", "smoke", "--subset_seeds", "1001", *places]


@pytest.fixture
def trainer(make_config):
    args = make_config(sigma_update="closed-form", grouping="tensor", max_steps=6, kl_warmup_epochs=2)
    return DEELBoTrainer(make_model("vit"), args, train_dataset=make_dataset("vit"))


def test_half_of_the_tasks_choose_and_the_others_judge():
    assert not set(script.CHOOSING) & set(script.JUDGING)
    assert {*script.CHOOSING, *script.JUDGING} == set(script.TASKS)


@pytest.mark.parametrize(("way", "expected"), [("0.1*D/N", 0.1), ("1*D/N", 1.0), ("1", None)])
def test_a_fixed_kappa(trainer, way, expected):
    d_over_n = trainer.posterior.num_parameters / 24
    script.set_kappa(trainer, way)
    trainer.train()
    assert trainer.posterior.kappa == pytest.approx(1 if expected is None else expected * d_over_n)


def test_effective_parameters_are_those_of_dense_matrices(trainer):
    trainer.train()
    posterior, expected = trainer.posterior, 0.0
    for group, sigma, variance in zip(posterior.groups, posterior.sigmas, posterior.prior_variances, strict=True):
        identity = torch.eye(group.num_parameters, dtype=torch.float64)
        covariance, precision = sigma.double() ** 2 * identity, torch.linalg.inv(variance.double() * identity)
        expected += float(torch.trace(identity - covariance @ precision))
    assert 0 < expected < posterior.num_parameters
    assert script.effective_parameters(posterior) == pytest.approx(expected, rel=1e-4)


def test_a_rule_starts_at_d_over_n_and_goes_on_when_the_kl_has_its_full_weight(trainer):
    script.set_kappa(trainer, "gamma")
    [callback] = [c for c in trainer.callback_handler.callbacks if isinstance(c, script.Gamma)]
    posterior, fractions, gammas = trainer.posterior, [], []
    d_over_n = posterior.num_parameters / posterior.num_examples
    update = posterior.update_variances

    def noted(*args, **kwargs):
        fractions.append(posterior.kappa / d_over_n)
        update(*args, **kwargs)
        gammas.append(script.effective_parameters(posterior) / posterior.num_parameters)

    posterior.update_variances = noted
    trainer.train()
    steps_an_epoch = math.ceil(24 / trainer.args.train_batch_size)
    before = 2 * steps_an_epoch - 1  # of which the second epoch's last step is the first at the full weight
    assert fractions[:before] == [1.0] * min(before, len(fractions))
    for step in range(before, 6):
        assert fractions[step] == pytest.approx(max(1e-4, gammas[step - 1]), rel=1e-5)
    assert callback.fraction < 1


def test_a_bound_lowers_kappa_below_it_and_raises_it_above():
    bound = script.Bound(SimpleNamespace(), 0.1)
    assert bound.moved(1e-12) == pytest.approx(math.exp(-0.2))
    bound.average = None
    assert bound.moved(5.0) == pytest.approx(math.exp(0.2))
    bound.average, bound.fraction = 0.1, 0.5
    assert bound.moved(0.1) == pytest.approx(0.5)


def test_the_best_temperature_is_that_of_the_logits():
    logits, labels = 5 * torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).numpy(), [0, 1] * 25
    output = SimpleNamespace(predictions=logits, label_ids=labels, metrics={})
    metrics = dict.fromkeys(("test_accuracy", "test_nll", "test_ece", "test_brier"), 0.0)
    output.metrics = metrics
    found = script.evaluated(SimpleNamespace(predict=lambda rows: output), None)
    nll = lambda t: -log_softmax(logits / math.exp(t), -1)[range(50), labels].mean()  # noqa: E731
    best = minimize_scalar(nll, bounds=(-1.6, 3.4))
    assert found["nll_there"] == pytest.approx(best.fun, abs=1e-3)


def test_lines(smoke, capsys):
    script.main([*smoke, "--ways", "1*D/N", "bound=1000"])
    lines = {line["config"]["kappa"]: line for line in read_lines(script.parse(smoke).results)}
    fixed, moved = lines["1*D/N"], lines["bound=1000"]
    assert fixed["learned"]["fraction"] == 1
    assert moved["learned"]["fraction"] == pytest.approx(math.exp(-0.4))  # of the last two steps, far below the bound
    assert set(fixed["test"]) == {"mean", "mean_recomputed", "average"}
    assert set(fixed["at_fixed_weights"]) == {"0.1"}
    assert fixed["at_fixed_weights"]["0.1"] != fixed["test"]["average"]
    capsys.readouterr()
    script.main([*smoke, "--table"])
    table = capsys.readouterr().out
    assert "| smoke | 1*D/N | 1 | 1 |" in table
    assert "| smoke | 0.1*D/N at fixed weights | 1 | 0.1 |" in table
    curves, rules = script.curves_and_rules(list(lines.values()))
    assert curves == {}  # of one fraction there is no curve
    assert rules["smoke"] == [("bound=1000", moved["learned"]["fraction"], moved["test"]["average"]["nll"])]
