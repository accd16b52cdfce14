"""The code of README and docs runs as it stands; the files that they, and CONTRIBUTING, point at are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
READMES = [*sorted(ROOT.glob("examples/*/README.md")), ROOT / "examples" / "results" / "REPORT.md"]
PAGES = [README, ROOT / "CONTRIBUTING.md", *DOCS, *READMES, ROOT / "model_cards" / "README.md"]

of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_the_code_runs(tmp_path, monkeypatch, loopback_hub):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", loopback_hub.add_user("user"))
    namespace = {}
    for page in (README, *DOCS):  # each of docs goes on from the README
        names = namespace if page == README else dict(namespace)
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
            exec(compile(block, page.name, "exec"), names)
    assert float(namespace["posterior"].lambda_) > 0
    assert loopback_hub.commits("user/repo")
    assert loopback_hub.commits("user/prior")


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 160


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@of_each_page
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
    for link in (link for link in links if not re.match(r"\w+:", link)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@of_each_page
def test_files_that_are_named_exist(page):
    text = page.read_text()
    for name in re.findall(r"(?<![\w./-])(?:docs|examples|hf_deelbo|model_cards|tests)/[\w./-]+", text):
        assert (ROOT / name.rstrip(".")).exists(), name
    for name in re.findall(r"(?<=`)[\w/]+\.(?:py|md)(?=`)", text):
        assert any(path.is_file() for path in ROOT.glob(f"[!.]*/**/{name}")) or (ROOT / name).exists(), name


def test_contributing_tells_of_every_module():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    modules = [
        path.relative_to(ROOT) for folder in ("hf_deelbo", "examples/lab") for path in ROOT.glob(f"{folder}/**/*.py")
    ]
    assert [str(path) for path in modules if path.name != "__init__.py" and f"({path.as_posix()})" not in text] == []
