"""PYTORCH_NVFUSER_DUMP: the code of kernels, what NVRTC makes of it, and the bandwidth of launches."""

import re
from dataclasses import replace

import pytest
import torch

import tsfuser
from kit.support import fuse, run_python
from tsfuser import options, segment
from tsfuser.ir.call import Call, TensorArg
from tsfuser.planning import compile as pipeline
from tsfuser.planning import dumps
from tsfuser.planning import plan as plans
from tsfuser.planning.parse import parse
from tsfuser.target.function import Function

PROGRAM = """
import os
import torch
import tsfuser

os.chdir({folder!r})

def f(x):
    return torch.relu(x + 1.0)

x = torch.rand(64, 64, device={device!r})
t = torch.jit.script(f)
with tsfuser.fuser():
    for _ in range(4):
        t(x)
"""


@pytest.fixture
def dumped(target, tmp_path):
    """What a program prints with some words in PYTORCH_NVFUSER_DUMP."""

    def run(words):
        source = PROGRAM.format(folder=str(tmp_path), device="cuda" if target == "cuda" else "cpu")
        launch = "fibers" if target == "cpu-fibers" else "block"
        status, out, err = run_python(
            tmp_path, source, PYTORCH_NVFUSER_DUMP=words, TSFUSER_HOST_LAUNCH=launch
        )
        assert status == 0 and "without a meaning" not in err, err
        return out

    return run


def test_bandwidth_of_each_launch(dumped):
    found = re.findall(
        r"^fused_add_relu run in ([\d.]+) ms, achieved: ([\d.]+) GB/s$", dumped("dump_eff_bandwidth"), re.M
    )
    assert 2 <= len(found) <= 3  # of four calls, the first profiles
    for milliseconds, rate in found:  # rounded to four digits and to one
        slowest, fastest = (max(float(milliseconds) + half, 1e-9) for half in (5e-5, -5e-5))
        assert 2 * 64 * 64 * 4e-6 / slowest - 0.06 <= float(rate) <= 2 * 64 * 64 * 4e-6 / fastest + 0.06


def test_ptx_and_cubin_are_files_beside_the_source(dumped, target, tmp_path):
    out = dumped("cuda_to_file,ptx,cubin")
    assert "fused_add_relu" in (tmp_path / "__tmp_kernel1.cu").read_text()
    assert not (tmp_path / "__tmp_kernel2.cu").exists()  # one kernel, one file
    if target == "cuda":
        assert ".entry fused_add_relu" in (tmp_path / "__tmp_kernel1.ptx").read_text()
        assert (tmp_path / "__tmp_kernel1.cubin").read_bytes().startswith(b"\x7fELF")
        assert "written to __tmp_kernel1.ptx" in out and "written to __tmp_kernel1.cubin" in out
    else:
        assert (
            "there is no ptx of a kernel for CPU tensors" in out
            and "no cubin of a kernel for CPU tensors" in out
        )


def test_the_full_source_needs_no_header_of_ours(dumped):
    full = dumped("cuda_full")
    assert not re.search(r'^\s*#\s*include\s*"', full, re.M)
    assert full.count("---- types.h") == 1 and "KERNEL(fused_add_relu" in full


@pytest.fixture
def source(monkeypatch):
    """The source of a kernel for CUDA."""
    kept = {}
    made = pipeline.emit.source

    def emit(kernel, contract=True):
        kept[kernel.name] = made(kernel)
        return kept[kernel.name]

    monkeypatch.setattr(pipeline.emit, "source", emit)
    tsfuser.reset()
    with options.override(host_launch="fibers"):
        fuse(add_tanh, torch.rand(12, 5))
    return kept["fused_add_tanh"]


def add_tanh(x):
    return torch.tanh(x + 0.25)


class At90:
    """NVRTC without a device, for compute capability 9.0."""

    def __init__(self, target):
        self.target = target

    def ptx(self, source, name, device):
        return self.target.ptx_for(source, name, 90)

    def cubin(self, source, name, device):
        return self.target.compile_for(source, name, 90).content


def test_nvrtc_takes_the_full_source_and_gives_ptx_and_cubin(nvrtc, source, tmp_path, monkeypatch, capsys):
    if nvrtc is None:
        pytest.skip("there is no NVRTC here")
    monkeypatch.chdir(tmp_path)
    assert nvrtc.resources(dumps.whole(source), "fused_add_tanh", 90).registers > 0
    with options.override(dump={"ptx": "", "cubin": ""}):
        for _ in range(2):  # the second time is not shown again
            dumps.kernel("fused_add_tanh", source, "cuda:9", At90(nvrtc))
    (ptx,), (cubin,) = tmp_path.glob("__tmp_kernel*.ptx"), tmp_path.glob("__tmp_kernel*.cubin")
    assert ".target sm_90" in ptx.read_text() and ".entry fused_add_tanh" in ptx.read_text()
    assert cubin.read_bytes().startswith(b"\x7fELF")
    assert capsys.readouterr().out.count("written to") == 2


@pytest.mark.parametrize("level", [0, 3])
def test_ptxas_takes_the_level_of_optimisation(nvrtc, source, level):
    if nvrtc is None:
        pytest.skip("there is no NVRTC here")
    chosen = type(nvrtc)(nvrtc.cache, opt_level=level)
    assert f"--ptxas-options=-O{level}" in chosen._options
    assert chosen.resources(source, "fused_add_tanh", 90).registers > 0


def test_segments_arguments_and_runs_are_readable(target, tmp_path):
    source = PROGRAM.format(folder=str(tmp_path), device="cuda" if target == "cuda" else "cpu")
    launch = "fibers" if target == "cpu-fibers" else "block"
    status, out, err = run_python(
        tmp_path, source, PYTORCH_NVFUSER_DUMP="segmented_fusion,print_args",
        PYTORCH_JIT_LOG_LEVEL=">>kernel_cache:parser:manager", TSFUSER_HOST_LAUNCH=launch,
    )  # fmt: skip
    assert status == 0, err
    assert re.search(r"print_args: .*\n\nfloat32\[64, 64\] on c", out)
    [text] = re.findall(r"segmented_fusion: .*\n\n((?:.|\n)*?\n\))\n", out)
    part = segment.read(text)
    assert [op.name for op in part.ops] == ["add", "relu"] and str(part) == text
    assert re.search(r"\[kernel_cache\] planning group 0 for:\nfloat32\[64, 64\] on c", err)
    assert "[kernel_cache] planned 1 kernel in" in err and "[kernel_cache] group 0 ran: fused_add_relu" in err
    assert "[manager] group 0 gets a plan" in err and "[parser] group 0:\ngraph(" in err


@pytest.fixture
def planned():
    """The plan of a sum over the columns of x + 1, for a device that need not be there."""
    graph = torch._C.parse_ir(
        """graph(%x : Float(65536, 1024, strides=[1024, 1], requires_grad=0, device=cuda:0)):
          %one : int = prim::Constant[value=1]()
          %dims : int[] = prim::Constant[value=[0]]()
          %no : bool = prim::Constant[value=0]()
          %none : NoneType = prim::Constant()
          %y : Float(65536, 1024, strides=[1024, 1], device=cuda:0) = aten::add(%x, %one, %one)
          %z : Float(1024, strides=[1], requires_grad=0, device=cuda:0) = aten::sum(%y, %dims, %no, %none)
          return (%z)"""
    )
    call = Call((TensorArg("float32", "cuda:0", (65536, 1024), (1024, 1)),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "functions", lambda kernels, device: [Function(1, None) for _ in kernels])
        return pipeline.compile_fusion(call, parse(graph, call, "cuda:0"), "cuda:0")


def test_a_plan_is_read_back_and_verified(planned):
    assert plans.read(repr(planned)) == planned and plans.verify(planned) is None
    first, *rest = planned.launches
    wrong = replace(planned, launches=(replace(first, grid=9999), *rest))
    assert plans.read(repr(wrong)) == wrong != planned
    assert "a launch parameter is not among the values" in plans.verify(wrong)


def test_the_dump_of_a_plan_defines_each_size_once(planned):
    """The launch sizes of a sum over columns are nested formulas, of which several lines have need."""
    lines = str(planned).splitlines()
    defined = [line.partition(" = ")[0] for line in lines if " = " in line]
    assert len(defined) == len(set(defined)) > 5 and max(map(len, lines)) < 200
    for line in (line for line in lines if line.startswith(("allocate", "launch"))):
        assert not re.search(r"[*/(](?!now)|ceildiv", line), line
    assert re.search(r"^blocks = \w+ \* \w+  # now \d+$", str(planned), re.M)
    assert re.search(r"launch fused_add_sum: grid blocks \(now \d+\), block threads_x \(now", str(planned))
