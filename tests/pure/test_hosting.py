"""Files for hosts name what is there."""

import re
from pathlib import Path

import pytest

from tsfuser.version import __version__

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda p: p.name)
def test_a_workflow_runs_scripts_that_are_there(path):
    named = re.findall(r"\bscripts/\w+", path.read_text())
    assert named and all((ROOT / name).is_file() for name in named)


def test_a_citation_has_the_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
