"""MAP against plain autograd, scipy and torch.distributions."""

import copy
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import NUM_LABELS, Recorder, collate, low_rank_prior, make_dataset, make_model
from lab.map import MAPConfig, MAPTrainer
from scipy.optimize import minimize
from torch import nn
from torch.distributions import LowRankMultivariateNormal
from transformers import TrainerCallback, TrainingArguments

from hf_deelbo import DEELBoConfig, IsotropicPrior

ALPHA, BETA, LAMBDA = 0.3, 0.2, 0.05  # strong, so that a wrong penalty is seen


@pytest.fixture
def make_map_config(tmp_path):
    def make(**kwargs) -> MAPConfig:
        defaults = {
            "output_dir": str(tmp_path / "outputs"),
            "max_steps": 4,
            "learning_rate": 0.1,
            "per_device_train_batch_size": 8,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
        }
        return MAPConfig.paper(**(defaults | kwargs))

    return make


@pytest.fixture
def make_map_trainer(make_map_config):
    """A trainer of a tiny model; keywords of the trainer in `trainer`, all others are the config's."""

    def make(kind: str = "vit", model=None, train_dataset=None, trainer: dict | None = None, **kwargs) -> MAPTrainer:
        return MAPTrainer(
            make_model(kind) if model is None else model,
            make_map_config(**kwargs),
            train_dataset=make_dataset(kind) if train_dataset is None else train_dataset,
            **(trainer or {}),
        )

    return make


def is_head(name: str) -> bool:
    return name.startswith("classifier")


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.double().flatten() for tensor in tensors])


class Reference:
    """Steps on the written-out objective by plain autograd in float64."""

    def __init__(self, trainer: MAPTrainer, mu: dict[str, torch.Tensor]):
        self.args, self.num_examples = trainer.args, len(trainer.train_dataset)
        self.model = copy.deepcopy(trainer.model).double().train()
        self.head = [p for name, p in self.model.named_parameters() if is_head(name)]
        backbone = {name: p for name, p in self.model.named_parameters() if not is_head(name)}
        self.backbone = list(backbone.values())
        self.mu = flat([mu[name] for name in backbone])
        if self.args.prior == "ptyl":
            prior = trainer.priors[0]
            diagonal = flat([prior.diagonal[name] for name in backbone]) / 2 + 0.1
            q = torch.stack([flat([prior.deviations[name][k] for name in backbone]) for k in range(3)], dim=1)
            self.normal = LowRankMultivariateNormal(self.mu, q / math.sqrt(2 * 3 - 2), diagonal)
            self.constant = self.normal.log_prob(self.mu)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.SGD(parameters, lr=self.args.learning_rate, momentum=0.9, nesterov=True)

    def penalty(self) -> torch.Tensor:
        w = torch.cat([p.flatten() for p in self.backbone])
        head = BETA / 2 * sum(p.square().sum() for p in self.head)
        if self.args.prior == "ptyl":  # minus the log prior, up to a constant, over N
            return (self.constant - self.normal.log_prob(w)) / (self.num_examples * LAMBDA) + head
        return ALPHA / 2 * (w - self.mu * (self.args.prior == "l2-sp")).square().sum() + head

    def step(self, batches: list[dict]) -> float:
        nll = 0.0
        for batch in batches:
            inputs = {key: v.double() if v.is_floating_point() else v for key, v in batch.items()}
            nll = nll + self.model(**inputs).loss / len(batches)
        loss = nll + self.penalty()
        loss.backward()
        if self.args.max_grad_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def assert_same_weights(self, model: nn.Module, atol: float = 1e-6) -> None:
        expected = dict(self.model.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.double(), expected[name], rtol=0, atol=atol, msg=name)


def move_from_start(model: nn.Module) -> dict[str, torch.Tensor]:
    """Move the weights off the prior mean, so that its pull is not zero; return where they were."""
    torch.manual_seed(7)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return start


def penalty_of(prior: str) -> dict[str, float]:
    return {"beta_over_n": BETA} | ({"lambda_": LAMBDA} if prior == "ptyl" else {"alpha_over_n": ALPHA})


class TestOneStepIsPlainAutograd:
    @pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
    @pytest.mark.parametrize("prior", ["l2-zero", "l2-sp", "ptyl"])
    @pytest.mark.parametrize("accumulation", [1, 4])
    @pytest.mark.parametrize("kind", ["vit", "resnet", "bert"])
    def test_weights_and_loss(self, make_map_trainer, kind, accumulation, prior, max_grad_norm):
        recorder, model = Recorder(), make_model(kind)
        trainer = make_map_trainer(
            kind,
            model=model,
            prior=prior,
            **penalty_of(prior),
            max_steps=1,
            gradient_accumulation_steps=accumulation,
            per_device_train_batch_size=16 // accumulation,
            max_grad_norm=max_grad_norm,
            logging_steps=1,
            trainer={"data_collator": recorder, "prior": low_rank_prior(model) if prior == "ptyl" else None},
        )
        reference = Reference(trainer, mu=move_from_start(trainer.model))
        reference.model.load_state_dict(trainer.model.state_dict())
        trainer.train()
        loss = reference.step(recorder.batches[:accumulation])
        assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-5)
        reference.assert_same_weights(trainer.model)

    def test_several_steps_with_momentum_and_schedule(self, make_map_trainer):
        recorder = Recorder()
        trainer = make_map_trainer(
            max_steps=5, max_grad_norm=0.5, **penalty_of("l2-sp"), trainer={"data_collator": recorder}
        )
        mu = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        reference = Reference(trainer, mu)
        trainer.train()
        for step in range(5):
            reference.optimizer.param_groups[0]["lr"] = 0.1 * 0.5 * (1 + math.cos(math.pi * step / 5))
            reference.step([recorder.batches[step]])
        reference.assert_same_weights(trainer.model, atol=2e-6)

    def test_a_dense_covariance(self, make_map_trainer):
        """PTYL's gradient with Sigma_p written out and inverted."""

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.classifier = nn.Linear(64, 2), nn.Linear(2, NUM_LABELS)

            def forward(self, pixel_values, labels=None):
                logits = self.classifier(torch.tanh(self.body(pixel_values.flatten(1))))
                return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

        torch.manual_seed(0)
        model = Net()
        prior = low_rank_prior(model)
        trainer = make_map_trainer(
            model=model,
            prior="ptyl",
            lambda_=LAMBDA,
            max_steps=1,
            max_grad_norm=0,
            per_device_train_batch_size=24,
            logging_steps=1,
            trainer={"prior": prior},
        )
        mu = flat(list(prior.mean.values()))
        move_from_start(model)
        start = [p.detach().clone() for p in model.parameters()]
        loss = model(**collate(trainer.train_dataset))["loss"]
        of_nll = flat(list(torch.autograd.grad(loss, list(model.body.parameters()))))
        q = torch.stack([flat([tensor[k] for tensor in prior.deviations.values()]) for k in range(3)], dim=1)
        covariance = torch.diag(flat(list(prior.diagonal.values())) / 2 + 0.1) + q @ q.T / (2 * 3 - 2)
        d = flat(start[:2]) - mu
        pull = torch.linalg.inv(covariance) @ d / (24 * LAMBDA)
        trainer.train()
        moved = flat(list(model.body.parameters())) - flat(start[:2])
        torch.testing.assert_close(moved, -0.1 * 1.9 * (of_nll + pull), rtol=1e-4, atol=1e-6)
        assert trainer.state.log_history[0]["penalty_backbone"] == pytest.approx((pull @ d / 2).item(), rel=1e-5)

    def test_a_gradient_scaler_does_not_change_the_step(self, make_map_trainer, monkeypatch):
        """The path of fp16: gradients arrive multiplied, and are unscaled before the clip."""

        class UnscaleAsInFp16(TrainerCallback):
            def on_train_begin(self, *args, **kwargs):
                scaled.accelerator.native_amp = True
                monkeypatch.setattr(type(scaled.accelerator), "mixed_precision", "fp16")

        settings = {"max_grad_norm": 0.1, **penalty_of("l2-sp")}
        plain = make_map_trainer(**settings)
        scaled = make_map_trainer(**settings, trainer={"callbacks": [UnscaleAsInFp16()]})
        scaled.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for trainer in (plain, scaled):
            trainer.train()
        plain, scaled = (flat(list(trainer.model.parameters())) for trainer in (plain, scaled))
        torch.testing.assert_close(plain, scaled, rtol=0, atol=1e-7)

    def test_a_parameter_that_the_loss_does_not_reach_decays(self, make_map_trainer):
        model = make_model("vit")
        model.vit.idle = nn.Parameter(torch.ones(3))
        make_map_trainer(model=model, prior="l2-zero", alpha_over_n=ALPHA, max_steps=1, max_grad_norm=0).train()
        torch.testing.assert_close(model.vit.idle.detach(), torch.full((3,), 1 - 0.1 * 1.9 * ALPHA))


def test_the_optimum_is_reached(make_map_trainer):
    """Softmax regression with a penalty is convex: scipy finds the same weights."""
    random = np.random.default_rng(0)
    x = random.normal(size=(40, 3)).astype(np.float32)
    y = (x @ [2.0, -1.0, 0.5] + 0.5 + random.logistic(size=40) > 0).astype(int)
    start = 0.5 * random.normal(size=(2, 3)).astype(np.float32)
    alpha_over_n, beta_over_n = 0.05, 0.02

    class Softmax(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(3, 2, bias=False), nn.ParameterDict({"bias": torch.zeros(2)})
            self.body.weight.data.copy_(torch.tensor(start))

        def forward(self, features, labels=None):
            logits = self.body(features) + self.head["bias"]
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    def objective(theta: np.ndarray) -> float:
        w, v = theta[:6].reshape(2, 3), theta[6:]
        logits = x @ w.T + v
        nll = np.logaddexp(*logits.T).mean() - logits[np.arange(40), y].mean()
        return nll + alpha_over_n / 2 * ((w - start) ** 2).sum() + beta_over_n / 2 * (v**2).sum()

    best = minimize(objective, np.zeros(8), method="BFGS", options={"gtol": 1e-9})
    trainer = make_map_trainer(
        model=Softmax(),
        train_dataset=[{"features": a, "labels": b} for a, b in zip(x, y.tolist(), strict=True)],
        alpha_over_n=alpha_over_n,
        beta_over_n=beta_over_n,
        learning_rate=0.1,
        max_steps=300,
        per_device_train_batch_size=40,
        logging_strategy="no",
    )
    trainer.train()
    learned = np.concatenate([p.detach().numpy().ravel() for p in trainer.model.parameters()])
    np.testing.assert_allclose(learned, best.x, atol=1e-4)
    assert np.abs(best.x[:6] - start.ravel()).max() > 0.3  # not the prior


class TestTrainer:
    def test_every_line_adds_up(self, make_map_trainer):
        trainer = make_map_trainer(logging_steps=1, **penalty_of("l2-zero"), prior="l2-zero")
        trainer.train()
        lines = [line for line in trainer.state.log_history if "loss" in line]
        assert len(lines) == 4
        for line in lines:
            total = line["nll"] + line["penalty_backbone"] + line["penalty_head"]
            assert line["loss"] == pytest.approx(total, rel=1e-5)
        start = dict(make_model("vit").named_parameters())
        w = flat([p.detach() for name, p in start.items() if not is_head(name)])
        v = flat([p.detach() for name, p in start.items() if is_head(name)])
        assert lines[0]["penalty_backbone"] == pytest.approx(ALPHA / 2 * (w @ w).item(), rel=1e-6)
        assert lines[0]["penalty_head"] == pytest.approx(BETA / 2 * (v @ v).item(), rel=1e-6)

    def test_eval_loss_is_the_nll_alone_of_every_example(self, make_map_trainer):
        trainer = make_map_trainer(**penalty_of("l2-sp"), per_device_eval_batch_size=8)
        trainer.train()
        data = make_dataset("vit", 21, seed=9)
        with torch.no_grad():
            expected = trainer.model.eval()(**collate(data)).loss.item()
        assert trainer.evaluate(data)["eval_loss"] == pytest.approx(expected, rel=1e-5)
        assert len(trainer.predict(data).predictions) == 21

    def test_running_or_recomputed_batch_norm_statistics(self, make_map_trainer, snapshot, assert_same):
        """Recomputed over all training inputs in one batch they are what train mode normalises that batch by."""
        trainer = make_map_trainer("resnet", per_device_eval_batch_size=24)
        trainer.train()
        before, training_batch = snapshot(trainer.model), collate(trainer.train_dataset)
        with torch.no_grad():
            in_train_mode = copy.deepcopy(trainer.model).train()(**training_batch).loss.item()
            running = copy.deepcopy(trainer.model).eval()(**training_batch).loss.item()
        assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(running, rel=1e-5)
        trainer.args.recompute_batch_norm = True
        assert trainer.evaluate(trainer.train_dataset)["eval_loss"] == pytest.approx(in_train_mode, rel=1e-5)
        assert abs(in_train_mode - running) > 1e-3
        assert_same(before, snapshot(trainer.model))

    def test_statistics_come_from_the_set_without_augmentation(self, make_map_trainer):
        other = [e | {"pixel_values": 3 * e["pixel_values"]} for e in make_dataset("resnet")]
        settings = {"recompute_batch_norm": True, "per_device_eval_batch_size": 24}
        trainer = make_map_trainer("resnet", trainer={"unaugmented_dataset": other}, **settings)
        with torch.no_grad():
            expected = copy.deepcopy(trainer.model).train()(**collate(other)).loss.item()
        assert trainer.evaluate(other)["eval_loss"] == pytest.approx(expected, rel=1e-5)
        assert not trainer.model.training

    def test_a_batch_larger_than_the_training_set_is_the_training_set(self, make_map_trainer):
        trainer = make_map_trainer(per_device_train_batch_size=128)
        assert trainer.args.per_device_train_batch_size == 24

    @pytest.mark.parametrize("resume_from", ["checkpoint-2", True])
    def test_a_resumed_run_keeps_mu(self, make_map_config, tmp_path, snapshot, assert_same, resume_from):
        """ViT's files use other names than its modules; and mu is the model's start, not the checkpoint."""

        def run(resume_from: str | bool | None = None) -> MAPTrainer:
            args = make_map_config(
                output_dir=str(tmp_path / "run"), save_strategy="steps", save_steps=2, **penalty_of("l2-sp")
            )
            trainer = MAPTrainer(make_model("vit"), args, train_dataset=make_dataset("vit"))
            trainer.train(resume_from)
            return trainer

        whole = run()
        shutil.rmtree(tmp_path / "run" / "checkpoint-4")
        resumed = run(str(tmp_path / "run" / resume_from) if resume_from != True else True)  # noqa: E712
        assert_same(snapshot(whole.model), snapshot(resumed.model))
        assert resumed.state.log_history[-1]["step"] == 4

    def test_a_non_finite_gradient_leaves_the_weights(self, make_map_trainer, snapshot, assert_same):
        trainer = make_map_trainer()
        trainer.model.classifier.weight.register_hook(lambda grad: grad * float("inf"))
        before = snapshot(trainer.model)
        with pytest.raises(FloatingPointError, match=r"Step 1: .* not finite, with penalties of 0 \(backbone\)"):
            trainer.train()
        assert_same(before, snapshot(trainer.model))

    def test_refusals(self, make_map_trainer, tmp_path):
        with pytest.raises(TypeError, match="args: must be a MAPConfig, got TrainingArguments"):
            MAPTrainer(make_model("vit"), TrainingArguments(str(tmp_path), use_cpu=True), train_dataset=[])
        with pytest.raises(ValueError, match=r'"ptyl" needs the prior itself'):
            make_map_trainer(prior="ptyl", lambda_=1)
        prior = IsotropicPrior.l2_zero(dict(make_model("bert").named_parameters()))
        with pytest.raises(ValueError, match="prior: its parameter names are not those"):
            make_map_trainer(trainer={"prior": prior})


class TestConfig:
    @pytest.mark.parametrize("protocol", ["Trainer's", "paper's"])
    def test_the_optimiser_is_that_of_the_de_elbo(self, protocol):
        kinds = [MAPConfig, DEELBoConfig] if protocol == "Trainer's" else [MAPConfig.paper, DEELBoConfig.paper]
        ours, theirs = (kind("outputs", use_cpu=True) for kind in kinds)
        inherited = {f for f in TrainingArguments.__dataclass_fields__ if not f.startswith("_")}
        assert {f: getattr(ours, f) for f in inherited} == {f: getattr(theirs, f) for f in inherited}

    def test_momentum_is_of_the_papers_optimiser(self):
        assert MAPConfig.paper("outputs", use_cpu=True).optim_args == "momentum=0.9,nesterov=True"
        assert MAPConfig.paper("outputs", use_cpu=True, optim="adamw_torch").optim_args is None

    def test_weight_decay_is_ignored_with_a_warning_that_says_what_decays(self, make_map_config, monkeypatch):
        messages = []
        monkeypatch.setattr("lab.map.logger.warning", messages.append)
        assert make_map_config(weight_decay=0.01).weight_decay == 0
        assert messages == [
            "weight_decay=0.01 is ignored: delete it. The prior is the decay: set `alpha_over_n` and `beta_over_n`."
        ]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"alpha_over_n": -1e-3}, "alpha_over_n: must be a number of at least 0, got -0.001"),
            ({"beta_over_n": math.nan}, "beta_over_n: .*nan"),
            ({"prior": "l3"}, "unknown prior 'l3'"),
            ({"prior_name_or_path": "folder"}, "prior_name_or_path: 'folder' was given, but prior='l2-sp' is not"),
            ({"num_batch_norm_examples": 1}, "num_batch_norm_examples: must be a whole number of at least 2, got 1"),
            ({"prior": "ptyl"}, 'lambda_: must be a positive number for prior="ptyl", got None'),
            ({"prior": "ptyl", "lambda_": 0}, "lambda_: must be a positive number .* got 0"),
            ({"prior": "ptyl", "lambda_": 1, "alpha_over_n": 0.1}, "alpha_over_n: 0.1 has no meaning"),
            ({"lambda_": 1.0}, "lambda_: 1.0 is for prior=\"ptyl\"; for 'l2-sp' set alpha_over_n"),
        ],
    )
    def test_bad_values_are_refused_by_name(self, make_map_config, arguments, message):
        with pytest.raises(ValueError, match=message):
            make_map_config(**arguments)
