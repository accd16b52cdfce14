"""The same posterior, or MAP estimate, on one process or many, with or without accumulation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from conftest import NUM_LABELS, TRAINER_KNOWS_SHARDS
from distributed_run import EVAL_SIZE, learn
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("distributed_run.py")
RECIPES = Path(__file__).parents[1] / "examples" / "accelerate_configs"
LAUNCHERS = {
    2: ["accelerate.commands.launch", "--config_file", RECIPES / "multi_cpu.yaml"],
    3: ["torch.distributed.run", "--standalone", "--nproc_per_node", "3"],
}
SHARDED = (
    *("sharded-l2-sp/float64/2", "sharded-l2-sp/float32/1", "sharded-l2-zero/float64/1", "sharded-ptyl/float64/1"),
    "sharded-layers/float64/1",
)
# float64 tells what differs from what is rounded differently; float32 is what people train in
SETTINGS = [
    *(f"{sigma}/float64/{accumulation}" for sigma in ("deelbo", "layers") for accumulation in (1, 2, 4)),
    *(SHARDED if TRAINER_KNOWS_SHARDS else ()),
    *("map/float64/2", "deelbo/float32/2"),
]
# what is not the same on each process
OF_A_PROCESS = ("num_processes", "num_rows_here")


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, dict[str, torch.Tensor]]:
    """What one process learns without accumulation, by method and dtype."""
    folder = tmp_path_factory.mktemp("alone")
    settings = {setting.rpartition("/")[0] for setting in SETTINGS}
    return {setting: load_file(learn(folder, f"{setting}/1")) for setting in settings}


def learn_together(folder: Path, num_processes: int) -> dict[str, list[dict[str, torch.Tensor]]]:
    """What each process learns, by setting; all in one start, which takes longer than the runs."""
    command = [sys.executable, "-m", *LAUNCHERS[num_processes], SCRIPT, folder, *SETTINGS]
    path = os.pathsep.join([str(RECIPES.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}, timeout=600)
    files = [f"{rank}.safetensors" for rank in range(num_processes)]
    return {setting: [load_file(folder / setting / file) for file in files] for setting in SETTINGS}


def assert_same_learned(one: dict, other: dict, setting: str) -> None:
    assert one.keys() == other.keys()
    for name in one.keys() - set(OF_A_PROCESS):
        if name.startswith("w."):
            tolerance = {"rtol": 0, "atol": 1e-6}
        elif name.startswith("logged") or "float32" in setting:
            tolerance = {"rtol": 1e-6, "atol": 0}
        else:
            tolerance = {"rtol": 1e-7, "atol": 0}
        torch.testing.assert_close(one[name], other[name], **tolerance, msg=lambda m, name=name: f"{name}: {m}")


def assert_no_example_counted_twice(learned: dict) -> None:
    """The reported loss is the mean NLL of exactly the gathered examples, whatever fills up the last batch."""
    for prefix in {name.removesuffix("_num_examples") for name in learned if name.endswith("_num_examples")}:
        assert learned[f"{prefix}_num_examples"] == EVAL_SIZE
        torch.testing.assert_close(learned[f"{prefix}_loss"], learned[f"{prefix}_nll"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes_learn_what_one_learns(alone, tmp_path, num_processes):
    for setting, ranks in learn_together(tmp_path, num_processes).items():
        assert ranks[0]["num_processes"] == num_processes
        assert_same_learned(ranks[0], alone[setting.rpartition("/")[0]], setting)
        assert_no_example_counted_twice(ranks[0])
        for other in ranks[1:]:
            for name in ranks[0].keys() - set(OF_A_PROCESS):
                assert torch.equal(ranks[0][name], other[name]) or name.startswith("logged"), name
        num_rows = [rank["num_rows_here"].item() for rank in ranks]
        assert (sum(num_rows) if setting.startswith("sharded") else max(num_rows)) == NUM_LABELS
    checkpoint = tmp_path / "outputs" / "checkpoint-20"  # of the last setting, which took the place of the others'
    files = {path.name for path in checkpoint.iterdir()}
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= files
    assert {name for name in files if "rng" in name} == {f"rng_state_{rank}.pth" for rank in range(num_processes)}
    assert not list((tmp_path / "outputs").glob(".saving*"))


@pytest.mark.parametrize("accumulation", [2, 4])
@pytest.mark.parametrize("sigma", ["deelbo", "layers"])
def test_accumulation_learns_what_a_whole_batch_learns(alone, tmp_path, sigma, accumulation):
    setting = f"{sigma}/float64/{accumulation}"
    assert_same_learned(load_file(learn(tmp_path, setting)), alone[f"{sigma}/float64"], setting)


def test_each_layer_learned_a_sigma_of_its_own(alone):
    sigmas = alone["layers/float64"]["sigmas"].tolist()
    assert len(set(sigmas)) == len(sigmas) > 3
    assert len(set(alone["deelbo/float64"]["sigmas"].tolist())) == 1


@pytest.mark.parametrize(
    ("recipe", "num_machines", "num_processes", "use_cpu"),
    [
        ("single_cpu", 1, 1, True),
        ("multi_cpu", 1, 2, True),
        ("multi_gpu", 1, 8, False),
        ("fsdp2", 1, 8, False),
        ("multi_node", 2, 16, False),
    ],
)
def test_recipes_are_what_accelerate_reads(recipe, num_machines, num_processes, use_cpu):
    config = load_config_from_file(str(RECIPES / f"{recipe}.yaml"))
    assert isinstance(config, ClusterConfig)
    assert (config.num_machines, config.num_processes, config.use_cpu) == (num_machines, num_processes, use_cpu)
    assert config.distributed_type == ("NO" if num_processes == 1 else "MULTI_GPU")


def test_every_recipe_is_tested():
    assert {path.stem for path in RECIPES.iterdir()} == {"single_cpu", "multi_cpu", "multi_gpu", "multi_node", "fsdp2"}
