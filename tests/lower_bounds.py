"""Print the lower bounds of pyproject.toml as constraints of pip, for `make test-oldest`."""

import tomllib
from pathlib import Path

project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]
for requirements in (project["dependencies"], *project["optional-dependencies"].values()):
    for requirement in requirements:
        name, is_bounded, bounds = requirement.partition(">=")
        if is_bounded:
            print(f"{name}=={bounds.partition(',')[0]}")
