"""Casts in training whose dtype a call decides (csrc_stubs/torchscript/open_dtypes.h): fused where that is a
dtype of floats, and eager's result, with eager's gradients, where it is not."""

import warnings

import pytest
import torch

import tsfuser
from kit.opsweep import plain
from kit.support import assert_matches, script
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
                    assert_matches(got.detach(), want.detach(), ops=20)


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
        assert error <= 1.5 * theirs_off + torch.finfo(dtype).eps
    with warnings.catch_warnings():
        warnings.simplefilter("error", tsfuser.TsfuserWarning)  # that the function itself runs unfused
        found = tsfuser.explain(scripted, *leaves)
    assert differentiated(found) == ["differentiated part 1, forward", "differentiated part 1, backward"]
    assert dtype == torch.float32 or "aten::to" not in {n.kind for n in found.left_out}
    assert all(report.groups for report in found.graphs if report.title in differentiated(found))
