"""Arguments at the edges, and some that eager rejects, of ops alone in a joint graph: found by sweeps of
test_rejected_arguments.py (`--joint --long`)."""

import pytest
import torch

import tsfuser
from kit.opsweep import plain, single_nodes
from kit.support import script

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs")]
HALF, DOUBLE = torch.float16, torch.float64


def leaf(*sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(sizes))
    return (torch.rand(sizes, generator=generator) + 0.5).to(dtype).requires_grad_()


def zeros(*sizes, dtype):
    return torch.zeros(sizes, dtype=dtype)


#: The function's parameters and result; the first call's arguments; those of others.
CASES = {
    "narrow from the end": (
        "x, n: int, k: int",
        "x.narrow(1, n, k)",
        (leaf(3, 5), -2, 2),
        [(-5, 5), (1, 2), (5, 0)],
    ),
    "rms_norm of -1": (
        "x, n: List[int], w",
        "torch.rms_norm(x, n, w, 0.5)",
        (leaf(1, 2, 3), [1, 2, 3], leaf(1, 2, 3)),
        [
            ([-1, 2, 3], leaf(1, 2, 3)),
            ([1, 2, 3], leaf(2, 2, 3)),
            ([1, 2, 3], leaf(1, 3, 2)),
            ([2, 3], leaf(2, 3)),
        ],
    ),
    "prelu by a matrix": (
        "x, w",
        "torch.prelu(x, w)",
        (leaf(2, 8, 3), leaf(8)),
        [(leaf(2, 4),), (leaf(1),), (leaf(3),)],
    ),
    "places of bools": (
        "x, i",
        "torch.take_along_dim(x, i, 0)",
        (leaf(5, 5), zeros(5, 5, dtype=torch.int64)),
        [(zeros(5, 5, dtype=torch.bool),), (zeros(5, 5, dtype=torch.int32),)],
    ),
    "norm of an order beyond": (
        "x, p: float",
        "torch.norm(x, p)",
        (leaf(5, 5), -1e39),
        [(1e39,), (3.5,), (-2.0,)],
    ),
    "xlogy by a number beyond": (
        "x, p: float",
        "torch.xlogy(x, p)",
        (leaf(3, 5), -1e39),
        [(1e300,), (0.0,), (2.0,)],
    ),
    "celu by a number beyond": (
        "x, p: float",
        "torch.celu(x, p)",
        (leaf(3, 5, dtype=DOUBLE), 1e39),
        [(2.0,), (float("inf"),), (-1e39,), (0.0,)],
    ),
    "addcdiv by a number beyond": (
        "x, y, p: float",
        "torch.addcdiv(x, x, y, value=p)",
        (leaf(3, dtype=HALF), leaf(3, dtype=HALF), 70000.0),
        [(leaf(3, dtype=HALF), 2.0), (leaf(3), 1e39)],
    ),
    "addcdiv by a number": ("x, p: float", "torch.addcdiv(x, x, x + 1, value=p)", (leaf(3), 0.5), [(2.0,)]),
    "float_power by a number": ("x, p: float", "torch.float_power(x, p)", (leaf(3), 0.5), [(2.0,), (0.0,)]),
    "a dim that is given": ("x, d: int", "torch.logsumexp(x, d)", (leaf(3, 4), 1), [(-2,), (2,)]),
    "the largest along a dim": ("x, d: int", "torch.max(x, d)[0]", (leaf(3, 4), 1), [(-2,), (-3,)]),
    "a window that is given": (
        "x, k: List[int], s: List[int]",
        "torch.avg_pool1d(x, k, s)",
        (leaf(2, 3, 9), [2], [2]),
        [([3], [1]), ([3], [-1])],
    ),
    "one number for two dims": (
        "x, k: List[int], s: List[int]",
        "torch._C._nn.avg_pool2d(x, k, s)",
        (leaf(2, 3, 9), [2], [2]),
        [([2], [1, 2]), ([1, 2], [2]), ([2], [])],
    ),
    "roll by more than there is": (
        "x, k: int",
        "torch.roll(x, k)",
        (leaf(5, 5), 2**63 - 1),
        [(-(2**63),), (-7,)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_outcome_is_that_of_eager(case):
    parameters, result, first, others = CASES[case]
    source = f"def f({parameters}):\n    return {result}\n"
    scripted, eager = script(source), plain(source)
    with tsfuser.fuser(), single_nodes():
        for given in [first] * 3 + [(first[0], *other) for other in others] * 3:
            found, expected = outcome(scripted, given), outcome(eager, given)
            assert isinstance(found, str) == isinstance(expected, str), (given, found, expected)
            if not isinstance(found, str):
                torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4, equal_nan=True)


def outcome(f, given):
    leaves = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
    try:
        y = f(*given)
        return [y, *torch.autograd.grad(y.sum(), leaves, allow_unused=True)]
    except (RuntimeError, IndexError) as error:
        return str(error).splitlines()[-1]
