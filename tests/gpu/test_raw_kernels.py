"""`explain(...).kernels[k].raw()`: CuPy launches the kernels of a plan by themselves."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import tsfuser
from kit.support import assert_matches, fresh

cupy = pytest.importorskip("cupy")


def launched(found, *inputs, **named):
    """All kernels of a program with one group; what they store."""
    tensors = ()
    for kernel in found.kernels:
        launch = kernel.arguments(*inputs, tensors=tensors, **named)
        raw = kernel.raw()
        assert isinstance(raw, cupy.RawKernel)
        raw(launch.grid, launch.block, launch.args, shared_mem=launch.shared_mem)
        tensors = launch.tensors
    torch.cuda.synchronize()
    return tensors


def pointwise(x, y):
    return (x + y).sigmoid() * x


def softmax(x):
    return torch.softmax(x * 0.5, -1)


def sums(x):
    return (x * 0.5).sum(0)


def transposed(x, y):
    return x + y.t() * 0.5


def dropped(x, p: float):
    return torch.nn.functional.dropout(x + 1.0, p, training=True)


CASES = {
    "pointwise": (pointwise, [(16, 64), (64,)], 1),
    "a row a warp": (softmax, [(512, 100)], 1),
    "blocks that share a row": (softmax, [(4, 1 << 20)], 1),
    "two kernels": (sums, [(65536, 512)], 2),
    "a tile in shared memory": (transposed, [(256, 256), (256, 256)], 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_tensors(name, dtype):
    function, shapes, kernels = CASES[name]
    inputs = [torch.randn(s, device="cuda", dtype=dtype) for s in shapes]
    found = tsfuser.explain(fresh(function), *inputs)
    assert len(found.kernels) == kernels
    others = [torch.rand_like(x) for x in inputs]  # sums of which do not cancel
    named = dict(zip("xy", others))  # a group's inputs need not be in the program's order: `transposed`
    assert_matches(
        launched(found, **named)[0], function(*others), function(*(x.double() for x in others)), ops=8
    )


def test_cupy_arrays():
    found = tsfuser.explain(fresh(pointwise), *(torch.randn(s, device="cuda") for s in ((16, 64), (64,))))
    x, y = cupy.random.rand(16, 64, dtype="f4"), cupy.random.rand(64, dtype="f4")
    out = cupy.asarray(launched(found, x, y)[0])
    z = x + y
    cupy.testing.assert_allclose(out, x / (1 + cupy.exp(-z)), rtol=1e-5)


def test_random_numbers_are_those_that_the_next_call_draws():
    x, scripted = torch.rand(64, 64, device="cuda"), fresh(dropped)
    found = tsfuser.explain(scripted, x, 0.5)
    with tsfuser.fuser():
        for _ in range(3):
            scripted(x, 0.5)
        torch.manual_seed(7)
        mine = launched(found, x)[0]
        torch.manual_seed(7)
        assert torch.equal(mine, scripted(x, 0.5))


def test_a_kernel_keeps_its_registers_and_prints_them():
    found = tsfuser.explain(fresh(softmax), torch.rand(512, 100, device="cuda"))
    [kernel] = found.kernels
    assert kernel.registers > 0 and f"{kernel.registers} registers" in str(found.kernels)
