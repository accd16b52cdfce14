"""The README's code runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_code_runs(tmp_path, monkeypatch, loopback_hub):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", loopback_hub.add_user("user"))
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert float(namespace["posterior"].lambda_) > 0
    assert loopback_hub.commits("user/repo")
    assert loopback_hub.commits("user/prior")
