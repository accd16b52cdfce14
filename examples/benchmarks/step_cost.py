"""What a step of `DEELBoTrainer` costs over one of the plain `Trainer`, and PTYL's prior over L2-SP: time and memory.

    python examples/benchmarks/step_cost.py
    python examples/benchmarks/step_cost.py --models resnet50 --rounds 20 --output step_cost.json

The trainers run the same model, data and optimiser in one process and take turns, a few steps at a time, so that a
busy machine slows all alike. Memory is the peak of a process of its own for each. Weights are random: neither time
nor memory depends on them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import (
    AutoModelForImageClassification,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    TimmWrapperConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from hf_deelbo import DEELBoConfig, DEELBoTrainer, GaussianPosterior, LowRankPrior
from hf_deelbo.modeling import head_parameter_names


def efficientnet_lite0() -> tuple[PreTrainedModel, dict]:
    """EfficientNet-Lite0 at 64 px, batch 100."""
    config = TimmWrapperConfig(architecture="tf_efficientnet_lite0", num_labels=10)
    return AutoModelForImageClassification.from_config(config), images(100)


def resnet50() -> tuple[PreTrainedModel, dict]:
    """ResNet-50 at 64 px, batch 32."""
    return ResNetForImageClassification(ResNetConfig(num_labels=10)), images(32)


def minilm() -> tuple[PreTrainedModel, dict]:
    """BERT of MiniLM-L6's size, batch 32 of 64 tokens."""
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, num_labels=10
    )
    tokens = torch.randint(0, config.vocab_size, (32, 64))
    return BertForSequenceClassification(config), {"input_ids": tokens, "labels": torch.randint(0, 10, (32,))}


def images(batch_size: int, size: int = 64) -> dict[str, torch.Tensor]:
    """One batch of random images."""
    pixels = torch.randn(batch_size, 3, size, size)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (batch_size,))}


# the model, and the ratio of times that the project allows itself
MODELS = {"efficientnet-lite0": (efficientnet_lite0, 1.05), "resnet50": (resnet50, 1.15), "minilm": (minilm, 1.15)}
METHODS = ("plain", "deelbo", "ptyl")  # no prior; L2-SP; low rank
PTYL_RANK = 5
PTYL_TARGET = 1.10  # over L2-SP


class StepTimer(TrainerCallback):
    """Seconds from the start of each step to its end, lambda and tau's update included."""

    def __init__(self):
        self.seconds = []

    def on_step_begin(self, *args, **kwargs) -> None:
        """Start the clock."""
        self.start = time.perf_counter()

    def on_step_end(self, *args, **kwargs) -> None:
        """Stop it."""
        self.seconds.append(time.perf_counter() - self.start)


class PhaseTimer:
    """Seconds spent in the parts of what a DE ELBo step adds."""

    def __init__(self, posterior: GaussianPosterior):
        self.seconds = defaultdict(list)
        posterior.update_prior_variances = self._timed(posterior.update_prior_variances, "lambda, tau and KL")
        posterior.complete_gradients = self._timed(posterior.complete_gradients, "<g, eps>, KL's gradient, restore")
        sampled = posterior.sampled

        @contextmanager
        def timed_sampled(*key: int, **kwargs) -> Iterator[None]:
            start = time.perf_counter()
            with sampled(*key, **kwargs):
                self.seconds["copy w_bar, draw and add the noise"].append(time.perf_counter() - start)
                yield

        posterior.sampled = timed_sampled

    def _timed(self, function: Callable, phase: str) -> Callable:
        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[phase].append(time.perf_counter() - start)
            return result

        return timed


def make_trainer(method: str, name: str, steps: int, folder: str) -> tuple[Trainer, StepTimer]:
    """A trainer of `steps` steps at a time."""
    torch.manual_seed(0)
    model, batch = MODELS[name][0]()
    examples = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    settings = {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": len(examples),
        "optim": "sgd",
        "optim_args": "momentum=0.9,nesterov=True",
        "learning_rate": 1e-3,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 1.0,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    timer = StepTimer()
    if method == "plain":
        return Trainer(model, TrainingArguments(**settings), train_dataset=examples, callbacks=[timer]), timer
    prior = low_rank_prior(model) if method == "ptyl" else None
    config = DEELBoConfig(**settings, prior="ptyl" if method == "ptyl" else "l2-sp")
    return DEELBoTrainer(model, config, train_dataset=examples, callbacks=[timer], prior=prior), timer


def low_rank_prior(model: PreTrainedModel) -> LowRankPrior:
    """Of rank 5, around the model's weights."""
    head = set(head_parameter_names(model))
    mean = {name: p.detach().clone() for name, p in model.named_parameters() if name not in head}
    diagonal = {name: 1e-4 * torch.rand_like(p) for name, p in mean.items()}
    deviations = {name: 1e-2 * torch.randn(PTYL_RANK, *p.shape) for name, p in mean.items()}
    return LowRankPrior(mean, diagonal, deviations)


def measure_time(name: str, rounds: int, steps: int) -> dict:
    """Median seconds of a step of each method, taking turns."""
    with tempfile.TemporaryDirectory() as folder:
        trainers = {method: make_trainer(method, name, steps, folder) for method in METHODS}
        phases = {method: PhaseTimer(trainers[method][0].posterior) for method in METHODS[1:]}
        for round_ in range(rounds + 1):
            for method, (trainer, timer) in trainers.items():
                trainer.train()
                if round_ == 0:  # warm up
                    timer.seconds.clear()
                    if method in phases:
                        phases[method].seconds.clear()
    medians = {method: statistics.median(timer.seconds) for method, (_, timer) in trainers.items()}
    result = {"num_parameters": trainers["deelbo"][0].posterior.num_parameters, "seconds": medians}
    for method, other in (("deelbo", "plain"), ("ptyl", "deelbo")):
        # a ratio for each round, whose parts ran one after the other
        ratios = [
            statistics.median(trainers[method][1].seconds[i : i + steps])
            / statistics.median(trainers[other][1].seconds[i : i + steps])
            for i in range(0, rounds * steps, steps)
        ]
        quartiles = statistics.quantiles(ratios, n=4)
        result[f"{method}_over_{other}"] = {
            "ratio": statistics.median(ratios),
            "quartiles": [quartiles[0], quartiles[2]],
        }
    result["phases"] = {
        method: {phase: statistics.median(values) for phase, values in timer.seconds.items()}
        for method, timer in phases.items()
    }
    return result


def measure_memory(name: str, repeats: int = 3) -> dict[str, int]:
    """Peak resident bytes of a process that takes three steps, by method; the median of several."""
    peaks = {}
    for method in METHODS:
        command = [sys.executable, __file__, "--models", name, "--peak_memory_of", method]
        outputs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(repeats)]
        peaks[method] = statistics.median(int(output.strip().splitlines()[-1]) for output in outputs)
    return peaks


def print_peak_memory(name: str, method: str) -> None:
    """In a process of its own: take three steps and print the peak."""
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(method, name, 3, folder)[0].train()
    with open("/proc/self/status") as file:  # getrusage would count what this process was forked from
        peak = next(line for line in file if line.startswith("VmHWM"))
    print(int(peak.split()[1]) * 1024)


def report(name: str, result: dict) -> str:
    """One model's lines."""
    seconds, peaks, size = result["seconds"], result["peak_bytes"], result["num_parameters"]
    extra = {
        method: (peaks[method] - peaks[other]) / (4 * size)
        for method, other in (("deelbo", "plain"), ("ptyl", "deelbo"))
    }
    lines = [
        f"{name}: D = {size:,}, {torch.get_num_threads()} threads",
        "  time    " + "   ".join(f"{method} {value:.3f} s" for method, value in seconds.items()),
        f"          DE ELBo / plain {_ratio(result['deelbo_over_plain'], MODELS[name][1])}",
        f"          PTYL / L2-SP    {_ratio(result['ptyl_over_deelbo'], PTYL_TARGET)}",
        "  memory  " + "   ".join(f"{method} {value / 2**20:.0f} MiB" for method, value in peaks.items()),
        f"          DE ELBo over plain {extra['deelbo']:.2f} x D floats, {extra['deelbo'] - 1:.2f} over L2-SP's mu "
        "(target 2)",
        f"          PTYL over L2-SP    {extra['ptyl']:.2f} x D floats, for S_diag and Q: {PTYL_RANK + 1}",
    ]
    for method, phases in result["phases"].items():
        lines += [f"    {method:8}{phase:34}{1000 * value:7.1f} ms" for phase, value in phases.items()]
    return "\n".join(lines)


def _ratio(measured: dict, target: float) -> str:
    low, high = measured["quartiles"]
    return f"{measured['ratio']:.3f} (quartiles {low:.3f}-{high:.3f}, target {target})"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=10, help="turns of each method")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn")
    parser.add_argument("--output", help="also write the figures to this JSON file")
    parser.add_argument("--peak_memory_of", choices=METHODS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    if arguments.peak_memory_of:
        print_peak_memory(arguments.models[0], arguments.peak_memory_of)
        return
    results = {}
    for name in arguments.models:
        results[name] = measure_time(name, arguments.rounds, arguments.steps)
        results[name]["peak_bytes"] = measure_memory(name)
        print(report(name, results[name]), flush=True)
    if arguments.output:
        with open(arguments.output, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
