"""The baseline's run script: its arguments, what it leaves behind, and that it goes on."""

import json
import sys

import datasets
import pytest
import torch
from conftest import load_example
from lab.searches import grid
from transformers import AutoModelForImageClassification, ResNetConfig, ResNetForImageClassification


@pytest.fixture(scope="module")
def script():
    return load_example("run_grid_search")


@pytest.fixture
def arguments(tmp_path) -> list[str]:
    """Of a short run on digits with a small network that has batch norm."""
    torch.manual_seed(0)
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    ResNetForImageClassification(config).save_pretrained(tmp_path / "model")
    return [
        *("--dataset_name", "digits", "--train_size", "50", "--image_size", "14", "--max_eval_samples", "40"),
        *("--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "outputs")),
        *("--max_steps", "4", "--cache_images", "--cache_dir", str(tmp_path / "cache")),
        *("--use_cpu", "--disable_tqdm", "true", "--report_to", "none"),
    ]


def run(script, monkeypatch, arguments: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run_grid_search.py", *arguments])
    script.main()


class TestArguments:
    def test_without_any_it_is_the_demonstration_with_a_small_grid(self, script):
        model, data, options, config = script.parse(["--use_cpu"])
        assert (model.model_name_or_path, data.dataset_name, data.train_size) == ("efficientnet-lite0", "digits", 100)
        assert len(grid(config.prior, options.learning_rates, options.penalties)) == 4

    def test_the_preset_is_the_papers_grid(self, script):
        _, data, options, config = script.parse(["--preset", "paper", "--dataset_name", "cifar10", "--use_cpu"])
        assert (data.image_size, config.max_steps, config.per_device_train_batch_size) == (224, 6000, 128)
        assert (config.optim, config.lr_scheduler_type, config.dataloader_drop_last) == ("sgd", "cosine", True)
        assert grid(config.prior, options.learning_rates, options.penalties, options.lambdas) == grid("l2-sp")
        assert grid("ptyl", options.learning_rates, options.penalties, options.lambdas) == grid("ptyl")

    def test_one_learning_rate(self, script):
        _, _, options, _ = script.parse(["--dataset_name", "cifar10", "--learning_rate", "0.3", "--use_cpu"])
        assert options.learning_rates == [0.3]

    def test_training_is_that_of_run_deelbo(self, script, tmp_path):
        datasets.Dataset.from_dict({"text": ["good", "bad"] * 5, "label": [1, 0] * 5}).to_json(tmp_path / "train.json")
        for name, rates, optim in (
            ("cifar10", [0.1, 0.01, 0.001, 0.0001], "sgd"),
            (str(tmp_path), [2e-4, 1e-4, 5e-5, 2e-5], "adamw"),
        ):
            arguments = ["--dataset_name", name, "--use_cpu"]
            _, _, options, config = script.parse(arguments)
            _, _, theirs, other = load_example("run_deelbo").parse(arguments)
            assert options.learning_rates == theirs.learning_rates == rates
            assert config.optim.value.startswith(optim)
            for field in ("optim", "optim_args", "lr_scheduler_type", "warmup_steps", "num_train_epochs"):
                assert getattr(config, field) == getattr(other, field)

    def test_an_unknown_search(self, script):
        with pytest.raises(ValueError, match="search: unknown search 'best'"):
            script.parse(["--search", "best", "--use_cpu"])


def test_a_grid(script, monkeypatch, arguments, tmp_path, capsys):
    run(script, monkeypatch, [*arguments, "--learning_rates", "0.3", "0.01", "--penalties", "0.01"])
    printed = capsys.readouterr().out
    folder = tmp_path / "outputs"
    numbers = json.loads((folder / "metrics.json").read_text())
    assert (numbers["runs"], [trial["steps"] for trial in numbers["trials"]]) == (3, [4, 4])
    best = min(numbers["trials"], key=lambda trial: trial["validation_nll"])
    assert numbers["best"] == best["setting"]
    assert numbers["test"]["running"]["nll"] != numbers["test"]["recomputed"]["nll"]
    assert f"accuracy {numbers['test']['running']['accuracy']:.1%}" in printed
    assert "This took 3.00 runs" in printed
    assert (folder / "figures" / "reliability.png").exists()
    assert AutoModelForImageClassification.from_pretrained(folder / "search" / "model").config.num_labels == 10
    # again: nothing is trained, the numbers are the same
    monkeypatch.setattr(script.MAPTrainer, "train", lambda *args, **kwargs: pytest.fail("it trained again"))
    run(script, monkeypatch, [*arguments, "--learning_rates", "0.3", "0.01", "--penalties", "0.01"])
    assert json.loads((folder / "metrics.json").read_text()) == numbers


@pytest.mark.parametrize("search", ["random", "tpe"])
def test_other_searches(script, monkeypatch, arguments, tmp_path, search):
    rates = ("--learning_rates", "0.1", "0.01")
    run(script, monkeypatch, [*arguments, *rates, "--search", search, "--num_trials", "2", "--prior", "l2-zero"])
    numbers = json.loads((tmp_path / "outputs" / "metrics.json").read_text())
    assert (len(numbers["trials"]), numbers["runs"]) == (2, 3)
    rates = [trial["setting"]["learning_rate"] for trial in numbers["trials"]]
    assert len(set(rates)) == 2
    assert all(0.01 <= rate <= 0.1 for rate in rates)
