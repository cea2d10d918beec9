"""prim::CudaFusionGuard against its specification, written out again in Python."""

import itertools

import pytest
import torch
from native_support import group_function


def type_of(t):
    return torch._C.TensorType.create_from_tensor(t)


def guard(*types):
    values = ", ".join(f"%a{i} : Tensor" for i in range(len(types)))
    return group_function(f"graph({values}):\n  return (%a0)", len(types), guard=list(types))


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


@pytest.mark.parametrize(
    "make", [lambda t: t.to_sparse(), lambda t: torch.complex(t, t).conj().imag, lambda t: t.to("meta")]
)
def test_tensors_that_kernels_cannot_read_do_not_pass(native, make):
    t = torch.randn(2, 3)
    assert not guard(type_of(t))(make(t))
