"""Learn an informative prior on a source task, for fine-tuning on another one, in one command.

    python examples/run_swag.py                                     # digits 0 to 4, embedded model, no network
    accelerate launch examples/run_swag.py --dataset_name cifar10 --model_name_or_path microsoft/resnet-50 \
        --num_train_epochs 30
    accelerate launch examples/run_deelbo.py --dataset_name digits --classes 5 6 7 8 9 --train_size 100 \
        --prior ptyl --prior_name_or_path outputs/run_swag/prior    # the target task

It trains with a constant learning rate and collects the weights on the way (SWAG); their Gaussian is PTYL's prior.
The options are those of `run_deelbo.py` for model and data, all of `TrainingArguments` and `MAPConfig` (a penalty,
none by default), and SWAG's own; see `--help`.
"""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lab.map import MAPConfig, MAPTrainer
from lab.tasks import (
    DataArguments,
    ModelArguments,
    ScriptRun,
    Task,
    parse_arguments,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_deelbo import LowRankPrior, SWAGCallback
from hf_deelbo.metrics import named_metrics
from hf_deelbo.sharing.cards import PriorCardData, save_card
from hf_deelbo.sharing.files import write_json
from hf_deelbo.sharing.hub import library_versions, public_name

# a learning rate that stays keeps the weights moving, which is what SWAG looks at
DEFAULTS = {"lr_scheduler_type": "constant", "logging_steps": 10, "save_total_limit": 1}
DEMO = {
    "classes": ["0", "1", "2", "3", "4"],
    "train_size": 250,
    "image_size": 48,
    "horizontal_flip": False,
    "per_device_train_batch_size": 50,
    "max_steps": 75,
    "collect_every": 5,
    "start": 0.6,
}


@dataclass
class SWAGArguments:
    """When to collect the weights, and how many deviations to keep."""

    num_deviations: int = field(default=5, metadata={"help": "K, the rank of the prior; at least 2."})
    collect_every: int | None = field(default=None, metadata={"help": "Steps between collections; default an epoch."})
    start: float = field(default=0.5, metadata={"help": "Part of the training before the first collection."})
    eps: float = field(default=0.1, metadata={"help": "What is added to the diagonal of the covariance."})
    license: str | None = field(default=None, metadata={"help": "License of what is learned, for its model card."})


def main() -> None:
    """Run."""
    arguments = parse_arguments(
        (ModelArguments, DataArguments, SWAGArguments, MAPConfig),
        sys.argv[1:],
        defaults=DEFAULTS,
        demo=DEMO,
        presets={},
        output_dir="outputs/run_swag",
    )
    run = ScriptRun(arguments)
    task, options, config, folder = run.task, run.options, run.config, run.folder
    swag = SWAGCallback(options.num_deviations, options.collect_every or "epoch", options.start, eps=options.eps)
    trainer = MAPTrainer(
        task.load_model(config.seed),
        replace(config, output_dir=str(folder / "training"), push_to_hub=False),
        callbacks=[swag],
        **task.trainer_arguments,
    )
    try:
        trainer.train(resume_from_checkpoint=_last_checkpoint(trainer))
    except KeyboardInterrupt:
        print(f"\nStopped. What was learned so far is in {folder}; the same command goes on from there.")
        sys.exit(130)
    swag.load_mean(trainer)
    metrics = named_metrics(trainer.evaluate(), "eval")
    if trainer.is_world_process_zero():
        prior, place = swag.prior(), folder / "prior"
        prior.save_pretrained(place, model=trainer.model, processing_class=task.processing_class)
        save_card(
            place,
            PriorCardData(
                task="image-classification" if task.rows.kind == "image" else "text-classification",
                base_model=run.model.model_name_or_path,
                dataset_name=task.dataset_name,
                dataset_config=run.data.dataset_config_name,
                num_classes=len(task.class_names),
                num_examples=len(task.train),
                num_test_examples=len(task.test),
                num_parameters=prior.num_parameters,
                rank=prior.rank,
                num_collections=swag.moments.num_collected,
                eps=prior.eps,
                metrics=metrics,
                training=training_settings(trainer) | {"classes": task.class_names},
                preprocessing=task.preprocessing,
                versions=library_versions(),
                license=options.license,
                repo_id=public_name(config.hub_model_id),
            ),
        )
        numbers = summary(prior, swag, metrics)
        write_json(folder / "metrics.json", numbers)
        print(table(folder, task, numbers))
        if config.push_to_hub:
            run.push("prior", commit_message="Prior learned by run_swag.py")


def training_settings(trainer: MAPTrainer) -> dict[str, Any]:
    """How it was trained, by name, for the card."""
    args = trainer.args
    return {
        "learning rate": args.learning_rate,
        "steps": trainer.state.global_step,
        "batch size": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "optimizer": f"{args.optim.value} ({args.optim_args})" if args.optim_args else args.optim.value,
        "schedule": args.lr_scheduler_type.value,
        "gradient norm clipped at": args.max_grad_norm,
        "seed": args.seed,
    }


def summary(prior: LowRankPrior, swag: SWAGCallback, metrics: dict[str, float]) -> dict[str, Any]:
    """What was learned, in plain numbers."""
    along_q = sum(float(deviation.double().square().sum()) for deviation in prior.deviations.values())
    diagonal = sum(float(part.double().sum()) for part in prior.diagonal.values())
    return {
        "num_parameters": prior.num_parameters,
        "num_deviations": prior.rank,
        "num_collections": swag.moments.num_collected,
        "eps": prior.eps,
        "variance_on_the_diagonal": diagonal / 2 / prior.num_parameters,
        "variance_of_the_deviations": along_q / (2 * prior.rank - 2) / prior.num_parameters,
        "trace_inverse": float(prior.trace_inverse),
        "log_det": float(prior.log_det),
        "test": metrics,
    }


def table(folder: Path, task: Task, numbers: dict[str, Any]) -> str:
    """What a person wants to know."""
    metrics = numbers["test"]
    return "\n".join(
        [
            "",
            f"A prior over {numbers['num_parameters']:,} backbone weights, from {len(task.train)} examples of "
            f"{len(task.class_names)} classes:",
            "",
            f"  collections of the weights        {numbers['num_collections']}, the last {numbers['num_deviations']} "
            "kept as deviations",
            f"  mean variance of a weight         {numbers['variance_on_the_diagonal']:.2e} on the diagonal "
            f"(S_diag/2), {numbers['variance_of_the_deviations']:.2e} along the deviations, and eps = "
            f"{numbers['eps']:g}",
            f"  the SWAG mean on the source test  accuracy {metrics['accuracy']:.1%}, NLL {metrics['nll']:.3f}",
            "",
            "Fine-tune with it: accelerate launch examples/run_deelbo.py --prior ptyl --prior_name_or_path "
            f"{folder / 'prior'} --dataset_name ...",
            f"Written to {folder}: prior/ (prior, mean and card), metrics.json, run_config.json.",
        ]
    )


def _last_checkpoint(trainer: MAPTrainer) -> str | None:
    folder = Path(trainer.args.output_dir)
    return get_last_checkpoint(str(folder)) if folder.is_dir() else None


if __name__ == "__main__":
    main()
