"""Where tsfuser cannot be built, setup.py says so in one line, before anything else does."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tsfuser.version import __version__

ROOT = Path(__file__).resolve().parents[2]
AGAIN = "then run `pip install --no-build-isolation .`"


def set_up(folder, setuptools, **packages):
    """What setup.py ends with, beside packages that consist of these lines, without any others."""
    for name, text in {"setuptools": f"__version__ = {setuptools!r}\nsetup = None\n", **packages}.items():
        (folder / f"{name}.py").write_text(text)
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); exec(open('setup.py').read())"
    done = subprocess.run([sys.executable, "-ISc", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and done.stderr.endswith(f"{AGAIN}\n")
    return done.stderr


def test_an_old_setuptools_would_reject_the_licence(tmp_path):
    said = set_up(tmp_path, "65.5.0")
    assert "setuptools 65.5.0 is too old" in said and "pip install 'setuptools>=77,<82'" in said


@pytest.mark.parametrize(
    "folder, found",
    [("plain", "there is no torch here"), ("pip-build-env-x1/overlay", "an environment without torch")],
)
def test_no_torch(tmp_path, folder, found):
    (tmp_path / folder).mkdir(parents=True)
    said = set_up(tmp_path / folder, "80.0.0")
    assert found in said and "install torch 2.11 or later" in said


def test_an_old_torch(tmp_path):
    assert "torch 2.10.1+cpu is too old" in set_up(tmp_path, "80.0.0", torch="__version__ = '2.10.1+cpu'\n")


def test_a_torch_that_does_not_import(tmp_path):
    said = set_up(tmp_path, "80.0.0", torch="import a_library_that_is_missing\n")
    assert "torch does not import (No module named 'a_library_that_is_missing')" in said


def told(option):
    """What setup.py prints."""
    pytest.importorskip("torch")
    if int(pytest.importorskip("setuptools").__version__.split(".")[0]) < 77:
        pytest.skip("setup.py asks for a later setuptools")
    asked = [sys.executable, "setup.py", option]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_what_is_built_has_its_torch_in_the_version():
    torch = pytest.importorskip("torch")
    major, minor = torch.__version__.split(".")[:2]
    assert told("--version").strip() == f"{__version__}+torch{major}.{minor}"


def test_links_of_the_description_lead_to_the_project():
    """An index of packages has no other pages of the repository."""
    text = told("--long-description")
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 10 and all(link.startswith(("http", "#")) for link in links)
    [home] = re.findall(r'^Homepage = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert f"![The page of a GPT in training]({home}/raw/main/docs/explain.png)" in text
    assert f"[docs/ops.md]({home}/blob/main/docs/ops.md)" in text


def test_an_extension_for_another_torch_says_so():
    program = "import torch; torch.__version__ = '9.9.0'; import tsfuser"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "does not load with torch 9.9.0: it is built for torch 2." in done.stderr.splitlines()[-1]
