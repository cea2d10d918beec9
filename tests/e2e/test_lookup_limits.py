"""Where index_select and gather end: indices that are out of range, and what stays outside of groups."""

import warnings

import pytest
import torch

import tsfuser
from kit.lookups import LOOKUPS, compare, failure, indices
from kit.support import assert_matches, counted, fuse, groups, kinds, no_fallback, script

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]
HOST = pytest.mark.parametrize("target", ["cpu", "cpu-fibers"])


# ---- indices out of range

# on the host only: CUDA's context does not survive one
WRONG = {
    "x.index_select(0, i) * 2.0 + 1.0": (5,),
    "x.index_select(1, i).exp() + 1.0": (7,),
    "torch.softmax(x.index_select(0, i), 1)": (33,),
    "(x.index_select(0, i) * 2.0).sum(0)": (200,),
    "x.gather(1, i) * 2.0 + 1.0": (4, 9),
    "(x.gather(0, i) * 2.0).sum()": (5, 37),
    "(x.index_select(0, i * 1 + 0) * 2.0).sum(1)": (5,),
}


@HOST
@pytest.mark.parametrize("text", WRONG)
def test_an_index_out_of_range_raises_what_eager_raises(device, target, text):
    source = f"def f(x, i):\n    return {text}\n"
    scripted, plain = script(source), script(source)
    x = torch.randn(5, 37, device=device)
    good = indices(WRONG[text], 5, device)
    with torch.jit.fuser("fuser0"):
        expected = plain(x, good)
    with no_fallback():
        fuse(scripted, x, good)
        for wrong in (-1, 37, 1 << 40, -(1 << 62), 5 if "0, i" in text else 37):
            for place in (0, good.numel() // 2, good.numel() - 1):
                bad = good.clone()
                bad.view(-1)[place] = wrong
                with torch.jit.fuser("fuser0"):
                    wanted = failure(plain, x, bad)
                assert failure(scripted, x, bad) == wanted
        with counted() as rise:
            assert_matches(scripted(x, good), expected, ops=20)
        assert rise["launches"] and not rise["fallbacks"]


@HOST
@pytest.mark.parametrize("text", WRONG)
def test_torch_compiles_programs_raise_errors_of_eagers_types(device, target, text):
    plain = eval(f"lambda x, i: {text}")
    x, bad = torch.randn(5, 37, device=device), indices(WRONG[text], 5, device)
    torch._dynamo.reset()
    compiled = torch.compile(plain, backend="tsfuser")
    before = tsfuser.stats()["launches"]
    assert_matches(compiled(x, bad), plain(x, bad), ops=20)
    assert tsfuser.stats()["launches"] > before
    bad.view(-1)[-1] = 37
    eager, eager_text = failure(plain, x, bad)
    for _ in range(2):
        found, found_text = failure(compiled, x, bad)
        assert found is eager and found_text.startswith(eager_text)


@HOST
def test_nothing_is_read_where_there_is_no_index(device, target):
    """Threads and lanes past the end compute indices, too, of nothing: -1 here, in a table of one entry."""
    for count in (1, 3, 31, 129):
        i = torch.ones(count, 1, dtype=torch.int64, device=device)
        compare("x.index_select(0, (i - 1).squeeze(1)) * 2.0", torch.randn(1, 5, device=device), i)
        compare("(x.index_select(0, (i - 1).squeeze(1)) * 2.0).sum(0)", torch.randn(1, 3, device=device), i)
        compare("(x.gather(0, i - 1) * 2.0).relu()", torch.randn(1, 1, device=device), i)


@HOST
def test_wrong_indices_of_nothing_are_eagers_to_find(device, target):
    """A product without elements reads nothing, but the indices are wrong all the same."""
    scripted = script("def f(x, i, y):\n    return x.index_select(0, i) * y + 1.0\n")
    x, y, i = torch.randn(4, 1, device=device), torch.randn(1, 0, device=device), indices((3,), 4, device)
    with tsfuser.fuser(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the group runs unfused
        for _ in range(4):
            assert scripted(x, i, y).shape == (3, 0)
    assert "index out of range" in failure(scripted, x, i + 4, y)[1]


@HOST
def test_one_of_several_kernels_finds_a_wrong_index(device, target):
    text = "(x.sum(0) * 2.0, x.index_select(0, i).sum(1) + 1.0, y * 3.0)"
    scripted = script(f"def f(x, i, y):\n    return {text}\n")
    x, i, y = torch.randn(6, 70, device=device), indices((4,), 6, device), torch.randn(9, device=device)
    with no_fallback():
        fuse(scripted, x, i, y)
        assert "index out of range" in failure(scripted, x, i + 6, y)[1]
        for mine, eager in zip(scripted(x, i, y), (x.sum(0) * 2.0, x[i].sum(1) + 1.0, y * 3.0)):
            assert_matches(mine, eager, ops=20)


# ---- what stays outside


def explained(text, *inputs):
    """The kinds in groups, and the report as text."""
    scripted = script(f"def f({', '.join('xiy'[: len(inputs)])}):\n    return {text}\n")
    fuse(scripted, *inputs)
    return [kinds(group) for group in groups(scripted)], str(tsfuser.explain(scripted, *inputs))


@pytest.mark.graphs
def test_a_table_that_is_computed_is_another_groups(device):
    x, i = torch.randn(5, 5, device=device), indices((3,), 5, device)
    inside, _ = explained("(((x * 2.0).relu()).index_select(0, i) + 1.0).exp()", x, i)
    assert inside == [["aten::mul", "aten::relu"], ["aten::index_select", "aten::add", "aten::exp"]]
    compare("(((x * 2.0).relu()).index_select(0, i) + 1.0).exp() * x[:3]", x, i)
    inside, report = explained("x.exp().index_select(0, i)", x, i)
    assert inside == [] and "what computes that tensor is no part of the same group" in report


@pytest.mark.graphs
def test_a_view_of_a_table_stays_a_view(device):
    x, i = torch.randn(5, 7, device=device), indices((3,), 5, device)
    inside, _ = explained("(x.t().index_select(1, i) + 1.0).exp()", x, i)
    assert inside == [["aten::index_select", "aten::add", "aten::exp"]]
    compare("(x.t().index_select(1, i) + 1.0).exp()", x, i)
    compare("((x * 2.0).t().index_select(1, i) + 1.0).exp()", x, i)


@pytest.mark.graphs
def test_a_table_with_other_readers(device):
    """nvFuser refuses it: here the table is read by whoever wants to."""
    x, i = torch.randn(6, 7, device=device), indices((6,), 6, device)
    compare("x.index_select(0, i) * x + x.sum(0)", x, i)
    compare("x.index_select(0, i) * x.index_select(0, i * 0)", x, i)
    square = torch.randn(6, 6, device=device)
    compare("x.index_select(0, x.sum(0).long() * 0 + i) + x", square, i)


@pytest.mark.graphs
def test_a_table_that_is_changed_in_place_is_read_before_or_after(device):
    scripted = script(
        "def f(x, i):\n    a = x.index_select(0, i) * 2.0\n    x.add_(1.0)\n"
        "    return a + x.index_select(0, i)\n"
    )
    x, i = torch.randn(5, 7, device=device), indices((3,), 5, device)
    expected = x[i] * 2.0 + (x[i] + 1.0)
    with tsfuser.fuser():
        for _ in range(4):
            result = scripted(x.clone(), i)
    assert_matches(result, expected, ops=3)


@pytest.mark.graphs
def test_training_is_left_to_eager(device):
    scripted = script("def f(x, i):\n    return ((x * 2.0).index_select(0, i) + 1.0).exp().relu()\n")
    x, i = torch.randn(5, 7, device=device, requires_grad=True), indices((3,), 5, device)
    with tsfuser.fuser():
        for _ in range(4):
            x.grad = None
            out = scripted(x, i)
            out.sum().backward()
    got = x.grad
    eager = ((x * 2.0).index_select(0, i) + 1.0).exp()
    x.grad = None
    eager.sum().backward()
    assert_matches(out.detach(), eager.detach(), ops=8)
    assert_matches(got, x.grad, ops=8)
    inside = {kind for group in groups(scripted) for kind in kinds(group)}
    assert inside and not LOOKUPS & inside
