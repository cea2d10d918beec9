"""Errors against float64: at most twice eager's own, and the rounding of the result."""

import torch

import tsfuser
from kit.reductions import double, tuples
from kit.support import EPSILON, no_fallback

# shapes whose reduction goes over threads and blocks in other ways, with the reduced dims
PLACES = {
    "splits of outer dims": ((66, 2, 5), [0, 2]),
    "splits of the inner dim": ((4, 2, 16388), [0, 2]),
    "several outer dims": ((6, 2, 19, 3, 7), [0, 2, 4]),
    "columns": ((4200, 3), [0]),
    "columns in vectors": ((2100, 20), [0]),
    "lanes that differ": ((70001,), [0]),
    "rows too long for registers": ((3, 17000), [1]),
}


def assert_no_worse(function, *inputs, roundings=1):
    """Each result of the `Fused` function is, at worst, twice as far from float64 as eager's is, and
    `roundings` of the largest result."""
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            actual = tuples(function.scripted(*inputs))
    assert function.kinds, "nothing was fused"
    eager, exact = tuples(function.plain(*inputs)), tuples(function.plain(*map(double, inputs)))
    for k, (a, e, r) in enumerate(zip(actual, eager, exact)):
        compare(a, e, r, roundings, f"result {k}")


def compare(actual, eager, exact, roundings, what):
    assert (actual.dtype, actual.shape) == (eager.dtype, eager.shape), what
    finite = torch.isfinite(exact)
    assert torch.equal(torch.isfinite(actual), torch.isfinite(eager)), what
    mine, theirs = ((x.double() - exact)[finite].abs().max().item() for x in (actual, eager))
    allowed = 2 * theirs + roundings * EPSILON[actual.dtype] * exact[finite].abs().max().item()
    assert mine <= allowed, f"{what} is off by {mine:.3g}, eager's by {theirs:.3g}, allowed {allowed:.3g}"


def values(kind, shape, device, dtype, seed=0):
    """`positive`: in [0, 1). `normal`: their sum is near 0. `offset`: a mean of 1e4 and a deviation of 1."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "positive":
        made = torch.rand(shape, generator=generator)
    else:
        made = torch.randn(shape, generator=generator) + (1e4 if kind == "offset" else 0.0)
    return made.to(device, dtype)
