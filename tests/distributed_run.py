"""Train a tiny model and write what was learned; `test_distributed` starts it on one process and on several."""

import sys

import torch
from conftest import make_dataset, make_model
from safetensors.torch import save_file

from hf_deelbo import DEELBoConfig, DEELBoTrainer

GLOBAL_BATCH = 12


def main(path: str, accumulation: int) -> None:
    args = DEELBoConfig(
        f"{path}.outputs",
        max_steps=6,
        learning_rate=0.1,
        init_sigma=0.05,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        ddp_backend="gloo",
    )
    args.per_device_train_batch_size = GLOBAL_BATCH // (args.world_size * accumulation)
    # one batch of all the data a step, so that the order of the examples does not matter
    trainer = DEELBoTrainer(make_model("vit"), args, train_dataset=make_dataset("vit", GLOBAL_BATCH))
    trainer.train()
    elbo = trainer.de_elbo(make_dataset("vit", 7), num_samples=3)  # 7 examples: no number of processes divides them
    line = next(line for line in reversed(trainer.state.log_history) if "nll" in line)
    learned = {"nll": elbo.nll, "de_elbo": elbo.value, "logged_nll": line["nll"], "logged_loss": line["loss"]}
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in learned.items()}
    tensors["num_processes"] = torch.tensor(args.world_size)
    tensors |= {name: trainer.posterior.state_dict()[name].clone() for name in ("rho", "lambda_", "tau")}
    tensors |= {f"w.{name}": p.detach().clone() for name, p in trainer.model.named_parameters()}
    save_file(tensors, f"{path}.{args.process_index}.safetensors")
    trainer.end()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
