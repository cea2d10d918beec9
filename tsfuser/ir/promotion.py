"""The dtype of a result of several operands, as torch's `result_type` has it.

In: values and the default dtype. Out: a DType. Example: an int32 tensor and the number 1.5 give float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..errors import Refusal
from .dtypes import COMPLEX64, COMPLEX128, DOUBLE, HALF, DType, promote
from .fusion import Value

_KIND_ORDER = {"b": 0, "i": 1, "f": 2, "c": 3}


def result_type(values: Sequence[Value], default: DType) -> DType:
    """Tensors with dims first; 0-dim tensors, then numbers count only if of a higher kind (bool < integer <
    floating < complex)."""
    return _result_type(tuple([(_standing(v), v.dtype) for v in values]), default)


@lru_cache(maxsize=1024)
def _result_type(operands: tuple[tuple[str, DType], ...], default: DType) -> DType:
    result: DType | None = None
    for rank in ("number", "zero", "dims"):
        members = [dtype for standing, dtype in operands if standing == rank]
        if not members:
            continue
        own = members[0]
        for other in members[1:]:
            own = promote(own, other)
        if rank == "number":
            own = _number_dtype(own, default)
        result = own if result is None else _combine(own, result)
    assert result is not None, "promotion of nothing"
    return result


def _number_dtype(own: DType, default: DType) -> DType:
    """A number's dtype where it decides: the default dtype for floats, its complex partner for complex."""
    if own.is_floating:
        return default
    if own.is_complex:
        return COMPLEX128 if default is DOUBLE else COMPLEX64
    return own


def _standing(value: Value) -> str:
    """A value's weight in promotion."""
    return "number" if value.is_number else ("dims" if value.dims else "zero")


def _combine(higher: DType, lower: DType) -> DType:
    """The dtype of operands of which those in `lower` count only by their kind."""
    if _KIND_ORDER[higher.kind] >= _KIND_ORDER[lower.kind]:
        return higher
    if not (higher.computes and lower.computes):
        return promote(higher, lower)
    if not (higher.is_floating and lower.is_complex):
        return promote(higher, lower)
    if higher is HALF:
        raise Refusal("complex numbers of half precision are not supported")
    return COMPLEX128 if higher is DOUBLE else COMPLEX64
