"""What is generated is up to date, and names what is there."""

import ast
import re
from pathlib import Path

import pytest

from kit import prefork

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "script", ["ops_table", "options_table", "parity_table", "architecture_page", "tests_index"]
)
def test_what_is_generated_is_what_the_code_gives(script):
    pytest.importorskip("torch")
    done = prefork.run([ROOT / "scripts" / script, "--check"])
    assert done.returncode == 0, f"run scripts/{script}\n{done.stderr}"


def test_the_tests_that_parity_names_exist():
    from kit.parity import SECTIONS

    known, missing = {}, []
    for name in (test for section in SECTIONS.values() for row in section for test in row.tests):
        path, _, function = name.partition("::")
        if path not in known:
            tree = ast.parse((ROOT / "tests" / f"{path}.py").read_text())
            known[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if function not in known[path]:
            missing.append(name)
    assert not missing


def anchor(heading):
    """The anchor that GitHub gives a heading: `Why is this not fused?` -> `why-is-this-not-fused`."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize(
    "page", sorted(p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
)
def test_links_lead_to_files_and_headings(page):
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, heading = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M) if heading and target.is_file() else []
        if not target.exists() or (heading and heading not in map(anchor, headings)):
            broken.append(link)
    assert broken == []


def test_the_api_reference_has_every_public_name():
    tree = ast.parse((ROOT / "tsfuser" / "__init__.py").read_text())
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    ]
    public = {name.value for name in lists[0].elts} - {"__version__"}
    page = (ROOT / "docs" / "site" / "api.md").read_text()
    assert public <= set(re.findall(r"^\.\. (?:auto\w+|py:module):: tsfuser\.(\w+)$", page, re.M))


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
