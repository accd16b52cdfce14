"""Which parameters are the head."""

import pytest
import timm
import torch
from conftest import NUM_LABELS, make_model
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
