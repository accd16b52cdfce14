"""`DEELBoTrainer` against plain autograd, and in the company `Trainer` keeps."""

import copy
import json
import math
import os
import re
import shutil

import datasets
import numpy as np
import pytest
import torch
from conftest import NUM_LABELS, HostWaits, Recorder, add_noise_, collate, make_dataset, make_model
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.func import functional_call
from transformers import (
    AutoModelForImageClassification,
    TimmWrapperConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_deelbo import DEELBoConfig, DEELBoTrainer, IsotropicPrior, LowRankPrior
from hf_deelbo.sharing.checkpoints import seal


def with_a_nan(data: list[dict]) -> list[dict]:
    return [*data[:3], data[3] | {"pixel_values": data[3]["pixel_values"] * math.nan}, *data[4:]]


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            control.should_training_stop = True


def parts_of_loss(trainer: DEELBoTrainer) -> list[tuple]:
    keys = ("loss", "nll", "lambda", "tau", "sigma", "kl_backbone", "kl_head")
    return [tuple(line[key] for key in keys) for line in trainer.state.log_history if "nll" in line]


class Reference:
    """Steps on the DE ELBo by plain autograd in float64: one graph, through sampling, lambda* and tau*."""

    def __init__(self, trainer: DEELBoTrainer, prior: str, mu: dict[str, torch.Tensor]):
        args, posterior = trainer.args, trainer.posterior
        self.model = copy.deepcopy(trainer.model).double().train()
        self.w_bar = {name: p.detach().clone().requires_grad_() for name, p in self.model.named_parameters()}
        self.rho = torch.tensor(math.log(math.expm1(args.init_sigma)), dtype=torch.float64, requires_grad=True)
        self.head = posterior.head.keys()
        self.mu = {name: tensor.double() * (prior == "l2-sp") for name, tensor in mu.items()}
        self.kappa_n = posterior.kappa * len(trainer.train_dataset)
        self.args = args
        parameters = [*self.w_bar.values(), self.rho]
        self.optimizer = torch.optim.SGD(parameters, lr=args.learning_rate, momentum=0.9, nesterov=True)

    @property
    def sigma(self) -> torch.Tensor:
        return torch.log1p(torch.exp(self.rho))

    def kl(self) -> torch.Tensor:
        total = 0.0
        for names in (self.w_bar.keys() - self.head, self.head):
            size = sum(self.w_bar[name].numel() for name in names)
            distance = sum((self.w_bar[name] - self.mu_of(name)).square().sum() for name in names)
            variance = self.sigma**2 + distance / size
            total = total + 0.5 * size * torch.log(variance / self.sigma**2)
        return total

    def mu_of(self, name: str) -> torch.Tensor | float:
        return 0.0 if name in self.head else self.mu[name]

    def step(self, batches: list[dict], step: int) -> torch.Tensor:
        eps = {name: torch.zeros(p.shape) for name, p in self.w_bar.items()}
        add_noise_(eps, torch.tensor(1.0), key=(self.args.seed, step))
        w = {name: p + self.sigma * eps[name].double() for name, p in self.w_bar.items()}
        nll = 0.0
        for batch in batches:
            inputs = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
            nll = nll + functional_call(self.model, w, kwargs=inputs).loss / len(batches)
        loss = nll + self.kl() / self.kappa_n
        loss.backward()
        if self.args.max_grad_norm:
            nn.utils.clip_grad_norm_([*self.w_bar.values(), self.rho], self.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def move_from_start(model: nn.Module) -> dict[str, torch.Tensor]:
    """Move the weights off the prior mean, so that its pull is not zero; return where they were."""
    torch.manual_seed(7)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return start


STEP_CASES = [
    (kind, accumulation, checkpointing)
    for kind in ("vit", "resnet", "bert")
    for accumulation in (1, 4)
    for checkpointing in (False, True)
    if not (kind == "resnet" and checkpointing)  # transformers' ResNet has none
]


class TestOneStepIsPlainAutograd:
    @pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
    @pytest.mark.parametrize("prior", ["l2-zero", "l2-sp"])
    @pytest.mark.parametrize(("kind", "accumulation", "checkpointing"), STEP_CASES)
    def test_weights_and_sigma(self, make_trainer, kind, accumulation, checkpointing, prior, max_grad_norm):
        recorder = Recorder()
        trainer = make_trainer(
            kind,
            prior=prior,
            max_steps=1,
            kappa=20,
            gradient_accumulation_steps=accumulation,
            per_device_train_batch_size=16 // accumulation,
            gradient_checkpointing=checkpointing,
            max_grad_norm=max_grad_norm,
            lr_scheduler_type="constant",
            logging_steps=1,
            trainer={"data_collator": recorder},
        )
        start = move_from_start(trainer.model)
        reference = Reference(trainer, prior, mu=start)
        trainer.train()
        loss = reference.step(recorder.batches[:accumulation], step=0)

        assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert trainer.posterior.sigma.item() == pytest.approx(reference.sigma.item(), rel=1e-6)
        assert abs(trainer.posterior.sigma.item() / 0.05 - 1) > 1e-4  # it did move
        for name, parameter in trainer.model.named_parameters():
            torch.testing.assert_close(parameter.double(), reference.w_bar[name].detach(), rtol=0, atol=1e-6, msg=name)

    @pytest.mark.usefixtures("each_kind_of_device")
    def test_several_steps_with_momentum_and_schedule(self, make_trainer):
        recorder = Recorder()
        trainer = make_trainer("vit", max_steps=5, max_grad_norm=0.5, trainer={"data_collator": recorder})
        start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        reference = Reference(trainer, "l2-sp", mu=start)
        trainer.train()
        for step in range(5):
            rate = 0.1 * 0.5 * (1 + math.cos(math.pi * step / 5))
            reference.optimizer.param_groups[0]["lr"] = rate
            reference.step([recorder.batches[step]], step)
        assert trainer.posterior.sigma.item() == pytest.approx(reference.sigma.item(), rel=1e-6)
        for name, parameter in trainer.model.named_parameters():
            torch.testing.assert_close(parameter.double(), reference.w_bar[name].detach(), rtol=0, atol=2e-6, msg=name)

    def test_all_batches_of_a_step_have_one_sample(self, make_trainer, drawn_keys):
        make_trainer(max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=3, seed=5).train()
        assert drawn_keys == [(5, 0), (5, 1)]

    @pytest.mark.usefixtures("as_on_a_gpu")
    def test_the_host_waits_for_a_gpu_as_often_as_for_the_plain_trainer_and_once_more_for_the_loss(self, make_trainer):
        trainer = make_trainer(logging_strategy="no")
        plain = Trainer(make_model("vit"), trainer.args, train_dataset=make_dataset("vit"))

        def waits_of_steps_5_to_9(trainer: Trainer) -> int:  # 3 are an epoch, and in the first one labels are checked
            counts = []
            for num_steps in (4, 9):
                trainer.args.max_steps = num_steps
                with HostWaits() as waits:
                    trainer.train()
                counts.append(waits.count)
            return counts[1] - counts[0]

        assert waits_of_steps_5_to_9(trainer) == waits_of_steps_5_to_9(plain) + 5

    def test_a_ragged_batch_weighs_by_its_size(self, make_trainer):
        """10 examples in batches of 4, 4 and 2, accumulated, are one batch of 10."""
        data, results = make_dataset("vit", 10), []
        for batch_size, accumulation in ((10, 1), (4, 3)):
            trainer = make_trainer(
                "vit",
                train_dataset=data,
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=accumulation,
                dataloader_drop_last=False,
                max_steps=1,
                logging_steps=1,
            )
            trainer.train()
            results.append((trainer.state.log_history[0]["nll"], trainer.model.state_dict()))
        assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
        for name, tensor in results[0][1].items():
            torch.testing.assert_close(tensor, results[1][1][name], rtol=0, atol=1e-6)


def test_compute_loss_is_the_de_elbo_of_the_batch(make_trainer):
    trainer = make_trainer("vit", kappa=2.0)
    batch = collate(make_dataset("vit", 5))
    model, posterior = trainer.model.train(), trainer.posterior
    head = torch.cat([p.flatten().double() for p in posterior.head.values()])
    tau = 0.05**2 + head.square().mean()
    kl = 0.5 * len(head) * torch.log(tau / 0.05**2)  # the backbone is at its prior mean, with lambda = sigma^2
    expected = model(**batch).loss.item() + kl.item() / (2.0 * 24)
    assert trainer.compute_loss(model, batch).item() == pytest.approx(expected, rel=1e-5)
    assert trainer.compute_loss(model.eval(), batch).item() == pytest.approx(model(**batch).loss.item(), rel=1e-6)


class TestLogs:
    def test_every_line_adds_up(self, make_trainer):
        trainer = make_trainer(logging_steps=1)
        trainer.train()
        lines = [line for line in trainer.state.log_history if "loss" in line]
        assert len(lines) == 4
        for line in lines:
            kappa_n = trainer.posterior.kappa * 24
            kl = line["kl_backbone"] + line["kl_head"]
            assert line["loss"] == pytest.approx(line["nll"] + kl / kappa_n, rel=1e-5)
            assert line["de_elbo"] == pytest.approx(-kappa_n * line["nll"] - kl, rel=1e-6)
        assert lines[0]["sigma"] != 0.05
        assert lines[0]["lambda"] == pytest.approx(0.05**2)  # sigma_0^2 while w_bar is at mu
        assert all(line["tau"] > 0 for line in lines)

    def test_nll_is_averaged_over_the_steps_between_logs(self, make_trainer):
        each, pairs = make_trainer(logging_steps=1), make_trainer(logging_steps=2)
        each.train()
        pairs.train()
        ones = [line["nll"] for line in each.state.log_history if "nll" in line]
        twos = [line["nll"] for line in pairs.state.log_history if "nll" in line]
        assert twos == pytest.approx([(ones[0] + ones[1]) / 2, (ones[2] + ones[3]) / 2], rel=1e-6)

    def test_lambda_and_tau_are_optimal_for_what_was_learned(self, make_trainer):
        trainer = make_trainer(prior="l2-zero")
        trainer.train()
        posterior = trainer.posterior
        for variance, part in ((posterior.lambda_, posterior.backbone), (posterior.tau, posterior.head)):
            weights = torch.cat([p.flatten().double() for p in part.values()])
            assert variance.item() == pytest.approx((posterior.sigma**2 + weights.square().mean()).item(), rel=1e-7)


class TestElbo:
    def test_it_is_the_formula_with_dense_gaussians(self, make_trainer):
        trainer = make_trainer("vit", kappa=2.0)
        trainer.train()
        result = trainer.de_elbo(num_samples=3)
        posterior, model = trainer.posterior, copy.deepcopy(trainer.model).double().eval()
        batch = collate(trainer.train_dataset)
        log_likelihoods = []
        for seed in range(3):
            eps = {name: torch.zeros_like(p) for name, p in trainer.model.named_parameters()}
            add_noise_(eps, torch.tensor(1.0), key=(seed,))
            sigma = posterior.sigma
            w = {name: p.detach() + sigma * eps[name].double() for name, p in model.named_parameters()}
            logits = functional_call(model, w, kwargs={"pixel_values": batch["pixel_values"].double()}).logits
            log_likelihoods.append(torch.distributions.Categorical(logits=logits).log_prob(batch["labels"]).sum())
        expected = torch.stack(log_likelihoods).mean().item()
        assert result.log_likelihood == pytest.approx(expected, rel=1e-5)
        assert result.num_examples == 24

        start = {name: p.detach() for name, p in make_model("vit").named_parameters()}
        zero = {name: torch.zeros_like(p) for name, p in start.items()}
        kls = []
        for part, mu, variance in (
            (posterior.backbone, start, posterior.lambda_),
            (posterior.head, zero, posterior.tau),
        ):
            mean, prior_mean = (torch.cat([w[name].flatten().double() for name in part]) for w in (part, mu))
            q = torch.distributions.Normal(mean, posterior.sigma)
            p = torch.distributions.Normal(prior_mean, variance.sqrt())
            kls.append(torch.distributions.kl_divergence(q, p).sum().item())
        assert [result.kl_backbone, result.kl_head] == pytest.approx(kls, rel=1e-7)  # weights are stored in float32
        assert result.value == pytest.approx(2.0 * result.log_likelihood - sum(kls), rel=1e-7)

    def test_a_ragged_last_batch_does_not_count_more(self, make_trainer):
        whole = make_trainer(per_device_eval_batch_size=24).de_elbo(num_samples=2)
        ragged = make_trainer(per_device_eval_batch_size=7).de_elbo(num_samples=2)
        assert ragged.nll == pytest.approx(whole.nll, rel=1e-6)

    def test_the_model_and_its_mode_are_left_alone(self, make_trainer, snapshot, assert_same):
        trainer = make_trainer("resnet")
        trainer.train()
        trainer.model.train()
        before = snapshot(trainer.model)
        trainer.de_elbo(num_samples=2)
        assert_same(before, snapshot(trainer.model))
        assert trainer.model.training

    def test_the_set_without_augmentation_is_the_default(self, make_trainer):
        augmented = [example | {"pixel_values": example["pixel_values"] + 5} for example in make_dataset("vit")]
        plain = make_trainer().de_elbo(num_samples=1)
        trainer = make_trainer(train_dataset=augmented, trainer={"elbo_dataset": make_dataset("vit")})
        assert trainer.de_elbo(num_samples=1).nll == pytest.approx(plain.nll)
        assert trainer.de_elbo(augmented, num_samples=1).nll != pytest.approx(plain.nll)

    @pytest.mark.parametrize("value", [0, -1, 2.5])
    def test_a_bad_number_of_samples(self, make_trainer, value):
        with pytest.raises(ValueError, match=f"num_samples: .*{value}"):
            make_trainer().de_elbo(num_samples=value)

    def test_a_rough_j_is_of_some_examples_of_each_class_but_still_of_n(self, make_trainer):
        labels = [0] * 20 + [1] * 10 + [2] * 10
        rows = [row | {"labels": label} for row, label in zip(make_dataset("vit", 40), labels, strict=True)]
        columns = {"pixel_values": [row["pixel_values"].numpy() for row in rows], "labels": labels}
        trainer = make_trainer(train_dataset=datasets.Dataset.from_dict(columns).with_format("torch"))
        seen = []
        hook = trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.extend(kwargs["pixel_values"]), with_kwargs=True
        )
        rough = trainer.de_elbo(num_samples=1, num_examples=6)
        hook.remove()
        chosen = [next(i for i, row in enumerate(rows) if torch.equal(row["pixel_values"], x)) for x in seen]
        assert sorted(labels[i] for i in chosen) == [0, 0, 1, 1, 2, 2]
        assert rough.nll == trainer.de_elbo([rows[i] for i in chosen], num_samples=1).nll
        assert (rough.num_examples, trainer.posterior.de_elbo) == (40, None)
        assert trainer.de_elbo(num_samples=1, num_examples=40).nll == trainer.de_elbo(num_samples=1).nll

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"num_examples": 0}, "num_examples: must be a whole number of at least 1, got 0"),
            ({"num_examples": 2.5}, "num_examples: must be a whole number of at least 1, got 2.5"),
            ({"num_examples": 3, "dataset": [1]}, "num_examples: takes examples of the training set"),
        ],
    )
    def test_a_bad_number_of_examples(self, make_trainer, arguments, message):
        with pytest.raises(ValueError, match=message):
            make_trainer().de_elbo(**arguments)


class TestBatchNorm:
    def test_j_at_a_sample_is_what_training_minimised_there(self, make_trainer):
        """Train-mode statistics on the same images, computed by a deep copy of the model at the same sample."""
        trainer = make_trainer("resnet", per_device_eval_batch_size=24)
        trainer.train()
        batch = collate(trainer.train_dataset)
        with trainer.posterior.sampled(0), torch.no_grad():
            expected = copy.deepcopy(trainer.model).train()(**batch).loss.item()
            with_running = copy.deepcopy(trainer.model).eval()(**batch).loss.item()
        assert trainer.de_elbo(num_samples=1).nll == pytest.approx(expected, abs=1e-5)
        assert abs(with_running - expected) > 1e-4

    def test_running_statistics_on_request(self, make_trainer):
        trainer = make_trainer("resnet", recompute_batch_norm=False)
        trainer.train()
        batch = collate(trainer.train_dataset)
        with trainer.posterior.sampled(0), torch.no_grad():
            expected = copy.deepcopy(trainer.model).eval()(**batch).loss.item()
        assert trainer.de_elbo(num_samples=1).nll == pytest.approx(expected, abs=1e-5)

    def test_statistics_are_put_back_when_the_evaluation_raises(self, make_trainer, snapshot, assert_same):
        trainer = make_trainer("resnet")
        trainer.train()
        before = snapshot(trainer.model)
        broken = [example | {"labels": 99} for example in make_dataset("resnet")]
        with pytest.raises(IndexError):
            trainer.de_elbo(broken, num_samples=1)
        assert_same(before, snapshot(trainer.model))

    def test_training_further_makes_them_anew(self, make_trainer):
        trainer = make_trainer("resnet")
        trainer.de_elbo(num_samples=2)
        assert trainer.posterior.sample_statistics.keys() == {0, 1}
        trainer.train()
        assert trainer.posterior.sample_statistics == {}

    def test_no_example_is_left_over_alone(self, make_trainer):
        """9 images of one pixel by batches of 8 would leave one, of which there is no variance."""
        data = [
            example | {"pixel_values": example["pixel_values"][:, :1, :1]} for example in make_dataset("resnet", 9)
        ]
        trainer = make_trainer("resnet", train_dataset=data, per_device_eval_batch_size=8)
        assert math.isfinite(trainer.de_elbo(num_samples=1).value)

    def test_a_capped_class_balanced_part_is_used(self, make_trainer):
        labels = [0] * 20 + [1] * 10 + [2] * 10
        images = [example["pixel_values"].numpy() for example in make_dataset("resnet", 40)]
        data = datasets.Dataset.from_dict({"pixel_values": images, "labels": labels}).with_format("torch")
        trainer = make_trainer("resnet", train_dataset=data, num_batch_norm_examples=6)
        seen = []
        trainer.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["pixel_values"].clone()), with_kwargs=True
        )
        trainer.recompute_batch_norm(1)
        seen = torch.cat(seen)
        index = [int((data["pixel_values"][:] - x).flatten(1).abs().sum(1).argmin()) for x in seen]
        assert sorted(labels[i] for i in index) == [0, 0, 1, 1, 2, 2]


class TestEvaluation:
    def test_eval_loss_is_the_nll_of_the_mean(self, make_trainer):
        trainer = make_trainer()
        trainer.train()
        data = make_dataset("vit", 21, seed=9)
        with torch.no_grad():
            expected = trainer.model.eval()(**collate(data)).loss.item()
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("kind", ["vit", "resnet"])
    def test_samples_are_averaged_as_probabilities(self, make_trainer, kind):
        trainer = make_trainer(kind, num_eval_samples=4, init_sigma=0.2, per_device_eval_batch_size=8)
        data = make_dataset(kind, 21, seed=9)
        output = trainer.predict(data)
        batch = collate(data)
        inputs = {"pixel_values": batch["pixel_values"]}
        expected = trainer.posterior.predict_proba(inputs, num_samples=4)
        probabilities = torch.softmax(torch.tensor(output.predictions), -1)
        torch.testing.assert_close(probabilities, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(np.exp(output.predictions).sum(-1), 1, rtol=1e-5)
        nll = -torch.log(expected[torch.arange(21), batch["labels"]]).mean().item()
        assert output.metrics["test_loss"] == pytest.approx(nll, rel=1e-4)
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(nll, rel=1e-4)

    def test_no_example_is_dropped(self, make_trainer):
        trainer = make_trainer(per_device_eval_batch_size=8)
        assert trainer.args.dataloader_drop_last
        assert len(trainer.predict(make_dataset("vit", 21)).predictions) == 21
        assert trainer.args.dataloader_drop_last

    @pytest.mark.parametrize("kind", ["vit", "resnet"])
    def test_evaluating_between_steps_changes_nothing(self, make_trainer, kind, snapshot, assert_same):
        plain = make_trainer(kind)
        plain.train()
        evaluated = make_trainer(
            kind,
            eval_strategy="steps",
            eval_steps=1,
            num_eval_samples=2,
            trainer={"eval_dataset": make_dataset(kind, 5)},
        )
        evaluated.train()
        assert_same(snapshot(plain.model), snapshot(evaluated.model))
        assert torch.equal(plain.posterior.rho, evaluated.posterior.rho)


CLOSED_FORM = {"sigma_update": "closed-form", "grouping": "layer", "kl_warmup_epochs": 4.5, "optim": "adamw_torch"}


class TestThePriorHolds:
    """Training that stands still because the prior holds the weights is said once, with what to do."""

    def warnings_of(self, make_trainer, monkeypatch, **settings) -> list[str]:
        messages = []
        monkeypatch.setattr("hf_deelbo.callbacks.logger.warning", messages.append)
        trainer = make_trainer(max_steps=40, optim="adamw_torch", per_device_train_batch_size=24, **settings)
        trainer.train()
        return messages

    @pytest.mark.parametrize(
        ("settings", "advice"),
        [
            ({"init_sigma": 1e-4, "learning_rate": 1e-5}, r'sigma_update="closed-form"'),
            ({"sigma_update": "closed-form", "kappa": 0.1, "learning_rate": 1e-4}, r'kappa at "auto"'),
            ({"sigma_update": "closed-form", "learning_rate": 1e-9}, "larger learning_rate than 1e-09"),
        ],
    )
    def test_it_is_said(self, make_trainer, monkeypatch, settings, advice):
        (message,) = self.warnings_of(make_trainer, monkeypatch, **settings)
        assert message.startswith("The prior holds the weights: the NLL of training stood still (")
        assert re.search(advice, message)

    @pytest.mark.parametrize("sigma_update", ["closed-form", "optimizer"])
    def test_not_where_something_is_learned(self, make_trainer, monkeypatch, sigma_update):
        assert self.warnings_of(make_trainer, monkeypatch, sigma_update=sigma_update, learning_rate=1e-2) == []


class TestResume:
    @pytest.mark.parametrize("sigma", [{}, CLOSED_FORM], ids=["optimizer", "closed form"])
    @pytest.mark.parametrize("kind", ["vit", "resnet"])
    def test_ten_and_ten_steps_are_twenty_to_the_bit(self, make_trainer, kind, sigma, tmp_path, snapshot, assert_same):
        settings = {"max_steps": 20, "save_strategy": "steps", "save_steps": 10, "logging_steps": 1} | sigma
        whole = make_trainer(kind, **settings, output_dir=str(tmp_path / "whole"))
        whole.train()

        first = make_trainer(kind, **settings, output_dir=str(tmp_path / "parts"), trainer={"callbacks": [StopAt(10)]})
        first.train()
        assert first.state.global_step == 10
        # another start: all that matters must come from the checkpoint, the prior mean too
        second = make_trainer(kind, model=make_model(kind, seed=5), **settings, output_dir=str(tmp_path / "parts"))
        second.train(resume_from_checkpoint=True)

        assert second.state.global_step == 20
        assert_same(snapshot(whole.model), snapshot(second.model))
        assert_same(whole.posterior.state_dict(), second.posterior.state_dict())
        name = "exp_avg" if sigma else "momentum_buffer"
        buffers = [[state[name] for state in trainer.optimizer.state.values()] for trainer in (whole, second)]
        assert all(torch.equal(one, other) for one, other in zip(*buffers, strict=True))
        keys = ("loss", "nll", "lambda", "tau", "sigma", "kl_backbone")
        lines = [
            [{k: line[k] for k in keys} for line in t.state.log_history if "nll" in line] for t in (whole, second)
        ]
        assert lines[0] == lines[1]

    def test_the_best_model_comes_with_its_sigma(self, make_trainer, snapshot, assert_same):
        trainer = make_trainer(
            max_steps=4,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            load_best_model_at_end=True,
            metric_for_best_model="loss",
            logging_steps=1,
            trainer={"eval_dataset": make_dataset("vit", 6)},
        )
        losses = iter([3.0, 1.0, 2.0, 4.0])  # the second is the best
        evaluate = trainer.evaluate
        trainer.evaluate = lambda *a, **k: evaluate(*a, **k) | {"eval_loss": next(losses)}
        trainer.train()
        sigmas = [line["sigma"] for line in trainer.state.log_history if "sigma" in line]
        assert trainer.posterior.sigma.item() == pytest.approx(sigmas[1], rel=1e-12)
        best = AutoModelForImageClassification.from_pretrained(trainer.state.best_model_checkpoint)
        assert_same(snapshot(best), snapshot(trainer.model))

    def test_a_checkpoint_that_is_not_whole_is_passed_over(self, make_trainer, tmp_path, snapshot, assert_same):
        settings = {"save_strategy": "steps", "save_steps": 1, "output_dir": str(tmp_path / "run")}
        whole = make_trainer(**settings)
        whole.train()
        names = sorted(os.listdir(tmp_path / "run" / "checkpoint-3"))
        assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"} < set(names)
        for number, name in enumerate(names):
            folder = tmp_path / str(number)
            shutil.copytree(tmp_path / "run", folder, ignore=shutil.ignore_patterns("checkpoint-4"))
            file = folder / "checkpoint-3" / name
            if number % 2:
                file.unlink()
            else:  # damaged, in its last byte
                content = file.read_bytes()
                file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            resumed = make_trainer(model=make_model("vit", seed=5), **(settings | {"output_dir": str(folder)}))
            with pytest.raises(ValueError, match=re.escape(str(folder / "checkpoint-3"))):
                resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
            resumed.train(resume_from_checkpoint=True)
            assert_same(snapshot(whole.model), snapshot(resumed.model))

    def test_without_a_whole_checkpoint_it_says_so(self, make_trainer, tmp_path):
        with pytest.raises(ValueError, match="resume_from_checkpoint: there is no whole checkpoint in"):
            make_trainer(output_dir=str(tmp_path)).train(resume_from_checkpoint=True)

    def test_a_checkpoint_of_a_plain_trainer_is_refused(self, make_trainer, tmp_path):
        trainer = make_trainer(save_strategy="steps", save_steps=4, output_dir=str(tmp_path))
        trainer.train()
        for name in ("posterior.safetensors", "posterior_config.json"):
            os.remove(tmp_path / "checkpoint-4" / name)
        seal(tmp_path / "checkpoint-4")
        with pytest.raises(ValueError, match="no saved posterior"):
            make_trainer(output_dir=str(tmp_path)).train(resume_from_checkpoint=True)

    def test_the_model_file_holds_the_mean_under_its_own_names(self, make_trainer, tmp_path, assert_same, snapshot):
        trainer = make_trainer("vit")
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        again = AutoModelForImageClassification.from_pretrained(tmp_path / "saved")
        assert_same(snapshot(trainer.model), snapshot(again))


class TestCompany:
    """What users pass to `Trainer` they can pass here."""

    def test_their_optimizer_and_scheduler(self, make_trainer):
        model = make_model("vit")
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
        trainer = make_trainer(model=model, trainer={"optimizers": (optimizer, scheduler)})
        trainer.train()
        assert trainer.posterior.rho in optimizer.state
        # Adam's first steps are about lr each, here half of 0.01, for rho as for the weights
        moved = abs(trainer.posterior.rho.item() - math.log(math.expm1(0.05)))
        assert 0.002 < moved < 0.021

    def test_their_optimizer_class(self, make_trainer):
        trainer = make_trainer(trainer={"optimizer_cls_and_kwargs": (torch.optim.Adam, {"lr": 1e-3})})
        trainer.train()
        assert trainer.posterior.rho in trainer.optimizer.state

    def test_weight_decay_in_their_optimizer_is_ignored_with_a_warning(self, make_trainer, monkeypatch):
        messages, learned = [], []
        monkeypatch.setattr("hf_deelbo.trainer.logger.warning", messages.append)
        for weight_decay in (0.0, 0.3):
            model = make_model("vit")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=weight_decay)
            make_trainer(model=model, trainer={"optimizers": (optimizer, None)}).train()
            learned.append(model.classifier.weight.detach())
        assert torch.equal(*learned)
        assert ["weight_decay of 0.3 is set to 0. The KL" in message for message in messages] == [True]

    @pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "rmsprop"])
    def test_other_optimizers_by_name(self, make_trainer, optim):
        trainer = make_trainer(optim=optim, learning_rate=1e-3)
        rho = trainer.posterior.rho.item()
        trainer.train()
        assert trainer.posterior.rho.item() != rho

    def test_their_likelihood(self, make_trainer, make_config):
        """Cross-entropy given as a function is the model's own."""

        def likelihood(outputs, labels, num_items_in_batch=None):
            assert num_items_in_batch is None
            return nn.functional.cross_entropy(outputs["logits"], labels)

        own = make_trainer("resnet", gradient_accumulation_steps=2, num_eval_samples=2)
        theirs = make_trainer(
            "resnet", gradient_accumulation_steps=2, num_eval_samples=2, trainer={"compute_loss_func": likelihood}
        )
        for trainer in (own, theirs):
            trainer.train()
        for name, tensor in own.model.state_dict().items():
            torch.testing.assert_close(tensor, theirs.model.state_dict()[name], rtol=0, atol=1e-6)
        data = make_dataset("resnet", 9)
        assert own.evaluate(data)["eval_loss"] == pytest.approx(theirs.evaluate(data)["eval_loss"], rel=1e-5)
        assert own.de_elbo(num_samples=2).value == pytest.approx(theirs.de_elbo(num_samples=2).value, rel=1e-5)

    def test_their_callbacks_see_the_mean(self, make_trainer):
        model, seen = make_model("vit"), []

        class Watch(TrainerCallback):
            def on_substep_end(self, args, state, control, model, **kwargs):
                seen.append(model.classifier.weight.detach().clone())

        start = model.classifier.weight.detach().clone()
        make_trainer(model=model, max_steps=1, gradient_accumulation_steps=3, trainer={"callbacks": [Watch()]}).train()
        assert len(seen) == 2
        assert all(torch.equal(weight, start) for weight in seen)

    def test_model_init_gives_each_run_its_own_posterior(self, make_config):
        trainer = DEELBoTrainer(
            args=make_config(), train_dataset=make_dataset("vit"), model_init=lambda: make_model("vit")
        )
        trainer.train()
        first, sigma = trainer.posterior, trainer.posterior.sigma.item()
        trainer.train()
        assert trainer.posterior is not first
        assert trainer.posterior.model is trainer.model
        assert trainer.posterior.sigma.item() == sigma

    def test_training_on_goes_on_from_the_posterior(self, make_trainer):
        trainer = make_trainer()
        trainer.train()
        sigma, posterior = trainer.posterior.sigma.item(), trainer.posterior
        trainer.args.max_steps = 1
        trainer.train()
        assert trainer.posterior is posterior
        assert trainer.posterior.sigma.item() != sigma
        assert sum(p is posterior.rho for group in trainer.optimizer.param_groups for p in group["params"]) == 1

    def test_datasets_with_columns_the_model_does_not_take(self, make_trainer):
        examples = make_dataset("bert", 30)
        data = datasets.Dataset.from_dict(
            {
                "text": ["x"] * 30,
                "input_ids": [example["input_ids"].tolist() for example in examples],
                "labels": [example["labels"] for example in examples],
            }
        )
        trainer = make_trainer("bert", train_dataset=data)
        trainer.train()
        assert math.isfinite(trainer.de_elbo(num_samples=2).value)

    def test_an_iterable_dataset_with_n(self, make_trainer):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(make_dataset("vit"))

        with pytest.raises(ValueError, match="num_train_examples: the training set does not tell its length"):
            make_trainer(train_dataset=Stream())
        trainer = make_trainer(train_dataset=Stream(), num_train_examples=24)
        trainer.train()
        assert trainer.posterior.kappa == trainer.posterior.num_parameters / 24
        expected = make_trainer(model=trainer.model).de_elbo(num_samples=1).nll
        trainer.posterior.rho.data.fill_(math.log(math.expm1(0.05)))
        assert trainer.de_elbo(num_samples=1).nll == pytest.approx(expected, rel=1e-6)

    def test_a_timm_model_in_the_wrapper(self, make_trainer):
        torch.manual_seed(0)
        config = TimmWrapperConfig(architecture="resnet10t", num_labels=NUM_LABELS, model_args={"in_chans": 1})
        data = [e | {"pixel_values": e["pixel_values"].repeat(1, 4, 4)} for e in make_dataset("resnet", 12)]
        trainer = make_trainer(
            model=AutoModelForImageClassification.from_config(config), train_dataset=data, max_steps=2
        )
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        assert all(not torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
        assert math.isfinite(trainer.de_elbo(num_samples=2).value)

    def test_a_plain_module_with_a_named_head(self, make_trainer):
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.out = nn.Linear(64, 8), nn.Linear(8, NUM_LABELS)

            def forward(self, pixel_values, labels=None):
                logits = self.out(torch.tanh(self.body(pixel_values.flatten(1))))
                return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

        with pytest.raises(ValueError, match="head_names: cannot tell"):
            make_trainer(model=Net())
        trainer = make_trainer(model=Net(), head_names=["out"])
        trainer.train()
        assert trainer.posterior.head.keys() == {"out.weight", "out.bias"}
        assert trainer.posterior.sigma.item() != pytest.approx(0.05)

    def test_peft_adapters_are_what_is_learned(self, make_trainer, tmp_path, assert_same):
        def adapted(seed: int):
            torch.manual_seed(seed)
            lora = LoraConfig(
                target_modules=["q_proj", "v_proj", "query", "value"], modules_to_save=["classifier"], r=2
            )
            return get_peft_model(make_model("vit"), lora)

        settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path / "a")}
        model = adapted(seed=3)
        trainer = make_trainer(model=model, **settings)
        start = {name: tensor.clone() for name, tensor in trainer.posterior.backbone.items()}
        assert start
        assert all("lora_" in name for name in start)
        base = model.base_model.model.vit.embeddings.cls_token.detach().clone()
        trainer.train()
        assert_same(trainer.posterior.prior.mean, start)
        assert torch.equal(model.base_model.model.vit.embeddings.cls_token, base)
        assert any(not torch.equal(p, start[name]) for name, p in trainer.posterior.backbone.items())

        resumed = make_trainer(model=adapted(seed=3), **settings)
        resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
        assert_same(trainer.posterior.parameters(), resumed.posterior.parameters())
        assert_same(trainer.posterior.state_dict(), resumed.posterior.state_dict())

    def test_a_low_rank_prior(self, make_trainer):
        model = make_model("vit")
        backbone = {n: p.detach().clone() for n, p in model.named_parameters() if not n.startswith("classifier")}
        torch.manual_seed(0)
        diagonal = {name: torch.rand_like(p) for name, p in backbone.items()}
        deviations = {name: torch.randn(3, *p.shape) for name, p in backbone.items()}
        trainer = make_trainer(
            model=model, prior="ptyl", trainer={"prior": LowRankPrior(backbone, diagonal, deviations)}
        )
        trainer.train()
        assert trainer.posterior.lambda_ > 0
        with pytest.raises(ValueError, match=r'"ptyl" needs the prior itself'):
            make_trainer(prior="ptyl")


class TestPrecisionAndCompilation:
    def test_autocast_keeps_the_weights_in_float32(self, make_trainer):
        trainer = make_trainer(bf16=True)
        plain = make_trainer()
        for each in (trainer, plain):
            each.train()
        assert trainer.model.classifier.weight.dtype == torch.float32
        assert not torch.equal(trainer.model.classifier.weight, plain.model.classifier.weight)
        torch.testing.assert_close(trainer.model.classifier.weight, plain.model.classifier.weight, rtol=0, atol=0.02)
        assert math.isfinite(trainer.de_elbo(num_samples=2).value)

    def test_a_gradient_scaler_does_not_change_the_step(self, make_trainer, monkeypatch):
        """The path of fp16: gradients arrive multiplied, and are unscaled before the clip."""

        class UnscaleAsInFp16(TrainerCallback):
            def on_train_begin(self, *args, **kwargs):
                scaled.accelerator.native_amp = True
                monkeypatch.setattr(type(scaled.accelerator), "mixed_precision", "fp16")

        settings = {"max_grad_norm": 0.1, "kappa": 0.5}
        plain = make_trainer(**settings)
        scaled = make_trainer(**settings, trainer={"callbacks": [UnscaleAsInFp16()]})
        scaled.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for trainer in (plain, scaled):
            trainer.train()
        assert scaled.posterior.sigma.item() == pytest.approx(plain.posterior.sigma.item(), rel=1e-7)
        for name, tensor in plain.model.state_dict().items():
            torch.testing.assert_close(scaled.model.state_dict()[name], tensor, rtol=0, atol=1e-7)

    def test_noise_far_below_the_resolution_of_bf16_is_not_lost(self, make_trainer):
        """Autocast works on 16-bit copies: the weights hold the noise, and sigma's gradient is <g, eps> of it."""
        sigma = 1e-4  # near 1, as norm scales are, neighbours in bf16 are 4e-3 to 8e-3 apart
        trainer = make_trainer(bf16=True, init_sigma=sigma, kappa=1, max_steps=1, max_grad_norm=0)
        posterior, sampled = trainer.posterior, {}
        mean = {name: tensor.clone() for name, tensor in posterior.parameters().items()}
        complete_gradients = posterior.complete_gradients

        def look_and_complete(*args):
            sampled.update(
                {name: (p.detach().clone(), p.grad.clone()) for name, p in trainer.model.named_parameters()}
            )
            product = complete_gradients(*args)
            sampled["rho.grad"] = posterior.rho.grad.item()
            return product

        posterior.complete_gradients = look_and_complete
        variances = (posterior.lambda_.item(), posterior.tau.item())
        trainer.train()

        eps = {name: torch.zeros_like(tensor) for name, tensor in mean.items()}
        add_noise_(eps, torch.tensor(1.0), key=(trainer.args.seed, 0))
        inner_product = 0.0
        for name, noise in eps.items():
            weight, gradient = sampled[name]
            torch.testing.assert_close((weight - mean[name]) / sigma, noise, rtol=0, atol=2e-3)
            inner_product += (gradient.double() * noise.double()).sum().item()
        sizes = [sum(tensor.numel() for tensor in part.values()) for part in (posterior.backbone, posterior.head)]
        of_kl = sum(size * (sigma / variance - 1 / sigma) for size, variance in zip(sizes, variances, strict=True))
        dsigma_drho = -math.expm1(-sigma)
        expected = (inner_product + of_kl / len(trainer.train_dataset)) * dsigma_drho
        assert abs(inner_product) > 1e-3
        assert sampled["rho.grad"] == pytest.approx(expected, abs=1e-3 * abs(inner_product) * dsigma_drho)

    def test_an_overflow_skips_the_step_and_lowers_the_scale(self, make_trainer, monkeypatch):
        """As in fp16: weights, sigma and momentum stay, and training goes on."""
        rhos, gradients_are_finite = [], iter([False, True])

        class AsInFp16(TrainerCallback):
            def on_train_begin(self, *args, **kwargs):
                trainer.accelerator.native_amp = True
                monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp16")

            def on_step_end(self, *args, **kwargs):
                rhos.append((trainer.posterior.rho.item(), trainer.model.classifier.weight.detach().clone()))

        trainer = make_trainer(max_steps=2, trainer={"callbacks": [AsInFp16()]})
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        start = (trainer.posterior.rho.item(), trainer.model.classifier.weight.detach().clone())
        trainer.model.classifier.weight.register_hook(
            lambda gradient: gradient if next(gradients_are_finite) else gradient * math.inf
        )
        trainer.train()
        assert trainer.accelerator.scaler.get_scale() == 128.0
        assert rhos[0][0] == start[0]
        assert torch.equal(rhos[0][1], start[1])
        assert rhos[1][0] != start[0]
        assert math.isfinite(rhos[1][0])
        assert torch.isfinite(rhos[1][1]).all()

    def test_an_overflow_tells_nothing_of_the_curvature(self, make_trainer, monkeypatch):
        trainer = make_trainer(max_steps=3, sigma_update="closed-form", grouping="part")
        sums, gradients_are_finite = [], iter([True, False, True])

        class AsInFp16(TrainerCallback):
            def on_train_begin(self, *args, **kwargs):
                trainer.accelerator.native_amp = True
                monkeypatch.setattr(type(trainer.accelerator), "mixed_precision", "fp16")

            def on_step_end(self, *args, **kwargs):
                sums.append(trainer.posterior.curvature.sums.clone())

        trainer.add_callback(AsInFp16())
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        trainer.model.classifier.weight.register_hook(
            lambda gradient: gradient if next(gradients_are_finite) else gradient * math.inf
        )
        trainer.train()
        assert torch.equal(sums[0], sums[1])
        assert not torch.equal(sums[1], sums[2])
        assert all(torch.isfinite(each).all() for each in sums)

        plain = make_trainer(max_steps=1, sigma_update="closed-form", grouping="part")  # 256 is taken out again
        plain.train()
        torch.testing.assert_close(sums[0], plain.posterior.curvature.sums, rtol=1e-5, atol=0)

    def test_torch_compile(self, make_trainer):
        compiled = make_trainer(torch_compile=True, torch_compile_backend="aot_eager")
        plain = make_trainer()
        for trainer in (compiled, plain):
            trainer.train()
        for name, tensor in plain.model.state_dict().items():
            torch.testing.assert_close(compiled.model.state_dict()[name], tensor, rtol=0, atol=1e-5)
        assert compiled.posterior.sigma.item() == pytest.approx(plain.posterior.sigma.item(), rel=1e-5)

    def test_auto_find_batch_size_starts_again_from_the_mean(self, make_trainer):
        trainer = make_trainer(auto_find_batch_size=True, per_device_train_batch_size=16)
        start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        sizes, at_retry = [], []

        class Look(TrainerCallback):
            def on_train_begin(self, args, state, control, model, **kwargs):
                at_retry.append({name: p.detach().clone() for name, p in model.named_parameters()})

        compute_loss = trainer.compute_loss

        def out_of_memory_above_8(model, inputs, **kwargs):
            sizes.append(len(inputs["labels"]))
            if sizes[-1] > 8:
                raise RuntimeError("CUDA out of memory. Tried to allocate everything")
            return compute_loss(model, inputs, **kwargs)

        trainer.compute_loss = out_of_memory_above_8
        trainer.add_callback(Look())
        trainer.train()
        assert sizes[0] == 16
        assert sizes[-1] <= 8
        assert all(torch.equal(at_retry[-1][name], start[name]) for name in start)


class TestRefusals:
    """Each leaves the model at w_bar."""

    def test_plain_training_arguments(self, tmp_path):
        args = TrainingArguments(str(tmp_path), use_cpu=True)
        with pytest.raises(TypeError, match="args: must be a DEELBoConfig, got TrainingArguments"):
            DEELBoTrainer(make_model("vit"), args, train_dataset=make_dataset("vit"))

    @pytest.mark.parametrize(("name", "flag"), [("FSDP", "is_fsdp_enabled"), ("DeepSpeed", "is_deepspeed_enabled")])
    def test_sharding_asked_for_by_accelerate(self, make_trainer, monkeypatch, name, flag):
        create = DEELBoTrainer.create_accelerator_and_postprocess

        def with_sharding(self):
            create(self)
            setattr(self, flag, True)

        monkeypatch.setattr(DEELBoTrainer, "create_accelerator_and_postprocess", with_sharding)
        with pytest.raises(ValueError, match=f"{name}: is not supported.*DistributedConfig"):
            make_trainer()

    def test_a_model_spread_over_devices(self, make_trainer):
        model = make_model("vit")
        model.hf_device_map = {"vit": 0, "classifier": 1}
        with pytest.raises(ValueError, match="spread over several devices"):
            make_trainer(model=model)

    def test_an_empty_training_set(self, make_trainer):
        with pytest.raises(ValueError, match="train_dataset: it is empty"):
            make_trainer(train_dataset=[])

    def test_a_prior_of_another_model(self, make_trainer):
        prior = IsotropicPrior.l2_zero(dict(make_model("bert").named_parameters()))
        with pytest.raises(ValueError, match="prior: its parameter names are not those"):
            make_trainer(trainer={"prior": prior})

    @pytest.mark.parametrize("label", [NUM_LABELS, 999, -1, -100])
    def test_labels_outside_of_the_head(self, make_trainer, label, snapshot, assert_same):
        data = make_dataset("vit")
        data[5]["labels"] = label
        trainer = make_trainer(train_dataset=data, per_device_train_batch_size=24)
        before = snapshot(trainer.model)
        with pytest.raises(ValueError, match=f"labels: found {label}, but the head has 3 classes, 0 to 2"):
            trainer.train()
        assert_same(before, snapshot(trainer.model))

    @pytest.mark.parametrize("labels", [[0.5], [[0, 1, 1]], [[0.0, 1.0, 1.0]]])
    def test_labels_of_another_likelihood(self, make_trainer, labels):
        data = [example | {"labels": torch.tensor(labels[0])} for example in make_dataset("vit")]
        with pytest.raises(ValueError, match=r"one class index per example.*compute_loss_func"):
            make_trainer(train_dataset=data).train()

    @pytest.mark.parametrize("kind", ["vit", "resnet"])
    def test_a_non_finite_loss(self, make_trainer, kind, snapshot, assert_same):
        data = with_a_nan(make_dataset(kind))
        trainer = make_trainer(kind, train_dataset=data, per_device_train_batch_size=24)
        before = snapshot(trainer.model)
        with pytest.raises(FloatingPointError, match=r"Step 1: .*nan.* lambda=0.0025, tau=\S+, sigma=0.05"):
            trainer.train()
        assert_same(before, snapshot(trainer.model))
        assert all(p.grad is None for p in trainer.model.parameters())

    def test_the_statistics_of_a_step_in_several_batches_go_back_to_its_start(
        self, make_trainer, snapshot, assert_same
    ):
        settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
        before = []

        class Before(TrainerCallback):
            def on_step_begin(self, args, state, control, model, **kwargs):
                before.append(snapshot(model))

        data = make_dataset("resnet")
        trainer = make_trainer("resnet", train_dataset=data, trainer={"callbacks": [Before()]}, **settings)
        calls, compute_loss = [], trainer.compute_loss

        def compute_a_bad_loss(*args, **kwargs):
            calls.append(1)
            loss = compute_loss(*args, **kwargs)
            return loss * float("nan") if len(calls) == 5 else loss

        trainer.compute_loss = compute_a_bad_loss
        with pytest.raises(FloatingPointError, match="Step 2"):
            trainer.train()
        assert len(before) == 2
        assert_same(before[1], snapshot(trainer.model))

    @pytest.mark.parametrize("tensor", ["resnet.embedder.embedder.normalization.running_var", "classifier.1.weight"])
    def test_nothing_that_is_not_finite_is_saved_or_loaded(self, make_trainer, tensor, tmp_path):
        trainer = make_trainer("resnet")
        trainer.save_model(tmp_path / "good")
        files = {path.name: path.read_bytes() for path in (tmp_path / "good").iterdir()}
        trainer.model.state_dict()[tensor][0] = float("nan")
        for save in (trainer.save_model, trainer.posterior.save_pretrained):
            with pytest.raises(ValueError, match=f"model: '{tensor}' is not finite"):
                save(tmp_path / "good")
        assert {path.name: path.read_bytes() for path in (tmp_path / "good").iterdir()} == files
        with pytest.raises(ValueError, match=f"model: '{tensor}' is not finite"):
            trainer.posterior.save_pretrained(tmp_path / "new")
        assert not (tmp_path / "new").exists()

    @pytest.mark.parametrize("kind", ["vit", "resnet"])
    def test_a_non_finite_elbo_dataset(self, make_trainer, kind):
        trainer = make_trainer(kind, trainer={"elbo_dataset": with_a_nan(make_dataset(kind))})
        trainer.train()
        message = "elbo_dataset: 'pixel_values' has values that are nan or infinite"
        with pytest.raises(ValueError, match=message):
            trainer.de_elbo(num_samples=1)
        assert trainer.posterior.sample_statistics == {}
        if kind == "vit":
            with pytest.raises(ValueError, match="^dataset: 'pixel_values' has values"):
                trainer.de_elbo(with_a_nan(make_dataset(kind)), num_samples=1)

    def test_statistics_of_a_model_that_diverged_are_not_taken_for_bad_data(self, make_trainer):
        trainer = make_trainer("resnet")
        trainer.model.resnet.embedder.embedder.normalization.weight.data.fill_(1e38)
        with pytest.raises(FloatingPointError, match="weight sample 0 has batch-norm statistics that are not finite"):
            trainer.de_elbo(num_samples=1)

    def test_a_non_finite_gradient_of_a_finite_loss(self, make_trainer, snapshot, assert_same):
        trainer = make_trainer()
        trainer.model.classifier.weight.register_hook(lambda grad: grad * float("inf"))
        before = snapshot(trainer.model)
        with pytest.raises(FloatingPointError, match="Step 1"):
            trainer.train()
        assert_same(before, snapshot(trainer.model))

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    @pytest.mark.parametrize("where", ["forward", "backward"])
    def test_an_exception_inside_a_step(self, make_trainer, error, where, snapshot, assert_same):
        trainer = make_trainer()
        before = snapshot(trainer.model)

        def fail(*_):
            raise error("stop")

        if where == "forward":
            trainer.model.classifier.register_forward_hook(fail)
        else:
            trainer.model.classifier.weight.register_hook(fail)
        with pytest.raises(error):
            trainer.train()
        assert_same(before, snapshot(trainer.model))

    def test_no_training_set_and_no_n(self, make_config):
        trainer = DEELBoTrainer(make_model("vit"), make_config(num_eval_samples=2))
        assert math.isfinite(trainer.evaluate(make_dataset("vit", 5))["eval_loss"])
        with pytest.raises(ValueError, match="needs N"):
            trainer.de_elbo(make_dataset("vit", 5))


def test_a_batch_larger_than_the_training_set_is_the_training_set(make_trainer):
    trainer = make_trainer(per_device_train_batch_size=128, max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.args.per_device_train_batch_size == trainer._train_batch_size == 24


def test_the_card_tells_how_it_was_trained(make_trainer):
    trainer = make_trainer(max_steps=2, per_device_train_batch_size=4, gradient_accumulation_steps=3, seed=5)
    trainer.train()
    assert trainer.card_data().training == {
        "learning rate": 0.1,
        "sigma starts at": 0.05,
        "steps": 2,
        "batch size": 12,
        "optimizer": "sgd (momentum=0.9,nesterov=True)",
        "schedule": "cosine",
        "gradient norm clipped at": 1.0,
        "seed": 5,
    }


def test_a_process_that_should_not_save_writes_nothing(make_trainer, tmp_path, monkeypatch):
    trainer = make_trainer()
    monkeypatch.setattr(DEELBoConfig, "should_save", False)
    trainer._save(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def test_the_state_is_json(make_trainer, tmp_path):
    trainer = make_trainer(logging_steps=1)
    trainer.train()
    trainer.state.save_to_json(tmp_path / "state.json")
    assert "sigma" in json.loads((tmp_path / "state.json").read_text())["log_history"][0]
