"""The scripts of examples/gallery run, and end with a check of their own that they ran fused."""

import os
import re

import pytest

from kit import cached_cxx, prefork, quick
from kit.support import ROOT
from tsfuser.frontends.libtorch import embedded

GALLERY = ROOT / "examples" / "gallery"
SCRIPTS = sorted(path.stem for path in GALLERY.glob("*.py"))
#: The server is compiled without optimisation, which takes a third of the time.
QUICK = {"CXXFLAGS": "-O0", "CMAKE_BUILD_TYPE": "None"}


#: The server is built and run by frontends/test_libtorch.py, by the same script.
ONCE = [pytest.param(name, marks=pytest.mark.long if name == "cpp_server" else ()) for name in SCRIPTS]


@pytest.mark.parametrize("name", ONCE)
def test_the_script_runs_fused(name):
    if name == "cpp_server":
        try:
            embedded.libpython()
        except RuntimeError as error:
            pytest.skip(str(error))
    env = {**os.environ, **QUICK, "CXX": cached_cxx.of(quick.compiler()), "PYTHONPATH": str(ROOT)}
    done = prefork.run([GALLERY / f"{name}.py"], env=env, cwd=GALLERY, timeout=900)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_asserts_that_it_ran_fused_and_is_in_the_table(name):
    """What it counts comes from `tsfuser.stats()`, of Python or of C++."""
    last = (GALLERY / f"{name}.py").read_text().split("# %%")[-1]
    asserted = " ".join(re.findall(r"^ *assert (.*)$", last, re.M))
    assert "launches" in asserted and "fallbacks" in asserted
    assert f"]({name}.py)" in (GALLERY / "README.md").read_text()
