"""`explain(...).kernels`: the kernels of a program, and what each is launched with."""

import ctypes
import re

import pytest
import torch

import tsfuser
from kit.support import fresh
from tsfuser.planning import dumps
from tsfuser.target import cuda

pytestmark = pytest.mark.graphs


def program(x, w, b, scale: float):
    y = torch.nn.functional.layer_norm(x + 1.0, (x.size(-1),), w, b) * scale
    return y, y.sum(0)


def operands(device):
    torch.manual_seed(0)
    return [torch.rand(shape, device=device) for shape in ((3, 64, 40), (40,), (40,))]


@pytest.fixture
def found(device):
    return tsfuser.explain(fresh(program), *operands(device), 2.0)


def test_kernels_are_listed_with_what_they_are(found):
    first, second = found.kernels
    assert first.name.startswith("fused_add") and second.name.startswith("fused_sum")
    assert first.group == second.group == found.groups[0].number
    assert f"KERNEL({first.name}," in first.source
    assert first.grid == first.launch.grid > 0 and first.block == first.launch[4:6]
    assert [text.partition(":")[2].partition(" on")[0] for text in first.inputs] == [
        " float32[3, 64, 40]", " float32[40]", " float32[40]", " int 40", " float",
    ]  # fmt: skip


def test_kernels_print_as_a_table_and_one_by_one(found):
    lines = str(found.kernels).splitlines()
    first = found.kernels[0]
    assert len(lines) == 2 and repr(found.kernels) == str(found.kernels)
    size = "grid {}, block {} x {}".format(first.grid, *first.block)
    size = size if found.groups[0].device.startswith("cuda") else f"{first.grid} pieces"
    assert lines[0].split()[:4] == ["0", "group", str(first.group), first.name]
    assert size in lines[0]
    assert re.search(r"(grid|\d+ pieces?)", lines[1]).start() == lines[0].index(size)
    text = str(first)
    assert text.startswith(f"{first.name}: segment 0 of group {first.group}\n")
    assert first.source in text and "  takes x.1: float32[3, 64, 40]" in text


def unfused(x):
    return torch.sort(x, 0)[0]


def test_nothing_fused_prints_so():
    found = tsfuser.explain(fresh(unfused), torch.rand(4))
    assert found.kernels == () and str(found.kernels) == "no kernels: nothing ran fused"


def launched(kernel, *inputs, tensors=()):
    """Runs a kernel for CPU tensors by its address, with the arguments that it is said to get."""
    launch = kernel.arguments(*inputs, tensors=tensors)
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 6)(kernel.plan.function.handle)
    blocks = launch.grid[0]
    run(launch.args[0].ctypes.data, blocks, *launch.block[:2], launch.shared_mem, 0, blocks)
    return launch.tensors


@pytest.mark.parametrize("target", ["cpu", "cpu-fibers"])
def test_the_arguments_are_those_of_the_plan(found, place, target):
    """New values of the class that the kernels were made for, and another number of rows."""
    x, w, b = operands(place)
    for given, numbers, scale in (((x, w, b), (), 2.0), ((x[:2] - 0.5, b, w), (40, -3.0), -3.0)):
        tensors = ()
        for kernel in found.kernels:
            tensors = launched(kernel, *given, *numbers, tensors=tensors)
        expected = program(*(v.double() for v in given), scale)
        assert [t.shape for t in tensors[:2]] == [e.shape for e in expected]
        for have, want in zip(tensors, expected):
            torch.testing.assert_close(have.double(), want, rtol=2e-5, atol=2e-5)


def swapped(x, y):
    return x + y.t() * 0.5


@pytest.mark.parametrize("target", ["cpu"])
def test_inputs_have_names(target):
    """The group meets `y` first, so by place it would be the first input."""
    found = tsfuser.explain(fresh(swapped), torch.rand(8, 8), torch.rand(8, 8))
    (kernel,) = found.kernels
    assert [text[:2] for text in kernel.inputs] == ["y.", "x."]
    x, y = torch.rand(8, 8), torch.rand(8, 8)
    assert [id(t) for t in kernel.arguments(x=x, y=y).inputs] == [id(y), id(x)]
    for wrong in (dict(x=x), dict(x=x, z=y), dict(x=x, y=y, z=y)):
        with pytest.raises(ValueError, match="takes y.1: float32.* x.1: float32.*; given: x"):
            kernel.arguments(**wrong)
    with pytest.raises(ValueError, match="by place or by name, not some by each"):
        kernel.arguments(y, x=x)


def test_inputs_of_another_class_are_refused(found, target, device):
    x, w, b = operands(device)
    for kernel in found.kernels:
        with pytest.raises(ValueError, match="takes 5 inputs: x.1: float32"):
            kernel.arguments(x)
        with pytest.raises(ValueError, match="is not like the input x.1: float32"):
            kernel.arguments(x.double(), w, b)
        with pytest.raises(ValueError, match="the kernel was made for calls in which"):
            kernel.arguments(x.transpose(0, 1), w, b)


@pytest.mark.parametrize("target", ["cpu"])
def test_raw_of_a_kernel_for_cpu_tensors_says_why_not(found):
    with pytest.raises(ValueError, match="is a kernel for CPU tensors, which CuPy does not launch"):
        found.kernels[0].raw()


@pytest.mark.parametrize("target", ["cpu-fibers"])
def test_nvrtc_takes_the_source_as_cupy_gives_it(found, nvrtc):
    """CuPy adds options of its own; the source has no includes, so that its cache knows all of it."""
    if nvrtc is None:
        pytest.skip("there is no NVRTC here")
    options = ("-std=c++17", "--fmad=true", "-ftz=true", "--device-as-default-execution-space")
    for kernel in found.kernels:
        binary, _ = cuda._compile(dumps.whole(kernel.source), kernel.name, 90, options)
        assert binary.startswith(b"\x7fELF")
