"""In-place ops that are made functional before autodiff, so that training is fused, and those that must not
be: results, gradients and what is left in the inputs are eager's."""

import random

import pytest
import torch
from torch import Tensor, nn

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.support import all_graphs, assert_matches, fresh, groups, kinds, no_fallback, script, stored, train

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning"), pytest.mark.graphs]


def compare(function, *inputs, ops=20, precision=None):
    """Trains `function` eager and scripted on equal inputs; returns the scripted one. Gradients of all
    inputs that require them are compared, too."""
    mine = [
        x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in inputs
    ]
    expected, wanted = train(function, inputs, calls=1)
    scripted = fresh(function)
    with tsfuser.fuser():
        out, gradients = train(scripted, mine)
    assert_matches(out, expected, ops=ops, precision=precision)
    for got, want in zip(gradients, wanted):
        assert (got is None) == (want is None)
        if want is not None:
            assert_matches(got, want, ops=ops, strides=False, precision=precision)
    return scripted


def in_place_ops(scripted):
    return sorted(
        n.kind()
        for g in all_graphs(scripted)
        for kind in ("aten::add_", "aten::mul_", "aten::relu_")
        for n in g.findAllNodes(kind, True)
    )


def grown(*shape, **options):
    return torch.randn(*shape, **options).requires_grad_()


def test_blocks_inside_of_blocks_and_what_follows_them(device):
    """Torch asks about the op in the branch first; the graph is prepared as a whole then."""

    def f(x, w, deep: bool, mask):
        z = x
        if deep:
            y = torch.mm(x, w)
            y += 1.0
            z = torch.where(mask, torch.tanh(y), 0.5)
        u = z * 2.0
        u.mul_(w)
        return torch.sigmoid(torch.where(mask, u, 1.0))

    mask = torch.rand(4, 4) > 0.5
    x, w = grown(4, 4, device=device), grown(4, 4, device=device)
    scripted = compare(f, x, w, True, mask.to(device))
    assert in_place_ops(scripted) == []
    graph = scripted.graph_for(x, w, True, mask.to(device))
    # a joint graph goes on behind the branch
    assert len(graph.findAllNodes("prim::DifferentiableGraph", True)) == 2 - by_joint_graphs()
    assert not graph.findAllNodes("aten::where", True)


def test_a_chain_of_writes_is_fused_in_training(device):
    def f(x, w, o):
        y = torch.mm(x, w)
        y += o
        y.mul_(0.5)
        y += o
        y.relu_()
        return torch.sigmoid(y)

    scripted = compare(f, grown(5, 4, device=device), grown(4, 6, device=device), grown(5, 6, device=device))
    forward, backward = groups(scripted)
    assert in_place_ops(scripted) == []
    assert kinds(forward).count("aten::add") == 2 and "aten::relu" in kinds(forward)
    assert len(kinds(backward)) > 6


def test_the_module_way_conv_norm_relu_and_residual(device):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn, self.relu = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            out = self.bn(self.conv(x))
            out += x
            return self.relu(out)

    torch.manual_seed(0)
    plain = Block().to(device)
    module = Block().to(device)
    module.load_state_dict(plain.state_dict())
    x = torch.randn(2, 3, 4, 4, device=device)
    (scripted,) = (torch.jit.script(module),)
    expected, _ = train(plain, [x])
    with tsfuser.fuser(), no_fallback():
        out, _ = train(scripted, [x])
    assert_matches(out, expected, ops=30)
    for (name, mine), theirs in zip(module.named_parameters(), plain.parameters()):
        assert_matches(mine.grad, theirs.grad, ops=60, strides=False), name
    assert all(map(torch.allclose, module.buffers(), plain.buffers()))
    assert [k for k in kinds(groups(scripted)[0]) if k == "aten::relu"] and in_place_ops(scripted) == [
        "aten::add_"  # the count of batches, which the module keeps
    ]


def test_nothing_but_the_result_of_a_relu_is_kept_for_backward(device):
    """Autodiff keeps the operand of the cast that keeps the dtype; behind a relu, the relu's result."""

    def f(x, w, o):
        y = torch.mm(x, w)
        y *= 2.0
        y += o
        y.relu_()
        return torch.mm(y, w)

    scripted = compare(f, grown(4, 4, device=device), grown(4, 4, device=device), grown(4, 4, device=device))
    forward = groups(scripted)[0]
    assert "aten::relu" in kinds(forward) and stored(forward) <= 2


@pytest.mark.parametrize(
    "mine, other", [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float64")]
)
def test_the_dtype_stays_that_of_the_tensor(device, mine, other):
    def f(x, o):
        y = x * 2
        y += o
        y *= o
        return y.relu()

    x = torch.randn(4, 8, device=device).to(getattr(torch, mine)).requires_grad_()
    o = torch.randn(4, 8, device=device).to(getattr(torch, other)).requires_grad_()
    scripted = compare(f, x, o, precision=x.dtype)
    assert scripted(x, o).dtype == x.dtype and in_place_ops(scripted) == []


def test_without_gradients_the_dtype_stays_too(device):
    def f(x, o):
        y = x * 2
        y += o
        y.mul_(o)
        return y.relu()

    x, o = torch.randn(4, 8, device=device).half(), torch.randn(4, 8, device=device)
    scripted = fresh(f)
    with tsfuser.fuser(), torch.no_grad():
        for _ in range(4):
            assert_matches(scripted(x, o), f(x, o), ops=4)
    assert len(groups(scripted)) == 1


def test_a_dtype_that_does_not_take_the_result_raises_as_in_eager():
    def f(x):
        y = x * 2
        y *= 0.5
        return y

    with tsfuser.fuser(), pytest.raises(RuntimeError, match="can't be cast"):
        fresh(f)(torch.arange(4))


# ---- what stays in place


def test_a_view_sees_the_write(device):
    def f(x, w):
        y = torch.mm(x, w)
        v = y.view(-1)
        y.relu_()
        return v * 2.0 + 1.0

    assert in_place_ops(compare(f, grown(4, 4, device=device), grown(4, 4, device=device))) == ["aten::relu_"]


def test_what_was_read_before_keeps_its_value(device):
    def f(x, w):
        y = torch.mm(x, w)
        z = y * 2.0 + 1.0
        y.mul_(3.0)
        return z + y

    assert in_place_ops(compare(f, grown(4, 4, device=device), grown(4, 4, device=device))) == ["aten::mul_"]


def test_the_callers_tensor_is_changed(device):
    def f(x):
        x += 1.0
        return torch.relu(x) * 2.0

    scripted, x = fresh(f), torch.zeros(4, device=device)
    with tsfuser.fuser():
        for k in range(1, 5):
            assert torch.equal(scripted(x), torch.full_like(x, 2.0 * k)) and torch.equal(
                x, torch.full_like(x, k)
            )


def test_dropout_outside_of_training_hands_its_operand_on(device):
    def f(x, w):
        y = torch.mm(x, w)
        z = torch.nn.functional.dropout(y, 0.5, False)
        z += 1.0
        return torch.relu(y) * z

    compare(f, grown(4, 4, device=device), grown(4, 4, device=device))


def test_a_write_without_gradients_leaves_the_history(device):
    def f(x, w):
        y = torch.mm(x, w)
        with torch.no_grad():
            y += 1.0
        return torch.relu(y) * y

    assert in_place_ops(compare(f, grown(4, 4, device=device), grown(4, 4, device=device))) == ["aten::add_"]


def test_branches_and_loops(device):
    def f(x, w, flag: bool, n: int):
        y = torch.mm(x, w)
        if flag:
            y.relu_()
        for _ in range(n):
            z = y * 0.5
            z += x
            z.sigmoid_()
            y = torch.mm(z, w)
        y += 1.0
        return torch.tanh(y)

    x, w = grown(4, 4, device=device), grown(4, 4, device=device)
    eager = [train(f, (x, w, flag, n), calls=1) for flag, n in ((True, 3), (False, 2))]
    scripted = fresh(f)
    with tsfuser.fuser():
        for (flag, n), (expected, wanted) in zip(((True, 3), (False, 2)), eager):
            out, gradients = train(scripted, (x, w, flag, n))
            assert_matches(out, expected, ops=50)
            for got, want in zip(gradients, wanted):
                assert_matches(got, want, ops=200, strides=False)


# ---- made-up programs

STEPS = (
    "{a} + {b}", "{a} * 0.5", "torch.relu({a})", "torch.sigmoid({a})", "torch.mm({a}, {b})", "{a}.t()",
    "{a}.view(16).view(4, 4)", "torch.tanh({a})", "{a} - {b}", "{a} * {b}", "{a}.type_as({b})",
    "torch.nn.functional.dropout({a}, 0.5, False)", "torch.mm({a}, {b})", "{a}.contiguous()",
)  # fmt: skip
WRITES = (
    "{a} += {b}", "{a}.relu_()", "{a}.mul_(0.5)", "{a} *= {b}", "{a}.sigmoid_()", "{a}.tanh_()",
    "{a} -= {b}",
    "{a}.add_({a})", "{a}[0].add_(1.0)",
)  # fmt: skip


def program(seed):
    """Lines that write in place to what they have made, often."""
    choose = random.Random(seed)
    values, lines = ["x", "w"], []
    for i in range(choose.randint(4, 12)):
        a, b = choose.choice(values[-3:]), choose.choice(values)
        if choose.random() < 0.45 and a not in ("x", "w"):
            lines.append(choose.choice(WRITES).format(a=a, b=b))
        else:
            lines.append(f"v{i} = " + choose.choice(STEPS).format(a=a, b=b))
            values.append(f"v{i}")
    result = " + ".join(choose.sample(values, min(3, len(values))))
    return "\n    ".join(["def program(x, w):", *lines, f"return {result}"]) + "\n"


def gradients_of(function, seed, calls):
    """Results and gradients, or the error of backward: eager does not differentiate what was overwritten."""
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(4, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    return train(function, (x, w), calls)


def equal(mine, theirs):
    if mine is None or theirs is None:
        return mine is theirs
    return torch.allclose(mine, theirs, rtol=1e-8, atol=1e-8)


def check(seed):
    """Whether the program could be compared: not where eager refuses to run backward, since something that
    it needs was overwritten, nor where unfused TorchScript is not eager (it takes dropout for a new
    tensor)."""
    source = program(seed)
    names = {"torch": torch}
    exec(source, names)
    plain, fused = (torch.jit.CompilationUnit(source).program for _ in range(2))
    try:
        expected = gradients_of(names["program"], seed, 1)
        with torch.jit.fuser("fuser0"):
            out, gradients = gradients_of(plain, seed, 4)
    except RuntimeError:
        return False
    if not all(map(equal, [out, *gradients], [expected[0], *expected[1]])):
        return False
    with tsfuser.fuser():
        out, gradients = gradients_of(fused, seed, 4)
    assert equal(out, expected[0]), f"result, seed {seed}\n{source}"
    assert all(map(equal, gradients, expected[1])), f"gradient, seed {seed}\n{source}"
    return True


def test_programs_that_write_in_place_have_eagers_gradients():
    assert sum(map(check, range(40))) > 10


@pytest.mark.long
def test_many_programs_that_write_in_place_have_eagers_gradients():
    assert sum(map(check, range(1000, 2500))) > 500


def test_modules_with_optional_parts(device):
    """A shortcut that is None, or not: the write is to a new tensor either way."""

    class Block(nn.Module):
        def __init__(self, shortcut: nn.Module | None):
            super().__init__()
            self.linear, self.shortcut = nn.Linear(4, 4), shortcut

        def forward(self, x: Tensor) -> Tensor:
            identity = x
            out = self.linear(x)
            if self.shortcut is not None:
                identity = self.shortcut(x)
            out += identity
            return torch.relu_(out)

    for shortcut in (None, nn.Linear(4, 4)):
        module = Block(shortcut).to(device)
        x = grown(3, 4, device=device)
        expected, (wanted,) = train(module, [x])
        scripted = torch.jit.script(module)
        with tsfuser.fuser():
            out, (got,) = train(scripted, [x])
        assert_matches(out, expected, ops=20)
        assert_matches(got, wanted, ops=20)
        assert in_place_ops(scripted) == []


def test_filling_in_place_leaves_the_layout(device):
    """`masked_fill` would give a row-major tensor."""

    def program(x: Tensor, m: Tensor):
        y = x * 2.0 + 1.0
        y.masked_fill_(m, 0.5)
        return y

    scripted = fresh(program)
    with tsfuser.fuser():
        for shape in ((3, 4), (3, 4), (3, 4), (5, 2)):
            x = torch.rand(shape, device=device).t()
            m = torch.rand(x.shape, device=device) > 0.5
            got, want = scripted(x, m), program(x, m)
            assert torch.equal(got, want) and got.stride() == want.stride()
        assert "write that to have it fused" in str(tsfuser.explain(scripted, x, m))


def test_a_concatenation_comes_before_a_write_to_what_it_reads(device):
    """Its operands stand in a list, which nobody writes to."""

    def joined(x):
        both = torch.cat([x, x], -1)
        x.sigmoid_()
        return both >= 1

    scripted = fresh(joined)
    with tsfuser.fuser():
        for _ in range(4):
            assert scripted(torch.full((2, 2), 2.0, device=device)).all()


RESIDUAL = """
def block(x, w, scale):
    y = torch.mm(x, w) * scale
    y += x
    z = torch.mm(y, w)
    return {result} + z * z
"""


@pytest.mark.parametrize("result", ["y * 2.0", "y.mul_(2.0)"])
def test_a_residual_that_autocast_casts_for_its_reader(device, result):
    """Autocast's cast may hand the sum on, to what only reads it: a product. What is written to later is left
    alone."""

    def trained(f, dtype):
        made = torch.Generator().manual_seed(2)
        x, w, s = (torch.randn(n, generator=made) / 2 for n in ((6, 8), (8, 8), (8,)))
        x, w, s = (t.to(device).requires_grad_() for t in (x, w, s))
        with torch.autocast(device, dtype, enabled=dtype is not None):
            y = f(x * 1.0, w, s)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, w, s))]

    scripted = script(RESIDUAL.format(result=result))
    exec(RESIDUAL.format(result=result), {"torch": torch}, eager := {})
    others = (None, torch.bfloat16) if result == "y * 2.0" else ()  # else eager has saved what is written to
    with tsfuser.fuser():
        for dtype in (torch.bfloat16,) * 4 + others:
            got, want = trained(scripted, dtype), trained(eager["block"], dtype)
            for mine, theirs in zip(got, want, strict=True):
                assert mine.dtype == theirs.dtype
                rounding = torch.finfo(dtype or torch.float32).eps
                assert (mine - theirs).abs().max() <= 4 * rounding * theirs.abs().max()
        optimised = torch.jit.last_executed_optimized_graph()
    if not by_joint_graphs():  # the graph is a call then
        assert (optimised.findNode("aten::add_", True) is None) == (result == "y * 2.0")


@pytest.mark.parametrize("made", ["x * 1", "x + 0", "1 * x", "x / 1"])
@pytest.mark.parametrize("write", ["sub_(w)", "neg_()", "mul_(2)", "add_(w)"])
def test_an_identity_of_bools_gives_numbers(made, write, device):
    """torch drops it, once nothing writes to its result: a bool would come instead."""
    source = f"def f(x, w):\n    y = {made}\n    y.{write}\n    return y, torch.exp(y * 0.5)\n"
    x, w = torch.rand(4, 6, device=device) > 0.5, torch.arange(6, device=device)
    scripted, plain = script(source), {}
    exec(source, {"torch": torch}, plain)
    with tsfuser.fuser(), torch.no_grad():
        for _ in range(4):
            for ours, eager in zip(scripted(x, w), plain["f"](x, w), strict=True):
                assert_matches(ours, eager, ops=2)


@pytest.mark.parametrize("write", ["abs_().add_(1)", "neg_()"])
def test_an_identity_of_bools_that_a_group_computes(write, device):
    """Not the group of the comparison: its fallback, which other sizes take, has no write."""
    scripted = script(f"def f(x):\n    y = (x > 0) * 1\n    y.{write}\n    return y * x\n")
    with tsfuser.fuser(), torch.no_grad():
        for size in (2, 1, 1, 3):
            for _ in range(4):
                x = torch.randn(size, device=device)
                y = (x > 0) * 1
                expected = (y.abs() + 1 if "abs" in write else -y) * x
                assert_matches(scripted(x), expected, ops=2)


@pytest.mark.parametrize("first", [torch.float32, torch.int64])
@pytest.mark.parametrize("write", ["round_()", "neg_()", "mul_(2)"])
@pytest.mark.parametrize("made", ["x * 1", "x + 0"])
def test_an_identity_of_bools_in_a_graph_for_other_dtypes(made, write, first, device):
    """The fallback graph runs: torch drops the identity there, too."""
    source = (
        f"def f(x, w):\n    y = {made}\n    y.{write}\n    return torch.tanh(y * 0.5) * 2, torch.exp(w) * 2\n"
    )
    x, w = torch.rand(4, 6, device=device) > 0.5, torch.rand(6, device=device)
    scripted, plain = script(source), {}
    exec(source, {"torch": torch}, plain)
    with tsfuser.fuser(), torch.no_grad():
        for given in (x.to(first), x):
            for _ in range(4):
                for ours, eager in zip(scripted(given, w), plain["f"](given, w), strict=True):
                    assert_matches(ours, eager, ops=4)
