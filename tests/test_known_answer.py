"""A problem whose optimum of the same objective is known without sampling or SGD.

Softmax regression with two classes: logits = W x + b. Under q they are Gaussian, their difference has mean m_i and
variance 2 sigma^2 (|x_i|^2 + 1), so E_q[log p(y_i)] is a one-dimensional integral (Gauss-Hermite). With the optimal
lambda and tau, J is then a smooth function of W_bar, b_bar and log sigma, which scipy maximises.
"""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn
from transformers import TrainerCallback

KAPPA, NUM_EXAMPLES, NUM_FEATURES = 2.0, 40, 3
SIZE_W, SIZE_B = 2 * NUM_FEATURES, 2


class Softmax(nn.Module):
    def __init__(self, start: np.ndarray):
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, 2)
        with torch.no_grad():
            self.linear.weight.copy_(torch.tensor(start))
            self.linear.bias.zero_()

    def forward(self, features, labels=None):
        logits = self.linear(features)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.fixture
def problem() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM_EXAMPLES, NUM_FEATURES)).astype(np.float32)
    y = (x @ [2.0, -1.0, 0.5] + 0.5 + random.logistic(size=NUM_EXAMPLES) > 0).astype(int)
    start = 0.1 * random.normal(size=(2, NUM_FEATURES)).astype(np.float32)
    return {"x": x, "y": y, "start": start}


def minus_j(theta: np.ndarray, problem: dict[str, np.ndarray]) -> float:
    w, b, sigma2 = theta[:SIZE_W].reshape(2, -1), theta[SIZE_W:-1], np.exp(2 * theta[-1])
    x, sign = problem["x"], 2 * problem["y"] - 1
    mean = sign * (x @ (w[1] - w[0]) + b[1] - b[0])
    deviation = np.sqrt(2 * sigma2 * ((x**2).sum(1) + 1))
    nodes, weights = np.polynomial.hermite_e.hermegauss(40)
    margins = mean[:, None] + deviation[:, None] * nodes
    log_likelihood = (-np.logaddexp(0, -margins) @ weights / weights.sum()).sum()
    lambda_ = sigma2 + ((w - problem["start"]) ** 2).mean()
    tau = sigma2 + (b**2).mean()
    kl = 0.5 * (SIZE_W * np.log(lambda_ / sigma2) + SIZE_B * np.log(tau / sigma2))
    return -(KAPPA * log_likelihood - kl)


class Sigmas(TrainerCallback):
    """Those of the last thousand steps: in closed form sigma follows the noise of its steps."""

    def __init__(self):
        self.values = []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step > args.max_steps - 1000:
            self.values.append(self.trainer.posterior.sigma.item())


@pytest.mark.parametrize(("sigma_update", "init_sigma"), [("optimizer", 0.1), ("closed-form", 1e-3)])
def test_the_optimum_is_reached(problem, make_trainer, sigma_update, init_sigma):
    start = np.concatenate([problem["start"].ravel(), np.zeros(SIZE_B), [np.log(0.1)]])
    best = minimize(minus_j, start, args=(problem,), method="BFGS", options={"gtol": 1e-8})
    w, sigma = best.x[:SIZE_W].reshape(2, -1), np.exp(best.x[-1])
    lambda_ = sigma**2 + ((w - problem["start"]) ** 2).mean()
    assert np.abs(w - problem["start"]).max() > 0.3  # not the prior

    data = [{"features": x, "labels": y} for x, y in zip(problem["x"], problem["y"].tolist(), strict=True)]
    sigmas = Sigmas()
    trainer = make_trainer(
        model=Softmax(problem["start"]),
        train_dataset=data,
        trainer={"callbacks": [sigmas]},
        head_names=["linear.bias"],
        kappa=KAPPA,
        sigma_update=sigma_update,
        grouping="all",
        init_sigma=init_sigma,
        max_steps=3000,
        learning_rate=0.02,
        max_grad_norm=0,
        per_device_train_batch_size=NUM_EXAMPLES,
        logging_strategy="no",
    )
    sigmas.trainer = trainer
    trainer.train()
    learned = trainer.model.linear.weight.detach().numpy()
    posterior = trainer.posterior
    bias = trainer.model.linear.bias.detach().numpy()
    log_sigma = np.log(sigmas.values).mean()
    theta = np.concatenate([learned.ravel(), bias, [log_sigma]])
    assert 0 <= minus_j(theta, problem) - best.fun < 0.005  # J itself is about -33
    np.testing.assert_allclose(learned, w, atol=0.03)
    assert math.exp(log_sigma) == pytest.approx(sigma, rel=0.03)
    assert posterior.lambda_.item() == pytest.approx(lambda_, rel=0.03 if sigma_update == "optimizer" else 0.2)

    theta[-1] = np.log(posterior.sigma.item())
    estimate = trainer.de_elbo(num_samples=300)
    error = KAPPA * NUM_EXAMPLES * estimate.nll_standard_error
    assert estimate.value == pytest.approx(-minus_j(theta, problem), abs=4 * error)
