"""What is generated is up to date, and names what is there."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["ops_table", "options_table", "parity_table"])
def test_the_tables_are_those_of_the_code(script):
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, ROOT / "scripts" / script, "--check"])
    assert done.returncode == 0, f"run scripts/{script}"


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
