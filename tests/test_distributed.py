"""The same posterior, or MAP estimate, on one process or many, with or without accumulation."""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("distributed_run.py")


def run(path: Path, method: str, processes: int, accumulation: int = 1) -> list[dict[str, torch.Tensor]]:
    """What each process learned."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, SCRIPT, path, method, str(accumulation)], check=True, env=environment, timeout=300)
    return [load_file(f"{path}.{rank}.safetensors") for rank in range(processes)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[str], dict[str, torch.Tensor]]:
    @cache
    def learned(method: str) -> dict[str, torch.Tensor]:
        return run(tmp_path_factory.mktemp("alone") / "run", method, processes=1)[0]

    return learned


@pytest.mark.parametrize(("method", "processes", "accumulation"), [("deelbo", 2, 1), ("deelbo", 2, 3), ("map", 2, 3)])
def test_several_processes_learn_what_one_learns(alone, tmp_path, method, processes, accumulation):
    ranks = run(tmp_path / "run", method, processes, accumulation)
    alone = alone(method)
    assert ranks[0].pop("num_processes") == processes
    for name, tensor in ranks[0].items():
        tolerance = {"rtol": 0, "atol": 1e-6} if name.startswith("w.") else {"rtol": 1e-6, "atol": 0}
        torch.testing.assert_close(tensor, alone[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")
    for other in ranks[1:]:
        for name, tensor in ranks[0].items():
            assert torch.equal(tensor, other[name]) or name.startswith("logged"), name
