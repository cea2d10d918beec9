"""Sums at places that an index names in scripted programs: groups make few of them by reductions."""

import pytest
import torch

import tsfuser
from kit.support import assert_matches

pytestmark = [pytest.mark.usefixtures("forgotten", "fused_or_error")]


def added(x, w, i):
    return x.new_zeros([7, x.size(1)]).index_add(0, i, torch.tanh(x * w)) * 2.0


def added_in_place(x, w, i):
    out = torch.zeros([7, x.size(1)], dtype=x.dtype, device=x.device)
    out.index_add_(0, i, torch.tanh(x * w))
    return out.sin() * 2.0, out


def scattered(x, w, i):
    m = torch.tanh(x * w)
    return x.new_zeros([7, x.size(1)]).scatter_add_(0, i.view(-1, 1).expand_as(m), m) * 2.0


def along_rows(x, w, i):
    m = torch.tanh(x * w)
    places = (i.view(-1, 1) + torch.arange(x.size(1), device=x.device)) % 5
    return x.new_zeros([x.size(0), 5]).scatter_add(1, places, m) * 2.0


PROGRAMS = [added, added_in_place, scattered, along_rows]


def given(device, rows=40, width=6, dtype=torch.float32):
    torch.manual_seed(rows + width)
    x, w, i = torch.randn(rows, width), torch.rand(rows, 1), torch.randint(7, (rows,))
    return x.to(device, dtype), w.to(device, dtype), i.to(device)


def results(function, operands):
    found = function(*operands)
    return found if isinstance(found, tuple) else (found,)


def check(scripted, program, operands, ops=60):
    wide = [x.double() if x.is_floating_point() else x for x in operands]
    with tsfuser.fuser():
        found = results(scripted, operands)
    for one, other, exact in zip(found, results(program, operands), results(program, wide), strict=True):
        assert_matches(one, other, exact, ops=ops)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_group_makes_them(device, program, dtype):
    scripted, operands = torch.jit.script(program), given(device, dtype=dtype)
    with torch.no_grad():
        for _ in range(3):
            check(scripted, program, operands)
        before = tsfuser.stats()["launches"]
        check(scripted, program, operands)
        assert tsfuser.stats()["launches"] > before
        text = str(tsfuser.explain(scripted, *operands))
        for sizes in ((40, 6), (9, 6), (1, 1), (40, 1), (0, 6)):
            check(scripted, program, given(device, *sizes, dtype=dtype))
    assert any("group" in line and "sums_by_place" in line for line in text.splitlines())


@pytest.mark.parametrize("program", PROGRAMS)
def test_layouts(device, program):
    scripted = torch.jit.script(program)
    x, w, i = given(device, 40, 40)
    for form in (
        x,
        x.t(),
        x[:, ::2],
        x[:, :1].expand(40, 9),
        x.new_empty(40 * 40 + 1)[1:].view(40, 40).copy_(x),
    ):
        with torch.no_grad():
            for _ in range(2):
                check(scripted, program, (form, w, i))


@pytest.mark.parametrize("program", [added, added_in_place, scattered])
def test_many_sums_stay_with_torch(device, program):
    scripted, operands = torch.jit.script(program), given(device, 4000, 300)
    with torch.no_grad():
        for _ in range(3):
            check(scripted, program, operands, ops=400)


@pytest.mark.parametrize("program", [added, scattered])
@pytest.mark.parametrize("wrong", [7, -1])
def test_an_index_out_of_range_raises(device, program, wrong):
    if device == "cuda":
        pytest.skip("an assertion on the device ends the process")
    scripted, (x, w, i) = torch.jit.script(program), given(device)
    with torch.no_grad(), tsfuser.fuser():
        for _ in range(3):
            scripted(x, w, i)
        i[3] = wrong
        with pytest.raises((IndexError, RuntimeError), match="index|range"):
            scripted(x, w, i)


def into_wider(x, w, i):
    m = torch.tanh(x * w)
    return x.new_zeros([7, 8]).scatter_add(0, i.unsqueeze(-1).expand_as(m), m) * 2.0


def test_sizes_that_only_one_of_torchs_ops_takes(device):
    """A scatter into wider zeros is right, and an `index_add` raises."""
    scripted, operands = torch.jit.script(into_wider), given(device, 40, 8)
    with torch.no_grad():
        for width in (8, 8, 8, 6):
            check(scripted, into_wider, given(device, 40, width))

    def wrong(x, w, i):
        return x.new_zeros([7, 8]).index_add(0, i, torch.tanh(x * w)) * 2.0

    scripted = torch.jit.script(wrong)
    with torch.no_grad(), tsfuser.fuser():
        for _ in range(3):
            scripted(*operands)
        with pytest.raises(RuntimeError, match="(?i)index|shape|size"):
            scripted(*given(device, 40, 6))


def test_numbers_that_are_none_stay_at_their_place(device):
    scripted, (x, w, i) = torch.jit.script(added), given(device)
    x[3], x[5, 2] = float("nan"), float("inf")
    with torch.no_grad(), tsfuser.fuser():
        for _ in range(3):
            found = scripted(x, w, i)
    torch.testing.assert_close(found, added(x, w, i), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients(device, program):
    """The op is differentiated by its parts where no group has it."""
    scripted, (x, w, i) = torch.jit.script(program), given(device)
    grads = []
    for function in (scripted, program):
        with tsfuser.fuser():
            for _ in range(3):
                a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
                loss = sum((r * r).sum() for r in results(function, (a, b, i)))
                found = torch.autograd.grad(loss, (a, b))
        grads.append(found)
    for one, other in zip(*grads):
        assert_matches(one, other, ops=200)


def test_each_turn_of_a_loop_adds_to_the_same(device):
    def program(x, w, i, times: int):
        out = x.new_zeros([7, x.size(1)])
        for _ in range(times):
            out.index_add_(0, i, torch.tanh(x * w))
        return out * 2.0

    scripted, operands = torch.jit.script(program), given(device)
    with torch.no_grad(), tsfuser.fuser():
        for _ in range(3):
            found = scripted(*operands, 3)
    assert_matches(found, program(*operands, 3), ops=60)


def test_who_looks_at_the_zeros_before(device):
    def program(x, w, i):
        out = x.new_zeros([7, x.size(1)])
        part = out[1]
        before = out + 1.0
        out.index_add_(0, i, torch.tanh(x * w))
        return out * 2.0 + before, part * 1.0 + 1.0

    scripted, operands = torch.jit.script(program), given(device)
    with torch.no_grad():
        for _ in range(3):
            check(scripted, program, operands)
