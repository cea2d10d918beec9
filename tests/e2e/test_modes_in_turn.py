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


#: Tensors in lists, tuples and dicts, and pairs of results.
HELD = {
    "append": "t = [x]; for i in range(m):;     t.append((t[-1] * y).tanh()); r = torch.cat(t, 1)",
    "append parts": "t = [x[:, :n]]; for p in y.split(n, 1):;     t.append(p.exp()); r = torch.cat(t, 0)",
    "slice of list": "t = x.split(m, 1)[1:3]; r = t[0].tanh() * t[1]",
    "comprehension": "t = [(p * 2.0).tanh() for p in x.split(n, 1)]; r = torch.cat(t, 1) * y",
    "comprehension of unbind": "r = torch.stack([p.tanh() * 2.0 for p in x.unbind(0)], 0)",
    "zip": "r = x.sum(); for p, q in zip(x.split(n, 1), y.split(n, 1)):;     r = r + (p * q).tanh().sum()",
    "enumerate": "r = x.sum(); for i, p in enumerate(x.split(n, 1)):;     r = r + (p * i).tanh().sum()",
    "tuple": "t = (x * y, x + y); a, b = t; r = a.tanh() * b",
    "tuple of parts": "a, b = x.split(n, 1); t = (a, b, y); r = t[0].tanh() * t[1] + t[2][:, :n]",
    "dict": "d = {'a': x.tanh(), 'b': y * 2.0}; r = d['a'] * d['b']",
    "dict of parts": "a, b = x.chunk(m, 1); d = {'a': a, 'b': b}; r = d['a'].tanh() * d['b']",
    "dict values": "d = {'a': x.tanh(), 'b': y * 2.0}; r = x; for k in d.values():;     r = r * k",
    "nested list": "t = [[x, y], [y, x]]; r = t[0][0].tanh() * t[1][0]",
    "list multiply": "t = [x.tanh()] * m; r = torch.cat(t, 0)",
    "unused part": "a, b = x.split(n, 1); r = a.tanh() * 2.0",
    "unused chunk of product": "a, b = (x @ y.t()).chunk(m, 1); r = b.tanh() * 2.0",
    "parts of parts": "a, b = x.split(n, 1); c, d = a.chunk(m, 1); r = c.tanh() * d",
    "parts joined again": "a, b = x.split(n, 1); r = torch.cat([b, a], 1) * y",
    "parts twice": "a, b = x.split(n, 1); c, d = x.split(n, 1); r = a * d + b * c",
    "chunk dim variable": "a, b = x.chunk(2, m - 1); r = a.tanh() * b",
    "split uneven": "t = x.split(5, 1); r = t[0].tanh() * t[1] + t[2].sum()",
    "chunk uneven": "t = x.chunk(5, 1); r = t[0].tanh() + t[-1].sum()",
    "chunk too many": "t = x.chunk(24, 1); r = t[0].tanh() + float(len(t))",
    "hsplit": "a, b = torch.hsplit(x, 2); r = a.tanh() * b",
    "vsplit": "a, b = torch.vsplit(x, 2); r = a.tanh() * b",
    "dsplit": "a, b = torch.dsplit(x.view(6, m, n), 2); r = a.tanh() * b",
    "meshgrid": "a, b = torch.meshgrid([x[0], y[0]], indexing='ij'); r = (a * b).tanh()",
    "broadcast_tensors": "a, b = torch.broadcast_tensors(x[:1], y); r = (a * b).tanh()",
    "where unpack": "a, b = torch.where(x > 0.5); r = x[a, b].tanh() * 2.0",
    "max pair": "a, b = (x * y).max(1); r = a.tanh() + b",
    "topk": "a, b = (x * y).topk(m, 1); r = a.tanh() + b",
    "sort": "a, b = (x * y).sort(1); r = a.tanh() + b",
    "var_mean": "a, b = torch.var_mean(x * y, 1); r = a.tanh() * b",
    "while": "r = x; k = 0; while k < m:;     r = (r * y).tanh();     k += 1",
    "if else views": "a = x.t() if n > m else x; r = a.tanh() * 2.0",
    "if else parts": "if n > m:;     a, b = x.split(n, 1); else:;     a, b = x.chunk(m, 1); r = a.tanh() * b",
    "by a value": "r = x * 2.0; if bool((x.sum() > 0).item()):;     r = r.tanh() * y",
    "loop carried parts": "a, b = x.split(n, 1); for i in range(m):;     a, b = b.tanh(), a * 2.0; r = a * b",
    "loop carried list": "t = [x, y]; for i in range(m):;     t = [t[1].tanh(), t[0] * t[1]]; r = t[0]",
    "optional": "w = x if n > 3 else None; r = y.tanh() * 2.0; if w is not None:;     r = r * w",
    "list of sizes": "s = [x.size(0), m, n]; r = (x * y).view(s).tanh().sum(1) * 2.0",
    "size unpack": "b, c = x.shape; r = (x * y).view(b, m, c // m).tanh()",
    "sizes in loop": "r = x; for d in x.shape:;     r = (r * d).tanh()",
    "numbers list": "k = [1.0, 2.0]; r = x; for v in k:;     r = (r * v).tanh()",
    "cat in loop": "r = x; for i in range(m):;     r = torch.cat([r, y.tanh()], 1)",
    "select in loop": "r = x[0] * 1.0; for i in range(6):;     r = (r + x[i]).tanh()",
    "detach parts": "a, b = x.split(n, 1); r = a.detach().tanh() * b",
    "a list by two names": "t = x.split(n, 1); u = t; r = u[0].tanh() * t[1]",
    "len cond": "t = x.split(n, 1); r = t[0].tanh(); if len(t) > 1:;     r = r * t[1]",
    "index of": "t = [1, 2, 3]; k = t.index(2); r = x.split(n, 1)[k].tanh()",
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
    check(PROGRAMS[program], order, device)


@pytest.mark.parametrize("program", HELD)
def test_tensors_in_lists(device, program):
    check(HELD[program], "mixed", device)


def check(program, order, device):
    """`program`: lines of TorchScript, with "; " between."""
    lines = [*program.split("; "), "return r\n"]
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
