"""Views, parts and pairs of tensors in training: TorchScript's autodiff takes their twins, so that what is
before and behind them is in one differentiable graph. What shares memory in eager shares it here, and
gradients are eager's."""

import pytest
import torch

import tsfuser
from kit.opsweep import plain
from kit.support import assert_matches, fresh, groups, kinds, no_fallback, script, train

pytestmark = pytest.mark.graphs


def functions(body):
    """A function of these lines, as Python and scripted. The parameter of masked_fill is what torch asks
    tsfuser about."""
    lines = "".join(f"    {line.strip()}\n" for line in body.split(";"))
    source = f"def f(x: Tensor, w: Tensor, m: Tensor):\n    x = x.masked_fill(m, 0.5)\n{lines}"
    return plain(source), script(source)


def operands(layout="row-major", needed=(True, True)):
    generator = torch.Generator().manual_seed(3)
    x, w = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    x = x.t().contiguous().t() if layout == "column-major" else x
    mask = torch.rand(4, 6, generator=generator) > 0.7
    return x.requires_grad_(needed[0]), w.requires_grad_(needed[1]), mask


ONE_GROUP = [
    "return torch.tanh(torch.relu(x * w).view(2, -1) * 2.0)",
    "return torch.tanh(torch.relu(x * w).view(2, 3, 4) * 2.0).view(4, 6) + 1.0",
    "return torch.sigmoid(torch.tanh(x * w).transpose(0, 1) * 2.0)",
    "return torch.sigmoid(torch.tanh(x * w).reshape(-1, 2).transpose(0, 1) * 2.0)",
    "y = torch.tanh(x * w); return y[:, 0] * 2.0 + y[:, -1]",
    "y = torch.tanh(x * w); return torch.sigmoid(y[1:, :-2] * 2.0) + y[:3, 2:]",
    "y = torch.tanh(x * w); return torch.cat((-y[:, 3:], y[:, :3]), -1) * w.detach() + y",
    "return torch.sigmoid(torch.cat((x * 2.0, torch.tanh(w)), 0) * 2.0)",
    "return torch.sigmoid(torch.cat((x * 2.0, torch.tanh(w), x, w * x), -1) * 2.0)",
    "return torch.sigmoid(torch.stack((x * 2.0, torch.tanh(w), x), 1) * 2.0)",
    "return torch.sigmoid(torch.stack((x * w, x), -1) * 2.0)",
    "return torch.sigmoid(torch.tanh(x * w).flatten() * 2.0)",
    "return torch.sigmoid(torch.tanh(x * w).view(2, 2, 6).flatten(1, 2) * 2.0)",
    "return torch.sigmoid(torch.tanh(x * w)[:, :1].expand(-1, 6) * 2.0) * w",
    "return torch.sigmoid(torch.tanh(x * w)[:1].expand(3, 4, 6) * 2.0)",
    "return torch.sigmoid(torch.tanh(x * w)[:, :1].expand_as(w) * 2.0) * w",
    "return torch.sigmoid(torch.roll(torch.tanh(x * w), 2, 1) * 2.0) * w",
    "return torch.sigmoid(torch.tanh(x * w).roll([-1, 4], [0, -1]) * 2.0) * w",
    "return torch.roll(torch.tanh(x * w).view(2, 2, 3, 2), [1, 0, 2], [0, 1, 2]).sigmoid() * 2.0",
    "return torch.sigmoid(torch.nn.functional.pad(torch.tanh(x * w), [1, 2]) * 2.0)",
    "return torch.sigmoid(torch.nn.functional.pad(torch.tanh(x * w), [-1, 2, 3, -2]) * 2.0)",
    "return torch.sigmoid(torch.nn.functional.pad(torch.tanh(x * w), [1, 0], value=0.0) * 2.0)",
    "return torch.sigmoid(torch.nn.functional.pad(torch.tanh(x * w), [0, 0, 0, 0]) * 2.0)",
]


@pytest.mark.parametrize("body", ONE_GROUP)
def test_a_view_does_not_part_a_group(device, body):
    eager, scripted = functions(body)
    inputs = [t.to(device).detach().requires_grad_(t.requires_grad) for t in operands()]
    with tsfuser.fuser(), no_fallback():
        out, gradients = train(scripted, inputs)
    want, expected = train(eager, inputs, calls=1)
    assert len(groups(scripted)) == 2  # one forward, one backward
    found = {kind for group in groups(scripted) for kind in kinds(group)} - {"tsfuser::pad"}  # no twin
    assert not any(kind.startswith("tsfuser::") for kind in found)
    for got, plain_ in zip([out, *gradients], [want, *expected]):
        assert_matches(got, plain_, ops=40)


def outcome(function, tensors, written):
    """What can be seen of a call, in which the result number `written` is written to, and of its backward."""
    try:
        outs = list(function(*tensors))
        seen = [[(t.requires_grad, t.shape, t.dtype, t.stride()) for t in outs]]
        memory = [t.untyped_storage().data_ptr() for t in [*outs, *tensors]]
        seen.append([memory.index(place) for place in memory])
        if written is not None:
            outs[written].mul_(3.0)
        values = [t.detach().clone() for t in outs]
        weights = [torch.arange(t.numel(), dtype=t.dtype).view(t.shape) for t in outs]
        moving = [(t * v).sum() for t, v in zip(outs, weights) if t.requires_grad]
        leaves = [t for t in tensors if t.requires_grad]
        gradients = torch.autograd.grad(sum(moving), leaves, allow_unused=True) if moving else []
        return seen, [*values, *gradients]
    except RuntimeError as error:
        return str(error), []


ALIASES = [
    "y = torch.tanh(x * w); z = y.view(2, -1); return y, z * 1.0, z",
    "y = torch.tanh(x * w); z = y.view(2, -1); return z, z.sum()",
    "z = torch.tanh(x * w).view(2, -1).transpose(0, 1); return z, z * 2.0",
    "z = x.view(2, -1) if x.is_contiguous() else x.reshape(2, -1); return z, torch.tanh(z * 2.0)",
    "y = torch.tanh(x * w); return y.view(-1), y.transpose(0, 1), y * 2.0",
    "y = x * w; z = y.view(2, -1); z.add_(1.0); return torch.tanh(y) * 2.0, z",
    "y = x * w * 2.0; z = y.view(2, -1); y.add_(1.0); return torch.tanh(z) * 2.0, y",
    "y = x * w * 2.0; z = y.transpose(0, 1); z.mul_(2.0); return y + 1.0, z",
    "u = x * w * 1.5; y = u.reshape(-1); y.add_(1.0); return y, u * 2.0",
    "u = (x * w).transpose(0, 1); y = u.reshape(-1); y.add_(1.0); return y, u * 2.0",
    "y = torch.tanh(x * w).view(-1); return y.detach(), y * 2.0",
    "y = x * w * 2.0; z = y[:, 1:3]; z.mul_(2.0); return y + 1.0, z",
    "y = x * w * 2.0; z = y[1]; v = z[2:]; v.add_(2.0); return y + 1.0, z * 3.0",
    "y = x * w * 2.0; y[0] = 1.0; return y[0] * 2.0, torch.tanh(y)",
    "y = torch.tanh(x * w); z = y[:, 0]; return z, y * 2.0",
    "y = torch.tanh(x * w); z = y[:, 1:]; return z * 2.0, z",
    "y = torch.cat((x * w, x), 1); y.mul_(2.0); return y, torch.tanh(y)",
    "return x[0] * 2.0, x[:, 1:]",
    "a, b = (x * w).split(3, 1); a.mul_(2.0); return a + b, b",
    "y = x * w * 1.5; a, b = y.split(2); return torch.tanh(a) * b, y",
    "y = x * w * 1.5; a, b, c, d = y.unbind(0); y.add_(1.0); return torch.tanh(a) * b, d",
    "y = torch.stack((x * w, x), 1); y.mul_(2.0); return y, torch.tanh(y)",
    "y = (x * w).flatten(); y.add_(1.0); return y, torch.tanh(y)",
    "y = torch.tanh(x * w).flatten(0, 1); return y, y * 2.0",
    "y = (x * w)[:, :1].expand(4, 6); return y, y * 2.0",
    "y = (x > 0).view(-1); return torch.tanh(x * w).view(-1) * y.transpose(0, 0), y",
    "y = torch.tanh(x * w); z = torch.roll(y, 1, 0); return z, y * 2.0",
    "y = torch.roll(torch.tanh(x * w), [1, 2], [0, 1]); y.mul_(2.0); return y * 1.5, x * w",
    "y = x * w * 1.5; z = torch.roll(y, 1, 1); y.add_(1.0); return z * 2.0, y",
    "y = torch.tanh(x * w); z = torch.nn.functional.pad(y, [0, 0]); return z, y * 2.0",
    "y = x * w * 2.0; z = torch.nn.functional.pad(y, [0, 0, 1, 0]); z.mul_(2.0); return y + z[1:], z",
    "y = x * w * 2.0; z = torch.nn.functional.pad(y, [0, 0]); y.add_(1.0); return z * 2.0, y",
]


@pytest.mark.each_value(("body", "written"), ("body", "layout"))
@pytest.mark.parametrize("written", [None, 0, 1])
@pytest.mark.parametrize("layout", ["row-major", "column-major"])
@pytest.mark.parametrize("body", ALIASES)
def test_memory_is_shared_as_in_eager(body, layout, written, request):
    """Where eager raises since a saved tensor was written to, the gradient here may be that of the values
    before the write."""
    ways = [(True, True), (True, False), (False, True), (False, False)]
    every = written is None or request.config.getoption("--long")
    for needed in ways if every else ways[::3]:
        eager, scripted = functions(body)
        with tsfuser.fuser():
            for _ in range(4):
                seen, values = outcome(scripted, operands(layout, needed), written)
        expected, wanted = outcome(eager, operands(layout, needed), written)
        if isinstance(expected, str):
            assert isinstance(seen, str) or "modified by an inplace operation" in expected
            continue
        assert seen == expected
        for mine, theirs in zip(values, wanted):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "body",
    [
        ONE_GROUP[1],
        "return torch.sigmoid(torch.stack((torch.cat((x, w, x * w), 0)[4:8], w), 1) * 2.0)",
        "a, b = (x * w).split(3, 1); c, d, e, f = b.sin().unbind(0); return a * (c * d + f) + b",
        "return (x * w)[:, :1].expand(4, 6) * x * (x * w).flatten().sin().view(4, 6)",
        "return torch.roll((x * w).sin(), [1, -2], [0, 1]) * torch.nn.functional.pad(x * w, [1, -1]).cos()",
    ],
)
def test_double_backward_through_views(device, body):
    _, scripted = functions(body)
    x, w, m = (t.to(device).detach().requires_grad_(t.requires_grad) for t in operands())
    with tsfuser.fuser():
        for _ in range(4):
            scripted(x, w, m).sum().backward()
        assert torch.autograd.gradcheck(lambda x, w: scripted(x, w, m), (x, w), nondet_tol=1e-12)
        assert torch.autograd.gradgradcheck(lambda x, w: scripted(x, w, m), (x, w), nondet_tol=1e-12)


def test_sizes_that_change_from_call_to_call(device):
    def program(x, w, m):
        y = torch.tanh(x.masked_fill(m, 0.5) * w).view(x.size(1), -1)
        return torch.sigmoid(y.transpose(0, 1) * 2.0)

    scripted = fresh(program)
    with tsfuser.fuser():
        for rows, columns in ((4, 6), (4, 6), (4, 6), (3, 5), (7, 2), (1, 5), (6, 1), (0, 4)):
            x, w = (torch.randn(rows, columns, device=device).requires_grad_() for _ in range(2))
            out, gradients = train(scripted, (x, w, x > 0.5), calls=1)
            want, expected = train(program, (x, w, x > 0.5), calls=1)
            for got, plain_ in zip([out, *gradients], [want, *expected]):
                assert_matches(got, plain_, ops=40)


def test_gradients_of_parts_and_pairs_of_many_kinds(device):
    """Steps, ends beyond the tensor, operands of two dtypes, an empty one that may stand beside any, parts
    of several sizes, of which some are not read, and lists that grow or are too long for a twin."""
    for body in (
        "y = torch.tanh(x * w); return y[::2] * 2.0 + y[1::2]",
        "y = torch.tanh(x * w); return y[-9:100, 1:-1] * 2.0",
        "y = torch.tanh(x * w); return y[3:1] * 2.0",
        "return torch.cat((x.float() * 2.0, w * 3.0), 1) * 2.0",
        "return torch.cat((torch.empty(0, dtype=x.dtype, device=x.device), x * w), 1) * 2.0",
        "return torch.cat((x[:0] * 2.0, x * w), 0) * 2.0",
        "return torch.cat((x * w,), 0) * 2.0 + torch.cat((x * 2.0, w, x), 0)[:4]",
        "return torch.cat((x.float() * 2.0, w * 3.0, x.float()), 1) * 2.0",
        "return torch.stack((x.float() * 2.0, w * 3.0), -2) * 2.0",
        "return torch.cat((x * w,) + (x,) + (w, w, w, w, w, x, x), 0) * 2.0",
        "a, b = torch.tanh(x * w).split(4, 1); return a[:, :2] * b",
        "a, b, c = torch.tanh(x * w).split([1, 2, 3], -1); return a * c.cos() + 1.0",
        "a, b, c = torch.tanh(x * w).split_with_sizes([1, 0, 5], -1); return a * c.cos() * b.sum()",
        "a, b, c, d = torch.tanh(x * w).unbind(0); return a * d.cos() + 1.0",
        "a, b = torch.tanh(x * w)[:0].split([3, 3], -1); return a * b.cos() + 1.0",
        "y = torch.tanh(x * w)[0, 0].flatten(); return y * 2.0 + w",
        "l = [x * w, x]; l.append(w); l[0] = x * 2.0; return torch.cat(l, 0) * 2.0",
        "y = x * w; return torch.cat((y, y), -2) * 2.0 + torch.cat((w, y.abs()), -2)",
        "return torch.roll(torch.tanh(x * w), 5) * 2.0 + w",
        "return torch.roll(torch.tanh(x * w)[:0], [1, 2], [0, 1]) * 2.0",
        "return torch.roll(torch.tanh(x * w), [x.size(0), -x.size(1) - 1], [0, 1]) * 2.0 + w",
        "return torch.roll((x * w).view(2, 2, 1, 3, 2), [1, 1, 1, 1], [0, 1, 3, 4]).sin() * 2.0",
        "return torch.nn.functional.pad(torch.tanh(x * w), [0, 6 - x.size(1), 0, 7 - x.size(0)]) * 2.0",
        "return torch.nn.functional.pad(torch.tanh(x * w), [1, 1], value=0.5) * 2.0",
        "return torch.nn.functional.pad(torch.tanh(x * w), [1, 1], 'reflect') * 2.0",
        "return torch.nn.functional.pad(torch.tanh(x * w)[:0], [1, 1, 2, 0]) * x.sum()",
    ):
        eager, scripted = functions(body)
        for needed in ((True, True), (True, False), (False, True)):
            inputs = [t.to(device).detach().requires_grad_(t.requires_grad) for t in operands(needed=needed)]
            want, expected = train(eager, inputs, calls=1)
            with tsfuser.fuser():
                out, gradients = train(scripted, inputs)
            for got, plain_ in zip([out, *gradients], [want, *expected]):
                assert_matches(got, plain_, ops=40, precision=torch.float32, strides=False)


@pytest.mark.parametrize("sizes", ["3", "[1, 2, 3]", "[1, 0, 5]"])
def test_where_parts_end_is_computed_without_parting_a_tensor(sizes):
    body = "a, b = " if sizes == "3" else "a, b, c = "
    _, scripted = functions(f"{body}torch.tanh(x * w).split({sizes}, 1); return torch.sin(a * 2.0) * b.sum()")
    inputs = operands()
    with tsfuser.fuser():
        train(scripted, inputs)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train(scripted, inputs, calls=1)
    assert groups(scripted) and not [e.key for e in profile.key_averages() if "split" in e.key]


@pytest.mark.parametrize(
    "body, said",
    [
        ("a, b = (x * w).split(n, 1); return a * 2.0", "Expected 2 elements in a list but found 3"),
        ("a, b = (x * w).split([2, n], 1); return a * 2.0", "expects split_sizes to sum exactly to 6"),
        ("a, b, c, d = (x * w)[:n].unbind(); return a * 2.0", "Expected 4 elements in a list but found 2"),
        ("return (x * w).flatten(n, 1) * 2.0", "Dimension out of range|cannot come after end_dim"),
        ("return torch.stack((x * w, w[:n]), 0) * 2.0", "equal size"),
        ("return torch.cat((x * w, w[:, :n], x), 0) * 2.0", "Sizes of tensors must match"),
        ("return (x * w).expand(n, 4, 7) * 2.0", "must match the existing size"),
        ("return torch.roll(x * w, [n, 1], [1, 1][:n - 1]) * 2.0", "shifts and dimensions must align"),
        ("return torch.nn.functional.pad(x * w, [0, 1 - n * 4]) * 2.0", "must be non-negative"),
    ],
)
@pytest.mark.filterwarnings("ignore::tsfuser.TsfuserWarning")
def test_an_argument_that_does_not_fit_raises_as_in_eager(device, body, said):
    """At first, and where calls with others have been fused, in which the parts are slices."""
    x, w, _ = (t.to(device) for t in operands())
    source = "def f(x: Tensor, w: Tensor, n: int):\n" + "".join(f"    {s.strip()}\n" for s in body.split(";"))
    fits = {"[2, n]": 4, "split(n": 3, "[:n]": 4, "flatten(n": 0, "[:, :n]": 6}
    good = next((n for text, n in fits.items() if text in body), None)
    scripted = script(source)
    with tsfuser.fuser():
        for _ in range(4 if good is not None else 0):
            scripted(x, w, good).sum().backward()
        for _ in range(3):
            with pytest.raises((RuntimeError, IndexError), match=said):
                scripted(x, w, 2)


def test_a_chunk_that_gets_no_gradient_stays_apart(device):
    """Autodiff's formula of chunks raises for it."""
    eager, scripted = functions(
        "y = torch.sigmoid(w.select(0, -2)); v = w.unsqueeze(0); a, b = y.chunk(2, -1); "
        "z = torch.cat((b, y), 0); return z * 1.0 + (v - v).sum() + y.sum()"
    )
    inputs = [t.to(device).detach().requires_grad_(t.requires_grad) for t in operands(needed=(False, True))]
    want, expected = train(eager, inputs, calls=1)
    with tsfuser.fuser():
        out, gradients = train(scripted, inputs)
    for got, plain_ in zip([out, *gradients], [want, *expected]):
        assert_matches(got, plain_, ops=40, strides=False)


def test_a_pair_in_a_loop_grows_from_nothing(device):
    def program(x, w, m):
        rows = torch.empty(0, dtype=x.dtype, device=x.device)
        for i in range(3):
            rows = torch.cat((rows, torch.tanh(x[i : i + 1] * w[i]).masked_fill(m[0], 0.5) * 2.0), 0)
        return rows * 2.0

    inputs = [t.to(device).detach().requires_grad_(t.requires_grad) for t in operands()]
    scripted = fresh(program)
    with tsfuser.fuser():
        out, gradients = train(scripted, inputs)
    want, expected = train(program, inputs, calls=1)
    for got, plain_ in zip([out, *gradients], [want, *expected]):
        assert_matches(got, plain_, ops=40)


def test_a_size_that_does_not_fit_raises_as_in_eager(device):
    _, scripted = functions("return torch.tanh((x * w).view(5, -1) * 2.0)")
    x, w, m = (t.to(device) for t in operands())
    with tsfuser.fuser():
        for _ in range(4):
            with pytest.raises(RuntimeError, match="invalid for input of size 24"):
                scripted(x, w, m)


VIEWS = {
    "flatten": "z.flatten()",
    "view": "z.view(-1)",
    "reshape": "z.reshape(2, 2)",
    "transpose": "z.transpose(0, -1)",
    "select": "z[1]",
    "slice": "z[:2]",
    "split": "torch.split(z, 2)[0]",
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("written", ["v.type_as(x)", "torch.dropout(v, 0.5, False)"], ids=["cast", "dropout"])
def test_a_write_that_alias_analysis_does_not_see_stays_before_what_reads_the_view(device, view, written):
    """No schema says that the result of such an op may be its operand. Where a view is in a differentiable
    graph, torch would move what reads it, and the write, behind that graph."""
    source = f"def f(x: Tensor, z: Tensor):\n    v = {view}\n    s = {written}\n    s.fill_(1.5)\n"
    source += "    return v * x, s\n"
    eager, scripted = plain(source), script(source)
    with tsfuser.fuser():
        for _ in range(5):
            x, z = torch.full((), 2.0, device=device, requires_grad=True), torch.ones(4, device=device)
            for result, wanted in zip(scripted(x, z), eager(x, z.clone())):
                assert torch.equal(result, wanted)
