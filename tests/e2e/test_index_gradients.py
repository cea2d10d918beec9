"""`x[index]` in training: TorchScript's autodiff takes its twin, and a group computes the gradient of a small
x in one pass (tsfuser/ops/lookup.py)."""

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.opsweep import plain
from kit.support import assert_matches, groups, kinds, no_fallback, script

pytestmark = pytest.mark.graphs

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SOURCE = "def f(x: Tensor, i: Tensor, z: Tensor):\n    return torch.tanh(x * 2.0)[i] * z\n"
BACKWARD = "tsfuser::index_backward"
CALLS = 4


def operands(sizes, places, dtype=torch.float32, index=torch.int64, device="cpu", seed=0):
    """x, an index of places counted from either end, and a factor of the result."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sizes, generator=generator, dtype=torch.float64).to(device, dtype)
    low = 0 if index == torch.uint8 else -sizes[0]
    i = torch.randint(low, sizes[0], places, generator=generator).to(device, index)
    z = torch.randn((*places, *sizes[1:]), generator=generator, dtype=torch.float64).to(device, dtype)
    return x.requires_grad_(), i, z


def gradient(function, x, i, z):
    x = x.detach().requires_grad_()
    out = function(x, i, z)
    (found,) = torch.autograd.grad(out, x, torch.ones_like(out))
    return found


def compare(cases, source=SOURCE, ops=200):
    """Gradients of all `cases`, one call after another, by one scripted function; which it returns."""
    eager, scripted = plain(source), script(source)
    with tsfuser.fuser():
        for x, i, z in cases:
            for _ in range(CALLS):
                found = gradient(scripted, x, i, z)
            exact = gradient(eager, x.double(), i, z.double())
            assert_matches(found, gradient(eager, x, i, z), exact, ops=ops)
    return scripted


def backwards(scripted):
    return [kind for group in groups(scripted) for kind in kinds(group) if kind == BACKWARD]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    "sizes, places",
    [((5, 3), (7,)), ((5,), (9,)), ((4, 2, 3), (2, 5)), ((1, 3), (4,)), ((6, 1), (1,)), ((3, 2), ())],
    ids=str,
)
def test_gradients_are_eagers(device, dtype, index, sizes, places):
    with no_fallback():
        scripted = compare([operands(sizes, places, dtype, index, device)])
    assert backwards(scripted) == [BACKWARD]


def test_new_sizes_run_the_same_group(device):
    sizes = [
        ((5, 3), (7,)),
        ((9, 4), (3,)),
        ((2, 6), (31,)),
        ((5, 3), (0,)),
        ((1, 3), (4,)),
        ((40, 7), (50,)),
    ]
    with no_fallback():
        scripted = compare([operands(*case, device=device, seed=k) for k, case in enumerate(sizes)])
    # tensors without elements run no joint graph, but what runs without it
    assert backwards(scripted) == [BACKWARD] * (1 + by_joint_graphs())


def test_a_row_that_is_named_often_gets_the_sum(device):
    x, _, _ = operands((4, 33), (), device=device)
    z = torch.ones(1000, 33, device=device)
    compare([(x, torch.full((1000,), place, device=device), z) for place in (3, -1, 0)])


def test_places_of_gradients_in_another_order(device):
    """As the bias of an attention by relative positions, whose gradient comes transposed."""
    source = """
def f(x: Tensor, i: Tensor, z: Tensor):
    b = x[i].view(6, 6, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
    return torch.softmax(z * 2 + b, -1)
"""
    x, i, _ = operands((11, 4), (36,), device=device)
    z = torch.randn(5, 4, 6, 6, device=device)
    eager, scripted = plain(source), script(source)
    weights = torch.randn(5, 4, 6, 6, device=device)
    with tsfuser.fuser(), no_fallback():
        for _ in range(CALLS):
            found = gradient(lambda *given: scripted(*given) * weights, x, i, z)
        expected = gradient(lambda *given: eager(*given) * weights, x, i, z)
        exact = gradient(lambda *given: eager(*given) * weights, x.double(), i, z.double())
    assert_matches(found, expected, exact, ops=300)
    assert len(groups(scripted)) == 2 and backwards(scripted) == [BACKWARD]


@pytest.mark.parametrize("index", [torch.uint8, torch.bool], ids=str)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_masks_are_left_to_torch(device, index):
    x, _, _ = operands((6, 3), (), device=device)
    mask = torch.tensor([1, 0, 1, 1, 0, 0], device=device).to(index)
    scripted = compare([(x, mask, torch.ones(3, 3, device=device))])
    assert backwards(scripted) == []


def test_a_mask_behind_places(device):
    x, i, z = operands((6, 3), (4,), device=device)
    mask = torch.tensor([True, False, True, True, False, True], device=device)
    compare([(x, i, z), (x, mask, z), (x, i, z)])


def test_a_large_table_is_left_to_torch():
    x, i, z = operands((300, 40), (500,))
    source = SOURCE.replace("* z", "* z + 1.0")
    scripted = compare([(x, i, z)], source)
    assert backwards(scripted) == []
    said = str(tsfuser.explain(scripted, x, i, z))
    assert "index_backward is left to torch: a group would look at 6000000 elements" in said


@pytest.mark.filterwarnings("ignore:a fusion group")
def test_a_table_that_has_grown_runs_unfused(target, device):
    sizes = [((5, 3), (7,)), ((3000, 3), (200,)), ((5, 3), (7,))]
    before = tsfuser.stats()["fallbacks"]
    compare([operands(*case, device=device) for case in sizes])
    reasons = [reason for reason in tsfuser.stats()["fallbacks"] if reason not in before]
    assert any("eager's sort" in reason for reason in reasons) == (target != "cuda")


@pytest.mark.parametrize("indices", ["i, i", "None, i", "i, 1:"])
def test_other_indices(device, indices):
    source = SOURCE.replace("[i]", f"[{indices}]").replace("* z", "* z.sum()")
    x, i, z = operands((5, 5), (3,), device=device)
    compare([(x, i, z)], source)


def test_second_derivatives(device):
    eager, scripted = plain(SOURCE), script(SOURCE)
    x, i, z = operands((5, 3), (7,), torch.float64, device=device)

    def second(function):
        y = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(function(y, i, z).square().sum(), y, create_graph=True)
        return torch.autograd.grad(first.sin().sum(), y)[0]

    with tsfuser.fuser():
        for _ in range(CALLS):
            found = second(scripted)
    torch.testing.assert_close(found, second(eager))


@pytest.mark.parametrize("what", ["x", "i"])
def test_what_is_written_before_the_backward_raises_as_in_eager(what):
    """The index is kept; of x the sizes are."""
    source = "def f(x: Tensor, i: Tensor, z: Tensor):\n    return x[i] * z * 2.0\n"
    eager, scripted = plain(source), script(source)

    def ran(function):
        x, i, z = operands((5, 3), (7,))
        out = function(x, i, z)
        with torch.no_grad():
            (x if what == "x" else i).zero_()
        try:
            return torch.autograd.grad(out, x, torch.ones_like(out))[0]
        except RuntimeError as error:
            return "modified by an inplace operation" in str(error)

    expected = ran(eager)
    with tsfuser.fuser():
        for _ in range(CALLS):
            found = ran(scripted)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert found is expected is True


def test_a_gradient_in_another_dtype_is_cast(device):
    """Autodiff hands on a gradient of floats for what a table of halves gave."""
    source = "def f(x: Tensor, i: Tensor, z: Tensor):\n    return x[i] * 2.0 * z\n"
    x, i, z = operands((5, 3), (7,), torch.bfloat16, device=device)
    eager, scripted = plain(source), script(source)
    with tsfuser.fuser():
        for _ in range(CALLS):
            found = gradient(scripted, x, i, z.float())
    expected = gradient(eager, x, i, z.float())
    assert found.dtype == expected.dtype == torch.bfloat16
    assert_matches(found, expected, gradient(eager, x.double(), i, z.double()), ops=200)


def test_an_index_out_of_range_raises():
    scripted = script(SOURCE)
    x, i, z = operands((5, 3), (7,))
    with tsfuser.fuser():
        for _ in range(CALLS):
            gradient(scripted, x, i, z)
        with pytest.raises(RuntimeError, match="out of bounds"):  # as in TorchScript without fusion
            scripted(x, i + 9, z)
