"""What several differentiable graphs read, since an op that autodiff does not know parts them: casts that the
program makes (csrc_stubs/torchscript/twin_rows.cpp), and views of tensors that no op with a derivative made
(views_apart.cpp). Torch would take such a node, and all that reads it, out of the graphs."""

import itertools

import pytest
import torch

import tsfuser
from kit.support import assert_matches, script, train

pytestmark = pytest.mark.graphs

PARTED = {
    "a cast of a result": """
    z = (x * w).to(torch.float32)
    a = torch.tanh(z * 2.0)
    return torch.sigmoid(z + torch.sort(a, 0)[0]) * z
""",
    "a cast of a result of torch's": """
    z = torch.sort(w, 1)[0].to(torch.float32)
    a = torch.tanh(z * x)
    return torch.sigmoid(z + torch.sort(a, 0)[0]) * z
""",
    "a cast that torch reads": """
    y = torch.sort((torch.tanh(x * w) * 2.0).to(torch.float32), 0)[0]
    return torch.sigmoid(y * 3.0)
""",
    "a view of an argument": """
    v = c.unsqueeze(0)
    a = torch.tanh(x * v)
    return torch.sigmoid(torch.sort(a, 0)[0] * v + w) * v
""",
    "views of a view": """
    v = c.unsqueeze(0)
    u = v.expand(x.size(0), x.size(1))
    a = torch.tanh(x * v) * u
    return torch.sigmoid(torch.sort(a, 0)[0] * v + w) * u
""",
    "a part of an argument": """
    v = w[:, 0:1]
    a = torch.tanh(x * v)
    return torch.sigmoid(torch.sort(a, 0)[0] * v + w) * v
""",
}
WRITTEN = {
    "the operand of a cast": """
    z = k.to(torch.float32)
    a = torch.tanh(z + w)
    k.add_(1.0)
    return torch.sigmoid(torch.sort(a, 0)[0] + z) + z
""",
    "what a cast's operand is a view of": """
    v = k[0]
    z = v.to(torch.float32)
    a = torch.tanh(z + w)
    k.add_(1.0)
    return torch.sigmoid(torch.sort(a, 0)[0] + z) + z
""",
    "the operand of a view": """
    v = k.unsqueeze(0)
    a = torch.tanh(v + w)
    k.add_(1.0)
    return torch.sigmoid(torch.sort(a, 1)[0] + v) + v
""",
    "a result": """
    y = w * 2.0
    z = y.to(torch.float32)
    a = torch.tanh(z + w)
    y.add_(1.0)
    return torch.sigmoid(torch.sort(a, 0)[0] + z) + z
""",
}


def both(body, arguments):
    source = f"def f({arguments}):{body}"
    scope = {"torch": torch, "Tensor": torch.Tensor}
    exec(source, scope)
    return scope["f"], script(source)


def operands(device, dtype, size, grads):
    generator = torch.Generator().manual_seed(size)
    shapes = (size, size), (size, size), (size,)
    x, w, c = (
        torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_(grad)
        for s, grad in zip(shapes, grads)
    )
    return x, w, c


def widened(t):
    return t.detach().double().requires_grad_(t.requires_grad)


@pytest.mark.each_value
@pytest.mark.parametrize("case", PARTED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_results_and_gradients_are_eagers(device, case, dtype):
    eager, scripted = both(PARTED[case], "x, w, c")
    with tsfuser.fuser():
        for grads in itertools.islice(itertools.product([True, False], repeat=3), 6):
            for size in (5, 1, 8):
                given = operands(device, dtype, size, grads)
                out, gradients = train(scripted, given)
                wide = [widened(t) for t in given]
                want, expected = train(eager, given, calls=1)
                exact, slopes = train(eager, wide, calls=1)
                for got, theirs, true in zip([out, *gradients], [want, *expected], [exact, *slopes]):
                    assert (got is None) == (theirs is None)
                    if got is not None:
                        assert_matches(
                            got,
                            theirs,
                            true,
                            ops=60,
                            precision=max(dtype, torch.float32, key=lambda d: torch.finfo(d).eps),
                        )


@pytest.mark.parametrize("case", PARTED)
def test_no_graph_loses_its_ops(device, case):
    from tsfuser.frontends.torchscript import passes

    _, scripted = both(PARTED[case], "x, w, c")
    given = operands(device, torch.float32, 6, [True] * 3)
    with tsfuser.fuser(), passes.watching() as seen:
        train(scripted, given)
    whole = scripted.graph_for(*given)
    outside = {
        node.kind() for graph in (whole, *(outcome.graph for outcome in seen)) for node in graph.nodes()
    }
    assert "aten::sort" in outside
    assert not outside & {"aten::mul", "aten::tanh", "aten::sigmoid"}


@pytest.mark.parametrize("case", WRITTEN)
def test_what_is_written_is_read_when_it_was(device, case):
    eager, scripted = both(WRITTEN[case], "w, k")
    with tsfuser.fuser():
        for _ in range(5):
            w = torch.randn(4, 4, device=device, requires_grad=True)
            k = torch.randn(4, device=device) if "view" in case else torch.randn(4, 4, device=device)
            k = torch.randn(3, 4, device=device) if "is a view of" in case else k
            mine, theirs = k.clone(), k.clone()
            outs = [scripted(w, mine), eager(w, theirs)]
            found = [[out, *torch.autograd.grad(out.sum(), w)] for out in outs]
            for got, want in zip([*found[0], mine], [*found[1], theirs]):
                assert_matches(got, want, ops=40)


AUTOCAST = """
def f(x0, c):
    v1 = torch.where(c, c, 1.0)
    a, b = v1 + v1, v1 + 1
    d = b - a
    v1.add_(1)
    e = torch.where(c, v1, d)
    for i in range(3):
        if v1.numel() > 8:
            e = e * 0.5 + d
        else:
            e = e - 1
    return x0 / 2, e, v1
"""


def test_a_cast_of_autocast_of_what_is_written_later(device):
    """It is the operand, where that has the dtype."""
    scope = {"torch": torch}
    exec(AUTOCAST, scope)
    scripted = script(AUTOCAST.replace("(x0, c)", "(x0: Tensor, c: Tensor)"))
    x = torch.tensor(0.5, device=device, requires_grad=True)
    with tsfuser.fuser(), torch.autocast(torch.device(device).type, torch.bfloat16):
        for values in [[True, False]] * 5 + [[False, False, True]]:
            c = torch.tensor(values, device=device)
            for got, want in zip(scripted(x, c), scope["f"](x, c), strict=True):
                assert_matches(got, want)
