import html
import math
import os
import re
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from conftest import IS_HUB_CLIENT_1, make_dataset, make_model
from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)
from transformers.training_args import OptimizerNames

from hf_deelbo import GaussianPosterior, LowRankPrior
from hf_deelbo.sharing.cards import (
    PosteriorCardData,
    PriorCardData,
    name_repository,
    render_card,
    save_card,
)
from hf_deelbo.weights.parameters import head_parameter_names

D = 3_383_818
DIGITS = PosteriorCardData(
    task="image-classification",
    base_model="efficientnet-lite0",
    dataset_name="digits",
    num_classes=10,
    num_examples=100,
    num_test_examples=1697,
    num_parameters=D,
    prior="l2-sp",
    kappa=D / 100,
    lambda_=1.63e-5,
    tau=7.83e-4,
    sigma=3.69e-3,
    de_elbo={"de_elbo": -0.1059 * D, "nll": 0.08},
    metrics={
        "mean": {"accuracy": 0.908, "nll": 0.347, "ece": 0.061},
        "average": {"accuracy": 0.906, "nll": 0.346, "ece": 0.058},
    },
    num_samples=5,
    training={"learning_rate": 0.1, "steps": 50},
    preprocessing={"image_size": 48},
    versions={"hf_deelbo": "0.1.0"},
    license="apache-2.0",
    figures=("figures/training.png",),
)
PRIOR = PriorCardData(
    task="image-classification",
    base_model="efficientnet-lite0",
    dataset_name="digits",
    num_classes=10,
    num_examples=1437,
    num_test_examples=360,
    num_parameters=3_371_008,
    rank=5,
    num_collections=20,
    eps=0.1,
    metrics={"accuracy": 0.971, "nll": 0.112, "ece": 0.013},
    training={"learning_rate": 0.01, "schedule": "constant"},
    preprocessing={"image_size": 48},
    versions={"hf_deelbo": "0.1.0"},
    license="apache-2.0",
    figures=("figures/reliability.png",),
)
of_both_kinds = pytest.mark.parametrize("data", [DIGITS, PRIOR], ids=["posterior", "prior"])
BEGIN, END = "<!-- hf_deelbo:begin", "<!-- hf_deelbo:end -->"


def body(text: str) -> str:
    """What stands between the two comments."""
    return text[text.index("-->", text.index(BEGIN)) + 3 : text.index(END)]


def title(data: PosteriorCardData | PriorCardData, name: str) -> str:
    """The heading where both the base model and the dataset have this name."""
    return (
        f"# A prior for fine-tuning {name}, learned on {name}\n"
        if data is PRIOR
        else f"# {name} fine-tuned on {name}\n"
    )


def table_row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


# ---- Metadata ------------------------------------------------------------------------------------------------------


def test_the_metadata_of_a_full_card():
    data = replace(DIGITS, base_model="microsoft/resnet-50", dataset_name="cifar10", language="en", repo_id="me/mine")
    content = str(render_card(data))
    assert content.startswith("---\n")

    def metric(kind, value, name):
        return {"type": kind, "value": value, "name": name}

    assert yaml.safe_load(content.split("---\n")[1]) == {
        "license": "apache-2.0",
        "language": ["en"],
        "library_name": "transformers",
        "pipeline_tag": "image-classification",
        "base_model": "microsoft/resnet-50",
        "datasets": ["uoft-cs/cifar10"],
        "metrics": ["accuracy", "nll", "ece"],
        "tags": ["hf_deelbo", "deelbo", "bayesian", "variational-inference", "transfer-learning"],
        "model-index": [
            {
                "name": "mine",
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {"name": "uoft-cs/cifar10", "type": "uoft-cs/cifar10", "split": "test"},
                        "metrics": [
                            metric("accuracy", 0.908, "class-averaged accuracy (posterior mean)"),
                            metric("nll", 0.347, "NLL (posterior mean)"),
                            metric("ece", 0.061, "ECE (posterior mean)"),
                            metric("accuracy", 0.906, "class-averaged accuracy (average of 5 samples)"),
                            metric("nll", 0.346, "NLL (average of 5 samples)"),
                            metric("ece", 0.058, "ECE (average of 5 samples)"),
                        ],
                    }
                ],
            }
        ],
    }


def test_the_metadata_of_a_prior(tmp_path):
    data = replace(PRIOR, base_model="microsoft/resnet-50", dataset_name="cifar10", language="en", repo_id="me/mine")
    file = save_card(tmp_path, data)
    expected = {
        "license": "apache-2.0",
        "language": ["en"],
        "library_name": "transformers",
        "pipeline_tag": "image-classification",
        "base_model": "microsoft/resnet-50",
        "datasets": ["uoft-cs/cifar10"],
        "metrics": ["accuracy", "nll", "ece"],
        "tags": ["hf_deelbo", "deelbo", "bayesian", "variational-inference", "transfer-learning", "prior", "swag"],
        "model-index": [
            {
                "name": "mine",
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {"name": "uoft-cs/cifar10", "type": "uoft-cs/cifar10", "split": "test"},
                        "metrics": [
                            {"type": "accuracy", "value": 0.971, "name": "class-averaged accuracy (SWAG mean)"},
                            {"type": "nll", "value": 0.112, "name": "NLL (SWAG mean)"},
                            {"type": "ece", "value": 0.013, "name": "ECE (SWAG mean)"},
                        ],
                    }
                ],
            }
        ],
    }
    assert yaml.safe_load(file.read_text().split("---\n")[1]) == expected
    assert ModelCard.load(file).data.to_dict() == metadata_load(file) == expected
    assert ModelCardData(**metadata_load(file)).to_dict() == expected
    assert str(ModelCard.load(file)) == file.read_text()


@pytest.mark.skipif(IS_HUB_CLIENT_1, reason="cards are validated at HF_ENDPOINT since huggingface_hub 2")
@of_both_kinds
def test_the_hub_finds_the_card_valid(data, loopback_hub):
    for each in (data, replace(data, metrics={}), replace(data, dataset_name="cifar10"), type(data)(data.task)):
        render_card(each).validate()
    assert [(request.path, request.status) for request in loopback_hub.requests] == [("/api/validate-yaml", 200)] * 4


def test_results_come_back_through_every_reader_of_the_hub(tmp_path):
    metrics = {"mean": {"accuracy": np.float64(0.1) + 0.2, "brier": torch.tensor(0.5)}}  # what YAML cannot hold itself
    file = save_card(tmp_path, replace(DIGITS, metrics=metrics, dataset_config="8x8", dataset_split="held out"))
    on = {"task_type": "image-classification", "dataset_type": "digits", "dataset_name": "digits"}
    expected = [
        EvalResult(
            **on,
            dataset_config="8x8",
            dataset_split="held out",
            metric_type=kind,
            metric_name=f"{name} (posterior mean)",
            metric_value=value,
        )
        for kind, name, value in (
            ("accuracy", "class-averaged accuracy", 0.30000000000000004),
            ("brier_score", "Brier score", 0.5),
        )
    ]
    loaded, metadata = ModelCard.load(file), metadata_load(file)
    assert loaded.data.eval_results == expected
    assert model_index_to_eval_results(metadata["model-index"]) == ("efficientnet-lite0-digits", expected)
    assert ModelCardData(**metadata).to_dict() == metadata == loaded.data.to_dict()
    assert str(loaded) == file.read_text()


def test_only_ids_on_the_hub_are_linked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "my-run").mkdir(parents=True)

    def card_of(base_model, dataset_name):
        return render_card(replace(DIGITS, base_model=base_model, dataset_name=dataset_name))

    card = card_of("timm/resnet50.a1_in1k", "timm/oxford-iiit-pet")
    assert (card.data.base_model, card.data.datasets) == ("timm/resnet50.a1_in1k", ["timm/oxford-iiit-pet"])
    assert "[timm/resnet50.a1_in1k](https://huggingface.co/timm/resnet50.a1_in1k)" in card.text
    assert "[timm/oxford-iiit-pet](https://huggingface.co/datasets/timm/oxford-iiit-pet)" in card.text
    for base_model, dataset_name in (("efficientnet-lite0", "digits"), ("outputs/my-run", Path("outputs/my-run"))):
        card = card_of(base_model, dataset_name)
        assert card.data.base_model is None
        assert card.data.datasets is None
        assert "huggingface.co" not in card.text
        assert "outputs/my" not in str(card)
        assert f"# {base_model.split('/')[-1]} fine-tuned on {Path(dataset_name).name}\n" in card.text


def test_a_result_needs_a_finite_value_and_a_dataset():
    card = render_card(replace(DIGITS, metrics={"mean": {"accuracy": 0.5, "nll": math.inf, "ece": math.nan}}))
    assert [result.metric_type for result in card.data.eval_results] == card.data.metrics == ["accuracy"]
    assert table_row(card.text, "NLL")[1] == "infinite"
    card = render_card(replace(DIGITS, dataset_name=None))
    assert card.data.eval_results is None
    assert "model_name" not in card.data.to_dict()
    assert table_row(card.text, "NLL")[1:3] == ["0.347", "0.346"]


# ---- Text ----------------------------------------------------------------------------------------------------------


def test_the_text_of_a_full_card():
    text = render_card(DIGITS).text
    assert "\n# efficientnet-lite0 fine-tuned on digits\n" in text
    assert "An image classifier for 10 classes: efficientnet-lite0, fine-tuned on 100 examples of digits.\n" in text
    assert table_row(text, "class-averaged accuracy")[1:3] == ["90.8 %", "90.6 %"]
    assert table_row(text, "NLL")[1:3] == ["0.347", "0.346"]
    assert "blind guessing: 2.303" in table_row(text, "NLL")[3]  # log 10
    assert "Brier" not in text
    assert table_row(text, "lambda")[1] == "1.63e-05"
    assert (
        "square root, 0.004, is how far a drawn weight typically lies from its pretrained"
        in table_row(text, "lambda")[2]
    )
    assert table_row(text, "tau")[1] == "7.83e-04"
    assert "0.028" in table_row(text, "tau")[2]
    assert table_row(text, "sigma")[1] == "3.69e-03"
    assert table_row(text, "kappa")[1] == "33,838"
    assert "D/N, the number of parameters (3,383,818) per example" in table_row(text, "kappa")[2]
    assert table_row(text, "J")[1] == "-358,346"
    assert "-0.1059 per parameter" in table_row(text, "J")[2]
    # 1 / (1.63e-5 * 3383818) and 1 / (7.83e-4 * 3383818)
    assert "a weight decay of 0.018 towards the pretrained values (backbone) and of 0.00038 towards zero" in text
    assert table_row(text, "learning rate") == ["learning rate", "0.1"]
    assert table_row(text, "image size") == ["image size", "48"]
    assert "Made with hf_deelbo 0.1.0.\n" in text
    assert re.findall(r"!\[.*?\]\((.*?)\)", text) == ["figures/training.png"]
    assert not re.search(r"[ \t]$|\n\n\n|^## .*\n(?!\n)", text, flags=re.MULTILINE)


def group_rows(number: int, name: str = "encoder.layer") -> list[dict]:
    """Of which the last is of the head."""
    return [
        {
            "name": f"{name}.{index}",
            "in_head": index == number - 1,
            "num_parameters": 1000 + index,
            "sigma": 1e-3 * (index + 1),
            "prior_variance": 4e-4,
        }
        for index in range(number)
    ]


@pytest.mark.parametrize("number", [2, 12, 13])
def test_what_each_group_learned_is_a_table(number):
    text = render_card(replace(DIGITS, groups=group_rows(number), sigma_update="closed-form")).text
    assert "\n### What each layer learned\n" in text
    assert table_row(text, "encoder.layer.0") == ["encoder.layer.0", "1,000", "1.00e-03", "2.00e-02"]
    assert table_row(text, f"encoder.layer.{number - 1} (head)")[1] == f"{999 + number:,}"
    assert text.count("<details>") == text.count("</details>") == (number > 12)
    if number > 12:
        # markdown inside of HTML needs empty lines around it
        found = re.search(r"<details>\n<summary>All 13 groups</summary>\n\n(.*?)\n\n</details>\n\n", text, re.DOTALL)
        assert found[1].count("\n") == 14
    assert f"with one sigma for each of {number} groups of weights and no correlations" in text
    assert "the same for all" not in text
    assert table_row(text, "sigma learned")[1] == "in closed form, as lambda and tau are"
    assert not re.search(r"[ \t]$|\n\n\n|^#+ .*\n(?!\n)", text, flags=re.MULTILINE)
    # one lambda and one tau are what the summary says, and pull as it says; of several, they are averages
    assert ("averaged over weights" in text) == (number > 2)
    assert ("as a weight decay of" in text) == (number == 2)


def test_one_sigma_for_all_needs_no_table():
    backbone, head = group_rows(2)
    for groups in ((), [backbone, head | {"sigma": backbone["sigma"]}], [head]):
        text = render_card(replace(DIGITS, groups=groups, sigma_update="optimizer")).text
        assert "What each layer learned" not in text
        assert "with one sigma for all weights and no correlations" in text
        assert "the same for all" in text
        assert table_row(text, "sigma learned")[1] == "by the optimizer"


def test_a_card_of_adapters_tells_of_the_base_model():
    data = replace(DIGITS, base_model="timm/resnet50.a1_in1k", has_adapters=True, repo_id="me/mine")
    card = render_card(data)
    assert card.data.library_name == "peft"
    assert 'from_pretrained("timm/resnet50.a1_in1k", num_labels=10, ignore_mismatched_sizes=True)' in card.text
    assert 'model="me/mine"' not in card.text
    assert "from where it started" in table_row(card.text, "lambda")[2]
    assert "pretrained value" not in card.text
    assert table_row(card.text, "prior")[1] == "L2-SP: around the adapters as they started"
    assert 'from_pretrained("path/to/the/base/model"' in render_card(replace(data, base_model="/home/alice/base")).text
    assert not re.search(r"[ \t]$|\n\n\n|^## .*\n(?!\n)", card.text, flags=re.MULTILINE)


@pytest.mark.parametrize("prior", ["l2-sp", "l2-zero"])
def test_what_the_text_says_of_lambda_tau_and_the_pull_is_true(prior):
    """Against draws from the posterior, and the gradient of the KL of torch's dense Gaussians."""
    generator = torch.Generator().manual_seed(0)
    centre = 0.3 * torch.randn(400, generator=generator, dtype=torch.float64) if prior == "l2-sp" else torch.zeros(400)
    w_bar = (centre + 0.05 * torch.randn(400, generator=generator)).double().requires_grad_()
    v_bar = (0.7 * torch.randn(30, generator=generator)).double().requires_grad_()
    sigma, kappa, num_examples = 0.1, 7.0, 20
    parts = ((w_bar, centre), (v_bar, torch.zeros(30)))
    variances = [sigma**2 + (mean.detach() - prior_mean).square().mean().item() for mean, prior_mean in parts]
    data = replace(
        DIGITS,
        prior=prior,
        sigma=sigma,
        kappa=kappa,
        num_examples=num_examples,
        lambda_=variances[0],
        tau=variances[1],
    )
    text = render_card(data).text

    for name, (mean, prior_mean) in zip(("lambda", "tau"), parts, strict=True):
        noise = torch.randn(500, len(mean), generator=generator, dtype=torch.float64)
        distance = (mean.detach() + sigma * noise - prior_mean).square().mean().sqrt().item()
        said = float(re.search(r"square root, ([\d.e-]+), is how far a drawn weight", table_row(text, name)[2])[1])
        assert said == pytest.approx(distance, rel=0.05)  # two digits are shown

    shown = re.search(r"weight decay of ([\d.e-]+) towards (.*?) \(backbone\) and of ([\d.e-]+) towards zero", text)
    assert shown[2] == {"l2-sp": "the pretrained values", "l2-zero": "zero"}[prior]
    for said, (mean, prior_mean), variance in zip((shown[1], shown[3]), parts, variances, strict=True):
        eye = torch.eye(len(mean), dtype=torch.float64)
        kl = kl_divergence(
            MultivariateNormal(mean, sigma**2 * eye), MultivariateNormal(prior_mean.double(), variance * eye)
        )
        (gradient,) = torch.autograd.grad(kl / (kappa * num_examples), mean)
        ratio = gradient / (mean.detach() - prior_mean)
        torch.testing.assert_close(ratio, torch.full_like(ratio, float(said)), rtol=0.05, atol=0)


@pytest.mark.parametrize(
    ("prior", "said", "unsaid"),
    [
        ("l2-zero", "from zero. |", "from its pretrained value"),
        ("ptyl", "in units of the spread that the prior gives it", "weight decay"),
        ("posterior", "the stronger the regularisation. |", "weight decay"),
        (None, "the stronger the regularisation. |", "weight decay"),
    ],
)
def test_each_prior_is_told_as_it_is(prior, said, unsaid):
    text = render_card(replace(DIGITS, prior=prior)).text
    assert said in text
    assert unsaid not in text


def test_temperatures_are_told_where_there_are_some():
    text = render_card(replace(DIGITS, temperatures={"mean": 1.25, "average": 0.9})).text
    assert table_row(text, "temperature")[1].strip() == "1.25"
    assert "(0.9 for averages of samples)" in table_row(text, "temperature")[2]
    assert "temperature" not in render_card(replace(DIGITS, temperatures={"mean": 1.0, "average": 1.0})).text


def test_kappa_is_explained_by_what_it_is():
    assert "once, as in the plain ELBo" in table_row(render_card(replace(DIGITS, kappa=1)).text, "kappa")[2]
    other = render_card(replace(DIGITS, kappa=2.5)).text
    assert table_row(other, "kappa")[1:] == ["2.5", "How many times each training example counts. Set, not learned."]
    assert "narrower than Bayes' rule" in other
    assert "narrower than Bayes' rule" not in render_card(replace(DIGITS, kappa=1)).text


def test_what_is_missing_is_not_mentioned():
    empty = render_card(PosteriorCardData("text-classification", dataset_split=None))
    assert "A text classifier, fine-tuned.\n" in empty.text
    assert re.findall("^## (.*)", empty.text, flags=re.MULTILINE) == [
        "How to use it",
        "When not to trust it",
        "Citation",
    ]
    names = [each.name for each in fields(DIGITS) if each.default is None or each.name == "dataset_split"]
    assert len(names) > 15
    for name in names:
        card = render_card(replace(DIGITS, **{name: None}))
        assert not re.search(r"\b(none|nan|inf)\b", str(card), flags=re.IGNORECASE), name
    for name in ("kappa", "lambda_", "tau", "sigma"):
        assert (
            render_card(replace(DIGITS, **{name: math.nan})).text == render_card(replace(DIGITS, **{name: None})).text
        )
    without = replace(DIGITS, training={"a": None, "b": math.nan, "c": [None, 3], "d": {"e": None}}, de_elbo={})
    text = render_card(without).text
    assert table_row(text, "c") == ["c", "3"]
    assert not re.search(r"^\| [abdJ] \|", text, flags=re.MULTILINE)


def test_settings_of_any_kind_are_shown_in_a_line():
    training = {
        "small": 1e-5,
        "numpy_number": np.float32(0.5),
        "array": np.array([1.5, 2.5]),
        "tensor": torch.tensor(3),
        "flag": True,
        "optimizer": OptimizerNames.SGD,
        "selection": {"method": "halving", "learning_rates": [0.1, 0.01]},
        "channel_mean": (0.123456, 0.5),
    }
    text = render_card(replace(DIGITS, training=training)).text
    expected = {
        "small": "1e-05",
        "numpy number": "0.5",
        "array": "1.5, 2.5",
        "tensor": "3",
        "flag": "yes",
        "optimizer": "sgd",
        "selection": "method halving, learning rates 0.1, 0.01",
        "channel mean": "0.1235, 0.5",
    }
    assert {name: table_row(text, name)[1] for name in expected} == expected


def test_figures_are_relative_paths():
    text = render_card(replace(DIGITS, figures=("figures/reliability.png", "my plots/what (now).png"))).text
    assert re.findall(r"!\[(.*?)\]\((.*?)\)\n", text) == [
        ("Accuracy over confidence; on the diagonal, confidence can be taken at its word", "figures/reliability.png"),
        ("what (now)", "my%20plots/what%20%28now%29.png"),
    ]
    for path in ("/home/alice/x.png", "~/x.png", "../x.png", "a/../../x.png", "C:\\x.png", "file:///x.png"):
        with pytest.raises(ValueError, match=r"figures: must be relative paths .* got"):
            render_card(replace(DIGITS, figures=(path,)))


def test_wrong_data_is_refused():
    with pytest.raises(
        ValueError, match="task: unknown task 'summarization'; choose one of image-classification, text-"
    ):
        render_card(PosteriorCardData("summarization"))
    for repo_id in ("mine", "a/b/c", 'a/b"); import os #', "/home/alice/x"):
        with pytest.raises(ValueError, match='repo_id: must be "user/name"'):
            render_card(replace(DIGITS, repo_id=repo_id))


# ---- Text of a prior -----------------------------------------------------------------------------------------------


def test_the_text_of_a_full_prior_card():
    text = render_card(PRIOR).text
    assert "\n# A prior for fine-tuning efficientnet-lite0, learned on digits\n" in text
    assert "efficientnet-lite0 on a new task, learned on digits, 1,437 examples of 10 classes.\n" in text
    assert re.findall("^## (.*)", text, flags=re.MULTILINE) == [
        "How to use it",
        "How good its mean is on the source task",
        "What is in it",
        "Training",
        "When not to trust it",
        "Citation",
    ]
    assert 'Measured on the split "test", 360 examples.' in text
    assert table_row(text, "class-averaged accuracy")[1] == "97.1 %"
    assert table_row(text, "NLL")[1] == "0.112"
    assert "blind guessing: 2.303" in table_row(text, "NLL")[2]  # log 10
    assert table_row(text, "D_w")[1] == "3,371,008"
    assert table_row(text, "collections")[1] == "20"
    assert table_row(text, "K")[1] == "5"
    assert table_row(text, "eps")[1] == "0.1"
    assert "7 numbers for each" in table_row(text, "`prior.safetensors`")[1]  # mean, variance and 5 deviations
    assert "with 5 directions and one variance for each weight" in text
    assert table_row(text, "schedule") == ["schedule", "constant"]
    assert table_row(text, "image size") == ["image size", "48"]
    assert "Made with hf_deelbo 0.1.0.\n" in text
    assert re.findall(r"!\[.*?\]\((.*?)\)", text) == ["figures/reliability.png"]
    assert not re.search(r"[ \t]$|\n\n\n|^## .*\n(?!\n)", text, flags=re.MULTILINE)


def test_what_a_prior_card_says_of_directions_is_true():
    """Against the dense Gaussian of the formula that it shows."""
    eps, rank, size = 0.1, 3, 12
    generator = torch.Generator().manual_seed(0)
    weights = 1e-3 * torch.randn(8, size, generator=generator, dtype=torch.float64)
    weights[:, :2] += 3 * torch.randn(8, 1, generator=generator, dtype=torch.float64)  # these two moved together
    mean, diagonal = weights.mean(0), weights.var(0, correction=0)
    q = torch.stack([weights[n] - weights[: n + 1].mean(0) for n in range(8 - rank, 8)])
    text = render_card(replace(PRIOR, rank=rank, eps=eps)).text
    assert "`Sigma_p = S_diag/2 + eps I + Q Q^T / (2K - 2)`" in text
    sigma_p = diagonal.diag() / 2 + eps * torch.eye(size, dtype=torch.float64) + q.T @ q / (2 * rank - 2)
    dense = MultivariateNormal(mean, sigma_p)
    prior = LowRankPrior({"w": mean}, {"w": diagonal}, {"w": q}, eps)

    def cost(*indices, signs=(1, 1)):
        w = mean.clone()
        for index, sign in zip(indices, signs, strict=False):
            w[index] += sign / math.sqrt(len(indices))
        cost = 2 * (dense.log_prob(mean) - dense.log_prob(w))
        torch.testing.assert_close(prior.mahalanobis({"w": w}), cost)
        return cost.item()

    assert cost(0, 1) < cost(0, 1, signs=(1, -1)) < cost(5)  # as they moved, against one another, where none moved
    assert cost(5) == pytest.approx(cost(9, 10), rel=1e-3)
    assert cost(5) == pytest.approx(1 / eps, rel=1e-3)


def test_what_is_missing_of_a_prior_is_not_mentioned():
    for task, kind in (("image-classification", "image"), ("text-classification", "text")):
        empty = render_card(PriorCardData(task, dataset_split=None)).text
        assert "\n# A prior for fine-tuning classifiers\n" in empty
        assert f"A prior for fine-tuning {kind} classifiers on a new task, learned on another.\n" in empty
        assert not re.search(r"^## (How good|Training)|[ \t]$|\n\n\n|^\| (D_w|K|eps)", empty, flags=re.MULTILINE)
        assert "numbers above" not in empty
    names = [each.name for each in fields(PRIOR) if each.default is None or each.name == "dataset_split"]
    assert len(names) > 12
    for name in names:
        card = render_card(replace(PRIOR, **{name: None}))
        assert not re.search(r"\b(none|nan|inf)\b", str(card), flags=re.IGNORECASE), name
    for name in ("rank", "num_collections", "eps", "num_parameters"):
        assert render_card(replace(PRIOR, **{name: math.nan})).text == render_card(replace(PRIOR, **{name: None})).text
    assert table_row(render_card(replace(PRIOR, eps=0)).text, "eps")[1] == "0"


# ---- Snippets ------------------------------------------------------------------------------------------------------


@pytest.fixture
def image_folder(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes)).save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 8, "width": 8}).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def text_folder(tmp_path):
    make_model("bert").save_pretrained(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "your", "text"]))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    return tmp_path


def snippets(card: ModelCard, folder: Path) -> list[str]:
    """As a reader would run them: with the place that holds the model, here a folder instead of a repository."""
    found = re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL)
    assert all("someone/else" in code for code in found)
    return [code.replace("someone/else", str(folder)) for code in found]


@pytest.mark.parametrize(
    ("kind", "auto_class"), [("image", AutoModelForImageClassification), ("text", AutoModelForSequenceClassification)]
)
def test_the_snippets_run(kind, auto_class, request):
    folder = request.getfixturevalue(f"{kind}_folder")
    card = render_card(replace(DIGITS, task=f"{kind}-classification", repo_id="someone/else", num_samples=4))
    without_package, with_package = snippets(card, folder)

    printed = []
    exec(compile(without_package, "without", "exec"), {"print": printed.append})
    model = auto_class.from_pretrained(folder).eval()
    if kind == "image":
        inputs = {"pixel_values": torch.full((1, 3, 8, 8), -1.0)}  # black, normalised by mean and std 0.5
    else:
        inputs = {"input_ids": torch.tensor([[2, 5, 6, 3]])}  # [CLS] your text [SEP]
    expected = model(**inputs).logits.softmax(-1)[0]
    shown = {answer["label"]: answer["score"] for answer in printed[0]}
    for label, score in shown.items():
        assert score == pytest.approx(expected[model.config.label2id[label]].item(), abs=1e-5)
    assert max(shown.values()) == pytest.approx(expected.max().item(), abs=1e-5)

    head = [name for name, _ in model.named_parameters() if name.startswith("classifier")]
    posterior, average = GaussianPosterior(model, head, init_sigma=0.5), 0
    posterior.save_pretrained(folder)
    exec(compile(with_package, "with", "exec"), {"print": printed.append})
    for seed in range(4):
        with torch.no_grad(), posterior.sampled(seed):
            average = average + posterior.model(**inputs).logits.softmax(-1) / 4
    torch.testing.assert_close(printed[1], average, rtol=1e-4, atol=1e-5)
    assert (average - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("kind", "auto_class", "modules"),
    [
        ("image", AutoModelForImageClassification, ["q_proj", "v_proj", "query", "value"]),
        ("text", AutoModelForSequenceClassification, ["query", "value"]),
    ],
)
def test_the_snippets_of_adapters_run(kind, auto_class, modules, request, tmp_path, caplog):
    base = request.getfixturevalue(f"{kind}_folder")
    model = auto_class.from_pretrained(base, num_labels=5, ignore_mismatched_sizes=True)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=modules, modules_to_save=["classifier"]))
    posterior = GaussianPosterior(model, head_parameter_names(model), init_sigma=0.3)
    with torch.no_grad():
        for parameter in posterior.parameters().values():
            parameter += torch.randn(parameter.shape)
    processor = (AutoImageProcessor if kind == "image" else AutoTokenizer).from_pretrained(base)
    posterior.save_pretrained(tmp_path / "adapters", processor)
    data = replace(
        DIGITS,
        task=f"{kind}-classification",
        base_model="some/base",
        num_classes=5,
        num_samples=4,
        repo_id="someone/else",
        has_adapters=True,
    )
    without_package, with_package = snippets(render_card(data), tmp_path / "adapters")
    printed = []
    exec(compile(without_package.replace("some/base", str(base)), "without", "exec"), {"print": printed.append})
    assert "not supported" not in caplog.text  # a pipeline says so of peft's own classes
    if kind == "image":
        inputs = {"pixel_values": torch.full((1, 3, 8, 8), -1.0)}  # black, normalised by mean and std 0.5
    else:
        inputs = {"input_ids": torch.tensor([[2, 5, 6, 3]])}  # [CLS] your text [SEP]
    expected = posterior.predict_proba(inputs)[0]
    for answer in printed[0]:
        assert answer["score"] == pytest.approx(expected[int(answer["label"].split("_")[1])].item(), abs=1e-5)
    assert max(answer["score"] for answer in printed[0]) == pytest.approx(expected.max().item(), abs=1e-5)
    exec(compile(with_package, "with", "exec"), {"print": printed.append})
    torch.testing.assert_close(printed[1], posterior.predict_proba(inputs, 4), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["resnet", "bert"])
def test_the_snippets_of_a_prior_run(kind, tmp_path, monkeypatch, assert_same):
    monkeypatch.chdir(tmp_path)  # the snippet's outputs
    folder, mean = tmp_path / "prior", make_model(kind)

    def backbone(named):
        return {name: tensor.detach() for name, tensor in named if not name.startswith("classifier")}

    weights = backbone(mean.named_parameters())
    diagonal = {name: tensor**2 for name, tensor in weights.items()}
    deviations = {name: torch.stack([tensor, -tensor, tensor.sin()]) for name, tensor in weights.items()}
    LowRankPrior(weights, diagonal, deviations, eps=0.25).save_pretrained(folder, model=mean)
    task = "text-classification" if kind == "bert" else "image-classification"
    fine_tune, look = snippets(render_card(replace(PRIOR, task=task, repo_id="someone/else")), folder)
    assert fine_tune.count("train_dataset = ...") == 1
    fine_tune = fine_tune.replace("train_dataset = ...", "train_dataset = mine")
    start, _, train = fine_tune.partition("args =")

    run = {"mine": make_dataset(kind)}
    exec(compile(start, "start", "exec"), run)
    model = run["model"]
    assert type(model) is type(mean)
    assert_same(backbone(model.state_dict().items()), backbone(mean.state_dict().items()))
    assert {len(p) for name, p in model.named_parameters() if name.startswith("classifier")} == {5}
    exec(compile(f"args ={train}", "train", "exec"), run)
    posterior = run["trainer"].posterior
    assert posterior.prior.config == {"kind": "ptyl", "eps": 0.25}
    assert posterior.prior.rank == 3
    assert_same(posterior.prior.mean, weights)
    assert posterior.prior.mahalanobis(backbone(model.named_parameters())) > 0  # it was trained

    exec(compile(start.replace("num_labels=5", "num_labels=3"), "start", "exec"), run)
    assert_same(run["model"].state_dict(), mean.state_dict())  # as the text says, the old head is kept
    printed = []
    exec(compile(look, "look", "exec"), {"print": lambda *values: printed.extend(values)})
    assert printed == [sum(tensor.numel() for tensor in weights.values()), 3, 0.25]


@of_both_kinds
def test_a_card_gets_the_name_of_its_repository_later(data, tmp_path):
    file = save_card(tmp_path, data)
    name_repository(tmp_path, "alice/mine")
    assert "path/to/this/folder" not in file.read_text()
    assert body(file.read_text()) == body(str(render_card(replace(data, repo_id="alice/mine"))))
    save_card(tmp_path, replace(data, num_test_examples=4321))  # it still counts as generated
    assert ", 4,321 examples." in file.read_text()


def test_a_card_that_was_edited_keeps_its_names(tmp_path):
    file = save_card(tmp_path, DIGITS)
    edited = edit(file, ("An image classifier", "My classifier"))
    name_repository(tmp_path, "bob/other")
    assert file.read_text() == edited


def test_without_a_repository_the_snippets_name_a_folder():
    text = render_card(DIGITS).text
    assert 'pipeline("image-classification", model="path/to/this/folder")' in text
    assert 'prior_name_or_path="path/to/this/folder"' in text


# ---- Nothing of the author's machine -------------------------------------------------------------------------------

# of a place of the author's, as a name: what may be shown
PLACES = {
    "posix": ("/home/alice/secret/mine", "mine"),
    "posix, with spaces and a slash at the end": ("/home/alice smith/secret x/mine/", "mine"),
    "windows": ("C:\\Users\\alice\\secret\\mine", "mine"),
    "UNC": ("\\\\server\\alice\\secret\\mine", "mine"),
    "home": ("~alice/secret/mine", "mine"),
    "relative": ("../secret/mine", "mine"),
    "relative, of a form that no id has": ("alice/secret/mine", "mine"),
    "file URL": ("file:///home/alice/secret/mine", "mine"),
    "web address with a password": ("https://alice:secret@example.com/secret/mine?token=secret", "mine"),
    "home folder itself, called after its user": ("/home/alice", None),
    "windows home folder": ("C:\\Users\\alice", None),
    "home folder as ~": ("~alice", None),
    "folder above": ("..", None),
}
PRIVATE = re.compile(
    r"alice|secret|/home|users|server|example\.com|file:|[a-z]:[\\/](?!/)|~|\.\./", flags=re.IGNORECASE
)


def shows_something_private(card: ModelCard) -> re.Match | None:
    return PRIVATE.search(str(card).replace("https://", ""))


@pytest.mark.parametrize(("path", "shown"), PLACES.values(), ids=PLACES)
def test_of_a_path_no_more_than_the_last_folder_is_shown(path, shown):
    card = render_card(replace(DIGITS, base_model=path, dataset_name=path))
    assert not shows_something_private(card)
    assert card.data.base_model is None
    assert card.data.datasets is None
    assert title(DIGITS, shown) in card.text if shown else "# A classifier, fine-tuned\n" in card.text
    assert {result.dataset_name for result in card.data.eval_results or ()} == ({shown} if shown else set())


# of a setting that holds a path: what is shown
SETTINGS = {
    "posix alone": ("/home/alice/secret/mine", "mine"),
    "posix in a sentence": ("resumed from /home/alice/secret/mine", "resumed from mine"),
    "posix after =": ("from=/home/alice/secret/mine", "from=mine"),
    "posix after :": ("from:/home/alice/secret/mine", "from:mine"),
    "posix in quotes": ('from "/home/alice/secret/mine', 'from "mine'),
    "windows, with slashes": ("from C:/Users/alice/secret/mine", "from mine"),
    "UNC": ("from \\\\server\\alice\\secret\\mine", "from mine"),
    "home": ("from ~/secret/mine", "from mine"),
    "home of a user": ("from ~alice/secret/mine", "from mine"),
    "relative": ("from ../secret/mine", "from mine"),
    "file URL without slashes": ("from file:/home/alice/secret/mine", "from mine"),
}


@pytest.mark.parametrize(("value", "shown"), SETTINGS.values(), ids=SETTINGS)
def test_paths_inside_settings_are_shortened_too(value, shown):
    settings = {"start": value, "list": [value, Path("/home/alice/mine")], "nested": {"folder": value}, value: "a key"}
    card = render_card(
        replace(
            DIGITS,
            training=settings,
            preprocessing={"p": value},
            versions={"torch": value},
            base_model_revision=value,
            dataset_config=value,
            dataset_split=value,
            license=value,
            language=[value],
            prior=value,
            groups=group_rows(3, value),
        )
    )
    assert not shows_something_private(card)
    text = html.unescape(card.text)
    for name, expected in {
        "start": shown,
        "list": f"{shown}, mine",
        "nested": f"folder {shown}",
        shown: "a key",
    }.items():
        assert table_row(text, name)[1] == expected
    assert (card.data.license, card.data.language) == (shown, [shown])


def test_a_prior_card_shows_no_path_either():
    path, value = PLACES["posix"][0], SETTINGS["posix in a sentence"][0]
    places = {"base_model": path, "dataset_name": path, "base_model_revision": value, "dataset_split": value}
    card = render_card(replace(PRIOR, **places, training={"start": value}, versions={"torch": value}))
    assert not shows_something_private(card)
    assert title(PRIOR, "mine") in card.text
    untitled = render_card(replace(PRIOR, base_model="/home/alice", dataset_name="/home/alice"))
    assert "# A prior for fine-tuning classifiers\n" in untitled.text


def test_what_only_looks_like_a_path_is_left_alone():
    values = [
        "D/N",
        "0.5 +/- 0.1",
        "images/s",
        "https://arxiv.org/abs/1",
        "timm/resnet50.a1_in1k",
        "a: b",
        "mean / std",
        "ratio (a)/(b)",
        "1.0",
    ]
    text = render_card(replace(DIGITS, training=dict(enumerate(values)))).text
    assert [table_row(text, str(index))[1] for index in range(len(values))] == values


# ---- Hostile names -------------------------------------------------------------------------------------------------

HOSTILE = {
    "quotes of YAML": "quo\"tes' and: colons # no comment",
    "metadata and a heading": "line\nbreak\r\n---\nlicense: evil\n---\n# Heading",
    "end of metadata": "---",
    "item": "- item",
    "underline": "=== ",
    "number": "1. one",
    "template": "{{ 7 * 7 }} {% raw %} {# x #}",
    "HTML and our comment": "<script>alert(1)</script> <!-- hf_deelbo:end --> &lt;",
    "table": "a | b || c \\| d",
    "code and emphasis": "`code` ``` ~~~ **bold** _it_ __it__ *x* $$x$$ ~~s~~",
    "links": "[link](https://evil.example) ![i](x) <https://evil.example>",
    "tag of YAML": "!!python/object/apply:os.system [x]",
    "anchors of YAML": "&anchor *alias ? % @ ` , [ ] { }",
    "nothing of YAML": "null",
    "control characters": "\x00\x1b[31m\u2028\u202e\ud800 end",
    "length": "very long " * 1000,
}
# each name in the one template, and in the other what could only be its own fault
HOSTILE_CARDS = [(DIGITS, name) for name in HOSTILE] + [
    (PRIOR, name) for name in ("metadata and a heading", "HTML and our comment", "table", "links")
]


def skeleton(text: str) -> str:
    """All that markdown and HTML are made of; character references are never markup."""
    return re.sub(r"&#\d+;|[^#|`<>&*\[\]{}!$~\\_\n]|(?<=[^\W_])_(?=[^\W_])", "", text)


@pytest.mark.parametrize(
    ("data", "kind"),
    HOSTILE_CARDS,
    ids=[f"{kind}, in the card of a {'prior' if data is PRIOR else 'posterior'}" for data, kind in HOSTILE_CARDS],
)
def test_no_name_can_break_the_card(data, tmp_path, kind):
    name = HOSTILE[kind]

    def card_with(value):
        return replace(
            data,
            base_model=value,
            base_model_revision=value,
            dataset_name=value,
            dataset_config=value,
            dataset_split=value,
            license=value,
            **({"prior": value, "groups": group_rows(13, value)} if data is DIGITS else {}),
            training={value: value, "x": [value, {value: value}]},
            preprocessing={"y": value},
            versions={"z": value},
        )

    harmless, hostile = render_card(card_with("harmless")), render_card(card_with(name))
    assert skeleton(hostile.text) == skeleton(harmless.text)
    file = save_card(tmp_path, card_with(name))
    metadata = metadata_load(file)
    assert metadata.keys() == metadata_load(save_card(tmp_path / "other", card_with("harmless"))).keys()
    assert ModelCard.load(file).data.to_dict() == metadata
    if not re.search(r"[/\\]", name):  # what is no path is shown in full
        readable = " ".join("".join(c if c.isprintable() else " " for c in name).split())
        readable = readable if len(readable) <= 200 else f"{readable[:199]}…"
        assert metadata["license"] == readable
        assert title(data, readable) in html.unescape(hostile.text)
    # it can be told from what a user wrote, as any other
    file.write_text(f"{file.read_text()}\nMy words.\n")
    save_card(tmp_path, replace(card_with(name), num_test_examples=4321))
    assert ", 4,321 examples." in file.read_text()
    assert file.read_text().endswith("\nMy words.\n")


@of_both_kinds
@pytest.mark.parametrize("kind", HOSTILE)
def test_no_name_can_break_what_else_a_card_tells(data, tmp_path, kind):
    """Languages, figures, packages, and settings that are lists or mappings."""
    name = HOSTILE[kind]

    def card_with(value):
        path = "figures/" + re.sub(r"[/\\:~]|[.]{2}|[\ud800-\udfff]", "", value) + ".png"
        return replace(
            data,
            language=[value, value],
            versions={value: value},
            training={"a": {value: {value: value}}, "b": (value, None), "c": [[value]]},
            figures=(path,),
        )

    harmless, hostile = render_card(card_with("harmless")), render_card(card_with(name))
    assert hostile.data.to_dict().keys() == harmless.data.to_dict().keys()
    for line in re.findall(r"^!\[.*$", hostile.text, flags=re.MULTILINE):
        assert re.fullmatch(r"!\[[^\[\]<>|`]*\]\(figures/[\w%./-]*\)", line)
    one, other = (
        [line for line in skeleton(card.text).splitlines() if not line.startswith(("![", "*"))]
        for card in (harmless, hostile)
    )
    assert one == other
    file = save_card(tmp_path, card_with(name))
    assert metadata_load(file) == hostile.data.to_dict()


def test_names_of_ten_thousand_classes_and_groups_stay_in_their_place():
    """Class names are counted, not shown; groups stand in one table that is folded."""
    names = {index: f"{HOSTILE[kind]} {index}" for index, kind in enumerate([*HOSTILE] * 625)}
    model = make_model("vit")
    model.classifier = nn.Linear(16, len(names))
    model.config.id2label, model.config.label2id = names, {name: index for index, name in names.items()}
    posterior = GaussianPosterior(model, ["classifier.weight", "classifier.bias"], num_examples=9)
    card = render_card(posterior.card_data())
    assert f"{len(names):,} classes" in card.text
    assert len(str(card)) < 20_000
    assert not re.search("evil|alert|os.system", str(card))

    rows = [row | {"name": names[index]} for index, row in enumerate(group_rows(10_000))]
    many = render_card(replace(DIGITS, groups=rows))
    assert many.text.count("<details>") == many.text.count("</details>") == 1
    row = r"^\| .* \| [\d,]+ \| [\d.e+-]+ \| [\d.e+-]+ \|$"
    assert len(re.findall(row, many.text, flags=re.MULTILINE)) == len(rows)


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_a_user_wrote_stays_as_it_is(tmp_path, kind):
    """Nothing in it is run, and it ends no metadata."""
    # but for our own comment, and what no file holds
    name = re.sub(r"[\ud800\r]|<!-- hf_deelbo:end -->", "", HOSTILE[kind])
    words = f"\nMy words: {name}\n{{{{ data }}}} {{% for x in y %}}\n---\n"
    file = save_card(tmp_path, DIGITS)
    before = metadata_load(file)
    file.write_text(file.read_text() + words)
    save_card(tmp_path, replace(DIGITS, num_test_examples=4321))
    assert file.read_text().endswith(words)
    assert ", 4,321 examples." in file.read_text()
    assert metadata_load(file) == before


ALIASES = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{two}: &{two} [{', '.join([f'*{one}'] * 10)}]\n" for one, two in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "metadata", [ALIASES, "a: !!python/object/apply:os.system [exit 1]\n", "a: &a [*a]\n", "a: 1\na: 2\n"]
)
def test_metadata_of_strangers_is_not_run_and_does_not_grow(tmp_path, metadata):
    file = tmp_path / "README.md"
    file.write_text(f"---\n{metadata}---\nText\n")
    with suppress(ValueError):
        save_card(tmp_path, DIGITS)
    assert file.stat().st_size < 50_000


# ---- Users' edits --------------------------------------------------------------------------------------------------

LATER = replace(DIGITS, lambda_=0.25, metrics={"mean": {"accuracy": 0.5}}, dataset_name="photos")


def edit(file: Path, *changes: tuple[str, str]) -> str:
    content = file.read_bytes().decode()
    for old, new in changes:
        assert content.count(old) == 1, old
        content = content.replace(old, new)
    file.write_bytes(content.encode())
    return content


def test_saved_twice_it_is_the_same_file(tmp_path):
    file = save_card(tmp_path / "new" / "folder", DIGITS)
    assert file == tmp_path / "new" / "folder" / "README.md"
    first = file.read_bytes()
    assert first.decode() == str(render_card(DIGITS))
    save_card(file.parent, DIGITS)
    assert file.read_bytes() == first
    save_card(file.parent, LATER)
    assert file.read_text() == str(render_card(LATER))
    assert os.listdir(file.parent) == ["README.md"]


@pytest.mark.parametrize("line_break", ["\n", "\r\n"])
def test_text_outside_of_the_marks_is_kept_and_the_rest_renewed(tmp_path, line_break):
    file = save_card(tmp_path, DIGITS)
    content = file.read_text().replace(BEGIN, f"Before  \n\n{BEGIN}").replace(END, f"{END}\n\n## After\n--- no rule")
    file.write_bytes(content.replace("\n", line_break).encode())
    save_card(tmp_path, LATER)
    later = file.read_bytes().decode()
    assert later.count("\n") == later.count(line_break)
    expected = str(render_card(LATER)).replace(BEGIN, f"Before  \n\n{BEGIN}")
    assert later.replace("\r\n", "\n") == expected.replace(END, f"{END}\n\n## After\n--- no rule")


def text_of(content: str) -> str:
    return content.split("---\n", 2)[2]


def test_an_edited_text_is_kept_as_it_is(tmp_path):
    file = save_card(tmp_path, DIGITS)
    edited = edit(file, ("It inherits the biases", "I think it inherits the biases"))
    # twice: it must take neither the text for its own, nor its own metadata for the user's
    for dataset_name in ("cifar10", "oxford-iiit-pet"):
        later = replace(LATER, dataset_name=dataset_name)
        save_card(tmp_path, later)
        content = file.read_text()
        assert body(content) == body(edited)
        assert text_of(content).split(END)[1] == "\n"
        assert metadata_load(file) == render_card(later).data.to_dict()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(END, ""),
        lambda text: re.sub(f"{BEGIN}.*?-->\n", "", text),
        lambda text: re.sub("<!--.*?-->", "", text),
        lambda text: f"{text}\n{text}",
        lambda text: f"\n{END}\n{text}",
        lambda text: "# All my own\n",
    ],
)
def test_without_clear_marks_all_text_is_kept(tmp_path, change):
    file = save_card(tmp_path, DIGITS)
    text = change(text_of(file.read_text()))
    file.write_text(f"---\nlicense: mit\ntags:\n- mine\n---\n{text}")
    save_card(tmp_path, LATER)
    assert text_of(file.read_text()) == text
    new = render_card(LATER).data.to_dict()
    assert metadata_load(file) == {**new, "license": "mit", "tags": ["mine", *new["tags"]]}


def test_a_file_of_someone_else_gets_metadata_only(tmp_path):
    file = tmp_path / "README.md"
    file.write_bytes("\ufeff# Ünser Model\r\n\r\ntext\r\n".encode())
    save_card(tmp_path, DIGITS)
    content = file.read_bytes().decode()
    assert content.endswith("---\r\n# Ünser Model\r\n\r\ntext\r\n")
    assert content.count("\n") == content.count("\r\n")
    assert metadata_load(file) == render_card(DIGITS).data.to_dict()
    file.write_text(" \n")
    save_card(tmp_path, DIGITS)
    assert body(file.read_text()) == body(str(render_card(DIGITS)))


def test_metadata_that_users_changed_wins(tmp_path):
    file = save_card(tmp_path, replace(DIGITS, base_model="microsoft/resnet-50", dataset_name="cifar10"))
    edit(
        file,
        ("license: apache-2.0\n", "license: mit\nextra: {since: 2024-01-02, 1: x}\n"),
        ("base_model: microsoft/resnet-50\n", ""),
        ("- bayesian\n", "- my-tag\n"),
    )
    for _ in range(2):
        save_card(tmp_path, replace(LATER, base_model="microsoft/resnet-18", dataset_name="timm/oxford-iiit-pet"))
        metadata = metadata_load(file)
        assert metadata["license"] == "mit"
        assert str(metadata["extra"]) == "{'since': datetime.date(2024, 1, 2), 1: 'x'}"
        assert "base_model" not in metadata
        assert metadata["tags"] == [
            "hf_deelbo",
            "deelbo",
            "my-tag",
            "variational-inference",
            "transfer-learning",
            "bayesian",
        ]
        # untouched, so brought up to date
        assert metadata["datasets"] == ["timm/oxford-iiit-pet"]
        assert metadata["metrics"] == ["accuracy"]
        _, results = model_index_to_eval_results(metadata["model-index"])
        assert [(result.dataset_type, result.metric_value) for result in results] == [("timm/oxford-iiit-pet", 0.5)]
        assert "| lambda | 2.50e-01 |" in file.read_text()
    save_card(tmp_path, replace(DIGITS, metrics={}, dataset_name="digits"))
    assert metadata_load(file).keys() == {"license", "extra", "library_name", "pipeline_tag", "tags"}


def test_a_model_index_that_the_hub_cannot_read_is_replaced(tmp_path):
    file = tmp_path / "README.md"
    file.write_text("---\nmodel-index: broken\ntags: single # my comment\n---\ntext")
    save_card(tmp_path, DIGITS)
    assert metadata_load(file)["model-index"] == render_card(DIGITS).data.to_dict()["model-index"]
    assert metadata_load(file)["tags"][:2] == ["single", "hf_deelbo"]


def test_metadata_without_news_keeps_its_spelling(tmp_path):
    file = save_card(tmp_path, DIGITS)
    edited = edit(file, ("license: apache-2.0\n", 'license: "apache-2.0" # as the base model\n'))
    save_card(tmp_path, DIGITS)
    assert file.read_text() == edited


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("---\nlicense: mit\n---\n# Model f\xfcr".encode("latin-1"), "it is not UTF-8"),
        (b"---\nlicense: [mit\n---\ntext", "its metadata is not YAML"),
        (b"---\nsince: 2024-13-45\n---\ntext", "its metadata is not YAML"),
        (b"---\n- mit\n---\ntext", "its metadata must be names with values"),
        (b"\n---\nlicense: mit\n# text", 'its metadata starts with "---" but has no such line at its end'),
    ],
)
def test_a_broken_file_is_named_and_left_alone(tmp_path, content, message):
    file = tmp_path / "README.md"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{file}: {message}")):
        save_card(tmp_path, DIGITS)
    assert file.read_bytes() == content
    assert os.listdir(tmp_path) == ["README.md"]


def test_a_write_that_fails_leaves_the_earlier_file(tmp_path, monkeypatch):
    file = save_card(tmp_path, DIGITS)
    before = file.read_bytes()

    def full_disk(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_card(tmp_path, LATER)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == ["README.md"]


@of_both_kinds
def test_the_card_cites_the_paper_as_the_readme_does(data):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    citation = re.search(r"```bibtex\n.*?(?=```)", readme, flags=re.DOTALL)[0]
    text = render_card(data).text
    assert citation in text
    works = re.search(r"```bibtex\n(.*?)```\n", text, flags=re.DOTALL)[1]
    own = ["shwartz2022pre", "maddox2019simple"] if data is PRIOR else []
    assert re.findall(r"^@inproceedings{(\w+),$", works, flags=re.MULTILINE) == ["harvey2024learning", *own]
    assert works.count("{") == works.count("}")
