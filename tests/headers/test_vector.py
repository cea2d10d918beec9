"""Vectors move exactly the elements they should, whatever their width."""

import pytest
import torch

from kit import harness
from tsfuser.ir.dtypes import DTYPES

NAMES = ("bool", "int16", "float16", "float32", "float64", "complex128")
WIDTHS = (1, 2, 4, 8, 16, 32)

SOURCE = '#include "tsfuser.h"\n' + "\n".join(
    f"""struct Args_{name}_{n} {{ const {ctype}* x; {ctype}* y; int64_t begin; int64_t count; }};
KERNEL(copy_{name}_{n}, Args_{name}_{n}, 128) {{
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * {n};
  store(args.y + i, load<{n}>(args.x + i));
}}
KERNEL(partial_{name}_{n}, Args_{name}_{n}, 128) {{
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * {n};
  store_partial(args.y + i, load_partial<{n}>(args.x + i, args.count - i), args.count - i);
}}
KERNEL(wanted_{name}_{n}, Args_{name}_{n}, 128) {{
  const int64_t k = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  store(args.y + k * {n}, load<{n}>(args.x + k * {n}, k % 3 == 1));
}}"""
    for name, ctype in ((name, DTYPES[name].ctype) for name in NAMES)
    for n in WIDTHS
)


def data(name, count, mode):
    dtype = getattr(torch, name)
    x = torch.arange(count, device=harness.device(mode))
    return (x % 3 == 0) if name == "bool" else (x % 2000 - 1000).to(dtype)


@pytest.mark.each_value(("name", "n"))
@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_full_vectors(name, n, mode):
    count = 12 * 4 * n
    x = data(name, count, mode)
    y = torch.zeros_like(x)
    kernel = harness.Kernel(SOURCE, f"copy_{name}_{n}", mode)
    block = 1 if mode == "host" else 4
    kernel(x, y, 0, count, grid=48 // block, block=(block, 1))
    assert torch.equal(x, y)


@pytest.mark.each_value(("name", "n"), ("n", "missing"))
@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("missing", [0, 1, "n-1", "n", "all"])
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_partial_vectors(name, n, missing, mode):
    """Elements from `count` on are neither read (the input ends there) nor written."""
    total = 12 * n
    count = total - {"n-1": n - 1, "n": n, "all": total}.get(missing, missing)
    x = data(name, count, mode)
    y = torch.ones(total + n, dtype=x.dtype, device=x.device)
    expected = torch.cat([x, torch.ones_like(y[count:])])
    kernel = harness.Kernel(SOURCE, f"partial_{name}_{n}", mode)
    block = 1 if mode == "host" else 4
    kernel(x, y, 0, count, grid=12 // block, block=(block, 1))
    assert torch.equal(y, expected)


@pytest.mark.each_value(("name", "n"))
@pytest.mark.parametrize("mode", harness.HERE)
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_unwanted_vectors_are_zero(name, n, mode):
    x = data(name, 12 * n, mode)
    y = torch.ones_like(x)
    kernel = harness.Kernel(SOURCE, f"wanted_{name}_{n}", mode)
    block = 1 if mode == "host" else 4
    kernel(x, y, 0, 12 * n, grid=12 // block, block=(block, 1))
    wanted = (torch.arange(12, device=x.device) % 3 == 1).repeat_interleave(n)
    assert torch.equal(y, torch.where(wanted, x, torch.zeros_like(x)))


@pytest.mark.parametrize("arch", harness.ARCHS)
def test_compiles_for(arch):
    harness.compile_for(SOURCE, "copies", arch)


def test_loads_are_of_16_bytes():
    """ptxas sees one 16-byte access for 8 half-precision numbers, and four for 16 floats."""
    source = """#include "tsfuser.h"
struct Args { const half_t* x; half_t* y; const float* z; float* w; };
KERNEL(copy, Args, 128) {
  store(args.y + threadIdx.x * 8, load<8>(args.x + threadIdx.x * 8));
  store(args.w + threadIdx.x * 16, load<16>(args.z + threadIdx.x * 16));
}"""
    ptx = harness.compile_for(source, "copy", 999, quick=False).content.decode()
    assert ptx.count("ld.global.v4") + ptx.count("ld.global.nc.v4") == 5, ptx
    assert ptx.count("st.global.v4") == 5, ptx
