"""When things happen during training: sigma, lambda and tau are set before each step."""

from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.utils import logging

from .groups import table_lines
from .objective import kl_annealing, sigma_growth

logger = logging.get_logger(__name__)

# whether training stood still is judged by the mean NLL of so many steps, the first and the last ones
STEPS_TO_COMPARE = 10


class PriorVarianceCallback(TrainerCallback):
    """Sets sigma, lambda and tau to their optimum before each optimiser step, and when training ends.

    Says so if at the end the prior holds the weights where they were. `DEELBoTrainer` adds it by itself.

    Args:
        trainer: the `DEELBoTrainer` whose posterior to update.
    """

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A new training."""
        self.trainer.begin_training()
        self._examples_of_a_step = examples_of_a_step(args)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """sigma*, lambda* and tau* at the w_bar that the step starts from."""
        posterior = self.trainer.posterior
        epochs = (state.global_step + 1) * self._examples_of_a_step / posterior.num_examples
        posterior.kl_annealing = kl_annealing(epochs, args.kl_warmup_epochs)
        posterior.update_variances(sigma_growth(state.global_step / state.max_steps))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """sigma*, lambda* and tau* at what was learned, or at the best checkpoint, which `Trainer` has just loaded."""
        posterior = self.trainer.posterior
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self.trainer.load_weights(state.best_model_checkpoint)
        posterior.kl_annealing = 1.0
        posterior.update_variances(growth=0.0)
        if self.trainer.is_world_process_zero():
            logger.info("\n".join(["What was learned:", *table_lines(posterior.group_table())]))
            if state.global_step >= state.max_steps:  # not where it was stopped early
                self._warn_if_the_prior_holds(args)

    def _warn_if_the_prior_holds(self, args: TrainingArguments) -> None:
        ends = self.trainer.training_nll.first_and_last()
        if ends is None:
            return
        posterior, (first, last) = self.trainer.posterior, ends
        sigma, lambda_ = float(posterior.sigma), float(posterior.lambda_)
        if last < 0.97 * first or lambda_ > 1.1 * sigma**2:
            return
        if args.sigma_update == "optimizer":
            advice = 'set sigma_update="closed-form", or start sigma higher (init_sigma=1e-2) and use SGD at 0.1'
        elif args.kappa != "auto":
            advice = 'leave kappa at "auto", which is D/N'
        else:
            advice = f"train longer, or with a larger learning_rate than {args.learning_rate}"
        logger.warning(
            f"The prior holds the weights: the NLL of training stood still ({first:.4g}, at the end {last:.4g}), and "
            f"lambda={lambda_:.3g} is no more than sigma^2, with kappa={posterior.kappa:.4g} and sigma={sigma:.3g}. "
            f"To let them learn, {advice}."
        )


def examples_of_a_step(args: TrainingArguments) -> int:
    """How many an optimiser step takes, over all processes."""
    return args.train_batch_size * args.gradient_accumulation_steps * args.world_size


class TrainingNLL:
    """The NLL of training: for the logs, and to see whether it stood still. Nothing is read from the device before.

    Args:
        device: where the losses are.
    """

    def __init__(self, device: torch.device):
        self._sum = torch.zeros((), device=device)
        self.restart()

    def restart(self) -> None:
        """A new training."""
        self._sum, self._steps = torch.zeros_like(self._sum), 0
        self._ends: list[torch.Tensor] = []

    def add(self, nll: torch.Tensor, num_batches: int, ends_step: bool) -> None:
        """Take in a batch, of the `num_batches` of its step."""
        self._sum += nll / num_batches
        if ends_step:
            self._steps += 1
            self._ends.append(nll)
            if len(self._ends) > 2 * STEPS_TO_COMPARE:
                del self._ends[STEPS_TO_COMPARE]

    def take(self) -> torch.Tensor:
        """The mean over the steps since it was last asked for."""
        mean = self._sum / max(1, self._steps)
        self._sum, self._steps = torch.zeros_like(self._sum), 0
        return mean

    def first_and_last(self) -> tuple[float, float] | None:
        """The means of the first and of the last steps; `None` if there were not enough."""
        if len(self._ends) < 2 * STEPS_TO_COMPARE:
            return None
        first, last = self._ends[:STEPS_TO_COMPARE], self._ends[STEPS_TO_COMPARE:]
        return float(torch.stack(first).mean()), float(torch.stack(last).mean())
