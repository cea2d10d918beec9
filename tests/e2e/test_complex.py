"""Complex numbers against eager, infinities and NaN by their parts: (nan+infj) is not (inf+nanj). All run
with the fallback off, so what is compared ran fused."""

import itertools
import math

import pytest
import torch

from kit.nearness import difference
from kit.support import fuse, groups, no_fallback

DTYPES = [torch.complex64, torch.complex128]
PARTS = [math.inf, -math.inf, math.nan, 0.0, 1.0, -2.5]


@pytest.fixture(autouse=True)
def fused_only():
    with no_fallback():
        yield


def compare(program, *inputs):
    """Fuses `program`, whose results are a tuple, and compares them with eager's."""
    scripted = fuse(program, *inputs)
    assert len(groups(scripted)) == 1
    exact = program(*(x.to(torch.complex128) if isinstance(x, torch.Tensor) else x for x in inputs))
    for actual, eager, result in zip(scripted(*inputs), program(*inputs), exact):
        problem = difference(actual, eager, result, steps=3)
        assert problem is None, problem


def numbers(parts, dtype, device):
    return torch.tensor([complex(*p) for p in itertools.product(parts, parts)], dtype=dtype, device=device)


def sums(x, y):
    return x + y, x - y, torch.rsub(x, y), torch.add(x, y, alpha=2), torch.sub(x, y, alpha=-1)


def sums_with_numbers(x):
    return x + 2.5, x - 2.5, torch.rsub(x, 2.5), 2.5 + x


def functions(x):
    return torch.exp(x), torch.sin(x), torch.cos(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_with_infinities_and_nan(device, dtype):
    values = numbers(PARTS, dtype, device)
    compare(sums, values[:, None], values[None])


@pytest.mark.parametrize("kind", [torch.float32, torch.int32])
def test_sums_of_a_complex_and_a_real_tensor(device, kind):
    values, others = numbers(PARTS, torch.complex64, device), torch.tensor([0, 1, -2], device=device)
    compare(sums, values[:, None], others.to(kind))


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_with_numbers(device, dtype):
    compare(sums_with_numbers, numbers(PARTS, dtype, device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_of_infinities_and_nan(device, dtype):
    compare(functions, numbers(PARTS, dtype, device))


@pytest.mark.parametrize("dtype, overflows", [(torch.complex64, 88.75), (torch.complex128, 709.8)])
def test_functions_overflow_only_where_their_results_do(device, dtype, overflows):
    """exp(89 + 1.5j) is finite though exp(89) is not in float."""
    steps = [overflows + k / 2 for k in (-20, -1, 0, 1, 2, 4)]
    angles = [0.0, 1e-3, 1.5, 3.0, 1e-30]
    pairs = [*itertools.product(steps, angles), *itertools.product(angles, steps)]
    pairs += [(-a, -b) for a, b in pairs]
    values = torch.tensor([complex(*p) for p in pairs], dtype=dtype)
    eager = functions(values)  # on the CPU, where none overflows earlier
    fused = fuse(functions, values.to(device))(values.to(device))
    for actual, wanted, exact in zip(fused, eager, functions(values.to(torch.complex128))):
        problem = difference(actual.cpu(), wanted, exact, steps=3)
        assert problem is None, problem
