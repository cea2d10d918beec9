"""Casts in training whose dtype a call decides (csrc_stubs/torchscript/open_dtypes.h): fused where that is a
dtype of floats, and eager's result, with eager's gradients, where it is not."""

import warnings

import pytest
import torch

import tsfuser
from kit.opsweep import plain
from kit.support import assert_matches, groups, kinds, script
from tsfuser import _C

pytestmark = pytest.mark.graphs

#: t of x[4, 8] and w[4, 8], which require gradients, and of `like`, of any dtype, which requires none. Casts
#: of relu, and no fractions near whole numbers: a rounding decides nothing.
CASTS = {
    "type_as": "y.type_as(like)",
    "to its dtype": "y.to(like.dtype)",
    "with a device": "y.to(x.device, like.dtype)",
    "to what it promotes": "y.to((like * 2).dtype)",
    "like what is computed": "y.type_as(torch.relu(like + 1))",
    "like what is chosen": "y.type_as(torch.where(like > 0, like, like))",
    "like what is compared": "y.type_as(like > 1)",
    "like what is cast": "y.type_as(w.type_as(like))",
    "to whole numbers": "y.to(x.device, torch.int64)",
    "of no gradient": "y.detach().to(like.dtype)",
    "like what requires one": "y.type_as(w)",
}
PROGRAM = """
def f(x: Tensor, w: Tensor, like: Tensor):
    y = torch.relu(x * 2.0)
    t = {cast}
    return (t + 1) * torch.relu(w) * 0.5, t
"""
DTYPES = {"i": torch.int64, "f": torch.float32, "d": torch.float64, "b": torch.bool}


def a_call(like: torch.dtype, generator: torch.Generator, device: str) -> list[torch.Tensor]:
    x = torch.randint(-8, 8, (4, 8), generator=generator) * 0.25 + 0.0625
    w = torch.randn(4, 8, generator=generator)
    made = torch.randint(0, 3, (4, 8), generator=generator).to(like)
    return [x.to(device), w.to(device), made.to(device)]


def results_and_gradients(function, given):
    leaves = [given[0].clone().requires_grad_(), given[1].clone().requires_grad_(), given[2].clone()]
    results = function(*leaves)
    wanted = [t for t in results if t.requires_grad]
    sum((t * t).sum() for t in wanted).backward()
    return list(results), [t.grad for t in leaves]


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("calls", ["iiiifdfbi", "ffffibdif", "ddddfibd", "bbbbfbii"])
def test_no_gradient_passes_what_is_no_float(device, cast, calls):
    source = PROGRAM.format(cast=CASTS[cast])
    eager, scripted = plain(source), script(source)
    generator = torch.Generator().manual_seed(len(cast))
    with tsfuser.fuser():
        for number, dtype in enumerate(calls):
            given = a_call(DTYPES[dtype], generator, device)
            mine, slopes = results_and_gradients(scripted, given)
            theirs, expected = results_and_gradients(eager, given)
            assert [(t.dtype, t.requires_grad) for t in mine] == [
                (t.dtype, t.requires_grad) for t in theirs
            ], number
            assert [g is None for g in slopes] == [g is None for g in expected], number
            for got, want in zip(mine + slopes, theirs + expected):
                if want is not None:
                    assert_matches(got.detach(), want.detach(), ops=4)


@pytest.mark.parametrize(
    "cast", [name for name in CASTS if name not in ("to whole numbers", "of no gradient")]
)
def test_what_is_around_the_cast_is_fused_and_runs_directly(device, cast):
    """Also where no check of torch says that the dtype is one of floats."""
    scripted, generator = script(PROGRAM.format(cast=CASTS[cast])), torch.Generator().manual_seed(2)
    given = a_call(torch.float32, generator, device)
    with tsfuser.fuser():
        for _ in range(4):
            results_and_gradients(scripted, given)
        before = _C.direct_calls()
        results_and_gradients(scripted, given)
        assert cast == "like what is compared" or _C.direct_calls() > before
    fused = {kind for group in groups(scripted) for kind in kinds(group)}
    assert cast == "like what is compared" or {"aten::relu", "aten::mul"} <= fused


#: Casts to the dtype of a tensor that the operand does not depend on, which torch may not note, stand between
#: groups.
ELSEWHERE = {
    "nothing reads it": "z = 0",
    "another result is computed of it": "z = torch.tanh(like)",
    "another result, behind what autodiff does not take": "z = torch.sort(torch.tanh(like), 0)[0]",
}


@pytest.mark.parametrize("reader", ELSEWHERE)
def test_a_cast_to_the_dtype_of_another_tensor_leaves_the_rest_fused(device, reader):
    lines = [
        ELSEWHERE[reader],
        "y = torch.relu(x * 2.0) + 1",
        "return torch.tanh(y.to(like.dtype) * 2.0) * 0.5, z",
    ]
    source = "def f(x: Tensor, like: Tensor):\n    " + "\n    ".join(lines) + "\n"
    eager, scripted = plain(source), script(source)
    generator = torch.Generator().manual_seed(4)
    with tsfuser.fuser():
        for dtype in [torch.float32] * 4 + [torch.float64, torch.int64, torch.float32]:
            x, _, like = (t.to(device) for t in a_call(dtype, generator, device))
            both = []
            for function in (scripted, eager):
                leaf = x.clone().requires_grad_()
                result = function(leaf, like)[0]
                assert result.dtype == torch.promote_types(dtype, torch.float32)
                if result.requires_grad:
                    result.sum().backward()
                both.append((result.detach(), leaf.grad))
            (mine, slope), (theirs, expected) = both
            assert_matches(mine, theirs, ops=4)
            assert (slope is None) == (expected is None)
            if slope is not None:
                assert_matches(slope, expected, ops=4)
    assert {"aten::relu", "aten::tanh"} <= {kind for group in groups(scripted) for kind in kinds(group)}


#: Of w[4, 8] in float16 without a gradient, x and y[4, 8] with one, in float32 and bfloat16: x gets none.
NOT_REACHED = {
    "a cast of a cast": "return torch.relu(y * 2.0).type_as(x.type_as(w))",
    "a cast of a product": "return (torch.tanh(y) * 2.0).to((x * w).dtype) * 2.0",
}


@pytest.mark.parametrize("program", NOT_REACHED)
def test_what_is_asked_for_its_dtype_gets_no_gradient(device, program):
    source = f"def f(w: Tensor, x: Tensor, y: Tensor):\n    {NOT_REACHED[program]}\n"
    generator = torch.Generator().manual_seed(3)
    w, x, y = (torch.randn(4, 8, generator=generator).to(device) for _ in range(3))
    for function in (plain(source), script(source)):
        with tsfuser.fuser():
            for _ in range(5):
                leaves = x.clone().requires_grad_(), y.bfloat16().requires_grad_()
                function(w.half(), *leaves).float().sum().backward()
                assert leaves[0].grad is None and leaves[1].grad is not None


CHAINS = {"products": "z = z * z", "joins": "z = torch.cat([z[:2], z[2:]])"}


@pytest.mark.parametrize("step", CHAINS)
def test_the_dtype_of_a_long_chain_is_asked_in_no_time(device, step):
    """Each step has two ways to the one before, and so 2 ** 60 ways lead to the first."""
    steps = f"    {CHAINS[step]}\n" * 60
    source = f"def f(x: Tensor, z: Tensor):\n{steps}    return torch.tanh(x.to(z.dtype) * 2.0) * z\n"
    scripted = script(source)
    with tsfuser.fuser():
        for _ in range(4):
            x, z = (torch.ones(4, device=device).requires_grad_() for _ in range(2))
            found = scripted(x, z)
            found.sum().backward()
    assert_matches(found.detach(), torch.tanh(torch.full_like(x, 2.0)).detach(), ops=2)


NORM = """
def f(x: Tensor, w: Tensor):
    h = x.to(torch.float32)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)
"""
ATTENTION = """
def f(q: Tensor, k: Tensor, v: Tensor, m: Tensor):
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.125 + m
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()
"""


ROTARY = """
def f(q: Tensor, k: Tensor, v: Tensor, m: Tensor, cos: Tensor, sin: Tensor):
    q = q * cos + torch.cat((-q[..., 16:], q[..., :16]), -1) * sin
    k = k * cos + torch.cat((-k[..., 16:], k[..., :16]), -1) * sin
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.125 + m
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()
"""


def differentiated(found) -> list[str]:
    return [report.title for report in found.graphs if report.title.startswith("differentiated part")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "source, shapes, narrow",
    [
        (NORM, [(4, 6, 64), (64,)], ()),
        (ATTENTION, [(2, 3, 16, 32)] * 3 + [(16, 16)], (3,)),
        (ROTARY, [(2, 3, 16, 32)] * 3 + [(16, 16)] + [(16, 32)] * 2, (3, 4, 5)),
    ],
    ids=["norm", "attention", "rotary"],
)
def test_a_cast_back_is_in_one_graph_with_what_it_is_between(device, dtype, source, shapes, narrow):
    """As models of transformers have it: autodiff's graph used to end at the cast. `explain` looks into the
    graph also where it gives a view."""
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    leaves = [t.requires_grad_(i not in narrow) for i, t in enumerate(given)]
    scripted, eager = script(source), plain(source)
    with tsfuser.fuser():
        before = _C.direct_calls()
        for _ in range(5):
            mine = scripted(*leaves)
            slopes = torch.autograd.grad(mine.float().pow(2).sum(), [t for t in leaves if t.requires_grad])
        assert _C.direct_calls() > before
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    exact = plain(source.replace("torch.float32", "torch.float64"))(*wide)
    wanted = torch.autograd.grad(exact.pow(2).sum(), [t for t in wide if t.requires_grad])
    theirs = eager(*leaves)
    rounded = torch.autograd.grad(theirs.float().pow(2).sum(), [t for t in leaves if t.requires_grad])
    for got, other, want in zip([mine, *slopes], [theirs, *rounded], [exact, *wanted]):
        assert got.dtype == dtype
        scale = want.abs().max()
        error, theirs_off = (got - want).abs().max() / scale, (other - want).abs().max() / scale
        assert error <= 1.5 * theirs_off + torch.finfo(dtype).eps / 4
    with warnings.catch_warnings():
        warnings.simplefilter("error", tsfuser.TsfuserWarning)  # that the function itself runs unfused
        found = tsfuser.explain(scripted, *leaves)
    assert differentiated(found) == ["differentiated part 1, forward", "differentiated part 1, backward"]
    assert dtype == torch.float32 or "aten::to" not in {n.kind for n in found.left_out}
    assert all(report.groups for report in found.graphs if report.title in differentiated(found))
