"""What rows say of their ops, against eager: whether a result is smooth, keeps a dtype, is a new tensor, and
which number changes nothing. The samples of all rows of elementwise ops are tried."""

import pytest
import torch

from kit.samples import operation, samples, values
from tsfuser.ops import table

ELEMENTWISE = ("activations", "arithmetic", "pointwise", "selection")
ROWS = {f"{row.name}.{row.overloads[0]}": row for row in table.all_rows()}
POINTWISE = [name for name, row in ROWS.items() if row.family in ELEMENTWISE]
STEP = 1e-12  # by which operands move
#: Where more digits take another branch without a jump of the result: the neighbour of a number in its dtype.
NO_JUMP = ("aten::nextafter",)
#: They jump where no operand here is.
AT_INFINITY = [f"aten::{name}" for name in "isnan isinf isfinite isposinf isneginf isreal".split()]
#: Operands that are not moved: 0 ** y jumps at y = 0, and only there.
STILL = {("aten::pow", "exponent"), ("aten::float_power", "exponent")}


def eager(sample, arguments=None):
    """What eager gives, of the arguments themselves; None where it raises."""
    try:
        return operation(sample.row.name, sample.overload)(**(arguments or sample.arguments))
    except RuntimeError:
        return None


def on_a_grid(x):
    """`x` on multiples of 1/4, where functions jump if they do, without infinities."""
    return (x.nan_to_num(0.25, 1.5, -1.5).clamp(-30, 30) * 4).round() / 4


def moves(sample):
    """For each operand and direction the name of the operand, the result of a sample in float64, and the
    result with the operand moved a little."""
    arguments = {
        name: on_a_grid(v) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for name, v in sample.arguments.items()
    }
    before = eager(sample, arguments)
    for name, v in arguments.items() if before is not None else ():
        if isinstance(v, torch.Tensor) and v.is_floating_point() and (sample.row.name, name) not in STILL:
            for step in (STEP, -STEP):
                yield name, before, eager(sample, {**arguments, name: v + step})


def jumps(before, after, finite):
    """Whether an element changes much; from a finite one to an infinite one, too, unless both are to be
    `finite`. Near poles everything changes."""
    far = ((after - before).abs() > 1e-3 * (1 + before.abs())) & (before.abs() < 1e6)
    far &= ~before.isnan() & ~after.isnan()
    return bool((far & (after.abs() < 1e6) if finite else far).any())


@pytest.mark.parametrize("name", POINTWISE)
def test_a_smooth_op_does_not_jump_and_others_do(name):
    row, found = ROWS[name], []
    for sample in samples(row, ["float64"], mixed=False):
        if sample.arguments.get("rounding_mode"):  # which the backward never computes again
            continue
        for _, before, after in moves(sample):
            if not before.is_floating_point():
                assert not row.smooth, f"{sample} gives {before.dtype}"
                continue
            found.append(jumps(before, after, finite=row.smooth))
            assert not (row.smooth and found[-1]), str(sample)
    assert row.smooth or not found or any(found) or row.name in NO_JUMP


GRADIENTS = [name for name, row in ROWS.items() if row.family == "gradients"]


@pytest.mark.parametrize("name", [*GRADIENTS, *POINTWISE])
def test_what_jumps_says_so(name):
    row, found = ROWS[name], []
    for sample in samples(row, ["float64"], mixed=False):
        if sample.arguments.get("rounding_mode"):
            continue
        for moved, before, after in moves(sample):
            if not moved.startswith("grad"):
                whole = before.dtype == torch.bool
                found.append((before != after).any() if whole else jumps(before, after, finite=not row.jumps))
    assert not found or row.jumps == any(found) or (row.jumps and row.name in (*NO_JUMP, *AT_INFINITY))


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.smooth])
def test_no_smooth_op_gives_whole_numbers(name):
    """`isreal` gives bools of complex numbers, too. Casts may be asked for integers."""
    row = ROWS[name]
    for sample in samples(row, ["float32", "complex64"], mixed=False):
        numbers = all(v.dtype == torch.bool for v in sample.tensors.values())
        result = None if numbers or "dtype" in sample.arguments else eager(sample)
        assert result is None or result.is_floating_point() or result.is_complex(), str(sample)


@pytest.mark.parametrize("name", POINTWISE)
def test_an_op_keeps_a_dtype_or_does_not(name):
    row, kept = ROWS[name], []
    for dtype in table.FLOATING:
        for sample in samples(row, [dtype], mixed=False):
            dtypes = {v.dtype for v in sample.tensors.values() if v.dtype != torch.bool}
            result = eager(sample) if dtypes == {getattr(torch, dtype)} else None
            if result is not None:
                kept.append(result.dtype == getattr(torch, dtype))
    if kept:
        assert row.keeps_dtype == all(kept)


ONE_OPERAND = [name for name, row in ROWS.items() if row.family == "pointwise" and row.dtype_rule == "first"]


@pytest.mark.parametrize("name", ONE_OPERAND)
def test_a_result_of_the_operands_dtype_has_it_whatever_it_is(name):
    op = getattr(torch.ops.aten, ROWS[name].name.removeprefix("aten::"))
    for dtype in table.ALL:
        try:
            result = op(torch.ones(3).to(getattr(torch, dtype)))
        except RuntimeError:
            continue
        assert result.dtype == getattr(torch, dtype)


def storages(given):
    given = given if isinstance(given, (tuple, list)) else [given]
    return {v.untyped_storage().data_ptr() for v in given if isinstance(v, torch.Tensor) and v.numel()}


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.fresh and not row.is_view])
def test_a_fresh_result_shares_no_memory(name):
    row = ROWS[name]
    for sample in samples(row, ["float32", "int32", "bool"], mixed=False):
        result = eager(sample)
        assert not storages(result) & storages(list(sample.arguments.values())), str(sample)


#: Arguments behind a tensor of sizes [2, 1, 4].
MOVES = {
    "permute": [[2, 0, 1]], "transpose": [0, 2], "swapaxes": [0, 2], "swapdims": [0, 2], "movedim": [0, 2],
    "unsqueeze": [1], "squeeze": [], "expand": [[2, 3, 4]], "expand_as": [torch.zeros(2, 3, 4)],
    "view": [[8]], "reshape": [[4, -1]], "view_as": [torch.zeros(8, 1)], "reshape_as": [torch.zeros(8)],
    "flatten": [0, -1], "unflatten": [2, [2, 2]], "contiguous": [], "positive": [], "clone": [],
    "slice": [2, 1, 3], "narrow": [2, 1, 2], "select": [2, -1], "roll": [[1], [2]], "flip": [[0, 2]],
    "pad": [[1, -1]], "constant_pad_nd": [[1, 2], 1.5],
}  # fmt: skip


@pytest.mark.parametrize("dtype", table.ALL)
@pytest.mark.parametrize("name", MOVES)
def test_an_op_that_moves_elements_keeps_dtype_and_device(name, dtype):
    if name == "positive" and dtype == "bool":
        return
    x = torch.ones(2, 1, 4).to(getattr(torch, dtype))
    result = getattr(torch.ops.aten, name)(x, *MOVES[name])
    assert (result.dtype, result.device) == (x.dtype, x.device)


def test_views_and_what_moves_elements_besides():
    found = {row.name for row in ROWS.values() if row.moves}
    # of matrices; those that stand for such ops
    ours = {"aten::t", "tsfuser::rows", "tsfuser::pad", "tsfuser::in_format_of"}
    assert found - ours == {f"aten::{name}" for name in MOVES}


NEUTRAL = [(name, kind) for name, row in ROWS.items() for kind in row.identity]


@pytest.mark.parametrize("name, kind", NEUTRAL)
def test_an_identity_changes_no_bit(name, kind):
    row = ROWS[name]
    number = row.identity[kind]
    for dtype in table.INTEGRAL if kind == "i" else table.FLOATING:
        x = values(dtype)
        y = operation(row.name, "Scalar")(x, number)
        assert y.dtype == x.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        if kind == "f" and number == 0:  # the zero of the other sign does
            y = operation(row.name, "Scalar")(x, -number)
            assert not torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_there_are_identities():
    assert {name for name, _ in NEUTRAL} == {f"aten::{n}.Tensor" for n in ("add", "sub", "mul", "div")}


def test_ops_that_jump_are_not_computed_again():
    """Once these were taken for smooth: bools, a jump by 2 pi, one at a threshold, one to infinity."""
    for name in ("isreal", "atan2", "softplus", "special_entr"):
        assert not table.find(f"aten::{name}").smooth
    assert table.find("aten::mul", "Tensor").smooth and table.find("aten::exp").smooth
