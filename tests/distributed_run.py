"""Train a tiny model and write what was learned; `test_distributed` starts it on one process and on several.

Usage: distributed_run.py FOLDER METHOD/DTYPE/ACCUMULATION ...

The method `deelbo` learns one sigma by the optimiser, `layers` one for each layer in closed form. `sharded-PRIOR` is
`deelbo`, and `sharded-layers` is `layers`, with the rows of the model over the processes (FSDP2).
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from conftest import low_rank_prior, make_dataset, make_model
from lab.map import MAPConfig, MAPTrainer
from safetensors.torch import save_file
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)
from transformers.distributed import DistributedConfig

from hf_deelbo import DEELBoConfig, DEELBoTrainer, GaussianPosterior
from hf_deelbo.priors import GaussianPrior
from hf_deelbo.weights.blocks import local
from hf_deelbo.weights.shards import reshard, whole

BY_OPTIMIZER = {"init_sigma": 0.05}
BY_LAYER = {"init_sigma": 0.05, "sigma_update": "closed-form", "grouping": "layer"}
GLOBAL_BATCH = 24  # what 2 and 3 processes with accumulation 1, 2 and 4 divide
EVAL_SIZE = 7  # no number of processes divides it


def learn_by_deelbo(
    arguments: dict[str, Any], dtype: torch.dtype, sigma: dict[str, Any]
) -> tuple[DEELBoTrainer, dict[str, Any]]:
    args = DEELBoConfig.paper(**arguments, **sigma)
    trainer = trained(DEELBoTrainer, args, dtype)
    return trainer, what_deelbo_learned(trainer)


def what_deelbo_learned(trainer: DEELBoTrainer) -> dict[str, Any]:
    elbo, posterior = trainer.de_elbo(trainer.eval_dataset, num_samples=3), trainer.posterior
    learned = {"prior_variances": posterior.prior_variances.tolist(), "sigmas": posterior.sigmas.tolist()}
    learned |= {"nll": elbo.nll, "de_elbo": elbo.value}
    trainer.args.num_eval_samples = 2
    learned |= trainer.evaluate(metric_key_prefix="average")
    trainer.args.num_eval_samples = 0
    learned["temperatures"] = list(trainer.calibrate(trainer.eval_dataset, num_samples=2))
    learned |= trainer.evaluate(metric_key_prefix="calibrated")
    return learned


def learn_by_map(arguments: dict[str, Any], dtype: torch.dtype) -> tuple[MAPTrainer, dict[str, float]]:
    args = MAPConfig.paper(**arguments, prior="l2-zero", alpha_over_n=0.1, beta_over_n=0.2, max_grad_norm=0.5)
    trainer = trained(MAPTrainer, args, dtype)
    backbone, head = trainer.penalty()
    return trainer, {"penalty_backbone": backbone.item(), "penalty_head": head.item()}


def learn_sharded(
    arguments: dict[str, Any], dtype: torch.dtype, prior: str, sigma: dict[str, Any]
) -> tuple[DEELBoTrainer, dict[str, Any]]:
    """Beside what `learn_by_deelbo` tells: what was saved, as one process loads it."""
    args = DEELBoConfig.paper(**arguments | {"save_strategy": "no"}, **sigma, prior=prior)
    given = low_rank_prior(make_model("vit").to(dtype)) if prior == "ptyl" else None
    trainer = trained(DEELBoTrainer, args, dtype, model=load_sharded(args, dtype), prior=given)
    learned = what_deelbo_learned(trainer)
    folder = Path(args.output_dir).parent / "posterior"
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    saved = GaussianPosterior.from_pretrained(folder)
    batch = default_data_collator(trainer.eval_dataset)
    learned["saved_average"] = saved.predict_proba({"pixel_values": batch["pixel_values"]}, 3)[:, 0].sum().item()
    return trainer, learned


def load_sharded(args: DEELBoConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `make_model`, its rows over all processes."""
    folder = Path(args.output_dir).parent / "pretrained"
    with args.main_process_first():
        if args.process_index == 0:
            make_model("vit").to(dtype).save_pretrained(folder)
    config = ViTConfig.from_pretrained(folder)
    config.base_model_fsdp_plan = {"layers.*": "free_full_weight"}
    distributed = DistributedConfig(fsdp_size=args.world_size)
    return ViTForImageClassification.from_pretrained(
        folder, config=config, dtype=dtype, distributed_config=distributed
    )


def trained(
    trainer_class: type,
    args: DEELBoConfig | MAPConfig,
    dtype: torch.dtype,
    model: PreTrainedModel | None = None,
    prior: GaussianPrior | None = None,
) -> DEELBoTrainer | MAPTrainer:
    args.per_device_train_batch_size = GLOBAL_BATCH // (args.world_size * args.gradient_accumulation_steps)
    # one batch of all the data a step, so that the order of the examples does not matter
    trainer = trainer_class(
        model or make_model("vit").to(dtype),
        args,
        train_dataset=dataset(GLOBAL_BATCH, dtype, seed=1),
        eval_dataset=dataset(EVAL_SIZE, dtype, seed=2),
        compute_metrics=what_was_counted,
        prior=prior,
    )
    trainer.train()
    return trainer


def dataset(size: int, dtype: torch.dtype, seed: int) -> list[dict]:
    examples = make_dataset("vit", size, seed)
    return [example | {"pixel_values": example["pixel_values"].to(dtype)} for example in examples]


def what_was_counted(prediction: EvalPrediction) -> dict[str, float]:
    """An example that is counted twice shows in each of them."""
    logits, labels = torch.from_numpy(prediction.predictions).double(), torch.from_numpy(prediction.label_ids)
    nll = torch.nn.functional.cross_entropy(logits, labels).item()
    return {"num_examples": len(labels), "squared_logits": logits.square().sum().item(), "nll": nll}


def learn(folder: str | Path, setting: str) -> Path:
    """Train by a setting, METHOD/DTYPE/ACCUMULATION, and return the file of what this process learned."""
    method, dtype, accumulation = setting.split("/")
    arguments = {
        "output_dir": f"{folder}/outputs",
        "max_steps": 20,
        "learning_rate": 0.1,
        "gradient_accumulation_steps": int(accumulation),
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 20,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "ddp_backend": "gloo" if "WORLD_SIZE" in os.environ else None,
    }
    by_method = {
        "deelbo": partial(learn_by_deelbo, sigma=BY_OPTIMIZER),
        "layers": partial(learn_by_deelbo, sigma=BY_LAYER),
        "map": learn_by_map,
        "sharded-l2-sp": partial(learn_sharded, prior="l2-sp", sigma=BY_OPTIMIZER),
        "sharded-l2-zero": partial(learn_sharded, prior="l2-zero", sigma=BY_OPTIMIZER),
        "sharded-ptyl": partial(learn_sharded, prior="ptyl", sigma=BY_OPTIMIZER),
        "sharded-layers": partial(learn_sharded, prior="l2-zero", sigma=BY_LAYER),
    }[method]
    trainer, learned = by_method(arguments, getattr(torch, dtype))
    line = next(line for line in reversed(trainer.state.log_history) if "grad_norm" in line)
    learned |= {"logged_nll": line["nll"], "logged_loss": line["loss"]}
    if method != "map":  # it evaluates as `Trainer` does, whose loss counts what fills up the last batch
        learned |= trainer.evaluate()
    tensors = {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in learned.items()
        if not name.endswith(("_runtime", "_per_second", "epoch"))
    }
    tensors["num_processes"] = torch.tensor(trainer.args.world_size)
    reshard(trainer.model)
    tensors |= {f"w.{name}": whole(p.detach()).clone() for name, p in trainer.model.named_parameters()}
    tensors["num_rows_here"] = torch.tensor(len(local(trainer.model.classifier.weight.detach())))
    path = Path(folder, setting, f"{trainer.args.process_index}.safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


if __name__ == "__main__":
    for setting in sys.argv[2:]:
        learn(sys.argv[1], setting)
    torch.distributed.destroy_process_group()
