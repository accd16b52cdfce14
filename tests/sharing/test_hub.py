import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from conftest import make_dataset, make_model
from huggingface_hub import ModelCard, metadata_load
from PIL import Image
from transformers import AutoModelForImageClassification, ResNetConfig, ViTImageProcessor, pipeline

from hf_deelbo import GaussianPosterior
from hf_deelbo.sharing.hub import InvalidFilesError, public_name, push_folder

REPO = "alice/posterior"
FILES = {"config.json", "model.safetensors", "posterior_config.json", "posterior.safetensors", "README.md"}
INPUTS = torch.stack([row["pixel_values"] for row in make_dataset("resnet", 5)])


@pytest.fixture
def alice(loopback_hub, monkeypatch) -> str:
    """Logged in as alice."""
    token = loopback_hub.add_user("alice")
    monkeypatch.setenv("HF_TOKEN", token)
    return token


def published(hub, repo: str = REPO) -> set[str]:
    return set(hub.commits(repo)[0].files) - {".gitattributes"}


def pushes(hub, repo: str = REPO) -> list[str]:
    """Messages, oldest first, without the Hub's own first commit."""
    return [commit.message for commit in hub.commits(repo)][::-1][1:]


class TestPushAndDownload:
    PREDICT = """
        import sys, torch
        from hf_deelbo import GaussianPosterior

        torch.set_num_threads(1)
        inputs = torch.load(sys.argv[1], weights_only=True)
        posterior = GaussianPosterior.from_pretrained("alice/posterior")
        torch.save([posterior.predict_proba({"pixel_values": inputs}, n) for n in (0, 4)], sys.argv[2])
    """

    def test_train_push_and_predict_in_a_new_process(self, loopback_hub, alice, make_trainer, tmp_path):
        trainer = make_trainer("resnet", hub_model_id=REPO, num_saved_samples=4)
        trainer.train()
        trainer.de_elbo(num_samples=2)
        trainer.push_to_hub()
        assert published(loopback_hub) == FILES
        assert pushes(loopback_hub) == ["End of training"]

        torch.save(INPUTS, tmp_path / "inputs.pt")
        command = [sys.executable, "-c", textwrap.dedent(self.PREDICT), "inputs.pt", "probabilities.pt"]
        env = os.environ | loopback_hub.env(tmp_path / "empty_cache")
        subprocess.run(command, env=env, cwd=tmp_path, check=True)
        elsewhere = torch.load(tmp_path / "probabilities.pt", weights_only=True)
        for num_samples, probabilities in zip((0, 4), elsewhere, strict=True):
            assert torch.equal(probabilities, trainer.posterior.predict_proba({"pixel_values": INPUTS}, num_samples))

    def test_what_was_downloaded_is_not_downloaded_again(self, loopback_hub, alice, make_trainer):
        make_trainer("resnet").posterior.push_to_hub(REPO)
        GaussianPosterior.from_pretrained(REPO)
        moved = loopback_hub.bytes_sent
        assert moved > 0
        GaussianPosterior.from_pretrained(REPO)
        assert loopback_hub.bytes_sent == moved

    def test_what_comes_back_is_all_that_was_learned(self, loopback_hub, alice, make_trainer):
        trainer = make_trainer("vit")
        trainer.train()
        trainer.de_elbo(num_samples=2)
        trainer.posterior.push_to_hub(REPO, private=True)
        loaded = GaussianPosterior.from_pretrained(REPO)
        assert loaded.de_elbo == trainer.posterior.de_elbo
        for name, tensor in trainer.posterior.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name

    def test_pipeline_gives_the_predictions_of_the_mean(self, loopback_hub, alice, make_trainer):
        processor = ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
        config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic", num_labels=3)
        model = AutoModelForImageClassification.from_config(config)
        data = [{"pixel_values": torch.randn(3, 8, 8), "labels": index % 3} for index in range(12)]
        trainer = make_trainer(model=model, train_dataset=data, trainer={"processing_class": processor})
        trainer.args.hub_model_id = REPO
        trainer.train()
        trainer.push_to_hub()
        image = Image.effect_noise((20, 10), 80).convert("RGB")
        expected = trainer.posterior.predict_proba(processor(image, return_tensors="pt"))[0]
        answers = pipeline("image-classification", REPO)(image, top_k=3)
        scores = {answer["label"]: answer["score"] for answer in answers}
        assert [scores[model.config.id2label[i]] for i in range(3)] == pytest.approx(expected.tolist(), abs=1e-6)

    def test_revisions(self, loopback_hub, alice, make_trainer):
        trainer = make_trainer("vit")
        first = trainer.posterior.push_to_hub(REPO).oid
        trainer.train()
        trainer.posterior.push_to_hub(REPO)
        trainer.posterior.push_to_hub(REPO, revision="next")
        sigma = float(trainer.posterior.sigma)
        assert float(GaussianPosterior.from_pretrained(REPO, revision=first).sigma) == pytest.approx(0.05)
        assert float(GaussianPosterior.from_pretrained(REPO, revision="next").sigma) == sigma != pytest.approx(0.05)
        with pytest.raises(OSError, match="has no revision 'none'"):
            GaussianPosterior.from_pretrained(REPO, revision="none")

    def test_a_posterior_is_the_prior_of_the_next_task(self, loopback_hub, alice, make_trainer):
        first = make_trainer("resnet", prior="l2-zero")
        first.train()
        first.posterior.push_to_hub(REPO)
        model = AutoModelForImageClassification.from_pretrained(REPO, num_labels=5, ignore_mismatched_sizes=True)
        with torch.no_grad():  # a prior around where the model stands would not be it
            for parameter in model.parameters():
                parameter += 0.01
        data = [row | {"labels": index % 5} for index, row in enumerate(make_dataset("resnet", 20))]
        trainer = make_trainer(model=model, train_dataset=data, prior="posterior", prior_name_or_path=REPO)
        for name, mean in trainer.posterior.prior.mean.items():
            assert torch.equal(mean, first.posterior.backbone[name]), name
        start = float(trainer.posterior.lambda_)
        trainer.train()
        # learned again, from sigma^2 and the distance on
        assert start == pytest.approx(0.05**2 + 0.01**2, rel=1e-4)
        assert float(trainer.posterior.lambda_) != start

    def test_a_prior_of_another_architecture_is_refused(self, loopback_hub, alice, make_trainer):
        make_trainer("vit").posterior.push_to_hub(REPO)
        with pytest.raises(ValueError, match="parameter names are not those"):
            make_trainer("resnet", prior="posterior", prior_name_or_path=REPO)


class TestTrainerPushes:
    @pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint", "all_checkpoints"])
    def test_every_strategy_publishes_the_same_files(self, strategy, loopback_hub, alice, make_trainer):
        trainer = make_trainer(
            "resnet",
            push_to_hub=True,
            hub_model_id=REPO,
            hub_strategy=strategy,
            hub_always_push=True,
            save_strategy="steps",
            save_steps=2,
            num_saved_samples=2,
        )
        trainer.train()
        trainer._finish_current_push()
        during = pushes(loopback_hub)
        assert during == ([] if strategy == "end" else [f"Training in progress, step {step}" for step in (2, 4)])
        for commit in loopback_hub.commits(REPO)[: len(during)]:
            assert set(commit.files) >= FILES
            assert json.loads(commit.files["posterior_config.json"])["sample_seeds"] == [0, 1]
        checkpoints = {name.split("/")[0] for name in published(loopback_hub) if "/" in name}
        expected = {"checkpoint": {"last-checkpoint"}, "all_checkpoints": {"checkpoint-2", "checkpoint-4"}}
        assert checkpoints == expected.get(strategy, set())

        trainer.push_to_hub()
        assert pushes(loopback_hub) == (during or ["End of training"])  # nothing new is no commit
        assert published(loopback_hub) >= FILES
        assert not any("training_args" in name for name in published(loopback_hub))
        before = len(loopback_hub.requests)
        loaded = GaussianPosterior.from_pretrained(REPO)
        assert not any("checkpoint" in path for _, path, _ in loopback_hub.requests[before:])
        expected = trainer.posterior.predict_proba({"pixel_values": INPUTS}, 2)
        assert torch.equal(loaded.predict_proba({"pixel_values": INPUTS}, 2), expected)

    def test_a_push_in_training_that_fails_is_told_and_training_goes_on(
        self, loopback_hub, alice, make_trainer, monkeypatch
    ):
        warnings = []
        monkeypatch.setattr("hf_deelbo.trainer.logger.warning", warnings.append)
        trainer = make_trainer(
            push_to_hub=True, hub_model_id=REPO, hub_always_push=True, save_strategy="steps", save_steps=2
        )
        loopback_hub.fail("500", path="/commit/", at=1, times=100)
        trainer.train()
        trainer._finish_current_push()
        assert trainer.state.global_step == 4
        assert pushes(loopback_hub) == []
        assert any("failed" in message for message in warnings)

    def test_the_card_is_valid_and_kept(self, loopback_hub, alice, make_trainer):
        data = make_dataset("vit")
        trainer = make_trainer("vit", hub_model_id=REPO, trainer={"eval_dataset": data})
        trainer.train()
        trainer.evaluate()
        trainer.push_to_hub(license="apache-2.0", dataset="uoft-cs/cifar10")
        card = ModelCard.load(REPO)
        card.validate()
        assert card.data.license == "apache-2.0"
        nll = next(result for result in card.data.eval_results if result.metric_type == "nll")
        assert nll.metric_value == pytest.approx(trainer.evaluate()["eval_loss"])
        readme = os.path.join(trainer.args.output_dir, "README.md")
        with open(readme, "a") as file:
            file.write("\nMy own words.\n")
        trainer.push_to_hub(license="mit")
        assert "My own words." in ModelCard.load(REPO).text
        assert metadata_load(readme)["license"] == "mit"


class TestRefused:
    def test_private_without_its_token(self, loopback_hub, alice, make_trainer, monkeypatch):
        make_trainer().posterior.push_to_hub(REPO, private=True)
        bob = loopback_hub.add_user("bob")
        monkeypatch.delenv("HF_TOKEN")
        for token in (None, bob, "hf_wrong"):
            with pytest.raises(OSError, match="not on the Hub, or is private.*token"):
                GaussianPosterior.from_pretrained(REPO, token=token)
        assert GaussianPosterior.from_pretrained(REPO, token=alice).num_parameters

    @pytest.mark.parametrize("token", [None, "hf_wrong", "bob"])
    def test_push_without_the_right_token(self, token, loopback_hub, make_trainer):
        loopback_hub.add_user("alice")
        token = loopback_hub.add_user("bob") if token == "bob" else token
        with pytest.raises(PermissionError, match="alice/posterior.*hf auth login"):
            make_trainer().posterior.push_to_hub(REPO, token=token)
        assert loopback_hub.commits(REPO) == []

    def test_a_plain_model_is_refused_before_its_weights_are_downloaded(self, loopback_hub, alice, tmp_path):
        make_model("vit").save_pretrained(tmp_path / "plain")
        push_folder(tmp_path / "plain", REPO, commit_message="a plain model")
        with pytest.raises(InvalidFilesError, match="no saved posterior.*AutoModel"):
            GaussianPosterior.from_pretrained(REPO)
        assert loopback_hub.bytes_sent < (tmp_path / "plain" / "model.safetensors").stat().st_size

    def test_no_such_repository_no_hub_and_no_name(self, loopback_hub):
        with pytest.raises(OSError, match="not on the Hub, or is private"):
            GaussianPosterior.from_pretrained("alice/nothing")
        with pytest.raises(OSError, match="not in the cache"):
            GaussianPosterior.from_pretrained("alice/nothing", local_files_only=True)
        loopback_hub.fail("cut", times=1000)
        with pytest.raises(OSError, match="not in the cache|could not be downloaded"):
            GaussianPosterior.from_pretrained("alice/nothing")

    def test_a_bad_repository_name(self, loopback_hub, alice, make_trainer):
        with pytest.raises(ValueError, match="repo_id: 'a/b/c'"):
            make_trainer().posterior.push_to_hub("a/b/c")


class TestFaults:
    """At each request of a push and of a download, one at a time."""

    @pytest.mark.parametrize("fault", ["500", "cut"])
    def test_an_interrupted_push_publishes_nothing(self, fault, loopback_hub, alice, make_trainer):
        posterior = make_trainer("resnet").posterior
        posterior.push_to_hub("alice/clean")
        for at in range(1, len(loopback_hub.requests) + 1):
            repo = f"alice/fault-{at}"
            loopback_hub.fail(fault, at=at, times=1000)
            with pytest.raises(OSError, match=repo):
                posterior.push_to_hub(repo)
            loopback_hub.heal()
            assert pushes(loopback_hub, repo) == []
            posterior.push_to_hub(repo)
            whole, clean = (loopback_hub.commits(name)[0].files for name in (repo, "alice/clean"))
            assert whole == clean | {"README.md": whole["README.md"]}  # which names its repository

    @pytest.mark.parametrize("fault", ["500", "cut", "truncate"])
    def test_an_interrupted_download_is_completed_by_the_next(
        self, fault, loopback_hub, alice, make_trainer, assert_same, tmp_path
    ):
        posterior = make_trainer("resnet").posterior
        posterior.push_to_hub(REPO)
        before = len(loopback_hub.requests)
        GaussianPosterior.from_pretrained(REPO, cache_dir=tmp_path / "clean")
        failed, requests = 0, len(loopback_hub.requests) - before
        for at in range(1, requests + 1):
            cache = tmp_path / f"{fault}-{at}"
            loopback_hub.fail(fault, at=at, times=1000)
            try:
                GaussianPosterior.from_pretrained(REPO, cache_dir=cache)
            except OSError:  # nothing else is raised; some requests are not needed
                failed += 1
            loopback_hub.heal()
            loaded = GaussianPosterior.from_pretrained(REPO, cache_dir=cache)
            assert_same(loaded.state_dict(), posterior.state_dict())
            assert_same(loaded.model.state_dict(), posterior.model.state_dict())
            shutil.rmtree(cache)
        assert requests >= 8
        assert failed >= requests / 2


class TestPublicName:
    @pytest.mark.parametrize("name", ["microsoft/resnet-50", "timm/resnet50.a1_in1k"])
    def test_of_the_hub(self, name):
        assert public_name(name) == name

    @pytest.mark.parametrize(
        "name", ["", None, "/home/me/model", "./model", "../model", "~/model", "C:\\me\\model", "a/b/c", "resnet"]
    )
    def test_not_of_the_hub(self, name):
        assert public_name(name) is None

    def test_a_folder_that_looks_like_an_id(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        os.makedirs("me/model")
        assert public_name("me/model") is None


def test_only_what_belongs_to_it_is_published(loopback_hub, alice, make_trainer, tmp_path):
    make_trainer().posterior.save_pretrained(tmp_path)
    for name in ("training_args.bin", "checkpoint-4/optimizer.pt", "runs/events", ".git/config", "_private", "a.pkl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    for name in ("LICENSE", "figures/training.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    push_folder(tmp_path, REPO, commit_message="all")
    assert published(loopback_hub) == (FILES - {"README.md"}) | {"LICENSE", "figures/training.png"}


def test_killed_while_saving_the_previous_save_is_whole(make_trainer, tmp_path, monkeypatch):
    folder = tmp_path / "posterior"
    trainer = make_trainer("resnet")
    trainer.save_model(folder)
    sigma = float(trainer.posterior.sigma)
    trainer.train()

    def full_disk(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr("hf_deelbo.sharing.posterior_files.save_tensors", full_disk)
    with pytest.raises(OSError, match="no space"):
        trainer.save_model(folder)
    assert float(GaussianPosterior.from_pretrained(folder).sigma) == sigma
    assert set(os.listdir(folder)) == FILES - {"README.md"}
