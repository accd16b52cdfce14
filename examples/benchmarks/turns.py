"""Seconds of training steps and of their parts, by methods that take turns, so that a busy machine slows all alike."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging
from workloads import WORKLOADS, Workload

from hf_deelbo import DEELBoConfig, DEELBoTrainer, GaussianPosterior, LowRankPrior
from hf_deelbo.weights.blocks import parameters_by_name
from hf_deelbo.weights.parameters import backbone_of, head_parameter_names

METHODS = ("plain", "deelbo", "ptyl")  # no prior; L2-SP; low rank
PTYL_RANK = 5
# glibc then gives back at once what is freed, but for the smallest tensors: its heap has no holes
WITHOUT_HOLES = {"MALLOC_MMAP_THRESHOLD_": "65536"}


class StepTimer(TrainerCallback):
    """Seconds from the start of each step to its end, lambda and tau's update included, and those of all threads."""

    def __init__(self):
        self.seconds, self.cpu_seconds = [], []

    def on_step_begin(self, *args, **kwargs) -> None:
        """Start the clocks."""
        self.start, self.cpu_start = time.perf_counter(), time.process_time()

    def on_step_end(self, *args, **kwargs) -> None:
        """Stop them."""
        self.seconds.append(time.perf_counter() - self.start)
        self.cpu_seconds.append(time.process_time() - self.cpu_start)

    def clear(self) -> None:
        """Forget the steps."""
        self.seconds.clear()
        self.cpu_seconds.clear()


class PhaseTimer:
    """Seconds spent in the parts of what a DE ELBo step adds."""

    def __init__(self, posterior: GaussianPosterior):
        self.seconds = defaultdict(list)
        posterior.update_variances = self._timed(posterior.update_variances, "sigma, lambda, tau and KL")
        posterior.complete_gradients = self._timed(posterior.complete_gradients, "<g, eps> and KL's gradient")
        sampled = posterior.sampled

        @contextmanager
        def timed_sampled(*key: int, **kwargs) -> Iterator[None]:
            start = time.perf_counter()
            with sampled(*key, **kwargs):
                self.seconds["draw the sample"].append(time.perf_counter() - start)
                yield

        posterior.sampled = timed_sampled

    def _timed(self, function: Callable, phase: str) -> Callable:
        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[phase].append(time.perf_counter() - start)
            return result

        return timed


def make_trainer(
    method: str,
    workload: Workload,
    batch_size: int,
    steps: int,
    folder: str,
    callbacks: Sequence[TrainerCallback] = (),
) -> Trainer:
    """A trainer of `steps` steps at a time, each on the same `batch_size` examples over all processes."""
    torch.manual_seed(0)
    model, examples = workload.make_model(), workload.examples(batch_size)
    config_class = TrainingArguments if method == "plain" else DEELBoConfig
    args = config_class(
        output_dir=folder,
        max_steps=steps,
        optim="sgd",
        optim_args="momentum=0.9,nesterov=True",
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    args.per_device_train_batch_size, rest = divmod(batch_size, args.world_size)
    if rest:
        raise ValueError(f"batch_size: {batch_size} examples cannot be shared by {args.world_size} processes.")
    options = {"train_dataset": examples, "data_collator": workload.collate, "callbacks": list(callbacks)}
    if method == "plain":
        trainer = Trainer(model, args, **options)
    else:
        prior = low_rank_prior(model) if method == "ptyl" else None
        trainer = DEELBoTrainer(model, args, **options, prior=prior)
    trainer.remove_callback(PrinterCallback)
    return trainer


def low_rank_prior(model: PreTrainedModel) -> LowRankPrior:
    """Of rank 5, around the model's weights."""
    backbone = backbone_of(model, head_parameter_names(model))
    mean = {name: w.clone() for name, w in backbone.items()}
    diagonal = {name: 1e-4 * torch.rand_like(p) for name, p in mean.items()}
    deviations = {name: 1e-2 * torch.randn(PTYL_RANK, *p.shape) for name, p in mean.items()}
    return LowRankPrior(mean, diagonal, deviations)


class Player:
    """The trainer of one method, which takes turns of some steps with those of others."""

    def __init__(self, method: str, workload: Workload, batch_size: int, steps: int):
        self.folder, self.timer = tempfile.TemporaryDirectory(), StepTimer()
        self.trainer = make_trainer(method, workload, batch_size, steps, self.folder.name, [self.timer])
        self.phases = None if method == "plain" else PhaseTimer(self.trainer.posterior)

    def turn(self) -> dict:
        """Train, and tell the median seconds of a step and of the parts of what is added to the plain one."""
        self.timer.clear()
        if self.phases:
            self.phases.seconds.clear()
        self.trainer.train()
        phases = self.phases.seconds if self.phases else {}
        return {
            "seconds": statistics.median(self.timer.seconds),
            "cpu_seconds": statistics.median(self.timer.cpu_seconds),
            "phases": {phase: statistics.median(values) for phase, values in phases.items()},
            "num_parameters": sum(p.numel() for p in self.trainer.model.parameters() if p.requires_grad),
            "world_size": self.trainer.args.world_size,
            "threads": torch.get_num_threads(),
            "peak_bytes": peak_memory(),
        }

    def close(self) -> None:
        """Remove its folder."""
        self.folder.cleanup()


def peak_memory() -> int:
    """The most resident bytes that this process had."""
    with open("/proc/self/status") as file:  # getrusage would count what this process was forked from
        peak = next(line for line in file if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024


class PlayerProcess:
    """A `Player` in a process of its own, as users run it, or in several that share the batch and the threads.

    Two trainers in one process share its heap, and what one of them leaves there decides how often the other has to
    ask the system for memory: that made a step of ResNet-50 up to 70 ms slower or faster.
    """

    def __init__(
        self,
        method: str,
        workload: Workload,
        batch_size: int,
        steps: int,
        turns: int,
        world_size: int = 1,
        environment: Mapping[str, str] | None = None,
    ):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
        command = [sys.executable, *(launcher if world_size > 1 else []), __file__, method, workload.name]
        command += map(str, (batch_size, steps, turns))
        threads = max(1, torch.get_num_threads() // world_size)
        self.method = method
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)} | (environment or {}),
        )

    def turn(self) -> dict:
        """As of `Player`."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.method}: its process ended with exit code {self.process.wait()}.")
        return json.loads(answer)

    def close(self) -> None:
        """End the process, which after its last turn waits for that."""
        self.process.stdin.close()  # if it waits for a turn, it fails now
        self.process.stdout.close()
        self.process.wait()


def play(method: str, workload: str, batch_size: str, steps: str, turns: str) -> None:
    """What a `PlayerProcess` runs: a turn for each line of its input, answered by a line of its output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    logging.set_verbosity_error()
    player = Player(method, WORKLOADS[workload], int(batch_size), int(steps))
    leads = os.environ.get("RANK", "0") == "0"
    for _ in range(int(turns)):
        if leads and not sys.stdin.readline():  # the others wait for its gradients
            sys.exit("No turn is asked for any more.")
        turn = player.turn()
        if leads:
            print(json.dumps(turn), file=answers, flush=True)
    if leads:
        sys.stdin.readline()  # to end takes a while, which would slow the last turns of the others
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def measure_steps(
    workload: Workload,
    rounds: int,
    steps: int,
    batch_size: int | None = None,
    methods: Sequence[str] = METHODS[:2],
    world_size: int = 1,
    restarts: int = 1,
) -> dict:
    """Seconds of a step of each method, and of the parts of what is added to the plain one.

    Args:
        workload: what is trained.
        rounds: turns of each method in a process of its own, after one to warm up.
        steps: of a turn.
        batch_size: over all processes; the workload's own if left out.
        methods: of `METHODS`, each compared with the one before it.
        world_size: how many processes share the batch.
        restarts: how often all that is done with new processes. Where the system and the allocator put its memory
            makes a process up to a tenth faster or slower than the same one started again.

    Returns:
        A record of JSON types. `seconds` and `cpu_seconds`, of all threads, have the median of each round, by method;
        a ratio is the median of the rounds' ratios, as the parts of a round ran one after the other.
    """
    batch_size = batch_size or workload.batch_size
    turns = []
    for _ in range(restarts):
        with ExitStack() as stack:
            setting = workload, batch_size, steps, rounds + 1, world_size
            players = {method: stack.enter_context(closing(PlayerProcess(method, *setting))) for method in methods}
            _, *later = [{method: player.turn() for method, player in players.items()} for _ in range(rounds + 1)]
        turns += later
    last = turns[-1]
    seconds, cpu_seconds = (
        {method: [turn[method][clock] for turn in turns] for method in methods} for clock in ("seconds", "cpu_seconds")
    )
    overheads = [deelbo - plain for deelbo, plain in zip(seconds["deelbo"], seconds["plain"], strict=True)]
    num_parameters = last["deelbo"]["num_parameters"]
    return {
        "model": workload.name,
        "num_parameters": num_parameters,
        "batch_size": batch_size,
        "world_size": last["plain"]["world_size"],
        "threads": last["plain"]["threads"],
        "target": workload.target if batch_size == workload.batch_size else None,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "ratios": quartiles_of_ratios(seconds),
        "cpu_ratios": quartiles_of_ratios(cpu_seconds),
        "overhead_ns_per_parameter": 1e9 * statistics.median(overheads) / num_parameters,
        "phases": {
            method: {
                phase: statistics.median(turn[method]["phases"][phase] for turn in turns)
                for phase in last[method]["phases"]
            }
            for method in methods[1:]
        },
    }


def measure_memory(workload: Workload, steps: int, methods: Sequence[str] = METHODS) -> dict[str, int]:
    """The most resident bytes of a process of each method.

    They are those of memory in use. With the holes in its heap, the peak of a process differs from that of the same
    one started again by tens of megabytes, which is more than all that a method adds to a small model.
    """
    peaks = {}
    for method in methods:
        setting = method, workload, workload.batch_size, steps, 1
        with closing(PlayerProcess(*setting, environment=WITHOUT_HOLES)) as player:
            peaks[method] = player.turn()["peak_bytes"]
    return peaks


class OneTensor(nn.Module):
    """All weights of a backbone in a single tensor, and a head of one number."""

    def __init__(self, num_parameters: int):
        super().__init__()
        self.backbone = nn.Parameter(torch.randn(num_parameters - 1))
        self.head = nn.Parameter(torch.randn(1))


def measure_posterior(workload: Workload, rounds: int) -> dict:
    """Seconds of the posterior's own work of a step, and of one `normal_` draw and one SGD update of D numbers.

    Also those of the same work over as many numbers in one tensor: what is over them is the price of many tensors.
    There is no forward or backward pass: the gradients are random numbers.
    """
    torch.manual_seed(0)
    model = workload.make_model()
    posterior = GaussianPosterior(model, head_parameter_names(model), num_examples=workload.batch_size)
    of_one_tensor = GaussianPosterior(OneTensor(posterior.num_parameters), ["head"], num_examples=workload.batch_size)
    for each in (posterior, of_one_tensor):
        for parameter in parameters_by_name(each.model).values():
            parameter.grad = torch.randn_like(parameter)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=1e-3, momentum=0.9, nesterov=True)
    noise = torch.empty(posterior.num_parameters)

    def own_work(of: GaussianPosterior) -> None:
        of.update_variances()
        with of.sampled(0):
            of.complete_gradients()

    parts = {
        "posterior": partial(own_work, posterior),
        "of one tensor": partial(own_work, of_one_tensor),
        "draw": noise.normal_,
        "sgd": optimizer.step,
    }
    seconds = {part: [] for part in parts}
    for round_ in range(rounds + 1):
        for part, function in parts.items():
            start = time.perf_counter()
            function()
            if round_ > 0:
                seconds[part].append(time.perf_counter() - start)
    reference = [draw + sgd for draw, sgd in zip(seconds["draw"], seconds["sgd"], strict=True)]
    return {"seconds": seconds, "ratio": quartiles_of_ratio(seconds["posterior"], reference)}


def quartiles_of_ratios(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of each method's seconds to those of the one before it."""
    return {
        f"{method}/{other}": quartiles_of_ratio(seconds[method], seconds[other]) for other, method in pairwise(seconds)
    }


def quartiles_of_ratio(seconds: Sequence[float], others: Sequence[float]) -> list[float]:
    """Of one method's seconds to another's, round by round; the one in the middle is the median."""
    ratios = torch.tensor(seconds, dtype=torch.float64) / torch.tensor(others, dtype=torch.float64)
    return ratios.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()


if __name__ == "__main__":
    play(*sys.argv[1:])
