"""Moments against numpy on recorded weights, and the callback in the company of a plain `Trainer`."""

import copy
import logging
import shutil

import numpy as np
import pytest
import torch
from conftest import make_dataset, make_model
from torch import nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_deelbo import DEELBoTrainer
from hf_deelbo.swag import SWAG_FILE, SWAGCallback, SWAGMoments
from hf_deelbo.weights.parameters import head_parameter_names

SHAPES = {"conv.weight": (4, 2, 3), "conv.bias": (4,), "scale": ()}


def random_weights(num: int, dtype=torch.float32) -> list[dict[str, torch.Tensor]]:
    """Sets of weights around a common start, as training leaves them one after another."""
    generator = torch.Generator().manual_seed(0)
    start = {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return [
        {name: (w + 0.02 * torch.randn(w.shape, generator=generator)).to(dtype) for name, w in start.items()}
        for _ in range(num)
    ]


def numpy_moments(weights: list[dict[str, torch.Tensor]], rank: int) -> dict[str, dict[str, np.ndarray]]:
    """As the SWAG paper has them, in float64: mean, mean of squares - square of mean, w_n - mean_n for the last K."""
    moments = {"mean": {}, "diagonal": {}, "deviations": {}}
    for name in weights[0]:
        w = np.stack([tensors[name].double().numpy() for tensors in weights])
        moments["mean"][name] = w.mean(0)
        moments["diagonal"][name] = (w**2).mean(0) - w.mean(0) ** 2
        moments["deviations"][name] = np.stack([w[n] - w[: n + 1].mean(0) for n in range(len(w))])[-rank:]
    return moments


def assert_prior_has(prior, expected: dict[str, dict[str, np.ndarray]], scale: float = 0.1) -> None:
    """To 1e-6 of the weights' size, and of its square for variances."""
    for part, size in (("mean", scale), ("diagonal", scale**2), ("deviations", scale)):
        ours = getattr(prior, part)
        assert ours.keys() == expected[part].keys()
        for name, value in expected[part].items():
            np.testing.assert_allclose(
                ours[name].numpy(), value, rtol=1e-6, atol=1e-6 * size, err_msg=f"{part} {name}"
            )


class TestMoments:
    @pytest.mark.parametrize("num", [4, 5, 7, 12])
    def test_as_numpy(self, num):
        moments, weights = SWAGMoments(num_deviations=4), random_weights(num)
        for tensors in weights:
            moments.collect(tensors)
        prior = moments.to_prior(eps=0.3)
        assert_prior_has(prior, numpy_moments(weights, rank=4))
        assert (prior.rank, prior.eps, moments.num_collected) == (4, 0.3, num)

    def test_float64_weights_have_float64_moments_and_bfloat16_ones_float32(self):
        for dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
            moments = SWAGMoments(2)
            for tensors in random_weights(3, dtype):
                moments.collect(tensors)
            prior = moments.to_prior()
            assert {tensor.dtype for tensor in prior.state_dict().values()} == {expected}
            assert_prior_has(prior, numpy_moments(random_weights(3, dtype), rank=2))

    def test_small_variances_on_large_weights_do_not_cancel(self):
        """mean of squares - square of mean, in float32, is pure rounding error here."""
        generator = torch.Generator().manual_seed(0)
        weights = [{"w": 100 + 1e-2 * torch.randn(1000, generator=generator)} for _ in range(50)]
        moments = SWAGMoments(2)
        for tensors in weights:
            moments.collect(tensors)
        ours, expected = moments.to_prior().diagonal["w"], numpy_moments(weights, 2)["diagonal"]["w"]
        np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-2)

    def test_weights_that_stand_still_have_no_variance(self):
        moments = SWAGMoments(2)
        for _ in range(10):
            moments.collect({"w": torch.tensor([0.1, -7.3])})
        assert torch.equal(moments.to_prior().diagonal["w"], torch.zeros(2))

    def test_a_known_gaussian_is_recovered_in_its_span(self):
        size, rank, num_deviations = 40, 3, 300
        generator = torch.Generator().manual_seed(0)
        root = torch.randn(size, rank, generator=generator) * torch.tensor([3.0, 2.0, 1.0])
        center = torch.randn(size, generator=generator)
        moments = SWAGMoments(num_deviations)
        for _ in range(2000):
            noise = root @ torch.randn(rank, generator=generator) + 1e-3 * torch.randn(size, generator=generator)
            moments.collect({"w": center + noise})
        prior = moments.to_prior()
        covariance = root @ root.T
        basis = torch.linalg.qr(root).Q
        q = prior.deviations["w"].T
        assert (q - basis @ (basis.T @ q)).norm() < 2e-3 * q.norm()
        low_rank = q @ q.T / (num_deviations - 1)
        assert (low_rank - covariance).norm() < 0.25 * covariance.norm()
        torch.testing.assert_close(prior.diagonal["w"], covariance.diagonal(), rtol=0.15, atol=1e-3)
        assert (prior.mean["w"] - center).norm() < 0.1 * covariance.trace().sqrt()

    def test_memory_is_that_of_k_plus_two_copies(self):
        moments = SWAGMoments(num_deviations=5)
        for tensors in random_weights(9):
            moments.collect(tensors)
        state = moments.state_dict()
        assert sum(tensor.numel() for name, tensor in state.items() if name != "num_collected") == (5 + 2) * 29

    def test_a_prior_does_not_change_when_collecting_goes_on(self):
        moments, weights = SWAGMoments(2), random_weights(6)
        for tensors in weights[:4]:
            moments.collect(tensors)
        prior = moments.to_prior()
        for tensors in weights[4:]:
            moments.collect(tensors)
        assert_prior_has(prior, numpy_moments(weights[:4], rank=2))

    def test_saved_loaded_and_continued(self, tmp_path):
        moments, weights = SWAGMoments(4), random_weights(11)
        for tensors in weights[:6]:
            moments.collect(tensors)
        moments.save(tmp_path / "moments", {"step": "6"})
        again = SWAGMoments(4)
        assert again.load(tmp_path / "moments") == {"step": "6"}
        for tensors in weights[6:]:
            again.collect(tensors)
        assert_prior_has(again.to_prior(), numpy_moments(weights, rank=4))

    def test_a_save_that_fails_leaves_the_old_file(self, tmp_path, monkeypatch):
        moments = SWAGMoments(2)
        moments.collect(random_weights(1)[0])
        moments.save(tmp_path / "moments")
        before = (tmp_path / "moments").read_bytes()

        def fail(tensors, path, metadata):
            with open(path, "wb") as file:
                file.write(b"half of it")
            raise OSError("disk full")

        monkeypatch.setattr("hf_deelbo.swag.save_file", fail)
        moments.collect(random_weights(1)[0])
        with pytest.raises(OSError, match="disk full"):
            moments.save(tmp_path / "moments")
        assert (tmp_path / "moments").read_bytes() == before

    @pytest.mark.parametrize("rank", [1, 0, 2.0, "5"])
    def test_refuses_fewer_than_two_deviations(self, rank):
        with pytest.raises(ValueError, match="num_deviations: must be a whole number >= 2"):
            SWAGMoments(rank)

    def test_refuses_a_prior_of_fewer_collections_than_deviations(self):
        moments = SWAGMoments(5)
        for tensors in random_weights(4):
            moments.collect(tensors)
        with pytest.raises(ValueError, match=r"K = 5 needs as many collections of the weights, but there were 4\."):
            moments.to_prior()

    def test_refuses_other_weights(self):
        moments = SWAGMoments(2)
        moments.collect({"a": torch.zeros(2), "b": torch.zeros(3)})
        with pytest.raises(ValueError, match=r"1 of their names or shapes .* 1 collections so far, such as 'b'"):
            moments.collect({"a": torch.zeros(2), "b": torch.zeros(4)})

    def test_refuses_saved_moments_of_another_rank(self, tmp_path):
        moments = SWAGMoments(3)
        moments.collect(random_weights(1)[0])
        with pytest.raises(ValueError, match="the saved moments have K = 3, this is for K = 4"):
            SWAGMoments(4).load_state_dict(moments.state_dict())


class WeightRecorder(TrainerCallback):
    """Keeps the backbone's weights at the end of each of some steps."""

    def __init__(self, steps: list[int]):
        self.steps, self.weights = steps, []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step in self.steps:
            head = head_parameter_names(model)
            self.weights.append({n: p.detach().clone() for n, p in model.named_parameters() if n not in head})


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.fixture
def make_source_trainer(tmp_path):
    """A plain `Trainer` on 24 examples, in 3 batches an epoch."""

    def make(*callbacks, kind="resnet", seed=0, dataset=None, **kwargs) -> Trainer:
        settings = {
            "output_dir": str(tmp_path / "source"),
            "num_train_epochs": 6,
            "per_device_train_batch_size": 8,
            "learning_rate": 0.05,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
        }
        args = TrainingArguments(**(settings | kwargs))
        data = make_dataset(kind) if dataset is None else dataset
        return Trainer(make_model(kind, seed), args, train_dataset=data, callbacks=list(callbacks))

    return make


class TestCallback:
    @pytest.mark.parametrize(
        ("settings", "steps"),
        [
            ({}, [3, 6, 9, 12, 15, 18]),
            ({"collect_every": 4}, [4, 8, 12, 16]),
            ({"start": 0.5}, [12, 15, 18]),
            ({"start": 12, "collect_every": 1}, [13, 14, 15, 16, 17, 18]),
        ],
    )
    def test_collects_the_backbone_when_it_should(self, settings, steps, make_source_trainer):
        swag, recorder = SWAGCallback(num_deviations=3, **settings), WeightRecorder(steps)
        make_source_trainer(swag, recorder).train()
        assert swag.moments.num_collected == len(steps)
        assert_prior_has(swag.prior(), numpy_moments(recorder.weights, rank=3), scale=1)

    def test_an_epoch_with_gradient_accumulation_ends_with_its_last_step(self, make_source_trainer):
        """3 batches, 2 a step: the second step of an epoch has one."""
        swag, recorder = SWAGCallback(num_deviations=3), WeightRecorder([2, 4, 6, 8, 10, 12])
        make_source_trainer(swag, recorder, gradient_accumulation_steps=2).train()
        assert_prior_has(swag.prior(), numpy_moments(recorder.weights, rank=3), scale=1)

    def test_each_training_starts_anew(self, make_source_trainer):
        swag = SWAGCallback(num_deviations=3)
        trainer = make_source_trainer(swag)
        trainer.train()
        trainer.train()
        assert swag.moments.num_collected == 6

    @pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile], ids=["DataParallel", "compile"])
    def test_names_are_those_of_the_model_inside_a_wrapper(self, wrap, make_source_trainer):
        model, args = make_model("resnet"), make_source_trainer().args
        swag, state = SWAGCallback(num_deviations=2, collect_every=1), TrainerState(max_steps=3)
        swag.on_train_begin(args, state, TrainerControl(), model=wrap(model))
        state.global_step = 1
        swag.on_step_end(args, state, TrainerControl(), model=wrap(model))
        head = head_parameter_names(model)
        assert swag.moments.mean.keys() == {name for name, _ in model.named_parameters()} - set(head)

    def test_the_prior_serves_a_task_with_other_classes(self, make_source_trainer, make_config):
        swag = SWAGCallback(num_deviations=3)
        trainer = make_source_trainer(swag)
        trainer.train()
        swag.load_mean(trainer)
        target = copy.deepcopy(trainer.model)
        target.classifier[1], target.config.num_labels = nn.Linear(16, 2), 2
        data = [example for example in make_dataset("resnet") if example["labels"] < 2]
        tuned = DEELBoTrainer(target, make_config(prior="ptyl"), train_dataset=data, prior=swag.prior())
        assert tuned.posterior.prior.mahalanobis(tuned.posterior.backbone) == 0
        tuned.train()
        assert tuned.posterior.lambda_ > 0
        assert tuned.posterior.prior.mahalanobis(tuned.posterior.backbone) > 0

    @pytest.mark.parametrize(("schedule", "warns"), [("linear", True), ("cosine", True), ("constant", False)])
    def test_warns_of_a_learning_rate_that_vanishes(self, schedule, warns, make_source_trainer, monkeypatch):
        messages = []
        monkeypatch.setattr(logging.getLogger("hf_deelbo.swag"), "warning", messages.append)
        make_source_trainer(SWAGCallback(num_deviations=3), lr_scheduler_type=schedule).train()
        assert bool(messages) == warns
        assert all(f'lr_scheduler_type="{schedule}"' in message and '"constant"' in message for message in messages)


class TestResume:
    @pytest.mark.parametrize(
        ("settings", "stop"),
        [({}, 9), ({}, 10), ({"collect_every": 2}, 9)],
        ids=["at the end of an epoch", "within an epoch", "between collections"],
    )
    def test_the_prior_is_that_of_an_uninterrupted_run_to_the_bit(
        self, settings, stop, make_source_trainer, assert_same, tmp_path
    ):
        """A checkpoint of the last step of an epoch is written before `Trainer` says that the epoch has ended."""
        straight = SWAGCallback(num_deviations=3, **settings)
        make_source_trainer(straight, output_dir=str(tmp_path / "straight")).train()

        saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
        make_source_trainer(SWAGCallback(num_deviations=3, **settings), StopAt(stop), **saving).train()
        resumed = SWAGCallback(num_deviations=3, **settings)
        make_source_trainer(resumed, seed=7, **saving).train(resume_from_checkpoint=True)
        assert resumed.moments.num_collected == straight.moments.num_collected
        assert_same(resumed.prior().state_dict(), straight.prior().state_dict())

    @pytest.fixture
    def checkpoint(self, make_source_trainer, tmp_path):
        """A checkpoint at step 9, in another folder than that of the trainer to come."""
        trainer = make_source_trainer(
            SWAGCallback(num_deviations=3), StopAt(9), output_dir=str(tmp_path / "other"), save_strategy="epoch"
        )
        trainer.train()
        return tmp_path / "other" / "checkpoint-9"

    def test_from_another_folder(self, checkpoint, make_source_trainer, assert_same):
        straight, resumed = SWAGCallback(num_deviations=3), SWAGCallback(num_deviations=3)
        make_source_trainer(straight).train()
        resumed.load_checkpoint(checkpoint)
        make_source_trainer(resumed, seed=7).train(resume_from_checkpoint=str(checkpoint))
        assert_same(resumed.prior().state_dict(), straight.prior().state_dict())

    def test_from_another_folder_that_the_arguments_name(self, checkpoint, make_source_trainer):
        resumed = SWAGCallback(num_deviations=3)
        trainer = make_source_trainer(resumed, resume_from_checkpoint=str(checkpoint))
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
        assert resumed.moments.num_collected == 6

    def test_a_checkpoint_is_enough_for_a_prior(self, make_source_trainer, tmp_path):
        recorder = WeightRecorder([3, 6, 9])
        make_source_trainer(SWAGCallback(num_deviations=3), recorder, StopAt(9), save_strategy="epoch").train()
        checkpoint = tmp_path / "source" / "checkpoint-9"
        assert [path.name for path in checkpoint.glob("swag*")] == [SWAG_FILE]
        swag = SWAGCallback(num_deviations=3)
        swag.load_checkpoint(checkpoint)
        assert_prior_has(swag.prior(), numpy_moments(recorder.weights, rank=3), scale=1)

    def test_refuses_to_go_on_without_moments(self, checkpoint, make_source_trainer):
        trainer = make_source_trainer(SWAGCallback(num_deviations=3))
        with pytest.raises(ValueError, match=r"checkpoint-9.*swag.safetensors is missing.*call `load_checkpoint`"):
            trainer.train(resume_from_checkpoint=str(checkpoint))

    def test_refuses_moments_of_another_run(self, checkpoint, make_source_trainer, tmp_path):
        """The folder of this run has a checkpoint of the same step, too."""
        swag = SWAGCallback(num_deviations=3)
        make_source_trainer(swag, StopAt(9), seed=3, save_strategy="epoch").train()
        with pytest.raises(ValueError, match="were saved with other weights than those that training resumes from"):
            make_source_trainer(SWAGCallback(num_deviations=3)).train(resume_from_checkpoint=str(checkpoint))

    def test_from_a_checkpoint_that_was_moved(self, checkpoint, make_source_trainer, tmp_path):
        shutil.move(checkpoint, tmp_path / "source" / "checkpoint-9")
        resumed = SWAGCallback(num_deviations=3)
        make_source_trainer(resumed).train(resume_from_checkpoint=True)
        assert resumed.moments.num_collected == 6


class TestMean:
    def test_weights_are_the_mean_and_the_head_stays(self, make_source_trainer):
        swag, recorder = SWAGCallback(num_deviations=3), WeightRecorder([3, 6, 9, 12, 15, 18])
        trainer = make_source_trainer(swag, recorder)
        trainer.train()
        head = {name: trainer.model.get_parameter(name).clone() for name in head_parameter_names(trainer.model)}
        swag.load_mean(trainer)
        for name, mean in numpy_moments(recorder.weights, 3)["mean"].items():
            np.testing.assert_allclose(trainer.model.get_parameter(name).detach().numpy(), mean, rtol=1e-6, atol=1e-6)
        assert all(torch.equal(trainer.model.get_parameter(name), tensor) for name, tensor in head.items())

    def test_one_batch_in_eval_mode_gives_what_train_mode_computes_on_it(self, make_source_trainer):
        swag = SWAGCallback(num_deviations=3)
        trainer = make_source_trainer(swag, per_device_eval_batch_size=24)
        trainer.train()
        swag.load_mean(trainer)
        images = torch.stack([example["pixel_values"] for example in trainer.train_dataset])
        with torch.no_grad():
            in_eval_mode = trainer.model.eval()(pixel_values=images).logits
            in_train_mode = copy.deepcopy(trainer.model).train()(pixel_values=images).logits
        torch.testing.assert_close(in_eval_mode, in_train_mode, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("own_batches", [False, True])
    def test_statistics_are_those_of_all_training_inputs_at_the_mean(self, own_batches, make_source_trainer):
        """25 examples in batches of 8: one would be left over."""
        swag, data = SWAGCallback(num_deviations=3), make_dataset("resnet", 25)
        trainer = make_source_trainer(swag, dataset=data, per_device_eval_batch_size=8, dataloader_drop_last=True)
        trainer.train()
        examples = data[:10] if own_batches else data
        images = torch.stack([example["pixel_values"] for example in examples])
        labels = torch.tensor([example["labels"] for example in examples])
        swag.load_mean(trainer, [{"pixel_values": images, "labels": labels}] if own_batches else None)
        embedder = trainer.model.resnet.embedder.embedder
        with torch.no_grad():
            received = embedder.convolution(images)
        norm = embedder.normalization
        torch.testing.assert_close(norm.running_mean, received.mean((0, 2, 3)), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(norm.running_var, received.var((0, 2, 3), correction=0), rtol=1e-5, atol=1e-5)

    def test_without_batch_norm_no_data_is_needed(self, make_source_trainer):
        swag = SWAGCallback(num_deviations=3)
        trainer = make_source_trainer(swag, kind="bert")
        trainer.train()
        trainer.train_dataset = None
        swag.load_mean(trainer)
        name, mean = next(iter(swag.prior().mean.items()))
        assert torch.equal(trainer.model.get_parameter(name), mean)

    def test_refuses_data_without_length(self, make_source_trainer):
        swag = SWAGCallback(num_deviations=3)
        trainer = make_source_trainer(swag)
        trainer.train()
        trainer.train_dataset = iter(trainer.train_dataset)
        with pytest.raises(ValueError, match="batches: the trainer has no `train_dataset` with a length"):
            swag.load_mean(trainer)


class TestRefusals:
    @pytest.mark.parametrize("collect_every", ["step", 0, -1, 1.5])
    def test_collect_every(self, collect_every):
        with pytest.raises(ValueError, match='collect_every: must be "epoch" or a positive number of steps'):
            SWAGCallback(collect_every=collect_every)

    @pytest.mark.parametrize("start", [-0.1, 1.0, -1])
    def test_start(self, start):
        with pytest.raises(ValueError, match="start: must be a part of the training"):
            SWAGCallback(start=start)

    @pytest.mark.parametrize(
        ("settings", "planned"), [({"num_deviations": 7}, 6), ({"num_deviations": 2, "start": 100}, 0)]
    )
    def test_too_few_collections_are_known_before_training(self, settings, planned, make_source_trainer):
        trainer = make_source_trainer(SWAGCallback(**settings))
        with pytest.raises(ValueError, match=rf"training of 18 steps has {planned}, one every 3 steps"):
            trainer.train()
        assert trainer.state.global_step == 0

    def test_epochs_of_data_without_length(self, make_source_trainer):
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(make_dataset("resnet"))

        trainer = make_source_trainer(SWAGCallback(num_deviations=3), dataset=Stream(), max_steps=6)
        with pytest.raises(ValueError, match='collect_every: "epoch" needs training data that tells its length'):
            trainer.train()

    def test_a_prior_before_training(self):
        with pytest.raises(ValueError, match="but there were 0"):
            SWAGCallback().prior()
