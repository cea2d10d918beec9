"""Functions of TorchScript source with reductions, fused against eager and against eager in double.

Each holds several reductions, so that few kernels say much; `check` runs it fused, without a fallback.
"""

import torch

import tsfuser
from kit.support import assert_matches, groups, no_fallback, script

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
COLUMNS = [1, 2, 3, 17, 31, 33, 100, 1000, 4097, 70000]
ROWS = """
def f(x, w, b):
    n = [x.size(-1)]
    s = torch.softmax(x, -1)
    y = torch.layer_norm(x, n, w, b, 1e-5)
    z, mean, rstd = torch.native_layer_norm(x * 2, n, w, b, 1e-5)
    return y, s, torch.log_softmax(x, -1), torch.rms_norm(x, n, w, 1e-5), z, mean, rstd, s * y
"""


def tuples(x):
    return x if isinstance(x, tuple) else (x,)


def double(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x


class Fused:
    """A function of TorchScript source, once for tsfuser and once, never seen by it, for eager."""

    def __init__(self, source):
        self.scripted, self.plain = script(source), script(source)

    @property
    def kinds(self):
        return {n.kind() for g in groups(self.scripted) for n in g.g("Subgraph").nodes()}


def check(function, *inputs, calls=3, ops=16, strides=True):
    """Calls the `Fused` function without a fallback and compares; the precision is that of the inputs."""
    floating = [x.dtype for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    with tsfuser.fuser(), no_fallback():
        for _ in range(calls):
            actual = tuples(function.scripted(*inputs))
    assert function.kinds
    eager = tuples(function.plain(*inputs))
    exact = tuples(function.plain(*map(double, inputs)))
    for a, e, r in zip(actual, eager, exact):
        assert_matches(
            a,
            e,
            r,
            ops=ops,
            strides=strides,
            precision=floating[0] if floating and a.is_floating_point() else None,
        )
    return actual


def tensor(*sizes, device="cpu", dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(device, dtype)


def rows_of(columns, rows, device, dtype=torch.float32):
    return [
        tensor(rows, columns, device=device, dtype=dtype) * 2 + 1,
        *(tensor(columns, device=device, dtype=dtype, seed=k) for k in (1, 2)),
    ]
