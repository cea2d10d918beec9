"""`python -m tsfuser`: what a user sees of each command, and the exit status."""

import re
import shutil
import subprocess
import sys

import pytest

import tsfuser
from kit import prefork
from kit.support import ROOT, run_python
from tsfuser import options
from tsfuser.__main__ import COMMANDS
from tsfuser.__main__ import main as command
from tsfuser.commands import doctor
from tsfuser.errors import Refusal
from tsfuser.planning import compile
from tsfuser.target import driver
from tsfuser.target.disk_cache import DiskCache

pytestmark = pytest.mark.graphs

SCRIPT = """
import sys
import torch

@torch.jit.script
def block(x):
    return torch.relu(x + 1.0) * 0.5

for _ in range(4):
    block(torch.ones(8))
print("words", sys.argv[1:])
"""
ENDS = {
    "sys.exit(3)": 3,
    "sys.exit('gone')": 1,
    "sys.exit()": 0,
    "raise ValueError('oh')": 1,
    "raise KeyboardInterrupt": 130,
    "block(torch.ones(8), 1)": 1,
}


def run(tmp_path, *words, end="", **environment):
    """(status, stdout, stderr) of `python -m tsfuser words`, in a folder with old.py."""
    (tmp_path / "old.py").write_text(SCRIPT + end + "\n")
    source = (
        f"import os, runpy, sys\nos.chdir({str(tmp_path)!r})\nsys.argv = ['tsfuser', *{list(words)}]\n"
        "runpy.run_module('tsfuser', run_name='__main__')\n"
    )
    return run_python(tmp_path, source, **environment)


def test_run_switches_fusion_on_for_an_unedited_script(tmp_path):
    status, out, err = run(tmp_path, "run", "--stats", "old.py", "--stats", "-h")
    assert status == 0 and out == "words ['--stats', '-h']\n", err
    assert re.search(r"'launches': [1-9]", err) and "'fallbacks': {}" in err


@pytest.mark.parametrize("end", ENDS)
def test_run_ends_as_the_script_does(tmp_path, end):
    status, out, err = run(tmp_path, "run", "old.py", end=end)
    assert status == ENDS[end] and out.startswith("words []")
    if end.startswith("raise"):
        first, second, *_ = err.splitlines()[-5:] if "^" in err else err.splitlines()[-4:]
        assert "runpy" not in err and 'File "old.py", line 12, in <module>' in err, (first, second)


@pytest.mark.parametrize("end", ENDS)
def test_explain_reports_however_the_script_ends(tmp_path, end):
    status, out, err = run(tmp_path, "explain", "old.py", "--html", end=end)
    assert status == ENDS[end], err
    assert "words ['--html']" in out and "block: 3 ops fused in 1 group and 1 kernel" in out


@pytest.mark.parametrize("words", [("explain",), ("kernel", "--list")], ids=lambda words: words[0])
def test_that_a_script_runs_unfused_is_no_warning_at_a_line_of_ours(tmp_path, words):
    _, out, err = run(tmp_path, *words, "old.py")
    assert "TsfuserWarning" not in err
    assert ("block itself runs unfused" in out) == (words == ("explain",))


def test_explain_says_what_it_cannot_explain_and_goes_on(tmp_path):
    end = "@torch.jit.script\ndef wrong(x):\n    return x + torch.ones(3)\n\nwrong(torch.ones(4))"
    status, out, err = run(tmp_path, "explain", "old.py", end=end)
    assert status == 1 and "block: 3 ops fused" in out
    assert "wrong: not explained, since it raises RuntimeError: " in err


def test_explain_names_what_was_called_where_nothing_has_the_name(tmp_path):
    status, _, err = run(tmp_path, "explain", "--only", "other", "old.py")
    assert (
        status == 1
        and "no scripted or compiled function of the name other was called; called were: block" in err
    )


def test_a_script_has_its_folder_and_its_main(tmp_path):
    (tmp_path / "helper.py").write_text("value = 7\n")
    end = "import helper, __main__\nprint(helper.value, __name__, __main__.block is block, __file__)"
    status, out, err = run(tmp_path, "run", "old.py", end=end)
    assert status == 0 and out.endswith("7 __main__ True old.py\n"), err


def test_doctor_says_that_all_works(capsys):
    assert command(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"torch {doctor.torch.__version__}, for which the extension is built" in out
    assert "ok  kernels for CPU tensors: one was compiled and run in " in out
    assert "ok  cache: " in out and out.endswith("All that is needed works.\n")


@pytest.mark.parametrize(
    "variable, value, said",
    [
        ("CXX", "/nowhere/c++", "no  C++ compiler: '/nowhere/c++' is not a program. CXX is set to"),
        ("CXX", "true", "no  kernels for CPU tensors: true ended without an error, but wrote no library"),
        ("CXX", "false", "no  C++ compiler: `false --version` fails, which CXX names"),
        ("TSFUSER_PROGRES", "0", "no  options: TSFUSER_PROGRES is no option of tsfuser; did you mean"),
        ("PYTORCH_NVFUSER_DUMP", "cuda_kernal", "no  options: ignored: PYTORCH_NVFUSER_DUMP: unknown option"),
    ],
)
def test_doctor_says_what_does_not_work(capsys, monkeypatch, variable, value, said):
    monkeypatch.setenv(variable, value)
    absent = variable == "CXX" and doctor.torch.cuda.is_available() and "kernels" not in said
    assert command(["doctor"]) == (0 if absent else 1)
    out = capsys.readouterr().out
    assert (said.replace("no  ", "--  ") if absent else said) in out, out


@pytest.mark.parametrize(
    "error, state", [(Refusal("the driver found none"), "--"), (driver.DriverError("cuInit: unknown"), "no")]
)
def test_doctor_tells_a_gpu_that_is_not_there_from_one_that_does_not_work(monkeypatch, error, state):
    def fails(index):
        raise error

    monkeypatch.setattr(driver, "capability", fails)
    monkeypatch.setattr(doctor.torch.version, "cuda", "13.0")
    first, second = doctor._cuda()
    assert first.state == state and str(error) in first.text
    assert second.text.startswith("CuPy and NVRTC: ") and second.state in ("ok", "--")


def test_doctor_says_that_cupy_is_missing_where_there_is_a_gpu(monkeypatch):
    def fails():
        raise Refusal("CUDA tensors need CuPy: pip install it")

    monkeypatch.setattr(doctor.cuda, "supported_archs", fails)
    assert doctor._nvrtc(needed=True) == doctor.Finding("no", f"CuPy and NVRTC: {_refused(fails)}")
    assert doctor._nvrtc(needed=False).state == "--"


def _refused(call):
    with pytest.raises(Refusal) as error:
        call()
    return str(error.value)


def test_doctor_names_a_cache_that_cannot_be_used(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    with options.override(cache_dir=tmp_path / "file" / "cache"):
        assert command(["doctor"]) == 1
    assert "no  cache: cannot write to" in capsys.readouterr().out


@pytest.fixture
def kept(tmp_path):
    """A cache of three files, the second of which was used last."""
    cache = DiskCache(tmp_path / "kept")
    for k, suffix in enumerate((".so", ".cubin", ".plans")):
        cache.put(k, suffix, b"x" * 1000)
        path = max((path for path, _ in cache.files()), key=lambda path: path.stat().st_mtime_ns)
        assert path.suffix == suffix
        time = 1000 + (k * 2) % 3
        doctor.os.utime(path, (time, time))
    with options.override(cache_dir=cache.directory):
        yield cache


def test_cache_shows_what_is_kept(kept, capsys):
    assert command(["cache"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == f"{kept.directory}: 3 files, 3.1 KB of 1.0 GB"
    words = {line.partition("  1 ")[2] for line in rest}
    assert words == {"kernels for CPU tensors", "kernels for CUDA tensors", "plans and notes"}
    assert command(["cache", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(".")[2] for line in lines] == ["cubin", "plans", "so"]


def test_cache_deletes_the_longest_unused_or_all(kept, capsys):
    assert command(["cache", "limit", "2K"]) == 0
    assert "2 files deleted" in capsys.readouterr().out
    assert [path.suffix for path, _ in kept.files()] == [".cubin"]
    assert command(["cache", "clear"]) == 0
    assert capsys.readouterr().out.endswith("1 file deleted, 1.0 KB; left are 0 files, 0 bytes of 1.0 GB\n")
    assert kept.files() == []


def test_the_limit_is_an_option(kept, capsys):
    with options.override(cache_limit=1 << 11):
        assert command(["cache"]) == 0
        assert compile.cache_in.__wrapped__(kept.directory).limit == 1 << 11
    assert capsys.readouterr().out.startswith(f"{kept.directory}: 3 files, 3.1 KB of 2.0 KB\n")


def test_a_cache_that_is_not_there_is_not_made(tmp_path, capsys):
    with options.override(cache_dir=tmp_path / "none"):
        assert command(["cache"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'none'}: nothing is kept there yet\n"
    assert not (tmp_path / "none").exists()


def test_the_help_names_each_command(capsys):
    for words in (["--help"], []):
        with pytest.raises(SystemExit):
            command(words)
        out = capsys.readouterr().out
        assert all(re.search(rf"^    {name}(  |$)", out, re.M) for name in COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_their_options(shell, capsys):
    assert command(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS) and re.search("(--|-l )html", text)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)  # reads it, and runs nothing


@pytest.mark.parametrize(
    "words, expected",
    [
        (["tsfuser", "ke"], ["kernel"]),
        (["tsfuser", "explain", "--h"], ["--help", "--html"]),
        (["tsfuser", "completion", "fi"], ["fish"]),
    ],
)
def test_bash_completes(words, expected, capsys, tmp_path):
    command(["completion", "bash"])
    source = capsys.readouterr().out + (
        f"cd {tmp_path}\nCOMP_WORDS=({' '.join(words)})\nCOMP_CWORD={len(words) - 1}\n_tsfuser\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(["bash"], input=source, capture_output=True, text=True, check=True)
    assert sorted(set(done.stdout.split())) == expected


def test_what_torch_says_of_a_missing_gpu_comes_only_with_flags_for_cpp(tmp_path):
    source = "import sys\nimport tsfuser.__main__\nprint('torch.utils.cpp_extension' in sys.modules)\n"
    assert run_python(tmp_path, source)[1] == "False\n"


def test_the_version(capsys):
    with pytest.raises(SystemExit):
        command(["--version"])
    assert capsys.readouterr().out == f"tsfuser {tsfuser.__version__}\n"


def test_a_list_that_nobody_reads_to_its_end_is_no_error(tmp_path, kept):
    environment = {**doctor.os.environ, "PYTHONPATH": str(ROOT), "TSFUSER_CACHE_DIR": str(kept.directory)}
    for k in range(3, 3000):
        (kept.directory / "00").mkdir(exist_ok=True)
        (kept.directory / "00" / f"{k}.so").touch()
    source = f"{sys.executable} -m tsfuser cache list | head -1"
    done = prefork.subprocess.run(source, shell=True, env=environment, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.count("\n") == 1
