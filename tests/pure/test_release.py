"""What a release says of itself is the same everywhere."""

import re
import subprocess
from pathlib import Path

import pytest

from tsfuser.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def text(path):
    return (ROOT / path).read_text()


def test_one_version():
    [cited] = re.findall(r"^version: (.*)$", text("CITATION.cff"), re.M)
    latest = re.search(
        r"^## (\d+\.\d+\.\d+) \((?:20\d\d-\d\d-\d\d|not released yet)\)$", text("CHANGELOG.md"), re.M
    )
    shown = re.search(r"^tsfuser (\d+\.\d+\.\d+), in", text("docs/guide.md"), re.M)
    assert cited == latest[1] == shown[1] == __version__


def test_features_are_of_versions_that_there_were():
    """The README's column "since"."""
    released = re.findall(r"^## (\d+\.\d+)\.\d+", text("CHANGELOG.md"), re.M)
    since = re.findall(r"^\| .* \| (\d+\.\d+) \|$", text("README.md"), re.M)
    assert set(since) == set(released)


def test_one_sentence():
    """Says what the package is."""
    [sentence] = re.findall(r'^description = "(.*)"$', text("pyproject.toml"), re.M)
    assert f"**{sentence}.**" in text("README.md")
    assert f"abstract: {sentence}\n" in text("CITATION.cff")
    assert text("tsfuser/__init__.py").startswith(f'"""{sentence}.\n')
    assert f'description="{sentence}."' in text("tsfuser/__main__.py")


def test_the_project_has_no_address_but_in_pyproject():
    """Whoever publishes changes it there only."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.*"), ROOT / "setup.py"]
    assert [page.name for page in pages if "example.org" in page.read_text()] == []


def test_publishing_is_refused_while_the_address_is_a_placeholder():
    if "example.org" not in text("pyproject.toml"):
        pytest.skip("it is none any more")
    done = subprocess.run([ROOT / "scripts/release", "--publish"], capture_output=True, text=True)
    assert done.returncode == 1 and "pyproject.toml still has example.org" in done.stderr
