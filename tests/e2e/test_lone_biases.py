"""Biases that nothing is fused with are added by the product before them (tsfuser/grouping/lone_biases.py),
as in eager."""

import pytest
import torch

import tsfuser
from kit.opsweep import plain
from kit.support import assert_matches, groups, kinds, no_fallback, script, train
from tsfuser.grouping.lone_biases import BIASED

pytestmark = [pytest.mark.graphs, pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]

#: Of x[n, k], w[k, m], b[m]; torch.sort is no op of groups.
ALONE = {
    "addmm": "return torch.sort(torch.addmm(b, x, w), 0)[0]",
    "of a cast": "return torch.sort(torch.addmm(b.to(x.dtype), x, w), 0)[0]",
    "a product and a sum": "return torch.sort(torch.mm(x, w) + b, 0)[0]",
    "sizes": "y = torch.addmm(b, x, w)\n    return torch.sort(y, 0)[0] * float(y.size(0) + y.size(1))",
    "a view": "return torch.sort(torch.addmm(b, x, w).view(-1, 2, w.size(1) // 2), 0)[0]",
}
OTHERS = {
    "more": "return torch.sort(torch.tanh(torch.addmm(b, x, w)), 0)[0]",
    "the product is read": "p = torch.mm(x, w)\n    return torch.sort(b + p, 0)[0] + torch.sort(p, 0)[0]",
    "in a branch": "p = torch.mm(x, w)\n    y = x\n    if bool((x.sum() < 1e9).all()):\n"
    "        y = torch.sort(p + b, 0)[0]\n    return y",
    "in a loop": "p = torch.mm(x, w)\n    y = b\n    for k in range(x.size(0) * 10):\n"
    "        y = y + torch.sort(p + b, 0)[0][0]\n    return y",
    "a number": "return torch.sort(torch.mm(x, w) + 2.0, 0)[0] + b",
    "times a number": "return torch.sort(torch.add(b, torch.mm(x, w), alpha=2), 0)[0]",
    "a column": "return torch.sort(torch.mm(x, w) + b[:3].unsqueeze(1), 0)[0]",
    "of a wider dtype": "return torch.sort(b.double() + torch.mm(x, w), 0)[0]",
    "written before": "y = x * 1.0\n    p = torch.mm(y, w)\n    y.add_(1.0)\n"
    "    return torch.sort(b + p, 0)[0] + y.sum()",
}


def functions(body):
    source = f"def f(x: Tensor, w: Tensor, b: Tensor):\n    x = torch.tanh(x) * 1.5\n    {body}\n"
    return plain(source), script(source)


def operands(device, n=3, k=5, m=8, dtype=torch.float32, narrow=None):
    generator = torch.Generator().manual_seed(n * k * m)
    made = (torch.randn(s, generator=generator) for s in ((n, k), (k, m), (m,)))
    x, w, b = (t.to(device, dtype) for t in made)
    return x, w, b.to(narrow or dtype)


def is_alone(scripted, inputs):
    return BIASED in str(scripted.graph_for(*inputs)) and not any(
        "aten::add" in kinds(g) for g in groups(scripted)
    )


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_product_adds_it(device, name, dtype):
    eager, scripted = functions(ALONE[name])
    wide = torch.float32 if name == "of a cast" else dtype
    with tsfuser.fuser(), no_fallback():
        for sizes in [(3, 5, 8)] * 3 + [(1, 1, 2), (16, 7, 4), (0, 3, 2), (4, 0, 2)]:
            inputs = operands(device, *sizes, dtype, wide)
            exact = eager(*(t.double() for t in inputs))
            assert_matches(scripted(*inputs), eager(*inputs), exact, ops=100)
        assert is_alone(scripted, operands(device, 3, 5, 8, dtype, wide))


@pytest.mark.parametrize("name", ALONE)
def test_training(device, name):
    eager, scripted = functions(ALONE[name])
    with tsfuser.fuser():
        for sizes in [(3, 5, 8), (16, 7, 4), (1, 1, 2)]:
            inputs = [t.requires_grad_() for t in operands(device, *sizes)]
            exact = train(eager, [t.detach().double().requires_grad_() for t in inputs], calls=1)
            out, gradients = train(scripted, inputs)
            want, expected = train(eager, inputs, calls=1)
            for found in zip([out, *gradients], [want, *expected], [exact[0], *exact[1]]):
                assert_matches(*found, ops=100)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(device, name):
    eager, scripted = functions(OTHERS[name])
    with tsfuser.fuser():
        for sizes in [(3, 5, 8)] * 3 + [(3, 2, 4)]:
            inputs = operands(device, *sizes)
            exact = eager(*(t.double() for t in inputs))
            assert_matches(scripted(*inputs), eager(*inputs), exact, ops=100, precision=torch.float32)
        assert not is_alone(scripted, inputs)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (3, 1), (1,), (), (2, 3, 8)], ids=str)
def test_a_bias_of_any_shape(device, shape):
    """What was profiled as a row may be anything later."""
    eager, scripted = functions(ALONE["a product and a sum"])
    x, w, b = operands(device)
    with tsfuser.fuser():
        for _ in range(3):
            scripted(x, w, b)
        other = torch.randn(shape, device=device)
        assert_matches(scripted(x, w, other), eager(x, w, other), ops=50)
        with pytest.raises(RuntimeError):
            scripted(x, w, torch.randn(7, device=device))
        wide = other.double()
        assert_matches(scripted(x, w, wide), eager(x, w, wide), ops=50, precision=torch.float32)


def test_under_autocast(device):
    """Where TorchScript's dtype may be another one than eager's."""
    eager, scripted = functions(ALONE["addmm"])
    _, unfused = functions(ALONE["addmm"])
    kind = torch.device(device).type
    for given in (torch.float32, torch.bfloat16, torch.float16):
        inputs = operands(device, dtype=given)
        with torch.autocast(kind, torch.bfloat16):
            with tsfuser.fuser():
                out = [scripted(*inputs) for _ in range(4)][-1]
            with torch.jit.fuser("none"):
                want = [unfused(*inputs) for _ in range(4)][-1]
        assert out.dtype == want.dtype
        exact = eager(*(t.double() for t in inputs))
        assert_matches(out, want, exact, ops=100, precision=torch.bfloat16)
