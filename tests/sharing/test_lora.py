"""Posteriors over PEFT adapters: what is saved, and the base model that it is loaded into."""

import json
import os
import random
import shutil
import sys
import time

import datasets
import pytest
import torch
from conftest import collate, load_example, make_dataset, make_model
from huggingface_hub import ModelCard, metadata_load
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertTokenizerFast,
    PreTrainedModel,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from hf_deelbo import DEELBo, GaussianPosterior
from hf_deelbo.cli import main
from hf_deelbo.sharing.files import sha256_of
from hf_deelbo.sharing.hub import InvalidFilesError, push_folder
from hf_deelbo.sharing.models import auto_class_of
from hf_deelbo.weights.parameters import head_parameter_names

CONFIG, TENSORS = "posterior_config.json", "posterior.safetensors"
ADAPTER_CONFIG, ADAPTERS = "adapter_config.json", "adapter_model.safetensors"
FILES = {CONFIG, TENSORS, ADAPTER_CONFIG, ADAPTERS}
NAMES = {0: "ant", 1: "bee", 2: "cat", 3: "dog"}
LABELS = {"id2label": NAMES, "label2id": {name: index for index, name in NAMES.items()}}
TARGETS = {
    "bert": ["query", "value"],
    "vit": ["q_proj", "v_proj", "query", "value"],  # of which older transformers have the second two
    "resnet": ["convolution"],
}


def load_from(base: str, kind: str = "bert", **kwargs) -> PreTrainedModel:
    """With a new head of four classes."""
    auto_class = AutoModelForSequenceClassification if kind == "bert" else AutoModelForImageClassification
    return auto_class.from_pretrained(base, **LABELS, ignore_mismatched_sizes=True, **kwargs)


def adapted(model: PreTrainedModel, kind: str = "bert", **changes):
    task = {"task_type": "SEQ_CLS"} if kind == "bert" else {"modules_to_save": ["classifier"]}
    return get_peft_model(model, LoraConfig(**({"r": 2, "target_modules": TARGETS[kind]} | task | changes)))


def inputs_of(kind: str = "bert") -> dict[str, torch.Tensor]:
    inputs = collate(make_dataset(kind, 6))
    del inputs["labels"]
    return inputs


def posterior_over(model, kind: str = "bert", grouping: str = "all") -> GaussianPosterior:
    """Away from its prior and its start, as if it had been trained."""
    posterior = GaussianPosterior(
        model, head_parameter_names(model), grouping=grouping, init_sigma=0.05, num_examples=24
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in posterior.parameters().values():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        posterior.rho += 0.2 * torch.randn(posterior.rho.shape, generator=generator)
    model.train()(**inputs_of(kind))  # moves batch-norm statistics
    model.eval()
    posterior.update_prior_variances()
    posterior.recompute_batch_norm([inputs_of(kind)], num_samples=3)
    kl = {"kl_backbone": float(posterior.kl.backbone), "kl_head": float(posterior.kl.head)}
    posterior.de_elbo = DEELBo(1.25, **kl, kappa=posterior.kappa, num_examples=24, nll_standard_error=0.1)
    return posterior


@pytest.fixture
def base(tmp_path) -> str:
    make_model("bert").save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


@pytest.fixture
def posterior(base) -> GaussianPosterior:
    return posterior_over(adapted(load_from(base)))


@pytest.fixture
def folder(posterior, tmp_path):
    posterior.save_pretrained(tmp_path / "posterior")
    return tmp_path / "posterior"


def assert_equal(loaded: GaussianPosterior, posterior: GaussianPosterior, kind: str = "bert") -> None:
    """To the bit, in all that decides what it does."""
    for one, other in (
        (loaded.parameters(), posterior.parameters()),
        (loaded.state_dict(), posterior.state_dict()),
        (dict(loaded.model.named_buffers()), dict(posterior.model.named_buffers())),
    ):
        assert list(one) == list(other)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert (loaded.groups, loaded.kl, loaded.de_elbo) == (posterior.groups, posterior.kl, posterior.de_elbo)
    assert loaded.head.keys() == posterior.head.keys()
    assert loaded.model.config.id2label == posterior.model.config.id2label
    for num_samples in (0, 3):
        expected = posterior.predict_proba(inputs_of(kind), num_samples)
        assert torch.equal(loaded.predict_proba(inputs_of(kind), num_samples), expected)


# ---- Saved and loaded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "grouping"), [("bert", "all"), ("vit", "tensor"), ("resnet", "tensor")])
def test_loaded_it_is_the_same_to_the_bit(kind, grouping, tmp_path):
    make_model(kind).save_pretrained(tmp_path / "base")
    posterior = posterior_over(adapted(load_from(tmp_path / "base", kind), kind), kind, grouping)
    posterior.save_pretrained(tmp_path / "posterior")
    assert set(os.listdir(tmp_path / "posterior")) == FILES
    loaded = GaussianPosterior.from_pretrained(tmp_path / "posterior")
    assert_equal(loaded, posterior, kind)
    start = load_from(tmp_path / "base", kind).eval()(**inputs_of(kind)).logits.softmax(-1)
    assert (loaded.predict_proba(inputs_of(kind)) - start).abs().max() > 0.05
    # and again, from what was loaded
    loaded.save_pretrained(tmp_path / "again")
    assert_equal(GaussianPosterior.from_pretrained(tmp_path / "again"), posterior, kind)


def test_only_the_adapters_are_written(folder, posterior):
    tensors = load_file(folder / ADAPTERS)
    assert sum(tensor.numel() for tensor in tensors.values()) == posterior.num_parameters
    content = json.loads((folder / CONFIG).read_text())
    assert content["sha256"] == {name: sha256_of(folder / name) for name in FILES - {CONFIG}}
    assert "peft" in content["library_versions"]


def test_peft_alone_loads_the_mean(folder, posterior, base):
    from peft import AutoPeftModelForSequenceClassification

    shutil.copytree(base, base + "-headless")
    weights = load_file(f"{base}-headless/model.safetensors")
    weights = {name: tensor for name, tensor in weights.items() if not name.startswith("classifier")}
    save_file(weights, f"{base}-headless/model.safetensors", {"format": "pt"})
    content = json.loads((folder / ADAPTER_CONFIG).read_text()) | {"base_model_name_or_path": f"{base}-headless"}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(content))
    model = AutoPeftModelForSequenceClassification.from_pretrained(str(folder), num_labels=4).eval()
    assert torch.equal(model(**inputs_of()).logits.softmax(-1), posterior.predict_proba(inputs_of()))


def test_the_frozen_part_of_a_new_head_comes_back(tmp_path):
    """Of two layers, one is trained; the other is as it was drawn when the model was loaded."""
    tiny = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = RobertaConfig(vocab_size=50, max_position_embeddings=20, **tiny)
    RobertaForSequenceClassification(config).roberta.save_pretrained(tmp_path / "base")
    model = adapted(load_from(tmp_path / "base"), task_type=None, modules_to_save=["out_proj"])
    assert not model.base_model.model.classifier.dense.weight.requires_grad
    posterior = posterior_over(model)
    posterior.save_pretrained(tmp_path / "posterior")
    torch.manual_seed(99)
    assert_equal(GaussianPosterior.from_pretrained(tmp_path / "posterior"), posterior)


def test_it_is_in_eval_mode_as_all_that_is_loaded(base, tmp_path):
    posterior = posterior_over(adapted(load_from(base), lora_dropout=0.5))
    posterior.save_pretrained(tmp_path / "posterior")
    loaded = GaussianPosterior.from_pretrained(tmp_path / "posterior")
    assert not any(module.training for module in loaded.model.modules())
    assert torch.equal(loaded.model(**inputs_of()).logits.softmax(-1), posterior.predict_proba(inputs_of()))


def test_what_is_frozen_of_the_adapters_stays_so(base, tmp_path):
    model = adapted(load_from(base))
    model.base_model.model.classifier.modules_to_save["default"].bias.requires_grad_(False)
    posterior = posterior_over(model)
    posterior.save_pretrained(tmp_path / "posterior")
    assert_equal(GaussianPosterior.from_pretrained(tmp_path / "posterior"), posterior)


def test_settings_of_the_base_that_only_the_code_knew_come_back(base, tmp_path):
    posterior = posterior_over(adapted(load_from(base, pad_token_id=7)))
    posterior.save_pretrained(tmp_path / "posterior")
    assert GaussianPosterior.from_pretrained(tmp_path / "posterior").model.config.pad_token_id == 7


def test_it_is_the_prior_of_a_next_task(folder, posterior, base, make_trainer):
    model = GaussianPosterior.from_pretrained(folder).model
    with torch.no_grad():  # a prior around where the model stands would not be it
        for parameter in model.parameters():
            parameter += 0.01
    prior = make_trainer("bert", model=model, prior="posterior", prior_name_or_path=str(folder)).posterior.prior
    assert prior.mean.keys() == posterior.backbone.keys()
    for name, mean in posterior.backbone.items():
        assert torch.equal(prior.mean[name], mean), name


# ---- The base model ------------------------------------------------------------------------------------------------


def test_another_base_model_is_refused(folder, base):
    weights = load_file(f"{base}/model.safetensors")
    name = "bert.encoder.layer.1.output.dense.weight"
    weights[name][0, 0] = torch.nextafter(weights[name][0, 0], torch.tensor(9.0))
    save_file(weights, f"{base}/model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidFilesError, match="base model '.*base' has other weights than the one .*base_model="):
        GaussianPosterior.from_pretrained(folder)


def test_a_base_model_that_was_moved_is_said_and_can_be_named(folder, posterior, base, tmp_path):
    os.rename(base, tmp_path / "moved")
    with pytest.raises(
        OSError, match="adapters, and their base model '.*base' cannot be loaded.*base_model="
    ) as error:
        GaussianPosterior.from_pretrained(folder)
    assert not isinstance(error.value, InvalidFilesError)
    loaded = GaussianPosterior.from_pretrained(folder, base_model=tmp_path / "moved")
    assert_equal(loaded, posterior)
    loaded.save_pretrained(tmp_path / "again")
    assert_equal(GaussianPosterior.from_pretrained(tmp_path / "again"), posterior)


def test_without_peft_it_is_said_how_to_get_it(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="pip install peft"):
        GaussianPosterior.from_pretrained(folder)
    assert main(["predict", str(folder), "text"]) == 1
    assert "pip install peft" in capsys.readouterr().err


class TestWhatCannotBeLoadedIsNotSaved:
    def check(self, model, reason: str, tmp_path) -> None:
        assert auto_class_of(model) is None
        posterior = GaussianPosterior(model, head_parameter_names(model), num_examples=5)
        with pytest.raises(ValueError, match=f"save_pretrained: .*{reason}"):
            posterior.save_pretrained(tmp_path / "posterior")
        assert not (tmp_path / "posterior").exists()

    def test_a_base_without_a_name(self, tmp_path):
        self.check(adapted(make_model("bert")), "the base model of the adapters has no name", tmp_path)

    def test_a_weight_beside_the_adapters(self, base, tmp_path):
        model = adapted(load_from(base))
        model.base_model.model.bert.pooler.dense.bias.requires_grad_()
        self.check(model, "pooler.dense.bias' is trained, but is no part.*modules_to_save", tmp_path)

    def test_two_adapters(self, base, tmp_path):
        model = adapted(load_from(base))
        model.add_adapter("second", LoraConfig(task_type="SEQ_CLS", r=1, target_modules=["query"]))
        self.check(model, "it takes one adapter", tmp_path)

    def test_an_adapter_of_another_name(self, base, tmp_path):
        lora = LoraConfig(task_type="SEQ_CLS", r=1, target_modules=["query"])
        self.check(get_peft_model(load_from(base), lora, adapter_name="mine"), "called 'default'", tmp_path)

    def test_prompts(self, base, tmp_path):
        model = get_peft_model(load_from(base), PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=2))
        self.check(model, "one adapter of weights", tmp_path)

    def test_adapters_of_transformers(self, base, tmp_path):
        model = load_from(base)
        model.add_adapter(LoraConfig(r=1, target_modules=["query"]))
        model.classifier.requires_grad_()
        self.check(model, "added by transformers.*get_peft_model", tmp_path)


# ---- Bad files -----------------------------------------------------------------------------------------------------


def rewrite(path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def make_hashes_fit(folder) -> None:
    rewrite(folder / CONFIG, sha256={name: sha256_of(folder / name) for name in FILES - {CONFIG}})


class TestBadFiles:
    def check(self, folder, match: str) -> None:
        with pytest.raises(InvalidFilesError, match=match):
            GaussianPosterior.from_pretrained(folder)

    @pytest.mark.parametrize("name", [ADAPTER_CONFIG, ADAPTERS])
    def test_missing(self, folder, name):
        os.remove(folder / name)
        self.check(folder, f"{name} is missing")

    @pytest.mark.parametrize("name", [ADAPTER_CONFIG, ADAPTERS])
    def test_changed(self, folder, name):
        content = bytearray((folder / name).read_bytes())
        content[-9] ^= 4
        (folder / name).write_bytes(content)
        self.check(folder, f"{name}: its hash is not the one")

    @pytest.mark.parametrize("name", ["classifier.bias", "bert.encoder.layer.1.attention.self.query.lora_A.weight"])
    def test_an_adapter_that_is_gone(self, folder, name):
        """Peft would draw the second anew, with a warning."""
        tensors = load_file(folder / ADAPTERS)
        tensors.pop(f"base_model.model.{name}")
        save_file(tensors, folder / ADAPTERS, {"format": "pt"})
        make_hashes_fit(folder)
        self.check(folder, f"do not fit each other .*base_model.model.{name}")

    @pytest.mark.parametrize("name", ["model.base_model.model.classifier.weight", "model."])
    def test_a_tensor_of_the_model_that_does_not_belong(self, folder, name):
        tensors = load_file(folder / TENSORS)
        save_file(tensors | {name: torch.ones(2)}, folder / TENSORS)
        make_hashes_fit(folder)
        self.check(folder, f"{TENSORS}: nothing asks for its tensor '{name}'")

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("peft_type", "NO_SUCH_TYPE"),
            ("peft_type", "PROMPT_TUNING"),
            ("task_type", "POETRY"),
            ("r", "2"),
            ("r", 3),
            ("target_modules", ["no_such_module"]),
            ("target_modules", "("),
            ("target_modules", ["query", "value", "key"]),
            ("modules_to_save", ["classifier", "pooler"]),
            ("base_model_name_or_path", None),
            ("base_model_name_or_path", ["a"]),
            ("layers_to_transform", [0]),
        ],
    )
    def test_a_description_of_adapters_that_is_wrong(self, folder, name, value):
        rewrite(folder / ADAPTER_CONFIG, **{name: value})
        make_hashes_fit(folder)
        self.check(folder, "do not fit each other")

    @pytest.mark.parametrize(
        ("value", "match"),
        [
            ({"sha256": ""}, "base: must have a config and a sha256, got sha256"),
            ({"config": {}, "sha256": 3}, "base: must have a config and a sha256"),
            ("x", "Field 'base'"),
            (None, f"{ADAPTER_CONFIG}: transformers would load adapters and another model by it"),
        ],
    )
    def test_a_base_that_is_none(self, folder, value, match):
        rewrite(folder / CONFIG, base=value)
        self.check(folder, match)

    @pytest.mark.parametrize(
        ("auto_class", "match"),
        [("eval", "KeyError: 'eval'"), ("AutoModelForImageClassification", "Unrecognized configuration")],
    )
    def test_a_class_that_does_not_load_the_base(self, folder, auto_class, match):
        rewrite(folder / CONFIG, auto_class=auto_class)
        self.check(folder, match)

    @pytest.mark.parametrize(
        "changes",
        [
            {"model_type": "no-such"},
            {"hidden_size": 32},
            {"hidden_size": "x"},
            {"id2label": {"0": "a"}},
            {"num_hidden_layers": 1},
            {"dtype": "float16"},
        ],
    )
    def test_a_configuration_of_the_base_that_is_wrong(self, folder, changes):
        base = json.loads((folder / CONFIG).read_text())["base"]
        rewrite(folder / CONFIG, base=base | {"config": base["config"] | changes})
        self.check(folder, "do not fit each other")

    def test_code_of_the_base_is_never_run(self, folder, base, tmp_path):
        (tmp_path / "base" / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
        rewrite(tmp_path / "base" / "config.json", auto_map={"AutoModelForSequenceClassification": "code.Model"})
        described = json.loads((folder / CONFIG).read_text())["base"]
        described["config"]["auto_map"] = {"AutoModelForSequenceClassification": "code.Model"}
        rewrite(folder / CONFIG, base=described)
        assert GaussianPosterior.from_pretrained(folder).num_parameters
        assert not (tmp_path / "ran").exists()

    def test_a_pickle_is_not_read(self, folder, base):
        weights = load_file(f"{base}/model.safetensors")
        torch.save(weights, f"{base}/pytorch_model.bin")
        os.remove(f"{base}/model.safetensors")
        with pytest.raises(OSError, match="cannot be loaded"):
            GaussianPosterior.from_pretrained(folder)


class TestHostileFiles:
    """The hashes agree, as whoever changes a file computes them too."""

    def check(self, folder, *in_message: str) -> None:
        start = time.process_time()
        with pytest.raises(InvalidFilesError) as caught:
            GaussianPosterior.from_pretrained(folder)
        assert time.process_time() - start < 5
        for part in (str(folder), *in_message):
            assert part in str(caught.value)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("part", ["classifier.bias", "bert.encoder.layer.1.attention.self.query.lora_A.weight"])
    def test_numbers_that_no_adapter_has(self, folder, part, value):
        tensors = load_file(folder / ADAPTERS)
        tensors[f"base_model.model.{part}"].view(-1)[0] = value
        save_file(tensors, folder / ADAPTERS, {"format": "pt"})
        make_hashes_fit(folder)
        self.check(folder, "must be finite")

    @pytest.mark.parametrize(
        "dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
    )
    def test_types_that_no_adapter_has(self, folder, dtype):
        tensors = load_file(folder / ADAPTERS)
        name = "base_model.model.classifier.bias"
        save_file(tensors | {name: tensors[name].to(dtype)}, folder / ADAPTERS, {"format": "pt"})
        make_hashes_fit(folder)
        self.check(folder, ADAPTERS, name)

    @pytest.mark.parametrize("value", [float("nan"), -1.0])
    def test_statistics_of_the_model(self, tmp_path, value):
        make_model("resnet").save_pretrained(tmp_path / "base")
        posterior = posterior_over(adapted(load_from(tmp_path / "base", "resnet"), "resnet"), "resnet")
        posterior.save_pretrained(tmp_path / "posterior")
        tensors = load_file(tmp_path / "posterior" / TENSORS)
        name = next(name for name in tensors if name.startswith("model.") and name.endswith("running_var"))
        tensors[name][0] = value
        save_file(tensors, tmp_path / "posterior" / TENSORS)
        make_hashes_fit(tmp_path / "posterior")
        self.check(tmp_path / "posterior", TENSORS, name)

    @pytest.mark.parametrize("name", [ADAPTER_CONFIG, ADAPTERS])
    def test_a_file_without_a_hash(self, folder, name):
        hashes = json.loads((folder / CONFIG).read_text())["sha256"]
        hashes.pop(name)
        rewrite(folder / CONFIG, sha256=hashes)
        self.check(folder, f"{name}: it has no hash")

    @pytest.mark.parametrize(
        "changes",
        [
            {"r": 10**9},
            {"r": 10**6},
            {"r": 10**30},
            {"rank_pattern": {"query": 10**9}},
            {"lora_alpha": 10**400},
            {"layers_to_transform": [10**9]},
            {"target_modules": "(.*)*x"},
            {"target_modules": "(([a-z])+.)+[A-Z]([a-z])+$"},
            {"target_modules": ".*.*.*.*.*.*.*.*.*.*x"},
            {"rank_pattern": {"(a|aa|.)+$x": 4}},
            {"exclude_modules": "(a+){10}x"},
        ],
        ids=lambda changes: str(changes)[:40],
    )
    def test_a_description_that_asks_for_much(self, folder, changes):
        rewrite(folder / ADAPTER_CONFIG, **changes)
        make_hashes_fit(folder)
        self.check(folder, ADAPTER_CONFIG)

    @pytest.mark.parametrize("pattern", [r".*\.(query|value)", r".*(encoder\.)?layer\.\d+\..*(query|value)$"])
    def test_patterns_that_people_write_are_taken(self, base, tmp_path, pattern):
        posterior = posterior_over(adapted(load_from(base), target_modules=pattern))
        posterior.save_pretrained(tmp_path / "posterior")
        assert_equal(GaussianPosterior.from_pretrained(tmp_path / "posterior"), posterior)

    @pytest.mark.parametrize(
        "changes",
        [
            {"num_labels": 10**9},
            {"num_hidden_layers": 20_000},
            {"num_hidden_layers": 10**12},
            {"hidden_size": 10**6, "num_attention_heads": 1},
            {"vocab_size": 10**9},
            {"intermediate_size": 10**7},
        ],
        ids=str,
    )
    def test_a_base_that_asks_for_much(self, folder, changes):
        base = json.loads((folder / CONFIG).read_text())["base"]
        rewrite(folder / CONFIG, base=base | {"config": base["config"] | changes})
        self.check(folder)

    def test_weights_of_the_base_from_elsewhere(self, folder, base):
        os.rename(f"{base}/model.safetensors", f"{base}/../outside.safetensors")
        index = {"metadata": {}, "weight_map": {"classifier.bias": "../outside.safetensors"}}
        with open(f"{base}/model.safetensors.index.json", "w") as file:
            json.dump(index, file)
        with pytest.raises(InvalidFilesError, match="is not the name of a safetensors file in the same folder"):
            GaussianPosterior.from_pretrained(folder)

    def test_a_description_of_2_gigabytes(self, folder):
        os.truncate(folder / ADAPTER_CONFIG, 2 * 2**30)
        hashes = json.loads((folder / CONFIG).read_text())["sha256"]
        hashes.pop(ADAPTER_CONFIG)
        rewrite(folder / CONFIG, sha256=hashes)
        self.check(folder, ADAPTER_CONFIG)


def test_150_damaged_copies_are_refused_or_load_equal(folder, posterior, monkeypatch):
    monkeypatch.setattr("hf_deelbo.sharing.hub.logger.warning", lambda message: None)
    generator, refused = random.Random(0), 0
    for index in range(150):
        name = (CONFIG, TENSORS, ADAPTERS, ADAPTER_CONFIG)[index % 4]
        whole = (folder / name).read_bytes()
        if name == CONFIG:
            values = json.loads(whole)
            key = generator.choice(sorted(values))
            values[key] = generator.choice([None, -1, 1e9, "", [], {}, True, values[generator.choice(sorted(values))]])
            content = json.dumps(values).encode()
        else:
            content = bytearray(whole)
            content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        (folder / name).write_bytes(content)
        try:
            loaded = GaussianPosterior.from_pretrained(folder)
        except InvalidFilesError:
            refused += 1
        else:
            assert_equal(loaded, posterior)
        (folder / name).write_bytes(whole)
    assert refused > 120


# ---- Trained and shared --------------------------------------------------------------------------------------------


def test_the_trainer_saves_what_is_loaded(base, make_trainer, tmp_path):
    trainer = make_trainer("bert", model=adapted(load_from(base)), grouping="layer", sigma_update="closed-form")
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    assert set(os.listdir(tmp_path / "saved")) == FILES
    trainer.model.eval()
    assert_equal(GaussianPosterior.from_pretrained(tmp_path / "saved"), trainer.posterior)


REPO, BASE = "alice/adapters", "alice/base"


@pytest.fixture
def alice(loopback_hub, monkeypatch) -> str:
    """Logged in as alice, who has published the base model."""
    token = loopback_hub.add_user("alice")
    monkeypatch.setenv("HF_TOKEN", token)
    make_model("bert").push_to_hub(BASE)
    return token


def test_push_and_load_from_the_hub(loopback_hub, alice, tmp_path):
    posterior = posterior_over(adapted(load_from(BASE)), grouping="tensor")
    posterior.push_to_hub(REPO)
    (commit, *_) = loopback_hub.commits(REPO)
    assert set(commit.files) - {".gitattributes"} == FILES | {"README.md"}
    for name in (CONFIG, ADAPTER_CONFIG, "README.md"):
        assert str(tmp_path).encode() not in commit.files[name]
    content = json.loads(commit.files[CONFIG])
    assert content["base_model"] == BASE
    assert content["base_model_revision"] == loopback_hub.commits(BASE)[0].sha

    cache = tmp_path / "empty"
    assert_equal(GaussianPosterior.from_pretrained(REPO, cache_dir=cache), posterior)
    moved = loopback_hub.bytes_sent
    assert_equal(GaussianPosterior.from_pretrained(REPO, cache_dir=cache, local_files_only=True), posterior)
    assert loopback_hub.bytes_sent == moved

    # the base model goes on; the adapters belong to the commit that they were trained on
    make_model("bert", seed=1).push_to_hub(BASE)
    loaded = GaussianPosterior.from_pretrained(REPO, cache_dir=tmp_path / "later")
    assert_equal(loaded, posterior)
    loaded.push_to_hub("alice/again")
    assert_equal(GaussianPosterior.from_pretrained("alice/again", cache_dir=tmp_path / "last"), posterior)


def test_a_private_base_model_takes_the_token(loopback_hub, alice, tmp_path, monkeypatch):
    make_model("bert").push_to_hub("alice/secret", private=True)
    posterior = posterior_over(adapted(load_from("alice/secret")))
    posterior.push_to_hub(REPO)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError, match="their base model 'alice/secret' cannot be loaded"):
        GaussianPosterior.from_pretrained(REPO, cache_dir=tmp_path / "a")
    assert_equal(GaussianPosterior.from_pretrained(REPO, cache_dir=tmp_path / "a", token=alice), posterior)


def test_adapters_of_a_local_base_are_not_published(loopback_hub, alice, posterior, folder, base):
    before = len(loopback_hub.requests)
    with pytest.raises(ValueError, match="which is not on the Hub. Push that too, set .*base_model_name_or_path"):
        posterior.push_to_hub(REPO)
    assert main(["push", str(folder), REPO]) == 1
    assert len(loopback_hub.requests) == before
    # as the message says
    posterior.model.peft_config["default"].base_model_name_or_path = BASE
    posterior.push_to_hub(REPO)
    assert_equal(GaussianPosterior.from_pretrained(REPO), posterior)
    assert json.loads(loopback_hub.commits(REPO)[0].files[CONFIG])["base_model"] == BASE


def test_the_trainer_pushes_it_with_its_card(loopback_hub, alice, make_trainer):
    data = make_dataset("bert")
    trainer = make_trainer(
        "bert", model=adapted(load_from(BASE)), hub_model_id=REPO, trainer={"eval_dataset": data}, grouping="layer"
    )
    trainer.train()
    trainer.evaluate()
    trainer.push_to_hub(dataset="cornell/reviews")
    card = ModelCard.load(REPO)
    card.validate()
    assert (card.data.library_name, card.data.base_model) == ("peft", BASE)
    assert "PeftModel.from_pretrained(base" in card.text
    assert "What each layer learned" in card.text
    trainer.model.eval()
    assert_equal(GaussianPosterior.from_pretrained(REPO), trainer.posterior)
    readme = os.path.join(trainer.args.output_dir, "README.md")
    with open(readme, "a") as file:
        file.write("\nMy own words.\n")
    trainer.push_to_hub(license="mit")  # peft would write its own card over it
    assert "My own words." in ModelCard.load(REPO).text
    assert metadata_load(readme)["license"] == "mit"


def test_adapters_of_a_base_without_a_name_are_saved_but_not_loaded(make_trainer, tmp_path):
    """They are checkpoints as `Trainer` writes them."""
    trainer = make_trainer("bert", model=adapted(make_model("bert")))
    trainer.save_model(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / CONFIG).read_text())["auto_class"] is None
    with pytest.raises(InvalidFilesError, match="cannot load a model by None"):
        GaussianPosterior.from_pretrained(tmp_path / "saved")


def test_push_of_a_folder_checks_the_description(tmp_path, loopback_hub, alice):
    (tmp_path / ADAPTER_CONFIG).write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    with pytest.raises(ValueError, match="not on the Hub"):
        push_folder(tmp_path, REPO, commit_message="x")


# ---- Command and recipe --------------------------------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film"]


@pytest.fixture
def tokenizer(base) -> BertTokenizerFast:
    with open(f"{base}/vocab.txt", "w") as file:
        file.write("\n".join(WORDS))
    tokenizer = BertTokenizerFast(f"{base}/vocab.txt", model_max_length=16)
    tokenizer.save_pretrained(base)
    return tokenizer


def test_info_and_predict(posterior, tokenizer, tmp_path, capsys):
    posterior.save_pretrained(tmp_path / "posterior", tokenizer)
    assert main(["info", str(tmp_path / "posterior")]) == 0
    printed = capsys.readouterr().out
    assert "posterior of PEFT adapters" in printed
    assert "l2-sp: N(adapters at the start, lambda I)" in printed
    assert main(["predict", str(tmp_path / "posterior"), "good film", "--num_samples", "3"]) == 0
    expected = posterior.predict_proba(tokenizer("good film", return_tensors="pt"), 3)
    assert f"{expected.max().item():.4f}" in capsys.readouterr().out


def test_the_recipe(base, tokenizer, tmp_path, capsys, monkeypatch):
    script, seen = load_example("run_lora"), []
    predict = script.DEELBoTrainer.predict

    def spy(self, *args):
        seen.append(self.args.num_eval_samples)
        return predict(self, *args)

    monkeypatch.setattr(script.DEELBoTrainer, "predict", spy)
    rows = [{"text": f"{word} film", "label": word} for word in ("good", "bad") * 20]
    for split in ("train", "test"):
        (tmp_path / "data").mkdir(exist_ok=True)
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data" / f"{split}.parquet")
    options = {
        "dataset_name": tmp_path / "data",
        "model_name_or_path": base,
        "train_size": 20,
        "max_eval_samples": 10,
        "num_train_epochs": 2,
        "output_dir": tmp_path / "out",
        "sentence": "bad film",
    }
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    posterior = script.main(arguments)
    printed = capsys.readouterr().out.splitlines()
    assert all("lora_" in name or "classifier" in name for name in posterior.parameters())
    probabilities = posterior.predict_proba(tokenizer("bad film", return_tensors="pt"), 10)[0]
    label = posterior.model.config.id2label[probabilities.argmax().item()]
    assert label in ("good", "bad")
    assert printed[-1] == f"'bad film': {label} ({probabilities.max():.2f})"
    assert seen == [0, 10]
    for where in ("posterior mean", "average of 10 samples"):
        (line,) = [line for line in printed if line.startswith(where)]
        assert "accuracy" in line
        assert "nll" in line
