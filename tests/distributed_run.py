"""Train a tiny model and write what was learned; `test_distributed` starts it on one process and on several."""

import sys
from typing import Any

import torch
from conftest import make_dataset, make_model
from safetensors.torch import save_file

from hf_deelbo import DEELBoConfig, DEELBoTrainer
from hf_deelbo.baselines import MAPConfig, MAPTrainer

GLOBAL_BATCH = 12
EVAL_SET = make_dataset("vit", 7)  # no number of processes divides 7


def learn_by_deelbo(arguments: dict[str, Any]) -> tuple[DEELBoTrainer, dict[str, float]]:
    args = DEELBoConfig(**arguments, init_sigma=0.05)
    trainer = trained(DEELBoTrainer, args)
    elbo, posterior = trainer.de_elbo(EVAL_SET, num_samples=3), trainer.posterior
    learned = {name: posterior.state_dict()[name].item() for name in ("rho", "lambda_", "tau")}
    return trainer, {"nll": elbo.nll, "de_elbo": elbo.value, **learned}


def learn_by_map(arguments: dict[str, Any]) -> tuple[MAPTrainer, dict[str, float]]:
    args = MAPConfig(**arguments, prior="l2-zero", alpha_over_n=0.1, beta_over_n=0.2, max_grad_norm=0.5)
    trainer = trained(MAPTrainer, args)
    backbone, head = trainer.penalty()
    return trainer, {"penalty_backbone": backbone.item(), "penalty_head": head.item()}


def trained(trainer_class: type, args: DEELBoConfig | MAPConfig) -> DEELBoTrainer | MAPTrainer:
    args.per_device_train_batch_size = GLOBAL_BATCH // (args.world_size * args.gradient_accumulation_steps)
    # one batch of all the data a step, so that the order of the examples does not matter
    trainer = trainer_class(make_model("vit"), args, train_dataset=make_dataset("vit", GLOBAL_BATCH))
    trainer.train()
    return trainer


def main(path: str, method: str, accumulation: int) -> None:
    arguments = {
        "output_dir": f"{path}.outputs",
        "max_steps": 6,
        "learning_rate": 0.1,
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "ddp_backend": "gloo",
    }
    trainer, learned = {"deelbo": learn_by_deelbo, "map": learn_by_map}[method](arguments)
    line = next(line for line in reversed(trainer.state.log_history) if "nll" in line)
    learned |= {"logged_nll": line["nll"], "logged_loss": line["loss"]}
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in learned.items()}
    tensors["num_processes"] = torch.tensor(trainer.args.world_size)
    tensors |= {f"w.{name}": p.detach().clone() for name, p in trainer.model.named_parameters()}
    save_file(tensors, f"{path}.{trainer.args.process_index}.safetensors")
    trainer.end()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
