"""What rows that several blocks share are checked with, however these blocks combine."""

import torch

import tsfuser
from kit.batch_norms import FORWARD, Normed, parameters
from kit.batch_norms import check as check_batch_norm
from kit.reductions import Fused, double, tensor
from kit.support import assert_matches, no_fallback, train
from tsfuser.schedule import row_params

SOFTMAX = """
def f(x):
    y = torch.softmax(x * 0.5, -1)
    return y, y.sum(-1)
"""
#: What has gradients that are added up over rows.
RESULTS = ["torch.layer_norm(x * 0.5, [x.size(-1)], w, b)", "torch.log_softmax(x * 0.5, -1) * w + b"]


def with_special_values(device):
    """Nine rows, most of which have an infinity or NaN; some have nothing else where some blocks look."""
    x, inf = tensor(9, 4100, device=device), float("inf")
    x[1, 4099], x[3, 0], x[5, 77], x[7] = inf, float("nan"), -inf, -inf
    x[2, :3000], x[4, 1000:], x[6, 1:], x[8, :4099] = -inf, -inf, -inf, -inf
    x[6, 0] = inf
    return x


def check_gradients(result, inputs):
    """`result` is an expression of x, w and b, the `inputs`."""
    fused = Fused(f"def f(x, w, b):\n    return {result}\n")
    inputs = [x.requires_grad_() for x in inputs]
    with tsfuser.fuser(), no_fallback():
        out, gradients = train(fused.scripted, inputs)
    eager = train(fused.plain, inputs)
    exact = train(fused.plain, [double(x.detach()).requires_grad_() for x in inputs])
    for a, e, r in zip([out, *gradients], [eager[0], *eager[1]], [exact[0], *exact[1]]):
        assert_matches(a, e, r, ops=64)


def check_channels(sizes, device):
    """Of a batch norm: a channel is a row of as many pieces as the batch has images."""
    check_batch_norm(Normed(FORWARD), tensor(*sizes, device=device), parameters(sizes[1], device), True, 0.1)


def check_dropout(rows, device, monkeypatch):
    """A row's random numbers do not depend on how many blocks work on it."""
    source = "def f(x):\n    return torch.softmax(torch.dropout(x, 0.3, True), -1)\n"
    x, results = tensor(rows, 5000, device=device), []
    for largest in (64, 512):
        monkeypatch.setattr(row_params, "MAX_ROW_THREADS", largest)
        tsfuser.reset()
        scripted = Fused(source).scripted
        with tsfuser.fuser(), no_fallback():
            for _ in range(3):
                torch.manual_seed(7)
                out = scripted(x)
        results.append(out)
    torch.testing.assert_close(*results)
