"""The paper's central claim, on real images: kappa = D/N learns where the plain ELBo falls back to the prior."""

import pytest
import torch
from conftest import load_example
from transformers import set_seed

from hf_deelbo import DEELBoTrainer


@pytest.fixture(scope="module")
def digits():
    return load_example("digits")


@pytest.mark.parametrize("sigma_update", ["closed-form", "optimizer"])
def test_the_plain_elbo_collapses_to_the_prior_and_the_de_elbo_learns(digits, make_config, sigma_update):
    train, test = digits.load_data()
    learned = {}
    for kappa in ("auto", 1):
        set_seed(0)
        args = make_config(
            kappa=kappa, sigma_update=sigma_update, init_sigma=0.01, max_steps=150, per_device_train_batch_size=128
        )
        trainer = DEELBoTrainer(
            digits.make_model(), args, train_dataset=train, eval_dataset=test, compute_metrics=digits.accuracy
        )
        trainer.train()
        learned[kappa] = trainer.posterior, trainer.evaluate()["eval_accuracy"], trainer.de_elbo(num_samples=3)

    posterior, accuracy, elbo = learned["auto"]
    assert posterior.kappa == pytest.approx(posterior.num_parameters / 200)
    assert accuracy > 0.7
    assert elbo.nll < 0.2

    collapsed, accuracy, elbo = learned[1]
    assert accuracy < 0.4
    assert elbo.nll > 1.9  # log 10 is 2.3
    # the posterior is hardly more than the prior: their spreads agree, and a parameter costs a hundredth of a nat
    assert collapsed.lambda_.item() == pytest.approx(collapsed.sigma.item() ** 2, rel=0.1)
    assert (elbo.kl_backbone + elbo.kl_head) / collapsed.num_parameters < 0.01
    assert torch.sqrt(posterior.lambda_) > 1.05 * posterior.sigma
