"""Loops of the host call vector functions that keep the promises of host_simd.h."""

import platform
import re
import subprocess

import pytest
import torch

from kit import harness
from tsfuser.ir.dtypes import DTYPES
from tsfuser.target import host
from tsfuser.target.cxx import is_gcc
from tsfuser.target.function import RUNTIME
from tsfuser.target.host import cpu_identity, find_compiler

UNARY = "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh".split()
UNARY += "asinh acosh atanh erf erfc".split()
BINARY = "pow atan2 hypot".split()
TYPES = {"float": torch.float32, "double": torch.float64}

SOURCE = '#include "tsfuser.h"\n' + "\n".join(
    f"""struct Args_{name}_{ctype} {{ const {ctype}* x; const {ctype}* z; {ctype}* y; int64_t n; }};
KERNEL({name}_{ctype}, Args_{name}_{ctype}, 1) {{
  for (int64_t i = 0; i < args.n; ++i) args.y[i] = {name}(args.x[i]{", args.z[i]" * (name in BINARY)});
}}"""
    for name in UNARY + BINARY
    for ctype in TYPES
)


def samples(dtype):
    """All magnitudes, ordinary numbers, and everything special."""
    generator = torch.Generator().manual_seed(11)
    bits = torch.randint(-(2**63), 2**63 - 1, (1 << 15,), generator=generator)
    wild = bits.view(torch.float64) if dtype is torch.float64 else bits.to(torch.int32).view(torch.float32)
    plain = torch.randn(1 << 15, generator=generator, dtype=torch.float64).to(dtype)
    limits = [0.0, 1.0, 2.0, 0.5, 1e-40, 5e-324, 88.7, 89.0, 103.9, 104.0, 709.7, 710.0, 745.0]
    special = torch.tensor([*limits, float("inf"), float("nan")], dtype=torch.float64).to(dtype)
    return torch.cat([special, -special, wild, plain, plain * 10, plain * 100, plain * 0.01])


def run(mode, name, ctype, x):
    y = torch.empty_like(x)
    harness.Kernel(SOURCE, f"{name}_{ctype}", mode)(x, x.flip(0), y, x.numel(), grid=1)
    return y


@pytest.mark.parametrize("ctype", TYPES)
@pytest.mark.parametrize("name", UNARY + BINARY)
def test_within_4_units_and_special_values_exact(name, ctype):
    dtype = TYPES[ctype]
    x = samples(dtype)
    y = run("host", name, ctype, x)
    exact = run("scalar", name, "double", x.double())
    rounded = exact.to(dtype)
    finite = rounded.isfinite()
    assert torch.equal(y.isnan(), rounded.isnan())
    assert torch.equal(y[~finite & ~y.isnan()], rounded[~finite & ~y.isnan()])
    zero = rounded == 0
    assert torch.equal(y.signbit() & zero, rounded.signbit() & zero)
    size = rounded.abs()
    unit = (torch.nextafter(size, torch.full_like(size, float("inf"))) - size).double()
    error = ((y.double() - exact) / unit).abs()[finite]
    assert error.max() <= 4.5, x[finite][error.argmax()]  # 4, and half a unit of the scalar function


def _vectorising():
    """Whether this is a g++ for a processor with AVX2, and a C library with vector functions."""
    library, version = platform.libc_ver()
    known = platform.machine() == "x86_64" and library == "glibc" and is_gcc(find_compiler())
    return known and tuple(map(int, version.split(".")[:2])) >= (2, 35) and " avx2 " in cpu_identity()


vectorising = pytest.mark.skipif(not _vectorising(), reason="needs g++, glibc 2.35 and AVX2")


@vectorising
@pytest.mark.parametrize("ctype", TYPES)
@pytest.mark.parametrize("name", UNARY + BINARY)
def test_loops_call_the_vector_functions(name, ctype):
    library = harness.TARGETS["host"].compile(SOURCE, "exp_float").content
    assert re.search(rf"_ZGV[de]N\d+v+_tsfuser_{name}{'f' if ctype == 'float' else ''}\b".encode(), library)


@pytest.mark.parametrize("ctype", TYPES)
@pytest.mark.parametrize("name", UNARY + BINARY)
def test_a_result_does_not_depend_on_the_place_of_its_element(name, ctype):
    """Loops end with shorter vectors, and with elements one by one."""
    x = samples(TYPES[ctype])[:1000]
    kernel, z = harness.Kernel(SOURCE, f"{name}_{ctype}", "host"), x.flip(0)
    whole, alone = torch.empty_like(x), torch.empty_like(x)
    kernel(x, z, whole, x.numel(), grid=1)
    for begin in range(0, x.numel(), 25):
        part = slice(begin, begin + 25)
        kernel(x[part], z[part], alone[part], 25, grid=1)
    numbers = ~whole.isnan()
    assert torch.equal(whole[numbers], alone[numbers]) and torch.equal(whole.isnan(), alone.isnan())


LOOPS = {  # result type, and its value from a and b of type T in registers, and the bool c
    "add_relu": ("{T}", "convert<{T}>(relu(a + b))"),
    "where": ("{T}", "convert<{T}>(c ? a : b)"),
    "compare": ("bool", "a < b && c"),
    "mask": ("{T}", "convert<{T}>(a * convert<{R}>(b > 0))"),
    "clamp": ("{T}", "convert<{T}>(clamp(a, b, {R}(7)))"),
    "elu": ("{T}", "convert<{T}>(elu(a, {R}(1), {R}(1), {R}(1)))"),
    "gelu": ("{T}", "convert<{T}>(gelu(a))"),
}
FLOATING = {"half_t": "float", "bfloat16_t": "float", "float": "float", "double": "double"}
INTEGRAL = {name: name for name in ("uint8_t", "int32_t", "int64_t")}
CASES = [(loop, T, R) for loop in LOOPS for T, R in FLOATING.items()]
CASES += [(loop, T, R) for loop in LOOPS if loop not in ("elu", "gelu") for T, R in INTEGRAL.items()]


@vectorising
@pytest.mark.parametrize("loop, T, R", CASES)
def test_loops_are_vectorised(loop, T, R, tmp_path):
    result, value = (text.format(T=T, R=R) for text in LOOPS[loop])
    (tmp_path / "loop.cpp").write_text(f"""#include "tsfuser.h"
void loop(const {T}* x, const {T}* y, const bool* z, {result}* out, int64_t n) {{
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {{
    const {R} a = convert<{R}>(x[i]), b = convert<{R}>(y[i]);
    const bool c = load_bool(z + i);
    out[i] = {value};
  }}
}}""")
    command = [*find_compiler(), *harness.TARGETS["host"].flags(), *host._GCC, "-fopt-info-vec-optimized"]
    command += ["-iquote", str(RUNTIME), "-c", str(tmp_path / "loop.cpp"), "-o", str(tmp_path / "loop.o")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    if (loop, T) in (("where", "double"), ("where", "int64_t")) and "loop vectorized" not in done.stdout:
        pytest.skip("g++ vectorises this one or not, depending on its version")  # 12 does, 13 does not
    assert "loop vectorized" in done.stdout, done.stdout


STORED = [d for d in DTYPES.values() if d.converts and not d.computes]


@vectorising
@pytest.mark.parametrize("dtype", [d.ctype for d in STORED])
def test_casts_of_what_is_only_stored_are_vectorised(dtype, tmp_path):
    """Both ways, through a value that a kernel has named."""
    if dtype in ("uint32_t", "uint64_t") and "avx512dq" not in cpu_identity():
        pytest.skip("AVX2 has no conversion between floats and integers of 64 bits")
    (tmp_path / "loop.cpp").write_text(f"""#include "tsfuser.h"
void from(const {dtype}* x, float* out, int64_t n) {{
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {{
    const {dtype} a = x[i];
    out[i] = convert<float>(a) * 2.0f;
  }}
}}
void to(const float* x, {dtype}* out, int64_t n) {{
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {{
    const {dtype} a = convert<{dtype}>(x[i] * 2.0f);
    out[i] = a;
  }}
}}""")
    command = [*find_compiler(), *harness.TARGETS["host"].flags(), *host._GCC, "-fopt-info-vec-optimized"]
    command += ["-iquote", str(RUNTIME), "-c", str(tmp_path / "loop.cpp"), "-o", str(tmp_path / "loop.o")]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    lines = {line.split(":")[1] for line in done.stdout.splitlines() if "loop vectorized" in line}
    assert lines >= {"4", "11"}, done.stdout
