"""Train a tiny model and write what was learned; `test_distributed` starts it on one process and on several.

Usage: distributed_run.py FOLDER METHOD/DTYPE/ACCUMULATION ...
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from conftest import make_dataset, make_model
from safetensors.torch import save_file
from transformers import EvalPrediction

from hf_deelbo import DEELBoConfig, DEELBoTrainer
from hf_deelbo.baselines import MAPConfig, MAPTrainer

GLOBAL_BATCH = 24  # what 2 and 3 processes with accumulation 1, 2 and 4 divide
EVAL_SIZE = 7  # no number of processes divides it


def learn_by_deelbo(arguments: dict[str, Any], dtype: torch.dtype) -> tuple[DEELBoTrainer, dict[str, float]]:
    args = DEELBoConfig(**arguments, init_sigma=0.05)
    trainer = trained(DEELBoTrainer, args, dtype)
    elbo, posterior = trainer.de_elbo(trainer.eval_dataset, num_samples=3), trainer.posterior
    learned = {name: posterior.state_dict()[name].item() for name in ("lambda_", "tau")}
    learned |= {"nll": elbo.nll, "de_elbo": elbo.value, "sigma": posterior.sigma.item()}
    args.num_eval_samples = 2
    learned |= trainer.evaluate(metric_key_prefix="average")
    args.num_eval_samples = 0
    return trainer, learned


def learn_by_map(arguments: dict[str, Any], dtype: torch.dtype) -> tuple[MAPTrainer, dict[str, float]]:
    args = MAPConfig(**arguments, prior="l2-zero", alpha_over_n=0.1, beta_over_n=0.2, max_grad_norm=0.5)
    trainer = trained(MAPTrainer, args, dtype)
    backbone, head = trainer.penalty()
    return trainer, {"penalty_backbone": backbone.item(), "penalty_head": head.item()}


def trained(trainer_class: type, args: DEELBoConfig | MAPConfig, dtype: torch.dtype) -> DEELBoTrainer | MAPTrainer:
    args.per_device_train_batch_size = GLOBAL_BATCH // (args.world_size * args.gradient_accumulation_steps)
    # one batch of all the data a step, so that the order of the examples does not matter
    trainer = trainer_class(
        make_model("vit").to(dtype),
        args,
        train_dataset=dataset(GLOBAL_BATCH, dtype, seed=1),
        eval_dataset=dataset(EVAL_SIZE, dtype, seed=2),
        compute_metrics=what_was_counted,
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
    by_method = {"deelbo": learn_by_deelbo, "map": learn_by_map}[method]
    trainer, learned = by_method(arguments, getattr(torch, dtype))
    line = next(line for line in reversed(trainer.state.log_history) if "grad_norm" in line)
    learned |= {"logged_nll": line["nll"], "logged_loss": line["loss"], **trainer.evaluate()}
    tensors = {
        name: torch.tensor(value, dtype=torch.float64)
        for name, value in learned.items()
        if not name.endswith(("_runtime", "_per_second", "epoch"))
    }
    tensors["num_processes"] = torch.tensor(trainer.args.world_size)
    tensors |= {f"w.{name}": p.detach().clone() for name, p in trainer.model.named_parameters()}
    path = Path(folder, setting, f"{trainer.args.process_index}.safetensors")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path


if __name__ == "__main__":
    for setting in sys.argv[2:]:
        learn(sys.argv[1], setting)
    torch.distributed.destroy_process_group()
