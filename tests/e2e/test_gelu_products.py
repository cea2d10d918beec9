"""Gelu in its tanh form is applied by the product of matrices before it
(tsfuser/grouping/gelu_products.py)."""

import copy
import math

import pytest
import torch
from torch import nn

import tsfuser
from kit.opsweep import plain
from kit.support import assert_matches, counted, fuse, groups, script, train
from tsfuser.grouping.gelu_products import GELU_PRODUCT

pytestmark = [pytest.mark.graphs, pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]

HALVES = [torch.bfloat16, torch.float16]
#: Of x[n, k] or x[.., n, k], weight v[m, k] of a linear, w[k, m], b[m]; torch.sort is no op of groups.
LINEAR = {
    "gelu": "return F.gelu(F.linear(x, v, b), approximate='tanh')",
    "in place": "y = F.linear(x, v, b)\n    return F.gelu_(y, approximate='tanh')",
    "asked": "p = F.linear(x, v, b)\n    y = torch.sort(F.gelu(p, approximate='tanh'), 0)[0]\n"
    "    return y * (float(p.size(0) + p.dim()) * 0.0078125)",
    "asked in a branch": "p = F.linear(x, v, b)\n    y = torch.sort(F.gelu(p, approximate='tanh'), 0)[0]\n"
    "    if bool((x.sum() < 1e9).all()):\n        y = y * (float(p.size(0)) * 0.0078125)\n    return y",
    "behind a view": "p = F.linear(x, v, b).view(-1, 2, v.size(0) // 2)\n"
    "    return F.gelu(p, approximate='tanh')",
    "two": "p = F.gelu(F.linear(x, v, b), approximate='tanh')\n"
    "    return F.gelu(F.linear(p, w, x.new_ones([w.size(0)])), approximate='tanh')",
    "written out": "p = F.linear(x, v, b)\n"
    "    return 0.5 * p * (1.0 + torch.tanh(0.7978845608028654 * (p + 0.044715 * torch.pow(p, 3.0))))",
    "in another order": "p = F.linear(x, v, b)\n"
    "    return (torch.tanh((p * p * p * 0.044715 + p) * 0.7978845608028654) + 1) * (p * 0.5)",
    "of another form": "p = F.linear(x, v, b)\n"
    "    return 0.5 * p * (1.0 + torch.tanh(p * 0.7978845608 * (1.0 + 0.044715 * p * p)))",
    "in float32": "p = F.linear(x, v, b)\n    q = p.float()\n"
    "    return (0.5 * q * (1.0 + torch.tanh(0.7978845608028654 * (q + 0.044715 * q ** 3)))).type_as(p)",
}
MATRICES = {
    "addmm": "return F.gelu(torch.addmm(b, x, w), approximate='tanh')",
    "a sum": "return F.gelu(torch.mm(x, w) + b, approximate='tanh')",
    "written out, of addmm": "p = torch.addmm(b, x, w).view(2, -1, w.size(1))\n"
    "    return 0.5 * p * (1.0 + torch.tanh(0.7978845608028654 * (p + 0.044715 * torch.pow(p, 3.0))))",
    "of a cast bias": "p = torch.addmm(b.to(x.dtype), x, w)\n    return F.gelu(p, approximate='tanh')",
}
OTHERS = {
    "relu": "return torch.relu(F.linear(x, v, b))",
    "exact gelu": "return F.gelu(F.linear(x, v, b))",
    "silu": "return F.silu(F.linear(x, v, b))",
    "no bias": "return F.gelu(F.linear(x, v), approximate='tanh')",
    "read twice": "p = F.linear(x, v, b)\n"
    "    return torch.sort(F.gelu(p, approximate='tanh'), 0)[0] + torch.sort(p, 0)[0]",
    "read as a view": "p = F.linear(x, v, b)\n    q = F.gelu(p, approximate='tanh')\n"
    "    return q + p.t().sort(0)[0].t()",
    "written before": "p = F.linear(x, v, b)\n    q = p.view(-1)\n    q.add_(1.0)\n"
    "    return F.gelu(p, approximate='tanh')",
    "more": "return F.gelu(F.linear(x, v, b), approximate='tanh') * torch.sin(x.sum())",
    "in a branch": "p = F.linear(x, v, b)\n    y = v\n    if bool((x.sum() < 1e9).all()):\n"
    "        y = F.gelu(p, approximate='tanh')\n    return y",
    "in a loop": "p = F.linear(x, v, b)\n    y = b\n    for k in range(x.size(0) * 10):\n"
    "        y = y + torch.sort(F.gelu(p, approximate='tanh'), 0)[0][0]\n    return y",
    "an operand is written to": "y = x * 1.0\n    p = torch.mm(y, w)\n    y.add_(1.0)\n"
    "    return torch.sort(F.gelu(p + b, approximate='tanh'), 0)[0] + y.sum()",
    "other numbers": "p = F.linear(x, v, b)\n"
    "    return 0.5 * p * (1.0 + torch.tanh(0.8 * (p + 0.044715 * p * p * p)))",
    "another sign": "p = F.linear(x, v, b)\n"
    "    return 0.5 * p * (1.0 - torch.tanh(0.7978845608028654 * (p + 0.044715 * p * p * p)))",
    "of something else": "p = F.linear(x, v, b)\n    q = torch.sort(x, 0)[0].sum()\n"
    "    return 0.5 * p * (1.0 + torch.tanh(0.7978845608028654 * (p + 0.044715 * p * p * q)))",
    "a column": "return F.gelu(torch.mm(x, w) + b[: x.size(0)].unsqueeze(1), approximate='tanh')",
    "times a number": "return F.gelu(torch.addmm(b, x, w, alpha=2.0), approximate='tanh')",
    "in a list": "p = [F.linear(x, v, b), x]\n    return torch.cat(p, 1)",
    "its dtype": "p = torch.mm(x, w)\n    return torch.sort(x, 0)[0].to(p.dtype)",
    "transposed": "return F.gelu(F.linear(x, v, b).t(), approximate='tanh')",
}


def functions(body):
    source = f"def f(x: Tensor, v: Tensor, w: Tensor, b: Tensor):\n    {body}\n"
    source = source.replace("F.", "torch.ops.aten.")
    return plain(source), script(source)


def operands(device, n=4, k=6, m=6, dtype=torch.float32, narrow=None, lead=()):
    generator = torch.Generator().manual_seed(n + 10 * k + 100 * m)
    made = (torch.randn(s, generator=generator) for s in ((*lead, n, k), (m, k), (k, m), (m,)))
    x, v, w, b = (t.to(device, dtype) for t in made)
    return x, v, w, b.to(narrow or dtype)


def applies_gelu(scripted, inputs):
    return GELU_PRODUCT in str(scripted.graph_for(*inputs))


def check(eager, scripted, inputs, precision=None, ops=1):
    """`ops` is 1: the product rounds once, gelu perhaps again, which is within 8 ulps."""
    exact = eager(*(t.double() for t in inputs))
    assert_matches(scripted(*inputs), eager(*inputs), exact, ops=ops, precision=precision)


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_linear(device, name, dtype):
    eager, scripted = functions(LINEAR[name])
    shapes = [((), 4, 6, 6), ((), 1, 6, 2), ((), 33, 17, 6), ((), 16, 64, 48)]
    if name not in ("two",):
        shapes += [((), 0, 6, 6), ((), 3, 1, 2), ((), 3, 0, 2)]
    with tsfuser.fuser():
        for lead, n, k, m in [shapes[0]] * 3 + shapes:
            m = k if name == "two" else m
            # the second layer may cancel what the first has rounded
            ops = 16 if name == "two" else 1
            check(eager, scripted, operands(device, n, k, m, dtype, lead=lead), ops=ops)
        inputs = operands(device, dtype=dtype)
        assert applies_gelu(scripted, inputs) == (dtype in HALVES)
        left = [node for node in scripted.graph_for(*inputs).nodes() if node.kind() == "aten::linear"]
        assert len(left) == (dtype not in HALVES) * (1 + (name == "two"))
        if name in ("asked", "in another order"):
            assert bool(groups(scripted)) == (name == "in another order" and dtype not in HALVES)


@pytest.mark.parametrize("lead", [(3,), (2, 3), (0,), (1, 1)], ids=str)
@pytest.mark.parametrize("name", ["gelu", "written out"])
def test_more_dims(device, name, lead):
    eager, scripted = functions(LINEAR[name])
    with tsfuser.fuser():
        for shape in [(3,)] * 3 + [lead]:
            check(eager, scripted, operands(device, dtype=torch.bfloat16, lead=shape))
        x, *rest = operands(device, 4, 6, 6, torch.bfloat16, lead=(4,))
        check(eager, scripted, (x.transpose(0, 1), *rest))  # rows do not lie behind each other
        check(eager, scripted, (x[..., :3], rest[0][:, :3], *rest[1:]))
        assert applies_gelu(scripted, operands(device, dtype=torch.bfloat16, lead=(3,)))


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_matrices(device, name, dtype):
    eager, scripted = functions(MATRICES[name])
    wide = torch.float32 if name == "of a cast bias" else dtype
    with tsfuser.fuser():
        for sizes in [(4, 6, 6)] * 3 + [(2, 6, 2), (0, 6, 6), (16, 5, 64), (2, 1, 4)]:
            check(eager, scripted, operands(device, *sizes, dtype, wide))
        assert applies_gelu(scripted, operands(device, dtype=dtype, narrow=wide))
        assert not groups(scripted)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(device, name):
    eager, scripted = functions(OTHERS[name])
    with tsfuser.fuser():
        for sizes in [(4, 6, 6)] * 3 + [(2, 3, 4)]:
            check(eager, scripted, operands(device, *sizes, torch.bfloat16))
        assert not applies_gelu(scripted, operands(device, dtype=torch.bfloat16))


def test_the_last_cast_says_the_dtype(device):
    """In a call with another dtype than the one that was profiled."""
    for last in (".to(torch.bfloat16)", ".type_as(p)"):
        body = f"p = F.linear(x, v, b)\n    return F.gelu(p.float(), approximate='tanh'){last}"
        eager, scripted = functions(body)
        with tsfuser.fuser():
            for _ in range(3):
                check(eager, scripted, operands(device, dtype=torch.bfloat16))
            assert applies_gelu(scripted, operands(device, dtype=torch.bfloat16))
            for dtype in (torch.float32, torch.float16, torch.float64):
                check(eager, scripted, operands(device, dtype=dtype), torch.bfloat16)


def test_a_cast_in_between_stays(device):
    """There the dtype of the result may follow from more than one cast."""
    body = "p = F.linear(x, v, b)\n    q = torch.tanh(0.7978845608028654 * (p + 0.044715 * p ** 3))"
    eager, scripted = functions(body + "\n    return 0.5 * p * (1.0 + q.to(torch.bfloat16))")
    with tsfuser.fuser():
        for dtype in [torch.bfloat16] * 3 + [torch.float32]:
            inputs = operands(device, dtype=dtype)
            check(eager, scripted, inputs, torch.bfloat16)
        assert not applies_gelu(scripted, inputs)


LATER = {
    "its dtype": "p = F.linear(x, v, b)\n"
    "    y = 0.5 * p * (1.0 + torch.tanh(0.7978845608028654 * (p + 0.044715 * p * p * p)))\n"
    "    return torch.tril(y) + torch.zeros(1, dtype=p.dtype, device=x.device)",
    "a wider dtype": "q = F.linear(x, v, b).float()\n"
    "    return F.gelu(q, approximate='tanh').to(torch.bfloat16)",
    "as the product": "p = F.linear(x, v, b)\n    q = p.float()\n"
    "    return (0.5 * q * (1.0 + torch.tanh(0.7978845608028654 * (q + 0.044715 * q * q * q)))).type_as(p)",
    "of its dtype": "p = F.linear(x, v, b)\n    q = p.float()\n"
    "    return (0.5 * q * (1.0 + torch.tanh(0.7978845608028654 * (q + 0.044715 * q * q * q)))).to(p.dtype)",
}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_other_dtypes_later(device, name):
    """There the program runs as it is."""
    eager, scripted = functions(LATER[name])
    with tsfuser.fuser():
        for _ in range(4):
            check(eager, scripted, operands(device, dtype=torch.bfloat16))
        is_known = name != "of its dtype"  # which a group gets as a number
        assert applies_gelu(scripted, operands(device, dtype=torch.bfloat16)) == is_known
        for dtype in (torch.float16, torch.float32, torch.float64, torch.complex64, torch.int64):
            if device != "cpu" and not (dtype.is_floating_point or dtype.is_complex):
                continue  # no product of integers
            inputs = [(3 * t).to(dtype) for t in operands(device)]
            assert_matches(scripted(*inputs), eager(*inputs), ops=4, precision=torch.bfloat16)


@pytest.mark.parametrize("name", ["in place", "gelu", "written out, of addmm"])
def test_what_is_given_later(device, name):
    """Biases, weights and inputs of other shapes and dtypes, each of which eager takes or refuses."""
    eager, scripted = functions({**LINEAR, **MATRICES}[name])
    x, v, w, b = operands(device, dtype=torch.bfloat16)
    with tsfuser.fuser():
        for _ in range(3):
            scripted(x, v, w, b)
        shapes = [
            ((4, 6), (6, 6), (6, 6), (1,)),
            ((4, 6), (6, 6), (6, 6), ()),
            ((4, 6), (6, 6), (6, 6), (4, 6)),
        ]
        shapes += [((6,), (6, 6), (6, 6), (6,)), ((4, 5), (6, 6), (6, 6), (6,)), ((4, 6), (6,), (6,), (6,))]
        shapes += [((4, 6), (6, 6), (6, 6), (5,)), ((2, 3, 2, 6), (6, 6), (6, 6), (6,))]
        for sizes in shapes:
            for dtype in (torch.bfloat16, torch.float64, torch.int64):
                given = [torch.ones(s, device=device).to(dtype) for s in sizes]
                try:
                    want = eager(*given)
                except RuntimeError:
                    with pytest.raises(RuntimeError):
                        scripted(*given)
                else:
                    assert_matches(scripted(*given), want, ops=4)
        with pytest.raises(RuntimeError):
            scripted(x, v.float(), w.float(), b)


@pytest.mark.parametrize("name", ["gelu", "written out"])
@pytest.mark.parametrize(
    "sizes", [(3, 4, 8), (2, 2, 2), (1, 8, 8), (64, 64, 64), (256, 32, 768), (130, 7, 33)]
)
def test_special_values(device, name, sizes):
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -1.0, 3e4, -3e4, 1e-8], device=device)
    eager, scripted = functions(LINEAR[name])
    for dtype in HALVES:
        x, v, w, b = operands(device, *sizes, dtype)
        with tsfuser.fuser():
            for _ in range(3):
                scripted(x, v, w, b)
            bias = special[torch.arange(sizes[2], device=device) % 8].to(dtype)
            inputs = torch.zeros_like(x), torch.zeros_like(v), w, bias
            # what is written out overflows in 16 bits where gelu does not
            exact = eager(*(t.double() for t in inputs)).to(dtype)
            assert_matches(scripted(*inputs), exact, ops=1)


@pytest.mark.parametrize("name", ["in place", "gelu", "written out"])
@pytest.mark.parametrize("first", [True, False])
def test_training_and_inference_in_turn(device, name, first):
    """The op that does both has no derivative."""
    eager, scripted = functions(LINEAR[name])
    for calls in range(8):
        inputs = operands(device, 2 + calls % 3, dtype=torch.bfloat16)
        with tsfuser.fuser():
            if (calls // 2 % 2 == 0) == first:
                inputs = [t.requires_grad_() for t in inputs]
                exact = train(eager, [t.detach().double().requires_grad_() for t in inputs], calls=1)
                out, gradients = train(scripted, inputs, calls=1)
                want, expected = train(eager, inputs, calls=1)
                for k, found in enumerate(zip([out, *gradients], [want, *expected], [exact[0], *exact[1]])):
                    if found[0] is not None or k == 0:
                        assert_matches(*found, ops=4)
            else:
                with torch.no_grad():
                    check(eager, scripted, inputs)


def test_gradients_of_gradients(device):
    eager, scripted = functions(LINEAR["gelu"])
    with tsfuser.fuser():
        for _ in range(3):
            scripted(*operands(device, dtype=torch.bfloat16))
        inputs = [t.double().requires_grad_() for t in operands(device)]
        assert torch.autograd.gradcheck(
            lambda x, v, b: scripted(x, v, inputs[2], b), (inputs[0], inputs[1], inputs[3])
        )


def test_transforms_and_modes(device):
    """Who watches ops sees torch's: forward mode, vmap, a dispatch mode."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    eager, scripted = functions(LINEAR["gelu"])
    inputs = operands(device, dtype=torch.bfloat16)
    with tsfuser.fuser():
        for _ in range(3):
            scripted(*inputs)
        with Watch():
            found = scripted(*inputs)
        assert "aten::gelu" in seen and "aten::_addmm_activation" not in seen
        assert_matches(found, eager(*inputs), ops=4)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(inputs[0], torch.ones_like(inputs[0]))
            tangents = [
                torch.autograd.forward_ad.unpack_dual(f(dual, *inputs[1:])).tangent for f in (scripted, eager)
            ]
        assert_matches(*tangents, ops=4)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.last = nn.Linear(24, 64), nn.Linear(64, 24), nn.Linear(24, 8)

    def forward(self, x):
        x = 0.5 * self.up(x).square()
        return self.last(nn.functional.gelu(self.down(x), approximate="tanh"))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_module(device, compiled, training):
    """In both front ends; of 16 bits itself, or under autocast."""
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(3)
        module = MLP().to(device, dtype).train(training)
        exact = copy.deepcopy(module).double()
        if compiled:
            torch._dynamo.reset()
            run = torch.compile(module, backend="tsfuser", dynamic=True)
        else:
            torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
            run = torch.jit.script(module)
        for n in (5, 5, 5, 5, 7, 1):
            x = torch.randn(2, n, 24, device=device)
            results = []
            for f, given in ((run, x.to(dtype)), (module, x.to(dtype)), (exact, x.to(dtype).double())):
                autocast = torch.autocast(x.device.type, torch.bfloat16, enabled=f is not exact)
                with tsfuser.fuser(), autocast, torch.set_grad_enabled(training):
                    out = f(given)
                found = [out]
                if training:
                    module_of = exact if f is exact else module
                    module_of.zero_grad()
                    out.float().square().sum().backward()
                    found += [p.grad for p in module_of.parameters()]
                results.append([t.detach().clone() for t in found])
            for found in zip(*results):
                assert_matches(*found, ops=8, precision=torch.bfloat16, strides=False)


def test_explain_says_so(device):
    _, scripted = functions(LINEAR["gelu"])
    inputs = operands(device, dtype=torch.bfloat16)
    fuse(scripted, *inputs)
    assert "apply gelu on their way" in str(tsfuser.explain(scripted, *inputs))


def test_new_sizes_compile_nothing(device):
    _, scripted = functions(LINEAR["written out"])
    fuse(scripted, *operands(device, dtype=torch.bfloat16))
    with tsfuser.fuser(), counted() as found:
        for n in (3, 5, 9):
            scripted(*operands(device, n, dtype=torch.bfloat16))
    assert found["kernels_compiled"] == 0
