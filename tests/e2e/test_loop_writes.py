"""Writes in place around loops that run zero times, once or more. What a loop returns may be what entered it,
and its body gets what the last iteration handed on; torch's alias analysis knows neither."""

import pytest
import torch

import tsfuser

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning"), pytest.mark.graphs]

#: The start of a loop: all of a tensor, a part of it, or a view of all that a schema hides.
STARTS = {"whole": "a", "part": "a[:]", "transposed": "a.t().t()", "hidden view": "torch.einsum('ij->ij', a)"}
LOOPS = {
    "for": "for i in range(n):\n        v = v * 0.5",
    "over a list": "for t in l[:n]:\n        v = v * 0.5 + t",
    "while": "i = 0\n    while i < n:\n        v = v * 0.5\n        i += 1",
    "nested": "for i in range(n):\n        for j in range(i):\n            v = v * 0.5",
    "a branch": "for i in range(n):\n        if i > 0:\n            v = v * 0.5",
    "a branch that ends it": "for i in range(n):\n        if n > 1:\n            break\n        v = v * 0.5",
    "swaps": "for i in range(n):\n        v, w = w, v",
    "turns": "u = x * 3\n    for i in range(n):\n        v, w, u = w, u, v",
    "takes another": "for i in range(n):\n        v = w",
    "takes it from a list": "for i in range(n):\n        l.append(v)\n        v = l[0]",
}
WRITES = {
    "add_": "{0}.add_(3.0)",
    "relu_": "{0}.relu_()",
    "*=": "{0} *= 2.0",
    "fill_": "{0}.fill_(1.0)",
    "masked_fill_": "{0}.masked_fill_({0} > 0, 4.0)",
    "an element": "{0}[0] = 2.0",
    "a view": "{0}.view(-1)[1:].sub_(1.0)",
    "out=": "torch.neg({0}, out={0})",
}
#: What is read, and when: each of the two tensors before and behind a write to the other.
READS = {
    "the loop's result is written": "b = a * 2.0\n    {v}\n    return b + a * 3.0, v, w * 2.0 + 1.0",
    "what entered it is written": "b = v * 2.0\n    {a}\n    return b + v * 3.0, a, w * 2.0 + 1.0",
    "a view of the result": "z = v[:1]\n    b = a * 2.0\n    {z}\n"
    "    return b + a * 3.0, v * 1.0, w * 2.0 + 1.0",
}


def program(start, loop, write, read):
    written = {name: WRITES[write].format(name) for name in ("v", "a", "z")}
    return (
        "def f(x: Tensor, n: int):\n    l = [x + 1.0, x + 2.0]\n    w = x + 4.0\n    a = x - 1.0\n"
        f"    v = {STARTS[start]}\n    {LOOPS[loop]}\n    {READS[read].format(**written)}\n"
    )


def compare(source, device, training=False, counts=(0, 1, 2)):
    """Each of the first calls, and calls with other counts behind them, give what eager gives."""
    scope = {"torch": torch, "Tensor": torch.Tensor}
    exec(source, scope)
    for first in counts:
        scripted = torch.jit.CompilationUnit(source).f
        with tsfuser.fuser():
            for n in [first] * 5 + [n for n in counts if n != first]:
                x, y = (torch.arange(-6.0, 6.0, device=device).reshape(3, 4) for _ in range(2))
                if training:
                    x.requires_grad_(), y.requires_grad_()
                found, wanted = scripted(x, n), scope["f"](y, n)
                for got, want in zip(found, wanted, strict=True):
                    assert torch.equal(got, want), f"n = {n}:\n{source}"
                if training:
                    sum((k + 1) * t.sum() for k, t in enumerate(found)).backward()
                    sum((k + 1) * t.sum() for k, t in enumerate(wanted)).backward()
                    assert torch.equal(x.grad, y.grad), f"n = {n}:\n{source}"


@pytest.mark.graphs
@pytest.mark.each_value(("loop", "read"), ("start", "read"))
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("start", STARTS)
def test_a_write_is_seen_through_a_loop(device, start, loop, write, read):
    compare(program(start, loop, write, read), device)


@pytest.mark.graphs
@pytest.mark.each_value(("loop", "read"))
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", [w for w in WRITES if w not in ("out=", "relu_")])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("start", STARTS)
def test_a_write_is_seen_through_a_loop_in_training(device, start, loop, write, read):
    compare(program(start, loop, write, read), device, training=True)


#: In a body: a write to what the last iteration handed on, of which something else holds a name.
BODIES = {
    "two names of one": "for i in range(n):\n        v.add_(1.0)\n        b = b + w * 2.0\n"
    "        v, w = w, v",
    "what it has put into a list": "for i in range(n):\n        b = b + l[-1] * 2.0\n"
    "        v.add_(1.0)\n"
    "        b = b * l[-1]\n        v = v * 0.5\n        l.append(v)",
    "what comes from outside": "for i in range(n):\n        b = b + a * 2.0\n        v.add_(1.0)\n"
    "        b = b - a\n        v = a",
    "a loop in it": "for i in range(n):\n        u = v\n        for j in range(i):\n            u = u * 2.0\n"
    "        b = b + v * 2.0\n        u.add_(1.0)\n        b = b * v",
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("body", BODIES)
def test_a_write_in_a_body_is_seen_in_the_next_iteration(device, body, training):
    source = (
        "def f(x: Tensor, n: int):\n    l = [x + 1.0, x + 2.0]\n    w = x + 4.0\n    a = x - 1.0\n"
        f"    b = x * 2.0\n    v = x * 3.0\n    {BODIES[body]}\n    return b * 2.0 + 1.0, v, w, a\n"
    )
    compare(source, device, training, counts=(0, 1, 3))


def test_a_settled_branch_keeps_what_stands_behind_a_loop(device):
    """A function whose branches follow from the call runs a copy without them, of which torch drops what it
    takes for dead."""
    source = (
        "def f(x: Tensor, n: int, flag: bool):\n    a = x - 1.0\n    v = a\n    if flag:\n"
        "        for i in range(n):\n            v = v * 0.5\n    v.add_(3.0)\n"
        "    return a * 2.0 + 1.0, v * 1.0\n"
    )
    scope = {"torch": torch, "Tensor": torch.Tensor}
    exec(source, scope)
    scripted = torch.jit.CompilationUnit(source).f
    with tsfuser.fuser():
        for n, flag in [(0, True)] * 5 + [(2, True), (0, False), (0, True)]:
            x = torch.arange(12.0, device=device)
            for got, want in zip(scripted(x, n, flag), scope["f"](x.clone(), n, flag), strict=True):
                assert torch.equal(got, want)


def test_a_body_that_writes_to_its_own_tensors_is_fused(device):
    """Nobody else sees these: neither an op in place on what the iteration has made, nor a sum in place."""
    source = (
        "def f(x: Tensor, n: int):\n    y = x * 2.0\n    total = torch.zeros_like(x)\n"
        "    for i in range(n):\n        y = (y * 0.5 + x).relu_()\n        total += y\n"
        "    return torch.sigmoid(y * 2.0) + total\n"
    )
    scope = {"torch": torch, "Tensor": torch.Tensor}
    exec(source, scope)
    scripted = torch.jit.CompilationUnit(source).f
    with tsfuser.fuser():
        for _ in range(4):
            x = torch.randn(5, 7, device=device)
            torch.testing.assert_close(scripted(x, 3), scope["f"](x, 3))
        assert "tsfuser::shared" not in str(scripted.graph_for(x, 3))
        assert "mul, add, relu" in str(tsfuser.explain(scripted, x, 3))


def test_what_is_hidden_is_shown_once():
    """Each result may be a view of the tensor that all of them read, and so share memory with each other."""
    count = 20
    lines = [
        f"    a{i} = torch.einsum('ij,jk->ik', [z, y])\n    a{i}.add_(1.0)\n    z = torch.tanh(a{i})\n"
        for i in range(count)
    ]
    f = torch.jit.CompilationUnit(f"def f(z, y):\n{''.join(lines)}    return z\n").f
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    with tsfuser.fuser():
        for _ in range(3):
            found = f(x, y)
        shown = len(f.graph_for(x, y).findAllNodes("tsfuser::shared", True))
    for _ in range(count):
        x = torch.tanh(x @ y + 1.0)
    torch.testing.assert_close(found, x, rtol=1e-4, atol=1e-5)
    assert count < shown < 4 * count


@pytest.mark.parametrize("training", [False, True])
def test_views_of_one_tensor_that_schemas_hide_are_written_in_turn(training):
    def f(x):
        z = x * 2.0
        a = torch.einsum("ij->ji", [z])
        a.add_(1.0)
        b = torch.exp(z)
        c = torch.einsum("ij->ji", [z])
        c.mul_(0.5)
        d = torch.exp(a)
        e = torch.einsum("ij->ji", [z])
        e.sub_(0.25)
        return b, d, torch.exp(c), torch.exp(z), torch.tanh(e)

    x, scripted = torch.randn(5, 4), torch.jit.script(f)
    with tsfuser.fuser():
        for _ in range(4):
            found, expected = (g(x.clone().requires_grad_(training)) for g in (scripted, f))
            torch.testing.assert_close(found, expected)
