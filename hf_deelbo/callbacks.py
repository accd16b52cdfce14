"""When things happen during training."""

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

if TYPE_CHECKING:
    from .trainer import DEELBoTrainer


class PriorVarianceCallback(TrainerCallback):
    """Sets lambda and tau to their optimum before each optimiser step, and once more when training ends.

    `DEELBoTrainer` adds it by itself.

    Args:
        trainer: whose posterior to update.
    """

    def __init__(self, trainer: "DEELBoTrainer"):
        self.trainer = trainer

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """lambda*, tau* at the w_bar and sigma that the step starts from."""
        self.trainer.posterior.update_prior_variances()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """lambda*, tau* at what was learned."""
        self.trainer.posterior.update_prior_variances()
