"""Programs that the tests run in forked processes end, print and read as in a Python of their own."""

import os
import subprocess
import sys

import pytest

from kit import prefork

torch = pytest.importorskip("torch")

PROGRAM = """
import atexit, os, sys, inspect
def f(): return 1
print(sys.argv[1:], os.environ["WORD"], os.getcwd(), "tsfuser" in sys.modules, __name__)
print(inspect.getsource(f), "torch" in sys.modules or "not yet", file=sys.stderr)
atexit.register(print, "the end")
{last}
"""
ENDS = {
    "returns": "pass",
    "exits": "sys.exit(3)",
    "exits with a text": "sys.exit('wrong')",
    "raises": "raise ValueError('wrong')",
    "is ended": "sys.stdout.flush(); os.abort()",
}


@pytest.mark.parametrize("whole_end", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_a_program_runs_as_in_a_python_of_its_own(tmp_path, end, whole_end):
    (tmp_path / "program.py").write_text(PROGRAM.format(last=ENDS[end]))
    command, env = [tmp_path / "program.py", "a", "b"], {**os.environ, "WORD": "word"}
    own = subprocess.run([sys.executable, *command], env=env, cwd=tmp_path, capture_output=True, text=True)
    forked = prefork.run(command, env, tmp_path, whole_end=whole_end)
    assert (forked.returncode, forked.stdout) == (own.returncode, own.stdout)
    assert own.stderr.splitlines()[:1] == forked.stderr.splitlines()[:1] == ["def f(): return 1"]
    assert ("ValueError: wrong" in forked.stderr) == (end == "raises")
    assert (
        own.stderr.endswith("\nwrong\n")
        == forked.stderr.endswith("\nwrong\n")
        == (end == "exits with a text")
    )


def test_text_and_modules(tmp_path):
    (tmp_path / "module.py").write_text("import sys; print(__name__, sys.argv[1:])\n")
    assert prefork.run(["-c", "import sys; print(sys.argv)", "x"]).stdout == "['-c', 'x']\n"
    assert prefork.run(["-m", "module", "x"], cwd=tmp_path).stdout == "__main__ ['x']\n"


def test_what_is_read_at_the_start_takes_a_python_of_its_own():
    program = "import sys; print('torch' in sys.modules)"
    assert prefork.run(["-c", program]).stdout == "True\n"
    assert prefork.run(["-c", program], {**os.environ, "OMP_NUM_THREADS": "7"}).stdout == "False\n"
    ours = {"PYTORCH_JIT_ENABLE_NVFUSER": "1", "PYTORCH_JIT_LOG_LEVEL": "graph_fuser"}
    assert prefork.run(["-c", program], {**os.environ, **ours}).stdout == "True\n"


def test_a_program_that_takes_too_long_is_ended():
    with pytest.raises(subprocess.TimeoutExpired):
        prefork.run(["-c", "import time; time.sleep(600)"], timeout=0.2)
    assert prefork.run(["-c", "print(1)"]).stdout == "1\n"


def test_what_torch_compile_needs_is_there_where_a_program_names_it(tmp_path):
    program = "import sys; print('torch._dynamo' in sys.modules, 'tsfuser' in sys.modules)"
    (tmp_path / "program.py").write_text(f"{program}\n# torch.compile\n")
    assert prefork.run(["-c", program]).stdout == "False False\n"
    # On a GPU these imports ask the driver for its devices, and after that no fork can use them.
    forks = not torch.cuda.is_available()
    assert prefork.run(["program.py"], cwd=tmp_path).stdout == f"{forks} False\n"
