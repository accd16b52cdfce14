"""The script that learns a prior: what a run leaves behind, and that a target task starts from it."""

import json
import sys

import pytest
import torch
from conftest import load_example
from huggingface_hub import ModelCard
from lab.tasks import DataArguments, ModelArguments, Task
from transformers import AutoModelForImageClassification

from hf_deelbo import LowRankPrior


@pytest.fixture(scope="module")
def script():
    return load_example("run_swag")


def run(script, monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py", *arguments, "--use_cpu", "--disable_tqdm", "true"])
    script.main()


def test_a_prior_and_a_target_task_that_starts_from_it(script, shades, tiny_vit, tmp_path, monkeypatch, capsys):
    source, target = tmp_path / "source", tmp_path / "target"
    common = ("--dataset_name", shades, "--image_size", "8")
    steps = ("--max_steps", "8", "--collect_every", "1", "--start", "0.25", "--num_deviations", "3")
    arguments = (*common, "--model_name_or_path", tiny_vit, *steps, "--output_dir", str(source))
    run(script, monkeypatch, *arguments)
    assert "6, the last 3 kept as deviations" in capsys.readouterr().out
    prior = LowRankPrior.from_pretrained(source / "prior")
    model = AutoModelForImageClassification.from_pretrained(source / "prior").eval()
    assert float(prior.mahalanobis({name: p for name, p in model.named_parameters() if name in prior.mean})) == 0

    numbers = json.loads((source / "metrics.json").read_text())
    task = Task(ModelArguments(tiny_vit), DataArguments(dataset_name=shades, image_size=8), disable_tqdm=True)
    batch = torch.stack([row["pixel_values"] for row in task.test])
    labels = torch.tensor(task.test.with_format(None)["labels"][:])
    nll = torch.nn.functional.cross_entropy(model(pixel_values=batch).logits, labels).item()
    assert numbers["test"]["nll"] == pytest.approx(nll, rel=1e-4)
    flat = torch.cat([tensor.flatten() for tensor in prior.diagonal.values()]).double()
    assert numbers["variance_on_the_diagonal"] == pytest.approx(flat.mean().item() / 2, rel=1e-6)
    card = ModelCard.load(source / "prior" / "README.md")
    assert "swag" in card.data.tags
    for row in ("steps | 8", "batch size | 30", "schedule | constant", "seed | 42"):
        assert f"| {row} |" in card.text
    assert str(tmp_path) not in str(card)

    run_deelbo = load_example("run_deelbo")
    of_source = ("--prior", "ptyl", "--prior_name_or_path", str(source / "prior"))
    run(
        run_deelbo,
        monkeypatch,
        *common,
        *of_source,
        "--train_size",
        "15",
        "--max_steps",
        "4",
        "--output_dir",
        str(target),
    )
    assert json.loads((target / "posterior" / "posterior_config.json").read_text())["prior"]["kind"] == "ptyl"


def test_stopped_and_started_again_it_is_the_same_prior(script, shades, tiny_vit, tmp_path, monkeypatch):
    arguments = [
        *("--dataset_name", shades, "--image_size", "8", "--model_name_or_path", tiny_vit, "--max_steps", "8"),
        *("--collect_every", "1", "--start", "0.0", "--save_strategy", "steps", "--save_steps", "3"),
    ]
    run(script, monkeypatch, *arguments, "--output_dir", str(tmp_path / "whole"))

    class PressCtrlC(script.SWAGCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(script, "SWAGCallback", PressCtrlC)
        with pytest.raises(SystemExit, match="130"):
            run(script, patch, *arguments, "--output_dir", str(tmp_path / "stopped"))
    run(script, monkeypatch, *arguments, "--output_dir", str(tmp_path / "stopped"))
    whole, resumed = (LowRankPrior.from_pretrained(tmp_path / name / "prior") for name in ("whole", "stopped"))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
