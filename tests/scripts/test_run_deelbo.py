"""The run script: its arguments, the paper's protocol, and what a run leaves behind."""

import json
import math
import re
import sys
from dataclasses import fields, replace

import datasets
import numpy as np
import pytest
import torch
import yaml
from conftest import load_example, make_model
from huggingface_hub import ModelCard
from lab.comparison import RESULTS, recorded_grid_search
from lab.data import decode_image
from lab.map import MAPTrainer
from lab.studies import read_lines
from lab.tasks import Task
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    BertTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_deelbo import DEELBoConfig, GaussianPosterior
from hf_deelbo.metrics import named_metrics


@pytest.fixture(scope="module")
def script():
    return load_example("run_deelbo")


@pytest.fixture
def reviews(tmp_path) -> str:
    """Texts of two classes, as a folder."""
    rows = {"text": ["good film", "very very bad film"] * 10, "label": ["pos", "neg"] * 10}
    (tmp_path / "reviews").mkdir()
    datasets.Dataset.from_dict(rows).to_json(tmp_path / "reviews" / "train.json")
    return str(tmp_path / "reviews")


def run(script, monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run_deelbo.py", *arguments, "--use_cpu", "--report_to", "none"])
    script.main()


class TestArguments:
    def test_without_any_it_is_the_embedded_demonstration(self, script):
        model, data, run, config = script.parse(["--use_cpu"])
        assert (model.model_name_or_path, data.dataset_name, data.train_size) == ("efficientnet-lite0", "digits", 100)
        assert (config.prior, config.kappa, run.selection) == ("l2-sp", "auto", "halving")
        assert (run.compare_plain, run.compare, run.compare_elbo) == (True, False, False)

    def test_what_is_given_goes_before_a_preset(self, script):
        _, data, run, config = script.parse(
            ["--preset", "paper", "--dataset_name", "cifar10", "--max_steps", "7", "--selection=halving", "--use_cpu"]
        )
        assert (config.max_steps, run.selection, data.image_size) == (7, "halving", 224)
        assert data.train_size is None

    def test_one_learning_rate_means_no_choice(self, script):
        _, _, run, _ = script.parse(["--dataset_name", "cifar10", "--use_cpu"])
        assert run.learning_rates == [0.1, 0.01, 0.001, 0.0001]
        _, _, run, config = script.parse(["--dataset_name", "cifar10", "--learning_rate", "0.3", "--use_cpu"])
        assert (run.learning_rates, config.learning_rate) == (None, 0.3)

    def test_images_are_learned_by_the_papers_optimiser_with_sigma_in_closed_form(self, script, shades):
        for data in (["--dataset_name", "cifar10"], ["--dataset_name", shades], ["--train_dir", "photos"]):
            _, _, run, config = script.parse([*data, "--use_cpu"])
            assert (run.selection, run.learning_rates) == ("halving", [0.1, 0.01, 0.001, 0.0001])
            assert (config.optim, config.optim_args) == ("sgd", "momentum=0.9,nesterov=True")
            assert (config.lr_scheduler_type, config.per_device_train_batch_size) == ("cosine", 128)
            assert (config.warmup_steps, config.dataloader_drop_last) == (0, True)
            assert config.sigma_update == "closed-form"

    def test_texts_are_learned_as_transformers_are(self, script, reviews):
        data = ["--dataset_name", reviews, "--use_cpu"]
        _, _, run, config = script.parse(data)
        assert (run.selection, run.learning_rates) == ("halving", [2e-4, 1e-4, 5e-5, 2e-5])
        assert config.optim.value.startswith("adamw")
        assert (config.lr_scheduler_type, config.get_warmup_steps(70)) == ("linear", 7)
        assert (config.per_device_train_batch_size, config.num_train_epochs, config.max_steps) == (16, 10, -1)
        assert (config.sigma_update, config.dataloader_drop_last) == ("closed-form", False)
        _, _, run, config = script.parse(
            [*data, "--warmup_steps", "0", "--num_train_epochs", "3", "--per_device_train_batch_size=4"]
        )
        assert (config.warmup_steps, config.num_train_epochs, config.per_device_train_batch_size) == (0, 3, 4)
        assert run.learning_rates == [2e-4, 1e-4, 5e-5, 2e-5]

    def test_a_preset_leaves_nothing_of_the_kind_of_data(self, script, reviews):
        _, _, run, config = script.parse(["--preset", "paper", "--dataset_name", reviews, "--use_cpu"])
        assert (run.selection, run.learning_rates, config.warmup_steps) == ("full", [0.1, 0.01, 0.001, 0.0001], 0)
        assert (config.optim, config.per_device_train_batch_size) == ("sgd", 128)

    def test_another_optimiser_gets_no_arguments_of_the_papers(self, script):
        _, _, _, config = script.parse(["--dataset_name", "cifar10", "--optim", "adamw_torch", "--use_cpu"])
        assert (config.optim, config.optim_args) == ("adamw_torch", None)

    @pytest.mark.parametrize("suffix", ["json", "yaml"])
    def test_a_file_is_the_only_argument(self, script, tmp_path, suffix):
        settings = {"dataset_name": "cifar10", "learning_rates": [0.1, 0.01], "kappa": 2, "use_cpu": True}
        path = tmp_path / f"run.{suffix}"
        path.write_text((json.dumps if suffix == "json" else yaml.safe_dump)(settings))
        _, data, run, config = script.parse([str(path)])
        assert (data.dataset_name, run.learning_rates, config.kappa) == ("cifar10", [0.1, 0.01], 2.0)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [(["--preset", "fast"], "unknown preset 'fast'"), (["--selection", "best"], "unknown method 'best'")],
    )
    def test_unknown_names(self, script, arguments, message):
        with pytest.raises(ValueError, match=message):
            script.parse([*arguments, "--use_cpu"])


def test_the_preset_is_the_papers_protocol(script, shades, tiny_vit, tmp_path):
    arguments = script.parse(
        [
            *("--preset", "paper", "--dataset_name", shades, "--train_size", "15", "--subset_seed", "2001"),
            *("--model_name_or_path", tiny_vit, "--output_dir", str(tmp_path / "outputs"), "--use_cpu"),
        ]
    )
    _, data, run, config = arguments
    assert data.image_size == 224
    assert (run.selection, run.learning_rates) == ("full", [0.1, 0.01, 0.001, 0.0001])
    papers = DEELBoConfig.paper(config.output_dir, use_cpu=True, max_steps=6000)
    own = {"logging_steps", "save_total_limit"}
    for name in {part.name for part in fields(papers)} - own:
        assert getattr(config, name) == getattr(papers, name), name
    assert (config.max_steps, config.num_elbo_samples, config.num_eval_samples) == (6000, 10, 0)

    task = script.Run(arguments).task
    assert not config.remove_unused_columns  # a transform reads them
    assert sorted(task.rows.train["label"]) == [0] * 5 + [1] * 5 + [2] * 5
    pixels = [np.asarray(decode_image(value)) for value in task.rows.train["image"]]
    pixels = np.concatenate([p.reshape(-1, 3) for p in pixels]) / 255
    np.testing.assert_allclose(task.preprocessing["mean"], pixels.mean(0), rtol=1e-9)
    np.testing.assert_allclose(task.preprocessing["std"], pixels.std(0), rtol=1e-9)
    assert task.test[0]["pixel_values"].shape == task.train[0]["pixel_values"].shape == (3, 224, 224)

    data.image_size = 8  # for the tiny model
    config.output_dir = str(tmp_path / "tiny")
    trainer = script.Run(arguments).make_trainer(0.1, str(tmp_path / "run"))
    assert (trainer.posterior.kappa, trainer.posterior.num_examples) == (trainer.posterior.num_parameters / 15, 15)
    assert trainer.args.per_device_train_batch_size == 15  # min(128, N)
    trainer.create_optimizer_and_scheduler(6000)
    (group, *_) = trainer.optimizer.param_groups
    assert type(trainer.optimizer) is torch.optim.SGD
    assert (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"]) == (0.1, 0.9, True, 0)
    assert trainer.posterior.rho in set(group["params"])
    assert trainer.args.max_grad_norm == 1.0
    rates = []
    for _ in range(6000):
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
        trainer.lr_scheduler.step()
    np.testing.assert_allclose(rates[::1000], [0.05 * (1 + math.cos(math.pi * k / 6)) for k in range(6)], atol=1e-9)
    assert trainer.posterior.sigma.item() == pytest.approx(1e-4)


class TestRuns:
    def test_what_a_run_leaves(self, script, shades, tiny_vit, tmp_path, monkeypatch, capsys):
        outputs = tmp_path / "outputs"
        arguments = [
            *("--dataset_name", shades, "--model_name_or_path", tiny_vit, "--image_size", "8", "--train_size", "15"),
            *("--max_steps", "20", "--learning_rates", "0.1", "0.001", "--logging_steps", "1"),
            *("--compare_elbo", "true", "--num_average_samples", "3", "--output_dir", str(outputs)),
        ]
        run(script, monkeypatch, *arguments)
        printed = capsys.readouterr().out
        assert "Learned from 15 examples of 3 classes" in printed
        assert "averaged over 3 samples" in printed
        assert re.search(r"Chosen by J, without a validation set: learning rate 0\.(1|001)\.", printed)

        metrics = json.loads((outputs / "metrics.json").read_text())
        assert metrics["results"].keys() == {"DE ELBo", "plain ELBo"}
        learned = metrics["results"]["DE ELBo"]
        model = AutoModelForImageClassification.from_pretrained(outputs / "posterior").eval()
        model_arguments, data_arguments, *_ = script.parse([*arguments, "--use_cpu"])
        task = Task(model_arguments, data_arguments)
        batch = torch.stack([row["pixel_values"] for row in task.test])
        labels = torch.tensor(task.test.with_format(None)["labels"][:])
        temperatures = metrics["selection"]["temperatures"]
        logits = model(pixel_values=batch).logits / temperatures["mean"]
        nll = torch.nn.functional.cross_entropy(logits, labels).item()
        assert learned["test"]["mean"]["nll"] == pytest.approx(nll, rel=1e-4)
        assert temperatures["mean"] != 1
        images = [decode_image(value) for value in task.rows.test["image"]]
        processor = AutoImageProcessor.from_pretrained(outputs / "posterior")
        torch.testing.assert_close(processor(images, return_tensors="pt")["pixel_values"], batch, rtol=0, atol=1e-6)
        posterior = GaussianPosterior.from_pretrained(outputs / "posterior")
        assert learned["lambda_"] == pytest.approx(posterior.lambda_.item())
        assert learned["sigma"] == pytest.approx(posterior.sigma.item())
        assert posterior.temperatures._asdict() == temperatures
        averaged = posterior.predict_proba({"pixel_values": batch}, num_samples=3)
        nll = torch.nn.functional.nll_loss(averaged.log(), labels).item()
        assert learned["test"]["average"]["nll"] == pytest.approx(nll, rel=1e-4)
        card = ModelCard.load(outputs / "posterior" / "README.md")
        values = {result.metric_name: result.metric_value for result in card.data.eval_results}
        assert values["NLL (posterior mean)"] == pytest.approx(learned["test"]["mean"]["nll"], rel=1e-3)
        assert "figures/elbo_comparison.png" in card.text
        assert str(tmp_path) not in str(card)
        figures = {path.name for path in (outputs / "posterior" / "figures").iterdir()}
        names = ("training", "reliability", "groups", "elbo_comparison")
        assert figures == {f"{name}.{suffix}" for name in names for suffix in ("png", "json")}
        assert [row["name"] for row in metrics["comparison"]] == [
            "DE ELBo, posterior mean",
            "DE ELBo, averaged over 3 samples",
        ]
        assert "plain Trainer" not in printed.lower()
        assert metrics["selection"]["runs"] == 2.5  # both rates for 10 of 20 steps, then one, and one to calibrate
        assert "Calibrated by a run without a fifth of the rows" in printed

        seconds = [trial["seconds"] for trial in metrics["selection"]["trials"]]
        run(script, monkeypatch, *arguments)  # the same again: nothing is trained twice
        again = json.loads((outputs / "metrics.json").read_text())
        assert [trial["seconds"] for trial in again["selection"]["trials"]] == seconds
        assert again["results"]["DE ELBo"] == learned

        with pytest.raises(ValueError, match=r"output_dir: .* holds a run with another kappa"):
            run(script, monkeypatch, *arguments, "--kappa", "3")

    def test_what_it_does_is_told_in_lines(self, script, shades, tiny_vit, tmp_path, monkeypatch, capsys):
        arguments = [
            *("--dataset_name", shades, "--model_name_or_path", tiny_vit, "--image_size", "8", "--train_size", "15"),
            *("--max_steps", "20", "--learning_rates", "0.1", "0.001", "--logging_steps", "1"),
            *("--num_average_samples", "0"),
        ]
        run(script, monkeypatch, *arguments, "--output_dir", str(tmp_path / "quiet"))
        out, err = capsys.readouterr()
        what_is_done, _, table = out.partition("Testing on")
        number = r"-?\d+\.\d{4}"
        left = r"; about [\dhmins ]+ left"
        expected = [
            r"Learning from 15 examples of 3 classes\.",
            r"Training with 2 learning rates, half of those left are dropped after 10 steps: 30 steps, and 20 to "
            r"calibrate\.",
            rf"  learning rate 0\.1 \(1 of 2\): 10 of 20 steps, J/D {number}{left}",
            rf"  learning rate 0\.001 \(2 of 2\): 10 of 20 steps, J/D {number}{left}",
            r"Kept 0\.(1|001), dropped 0\.(1|001): the lower J after 10 steps\.",
            rf"  learning rate 0\.(1|001) \(1 of 1\): 20 of 20 steps, J/D {number}{left}",
            r"Calibration: one more run, without 3 rows, to see how sure it may be of them\.",
            r"  temperature of its probabilities \d+\.\d\d at the mean, \d+\.\d\d averaged",
        ]
        lines = what_is_done.splitlines()
        assert len(lines) == len(expected), what_is_done
        for line, pattern in zip(lines, expected, strict=True):
            assert re.fullmatch(pattern, line), line
        assert "DE ELBo, posterior mean" in table
        assert "--compare" in table
        assert err == ""  # no bar where there is no terminal, and no warning that tells nothing
        run(script, monkeypatch, *arguments, "--output_dir", str(tmp_path / "verbose"), "--verbose")
        out, err = capsys.readouterr()
        assert "'kl_backbone'" in out
        assert "it/s" in err  # the bars of `Trainer`

    def test_stopped_by_the_user_it_says_how_to_go_on(self, script, shades, tiny_vit, tmp_path, monkeypatch, capsys):
        arguments = [
            *("--dataset_name", shades, "--model_name_or_path", tiny_vit, "--image_size", "8", "--train_size", "15"),
            *("--max_steps", "6", "--save_strategy", "steps", "--save_steps", "2"),
            *("--output_dir", str(tmp_path / "outputs")),
        ]

        class PressCtrlC(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == 4:
                    raise KeyboardInterrupt

        make_trainer = script.Run.make_trainer

        def make_interrupted(*args, **kwargs):
            trainer = make_trainer(*args, **kwargs)
            trainer.add_callback(PressCtrlC())
            return trainer

        with monkeypatch.context() as patch:
            patch.setattr(script.Run, "make_trainer", make_interrupted)
            with pytest.raises(SystemExit, match="130"):
                run(script, patch, *arguments)
        assert "the same command goes on" in capsys.readouterr().out
        assert list((tmp_path / "outputs" / "selection").glob("*/checkpoint-4"))
        run(script, monkeypatch, *arguments)
        assert "Learned from 15 examples" in capsys.readouterr().out

    def test_a_posterior_is_the_prior_of_the_next_run(self, script, shades, tiny_vit, tmp_path, monkeypatch):
        first, second = str(tmp_path / "first"), str(tmp_path / "second")
        common = ("--dataset_name", shades, "--image_size", "8", "--train_size", "15", "--max_steps", "4")
        run(script, monkeypatch, *common, "--model_name_or_path", tiny_vit, "--output_dir", first)
        prior = ("--prior", "posterior", "--prior_name_or_path", f"{first}/posterior")
        run(script, monkeypatch, *common, *prior, "--output_dir", second)
        earlier = GaussianPosterior.from_pretrained(f"{first}/posterior")
        later = GaussianPosterior.from_pretrained(f"{second}/posterior")
        for name, mean in later.prior.mean.items():
            assert torch.equal(mean, earlier.backbone[name]), name

    def test_published_it_is_what_is_in_the_folder(
        self, script, shades, tiny_vit, tmp_path, monkeypatch, loopback_hub, capsys
    ):
        monkeypatch.setenv("HF_TOKEN", loopback_hub.add_user("alice"))
        run(
            script,
            monkeypatch,
            *("--dataset_name", shades, "--model_name_or_path", tiny_vit, "--image_size", "8", "--train_size", "15"),
            *("--max_steps", "2", "--learning_rate", "0.1", "--output_dir", str(tmp_path / "outputs")),
            *("--push_to_hub", "--hub_model_id", "alice/shades", "--hub_revision", "v2"),
        )
        assert f"Published: {loopback_hub.endpoint}/alice/shades" in capsys.readouterr().out
        published = GaussianPosterior.from_pretrained("alice/shades", revision="v2")
        written = GaussianPosterior.from_pretrained(tmp_path / "outputs" / "posterior")
        assert torch.equal(published.rho, written.rho)

    def test_a_broken_test_image_is_named_before_training(self, script, shades, tiny_vit, tmp_path, monkeypatch):
        for split in ("train", "test"):
            for label in ("dark", "bright"):
                (tmp_path / split / label).mkdir(parents=True)
                for index in range(4):
                    Image.new("RGB", (9, 9), label.replace("bright", "white").replace("dark", "black")).save(
                        tmp_path / split / label / f"{index}.png"
                    )
        (tmp_path / "test" / "dark" / "2.png").write_bytes(b"\x89PNG not an image")
        with pytest.raises(ValueError, match=r"2\.png is broken"):
            run(
                script,
                monkeypatch,
                *("--train_dir", str(tmp_path / "train"), "--validation_dir", str(tmp_path / "test")),
                *("--model_name_or_path", tiny_vit, "--output_dir", str(tmp_path / "outputs")),
            )
        assert not (tmp_path / "outputs" / "selection").exists()

    def test_a_folder_with_something_else_in_it(self, script, shades, tiny_vit, tmp_path, monkeypatch):
        (tmp_path / "outputs").mkdir()
        (tmp_path / "outputs" / "thesis.tex").touch()
        with pytest.raises(ValueError, match="is not empty and holds no run of this script"):
            run(
                script,
                monkeypatch,
                *("--dataset_name", shades, "--model_name_or_path", tiny_vit),
                *("--output_dir", str(tmp_path / "outputs")),
            )

    def test_text(self, script, reviews, tmp_path, monkeypatch):
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "very"]
        (tmp_path / "bert").mkdir()
        (tmp_path / "bert" / "vocab.txt").write_text("\n".join(words))
        make_model("bert").save_pretrained(tmp_path / "bert")
        BertTokenizerFast(str(tmp_path / "bert" / "vocab.txt")).save_pretrained(tmp_path / "bert")
        run(
            script,
            monkeypatch,
            *("--dataset_name", reviews, "--model_name_or_path", str(tmp_path / "bert")),
            *("--max_steps", "10", "--logging_steps", "1", "--output_dir", str(tmp_path / "outputs")),
        )
        metrics = json.loads((tmp_path / "outputs" / "metrics.json").read_text())
        assert metrics["results"]["DE ELBo"]["num_examples"] == 16
        assert math.isfinite(metrics["results"]["DE ELBo"]["test"]["average"]["nll"])


class TestCompare:
    """Beside plain fine-tuning and a grid search, on the user's own data."""

    @pytest.fixture
    def arguments(self, shades, tiny_vit, tmp_path) -> list[str]:
        return [
            *("--dataset_name", shades, "--model_name_or_path", tiny_vit, "--image_size", "8", "--train_size", "15"),
            *("--max_steps", "12", "--learning_rate", "0.1", "--num_average_samples", "2", "--compare"),
            *("--output_dir", str(tmp_path / "outputs")),
        ]

    def test_each_way_is_what_it_says_and_costs_what_it_cost(self, script, arguments, tmp_path, monkeypatch, capsys):
        run(script, monkeypatch, *arguments)
        printed, outputs = capsys.readouterr().out, tmp_path / "outputs"
        metrics = json.loads((outputs / "metrics.json").read_text())
        plain, searched, mean, average = metrics["comparison"]
        assert mean["test"] == metrics["results"]["DE ELBo"]["test"]["mean"]
        assert average["test"] == metrics["results"]["DE ELBo"]["test"]["average"]
        # one rate and one run to calibrate; one; two penalties and the best again
        assert [row["runs"] for row in (mean, plain, searched)] == [2, 1, 3]
        assert mean["seconds"] == metrics["selection"]["seconds"] > 0
        for row in (plain, searched, mean, average):
            assert f"{row['test']['accuracy']:8.1%}{row['test']['nll']:8.3f}{row['test']['ece']:8.3f}" in printed
            assert f"{row['runs']:8.2f}{row['seconds']:9,.0f}" in printed
        figure = json.loads((outputs / "comparison" / "accuracy_and_nll.json").read_text())
        for axes, value in zip(figure["axes"], (lambda t: 100 * t["accuracy"], lambda t: t["nll"]), strict=True):
            points = {line["label"]: (line["x"], line["y"]) for line in axes["lines"]}
            assert points == {r["name"]: ([r["seconds"]], [value(r["test"])]) for r in metrics["comparison"]}

        model, data, _, config = script.parse([*arguments, "--use_cpu"])
        task = Task(model, data)
        task.configure(config)
        args = TrainingArguments(str(tmp_path / "by_hand"), max_steps=12, seed=config.seed, use_cpu=True)
        assert (args.learning_rate, args.lr_scheduler_type, args.weight_decay) == (5e-5, "linear", 0)
        args = replace(
            args, per_device_train_batch_size=128, save_strategy="no", report_to="none", remove_unused_columns=False
        )
        trainer = Trainer(task.load_model(config.seed), args, **task.trainer_arguments)
        trainer.train()
        by_hand = named_metrics(trainer.predict(task.test).metrics, "test")
        assert plain["test"] == pytest.approx(by_hand, rel=1e-4)

        # again: nothing is trained, the numbers are the same
        for trainer in (Trainer, script.DEELBoTrainer, MAPTrainer):
            monkeypatch.setattr(trainer, "train", lambda *args, **kwargs: pytest.fail("it trained again"))
        run(script, monkeypatch, *arguments)
        assert "known from before" in capsys.readouterr().out
        assert json.loads((outputs / "metrics.json").read_text())["comparison"] == metrics["comparison"]

    def test_a_run_is_compared_afterwards(self, script, arguments, tmp_path, monkeypatch):
        alone = [argument for argument in arguments if argument != "--compare"]
        run(script, monkeypatch, *alone)
        first = json.loads((tmp_path / "outputs" / "metrics.json").read_text())
        run(script, monkeypatch, *arguments)
        metrics = json.loads((tmp_path / "outputs" / "metrics.json").read_text())
        assert metrics["results"] == first["results"]
        assert metrics["comparison"][2:] == first["comparison"]

    def test_the_dry_run_adds_up_steps_and_keeps_nothing(self, script, arguments, tmp_path, monkeypatch, capsys):
        seconds = iter([0.5, 0.25, 1.0])
        monkeypatch.setattr(script, "seconds_of_a_step", lambda trainer: next(seconds))
        run(script, monkeypatch, *arguments, "--dry-run")
        out = capsys.readouterr().out
        rows = [" ".join(line.split()) for line in out.splitlines()]
        assert "DE ELBo 2.00 24 0.500 12 s" in rows
        assert "plain Trainer, AdamW 5e-5 1.00 12 0.250 3 s" in rows
        assert "grid search, 2 settings 3.00 36 1.000 36 s" in rows
        assert "About 51 s of training" in out
        assert not (tmp_path / "outputs").exists()

    def test_the_dry_run_measures_steps(self, script, arguments, tmp_path, monkeypatch, capsys):
        run(script, monkeypatch, *arguments, "--dry-run")
        measured = re.findall(r" (\d+\.\d{3})  ", capsys.readouterr().out)
        assert len(measured) == 3
        assert all(0 < float(seconds) < 10 for seconds in measured)
        assert not (tmp_path / "outputs").exists()

    @pytest.mark.parametrize("split", ["train", "test"])
    @pytest.mark.parametrize("no_label", [-1, None])
    def test_rows_without_labels(self, script, tiny_vit, tmp_path, monkeypatch, split, no_label):
        image = datasets.Image().encode_example(np.zeros((8, 8, 3), np.uint8))
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
        for name in ("train", "test"):
            labels = [0, 1] * 5
            if name == split:
                labels[3] = no_label
            (tmp_path / "data").mkdir(exist_ok=True)
            rows = datasets.Dataset.from_dict({"image": [image] * 10, "label": labels}, features=features)
            rows.to_parquet(tmp_path / "data" / f"{name}.parquet")
        kind = "training" if split == "train" else "test"
        message = rf"compare: 1 of the 10 {kind} rows of .* have no label in column 'label'.*label_column_name"
        with pytest.raises(ValueError, match=message):
            run(
                script,
                monkeypatch,
                *("--dataset_name", str(tmp_path / "data"), "--model_name_or_path", tiny_vit, "--image_size", "8"),
                *("--max_steps", "2", "--compare", "--output_dir", str(tmp_path / "outputs")),
            )

    def test_a_dataset_without_a_column_of_labels(self, script, tiny_vit, tmp_path, monkeypatch):
        (tmp_path / "data").mkdir()
        datasets.Dataset.from_dict({"text": ["good", "bad"]}).to_json(tmp_path / "data" / "train.json")
        with pytest.raises(ValueError, match=r"label_column_name: cannot tell .* nothing is compared"):
            run(script, monkeypatch, "--dataset_name", str(tmp_path / "data"), "--compare")

    def test_the_grid_search_of_the_demonstration_is_recorded(self, script):
        model, data, _, config = script.parse(["--use_cpu"])
        task = Task(model, data, disable_tqdm=True)
        row = recorded_grid_search(task, config)
        (line,) = (line for line in read_lines(RESULTS / "digits.jsonl") if line["id"] in row.note)
        assert (line["config"]["steps"], line["config"]["image_size"]) == (config.max_steps, data.image_size)
        assert (row.test, row.runs, row.seconds) == (line["test"]["mean"], 25, line["seconds"])
        assert "not run now" in row.note
        assert recorded_grid_search(task, replace(config, max_steps=99)) is None
        assert recorded_grid_search(task, replace(config, optim="adamw_torch")) is None
