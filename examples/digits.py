"""Learn to read 200 handwritten digits with a small ResNet, once by the DE ELBo and once by the plain ELBo.

Run `python examples/digits.py`; it needs no network and takes about a minute.
"""

import torch
from sklearn.datasets import load_digits
from transformers import EvalPrediction, ResNetConfig, ResNetForImageClassification, set_seed

from hf_deelbo import DEELBoConfig, DEELBoTrainer

NUM_TRAIN = 200


def load_data() -> tuple[list[dict], list[dict]]:
    """The 1,797 digits of scikit-learn, in training and test set."""
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    examples = [{"pixel_values": x, "labels": int(y)} for x, y in zip(images, labels, strict=True)]
    return examples[:NUM_TRAIN], examples[NUM_TRAIN:]


def make_model() -> ResNetForImageClassification:
    """A ResNet of 20,346 parameters for 8x8 images."""
    config = ResNetConfig(
        num_channels=1, embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10
    )
    return ResNetForImageClassification(config)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """The share of right answers."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    """Train and compare."""
    train, test = load_data()
    rows = []
    for name, kappa in (("DE ELBo", "auto"), ("ELBo", 1)):
        set_seed(0)
        args = DEELBoConfig.paper(
            output_dir="outputs/digits",
            kappa=kappa,
            sigma_update="closed-form",
            learning_rate=0.1,
            max_steps=300,
            num_eval_samples=10,
            save_strategy="no",
            logging_steps=100,
            report_to="none",
        )
        trainer = DEELBoTrainer(make_model(), args, train_dataset=train, eval_dataset=test, compute_metrics=accuracy)
        trainer.train()
        metrics, posterior = trainer.evaluate(), trainer.posterior
        rows.append(
            f"{name:8}{posterior.kappa:8.1f}{float(posterior.lambda_):10.4f}{float(posterior.tau):10.4f}"
            f"{float(posterior.sigma):10.4f}{trainer.de_elbo().value:12.0f}"
            f"{metrics['eval_accuracy']:10.1%}{metrics['eval_loss']:8.2f}"
        )
    print(f"\n{NUM_TRAIN} training digits, {len(test)} test digits, averaged over 10 weight samples")
    print(f"{'':8}{'kappa':>8}{'lambda':>10}{'tau':>10}{'sigma':>10}{'J':>12}{'accuracy':>10}{'NLL':>8}")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
