import copy

import pytest
import torch
from conftest import HostWaits, add_noise_, low_rank_prior, make_dataset, make_model
from torch import nn
from torch.func import functional_call

from hf_deelbo import GaussianPosterior, IsotropicPrior
from hf_deelbo import posterior as posterior_module
from hf_deelbo.weights.parameters import backbone_of, head_parameter_names


def make_posterior(kind: str = "vit", **kwargs) -> GaussianPosterior:
    model = make_model(kind)
    defaults = {"sigma_update": "optimizer", "init_sigma": 0.05, "num_examples": 24}
    return GaussianPosterior(model, head_parameter_names(model), **(defaults | kwargs))


def batch(kind: str = "vit", size: int = 8) -> dict[str, torch.Tensor]:
    examples = make_dataset(kind, size)
    return {
        key: torch.stack([torch.as_tensor(example[key]) for example in examples])
        for key in examples[0]
        if key != "labels"
    }


class TestParameters:
    def test_every_trainable_parameter_is_counted_once(self):
        posterior = make_posterior("vit")
        names = {name for name, _ in posterior.model.named_parameters()}
        assert posterior.backbone.keys() | posterior.head.keys() == names
        assert {"vit.embeddings.cls_token", "vit.embeddings.position_embeddings"} <= posterior.backbone.keys()
        assert posterior.head.keys() == {"classifier.weight", "classifier.bias"}
        assert posterior.num_parameters == sum(p.numel() for p in posterior.model.parameters())
        assert posterior.kappa == posterior.num_parameters / 24

    def test_frozen_parameters_are_constants(self):
        model = make_model("vit")
        model.vit.embeddings.requires_grad_(False)
        frozen = sum(p.numel() for p in model.vit.embeddings.parameters())
        posterior = GaussianPosterior(model, head_parameter_names(model), num_examples=24, init_sigma=1.0)
        assert posterior.num_parameters == sum(p.numel() for p in model.parameters()) - frozen
        before = model.vit.embeddings.cls_token.clone()
        with posterior.sampled(0):
            assert torch.equal(model.vit.embeddings.cls_token, before)

    def test_tied_weights_are_counted_and_sampled_once(self):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
        model[1].weight = model[0].weight
        posterior = GaussianPosterior(model, ["2.weight", "2.bias"], init_sigma=0.1, num_examples=5)
        assert posterior.num_parameters == 16 + 4 + 4 + 15
        mean = model[0].weight.detach().clone()
        with posterior.sampled(0):
            assert model[0].weight is model[1].weight
            difference = model[0].weight.detach() - mean
        assert 0.05 < difference.std() < 0.2  # not 0.1 * sqrt(2), as if noise had been added twice

    @pytest.mark.parametrize("part", ["backbone", "head"])
    def test_a_frozen_part_has_no_kl(self, part):
        model = make_model("vit")
        (model.vit if part == "backbone" else model.classifier).requires_grad_(False)
        posterior = GaussianPosterior(model, head_parameter_names(model), num_examples=24, sigma_update="optimizer")
        assert getattr(posterior.kl, part) == 0
        with posterior.sampled(0):
            model(**batch(), labels=torch.zeros(8, dtype=torch.long)).loss.backward()
            posterior.complete_gradients()
        assert torch.isfinite(posterior.rho.grad)


class TestSampled:
    def test_it_adds_sigma_times_noise_and_puts_the_mean_back_to_the_bit(self, snapshot, assert_same):
        posterior = make_posterior()
        before = snapshot(posterior.model)
        eps = {name: torch.zeros_like(p) for name, p in posterior.parameters().items()}
        add_noise_(eps, torch.tensor(1.0), key=(3, 4))
        with posterior.sampled(3, 4):
            for name, parameter in posterior.model.named_parameters():
                expected = before[name] + 0.05 * eps[name]
                torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-6)
        assert_same(before, snapshot(posterior.model))

    def test_the_mean_keeps_its_memory_and_the_sample_its_layout(self):
        posterior = make_posterior("resnet")
        parameters = dict(posterior.model.named_parameters())
        for layout in (torch.contiguous_format, torch.channels_last):
            posterior.model.to(memory_format=layout)
            memory = {name: p.data_ptr() for name, p in parameters.items()}
            strides = {name: p.stride() for name, p in parameters.items()}
            with posterior.sampled(0):
                for name, parameter in posterior.model.named_parameters():
                    assert parameter is parameters[name]
                    assert parameter.data_ptr() != memory[name]
                    assert parameter.stride() == strides[name]
            assert {name: p.data_ptr() for name, p in posterior.model.named_parameters()} == memory

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_the_mean_comes_back_when_the_body_raises(self, error, snapshot, assert_same):
        posterior = make_posterior()
        before = snapshot(posterior.model)
        with pytest.raises(error), posterior.sampled(0):
            raise error
        assert_same(before, snapshot(posterior.model))
        with posterior.sampled(0):  # and it can go on
            pass

    @pytest.mark.usefixtures("two_threads")
    @pytest.mark.parametrize("blocks_before", [0, 1, 3])
    def test_the_mean_comes_back_when_the_noise_fails(self, blocks_before, snapshot, assert_same, monkeypatch):
        monkeypatch.setattr("hf_deelbo.weights.blocks.BLOCK_SIZE", 500)
        posterior, calls = make_posterior(), []
        with posterior.sampled(0):
            pass
        for parameter in posterior.model.parameters():
            parameter.data.add_(1)
        before = snapshot(posterior.model)
        draw_sample = posterior_module.draw_sample

        def fail(*args):
            calls.append(1)
            draw_sample(*args)
            if len(calls) > blocks_before:
                raise MemoryError

        monkeypatch.setattr(posterior_module, "draw_sample", fail)
        with pytest.raises(MemoryError), posterior.sampled(1):
            pass
        assert_same(before, snapshot(posterior.model))

    def test_a_sample_is_used_again_only_where_it_is_the_same(self, drawn_keys):
        posterior = make_posterior()
        weight = next(posterior.model.parameters())

        def sample(*key, **kwargs) -> torch.Tensor:
            with posterior.sampled(*key, **kwargs):
                return weight.detach().clone()

        first = sample(3, 4, reuse=True)
        assert torch.equal(sample(3, 4, reuse=True), first)
        assert drawn_keys == [(3, 4)]
        sample(3, 5, reuse=True)
        assert torch.equal(sample(3, 4, reuse=True), first)
        sample(3, 4)
        sample(3, 4, reuse=True, on_cpu=True)
        assert drawn_keys == [(3, 4), (3, 5), (3, 4), (3, 4), (3, 4)]
        with torch.no_grad():
            weight.add_(1)
        posterior.update_prior_variances()
        torch.testing.assert_close(sample(3, 4, reuse=True), first + 1)
        with posterior.sampled(3, 4, reuse=True):
            posterior.model(**batch()).logits.sum().backward()
            posterior.complete_gradients()
        torch.testing.assert_close(sample(3, 4, reuse=True), first + 1)

    def test_samples_do_not_nest(self):
        posterior = make_posterior()
        with posterior.sampled(0):
            with pytest.raises(RuntimeError, match="holds a weight sample"), posterior.sampled(1):
                pass
            with pytest.raises(RuntimeError, match="holds a weight sample"):
                posterior.update_prior_variances()

    def test_samples_have_the_spread_of_the_posterior(self):
        model = nn.Linear(3, 2)
        posterior = GaussianPosterior(model, ["bias"], init_sigma=0.3, num_examples=1)
        mean, samples = model.weight.detach().clone(), []
        for seed in range(2000):
            with posterior.sampled(seed):
                samples.append(model.weight.detach().clone())
        samples = torch.stack(samples)
        standard_error = 0.3 / 2000**0.5
        assert (samples.mean(0) - mean).abs().max() < 5 * standard_error
        torch.testing.assert_close(samples.std(0), torch.full((2, 3), 0.3), rtol=0.1, atol=0)


class TestGradients:
    @pytest.mark.usefixtures("each_kind_of_device")
    @pytest.mark.parametrize("prior", ["l2-zero", "l2-sp"])
    def test_they_are_those_of_autograd_through_lambda_and_tau(self, prior):
        """The reference samples by `functional_call` in float64 and differentiates through lambda* and tau*."""
        model = make_model("vit")
        names = head_parameter_names(model)
        backbone = {name: p for name, p in model.named_parameters() if name not in names}
        starts_at_mu = prior == "l2-sp"
        mu = {name: starts_at_mu * p.detach().double() for name, p in backbone.items()}
        the_prior = IsotropicPrior.l2_sp(backbone) if starts_at_mu else IsotropicPrior.l2_zero(backbone)
        posterior = GaussianPosterior(
            model, names, the_prior, sigma_update="optimizer", init_sigma=0.05, kappa=3.0, num_examples=24
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        posterior.update_prior_variances()

        reference = copy.deepcopy(model).double()
        w_bar = {name: p.detach().clone().requires_grad_() for name, p in reference.named_parameters()}
        rho = posterior.rho.detach().clone().requires_grad_()
        eps = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        add_noise_(eps, torch.tensor(1.0), key=(1, 2))
        labels = torch.arange(8) % 3
        sigma = torch.log1p(torch.exp(rho))
        w = {name: w_bar[name] + sigma * eps[name].double() for name in w_bar}
        pixels = batch()["pixel_values"].double()
        loss = functional_call(reference, w, kwargs={"pixel_values": pixels, "labels": labels}).loss
        for part in (backbone.keys(), names):
            size = sum(w_bar[name].numel() for name in part)
            distance = sum((w_bar[name] - mu.get(name, 0)).square().sum() for name in part)
            variance = sigma**2 + distance / size
            loss = loss + 0.5 * size * (torch.log(variance) - torch.log(sigma**2)) / (3.0 * 24)
        loss.backward()

        with posterior.sampled(1, 2):
            model(**batch(), labels=labels).loss.backward()
            posterior.complete_gradients()
        torch.testing.assert_close(posterior.rho.grad, rho.grad, rtol=1e-5, atol=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.double(), w_bar[name].grad, rtol=1e-4, atol=1e-6)

    @pytest.mark.usefixtures("two_threads")
    def test_they_do_not_depend_on_the_number_of_threads(self):
        """With tensors so large that torch would share one among its threads, in the backbone and in the head."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(600, 700), nn.Linear(700, 300))
        posterior = GaussianPosterior(
            model,
            ["1.weight", "1.bias"],
            grouping="tensor",
            sigma_update="optimizer",
            init_sigma=0.05,
            num_examples=24,
        )
        gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data.add_(0.01 * torch.randn_like(parameter))
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for name, parameter in model.named_parameters():
                parameter.grad = gradients[name].clone()
            posterior.update_prior_variances()
            with posterior.sampled(0):
                posterior.complete_gradients()
            numbers = [posterior.lambda_, posterior.tau, *posterior.kl, posterior.rho.grad]
            results.append(numbers + [parameter.grad for parameter in model.parameters()])
        assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))

    def test_a_loss_scale_scales_all_of_them(self):
        gradients = []
        for scale in (1.0, 1024.0):
            posterior = make_posterior()
            with posterior.sampled(0):
                (scale * posterior.model(**batch(), labels=torch.zeros(8, dtype=torch.long)).loss).backward()
                posterior.complete_gradients(loss_scale=scale)
            gradients.append([posterior.rho.grad, *(p.grad for p in posterior.model.parameters())])
        for plain, scaled in zip(*gradients, strict=True):
            torch.testing.assert_close(scaled / 1024, plain)

    def test_a_parameter_that_the_loss_does_not_reach_is_pulled_to_the_prior(self):
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        posterior = GaussianPosterior(
            model,
            ["head.weight", "head.bias"],
            IsotropicPrior.l2_zero({n: p for n, p in model.named_parameters() if not n.startswith("head")}),
            init_sigma=0.1,
            kappa=2.0,
            num_examples=5,
        )
        with posterior.sampled(0):
            model["head"](model["used"](torch.ones(1, 2))).sum().backward()
            posterior.complete_gradients()
        expected = model["unused"].weight.detach() / (posterior.lambda_ * 2.0 * 5)
        torch.testing.assert_close(model["unused"].weight.grad, expected.float())

    def test_they_need_a_sample(self):
        with pytest.raises(RuntimeError, match="no weight sample"):
            make_posterior().complete_gradients()

    def test_a_prediction_in_inference_mode_before_changes_nothing(self):
        gradients = {}
        for before in (torch.no_grad, torch.inference_mode):
            posterior = make_posterior()
            with before(), posterior.sampled(7):
                posterior.model(**batch())
            posterior.update_prior_variances()
            with posterior.sampled(1, 2):
                posterior.model(**batch(), labels=torch.arange(8) % 3).loss.backward()
                posterior.complete_gradients()
            gradients[before] = [posterior.rho.grad, *(p.grad for p in posterior.model.parameters())]
        for one, other in zip(*gradients.values(), strict=True):
            assert torch.equal(one, other)


# PTYL's prior looks whether its distance cancelled, and whether its weights are those of the distance
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(("prior", "num_waits"), [("l2-zero", 0), ("l2-sp", 0), ("ptyl", 2)])
def test_the_host_does_not_wait_for_a_gpu(prior, num_waits):
    model = make_model("resnet")
    of_backbone = IsotropicPrior.l2_sp if prior == "l2-sp" else IsotropicPrior.l2_zero
    backbone = backbone_of(model, head_parameter_names(model))
    posterior = make_posterior("resnet", prior=low_rank_prior(model) if prior == "ptyl" else of_backbone(backbone))
    for parameter in posterior.model.parameters():
        parameter.grad = torch.randn_like(parameter)
    with HostWaits() as waits:
        posterior.update_prior_variances()
        with posterior.sampled(0):
            posterior.complete_gradients()
    assert waits.count == num_waits


class TestPredictions:
    def test_probabilities_are_averaged_not_logits(self):
        posterior = make_posterior(init_sigma=0.3)
        inputs = batch()
        expected = []
        for seed in range(4):
            with posterior.sampled(seed), torch.no_grad():
                expected.append(posterior.model.eval()(**inputs).logits.double().softmax(-1))
        probabilities = posterior.predict_proba(inputs, num_samples=4)
        torch.testing.assert_close(probabilities.double(), torch.stack(expected).mean(0))
        of_mean = posterior.predict_proba(inputs)
        torch.testing.assert_close(of_mean, posterior.model(**inputs).logits.softmax(-1))
        assert (of_mean - probabilities).abs().max() > 1e-3

    def test_the_mode_of_the_model_is_kept(self):
        posterior = make_posterior()
        posterior.model.train()
        posterior.predict_proba(batch(), num_samples=1)
        assert posterior.model.training

    def test_batch_norm_needs_statistics_of_the_sample(self):
        posterior = make_posterior("resnet")
        inputs = batch("resnet")
        with pytest.raises(ValueError, match="recompute_batch_norm"):
            posterior.predict_proba(inputs, num_samples=2)
        posterior.recompute_batch_norm([inputs], num_samples=2)
        expected = []
        for seed in range(2):
            with posterior.sampled(seed), torch.no_grad():
                model = copy.deepcopy(posterior.model).train()
                expected.append(model(**inputs).logits.softmax(-1))
        average = posterior.predict_proba(inputs, num_samples=2)
        torch.testing.assert_close(average, torch.stack(expected).mean(0), rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("value", [-1, 1.5])
    def test_a_bad_number_of_samples(self, value):
        with pytest.raises(ValueError, match=f"num_samples: .*{value}"):
            make_posterior().predict_proba(batch(), num_samples=value)


class TestRefusals:
    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
    def test_init_sigma(self, value):
        with pytest.raises(ValueError, match="init_sigma"):
            make_posterior(init_sigma=value)

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
    def test_kappa(self, value):
        with pytest.raises(ValueError, match="kappa"):
            make_posterior(kappa=value)

    def test_a_prior_of_another_model(self):
        with pytest.raises(ValueError, match="prior: its parameter names"):
            make_posterior(prior=IsotropicPrior.l2_zero({"other": torch.zeros(3)}))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_weights_too_coarse_for_the_noise(self, dtype):
        model = make_model("vit").to(dtype)
        with pytest.raises(ValueError, match=r"float16.*dtype=torch.float32"):
            GaussianPosterior(model, head_parameter_names(model), num_examples=24)

    def test_nothing_to_train(self):
        model = make_model("vit").requires_grad_(False)
        with pytest.raises(ValueError, match="no trainable parameter"):
            GaussianPosterior(model, [], num_examples=24)

    def test_an_unknown_head(self):
        with pytest.raises(ValueError, match=r"'nope' is not a trainable parameter"):
            GaussianPosterior(make_model("vit"), ["nope"], num_examples=24)

    def test_a_parameter_frozen_too_late(self):
        posterior = make_posterior()
        posterior.model.vit.embeddings.cls_token.requires_grad_(False)
        with pytest.raises(RuntimeError, match=r"'vit.embeddings.cls_token' was frozen or unfrozen"):
            posterior.update_prior_variances()

    def test_no_n(self):
        posterior = make_posterior(num_examples=None)
        assert posterior.kappa is None
        with pytest.raises(ValueError, match="needs N"):
            _ = posterior.kl_weight

    def test_the_state_of_another_posterior(self):
        posterior = make_posterior()
        state = {name: tensor.clone() for name, tensor in posterior.state_dict().items()}
        state["rho"] += 1
        del state["prior.mean.vit.embeddings.cls_token"]
        with pytest.raises(ValueError, match=r"'prior.mean.vit.embeddings.cls_token' is missing"):
            posterior.load_state_dict(state)
        assert posterior.sigma.item() == pytest.approx(0.05)  # nothing was loaded
