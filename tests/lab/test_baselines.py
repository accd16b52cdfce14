"""MAP against plain autograd and scipy; searches against what they are defined to be."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import optuna
import pytest
import torch
from conftest import NUM_LABELS, Recorder, collate, low_rank_prior, make_dataset, make_model
from lab.baselines import (
    MAPConfig,
    MAPTrainer,
    Setting,
    Split,
    grid,
    grid_search,
    random_search,
    random_settings,
    search_space,
    tpe_search,
    train_validation_split,
    validation_nll,
)
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

    def test_a_ragged_batch_weighs_by_its_size(self, make_map_trainer):
        """10 examples in batches of 4, 4 and 2, accumulated, are one batch of 10."""
        data, weights = make_dataset("vit", 10), []
        for batch_size, accumulation in ((10, 1), (4, 3)):
            trainer = make_map_trainer(
                train_dataset=data,
                per_device_train_batch_size=batch_size,
                gradient_accumulation_steps=accumulation,
                dataloader_drop_last=False,
                max_steps=1,
                **penalty_of("l2-sp"),
            )
            trainer.train()
            weights.append(flat(list(trainer.model.parameters())))
        torch.testing.assert_close(*weights, rtol=0, atol=1e-6)

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
        assert not trainer.model.training

    def test_statistics_come_from_the_set_without_augmentation(self, make_map_trainer):
        other = [e | {"pixel_values": 3 * e["pixel_values"]} for e in make_dataset("resnet")]
        settings = {"recompute_batch_norm": True, "per_device_eval_batch_size": 24}
        trainer = make_map_trainer("resnet", trainer={"unaugmented_dataset": other}, **settings)
        with torch.no_grad():
            expected = copy.deepcopy(trainer.model).train()(**collate(other)).loss.item()
        assert trainer.evaluate(other)["eval_loss"] == pytest.approx(expected, rel=1e-5)

    def test_a_batch_larger_than_the_training_set_is_the_training_set(self, make_map_trainer):
        trainer = make_map_trainer(per_device_train_batch_size=128)
        assert trainer.args.per_device_train_batch_size == 24

    @pytest.mark.parametrize("with_model_init", [False, True])
    def test_a_resumed_run_keeps_mu(self, make_map_config, tmp_path, snapshot, assert_same, with_model_init):
        """ViT's files use other names than its modules; and mu is the model's start, not the checkpoint."""

        def run(folder: str, resume: bool = False) -> MAPTrainer:
            args = make_map_config(
                output_dir=str(tmp_path / folder), save_strategy="steps", save_steps=2, **penalty_of("l2-sp")
            )
            model = {"model_init": lambda: make_model("vit")} if with_model_init else {"model": make_model("vit")}
            trainer = MAPTrainer(args=args, train_dataset=make_dataset("vit"), **model)
            trainer.train(resume_from_checkpoint=str(tmp_path / folder / "checkpoint-2") if resume else None)
            return trainer

        whole = snapshot(run("whole").model)
        assert_same(whole, snapshot(run("whole", resume=True).model))

    def test_model_init_gives_each_run_its_own_mu(self, make_map_config):
        seeds = iter([1, 2, 3])
        trainer = MAPTrainer(
            args=make_map_config(alpha_over_n=ALPHA, logging_steps=1),
            train_dataset=make_dataset("vit"),
            model_init=lambda: make_model("vit", seed=next(seeds)),
        )
        for _ in range(2):
            trainer.train()
            assert trainer.state.log_history[0]["penalty_backbone"] == 0  # each starts at its own mu

    def test_a_non_finite_gradient_leaves_the_weights(self, make_map_trainer, snapshot, assert_same):
        trainer = make_map_trainer()
        trainer.model.classifier.weight.register_hook(lambda grad: grad * float("inf"))
        before = snapshot(trainer.model)
        with pytest.raises(FloatingPointError, match=r"Step 1: .* not finite, with penalties of 0 \(backbone\)"):
            trainer.train()
        assert_same(before, snapshot(trainer.model))

    def test_labels_outside_of_the_head(self, make_map_trainer):
        data = [example | {"labels": NUM_LABELS} for example in make_dataset("vit")]
        with pytest.raises(ValueError, match="labels: found 3, but the head has 3 classes, 0 to 2"):
            make_map_trainer(train_dataset=data).train()

    def test_refusals(self, make_map_trainer, tmp_path):
        with pytest.raises(TypeError, match="args: must be a MAPConfig, got TrainingArguments"):
            MAPTrainer(make_model("vit"), TrainingArguments(str(tmp_path), use_cpu=True))
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

    def test_weight_decay_is_ignored_with_a_warning_that_says_what_decays(self, make_map_config, monkeypatch):
        messages = []
        monkeypatch.setattr("hf_deelbo.config.logger.warning", messages.append)
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
            ({"prior": "ptyl"}, 'lambda_: must be a positive number for prior="ptyl", got None'),
            ({"prior": "ptyl", "lambda_": 0}, "lambda_: must be a positive number .* got 0"),
            ({"prior": "ptyl", "lambda_": 1, "alpha_over_n": 0.1}, "alpha_over_n: 0.1 has no meaning"),
            ({"lambda_": 1.0}, "lambda_: 1.0 is for prior=\"ptyl\"; for 'l2-sp' set alpha_over_n"),
        ],
    )
    def test_bad_values_are_refused_by_name(self, make_map_config, arguments, message):
        with pytest.raises(ValueError, match=message):
            make_map_config(**arguments)


class TestSettings:
    """The numbers of the paper's appendix."""

    @pytest.mark.parametrize("prior", ["l2-zero", "l2-sp"])
    def test_l2(self, prior):
        rates, penalties = [0.1, 0.01, 0.001, 0.0001], [0.01, 0.001, 0.0001, 0.00001, 0.000001, 0.0]
        found = [(s.learning_rate, s.alpha_over_n, s.beta_over_n, s.lambda_) for s in grid(prior)]
        assert found == [(rate, penalty, penalty, None) for rate in rates for penalty in penalties]
        assert len(found) == 24

    def test_ptyl(self):
        found = grid("ptyl")
        assert len(set(found)) == len(found) == 240
        assert {s.learning_rate for s in found} == {0.1, 0.01, 0.001, 0.0001}
        assert sorted({s.lambda_ for s in found}) == list(np.logspace(0, 9, 10))
        assert {s.beta_over_n for s in found} == {0.01, 0.001, 0.0001, 0.00001, 0.000001, 0.0}
        assert {s.alpha_over_n for s in found} == {None}

    def test_random_settings_are_log_uniform(self):
        settings = random_settings("l2-sp", 4000, seed=0)
        for name, (low, high) in {
            "learning_rate": (-4, -1),
            "alpha_over_n": (-6, -2),
            "beta_over_n": (-6, -2),
        }.items():
            logs = np.log10([getattr(setting, name) for setting in settings])
            assert low <= logs.min() < low + 0.01
            assert high - 0.01 < logs.max() <= high
            assert np.histogram(logs, bins=4, range=(low, high))[0] == pytest.approx(1000, abs=120)
        logs = np.log([[s.alpha_over_n, s.beta_over_n] for s in settings])
        assert abs(np.corrcoef(logs.T)[0, 1]) < 0.05
        assert settings[:5] == random_settings("l2-sp", 5, seed=0)
        assert settings[:5] != random_settings("l2-sp", 5, seed=1)
        assert {s.lambda_ is None for s in random_settings("ptyl", 9)} == {False}

    def test_learning_rates_are_the_ends_of_their_range(self):
        rates = [setting.learning_rate for setting in random_settings("l2-sp", 100, learning_rates=[1e-4, 2e-5, 5e-5])]
        assert 2e-5 <= min(rates) < 2.2e-5
        assert 0.9e-4 < max(rates) <= 1e-4

    @pytest.mark.parametrize("function", [grid, search_space, lambda prior: random_settings(prior, 1)])
    def test_an_unknown_prior(self, function):
        with pytest.raises(ValueError, match="prior: unknown prior 'l3'; choose one of"):
            function("l3")


class TestSplit:
    @pytest.mark.parametrize(("num_classes", "of_each"), [(10, 10), (37, 10), (37, 93), (3, 7)])
    def test_a_fifth_class_balanced_and_disjoint(self, num_classes, of_each):
        labels = np.random.default_rng(0).permutation(np.repeat(np.arange(num_classes), of_each))
        split = train_validation_split(labels.tolist(), seed=3)
        assert sorted(split.train + split.validation) == list(range(len(labels)))
        assert len(split.validation) == len(labels) // 5
        counts = np.bincount(labels[split.validation], minlength=num_classes)
        assert counts.max() - counts.min() <= 1
        assert np.all(np.abs(counts - of_each / 5) < 1)

    def test_frequencies_are_kept_and_a_rare_class_is_trained_on(self):
        labels = [0] * 50 + [1] * 25 + [2] * 10 + [3]
        split = train_validation_split(labels, seed=0)
        held_out = np.bincount([labels[i] for i in split.validation], minlength=4).tolist()
        assert held_out == [10, 5, 2, 0]

    def test_the_seed_draws_it(self):
        labels = list(range(5)) * 10
        assert train_validation_split(labels, 1) == train_validation_split(labels, 1)
        assert train_validation_split(labels, 1) != train_validation_split(labels, 2)
        # examples are held out at random: over many seeds each about as often as the others
        counts = np.bincount(np.concatenate([train_validation_split(labels, seed).validation for seed in range(500)]))
        assert counts == pytest.approx(100, abs=45)

    def test_too_few(self):
        with pytest.raises(ValueError, match="labels: of 4 examples no fifth"):
            train_validation_split([0, 0, 1, 1])


LABELS = [i % NUM_LABELS for i in range(30)]
SETTINGS = [
    Setting(rate, alpha_over_n=penalty, beta_over_n=penalty) for rate in (0.1, 0.001) for penalty in (1e-2, 0.0)
]


class Scripted:
    """Stands in for `MAPTrainer`: its validation NLL is given; it knows how often it was asked."""

    def __init__(self, nlls: dict[Setting, float]):
        self.nlls, self.trained, self.splits = nlls, [], []

    def make_trainer(self, setting, output_dir, split):
        self.splits.append(split)
        state = SimpleNamespace(global_step=0)

        def train():
            self.trained.append(setting)
            if self.nlls[setting] == math.inf:
                state.global_step = 5
                raise FloatingPointError("loss")
            state.global_step = 20

        def predict(dataset, metric_key_prefix):
            assert dataset == split.validation
            labels = np.array([LABELS[i] for i in dataset])
            logits = np.eye(NUM_LABELS)[np.where(labels == 2, 0, labels)]  # the third class is never right
            metrics = {f"{metric_key_prefix}_loss": self.nlls[setting]}
            return SimpleNamespace(metrics=metrics, predictions=logits, label_ids=labels)

        return SimpleNamespace(
            setting=setting,
            state=state,
            train=train,
            predict=predict,
            train_dataset=split.train,
            eval_dataset=split.validation,
            is_world_process_zero=lambda: True,
            save_checkpoint=lambda folder: None,
            load_checkpoint=lambda folder: None,
        )


class TestChoice:
    def test_the_lowest_validation_nll_is_trained_again_on_all(self, tmp_path):
        task = Scripted(dict(zip(SETTINGS, [0.9, 0.5, 0.7, 0.6], strict=True)))
        trainer, result = grid_search(task.make_trainer, SETTINGS, tmp_path, LABELS)
        assert result.best == trainer.setting == SETTINGS[1]
        assert task.trained == [*SETTINGS, SETTINGS[1]]
        assert [trial.validation_nll for trial in result.trials] == [0.9, 0.5, 0.7, 0.6]
        assert [trial.validation_accuracy for trial in result.trials] == pytest.approx([2 / 3] * 4)
        assert task.splits[:4] == [train_validation_split(LABELS, 0)] * 4
        assert task.splits[4].train == list(range(30))
        assert task.splits[4].validation == []
        assert (result.method, result.runs) == ("grid", 5)
        assert result.seconds == sum(trial.seconds for trial in result.trials) + result.final_seconds

    def test_the_paper_s_grid_costs_25_runs(self, tmp_path):
        """16 h 15 of 39 minutes each."""
        task = Scripted(dict.fromkeys(grid("l2-sp"), 1.0))
        _, result = grid_search(task.make_trainer, grid("l2-sp"), tmp_path, LABELS)
        assert result.runs == len(task.trained) == 25

    def test_of_equals_the_first(self, tmp_path):
        task = Scripted(dict(zip(SETTINGS, [0.9, 0.5, 0.5, 0.6], strict=True)))
        assert grid_search(task.make_trainer, SETTINGS, tmp_path, LABELS)[1].best == SETTINGS[1]

    @pytest.mark.parametrize("bad", [math.inf, math.nan, -math.inf])
    def test_what_diverges_loses_and_costs_its_steps(self, tmp_path, bad):
        task = Scripted(dict(zip(SETTINGS, [bad, 0.5, 0.5, 0.6], strict=True)))
        _, result = grid_search(task.make_trainer, SETTINGS, tmp_path, LABELS)
        assert result.best == SETTINGS[1]
        assert result.trials[0].validation_nll == math.inf
        assert math.isnan(result.trials[0].validation_accuracy)
        assert result.runs == (4.25 if bad == math.inf else 5)
        as_json = json.loads(json.dumps(result.to_dict(), allow_nan=False))
        assert [trial["validation_nll"] for trial in as_json["trials"]] == [None, 0.5, 0.5, 0.6]
        assert (as_json["best"]["beta_over_n"], as_json["runs"]) == (0.0, result.runs)
        # read back from the file
        assert grid_search(task.make_trainer, SETTINGS, tmp_path, LABELS)[1].trials[0].validation_nll == math.inf

    def test_all_diverge(self, tmp_path):
        task = Scripted(dict.fromkeys(SETTINGS, math.inf))
        with pytest.raises(FloatingPointError, match="Every setting diverged"):
            grid_search(task.make_trainer, SETTINGS, tmp_path, LABELS)

    @pytest.mark.parametrize("search", ["grid", "random", "tpe"])
    @pytest.mark.parametrize("killed_at", [1, 3, 5])
    def test_a_killed_search_goes_on_where_it_was(self, tmp_path, search, killed_at):
        """`killed_at` 5 is the last run, on all examples."""

        class Nlls(dict):
            def __missing__(self, setting):
                return abs(math.log10(setting.learning_rate) + 2) + setting.beta_over_n

        def run(make_trainer, folder):
            if search == "grid":
                return grid_search(make_trainer, SETTINGS, tmp_path / folder, LABELS)
            function = random_search if search == "random" else tpe_search
            return function(make_trainer, "l2-sp", 4, tmp_path / folder, LABELS, seed=1)

        task = Scripted(Nlls())

        def until_killed(*arguments):
            if len(task.trained) == killed_at - 1:
                raise KeyboardInterrupt
            return task.make_trainer(*arguments)

        with pytest.raises(KeyboardInterrupt):
            run(until_killed, "killed")
        trainer, result = run(task.make_trainer, "killed")
        assert len(task.trained) == 5  # nothing twice
        whole = run(Scripted(Nlls()).make_trainer, "whole")[1]
        assert [(t.setting, t.validation_nll) for t in result.trials] == [
            (t.setting, t.validation_nll) for t in whole.trials
        ]
        assert (result.best, result.runs, result.method) == (whole.best, 5, search)
        assert trainer.setting == result.best
        assert run(task.make_trainer, "killed")[1] == result  # to the second
        assert len(task.trained) == 5

    def test_tpe_learns_where_to_look(self, tmp_path):
        """Its later proposals are nearer to the optimum than its first ten, which are random; one diverged."""

        class Nlls(dict):
            def __missing__(self, setting):
                away = math.log10(setting.learning_rate) + 2
                return math.inf if away > 0.8 else away**2

        _, result = tpe_search(Scripted(Nlls()).make_trainer, "l2-sp", 40, tmp_path, LABELS, seed=0)
        away = [abs(math.log10(trial.setting.learning_rate) + 2) for trial in result.trials]
        assert np.mean(away[20:]) < 0.6 * np.mean(away[:10])
        assert math.inf in [trial.validation_nll for trial in result.trials]
        assert all(1e-6 <= trial.setting.alpha_over_n <= 1e-2 for trial in result.trials)

    def test_refusals(self, tmp_path):
        task = Scripted(dict.fromkeys(SETTINGS, 1.0))
        for settings in ([], SETTINGS[:1] * 2):
            with pytest.raises(ValueError, match="settings: needs at least one, and none twice"):
                grid_search(task.make_trainer, settings, tmp_path, LABELS)
        grid_search(task.make_trainer, SETTINGS[:1], tmp_path, LABELS)
        for other in ((SETTINGS[:2], LABELS, 0), (SETTINGS[:1], LABELS + LABELS, 0), (SETTINGS[:1], LABELS, 1)):
            settings, labels, seed = other
            with pytest.raises(ValueError, match="holds another search"):
                grid_search(task.make_trainer, settings, tmp_path, labels, seed)

    @pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
    def test_a_trainer_that_ignores_the_split(self, tmp_path, argument):
        task = Scripted(dict.fromkeys(SETTINGS, 1.0))

        def leaks(*arguments):
            trainer = task.make_trainer(*arguments)
            setattr(trainer, argument, LABELS)
            return trainer

        with pytest.raises(ValueError, match=f"make_trainer: the {argument} of its trainer has 30 examples, not the"):
            grid_search(leaks, SETTINGS, tmp_path, LABELS)


class TestRealSearch:
    @pytest.fixture
    def make_trainer(self, make_map_config):
        data = make_dataset("vit", 30)
        assert [example["labels"] for example in data] == LABELS

        def make(setting, output_dir, split) -> MAPTrainer:
            args = make_map_config(
                output_dir=output_dir, max_steps=6, save_strategy="steps", save_steps=3, **setting.arguments
            )
            return MAPTrainer(
                make_model("vit"),
                args,
                train_dataset=[data[i] for i in split.train],
                eval_dataset=[data[i] for i in split.validation],
            )

        return make

    def test_numbers_files_and_the_last_model(self, make_trainer, tmp_path, snapshot, assert_same):
        tried = SETTINGS[:2]
        settings = [*tried, Setting(1e30, alpha_over_n=0.0, beta_over_n=0.0)]
        trainer, result = grid_search(make_trainer, settings, tmp_path / "search", LABELS)
        split, expected = train_validation_split(LABELS), []
        for setting in tried:
            alone = make_trainer(setting, str(tmp_path / "alone"), split)
            alone.train()
            batch = collate(alone.eval_dataset)
            with torch.no_grad():
                logits = alone.model.eval()(batch["pixel_values"]).logits
            accuracies = [(logits.argmax(1) == c)[batch["labels"] == c].double().mean() for c in range(NUM_LABELS)]
            nll = nn.functional.cross_entropy(logits, batch["labels"]).item()
            expected.append((nll, float(sum(accuracies)) / NUM_LABELS))
        found = [(trial.validation_nll, trial.validation_accuracy) for trial in result.trials[:2]]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert result.best == tried[np.argmin([nll for nll, _ in expected])]
        assert result.trials[2].validation_nll == math.inf
        assert result.trials[2].steps < 6

        final = make_trainer(result.best, str(tmp_path / "final"), Split(train=range(30), validation=[]))
        final.train()
        assert_same(snapshot(final.model), snapshot(trainer.model))

        folder = tmp_path / "search"
        assert sorted(path.name for path in folder.iterdir()) == ["model", "search.json"]
        assert not list(folder.glob("**/checkpoint-*"))
        assert len(json.loads((folder / "search.json").read_text())["trials"]) == 3
        again, same = grid_search(make_trainer, settings, folder, LABELS)
        assert same.best == result.best
        assert_same(snapshot(again.model), snapshot(trainer.model))
        assert again.state.log_history == trainer.state.log_history


class TestHyperparameterSearch:
    """`Trainer`'s own, with the space and the objective of this module."""

    # batches of all the data, so that their order does not matter
    SETTINGS = {"max_steps": 3, "per_device_train_batch_size": 24}  # noqa: RUF012

    @pytest.fixture
    def trainer(self, make_map_config) -> MAPTrainer:
        return MAPTrainer(
            args=make_map_config(**self.SETTINGS),
            train_dataset=make_dataset("vit"),
            eval_dataset=make_dataset("vit", 6, seed=4),
            model_init=lambda: make_model("vit"),
        )

    def test_a_grid(self, trainer, make_map_trainer):
        rates, penalty = [0.1, 1e-4], 1e-2
        best = trainer.hyperparameter_search(
            hp_space=search_space("l2-sp"),
            compute_objective=validation_nll,
            n_trials=2,
            direction="minimize",
            backend="optuna",
            sampler=optuna.samplers.GridSampler(
                {"learning_rate": rates, "alpha_over_n": [penalty], "beta_over_n": [penalty]}
            ),
        )
        expected = {}
        for rate in rates:
            alone = make_map_trainer(**self.SETTINGS, learning_rate=rate, alpha_over_n=penalty, beta_over_n=penalty)
            alone.train()
            with torch.no_grad():
                expected[rate] = alone.model.eval()(**collate(trainer.eval_dataset)).loss.item()
        assert best.objective == pytest.approx(min(expected.values()), rel=1e-5)
        assert best.hyperparameters["learning_rate"] == min(expected, key=expected.get)

    def test_tpe_with_a_run_that_diverges(self, trainer):
        tried = []
        space = search_space("l2-zero")

        def noted(trial):
            tried.append(space(trial))
            return tried[-1] | ({"learning_rate": 1e30} if len(tried) == 2 else {})

        best = trainer.hyperparameter_search(
            hp_space=noted,
            compute_objective=validation_nll,
            n_trials=3,
            direction="minimize",
            backend="optuna",
            sampler=optuna.samplers.TPESampler(seed=0),
            catch=(FloatingPointError,),
        )
        assert len(tried) == 3
        assert best.hyperparameters in tried[:1] + tried[2:]
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
        assert space(study.ask()) == tried[0]
