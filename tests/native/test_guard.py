"""prim::CudaFusionGuard against its specification, written out again in Python."""

import itertools

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

from kit.native_support import group_function


def type_of(t):
    return torch._C.TensorType.create_from_tensor(t)


def guard(*types, patterns=None):
    values = ", ".join(f"%a{i} : Tensor" for i in range(len(types)))
    check = group_function(
        f"graph({values}):\n  return (%a0)", len(types), guard=list(types), patterns=patterns
    )
    for _ in range(2 if patterns else 0):  # torch makes its operators anew for the second call
        check(*[torch.empty(0, device="meta")] * len(types))
    return check


def expected(profiled, t):
    """What the specification says of a tensor `t` for the type of the tensor `profiled`."""
    if t.dim() != profiled.dim() or t.dtype != profiled.dtype or t.device != profiled.device:
        return False
    if (t.requires_grad and torch.is_grad_enabled()) != profiled.requires_grad:
        return False
    if any((p == 1) != (s == 1) or (p == 0) != (s == 0) for p, s in zip(profiled.shape, t.shape)):
        return False
    inner = None
    for j, (d, contiguous) in enumerate(recorded_order(profiled)):
        if inner is not None and t.stride(d) and t.stride(inner) and t.stride(d) < t.stride(inner):
            return False
        if contiguous:
            if j == 0:
                if t.stride(d) != 1:
                    return False
            elif t.shape[d] != 1 and t.stride(d) != 1 and t.stride(d) != t.stride(inner) * t.shape[inner]:
                return False
        if inner is None or t.shape[d] != 1:
            inner = d
    return True


def recorded_order(profiled):
    """(dim, contiguous) from fastest to slowest: ascending strides; of two equal strides the left dim is
    the slower one, unless it has size 1 and the other has not. A dim is contiguous if its stride is what the
    next faster one asks for."""
    sizes, strides, rank = profiled.shape, profiled.stride(), profiled.dim()
    order = list(range(rank - 1, -1, -1))
    for i in range(1, rank):  # insertion sort, stable, that skips expanded dims
        moving = i
        for other in range(i - 1, -1, -1):
            a, b = order[other], order[moving]
            if strides[a] == 0 or strides[b] == 0:
                continue
            swap = strides[a] > strides[b] or (strides[a] == strides[b] and sizes[a] > sizes[b])
            if swap:
                order[other], order[moving] = order[moving], order[other]
                moving = other
            elif strides[a] < strides[b]:
                break
    result = []
    for j, d in enumerate(order):
        if j == 0:
            contiguous = strides[d] == 1
        else:
            before = order[j - 1]
            contiguous = strides[d] == 1 or (
                strides[d] != 0 and strides[d] == strides[before] * sizes[before]
            )
        result.append((d, contiguous))
    return result


def layouts():
    base = torch.randn(2, 3, 4)
    yield from (
        base,
        base * 2,
        torch.randn(5, 6, 7),
        base.permute(2, 0, 1),
        base.transpose(1, 2),
        base.transpose(0, 2),
    )
    yield from (
        torch.randn(1, 3, 4),
        torch.randn(2, 1, 4),
        torch.randn(2, 3, 1),
        torch.randn(0, 3, 4),
        torch.randn(1, 1, 1),
    )
    yield from (torch.randn(2, 3, 8)[..., ::2], torch.randn(2, 6, 4)[:, ::2], torch.randn(2, 3, 8)[..., :4])
    yield from (
        torch.randn(4).expand(2, 3, 4),
        torch.randn(2, 1, 4).expand(2, 3, 4),
        torch.randn(1, 1, 1).expand(2, 3, 4),
    )
    yield torch.randn(200).as_strided((2, 1, 4), (4, 100, 1))  # a dim of size 1 may have any stride
    yield from (
        base.double(),
        torch.randn(3, 4),
        torch.randn(2, 3, 4, 5),
        torch.randn(2, 4, 3).permute(0, 2, 1)[:1],
    )


@pytest.mark.parametrize(
    "profiled", list(layouts()), ids=lambda t: f"{tuple(t.shape)}{t.stride()}{t.dtype}"[:40]
)
def test_guard_says_what_the_specification_says(native, profiled):
    check = guard(type_of(profiled))
    for t in layouts():
        assert check(t) == expected(profiled, t), (t.shape, t.stride())


@pytest.mark.parametrize("recorded, actual, grad_mode", list(itertools.product([False, True], repeat=3)))
def test_requires_grad_counts_with_grad_mode(native, recorded, actual, grad_mode):
    check = guard(type_of(torch.randn(3, requires_grad=recorded)))
    with torch.set_grad_enabled(grad_mode):
        assert check(torch.randn(3, requires_grad=actual)) == ((actual and grad_mode) == recorded)


def test_all_inputs_are_checked_and_guard_mode_off_checks_none(native):
    t = torch.randn(2, 3)
    check = guard(type_of(t), type_of(t))
    assert check(t, t) and not check(t, t.t()) and not check(t.int(), t)
    native.set_guard_mode(False)
    assert check(t, t.t()) and check(t.int(), t) and not native.guard_mode()


def test_unknown_sizes_are_not_checked(native):
    check = guard(type_of(torch.randn(2, 3)).with_sizes([None, None]))
    assert check(torch.randn(1, 3)) and not check(torch.randn(3))


def test_tensor_without_a_recorded_rank_never_passes(native):
    assert not guard(torch._C.TensorType.get())(torch.randn(3))


UNREADABLE = [
    lambda t: t.to_sparse(),
    lambda t: t.to("meta"),
    lambda t: forward_ad.make_dual(t, t),
    lambda t: forward_ad.make_dual(t.t(), t.t()).t(),
]


@pytest.mark.parametrize("make", UNREADABLE)
def test_tensors_that_kernels_cannot_read_pass_to_be_run_unfused(native, make):
    """A fallback would be profiled with a type that does not describe them: its guard would refuse the
    next one, and so on."""
    t = torch.randn(2, 3)
    with forward_ad.dual_level():
        x = make(t)
        assert (
            guard(type_of(t))(x)
            and guard(type_of(t), type_of(t))(t, x)
            and not guard(type_of(t), type_of(t))(t.int(), x)
        )
    if isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_meta:
        assert guard(type_of(t))(x) and not guard(type_of(t.int()))(x)  # its level is over


def test_lazy_conjugates_and_negatives_are_what_they_are_when_resolved(native):
    """The group reads a copy."""
    z = torch.randn(2, 3, dtype=torch.complex64)
    for lazy in (z.conj(), z.conj().imag, z.conj().t()):
        assert guard(type_of(lazy))(lazy) and guard(type_of(lazy))(lazy.resolve_conj().resolve_neg())
        assert not guard(type_of(torch.randn(2, 3).double()))(lazy)


# ---- another order of dims


def test_dims_in_another_order_pass(native):
    """Where nothing else differs, both have no gaps, and no gradient is asked for."""
    for profiled, t in itertools.product(layouts(), repeat=2):
        alike = expected(profiled.contiguous(), t.contiguous())
        dense = all(torch.ops.aten.is_non_overlapping_and_dense(x) for x in (profiled, t))
        passes = expected(profiled, t) or (alike and dense)
        assert guard(type_of(profiled), patterns=1)(t) == passes, (profiled.stride(), t.shape, t.stride())
    check = guard(type_of(torch.randn(2, 3, requires_grad=True)), patterns=1)
    x = torch.randn(3, 2, requires_grad=True)
    assert check(x.detach().view(2, 3).requires_grad_()) and not check(x.t())


def test_all_tensors_but_for_the_order_of_their_dims(native):
    t = torch.randn(2, 3)
    check = guard(type_of(t), type_of(t), patterns=1)
    turned = torch.randn(3, 2).t()
    assert check(t, turned) and check(turned, turned) and check(turned, t)
    for refused in ((turned, t.double()), (turned, torch.randn(2, 6)[:, ::2])):
        assert not guard(type_of(t), type_of(t), patterns=1)(*refused)


# ---- opening


def open_guard(t):
    """The guard of a tensor like `t`, after one pattern too many."""
    check = guard(type_of(t), patterns=1)
    assert [check(torch.zeros([2] * rank)) for rank in (5, 6)] == [False, True]
    return check


def test_a_guard_opens_when_it_has_refused_so_many_patterns(native):
    t = torch.randn(2, 3)
    check = guard(type_of(t), patterns=2)
    refused = [t.double(), torch.randn(2, 3, 4), t.double(), torch.randn(5, 6, 7)]
    assert check(t.t().contiguous().t())  # counts for nothing
    assert not any(map(check, refused)) and check(t)
    assert check(t.int()) and check(t.t()) and all(map(check, refused)) and check(t)


def test_a_pattern_is_all_that_a_guard_can_tell(native):
    """Two tensors of one pattern pass the same guards: a chain has no more guards than patterns were met."""
    tensors, found = list(layouts()), 0
    for t, u in itertools.product(tensors, repeat=2):
        check = guard(type_of(torch.zeros(3, dtype=torch.int64)), patterns=1)
        assert not check(t)
        if not check(u):
            assert [expected(p, t) for p in tensors] == [expected(p, u) for p in tensors]
            found += 1
    assert found > len(tensors)  # some are alike in all but their sizes


def test_an_open_guard_lets_no_gradient_through(native):
    check = open_guard(torch.randn(2, 3))
    x = torch.randn(2, 3, 4, requires_grad=True)
    assert not check(x) and check(x.detach())
    with torch.no_grad():
        assert check(x)


@pytest.mark.parametrize(
    "make",
    [lambda t: t.to(torch.uint8).view(torch.bits8), lambda t: t.view(1, 1, 1, 1, 1, 1, 1, 1, 6)],
)
def test_an_open_guard_takes_what_kernels_can_read(native, make):
    t = torch.randn(2, 3)
    check = open_guard(t)
    assert check(t[None]) and not check(make(t))


def test_an_open_guard_takes_lazy_conjugates_and_negatives(native):
    check, z = open_guard(torch.randn(2, 3)), torch.randn(2, 3, 4, dtype=torch.complex64)
    assert check(z.conj()) and check(z.conj().imag)


def test_what_cannot_pass_an_open_guard_opens_none(native):
    check = guard(type_of(torch.randn(2, 3)), patterns=1)
    for rank in range(1, 6):
        assert not check(torch.randn([2] * rank, requires_grad=True)) and check(
            torch.randn([2] * rank).to_sparse()
        )
    assert not check(torch.randn(3))
    assert check(torch.randn(2, 3, 4))
