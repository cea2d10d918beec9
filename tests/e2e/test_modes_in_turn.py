"""One scripted function trains, then runs without gradients, then trains: the graph of the calls before is
there, guarded, and beside it a fallback, whose lists and numbers come from outside."""

import pytest
import torch

from kit.support import assert_matches, script
from tsfuser import fuser

pytestmark = pytest.mark.graphs

#: Of x[6, 12], y[6, 12] and the whole numbers n = 6, m = 2.
PROGRAMS = {
    "split by a size": "a, b = x.split(x.size(1) // 2, 1); r = a.tanh() * b",
    "split by a number": "a, b = (x * y).split(n, 1); r = a.tanh() * b",
    "split in three": "a, b, c = x.split(x.size(1) // 3, -1); r = (a + b).sigmoid() * c",
    "split by sizes": "a, b = x.split([n - m, x.size(1) - n + m], 1); r = a.tanh().sum() * b",
    "one of a split": "t = x.split(n, 1); r = t[0].tanh() * t[1]",
    "chunks": "a, b = x.chunk(m, 1); r = a.tanh() * b",
    "chunks of a product": "a, b = (x @ y.t()).chunk(m, -1); r = a.tanh() * b",
    "tensor_split": "t = x.tensor_split(m, 1); r = t[0].tanh() * t[1]",
    "unbind": "t = x.view(m, -1, 12).unbind(0); r = t[0].tanh() * t[1]",
    "narrow": "r = x.narrow(1, m, n).tanh() * y.narrow(1, 0, n)",
    "slices": "r = x[:, m:n].tanh() * y[:, n : n + n - m]",
    "slices from the end": "r = x[:, -n:].tanh() * y[:, : x.size(1) - n]",
    "select": "r = x.select(1, m).tanh() * y.select(1, n)",
    "roll": "r = (x * y).roll(m, 1).tanh() + x",
    "two rolls": "r = (x * y).roll([m, -m], [0, 1]).tanh() + x",
    "pad": "r = torch.nn.functional.pad(x * y, [m, 0]).tanh() * 2.0",
    "view": "r = (x * 2.0).view(x.size(0), m, -1).tanh() * 3.0",
    "view of a product": "r = (x @ y.t()).view(-1, n // m).tanh() * 3.0",
    "reshape": "r = (x * y).reshape([m, x.numel() // m]).tanh() + 1.0",
    "flatten": "r = (x * y).view(m, 3, -1).flatten(0, m - 1).tanh() + 1.0",
    "unflatten": "r = (x * y).unflatten(1, [m, -1]).tanh() + 1.0",
    "expand": "r = (x.sum(1, keepdim=True) * 2.0).expand(x.size(0), n).tanh() + 1.0",
    "transpose": "r = (x * y).transpose(m - 2, m - 1).tanh() + 1.0",
    "permute": "r = (x * y).view(m, 3, 12).permute([m, 0, 1]).tanh() + 1.0",
    "squeeze": "r = (x * y).unsqueeze(m - 1).squeeze(m - 1).tanh() + 1.0",
    "cat": "r = torch.cat([x * 2.0, y.tanh()], m - 1).sigmoid()",
    "stack": "r = torch.stack([x * 2.0, y.tanh()], m - 1).sigmoid()",
    "cat of parts": "r = torch.cat([-x[:, n:], x[:, :n]], -1) * y",
    "sum": "r = (x * y).sum([m - 1]).tanh() * 2.0",
    "softmax": "r = torch.softmax(x * y, m - 1) * 2.0",
    "layer norm": "r = torch.nn.functional.layer_norm(x * y, [x.size(-1)]).tanh()",
    "group norm": "r = torch.nn.functional.group_norm(x.view(m, n, -1) * 2.0, m).tanh()",
    "numbers": "r = (x * n + y.clamp(-m, m)).pow(m) * (n / m)",
    "index": "r = (x * y)[torch.arange(m, n)].tanh() + 1.0",
    "where": "r = torch.where(x > 0, x * n, y * m).tanh()",
    "in place": "z = x * y; z[:, :m].mul_(n); r = z.tanh()",
    "over a split": "t = x.split(n, 1); r = y.sum(); for p in t:;     r = r + p.sum()",
    "over parts and one of them": "t = x.split(n, 1); r = t[0].tanh(); for p in t:;     r = r + p.sum()",
    "over rows": "t = x.unbind(0); r = t[0].tanh(); for p in t:;     r = (r * p).sigmoid()",
    "over chunks": "r = y.sum(); for p in x.chunk(m, 1):;     r = r + p.tanh().sum()",
    "over a list": "t = [x * y, y]; r = t[0].tanh(); for p in t:;     r = r + p.sigmoid()",
    "over views of views": "t = x.view(n, m, -1).unbind(1); r = y.sum(); for p in t:;     r = r + p.exp()",
    "list in a branch": "t = x.split(n, 1); r = y.sum(); if n > m:;     r = r + t[0].exp() * t[1]",
    "counted": "t = x.split(m, 1); r = t[0] * len(t); for i in range(len(t)):;     r = r * t[i].tanh()",
    "by a condition": "t = x.split(n, 1)[0] if n > m else x; r = t.tanh() * 2.0",
}


ORDERS = {
    "training first": ["train"] * 3 + ["no_grad"] * 3 + ["detached"] * 2,
    "training last": ["detached"] * 3 + ["no_grad"] * 2 + ["train"] * 3,
    "mixed": ["train", "no_grad", "no_grad", "train", "detached", "train", "no_grad", "detached"],
}


def gradients_of(result, *inputs):
    torch.manual_seed(5)
    return torch.autograd.grad(result, inputs, torch.rand_like(result), allow_unused=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_training_and_inference_in_turn(device, program, order):
    lines = [*PROGRAMS[program].split("; "), "return r\n"]
    source = "\n    ".join(["def f(x, y, n: int, m: int):", *lines])
    function, eager = script(source), {"torch": torch}
    exec(source, eager)
    with fuser():
        for mode in ORDERS[order] * 2:
            x, y = (torch.rand(6, 12, device=device, requires_grad=mode != "detached") for _ in range(2))
            with torch.set_grad_enabled(mode != "no_grad"):
                found, expected = (f(x, y, 6, 2) for f in (function, eager["f"]))
            assert_matches(found, expected, ops=20)
            assert found.requires_grad == expected.requires_grad
            if mode == "train":
                for a, b in zip(gradients_of(found, x, y), gradients_of(expected, x, y)):
                    assert (a is None) == (b is None)
                    if a is not None:
                        assert_matches(a, b, ops=20, strides=False)
