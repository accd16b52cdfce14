"""A `transformers.Trainer` whose loss is the DE ELBo and which learns its own regularisation strength."""

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import nn
from torch.utils.data import Dataset, Subset
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput, HubStrategy, has_length
from transformers.utils import PushInProgress, logging

from .callbacks import PriorVarianceCallback
from .config import DEELBoConfig, check_count
from .fine_tuning import FineTuningTrainer
from .metrics import METRICS
from .objective import DEELBo
from .priors import GaussianPrior
from .sharing.cards import PosteriorCardData, save_card
from .sharing.files import finish_interrupted
from .sharing.hub import push_folder
from .sharing.models import auto_class_of
from .sharing.posterior_files import read_state, write_posterior
from .sharing.posteriors import GaussianPosterior
from .weights.batch_norm import batch_norm_layers
from .weights.parameters import head_parameter_names, in_eval_mode

logger = logging.get_logger(__name__)


class DEELBoTrainer(FineTuningTrainer):
    """Fine-tunes a classifier by the data-emphasised ELBo, in one run on all the data, with no validation set.

        loss = NLL of the batch at one weight sample + [ KL(q(w) || p(w)) + KL(q(V) || p(V)) ] / (kappa N)

    It takes the arguments of `transformers.Trainer`, and:

    Args:
        args: a `DEELBoConfig`.
        prior: the backbone's prior, over its trainable parameters by name; needed for `args.prior="ptyl"` and in
            place of the one that `args.prior` names.
        elbo_dataset: the training set without augmentation, for `de_elbo` and batch-norm statistics; default is
            `train_dataset` itself.
        compute_loss_func: a likelihood of your own: `(outputs, labels, num_items_in_batch=None)` to the *mean*
            negative log likelihood of the batch's examples.

    Attributes:
        posterior: the `GaussianPosterior`: `sigma`, `rho`, `lambda_`, `tau`, `kappa`, `num_parameters`, ...

    Example:
        ```python
        args = DEELBoConfig("outputs", max_steps=600, learning_rate=0.1)
        trainer = DEELBoTrainer(model, args, train_dataset=train, eval_dataset=test)
        trainer.train()
        trainer.posterior.lambda_, trainer.posterior.tau  # learned
        trainer.de_elbo().value  # compares runs, without a validation set
        ```
    """

    config_class = DEELBoConfig

    def __init__(
        self,
        model: nn.Module | None = None,
        args: DEELBoConfig | None = None,
        *trainer_args: Any,
        prior: GaussianPrior | None = None,
        elbo_dataset: Dataset | datasets.Dataset | None = None,
        **trainer_kwargs: Any,
    ):
        self._posterior = None
        self._evaluations: dict[str, _Evaluation] = {}
        super().__init__(model, args, *trainer_args, prior=prior, unaugmented_dataset=elbo_dataset, **trainer_kwargs)
        self.add_callback(PriorVarianceCallback(self))
        if self.train_dataset is not None:
            _ = self.posterior  # built now, so that what does not fit is said now

    def _refuse_unsupported(self) -> None:
        super()._refuse_unsupported()
        args = self.args
        if self._is_sharded() and args.push_to_hub and args.hub_strategy != HubStrategy.END:
            raise ValueError(
                'hub_strategy: must be "end" for a sharded model, which is not pushed in training; got '
                f"{args.hub_strategy.value!r}."
            )

    # ---- The posterior ---------------------------------------------------------------------------------------------

    @property
    def posterior(self) -> GaussianPosterior:
        """The posterior over the model's trainable parameters; its mean is the model itself."""
        if self._posterior is None:
            names = head_parameter_names(self.model, self.args.head_names)
            self._posterior = GaussianPosterior(
                self.model,
                names,
                self._make_prior(names),
                grouping=self.args.grouping,
                sigma_update=self.args.sigma_update,
                init_sigma=self.args.init_sigma,
                kappa=self.args.kappa,
                num_examples=self._num_train_examples(),
            )
        return self._posterior

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """A new model, and with it a new posterior."""
        self._posterior = None
        return super().call_model_init(trial)

    # ---- Training --------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimiser of `Trainer` or your own; with `sigma_update="optimizer"` rho is in its first group."""
        optimizer = super().create_optimizer(model)
        if self.args.sigma_update != "optimizer":
            return optimizer
        rho = self.posterior.rho
        if not any(parameter is rho for group in optimizer.param_groups for parameter in group["params"]):
            if self._is_sharded():  # optimisers do not take sharded and whole parameters at once
                optimizer.add_param_group(optimizer.param_groups[0] | {"params": [rho]})
            else:
                optimizer.param_groups[0]["params"].append(rho)
        return optimizer

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Forward and backward at w = w_bar + sigma * eps, then the gradients of w_bar and rho; w_bar is back after.

        eps is drawn from (seed, step): the same for all batches of a step, on every process, and after a resume. The
        later batches of a step find the sample where the first one left it.
        """
        self.posterior.forget_evaluations()
        self._evaluations.clear()
        with self.posterior.sampled(self.args.seed, self.state.global_step, reuse=True):
            loss = super().training_step(model, inputs, num_items_in_batch)
            finite = torch.isfinite(loss)
            if self.accelerator.sync_gradients:
                product = self.posterior.complete_gradients(self._loss_scale())
                if self.accelerator.scaler is None:  # with a scaler an overflow is expected, and skips the step
                    finite &= torch.isfinite(product)  # <g, eps> is as finite as g
        if not finite:  # the host waits for it here, as it would right after for `Trainer`'s own look at the loss
            values = {"lambda": self.posterior.lambda_, "tau": self.posterior.tau, "sigma": self.posterior.sigma}
            self._raise_non_finite(loss, ", ".join(f"{name}={float(value):.4g}" for name, value in values.items()))
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """In train mode the DE ELBo as a loss, NLL + KL / (kappa N); in eval mode the NLL alone.

        The NLL is the mean over the batch. The KL is that of the present lambda and tau, with as much of its weight as
        is in force (`kl_warmup_epochs`); its gradient is added in closed form by `training_step`.
        """
        nll, outputs = self._mean_nll_of_batch(model, inputs)
        if not model.training:
            return (nll, outputs) if return_outputs else nll
        posterior = self.posterior
        loss = nll + posterior.kl_weight * (posterior.kl.backbone + posterior.kl.head).to(nll.dtype)
        return (loss, outputs) if return_outputs else loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip over all parameters, with rho where the optimiser learns it."""
        rho = [self.posterior.rho] if self.args.sigma_update == "optimizer" else []
        parameters = [*model.parameters(), *rho]
        return self.accelerator.clip_grad_norm_(parameters, self.args.max_grad_norm)

    def _parts_of_loss(self, nll: float) -> dict[str, float]:
        posterior = self.posterior
        kl_backbone, kl_head = float(posterior.kl.backbone), float(posterior.kl.head)
        return {
            "kl_backbone": kl_backbone,
            "kl_head": kl_head,
            "de_elbo": DEELBo(nll, kl_backbone, kl_head, posterior.kappa, posterior.num_examples).value,
            "lambda": float(posterior.lambda_),
            "tau": float(posterior.tau),
            "sigma": float(posterior.sigma),
        }

    # ---- The DE ELBo of what was learned ---------------------------------------------------------------------------

    def de_elbo(
        self,
        dataset: Dataset | datasets.Dataset | None = None,
        num_samples: int | None = None,
        num_examples: int | None = None,
    ) -> DEELBo:
        """J at the posterior, at the optimal lambda and tau, by Monte Carlo over weight samples.

            J = kappa * N * 1/S sum_s [ mean_i log p(y_i | w_s, V_s) ] - KL(q(w) || p(w)) - KL(q(V) || p(V))

        The highest J chooses among runs, such as those of several learning rates, without a validation set.

        Args:
            dataset: where to take the mean over examples; default is the training set, without augmentation if the
                trainer was given an `elbo_dataset`.
            num_samples: S; default is `args.num_elbo_samples`.
            num_examples: take the mean over at most so many training examples, class-balanced, for a rough J.

        Returns:
            A `DEELBo`: J is its `value`.
        """
        num_samples = self.args.num_elbo_samples if num_samples is None else num_samples
        check_count("num_samples", num_samples)
        check_count("num_examples", num_examples)
        if dataset is not None and num_examples is not None:
            raise ValueError("num_examples: takes examples of the training set; give it or a `dataset`, not both.")
        is_training_set = dataset is None and num_examples is None
        if is_training_set:
            dataset = self._training_inputs()
        elif dataset is None:
            dataset = self._some_training_inputs(num_examples)
        posterior = self.posterior
        _ = posterior.kl_weight  # says so if N is not known
        posterior.update_prior_variances()
        self.recompute_batch_norm(num_samples)
        samples = self._progress(range(num_samples), "DE ELBo")
        with in_eval_mode(self.model):
            nlls = torch.tensor([self._mean_nll(dataset, seed) for seed in samples], dtype=torch.float64)
        de_elbo = DEELBo(
            nll=nlls.mean().item(),
            kl_backbone=float(posterior.kl.backbone),
            kl_head=float(posterior.kl.head),
            kappa=posterior.kappa,
            num_examples=posterior.num_examples,
            nll_standard_error=(nlls.std() / math.sqrt(num_samples)).item() if num_samples > 1 else math.nan,
        )
        if is_training_set:
            posterior.de_elbo = de_elbo
        return de_elbo

    @torch.no_grad()
    def _mean_nll(self, dataset: Any, seed: int) -> float:
        """Mean over all examples, each once: every process takes its share, without padding."""
        dataset, num_own, num_batches = self._share_of(dataset)
        totals = torch.zeros(2, dtype=torch.float64)
        with self.posterior.evaluated_at(seed):
            for inputs in self._batches(dataset, num_batches=num_batches):
                count = find_batch_size(inputs) if totals[1] < num_own else 0
                with self.accelerator.autocast():
                    nll = self.compute_loss(self.model, inputs)
                totals += torch.tensor([nll.item() * count, count], dtype=torch.float64)
        total, count = self.accelerator.reduce(totals.to(self.args.device), "sum").tolist()
        return total / count

    def _share_of(self, dataset: Any) -> tuple[Any, float, int | None]:
        """What this process evaluates, how many examples of it count, and in how many batches.

        All have the same number of batches, as a sharded model needs all of them in each forward pass. One with fewer
        examples than batches gets another one, which does not count.
        """
        world_size, rank = self.args.world_size, self.args.process_index
        if world_size == 1 or not has_length(dataset):
            return dataset, math.inf, None
        own = range(rank, len(dataset), world_size)
        num_batches = math.ceil(math.ceil(len(dataset) / world_size) / self.args.eval_batch_size)
        indices = own if len(own) >= num_batches else [*own, 0]
        return Subset(self._without_unused_columns(dataset), indices), len(own), num_batches

    def recompute_batch_norm(self, num_samples: int) -> None:
        """Give the weight samples 0 .. num_samples - 1 batch-norm statistics of their own, over training inputs.

        `de_elbo`, `evaluate` and `predict` do so by themselves; nothing is done for a model without batch norm or with
        `recompute_batch_norm=False`.
        """
        if not (self.args.recompute_batch_norm and batch_norm_layers(self.model)):
            return
        with self.accelerator.autocast():
            self.posterior.recompute_batch_norm(self._batch_norm_inputs(), num_samples)

    # ---- Evaluation ------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """`Trainer`'s loop, at the posterior mean or (`num_eval_samples`) with averaged probabilities."""
        num_samples = self.args.num_eval_samples
        if num_samples:
            self.recompute_batch_norm(num_samples)
        output = super().evaluation_loop(*args, **kwargs)
        self._evaluations["average" if num_samples else "mean"] = _Evaluation(output, num_samples)
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """NLL and logits at the posterior mean, or of the probabilities averaged over weight samples.

        In the second case the logits are log( 1/S sum_s softmax(logits_s) ), whose softmax is the average.
        """
        num_samples = self.args.num_eval_samples
        if num_samples == 0:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        log_probabilities = []
        for seed in range(num_samples):
            with self.posterior.evaluated_at(seed):
                loss, logits, labels = super().prediction_step(model, dict(inputs), False, ignore_keys)
            logits = logits[0] if isinstance(logits, (tuple, list)) else logits
            log_probabilities.append(torch.log_softmax(logits.float(), dim=-1))
        average = torch.logsumexp(torch.stack(log_probabilities), dim=0) - math.log(num_samples)
        if loss is not None:
            num_own = self._num_own_examples(inputs) or None
            loss = self._nll_of(average[:num_own], labels[:num_own])
        return (loss, None, None) if prediction_loss_only else (loss, average, labels)

    # ---- Sharing it ------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the posterior, for `GaussianPosterior.from_pretrained` and, its mean, for transformers; see `hub`."""
        if not _internal_call:
            self._prepare_to_share()
        super().save_model(output_dir, _internal_call)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save the posterior with its card to `output_dir`, and publish that as one commit of `hub_model_id`.

        Args:
            commit_message, blocking, token, revision: as for `Trainer`.
            **kwargs: for `create_model_card`.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        token = self.args.hub_token if token is None else token
        if self.hub_model_id is None:
            self.init_hf_repo(token=token)
        self._finish_current_push()
        self._prepare_to_share()
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        self.create_model_card(**kwargs)
        return self._push_output_dir(commit_message, token=token, revision=revision, run_as_future=not blocking)

    def _push_checkpoint(self, checkpoint: str) -> None:
        """A push in training: the same files as at its end, with the checkpoint if `hub_strategy` says so."""
        args = self.args
        if not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if not args.hub_always_push and self.push_in_progress is not None and not self.push_in_progress.is_done():
            return
        self._finish_current_push()  # files must not change while they are uploaded
        self.callback_handler.on_push_begin(args, self.state, self.control)
        self._prepare_to_share()
        self.save_model(_internal_call=True)
        self.create_model_card()
        checkpoint = Path(checkpoint)
        with_checkpoint = args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS)
        path_in_repo = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else checkpoint.name
        files = [path for path in checkpoint.iterdir() if path.is_file()] if with_checkpoint else []
        also = {f"{path_in_repo}/{path.name}": path for path in files}
        job = self._push_output_dir(
            f"Training in progress, step {self.state.global_step}", token=args.hub_token, also=also, run_as_future=True
        )
        self.push_in_progress = PushInProgress([job])

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        if getattr(self, "push_in_progress", None) is not None:
            for job in self.push_in_progress.jobs:
                if (error := job.exception()) is not None:
                    logger.warning(f"A push to {self.hub_model_id!r} failed and is not repeated: {error}")
            self.push_in_progress = None

    def _push_output_dir(self, commit_message: str, revision: str | None = None, **kwargs: Any) -> Any:
        revision = self.args.hub_revision if revision is None else revision
        return push_folder(
            self.args.output_dir,
            self.hub_model_id,
            commit_message=commit_message,
            private=self.args.hub_private_repo,
            revision=revision,
            **kwargs,
        )

    def _prepare_to_share(self) -> None:
        """Whoever gets the posterior has no training inputs to compute batch-norm statistics from."""
        if self.train_dataset is not None or self._unaugmented_dataset is not None:
            self.recompute_batch_norm(self.args.num_saved_samples)

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        finetuned_from: str | None = None,
        dataset: str | list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write the posterior's card, `README.md` of `output_dir`; what users wrote there is kept.

        Args:
            language, license: as the Hub spells them.
            finetuned_from: the base model, if the model does not tell it.
            dataset: what it was trained on, an id on the Hub or a name.
            **kwargs: any attribute of `model_card.PosteriorCardData`, or what `Trainer` knows and we do not.
        """
        if not self.is_world_process_zero():
            return
        if auto_class_of(self.model) is None:  # PEFT and plain modules; `from_pretrained` could not load it
            super().create_model_card(language=language, license=license, finetuned_from=finetuned_from, **kwargs)
            return
        named = {
            "language": language,
            "license": license,
            "base_model": finetuned_from,
            "dataset_name": dataset[0] if isinstance(dataset, (list, tuple)) else dataset,
        }
        known = {part.name for part in fields(PosteriorCardData)}
        given = {name: value for name, value in (kwargs | named).items() if value is not None and name in known}
        save_card(self.args.output_dir, replace(self.card_data(), **given))

    def card_data(self) -> PosteriorCardData:
        """What the model card tells, as far as the trainer knows it."""
        args = self.args
        average = self._evaluations.get("average")
        measured_on = next(iter(self._evaluations.values()), None)
        data = self.posterior.card_data()
        return replace(
            data,
            prior=args.prior if self._given_prior is None else data.prior,
            metrics={name: evaluation.metrics for name, evaluation in self._evaluations.items()},
            num_samples=average.num_samples if average else 0,
            num_test_examples=measured_on and measured_on.num_examples,
            training={"sigma starts at": args.init_sigma} | self.training_settings(),
            repo_id=self.hub_model_id,
        )

    # ---- Checkpoints -----------------------------------------------------------------------------------------------

    def load_checkpoint(self, checkpoint: str) -> None:
        """Load the weights, the posterior and the logs of a checkpoint, to use them without training on."""
        super().load_checkpoint(checkpoint)
        self.posterior.kl_annealing = 1.0
        self.posterior.update_variances(growth=0.0)  # as when training ended there

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """`Trainer`'s files and the posterior's, all of them or none; its pickled arguments are left out."""
        if not (self.args.should_save or self._is_sharded()):  # since transformers 5.23 every process comes here
            return
        with self.posterior.new_files_of(output_dir or self.args.output_dir) as new:
            super()._save(str(new), state_dict)
            (new / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            write_posterior(self.posterior, new)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        finish_interrupted(resume_from_checkpoint)
        state = read_state(resume_from_checkpoint)  # raises before the model is touched
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self.posterior.load_state_dict(state)


class _Evaluation:
    """Metrics of an evaluation, without the prefix of its dataset."""

    def __init__(self, output: EvalLoopOutput, num_samples: int):
        found = {name.partition("_")[2]: value for name, value in output.metrics.items()}
        if "loss" in found:  # it is the NLL
            found.setdefault("nll", found["loss"])
        self.metrics = {name: float(found[name]) for name in METRICS if name in found}
        self.num_samples, self.num_examples = num_samples, output.num_samples
