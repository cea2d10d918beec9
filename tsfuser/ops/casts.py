"""Casts, copies, and tensors filled with one number. A cast to the dtype that a value has is the value
itself, as in eager."""

from __future__ import annotations

from typing import Any

from ..errors import Refusal
from ..ir.build import Builder
from ..ir.dtypes import FLOAT, NARROW, DType
from ..ir.fusion import Value
from ..ir.limits import convertible
from ..ir.symbols import define
from .elementwise import converted, is_rounded, round_number
from .table import CONVERTED, FLOATING, composite, scalar_type

define("fill", "convert<{ctype}>({1})", cheap=True)
_KNOWN = (
    "(it knows type_as, and casts to a floating dtype, or back to that of a tensor that the operand is "
    "computed of, whose results are only read)"
)
#: Facts of all casts that may hand their operand on.
_CAST: dict[str, Any] = dict(dtypes=CONVERTED, sizes="first", smooth=True, fresh=False, gradient="cast")
_ROW_MAJOR, _PRESERVE = 0, 1  # c10::MemoryFormat::Contiguous, Preserve
#: c10::MemoryFormat::ChannelsLast, ChannelsLast3d -> the dims in memory, outermost first
_CHANNELS_LAST = {2: (0, 2, 3, 1), 3: (0, 2, 3, 4, 1)}


def check_options(b: Builder, layout=None, device=None, pin_memory=None, memory_format=None) -> None:
    """Refuses tensor options that ask for more than a new dtype."""
    if layout not in (None, 0):
        raise Refusal("a layout other than strided")
    if device is not None and str(device) != b.device:  # "cuda" is the thread's current device
        raise Refusal(f"a copy to {device}")
    if pin_memory:
        raise Refusal("pinned memory")
    if memory_format not in (None, _PRESERVE):
        raise Refusal("a memory format other than that of the operand")


def _category(dtype: DType) -> int:
    """bool, int, float, complex: eager's ops in place write to tensors of no lower one."""
    return "bifcp".index(dtype.kind)


def _cast(b: Builder, self: Value, dtype: DType, copy: bool = False) -> Value:
    if self.dtype.is_complex and not dtype.is_complex:
        raise Refusal("a cast from complex drops the imaginary part with a warning")
    if copy and dtype is self.dtype:
        return b.copied(b.pointwise("copy", (self,), dtype, layouts=()), self)
    return b.cast(self, dtype)


def _moved(b: Builder, self: Value, dtype: DType, moves: bool, copy: bool = False) -> Value:
    """`_cast`, to the group's device if it `moves`: then a 0-dim CPU tensor beside it is copied there."""
    if not moves or self.dims or b.device == "cpu" or not b.is_on_cpu(self):
        return _cast(b, self, dtype, copy)
    made = _cast(b, self, dtype, copy=True)
    b.moved.add(made.name)
    return made


@composite("aten::to", "dtype", **_CAST, instead=_KNOWN)
def to_dtype(
    b: Builder,
    self,
    dtype: int,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: int | None = None,
) -> Value:
    """`self` in another dtype"""
    check_options(b, memory_format=memory_format)
    return _cast(b, self, scalar_type(dtype), copy)


@composite("aten::to", "device", **_CAST)
def to_device(
    b: Builder,
    self,
    device: str,
    dtype: int,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: int | None = None,
) -> Value:
    """`self` in another dtype: the form of `x.to(device, dtype)` in traces"""
    check_options(b, device=device, memory_format=memory_format)
    return _moved(b, self, scalar_type(dtype), device is not None, copy)


@composite("aten::to", "dtype_layout", **_CAST)
def to_dtype_layout(
    b: Builder,
    self,
    dtype: int | None = None,
    layout: int | None = None,
    device: str | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: int | None = None,
) -> Value:
    """`self` in another dtype, or as it is: the form of `x.to(device)` in traces"""
    check_options(b, layout, device, pin_memory, memory_format)
    wanted = self.dtype if dtype is None else scalar_type(dtype)
    return _moved(b, self, wanted, device is not None, copy)


@composite("aten::to", "prim_dtype", **_CAST)
def to_prim_dtype(
    b: Builder, self, dtype: int | None = None, non_blocking: bool = False, copy: bool = False
) -> Value:
    """`self` in another dtype, or as it is"""
    return _cast(b, self, self.dtype if dtype is None else scalar_type(dtype), copy)


@composite("aten::to", "other", **_CAST, dtype_from="other")
def to_other(
    b: Builder,
    self,
    other,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: int | None = None,
) -> Value:
    """`self` in the dtype of `other`, and on its device"""
    check_options(b, memory_format=memory_format)
    return _moved(b, self, other.dtype, not b.is_on_cpu(other), copy)


@composite("aten::type_as", **_CAST, secret_view=True, dtype_from="other")
def type_as(b: Builder, self, other) -> Value:
    """`self` in the dtype of `other`, and on its device"""
    return _moved(b, self, other.dtype, not b.is_on_cpu(other))


@composite("tsfuser::as_written", **_CAST, secret_view=True, dtype_from="target")
def as_written(b: Builder, self, target) -> Value:
    """`self`, of a functional op, in the dtype of the `target` that the op in place would have written to"""
    made, written = (_category(value.dtype) for value in (self, target))
    if made > written or (made, written) == (2, 3):  # abs_ of complex numbers
        raise Refusal(f"a write of {self.dtype.name} to {target.dtype.name}: an error in eager")
    return _cast(b, self, target.dtype)


@composite("aten::_to_copy", dtypes=CONVERTED, sizes="first", smooth=True)
def to_copy(
    b: Builder,
    self,
    dtype: int | None = None,
    layout: int | None = None,
    device: str | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: int | None = None,
) -> Value:
    """A new tensor with the values of `self`, in `dtype`"""
    check_options(b, layout, device, pin_memory, memory_format)
    wanted = self.dtype if dtype is None else scalar_type(dtype)
    return _moved(b, self, wanted, device is not None, copy=True)


@composite("aten::clone", dtypes=CONVERTED, sizes="first", smooth=True, copies=True, moves=True)
def clone(b: Builder, self, memory_format: int | None = None) -> Value:
    """A new tensor with the values of `self`"""
    if memory_format == _ROW_MAJOR:
        return b.pointwise("copy", (self,), self.dtype, layouts=())
    if memory_format in _CHANNELS_LAST:
        order = _CHANNELS_LAST[memory_format]
        if len(self.dims) != len(order):
            raise Refusal("a memory format for another number of dims is an error in eager")
        return b.laid_out(b.pointwise("copy", (self,), self.dtype, layouts=()), order)
    check_options(b, memory_format=memory_format)
    return _cast(b, self, self.dtype, copy=True)


@composite("tsfuser::ordered", dtypes=CONVERTED, sizes="first", smooth=True, copies=True, fresh=False)
def ordered(b: Builder, self, memory_format: int = 0) -> Value:
    """`aten::contiguous` where nobody can tell a copy of `self` from itself"""
    if memory_format != _ROW_MAJOR and memory_format not in _CHANNELS_LAST:
        raise Refusal("contiguous in another memory format is an error in eager")
    return clone(b, self, memory_format)


@composite("tsfuser::rounded", dtypes=FLOATING, sizes="first", smooth=True)
def rounded(b: Builder, self) -> Value:
    """`self`, rounded to its dtype for those who read it in its group, too"""
    symbol = "copy" if is_rounded(b, self) else f"stored_as_{self.dtype}"
    return b.copied(b.pointwise(symbol, (self,), self.dtype, layouts=()), self)


@composite("tsfuser::unrounded", dtypes=FLOATING, sizes="first", smooth=True)
def unrounded(b: Builder, self, dtype: int) -> Value:
    """`self` as a float `dtype`, to which it is rounded where it is stored, and not before"""
    if not scalar_type(dtype).is_floating:
        raise Refusal("a cast to integers rounds")
    return b.copied(b.pointwise("copy", (self,), scalar_type(dtype), layouts=()), self)


@composite("tsfuser::packed", dtypes=CONVERTED, sizes="first", smooth=True, copies=True, fresh=False)
def packed(b: Builder, self) -> Value:
    """A copy of `self` without gaps, as products of matrices read their operands; nothing writes to either"""
    return b.packed(b.pointwise("copy", (self,), self.dtype, layouts=()), self)


@composite("tsfuser::with_room", dtypes=CONVERTED, sizes="first", smooth=True, needs_kernel=True, fresh=False)
def with_room(b: Builder, self, dim: int) -> Value:
    """`tsfuser::packed`, with zeros behind dim `dim` up to whole accesses; behind both dims of a matrix"""
    made = packed(b, self)
    return b.with_room(made, dim) if len(self.dims) > 1 else made


@composite("tsfuser::store", dtypes=CONVERTED, sizes="first", fresh=False)
def store(b: Builder, self, value) -> Value:
    """`value` in the memory of `self`, which is returned"""
    b.update(self, value, counted=False)
    return self


@composite("tsfuser::laid_out", dtypes=CONVERTED, sizes="first", smooth=True, fresh=False)
def laid_out(b: Builder, self, order: list[int]) -> Value:
    """`self` with its dims in that `order` in memory, outermost first; as it is if it has another rank"""
    if len(order) != len(self.dims):
        return self
    return b.laid_out(b.pointwise("copy", (self,), self.dtype, layouts=()), order)


@composite("aten::_autocast_to_reduced_precision", **_CAST)
def autocast_to_reduced_precision(
    b: Builder, self, cuda_enabled: bool, cpu_enabled: bool, cuda_dtype: int, cpu_dtype: int
) -> Value:
    """float32 `self` in the autocast dtype"""
    on_cpu = b.device == "cpu"
    if self.dtype is not FLOAT or not (cpu_enabled if on_cpu else cuda_enabled):
        return self
    return _cast(b, self, scalar_type(cpu_dtype if on_cpu else cuda_dtype))


@composite("aten::_autocast_to_full_precision", **_CAST)
def autocast_to_full_precision(b: Builder, self, cuda_enabled: bool, cpu_enabled: bool) -> Value:
    """16-bit `self` in float32"""
    enabled = cpu_enabled if b.device == "cpu" else cuda_enabled
    return _cast(b, self, FLOAT) if enabled and self.dtype in NARROW else self


# ---- one number everywhere


def filled(b: Builder, name: str, like: Value, value: Value, dtype: DType) -> Value:
    """A tensor of the sizes and layout of `like` that holds `value` everywhere."""
    converted(b, name, dtype, value)
    if dtype.is_floating:
        value = round_number(b, value, dtype)
    elif value.dtype.is_complex and not dtype.is_complex:
        raise Refusal(f"{name} with a complex number in {dtype}")
    made = b.pointwise("fill", (like, value), dtype, own_types=True, layouts=(), name=name)
    return b.copied(made, like)


def _like(name: str, number: int) -> None:
    def evaluate(
        b: Builder,
        self,
        dtype: int | None = None,
        layout: int | None = None,
        device: str | None = None,
        pin_memory: bool | None = None,
        memory_format: int | None = None,
    ) -> Value:
        check_options(b, layout, device, pin_memory, memory_format)
        return filled(b, name, self, b.literal(number), self.dtype if dtype is None else scalar_type(dtype))

    evaluate.__doc__ = f"A tensor like `self` that holds {number}"
    composite(f"aten::{name}", dtypes=CONVERTED, sizes="first", smooth=True, asked="self")(evaluate)


_like("zeros_like", 0)
_like("ones_like", 1)


@composite("aten::full_like", dtypes=CONVERTED, sizes="first", smooth=True, asked="self")
def full_like(
    b: Builder,
    self,
    fill_value,
    dtype: int | None = None,
    layout: int | None = None,
    device: str | None = None,
    pin_memory: bool | None = None,
    memory_format: int | None = None,
) -> Value:
    """A tensor like `self` that holds `fill_value`"""
    check_options(b, layout, device, pin_memory, memory_format)
    return filled(b, "full_like", self, fill_value, self.dtype if dtype is None else scalar_type(dtype))


@composite("aten::fill", "Scalar", "Tensor", dtypes=CONVERTED, sizes="first", smooth=True)
def fill(b: Builder, self, value) -> Value:
    """A tensor like `self` that holds `value`"""
    if value.dims:
        raise Refusal("fill with a value that has dimensions is an error in eager")
    if not value.is_number and (found := b.input_of(value)) is not None and found.by_value:
        b.limit_element(value, convertible(self.dtype), "the value of fill")  # on one device eager casts
    return filled(b, "fill", self, value, self.dtype)
