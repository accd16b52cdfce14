import json
import os
import random
import shutil
import struct

import pytest
import torch
from conftest import make_dataset, make_model
from safetensors.torch import load_file, save_file
from scipy import stats
from torch import nn
from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

from hf_deelbo import DEELBo, GaussianPosterior, IsotropicPrior, LowRankPrior
from hf_deelbo.sharing.files import sha256_of
from hf_deelbo.sharing.hub import InvalidFilesError

CONFIG, TENSORS, MODEL = "posterior_config.json", "posterior.safetensors", "model.safetensors"
GONE = object()  # for `rewrite`: take the key away
HEADS = {"vit": ("classifier",), "resnet": ("classifier",), "bert": ("classifier", "pooler")}


def inputs_of(kind: str, size: int = 6) -> dict[str, torch.Tensor]:
    rows = make_dataset(kind, size)
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "labels"}


def make_posterior(
    kind: str = "resnet", prior: str = "l2-sp", frozen: str | None = None, **settings: str
) -> GaussianPosterior:
    """A posterior away from its prior and its start, as if it had been trained."""
    model = make_model(kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen is None or frozen not in name)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    head = [name for name in names if name.startswith(HEADS[kind][0])]
    backbone = {name: p for name, p in model.named_parameters() if name in names and name not in head}
    priors = {"l2-zero": IsotropicPrior.l2_zero, "l2-sp": IsotropicPrior.l2_sp, "ptyl": low_rank_prior}
    posterior = GaussianPosterior(model, head, priors[prior](backbone), init_sigma=0.02, num_examples=24, **settings)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in posterior.parameters().values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        if posterior.grouping != "all":
            posterior.rho += 0.5 * torch.randn(posterior.rho.shape, generator=generator)
            posterior.curvature.sums += torch.rand(posterior.curvature.sums.shape, generator=generator)
    posterior.update_prior_variances()
    posterior.recompute_batch_norm([inputs_of(kind)], num_samples=3)
    kl = {"kl_backbone": float(posterior.kl.backbone), "kl_head": float(posterior.kl.head)}
    posterior.de_elbo = DEELBo(1.25, **kl, kappa=posterior.kappa, num_examples=24, nll_standard_error=0.1)
    return posterior


def low_rank_prior(backbone: dict[str, torch.Tensor]) -> LowRankPrior:
    mean = {name: p.detach().clone() for name, p in backbone.items()}
    generator = torch.Generator().manual_seed(7)
    diagonal = {name: torch.rand(p.shape, generator=generator) for name, p in mean.items()}
    deviations = {name: torch.randn(3, *p.shape, generator=generator) for name, p in mean.items()}
    return LowRankPrior(mean, diagonal, deviations, eps=0.25)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved posterior of a model with batch norm; copy it before changing it."""
    folder = tmp_path_factory.mktemp("saved")
    make_posterior().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "posterior")


def rewrite(folder, **changes) -> None:
    content = json.loads((folder / CONFIG).read_text()) | changes
    (folder / CONFIG).write_text(json.dumps({name: value for name, value in content.items() if value is not GONE}))


def summary(posterior: GaussianPosterior) -> dict:
    """All that decides what a posterior does."""
    names = ("sigma", "lambda_", "tau", "kappa", "num_examples", "num_parameters")
    state = posterior.state_dict() | posterior.model.state_dict()
    return {
        **{name: float(getattr(posterior, name)) for name in names},
        "head": sorted(posterior.head),
        "prior": posterior.prior.config,
        "state": {name: tensor.clone() for name, tensor in state.items()},
        "statistics": posterior.sample_statistics,
        "de_elbo": posterior.de_elbo and posterior.de_elbo.to_dict(),
    }


def equal(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, tuple):
        return all(equal(a, b) for a, b in zip(one, other, strict=True))
    return one == (pytest.approx(other, rel=1e-9) if isinstance(one, float) else other)


@pytest.mark.parametrize(
    ("kind", "prior"), [("vit", "l2-zero"), ("bert", "l2-sp"), ("resnet", "l2-zero"), ("resnet", "ptyl")]
)
def test_loaded_it_is_the_same_to_the_bit(kind, prior, tmp_path):
    posterior = make_posterior(kind, prior)
    posterior.save_pretrained(tmp_path)
    loaded = GaussianPosterior.from_pretrained(tmp_path)
    assert equal(summary(loaded), summary(posterior))
    assert loaded.kl == posterior.kl
    for num_samples in (0, 3):
        expected = posterior.predict_proba(inputs_of(kind), num_samples)
        assert torch.equal(loaded.predict_proba(inputs_of(kind), num_samples), expected)


@pytest.mark.parametrize(
    ("grouping", "prior"), [("part", "l2-zero"), ("layer", "l2-sp"), ("tensor", "l2-sp"), ("tensor", "ptyl")]
)
def test_several_sigmas_come_back_to_the_bit(grouping, prior, tmp_path):
    posterior = make_posterior("resnet", prior, grouping=grouping)
    posterior.save_pretrained(tmp_path)
    loaded = GaussianPosterior.from_pretrained(tmp_path)
    assert equal(summary(loaded), summary(posterior))
    assert torch.equal(loaded.sigmas, posterior.sigmas)
    assert torch.equal(loaded.prior_variances, posterior.prior_variances)
    assert loaded.groups == posterior.groups
    assert (loaded.grouping, loaded.sigma_update) == (grouping, "closed-form")
    content = json.loads((tmp_path / CONFIG).read_text())
    assert content["groups"] == posterior.group_table()
    assert len({row["sigma"] for row in content["groups"]}) == len(content["groups"]) > 1
    inputs = inputs_of("resnet")
    assert torch.equal(loaded.predict_proba(inputs, 3), posterior.predict_proba(inputs, 3))


def test_a_posterior_of_format_1_still_loads(tmp_path):
    """One sigma, which the optimiser learned; neither groups nor a curvature."""
    model = make_model("vit")
    model.save_pretrained(tmp_path)
    sigma, start, w, v = 0.03, {}, [], []
    for name, parameter in model.named_parameters():
        if name.startswith("classifier"):
            v.append(parameter.detach().double().flatten())
        else:
            start[name] = parameter.detach() + 0.1
            w.append((parameter.detach() - start[name]).double().flatten())
    numbers = {
        "lambda_": sigma**2 + torch.cat(w).square().mean().item(),
        "tau": sigma**2 + torch.cat(v).square().mean().item(),
        "kappa": 12.5,
        "num_examples": 40,
    }
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    tensors["rho"] = torch.tensor(sigma, dtype=torch.float64).expm1().log()
    save_file(tensors | {f"prior.mean.{name}": mean for name, mean in start.items()}, tmp_path / TENSORS)
    content = {
        "sha256": {name: sha256_of(tmp_path / name) for name in (MODEL, TENSORS)},
        "library_versions": {"hf-deelbo": "0.1.0"},
        "format_version": 1,
        "auto_class": "AutoModelForImageClassification",
        "head_names": ["classifier.bias", "classifier.weight"],
        "frozen_names": [],
        "prior": {"kind": "l2-sp"},
        **numbers,
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "sigma": sigma,
        "sample_seeds": [],
        "de_elbo": None,
        "base_model": None,
        "base_model_revision": None,
    }
    (tmp_path / CONFIG).write_text(json.dumps(content))

    loaded = GaussianPosterior.from_pretrained(tmp_path)
    assert (loaded.grouping, loaded.sigma_update, loaded.curvature) == ("all", "optimizer", None)
    assert (float(loaded.sigma), loaded.kappa, loaded.num_examples) == (pytest.approx(sigma, rel=1e-12), 12.5, 40)
    assert float(loaded.lambda_) == pytest.approx(numbers["lambda_"], rel=1e-6)
    assert float(loaded.tau) == pytest.approx(numbers["tau"], rel=1e-6)
    assert torch.equal(loaded.prior.mean["vit.layernorm.weight"], start["vit.layernorm.weight"])
    expected = model.eval()(**inputs_of("vit")).logits.softmax(-1)
    assert torch.equal(loaded.predict_proba(inputs_of("vit")), expected)
    # saved again it is of the present format
    loaded.save_pretrained(tmp_path / "again")
    assert equal(summary(GaussianPosterior.from_pretrained(tmp_path / "again")), summary(loaded))
    assert json.loads((tmp_path / "again" / CONFIG).read_text())["format_version"] == 2


def test_frozen_parameters_stay_outside(tmp_path):
    posterior = make_posterior("vit", frozen="embeddings")
    posterior.save_pretrained(tmp_path)
    loaded = GaussianPosterior.from_pretrained(tmp_path)
    of_model = {name: p.numel() for name, p in loaded.model.named_parameters()}
    learned = {name: size for name, size in of_model.items() if "embeddings" not in name}
    assert loaded.parameters().keys() == learned.keys() < of_model.keys()
    assert loaded.num_parameters == sum(learned.values())


@pytest.mark.parametrize(
    ("kind", "auto_class"),
    [("vit", AutoModelForImageClassification), ("bert", AutoModelForSequenceClassification)],
)
def test_transformers_alone_loads_the_mean(kind, auto_class, tmp_path):
    posterior = make_posterior(kind)
    posterior.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = auto_class.from_pretrained(tmp_path)(**inputs_of(kind)).logits
    assert torch.equal(torch.softmax(logits, -1), posterior.predict_proba(inputs_of(kind)))


def test_sample_model_holds_standard_normal_noise_and_the_statistics_of_the_file(saved):
    posterior, inputs = GaussianPosterior.from_pretrained(saved), inputs_of("resnet")
    mean, tensors = load_file(saved / MODEL), load_file(saved / TENSORS)
    probabilities, noises = [], []
    for seed in range(3):
        sample = posterior.sample_model(seed)
        noise = [((p.detach() - mean[name]) / 0.02).flatten() for name, p in sample.named_parameters()]
        noises.append(torch.cat(noise))
        assert stats.kstest(noises[-1].numpy(), "norm").pvalue > 1e-3
        layers = {name: module for name, module in sample.named_modules() if isinstance(module, nn.BatchNorm2d)}
        assert layers
        for name, layer in layers.items():
            assert torch.equal(layer.running_mean, tensors[f"batch_norm.{seed}.{name}.mean"])
            assert torch.equal(layer.running_var, tensors[f"batch_norm.{seed}.{name}.variance"])
        probabilities.append(torch.softmax(sample(**inputs).logits, -1))
    assert (torch.corrcoef(torch.stack(noises)) - torch.eye(3)).abs().max() < 0.06  # four standard errors
    torch.testing.assert_close(posterior.predict_proba(inputs, 3), torch.stack(probabilities).mean(0))
    with pytest.raises(ValueError, match="sample 3 has no statistics"):
        posterior.sample_model(3)


def test_as_prior_is_centred_on_the_mean(saved):
    posterior = GaussianPosterior.from_pretrained(saved)
    prior = posterior.as_prior()
    moved = {name: w + 0.5 for name, w in posterior.backbone.items()}
    assert prior.mahalanobis(posterior.backbone) == 0
    assert float(prior.mahalanobis(moved)) == pytest.approx(0.25 * prior.num_parameters, rel=1e-5)


def test_what_is_shared_names_no_folder_of_the_author(folder, tmp_path):
    model = AutoModelForImageClassification.from_pretrained(folder)
    GaussianPosterior(model, ["classifier.1.weight"], num_examples=5).save_pretrained(tmp_path / "next")
    for name in ("config.json", CONFIG):
        assert str(tmp_path) not in (tmp_path / "next" / name).read_text()
    assert json.loads((tmp_path / "next" / CONFIG).read_text())["base_model"] is None


class TestBadFiles:
    """Each has its own error, of one type."""

    def check(self, folder, match: str) -> None:
        with pytest.raises(InvalidFilesError, match=match):
            GaussianPosterior.from_pretrained(folder)

    def test_a_plain_model(self, folder):
        os.remove(folder / CONFIG)
        self.check(folder, "no saved posterior.*plain model.*AutoModel")

    @pytest.mark.parametrize("name", [TENSORS, MODEL])
    def test_missing(self, folder, name):
        os.remove(folder / name)
        self.check(folder, f"{name} is missing")

    def test_truncated(self, folder):
        content = (folder / MODEL).read_bytes()
        (folder / MODEL).write_bytes(content[: len(content) // 2])
        self.check(folder, f"{MODEL}: its hash is not the one")

    @pytest.mark.parametrize("name", [TENSORS, MODEL])
    def test_bit_flipped(self, folder, name):
        content = bytearray((folder / name).read_bytes())
        content[-5] ^= 4
        (folder / name).write_bytes(content)
        self.check(folder, f"{name}: its hash is not the one")

    def test_tensors_of_another_posterior(self, folder, tmp_path):
        """Even if someone made the hashes fit."""
        make_posterior("resnet", prior="l2-zero").save_pretrained(tmp_path / "other")
        shutil.copy(tmp_path / "other" / TENSORS, folder / TENSORS)
        hashes = json.loads((folder / CONFIG).read_text())["sha256"]
        rewrite(folder, sha256=hashes | {TENSORS: sha256_of(folder / TENSORS)})
        self.check(folder, f"{TENSORS}: it has no tensor 'prior.mean.resnet.embedder.* and 17 more")

    def test_a_tensor_of_another_size(self, folder):
        tensors = load_file(folder / TENSORS)
        name = next(name for name in tensors if name.startswith("batch_norm.0."))
        save_file(tensors | {name: torch.ones(99)}, folder / TENSORS)
        hashes = json.loads((folder / CONFIG).read_text())["sha256"]
        rewrite(folder, sha256=hashes | {TENSORS: sha256_of(folder / TENSORS)})
        self.check(folder, rf"{TENSORS}: the tensor 'batch_norm.0.* must have shape \(8,\), and has \(99,\)")

    def test_a_head_of_another_size(self, folder):
        config = json.loads((folder / "config.json").read_text())
        config |= {"id2label": {str(i): str(i) for i in range(7)}, "label2id": {str(i): i for i in range(7)}}
        (folder / "config.json").write_text(json.dumps(config))
        self.check(folder, "do not fit each other")

    def test_a_weight_that_is_gone(self, folder):
        """Transformers would draw a new one, with a warning."""
        weights = load_file(folder / MODEL)
        weights.pop("classifier.1.bias")
        save_file(weights, folder / MODEL, {"format": "pt"})
        hashes = json.loads((folder / CONFIG).read_text())["sha256"]
        rewrite(folder, sha256=hashes | {MODEL: sha256_of(folder / MODEL)})
        self.check(folder, "missing_keys classifier.1.bias")

    @pytest.mark.parametrize(
        ("file", "tensor"),
        [
            (MODEL, "classifier.1.bias"),
            (MODEL, "resnet.embedder.embedder.normalization.running_mean"),
            (TENSORS, "batch_norm.0.resnet.embedder.embedder.normalization.variance"),
            (TENSORS, "prior.mean.resnet.embedder.embedder.convolution.weight"),
            (TENSORS, "rho"),
        ],
    )
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_a_tensor_that_is_not_finite(self, folder, file, tensor, value):
        tensors = load_file(folder / file)
        tensors[tensor].view(-1)[0] = value
        save_file(tensors, folder / file, {"format": "pt"})
        hashes = json.loads((folder / CONFIG).read_text())["sha256"]
        rewrite(folder, sha256=hashes | {file: sha256_of(folder / file)})
        with pytest.raises(InvalidFilesError, match=f"'{tensor}' must be finite"):
            GaussianPosterior.from_pretrained(folder)

    def test_nan_is_no_json(self, folder):
        rewrite(folder, colour=float("nan"))
        self.check(folder, "it is no JSON")

    def test_newer_format(self, folder):
        rewrite(folder, format_version=3)
        self.check(folder, "format_version is 3.*pip install --upgrade hf-deelbo")

    @pytest.mark.parametrize(
        ("content", "match"),
        [
            ("", "it is no JSON"),
            ("{", "it is no JSON"),
            ("\x00", "it is no JSON"),
            ("[" * 100_000, "it is no JSON"),
            ("[]", "expected a JSON object, found list"),
            ('{"kappa": NaN}', "NaN is no number"),
        ],
        ids=["empty", "unfinished", "zero byte", "deep", "list", "nan"],
    )
    def test_no_json(self, folder, content, match):
        (folder / CONFIG).write_text(content)
        self.check(folder, f"{CONFIG}: .*{match}")

    @pytest.mark.parametrize(
        ("key", "value", "match"),
        [
            ("name", GONE, "each must have name, .*, got in_head"),
            ("colour", "blue", "each must have name, .*, got .*colour"),
            ("name", 3, "name must be a text, got 3"),
            ("in_head", 0, "in_head must be a truth value, got 0"),
            ("num_parameters", True, "num_parameters must be a positive whole number, got True"),
            ("num_parameters", 0, "num_parameters must be a positive whole number, got 0"),
            ("sigma", "0.02", "sigma must be a positive number, got '0.02'"),
            ("prior_variance", -1.0, "prior_variance must be a positive number, got -1.0"),
            ("name", "bone", "name of 'backbone' is stated as bone"),
            ("in_head", True, "in_head of 'backbone' is stated as True"),
            ("num_parameters", 1, "num_parameters of 'backbone' is stated as 1, but is"),
            ("sigma", 0.02001, "sigma of 'backbone' is stated as 0.02001, but is 0.02"),
            ("prior_variance", 0.5, "prior_variance of 'backbone' is stated as 0.5, but is"),
        ],
    )
    def test_wrong_groups(self, folder, key, value, match):
        groups = json.loads((folder / CONFIG).read_text())["groups"]
        groups[0] = {k: v for k, v in (groups[0] | {key: value}).items() if v is not GONE}
        rewrite(folder, groups=groups)
        self.check(folder, f"groups: {match}")

    @pytest.mark.parametrize(("number", "read"), [("1e400", "inf"), ("1e-400", "0.0")])
    def test_numbers_that_no_float_holds(self, folder, number, read):
        whole = (folder / CONFIG).read_text()
        rewrite(folder, lambda_="NUMBER")
        (folder / CONFIG).write_text((folder / CONFIG).read_text().replace('"NUMBER"', number))
        self.check(folder, f"lambda_: must be a positive number, got {read}")
        content = json.loads(whole)
        content["groups"][0]["sigma"] = "NUMBER"
        (folder / CONFIG).write_text(json.dumps(content).replace('"NUMBER"', number))
        self.check(folder, f"groups: sigma must be a positive number, got {read}")

    @pytest.mark.parametrize("name", ["grouping", "sigma_update"])
    def test_settings_of_a_later_version(self, folder, name):
        rewrite(folder, **{name: "new"})
        self.check(folder, f"{name}: unknown value 'new'; known are ")

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda groups: groups[::-1], "name of 'backbone' is stated as head"),
            (lambda groups: groups[:1], "1 are stated, but there are 2"),
        ],
    )
    def test_groups_that_are_others(self, folder, change, match):
        rewrite(folder, groups=change(json.loads((folder / CONFIG).read_text())["groups"]))
        self.check(folder, f"groups: {match}")

    def test_groups_of_several_sigmas_are_compared_with_the_tensors(self, tmp_path):
        make_posterior(grouping="tensor").save_pretrained(tmp_path)
        groups = json.loads((tmp_path / CONFIG).read_text())["groups"]
        groups[3]["sigma"] *= 1 + 1e-5
        rewrite(tmp_path, groups=groups)
        self.check(tmp_path, f"groups: sigma of '{groups[3]['name']}' is stated as")

    @pytest.mark.parametrize(
        ("name", "value", "match"),
        [
            # of another type, or not there
            ("kappa", "auto", "'kappa' with value 'auto'"),
            ("num_examples", True, "'num_examples' with value True"),
            ("num_examples", 10**400, "has more than 64 bits"),
            ("tau", None, "'tau' expected float"),
            ("tau", GONE, "it has no tau"),
            ("head_names", "classifier", "'head_names' expected a list"),
            ("groups", [3], "list 'groups'"),
            ("groups", GONE, "groups: there are none"),
            ("de_elbo", {"de_elbo": "high"}, "'de_elbo' with value"),
            ("format_version", "1", "'format_version' expected int"),
            # of no meaning
            ("kappa", -1.0, "kappa: must be a positive number, got -1.0"),
            ("prior", {"kind": "horseshoe"}, "unknown kind 'horseshoe'"),
            ("prior", {"kind": "l2-sp", "scales": []}, "its scales must be numbers by name"),
            ("auto_class", "eval", "cannot load a model by 'eval'"),
            ("sha256", {}, "sha256: has no hash of posterior.safetensors"),
            ("sha256", {"../../etc/passwd": "0"}, "is not the name of a safetensors file in the same folder"),
            ("format_version", 0, "format_version: must be at least 1, got 0"),
            # not what the other files say
            ("grouping", "layer", r"the tensor 'rho' must have shape \(4,\), and has \(\)"),
            ("sigma_update", "optimizer", "nothing asks for its tensor 'curvature'"),
            ("base", {"config": {}, "sha256": ""}, "adapter_config.json"),
            ("num_examples", 25, "num_examples is stated as 25, but is 24"),
            ("num_parameters", 10, "num_parameters is stated as 10, but is"),
            ("lambda_", 0.5, "lambda_ is stated as 0.5, but is"),
            ("sigma", 0.021, "sigma is stated as 0.021, but is 0.02"),
            ("head_names", ["no.such.parameter"], "it has no tensor 'prior.mean.classifier.1.bias' and 1 more"),
            ("frozen_names", ["no.such.parameter"], "'no.such.parameter' is missing or unknown"),
            ("prior", {"kind": "l2-zero"}, "nothing asks for its tensor 'prior.mean.resnet.* and 17 more"),
            ("prior", {"kind": "l2-sp", "scales": {"x": 1.0}}, "scales: their parameter names"),
            ("auto_class", "AutoModelForSequenceClassification", "Unrecognized configuration class"),
            ("sample_seeds", [0, 1], r"\[0, 1\] are stated, \[0, 1, 2\] are saved"),
            ("de_elbo", None, "de_elbo's .* is stated as None, but is"),
        ],
    )
    def test_wrong_values(self, folder, name, value, match):
        rewrite(folder, **{name: value})
        self.check(folder, match)

    def test_unknown_keys_are_only_warned_of(self, folder, monkeypatch):
        rewrite(folder, colour="blue")
        messages = []
        monkeypatch.setattr("hf_deelbo.sharing.hub.logger.warning", messages.append)
        expected = summary(make_posterior())
        assert equal(summary(GaussianPosterior.from_pretrained(folder)), expected)
        assert "colour" in messages[0]

    def test_neither_a_folder_nor_an_id(self):
        with pytest.raises(FileNotFoundError, match="neither a folder nor an id"):
            GaussianPosterior.from_pretrained("a/b/c")


def mutations(folder, number: int):
    """Random damage to the two files, always the same."""
    generator = random.Random(0)
    for index in range(number):
        name = (CONFIG, TENSORS)[index % 2]
        content = bytearray((folder / name).read_bytes())
        damage = generator.choice(["flip", "truncate", "value", "key", "header"])
        if name == CONFIG and damage in ("value", "key"):
            values = json.loads(content)
            key = generator.choice(sorted(values))
            if damage == "key":
                values.pop(key)
            else:
                values[key] = generator.choice(
                    [None, -1, 1e9, "", [], {}, True, values[generator.choice(sorted(values))]]
                )
            content = json.dumps(values).encode()
        elif name == TENSORS and damage == "header":
            length = struct.unpack("<Q", content[:8])[0]
            content[8 + generator.randrange(length)] ^= 1 << generator.randrange(8)
        elif damage == "truncate":
            content = content[: generator.randrange(len(content))]
        else:
            for _ in range(generator.choice([1, 1, 3])):
                content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        yield name, bytes(content)


def test_500_damaged_copies_are_refused_or_load_equal(folder, monkeypatch):
    monkeypatch.setattr("hf_deelbo.sharing.hub.logger.warning", lambda message: None)
    posterior = GaussianPosterior.from_pretrained(folder)
    expected = summary(posterior)
    refused = 0
    for name, content in mutations(folder, 500):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        try:
            loaded = GaussianPosterior.from_pretrained(folder)
        except InvalidFilesError:
            refused += 1
        else:
            assert equal(summary(loaded), expected), content[:2000]
        (folder / name).write_bytes(whole)
    assert refused > 400
