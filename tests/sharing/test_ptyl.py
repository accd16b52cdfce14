"""Files in the layout that was released, written here."""

import copy
import logging
import math
import os
import zipfile

import numpy as np
import pytest
import timm
import torch
from torch import nn
from torch.distributions import MultivariateNormal, kl_divergence
from transformers import AutoModelForImageClassification, TimmWrapperConfig

from hf_deelbo.sharing.ptyl import load_ptyl

SIGMA, LAMBDA = torch.tensor(0.2, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)


class Net(nn.Module):
    def __init__(self, num_classes: int = 3):
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.bn = nn.BatchNorm2d(2)
        self.linear = nn.Linear(2, 4)
        self.fc = nn.Linear(4, num_classes) if num_classes else nn.Identity()


class NetInAnotherOrder(Net):
    def __init__(self):
        super().__init__()
        bn = self.bn
        del self.bn
        self.bn = bn


def flat_parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def write_files(folder, source: nn.Module, name="resnet50", prefix="", rank=7, **replaced) -> dict[str, torch.Tensor]:
    """The four files of a backbone; `replaced` are written in place of what belongs there, `None` leaves out."""
    generator = torch.Generator().manual_seed(1)
    for module in source.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(generator=generator)
    mean = flat_parameters(source)
    parts = {
        "model": {prefix + key: tensor for key, tensor in source.state_dict().items()},
        "mean": mean,
        "variance": torch.rand(len(mean), generator=generator),
        "covmat": torch.randn(rank, len(mean), generator=generator),
    }
    folder.mkdir(exist_ok=True)
    for part, value in (parts | replaced).items():
        if value is not None:
            torch.save(value, folder / f"{name}_{part}.pt")
    return parts


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net(num_classes=0)


@pytest.mark.parametrize("rank", [2, 5, 7])
def test_kl_is_that_of_the_dense_gaussian(rank, net, tmp_path):
    parts = write_files(tmp_path, net)
    prior, model = load_ptyl(tmp_path, Net(), num_deviations=rank, eps=0.3)
    backbone = {name: p.detach() + 0.1 for name, p in model.named_parameters() if not name.startswith("fc.")}
    q = parts["covmat"][:rank].double()
    covariance = torch.diag(parts["variance"].double() / 2 + 0.3) + q.T @ q / (2 * rank - 2)
    w_bar = torch.cat([tensor.flatten() for tensor in backbone.values()]).double()
    posterior = MultivariateNormal(w_bar, SIGMA**2 * torch.eye(len(w_bar), dtype=torch.float64))
    expected = kl_divergence(posterior, MultivariateNormal(parts["mean"].double(), LAMBDA * covariance))
    torch.testing.assert_close(prior.kl(backbone, SIGMA, LAMBDA), expected, rtol=1e-6, atol=0)


def in_transformers_wrapper() -> nn.Module:
    return AutoModelForImageClassification.from_config(TimmWrapperConfig(architecture="test_resnet", num_labels=3))


def of_timm() -> nn.Module:
    return timm.create_model("test_resnet", num_classes=3)


@pytest.mark.parametrize(
    ("make", "prefix"),
    [
        (of_timm, ""),
        (of_timm, "module."),
        (in_transformers_wrapper, ""),
        (in_transformers_wrapper, "module.backbone."),
    ],
)
def test_a_resnet_of_timm_and_in_transformers_wrapper(make, prefix, tmp_path):
    source = timm.create_model("test_resnet", num_classes=0)
    parts = write_files(tmp_path, source, prefix=prefix)
    model = make()
    head = {name: p.detach().clone() for name, p in model.named_parameters() if ".fc." in f".{name}"}
    prior, same_model = load_ptyl(tmp_path, model)
    assert same_model is model
    assert len(head) == 2
    assert prior.num_parameters == len(parts["mean"])

    of_model = model.state_dict()
    own_prefix = "timm_model." if hasattr(model, "timm_model") else ""
    for name, tensor in source.state_dict().items():  # batch-norm statistics too
        assert torch.equal(of_model[own_prefix + name], tensor), name
    for name, tensor in head.items():
        assert torch.equal(of_model[name], tensor), name
    backbone = {name: p.detach() for name, p in model.named_parameters() if name not in head}
    prior.check_matches(backbone)
    assert prior.mahalanobis(backbone) == 0

    # the paper's formulas on flat numbers, in float64
    generator = torch.Generator().manual_seed(2)
    step = 0.1 * torch.randn(len(parts["mean"]), generator=generator)
    sizes = [tensor.numel() for tensor in backbone.values()]
    w = {
        name: tensor + part.view(tensor.shape)
        for (name, tensor), part in zip(backbone.items(), step.split(sizes), strict=True)
    }
    d = torch.cat([tensor.flatten() for tensor in w.values()]).double().numpy() - parts["mean"].double().numpy()
    a = parts["variance"].double().numpy() / 2 + 0.1
    u = parts["covmat"][:5].double().numpy().T / math.sqrt(2 * 5 - 2)
    m = np.eye(5) + u.T @ (u / a[:, None])
    b = u.T @ (d / a)
    trace = (1 / a).sum() - np.trace(np.linalg.solve(m, (u / a[:, None] ** 2).T @ u))
    mahalanobis = d @ (d / a) - b @ np.linalg.solve(m, b)
    log_det = np.log(a).sum() + np.linalg.slogdet(m)[1]
    size, sigma, lambda_ = len(d), SIGMA.item(), LAMBDA.item()
    kl = (sigma**2 * trace + mahalanobis) / lambda_ - size + size * math.log(lambda_ / sigma**2) + log_det
    assert prior.kl(w, SIGMA, LAMBDA).item() == pytest.approx(kl / 2, rel=1e-6)


def test_a_model_without_a_head(net, tmp_path):
    parts = write_files(tmp_path, net)
    prior, model = load_ptyl(tmp_path, Net(num_classes=0), head_names=[])
    assert torch.equal(flat_parameters(model), parts["mean"])
    assert prior.num_parameters == len(parts["mean"])


def test_one_of_several_priors(net, tmp_path):
    write_files(tmp_path, net, name="resnet50_torchvision")
    ssl = write_files(tmp_path, Net(num_classes=0), name="resnet50_ssl_prior")
    with pytest.raises(
        ValueError, match=r"files of 2 priors \(resnet50_ssl_prior, resnet50_torchvision\), so say whi"
    ):
        load_ptyl(tmp_path, Net())
    prior, _ = load_ptyl(tmp_path, Net(), name="resnet50_ssl_prior")
    assert torch.equal(torch.cat([tensor.flatten() for tensor in prior.mean.values()]), ssl["mean"])


def test_a_head_in_the_file_is_left_out_and_said(net, tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr(logging.getLogger("hf_deelbo.sharing.ptyl"), "warning", messages.append)
    write_files(tmp_path, net, model=net.state_dict() | {"fc.weight": torch.ones(9, 4), "fc.bias": torch.ones(9)})
    load_ptyl(tmp_path, Net())
    (message,) = messages
    assert "2 tensors are not of the backbone and left out: ['fc.weight', 'fc.bias']" in message


def test_the_prior_holds_memory_of_its_own(net, tmp_path):
    write_files(tmp_path, net)
    prior, _ = load_ptyl(tmp_path, Net())
    for tensor in prior.state_dict().values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


class TestRefusals:
    def load(self, folder, model=None, **kwargs):
        """Load into a model that must come out as it went in."""
        model = Net() if model is None else model
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        try:
            return load_ptyl(folder, model, **kwargs)
        finally:
            assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    @pytest.mark.parametrize("missing", ["model", "mean", "variance", "covmat"])
    def test_a_missing_file(self, missing, net, tmp_path):
        write_files(tmp_path, net, **{missing: None})
        with pytest.raises(FileNotFoundError, match=rf"lacks resnet50_{missing}\.pt of the prior 'resnet50'"):
            self.load(tmp_path)

    def test_an_empty_folder(self, tmp_path):
        with pytest.raises(ValueError, match=r"files of 0 priors \(none\)"):
            self.load(tmp_path)

    def test_another_name(self, net, tmp_path):
        write_files(tmp_path, net)
        with pytest.raises(FileNotFoundError, match=r"lacks vit_model\.pt, vit_mean\.pt.*Found: resnet50"):
            self.load(tmp_path, name="vit")

    @pytest.mark.parametrize("part", ["mean", "variance"])
    def test_vectors_of_another_size(self, part, net, tmp_path):
        write_files(tmp_path, net, **{part: torch.ones(35)})
        with pytest.raises(ValueError, match=rf"resnet50_{part}.pt: expected D = 36 numbers, found \(35,\)"):
            self.load(tmp_path)

    @pytest.mark.parametrize("shape", [(7, 35), (36, 7), (4, 36), (36,)])
    def test_deviations_of_another_size(self, shape, net, tmp_path):
        write_files(tmp_path, net, covmat=torch.ones(shape))
        found = str(shape).replace("(", r"\(").replace(")", r"\)")
        with pytest.raises(ValueError, match=rf"covmat.pt: expected K x D with K >= 5 .* and D = 36, found {found}"):
            self.load(tmp_path)

    def test_the_size_of_resnet_50(self, net, tmp_path):
        write_files(tmp_path, net)
        with pytest.raises(ValueError, match=r"expected D = 23,508,032 numbers, found \(36,\)"):
            load_ptyl(tmp_path, timm.create_model("resnet50", num_classes=10))

    def test_names_of_another_model(self, net, tmp_path):
        renamed = {name.replace("conv", "convolution"): tensor for name, tensor in net.state_dict().items()}
        write_files(tmp_path, net, model=renamed)
        with pytest.raises(ValueError, match=r"names \(convolution.weight, .* are not those of .* \(conv.weight, "):
            self.load(tmp_path)

    def test_parameters_in_another_order(self, net, tmp_path):
        write_files(tmp_path, net)
        with pytest.raises(ValueError, match=r"another order, 'bn\.weight' where the model has 'linear\.weight'"):
            self.load(tmp_path, NetInAnotherOrder())

    def test_a_shape_of_another_model(self, net, tmp_path):
        write_files(tmp_path, net, model=net.state_dict() | {"linear.weight": torch.ones(2, 4)})
        with pytest.raises(
            ValueError, match=r"expected 'linear.weight' of shape \(4, 2\), found \(2, 4\) \(0 tensors m"
        ):
            self.load(tmp_path)

    def test_no_batch_norm_statistics(self, net, tmp_path):
        state = {name: tensor for name, tensor in net.state_dict().items() if "running" not in name}
        write_files(tmp_path, net, model=state)
        with pytest.raises(ValueError, match=r"expected 'bn.running_mean' .* found nothing \(2 tensors missing"):
            self.load(tmp_path)

    def test_something_else_than_a_state_dict(self, net, tmp_path):
        write_files(tmp_path, net, model=[torch.ones(2)])
        with pytest.raises(ValueError, match=r"resnet50_model.pt: expected a dict, found a list"):
            self.load(tmp_path)

    @pytest.mark.parametrize("part", ["model", "mean", "variance", "covmat"])
    def test_code_in_a_file_is_not_run(self, part, net, tmp_path):
        marker = tmp_path / "ran"
        write_files(tmp_path, net, **{part: Code(str(marker))})
        with pytest.raises(ValueError, match=rf"resnet50_{part}.pt: .* could run code"):
            self.load(tmp_path)
        assert not marker.exists()

    def test_a_broken_file(self, net, tmp_path):
        write_files(tmp_path, net)
        path = tmp_path / "resnet50_covmat.pt"
        path.write_bytes(path.read_bytes()[:100])
        with pytest.raises(ValueError, match=r"resnet50_covmat.pt: it is broken"):
            self.load(tmp_path)


NAN, INF = float("nan"), float("inf")


class TestHostileFiles:
    """Refused with the name of the file, and the model is as it was."""

    def check(self, folder, *in_message: str, **kwargs) -> None:
        with pytest.raises(ValueError, match=r"^") as caught:
            TestRefusals().load(folder, **kwargs)
        for part in in_message:
            assert part in str(caught.value)

    @pytest.mark.parametrize("value", [NAN, INF, -INF])
    @pytest.mark.parametrize("part", ["mean", "variance", "covmat"])
    def test_numbers_of_a_prior(self, part, value, net, tmp_path):
        tensor = write_files(tmp_path, net)[part].clone()
        tensor.view(-1)[3] = value
        write_files(tmp_path, net, **{part: tensor})
        self.check(tmp_path, f"resnet50_{part}.pt", "must be finite")

    @pytest.mark.parametrize(
        ("name", "value"),
        [("conv.weight", NAN), ("bn.running_mean", INF), ("bn.running_var", NAN), ("bn.running_var", -1.0)],
    )
    def test_numbers_of_a_model(self, name, value, net, tmp_path):
        state = {key: tensor.clone() for key, tensor in net.state_dict().items()}
        state[name].view(-1)[0] = value
        write_files(tmp_path, net)
        torch.save(state, tmp_path / "resnet50_model.pt")
        self.check(tmp_path, "resnet50_model.pt", name)

    @pytest.mark.parametrize("part", ["mean", "variance", "covmat"])
    @pytest.mark.parametrize(
        "dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
    )
    def test_types(self, part, dtype, net, tmp_path):
        write_files(tmp_path, net, **{part: write_files(tmp_path, net)[part].abs().to(dtype)})
        self.check(tmp_path, f"resnet50_{part}.pt")

    @pytest.mark.parametrize(
        "make",
        [lambda t: t.to_sparse(), lambda t: t.to("meta"), lambda t: torch.quantize_per_tensor(t, 1.0, 0, torch.qint8)],
    )
    def test_tensors_of_other_kinds(self, make, net, tmp_path):
        write_files(tmp_path, net, mean=make(write_files(tmp_path, net)["mean"]))
        self.check(tmp_path, "resnet50_mean.pt")

    def test_a_rank_of_a_billion_costs_nothing(self, net, tmp_path):
        """Rows that all lie in the same place; so few are used."""
        row = write_files(tmp_path, net)["covmat"][:1]
        torch.save(row.expand(10**9, -1), tmp_path / "resnet50_covmat.pt")
        assert os.path.getsize(tmp_path / "resnet50_covmat.pt") < 10_000
        prior, _ = load_ptyl(tmp_path, Net())
        assert prior.rank == 5

    @pytest.mark.parametrize("rank", [-1, 0, 1, 1001, 10**9])
    def test_a_rank_that_cannot_be(self, rank, net, tmp_path):
        row = write_files(tmp_path, net)["covmat"][:1]
        torch.save(row.expand(10**9, -1), tmp_path / "resnet50_covmat.pt")
        self.check(tmp_path, "num_deviations: must be 2 to 1,000", num_deviations=rank)

    @pytest.mark.parametrize("eps", [NAN, INF, -10.0])
    def test_an_eps_that_cannot_be(self, eps, net, tmp_path):
        write_files(tmp_path, net)
        self.check(tmp_path, "eps", eps=eps)

    @pytest.mark.parametrize(
        "key",
        [3, None, ("a",), "a." * 10**6, "x" * 10**5, ""],
        ids=["number", "none", "tuple", "dots", "long", "empty"],
    )
    def test_names_that_are_none(self, key, net, tmp_path):
        write_files(tmp_path, net, model={key: torch.ones(2)})
        self.check(tmp_path, "resnet50_model.pt")

    @pytest.mark.parametrize("value", [3, None, "x", [1], {"a": torch.ones(2)}], ids=str)
    def test_values_that_are_no_tensors(self, value, net, tmp_path):
        write_files(tmp_path, net, model=net.state_dict() | {"conv.weight": value})
        self.check(tmp_path, "resnet50_model.pt")

    def test_a_file_that_grows_in_being_read(self, net, tmp_path):
        write_files(tmp_path, net, mean=torch.zeros(10**6))
        path = tmp_path / "resnet50_mean.pt"
        with zipfile.ZipFile(path) as records:
            parts = {part.filename: records.read(part) for part in records.infolist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as records:
            for name, content in parts.items():
                records.writestr(name, content)
        assert path.stat().st_size < 10_000
        self.check(tmp_path, "resnet50_mean.pt: it is broken (its parts are compressed)")

    def test_parts_that_lie_in_each_other(self, net, tmp_path):
        write_files(tmp_path, net)
        path = tmp_path / "resnet50_mean.pt"
        with zipfile.ZipFile(path, "a") as records:
            part = next(part for part in records.infolist() if part.filename.endswith("data/0"))
            for index in range(1000):
                other = copy.copy(part)
                other.filename = f"archive/data/{index + 1}"
                records.filelist.append(other)
                records.NameToInfo[other.filename] = other
            records._didModify = True
        self.check(tmp_path, "resnet50_mean.pt: it is broken (its parts lie in each other)")

    @pytest.mark.parametrize(
        "call", [(bytearray, 10**11), (set, ()), (complex, 1)], ids=["bytearray", "set", "complex"]
    )
    def test_what_torch_allows_but_no_tensor_needs(self, call, net, tmp_path):
        write_files(tmp_path, net, mean=Call(*call))
        self.check(tmp_path, "resnet50_mean.pt", "holds more than tensors", call[0].__name__)

    def test_a_description_of_many_megabytes(self, net, tmp_path):
        write_files(tmp_path, net, mean=list(range(10**6)))
        self.check(tmp_path, "resnet50_mean.pt: it is broken (its description is too large)")

    def test_a_pickle_alone(self, net, tmp_path):
        """As torch wrote it before 1.6, with a size of memory that is taken before it is filled."""
        write_files(tmp_path, net)
        torch.save(torch.ones(36), tmp_path / "resnet50_mean.pt", _use_new_zipfile_serialization=False)
        self.check(tmp_path, "resnet50_mean.pt: it is broken", "since torch 1.6")

    @pytest.mark.parametrize("target", ["/dev/zero", "a pipe"])
    def test_what_is_no_file(self, target, net, tmp_path):
        write_files(tmp_path, net)
        path = tmp_path / "resnet50_mean.pt"
        path.unlink()
        os.symlink(target, path) if target.startswith("/") else os.mkfifo(path)
        with pytest.raises((ValueError, FileNotFoundError), match="resnet50_mean.pt"):
            load_ptyl(tmp_path, Net())


class Call:
    """Makes a call of it when it is unpickled."""

    def __init__(self, function, argument):
        self.call = function, (argument,)

    def __reduce__(self):
        return self.call


class Code:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)
