"""What is generated is up to date."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["ops_table", "options_table"])
def test_the_tables_are_those_of_the_code(script):
    pytest.importorskip("torch")
    assert subprocess.run([sys.executable, ROOT / "scripts" / script, "--check"]).returncode == 0, f"run scripts/{script}"
