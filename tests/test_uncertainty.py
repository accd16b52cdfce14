"""What weight samples know of an example, against `torch.distributions` and sums that are written out."""

import math

import pytest
import torch
from conftest import collate, make_dataset, make_model
from torch.distributions import Categorical, kl_divergence

from hf_deelbo import GaussianPosterior
from hf_deelbo.temperature import Temperatures, tempered
from hf_deelbo.uncertainty import Uncertainty, uncertainty_of
from hf_deelbo.weights.parameters import head_parameter_names

TEMPERATURES = (0.2, 0.7, 1.0, 3.0, 1000.0)


def draw(num_samples: int = 7, num_examples: int = 50, sharpness: float = 3.0) -> torch.Tensor:
    torch.manual_seed(0)
    logits = torch.randn(num_examples, 4, dtype=torch.float64) + torch.randn(
        num_samples, num_examples, 4, dtype=torch.float64
    )
    return (sharpness * logits).softmax(-1)


def close(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


class TestFormula:
    @pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
    def test_entropies_are_those_of_torch_distributions(self, dtype, atol):
        samples = draw().to(dtype)
        found, average = uncertainty_of(samples), draw().mean(0)
        close(found.probabilities.double(), average, atol)
        close(found.total, Categorical(average).entropy(), atol)
        close(found.data, Categorical(draw()).entropy().mean(0), atol)
        divergences = kl_divergence(Categorical(draw()), Categorical(average.expand(7, -1, -1)))
        close(found.doubt, divergences.mean(0), atol)

    def test_by_hand(self):
        # the samples agree on an even chance; each is sure of another class; two of three are of one mind
        samples = torch.tensor([[[0.5, 0.5], [1.0, 0.0], [0.9, 0.1]], [[0.5, 0.5], [0.0, 1.0], [0.9, 0.1]]])
        third = torch.tensor([[[0.5, 0.5], [1.0, 0.0], [0.3, 0.7]]])
        found = uncertainty_of(torch.cat([third, samples]).double())

        def entropy(p: float) -> float:
            return -p * math.log(p) - (1 - p) * math.log(1 - p)

        total = [math.log(2), entropy(2 / 3), entropy(0.7)]
        data = [math.log(2), 0.0, (2 * entropy(0.9) + entropy(0.3)) / 3]
        close(found.total, torch.tensor(total).double(), 1e-7)
        close(found.data, torch.tensor(data).double(), 1e-7)
        close(found.doubt, torch.tensor(total).double() - torch.tensor(data).double(), 1e-7)
        close(found.agreement, torch.tensor([1.0, 2 / 3, 2 / 3]).double(), 1e-7)

    @pytest.mark.parametrize("temperature", TEMPERATURES)
    def test_of_tempered_averages_it_is_the_information_of_the_nearest_joint_distribution(self, temperature):
        samples = draw()
        found = uncertainty_of(samples, temperature)
        p = tempered(samples.mean(0), temperature)
        for example in range(samples.shape[1]):
            # what sample and class have together, with its columns scaled to the tempered classes
            joint = samples[:, example] / len(samples) * (p[example] / samples[:, example].mean(0))
            of_sample, of_class = Categorical(joint.sum(1)), Categorical(joint.sum(0))
            information = of_sample.entropy() + of_class.entropy() - Categorical(joint.flatten()).entropy()
            close(found.doubt[example], information, 1e-10)
            close(found.total[example], of_class.entropy(), 1e-10)
            close(found.data[example], (joint.sum(1) * Categorical(joint).entropy()).sum(), 1e-10)

    @pytest.mark.parametrize("temperature", TEMPERATURES)
    def test_the_joint_distribution_is_nearer_than_others_of_the_same_classes(self, temperature):
        """The one that the docstring says is nearest, against mixtures with tempered samples, one by one."""
        samples = draw(num_examples=1)[:, 0]
        p = tempered(samples.mean(0), temperature)
        before = samples / len(samples)
        nearest = before * (p / samples.mean(0))
        torch.manual_seed(1)
        for scale in (0.01, 0.1, 0.5):
            other = nearest * (scale * torch.randn_like(nearest)).exp()
            other = other * (p / other.sum(0))  # of the same classes
            distances = [(of * (of / before).log()).sum() for of in (nearest, other)]
            assert distances[0] < distances[1]

    @pytest.mark.parametrize("temperature", TEMPERATURES)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("sharpness", [0.0, 1e-4, 3.0, 100.0])
    def test_the_parts_add_up_and_none_is_negative(self, temperature, dtype, sharpness):
        samples = draw(sharpness=sharpness).to(dtype)
        found = uncertainty_of(samples, temperature)
        assert torch.equal(found.total, found.data + found.doubt)
        for part in found[1:]:
            assert part.shape == (50,)
            assert torch.isfinite(part).all()
            assert (part >= 0).all()
        p = found.probabilities.double()
        close(found.total, Categorical(p / p.sum(-1, keepdim=True)).entropy(), 1e-6)

    def test_samples_that_are_the_same_have_no_doubt(self):
        found = uncertainty_of(draw(num_samples=1).expand(5, -1, -1), temperature=0.5)
        close(found.doubt, torch.zeros(50, dtype=torch.float64))
        assert torch.equal(found.agreement, torch.ones(50, dtype=torch.float64))

    @pytest.mark.parametrize("shape", [(1, 5, 3), (5, 3), (0, 5, 3)])
    def test_what_is_no_stack_of_samples_is_refused(self, shape):
        with pytest.raises(ValueError, match=r"samples: .*at least two"):
            uncertainty_of(torch.ones(shape))


class TestPosterior:
    @pytest.fixture
    def posterior(self) -> GaussianPosterior:
        model = make_model("vit")
        return GaussianPosterior(model, head_parameter_names(model), num_examples=24, init_sigma=0.2)

    @pytest.fixture
    def inputs(self) -> dict[str, torch.Tensor]:
        return {"pixel_values": collate(make_dataset("vit"))["pixel_values"]}

    @pytest.mark.parametrize("average", [1.0, 0.4, 2.5])
    def test_it_is_of_the_samples_and_probabilities_that_are_predicted(self, posterior, inputs, average):
        posterior.temperatures = Temperatures(mean=7.0, average=average)
        found = posterior.uncertainty(inputs, num_samples=4)
        assert isinstance(found, Uncertainty)
        samples = posterior.sample_proba(inputs, 4)
        assert torch.equal(found.probabilities, posterior.predict_proba(inputs, 4))
        close(found.total, Categorical(found.probabilities.double()).entropy(), 1e-6)
        close(found.doubt, uncertainty_of(samples, average).doubt, 0.0)
        answers = samples.mean(0).argmax(-1)
        shares = [(samples[:, row].argmax(-1) == answer).double().mean() for row, answer in enumerate(answers)]
        close(found.agreement, torch.stack(shares))
        assert found.doubt.max() > 1e-3

    def test_ten_samples_are_drawn_once_each(self, posterior, inputs, drawn_keys):
        posterior.uncertainty(inputs)
        assert list(dict.fromkeys(drawn_keys)) == [(seed,) for seed in range(10)]

    @pytest.mark.parametrize("value", [0, 1, -1, 2.0])
    def test_a_bad_number_of_samples(self, posterior, inputs, value):
        with pytest.raises(ValueError, match=f"num_samples: .*{value}"):
            posterior.uncertainty(inputs, num_samples=value)

    def test_batch_norm_needs_statistics_of_the_samples(self):
        model = make_model("resnet")
        posterior = GaussianPosterior(model, head_parameter_names(model), num_examples=24)
        inputs = {"pixel_values": collate(make_dataset("resnet"))["pixel_values"]}
        with pytest.raises(ValueError, match="recompute_batch_norm"):
            posterior.uncertainty(inputs, num_samples=2)
