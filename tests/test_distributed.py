"""The same posterior on one process or many, with or without accumulation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("distributed_run.py")


def run(path: Path, processes: int, accumulation: int = 1) -> list[dict[str, torch.Tensor]]:
    """What each process learned."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, SCRIPT, path, str(accumulation)], check=True, env=environment, timeout=300)
    return [load_file(f"{path}.{rank}.safetensors") for rank in range(processes)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, torch.Tensor]:
    (learned,) = run(tmp_path_factory.mktemp("alone") / "run", processes=1)
    return learned


@pytest.mark.parametrize(("processes", "accumulation"), [(2, 1), (2, 3)])
def test_several_processes_learn_what_one_learns(alone, tmp_path, processes, accumulation):
    ranks = run(tmp_path / "run", processes, accumulation)
    assert ranks[0].pop("num_processes") == processes
    for name, tensor in ranks[0].items():
        tolerance = {"rtol": 0, "atol": 1e-6} if name.startswith("w.") else {"rtol": 1e-6, "atol": 0}
        torch.testing.assert_close(tensor, alone[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")
    for other in ranks[1:]:
        for name, tensor in ranks[0].items():
            assert torch.equal(tensor, other[name]) or name.startswith("logged"), name
