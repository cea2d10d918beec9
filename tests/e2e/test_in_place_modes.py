"""Every in-place op of the table, profiled one way and called in another: under autocast, in other dtypes,
with gradients and without. An op in place keeps the dtype of its tensor under autocast, while the functional
form would be cast; its result requires a gradient, which may be zeros, where its tensor does, and none where
no input does. What is made functional is as before."""

import pytest
import torch

import tsfuser
from kit.support import fresh, script
from tsfuser.graph.functionalize import KINDS

pytestmark = [pytest.mark.filterwarnings("ignore::tsfuser.TsfuserWarning"), pytest.mark.graphs]
MAKERS = ("torch.sin(x)", "torch.mm(x, s)")
VALUES = {"Tensor": "s", "number": "0.5", "float": "0.5", "int": "1", "bool": "False"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def calls():
    """`v.mul_(s)`, for each overload whose arguments are tensors and numbers."""
    for kind in KINDS:
        for schema in torch._C._jit_get_schemas_for_operator(kind):
            needed = [a for a in schema.arguments[1:] if not a.has_default_value()]
            known = all(str(a.type) in VALUES for a in needed) and str(schema.arguments[0].type) == "Tensor"
            given = ", ".join(
                (f"{a.name}=" if a.kwarg_only else "") + VALUES.get(str(a.type), "") for a in needed
            )
            name = kind.removeprefix("aten::")
            if known and hasattr(torch.Tensor, name):
                yield f"v.{name}({given})"
            elif known and hasattr(torch, name):
                yield f"torch.{name}(v{', ' * bool(given)}{given})"


def attempt(function, x, s, grad, autocast):
    """dtype, requires_grad and values of the result, and the gradient; None where an error is raised."""
    x = x.clone().requires_grad_(grad)
    try:
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
            out = function(x, s)
    except RuntimeError:
        return None
    if out.requires_grad:
        try:
            out.sum().backward()
        except RuntimeError:  # eager's backward would read what was overwritten
            return out.dtype, True, out.detach(), None
    return out.dtype, out.requires_grad, out.detach(), x.grad


def same(mine, theirs):
    if mine is None or theirs is None or mine[:2] != theirs[:2]:
        return mine is theirs
    pairs = [p for p in zip(mine[2:], theirs[2:]) if p[1] is not None]
    return all(
        a is not None
        and a.dtype == b.dtype
        and torch.allclose(a.double(), b.double(), rtol=0.05, atol=0.05, equal_nan=True)
        for a, b in pairs
    )


def given(device):
    generator = torch.Generator().manual_seed(3)
    return [(torch.rand(4, 4, generator=generator) * 0.8 + 0.1).to(device) for _ in range(2)]


#: With gradients, under autocast.
WAYS = ((False, False), (True, False), (False, True), (True, True))


def problems(call, device, ways):
    """Calls that are neither eager's nor unfused TorchScript's, which has an autocast of its own; profiled in
    the given of `WAYS`, by maker."""
    found = []
    x, s = given(device)
    for maker, profiled in ways.items():
        source = f"def f(x, s):\n    v = {maker}\n    {call}\n    return v\n"
        names = {"torch": torch}
        exec(source, names)
        for trained, profiled_so in profiled:
            mine, plain = script(source), script(source)
            with tsfuser.fuser():
                attempt(mine, x, s, trained, profiled_so)
            with torch.jit.fuser("fuser0"):
                attempt(plain, x, s, trained, profiled_so)
            for dtypes in (
                (DTYPES[1], DTYPES[0]),
                (DTYPES[1], DTYPES[1]),
                (DTYPES[0], DTYPES[1]),
                (DTYPES[2], DTYPES[0]),
            ):
                for autocast, grad in ((True, False), (True, True), (False, not trained)):
                    state = (x.to(dtypes[0]), s.to(dtypes[1]), grad, autocast)
                    expected = attempt(names["f"], *state)
                    with tsfuser.fuser():
                        got = attempt(mine, *state)
                    if expected is None or same(got, expected):
                        continue
                    with torch.jit.fuser("fuser0"):
                        unfused = attempt(plain, *state)
                    if not same(got, unfused):
                        found.append(
                            (
                                maker,
                                trained,
                                profiled_so,
                                dtypes,
                                autocast,
                                grad,
                                got and got[:2],
                                expected[:2],
                            )
                        )
    return found


CALLS = list(dict.fromkeys(calls()))


@pytest.mark.parametrize("call", CALLS)
def test_what_was_profiled_otherwise(call, request):
    """In one way, with one maker, and others for the next call; with --long in all."""
    first = CALLS.index(call)
    ways = {MAKERS[first % 2]: [WAYS[first // 2 % 4]]}
    if request.config.getoption("--long"):
        ways = dict.fromkeys(MAKERS, WAYS)
    assert problems(call, "cpu", ways) == []


def test_the_calls_are_all_ops():
    assert len(set(calls())) > 80


def fill(x, w):
    y = x * 2.0 + w
    y.fill_(3.0)
    return y


def zero(x, w):
    y = x * 2.0 + w
    y.zero_()
    return y


@pytest.mark.parametrize("program", (fill, zero))
def test_what_is_filled_requires_a_gradient_of_zeros(device, program):
    x, w = given(device)
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(3):
            assert torch.equal(scripted(x, w), program(x, w))
        for _ in range(4):
            leaf = x.clone().requires_grad_()
            out = scripted(leaf, w)
            out.sum().backward()
            assert torch.equal(out, program(x, w)) and torch.equal(leaf.grad, torch.zeros_like(x))


def cat(x, w):
    y = torch.cat([x, w])
    y += 1.0
    return y.relu()


def stack(x, w):
    y = torch.stack([x, w])
    y.relu_()
    return y * 2.0


def added(x, w):
    y = torch.sin(torch.tensor([[1.0]], device=x.device))
    y = torch.mm(y, y).expand(8, 4).contiguous()
    y *= torch.cat([x, w])
    return y


def product(x, w):
    y = torch.mm(x, w)
    y.relu_()
    return y * 2.0


def pointwise(x, w):
    y = x * w
    y += 1.0
    return torch.relu(y)


@pytest.mark.each_value
@pytest.mark.parametrize("asked", ((True, True), (True, False), (False, True)), ids=str)
@pytest.mark.parametrize("program", (cat, stack, added, product, pointwise))
def test_what_was_trained_requires_a_gradient_only_where_an_input_does(device, program, asked):
    x, w = given(device)
    scripted = fresh(program)

    def leaves(*asked):
        return [v.clone().requires_grad_(a) for v, a in zip((x, w), asked)]

    with tsfuser.fuser():
        for _ in range(3):
            scripted(*leaves(*asked)).sum().backward()
        for a, b in ((False, False), (True, False), (False, True), (True, True)):
            for grad in (True, False):
                for _ in range(2):
                    with torch.set_grad_enabled(grad):
                        out = scripted(*leaves(a, b))
                        assert out.requires_grad == (grad and (a or b))
                        assert torch.allclose(out, program(x, w))
