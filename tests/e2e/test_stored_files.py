"""Programs whose kernels on disk are damaged, are another's, or are where they should not be: they give the
right result, fused, and live on."""

import os
import shutil

import pytest

from kit.support import run_python

SOURCE = """
import torch, tsfuser
def program(x, y):
    return (x + y).sigmoid() * x
x, y = torch.randn(16, 64), torch.randn(64)
scripted = torch.jit.script(program)
with tsfuser.fuser():
    for _ in range(4):
        out = scripted(x, y)
torch.testing.assert_close(out, program(x, y))
stats = tsfuser.stats()
print(stats["launches"] > 0, stats["kernels_compiled"], stats["disk_hits"])
"""


def run(folder, **environment):
    """What SOURCE prints, and its warnings."""
    status, out, err = run_python(folder, SOURCE, **environment)
    assert status == 0, err
    return out.split(), err


def libraries(folder):
    return sorted(folder.glob("??/*.so"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A cache that holds the kernel of SOURCE, and nothing else."""
    folder = tmp_path_factory.mktemp("made")
    assert run(folder, TSFUSER_CACHE_DIR=str(folder / "cache")) == (["True", "1", "0"], "")
    return folder / "cache"


@pytest.fixture
def filled(tmp_path, made):
    """A copy of it."""
    return shutil.copytree(made, tmp_path / "cache")


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def flip(path):
    content = bytearray(path.read_bytes())
    for place in range(0, len(content), 512):
        content[place] ^= 16
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_damaged_kernel_is_replaced(tmp_path, filled, damage):
    (library,) = libraries(filled)
    whole = library.stat().st_size
    damage(library)
    assert run(tmp_path, TSFUSER_CACHE_DIR=str(filled)) == (["True", "1", "0"], "")
    assert library.stat().st_size == whole


def test_a_whole_kernel_is_used(tmp_path, filled):
    assert run(tmp_path, TSFUSER_CACHE_DIR=str(filled)) == (["True", "0", "1"], "")


def test_kernels_in_a_directory_that_others_can_write_are_not_loaded(tmp_path, filled):
    os.chmod(filled, 0o777)
    printed, err = run(tmp_path, TSFUSER_CACHE_DIR=str(filled))
    assert printed == ["True", "1", "0"]
    assert err.count("TsfuserWarning") == 1 and "can be written by other users" in err


def test_an_empty_variable_does_not_make_the_working_directory_the_cache(tmp_path, filled, monkeypatch):
    here = tmp_path / "here"
    shutil.copytree(filled, here)
    monkeypatch.chdir(here)
    printed, err = run(here, TSFUSER_CACHE_DIR="", HOME=str(tmp_path / "home"))
    assert (printed, err) == (["True", "1", "0"], "")
    assert len(libraries(here)) == len(libraries(tmp_path / "home" / ".cache" / "tsfuser")) == 1
