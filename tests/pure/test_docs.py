"""What is generated is up to date."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_ops_is_that_of_the_code():
    pytest.importorskip("torch")
    assert subprocess.run([sys.executable, ROOT / "scripts" / "ops_table", "--check"]).returncode == 0, "run scripts/ops_table"
