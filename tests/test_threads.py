"""One posterior in many threads: what each gets is what it would get alone, to the bit."""

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import collate, make_dataset, make_model
from transformers import TrainerCallback

from hf_deelbo import GaussianPosterior
from hf_deelbo.weights.parameters import head_parameter_names

NUM_THREADS = 8


def make_posterior(kind: str) -> tuple[GaussianPosterior, list[dict[str, torch.Tensor]]]:
    """A posterior, and inputs for it."""
    model = make_model(kind)
    posterior = GaussianPosterior(model, head_parameter_names(model), init_sigma=0.1, num_examples=24)
    batches = [{"pixel_values": collate(make_dataset(kind, 3, seed))["pixel_values"]} for seed in range(4)]
    posterior.recompute_batch_norm(batches, num_samples=5)
    return posterior, batches


def compare_with_serial_calls(kind: str, num_calls: int) -> None:
    posterior, batches = make_posterior(kind)
    calls = [(index % len(batches), (0, 5, 0, 2, 1)[index % 5]) for index in range(num_calls)]
    expected = {call: posterior.predict_proba(batches[call[0]], call[1]) for call in set(calls)}
    before = {name: tensor.clone() for name, tensor in posterior.model.state_dict().items()}
    modes = [module.training for module in posterior.model.modules()]
    start = threading.Barrier(NUM_THREADS)

    def work(first: int) -> int:
        start.wait(timeout=60)
        own = calls[first::NUM_THREADS]
        return sum(not torch.equal(posterior.predict_proba(batches[b], s), expected[b, s]) for b, s in own)

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        num_wrong = sum(pool.map(work, range(NUM_THREADS)))
    assert num_wrong == 0
    after = posterior.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert [module.training for module in posterior.model.modules()] == modes


@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_predictions_are_those_of_serial_calls(kind):
    compare_with_serial_calls(kind, num_calls=400)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vit", "resnet"])
def test_10000_predictions_are_those_of_serial_calls(kind):
    compare_with_serial_calls(kind, num_calls=10_000)


def in_another_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=60)


@pytest.mark.parametrize("use", ["predict_proba", "as_prior", "backbone", "save_pretrained", "update_variances"])
def test_whoever_needs_the_mean_waits_until_the_sample_is_gone(use, tmp_path):
    posterior, batches = make_posterior("resnet")
    mean = {name: w.clone() for name, w in posterior.backbone.items()}
    probabilities, tau = posterior.predict_proba(batches[0]), float(posterior.tau)
    is_there, is_over = threading.Event(), []

    def hold_a_sample() -> None:
        with posterior.sampled(7):
            is_there.set()
            threading.Event().wait(0.2)
            is_over.append(True)

    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(hold_a_sample)
        is_there.wait(timeout=60)
        assert posterior.is_sampled
        if use == "predict_proba":
            assert torch.equal(posterior.predict_proba(batches[0]), probabilities)
        elif use == "update_variances":
            posterior.update_prior_variances()
            assert float(posterior.tau) == tau
        else:
            if use == "save_pretrained":
                posterior.save_pretrained(tmp_path)
                found = GaussianPosterior.from_pretrained(tmp_path).backbone
            else:
                found = posterior.backbone if use == "backbone" else posterior.as_prior().state_dict()
            assert all(torch.equal(found[name if name in found else f"mean.{name}"], w) for name, w in mean.items())
        assert is_over
        holder.result()


@pytest.mark.parametrize("num_samples", [0, 2])
def test_the_thread_that_holds_a_sample_is_told_so(num_samples):
    posterior, batches = make_posterior("resnet")
    with posterior.sampled(0):
        with pytest.raises(RuntimeError, match=r"(predict|sample)_proba: the model holds a weight sample"):
            posterior.predict_proba(batches[0], num_samples)
        assert posterior.is_sampled


class InEachStep(TrainerCallback):
    def __init__(self, function):
        self.function = function

    def on_step_end(self, *args, **kwargs):
        self.function()


def test_other_threads_are_refused_while_one_trains(make_trainer, snapshot, assert_same):
    refused, predicted = [], []
    trainer, plain = (make_trainer("vit", max_steps=3) for _ in range(2))
    inputs = {"pixel_values": collate(make_dataset("vit"))["pixel_values"]}

    def predict():
        for num_samples in (0, 2):
            with pytest.raises(RuntimeError, match="another thread trains this posterior now. Wait") as caught:
                in_another_thread(lambda number=num_samples: trainer.posterior.predict_proba(inputs, number))
            refused.append(caught.value)
            predicted.append(trainer.posterior.predict_proba(inputs, num_samples))

    trainer.add_callback(InEachStep(predict))
    trainer.train()
    assert len(refused) == len(predicted) == 6
    plain.train()
    assert_same(snapshot(plain.model), snapshot(trainer.model))
    ours = trainer.posterior.predict_proba(inputs, 2)
    assert torch.equal(in_another_thread(lambda: trainer.posterior.predict_proba(inputs, 2)), ours)


def test_an_evaluation_and_predictions_at_once(make_trainer):
    trainer = make_trainer("resnet", num_eval_samples=2, per_device_eval_batch_size=2)
    data = make_dataset("resnet", 21, seed=9)
    inputs = {"pixel_values": collate(data)["pixel_values"]}
    expected_loss, j = trainer.evaluate(data)["eval_loss"], trainer.de_elbo(num_samples=2)
    expected = trainer.posterior.predict_proba(inputs, 2)
    stop = threading.Event()

    def predict() -> bool:
        all_right = True
        while not stop.is_set():
            all_right &= torch.equal(trainer.posterior.predict_proba(inputs, 2), expected)
        return all_right

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(predict) for _ in range(2)]
        try:
            for _ in range(3):
                assert trainer.evaluate(data)["eval_loss"] == expected_loss
                assert trainer.de_elbo(num_samples=2) == j
        finally:
            stop.set()
        assert all(other.result() for other in others)


def test_a_forked_process_does_not_wait_for_threads_that_it_does_not_have():
    posterior, batches = make_posterior("vit")
    expected = posterior.predict_proba(batches[0])
    is_there, may_go = threading.Event(), threading.Event()

    def hold_a_sample() -> None:
        with posterior.sampled(7):
            is_there.set()
            may_go.wait(timeout=60)

    def in_the_child() -> None:
        assert torch.equal(posterior.predict_proba(batches[0]), expected)

    with ThreadPoolExecutor(1) as pool:
        holder = pool.submit(hold_a_sample)
        is_there.wait(timeout=60)
        child = multiprocessing.get_context("fork").Process(target=in_the_child)
        child.start()
        child.join(timeout=30)
        may_go.set()
        holder.result()
    code = child.exitcode
    child.kill()
    assert code == 0
