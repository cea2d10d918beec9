"""Kernels as files that run by themselves: `explain(...).kernels[0].script()`, `python -m tsfuser kernel`."""

import subprocess
import sys

import pytest
import torch

import tsfuser
from kit import quick
from kit.support import fresh
from tsfuser.__main__ import main
from tsfuser.debug import kernel_script

pytestmark = pytest.mark.graphs


@pytest.fixture(autouse=True)
def quickly(monkeypatch):
    """The scripts compile at -O0."""
    monkeypatch.setattr(kernel_script, "HostTarget", quick.QuickHost)


def norm(x, w, b, scale: float):
    y = torch.nn.functional.layer_norm(x + 1.0, (x.size(-1),), w, b) * scale
    return y, y.sum(0)


def picked(x, i):
    return x.index_select(0, i) * 2.0


def narrow(x, y):
    return torch.sigmoid(x * 0.5).to(torch.float32) + y, (y > 0).to(torch.int32) + 1


def dropped(x):
    return torch.nn.functional.dropout(x * 2.0, 0.5, True) + 1.0


def program(name, device):
    """A function, and its arguments."""
    torch.manual_seed(3)
    rand = lambda *sizes: torch.randn(sizes, device=device)
    return {
        "norm": (norm, (rand(3, 64, 40), rand(40), rand(40), 2.0)),
        "views": (narrow, (rand(33, 8).to(torch.bfloat16).t(), rand(33).expand(8, 33))),
        "lookup": (picked, (rand(5, 7), torch.tensor([4, 0, 2], device=device))),
        "dropout": (dropped, (rand(40, 8),)),
        "empty": (narrow, (rand(0, 8).to(torch.bfloat16), rand(0, 8))),
    }[name]


def run(path):
    """Without tsfuser in reach, but for programs with its own ops."""
    found = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=path.parent)
    return found.returncode, found.stdout, found.stderr


@pytest.mark.parametrize("name", ["norm", "views", "lookup"])
def test_the_last_kernel_of_a_group_gives_what_torchs_ops_give(device, tmp_path, name):
    function, operands = program(name, device)
    found = tsfuser.explain(fresh(function), *operands)
    path = tmp_path / "kernel.py"
    assert found.kernels[-1].script(path) == path.read_text()
    status, said, errors = run(path)
    assert status == 0 and "results agree: " in said, errors
    assert errors == ""
    lines = said.splitlines()
    assert [line.split()[-1] for line in lines[:-2]] == [k.name for k in found.kernels]
    assert all(float(line.split()[0]) > 0 for line in lines[:-1])


def test_a_kernel_that_computes_something_else_is_told(device, tmp_path):
    function, operands = program("norm", device)
    path = tmp_path / "kernel.py"
    text = tsfuser.explain(fresh(function), *operands).kernels[-1].script()
    assert "+ 1.0f" in text
    path.write_text(text.replace("+ 1.0f", "- 1.5f"))
    assert run(path)[0] == 0  # the mean is taken away
    wrong = text.replace("* args.n4", "+ args.n4").replace("* convert<float>(args.n4)", "+ 1.0f")
    assert wrong != text
    path.write_text(wrong)
    status, said, _ = run(path)
    assert status == 1 and "result 0 is not that of torch's ops" in said


def test_an_earlier_kernel_runs_without_those_behind_it(device, tmp_path):
    function, operands = program("norm", device)
    found = tsfuser.explain(fresh(function), *operands)
    path = tmp_path / "kernel.py"
    found.kernels[0].script(path)
    status, said, errors = run(path)
    assert status == 0 and "nothing is compared" in said and found.kernels[1].name not in said, errors


def test_random_numbers_are_not_compared(device, tmp_path):
    function, operands = program("dropout", device)
    path = tmp_path / "kernel.py"
    tsfuser.explain(fresh(function), *operands).kernels[-1].script(path)
    status, said, errors = run(path)
    assert status == 0 and "random numbers" in said, errors


SCRIPT = """
import torch

@torch.jit.script
def activated(x):
    return torch.relu(x + 1.0) * 0.5

@torch.jit.script
def normed(x):
    return torch.softmax(x * 2.0, -1)

for _ in range(2):
    activated(torch.rand(4, 4))
    normed(torch.rand(300, 300))
"""


@pytest.fixture
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(SCRIPT)
    return tmp_path


def test_the_command_writes_the_kernel_that_costs_most(inside, capsys):
    assert main(["kernel", "model.py"]) == 0
    [path] = list(inside.glob("fused_*.py"))
    assert "exp" in path.name or "softmax" in path.name
    assert f"python {path.name}" in capsys.readouterr().err
    assert run(path)[0] == 0


def test_the_command_lists_kernels_and_takes_one(inside, capsys):
    assert main(["kernel", "--list", "model.py"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "1"] and "fused_add_relu_mul" in lines[0]
    assert main(["kernel", "--number", "0", "--output", "one.py", "model.py"]) == 0
    assert "KERNEL(fused_add_relu_mul," in (inside / "one.py").read_text()
    assert main(["kernel", "--only", "normed", "--number", "1", "model.py"]) == 1
    assert "there is no kernel 1; the numbers are\n0  group 0  fused_" in capsys.readouterr().err


def test_the_command_says_why_it_writes_nothing(inside, capsys):
    assert main(["kernel", "--only", "nothing", "model.py"]) == 1
    assert "model.py called no function of the name nothing that has kernels" in capsys.readouterr().err
    assert main(["kernel", "--number", "0", "--output", "no/such/folder.py", "model.py"]) == 1
    assert "fused_add_relu_mul was not written: " in capsys.readouterr().err
