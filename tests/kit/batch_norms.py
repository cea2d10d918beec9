"""Batch norms fused by TorchScript, against eager and against eager in double."""

import torch

import tsfuser
from kit.reductions import tensor, tuples
from kit.support import assert_matches, groups, kinds, no_fallback, script

FORWARD = """
def f(x, w, b, m, v, training: bool, momentum: float):
    y = torch.batch_norm(x * 2.0, w, b, m, v, training, momentum, 1e-5, True)
    return torch.relu(y) + x
"""


def parameters(channels, device="cpu", dtype=torch.float32):
    """Weight, bias, running mean and running variance."""
    made = [tensor(channels, device=device, dtype=dtype, seed=k) for k in (1, 2, 3, 4)]
    return [*made[:3], made[3].abs() + 0.5]


class Normed:
    """A function (x, w, b, m, v, ...) of TorchScript source, for tsfuser and for eager."""

    def __init__(self, source):
        self.scripted, self.plain = script(source), script(source)

    @property
    def kinds(self):
        return {kind for group in groups(self.scripted) for kind in kinds(group)}


def check(function, x, parameters, *rest, ops=16, calls=2):
    """Calls `function`, each time on fresh copies of the parameters, and compares results and what has become
    of the parameters."""

    def run(f, *inputs):
        own = [None if p is None else p.clone() for p in inputs[1:]]
        return [*tuples(f(inputs[0], *own, *rest)), *(p for p in own if p is not None)], [
            p._version for p in own if p is not None
        ]

    with tsfuser.fuser(), no_fallback():
        for _ in range(calls):
            actual, versions = run(function.scripted, x, *parameters)
    assert groups(function.scripted)
    eager, eager_versions = run(function.plain, x, *parameters)
    exact, _ = run(function.plain, x.double(), *(None if p is None else p.double() for p in parameters))
    for a, e, r in zip(actual, eager, exact):
        if isinstance(e, int):
            assert a == (0 if x.is_cuda else e)  # ours is never cuDNN's
        elif e.dtype == torch.uint8 and x.is_cuda:
            assert a.numel() == 0
        else:
            assert_matches(
                a,
                e,
                None if e.dtype == torch.uint8 or r.shape != e.shape else r,
                ops=ops,
                precision=x.dtype if a.is_floating_point() else None,
            )
    assert versions == eager_versions
    return actual
