"""What `import hf_deelbo` loads, what its modules import of each other, and what it overrides of `Trainer`."""

import ast
import json
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from transformers import Trainer

import hf_deelbo
from hf_deelbo import DEELBoTrainer

LIBRARY = Path(hf_deelbo.__file__).parent
HEAVY = ("timm", "torchvision", "evaluate", "matplotlib", "sklearn", "optuna", "peft", "scipy", "pandas")
PRIVATE = {"_clip_grad_norm", "_load_from_checkpoint", "_push_from_checkpoint", "_save", "_save_checkpoint"}


def loaded_by(statement: str) -> set[str]:
    """Which of the heavy packages, and of ours, a new process has loaded after it."""
    code = f"import json, sys; {statement}; print(json.dumps([name for name in sys.modules if '.' not in name]))"
    command = [sys.executable, "-c", code]
    names = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return set(names) & {*HEAVY, "hf_deelbo"}


@pytest.mark.parametrize("statement", ["import hf_deelbo", "import hf_deelbo.selection", "import hf_deelbo.cli"])
def test_nothing_heavy_is_loaded_but_what_trainer_loads(statement):
    """transformers' own `Trainer` loads torchvision, scipy and pandas where they are installed."""
    assert loaded_by(statement) - loaded_by("from transformers import Trainer") == {"hf_deelbo"}


def test_the_heavy_packages_are_seen():
    assert loaded_by("import timm, matplotlib") >= {"timm", "matplotlib"}


def test_private_methods_of_trainer_that_are_overridden():
    own = {name for name in vars(DEELBoTrainer) if name.startswith("_") and not name.startswith("__")}
    overridden = {name for name in own if hasattr(Trainer, name)}
    assert overridden == PRIVATE
    for name in PRIVATE:
        assert getattr(DEELBoTrainer, name).__doc__.startswith("Private, as "), f"{name} does not say why"


# from the bottom up: a module imports from rooms before its own, or from its own
ROOMS = (
    {"weights"},
    {"groups", "objective", "priors", "posterior"},
    {"sharing"},
    {"config", "data", "metrics", "evaluate_metrics"},
    {"callbacks", "plots", "reporting", "swag"},
    {"trainer"},
    {"selection"},
    {"cli"},
)


def imports_of_ours() -> dict[str, set[str]]:
    """Which modules of ours each module imports, wherever in it: within functions and behind conditions too."""
    modules = {".".join(path.relative_to(LIBRARY).with_suffix("").parts): path for path in LIBRARY.rglob("*.py")}
    found = {}
    for name, path in modules.items():
        found[name] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                package = name.split(".")[: -node.level]
                target = ".".join([*package, *(node.module or "").split(".")]).strip(".")
                found[name] |= {target} if target in modules else {f"{target}.{alias.name}" for alias in node.names}
    return {name: found[name] for name in modules if not name.endswith("__init__")}


def test_a_room_imports_from_those_below_it_and_nothing_goes_round():
    height = {module: level for level, room in enumerate(ROOMS) for module in room}
    graph = imports_of_ours()
    assert {name.split(".")[0] for name in graph} == set(height)
    for name, targets in graph.items():
        too_high = {target for target in targets if height[target.split(".")[0]] > height[name.split(".")[0]]}
        assert not too_high, f"{name} imports {too_high}"
    TopologicalSorter(graph).prepare()  # raises a CycleError
