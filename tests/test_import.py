"""What `import hf_deelbo` loads, and what it takes from `Trainer`."""

import json
import subprocess
import sys

import pytest
from transformers import Trainer

from hf_deelbo import DEELBoTrainer

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
