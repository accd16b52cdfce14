import math

import numpy as np
import pytest
import torch
from conftest import collate, make_dataset, make_model
from scipy.optimize import minimize_scalar
from torch import nn
from torch.distributions import Categorical, Normal

from hf_deelbo import DEELBoTrainer, GaussianPosterior
from hf_deelbo.metrics import expected_calibration_error
from hf_deelbo.posterior import Posterior
from hf_deelbo.temperature import PRIOR_DEVIATIONS, Temperatures, fit_temperature, tempered
from hf_deelbo.weights.parameters import head_parameter_names


def draw(num_examples: int, too_sure: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and labels that are drawn from softmax(logits / too_sure)."""
    torch.manual_seed(seed)
    logits = 2 * torch.randn(num_examples, 5, dtype=torch.float64)
    return too_sure * logits, Categorical(logits=logits).sample()


def posterior_of(kind: str = "vit", **kwargs) -> GaussianPosterior:
    model = make_model(kind)
    return GaussianPosterior(model, head_parameter_names(model), num_examples=24, init_sigma=0.05, **kwargs)


class TestFit:
    @pytest.mark.parametrize("num_examples", [1, 10, 400])
    @pytest.mark.parametrize("too_sure", [0.3, 1.0, 8.0])
    @pytest.mark.parametrize("deviations", [(0.5, 0.5), PRIOR_DEVIATIONS, (3.0, 0.1)])
    def test_it_maximises_the_likelihood_times_the_prior(self, num_examples, too_sure, deviations):
        logits, labels = draw(num_examples, too_sure)

        def loss(log_temperature: float) -> float:
            likelihood = Categorical(logits=logits / math.exp(log_temperature)).log_prob(labels).sum()
            prior = Normal(0.0, deviations[1] if log_temperature > 0 else deviations[0])
            relative = prior.log_prob(torch.tensor(log_temperature)) - prior.log_prob(torch.tensor(0.0))
            return -float(likelihood + relative)

        start = min(np.linspace(-3, 4, 200), key=loss)
        best = minimize_scalar(loss, bounds=(start - 0.04, start + 0.04), options={"xatol": 1e-10}).x
        assert math.log(fit_temperature(logits, labels, deviations)) == pytest.approx(best, abs=1e-6)

    @pytest.mark.parametrize("too_sure", [0.25, 4.0])
    def test_it_finds_by_how_much_logits_are_too_sure_and_halves_the_calibration_error(self, too_sure):
        logits, labels = draw(4000, too_sure)
        temperature = fit_temperature(logits, labels)
        assert temperature == pytest.approx(too_sure, rel=0.05)
        others, their_labels = draw(4000, too_sure, seed=1)
        before, after = (
            expected_calibration_error(torch.softmax(others / t, -1).numpy(), their_labels.numpy())
            for t in (1.0, temperature)
        )
        assert after < before / 2

    def test_what_is_calibrated_stays_so(self):
        assert fit_temperature(*draw(4000)) == pytest.approx(1, rel=0.03)

    @pytest.mark.parametrize(("label", "low", "high"), [(0, 0.85, 1.0), (1, 2, 20)])
    def test_a_few_that_are_all_right_or_all_wrong_are_not_taken_at_their_word(self, label, low, high):
        logits = torch.tensor([[2.0, 0.0]] * 5)
        assert low < fit_temperature(logits, torch.full((5,), label)) < high

    @pytest.mark.parametrize(
        ("logits", "labels"),
        [(torch.zeros(0, 3), torch.zeros(0)), (torch.zeros(4, 3), torch.zeros(3)), (torch.zeros(4), torch.zeros(4))],
    )
    def test_what_is_no_example_is_refused(self, logits, labels):
        with pytest.raises(ValueError, match=r"labels: a temperature needs one class index for each row"):
            fit_temperature(logits, labels)

    def test_logits_that_are_not_finite_are_refused(self):
        with pytest.raises(ValueError, match="logits: they are not all finite"):
            fit_temperature(torch.tensor([[math.nan, 0.0]]), torch.tensor([0]))


def test_tempered_probabilities_are_those_of_divided_logits():
    logits, _ = draw(20)
    torch.testing.assert_close(tempered(logits.softmax(-1), 2.5), (logits / 2.5).softmax(-1))
    certain = torch.tensor([[1.0, 0.0]])
    assert tempered(certain, 1.0) is certain
    assert torch.isfinite(tempered(certain, 3.0)).all()


class TestPosterior:
    @pytest.mark.parametrize("num_samples", [0, 3])
    def test_it_is_fitted_to_what_is_predicted_and_tempers_it(self, num_samples):
        posterior, batch = posterior_of(), collate(make_dataset("vit"))
        labels = batch.pop("labels")
        at_mean = posterior.predict_proba(batch)
        averaged = posterior.predict_proba(batch, num_samples)
        halves = [
            {"pixel_values": x, "labels": y}
            for x, y in zip(batch["pixel_values"].chunk(2), labels.chunk(2), strict=True)
        ]
        temperatures = posterior.calibrate(halves, num_samples)
        assert temperatures.mean == pytest.approx(fit_temperature(at_mean.log(), labels), rel=1e-5)
        average = fit_temperature(averaged.log(), labels) if num_samples else 1.0
        assert temperatures.average == pytest.approx(average, rel=1e-5)
        assert temperatures.mean != 1
        tempered_mean = (at_mean.log() / temperatures.mean).softmax(-1)
        torch.testing.assert_close(posterior.predict_proba(batch), tempered_mean)
        if num_samples:
            expected = (averaged.log() / temperatures.average).softmax(-1)
            torch.testing.assert_close(posterior.predict_proba(batch, num_samples), expected)

    def test_a_second_calibration_does_not_build_on_the_first(self):
        posterior, batch = posterior_of(), collate(make_dataset("vit"))
        assert posterior.calibrate([batch]) == posterior.calibrate([batch])

    @pytest.mark.parametrize("forget", ["update_variances", "load_state_dict"])
    def test_it_is_forgotten_with_the_sigma_that_it_was_fitted_for(self, forget):
        posterior = posterior_of()
        posterior.calibrate([collate(make_dataset("vit"))])
        getattr(posterior, forget)(*([posterior.state_dict()] if forget == "load_state_dict" else []))
        assert posterior.temperatures == Temperatures(1.0, 1.0)

    @pytest.mark.parametrize("kind", ["vit", "resnet", "bert"])
    def test_the_calibrated_model_has_the_probabilities_of_the_mean(self, kind):
        posterior, batch = posterior_of(kind), collate(make_dataset(kind))
        weights = {name: w.clone() for name, w in posterior.parameters().items()}
        posterior.calibrate([batch], num_samples=0)
        del batch["labels"]
        with torch.no_grad():
            probabilities = posterior.calibrated_model()(**batch).logits.softmax(-1)
        torch.testing.assert_close(probabilities, posterior.predict_proba(batch))
        assert posterior.temperatures.mean != 1
        assert all(torch.equal(w, weights[name]) for name, w in posterior.parameters().items())

    def test_a_head_without_a_linear_layer_cannot_be_scaled(self):
        posterior = Posterior(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), ["1.weight"], num_examples=5)
        with pytest.raises(ValueError, match="model: the head of Sequential has no linear layer"):
            posterior.calibrated_model()

    def test_bad_batches(self):
        posterior = posterior_of()
        with pytest.raises(ValueError, match="batches: there are none"):
            posterior.calibrate([])
        with pytest.raises(ValueError, match="batches: each needs `labels`; this one has pixel_values"):
            posterior.calibrate([{"pixel_values": torch.zeros(1, 1, 8, 8)}])

    def test_it_is_saved(self, tmp_path):
        posterior, batch = posterior_of(), collate(make_dataset("vit"))
        posterior.calibrate([batch])
        posterior.save_pretrained(tmp_path)
        loaded = GaussianPosterior.from_pretrained(tmp_path)
        assert loaded.temperatures == posterior.temperatures
        del batch["labels"]
        assert torch.equal(loaded.predict_proba(batch), posterior.predict_proba(batch))


class TestTrainer:
    @pytest.fixture
    def trainer(self, make_config):
        held_out = make_dataset("vit", size=18, seed=7)
        args = make_config(max_steps=4, learning_rate=0.05, num_elbo_samples=3)
        trainer = DEELBoTrainer(make_model("vit"), args, train_dataset=make_dataset("vit"), eval_dataset=held_out)
        trainer.train()
        return trainer

    def test_it_does_as_the_posterior_itself(self, trainer):
        temperatures = trainer.calibrate(trainer.eval_dataset)
        by_hand = trainer.posterior.calibrate([collate(trainer.eval_dataset)], num_samples=3)
        assert temperatures == pytest.approx(by_hand, rel=1e-4)

    @pytest.mark.parametrize("num_samples", [0, 3])
    def test_evaluations_are_tempered(self, trainer, num_samples):
        batch = collate(trainer.eval_dataset)
        labels = batch.pop("labels")
        trainer.calibrate(trainer.eval_dataset)
        trainer.args.num_eval_samples = num_samples
        probabilities = trainer.posterior.predict_proba(batch, num_samples)
        nll = float(-probabilities.log()[torch.arange(len(labels)), labels].mean())
        assert trainer.evaluate()["eval_loss"] == pytest.approx(nll, rel=1e-5)
        predictions = torch.as_tensor(trainer.predict(trainer.eval_dataset).predictions)
        torch.testing.assert_close(predictions.softmax(-1), probabilities)

    def test_rows_of_the_training_set_are_refused(self, trainer):
        mixed = make_dataset("vit")[:3] + trainer.eval_dataset
        with pytest.raises(ValueError, match="dataset: 3 of its 21 rows are in the training set"):
            trainer.calibrate(mixed)
        assert trainer.posterior.temperatures == Temperatures()

    def test_a_few_are_told_of(self, trainer, monkeypatch):
        messages = []
        monkeypatch.setattr("hf_deelbo.trainer.logger.warning", messages.append)
        trainer.calibrate(make_dataset("vit")[:1] + trainer.eval_dataset)
        (message,) = messages
        assert message.startswith("dataset: 1 of its 19 rows are in the training set")

    def test_another_likelihood_has_no_temperature(self, trainer):
        trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: outputs.logits.sum()
        with pytest.raises(ValueError, match="compute_loss_func: a temperature is of class probabilities"):
            trainer.calibrate(trainer.eval_dataset)

    def test_rows_that_are_held_out_are_not_trained_on_and_n_follows(self, make_config):
        rows = make_dataset("vit")
        trainer = DEELBoTrainer(make_model("vit"), make_config(max_steps=2), train_dataset=rows)
        held_out = trainer.hold_out([0, 5])
        assert [id(row) for row in held_out] == [id(rows[0]), id(rows[5])]
        assert [id(row) for row in trainer.train_dataset] == [id(row) for i, row in enumerate(rows) if i not in (0, 5)]
        assert trainer.posterior.num_examples == 22
        assert trainer.posterior.kappa == trainer.posterior.num_parameters / 22
        trainer.train()
        with pytest.raises(RuntimeError, match="hold_out: the trainer has trained on these rows"):
            trainer.hold_out([1])
