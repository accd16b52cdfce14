import json

import pytest
import torch
from conftest import make_dataset, make_model
from huggingface_hub import ModelCard
from transformers import AutoModelForImageClassification, Trainer, TrainingArguments

from hf_deelbo import GaussianPosterior, LowRankPrior, SWAGCallback
from hf_deelbo.sharing.hub import InvalidFilesError

REPO = "alice/prior"


def make_prior(seed: int = 0) -> LowRankPrior:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"b.weight": (4, 3), "a.bias": (5,), "scale": ()}

    def draw(*first: int) -> dict[str, torch.Tensor]:
        return {name: torch.randn((*first, *shape), generator=generator) for name, shape in shapes.items()}

    return LowRankPrior(draw(), {name: t.square() for name, t in draw().items()}, draw(3), eps=0.25)


def test_loaded_it_is_the_same(tmp_path):
    prior = make_prior()
    prior.save_pretrained(tmp_path)
    loaded = LowRankPrior.from_pretrained(tmp_path)
    assert (loaded.eps, loaded.rank) == (0.25, 3)
    assert loaded.state_dict().keys() == prior.state_dict().keys()
    for name, tensor in prior.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("eps", "0.25", "'eps' expected float"),
        ("eps", 0.3, "trace_inverse is stated as .*, but is"),
        ("rank", 4, "rank is stated as 4, but is 3"),
        ("num_parameters", 17, "num_parameters is stated as 17, but is 18"),
        ("log_det", 0.0, "log_det is stated as 0.0, but is"),
        ("kind", "l2-sp", "a saved prior is of kind 'ptyl', got 'l2-sp'"),
        ("format_version", 3, "format_version is 3, .*Upgrade it"),
        ("sha256", {"prior.safetensors": "0" * 64}, "prior.safetensors: its hash is not the one in prior_config.json"),
    ],
)
def test_wrong_values(tmp_path, name, value, match):
    make_prior().save_pretrained(tmp_path)
    path = tmp_path / "prior_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    with pytest.raises(InvalidFilesError, match=match):
        LowRankPrior.from_pretrained(tmp_path)


def test_a_tensor_that_no_prior_has(tmp_path, monkeypatch):
    prior = make_prior()
    state = prior.state_dict() | {"scale.a.bias": torch.ones(5)}
    monkeypatch.setattr(prior, "state_dict", lambda: state)
    prior.save_pretrained(tmp_path)
    with pytest.raises(InvalidFilesError, match="prior.safetensors: nothing asks for its tensor 'scale.a.bias'"):
        LowRankPrior.from_pretrained(tmp_path)


def test_a_posterior_is_no_prior_and_the_other_way_round(tmp_path):
    make_prior().save_pretrained(tmp_path / "prior")
    model = make_model("vit")
    GaussianPosterior(model, ["classifier.weight", "classifier.bias"]).save_pretrained(tmp_path / "posterior")
    with pytest.raises(InvalidFilesError, match="no prior_config.json: it is no saved prior"):
        LowRankPrior.from_pretrained(tmp_path / "posterior")
    with pytest.raises(InvalidFilesError, match="no posterior_config.json: it is no saved posterior"):
        GaussianPosterior.from_pretrained(tmp_path / "prior")


class TestTheWholeChain:
    """Source task with SWAG, prior on the Hub, DE ELBo on the target task, posterior on the Hub."""

    def source_run(self, folder, resume: bool = False) -> tuple[Trainer, SWAGCallback]:
        swag = SWAGCallback(num_deviations=3, collect_every=2)
        args = TrainingArguments(
            str(folder),
            max_steps=12,
            learning_rate=0.05,
            optim="sgd",
            lr_scheduler_type="constant",
            per_device_train_batch_size=8,
            save_strategy="steps",
            save_steps=5,
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(make_model("resnet"), args, train_dataset=make_dataset("resnet", 24), callbacks=[swag])
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-5") if resume else None)
        swag.load_mean(trainer)
        return trainer, swag

    def test_chain(self, loopback_hub, monkeypatch, make_trainer, tmp_path):
        monkeypatch.setenv("HF_TOKEN", loopback_hub.add_user("alice"))
        source, swag = self.source_run(tmp_path / "source")
        swag.prior().push_to_hub(REPO, model=source.model)
        assert len(loopback_hub.commits(REPO)) == 2  # the Hub's own first one, and the push
        card = ModelCard.load(REPO)
        card.validate()
        assert "swag" in card.data.tags

        model = AutoModelForImageClassification.from_pretrained(REPO, num_labels=5, ignore_mismatched_sizes=True)
        data = [row | {"labels": index % 5} for index, row in enumerate(make_dataset("resnet", 20))]
        target = make_trainer(
            model=model, train_dataset=data, prior="ptyl", prior_name_or_path=REPO, hub_model_id="alice/target"
        )
        assert float(target.posterior.prior.mahalanobis(target.posterior.backbone)) == 0  # it starts at the mean
        target.train()
        target.push_to_hub()

        loaded = GaussianPosterior.from_pretrained("alice/target")
        assert loaded.prior.config == {"kind": "ptyl", "eps": 0.1}
        for name, deviations in swag.prior().deviations.items():
            assert torch.equal(loaded.prior.deviations[name], deviations), name
        assert float(loaded.lambda_) == pytest.approx(float(target.posterior.lambda_), rel=1e-6)

    def test_a_resumed_source_run_gives_the_same_prior(self, tmp_path):
        _, whole = self.source_run(tmp_path / "source")
        _, resumed = self.source_run(tmp_path / "source", resume=True)
        for name, tensor in whole.prior().state_dict().items():
            assert torch.equal(resumed.prior().state_dict()[name], tensor), name


def test_ptyl_without_a_prior_says_what_to_give(make_trainer):
    with pytest.raises(ValueError, match="`prior_name_or_path`.*`prior=LowRankPrior"):
        make_trainer("resnet", prior="ptyl")


def test_a_prior_elsewhere_than_the_model_is_warned_of(make_trainer, tmp_path, monkeypatch):
    swag = SWAGCallback(num_deviations=2)
    for seed in range(3):
        swag.moments.collect(make_trainer("vit", model=make_model("vit", seed)).posterior.backbone)
    swag.prior().save_pretrained(tmp_path / "prior")
    warnings = []
    monkeypatch.setattr("hf_deelbo.sharing.priors.logger.warning", warnings.append)
    make_trainer("vit", prior="ptyl", prior_name_or_path=str(tmp_path / "prior"))
    assert "does not start at the prior's mean" in warnings[0]
