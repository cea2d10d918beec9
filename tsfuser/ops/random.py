"""Random numbers and dropout, over `Builder.uniform`.

In: a tensor, a probability. Out: results with eager's distribution, not its numbers; `manual_seed` makes
both reproducible. Where the builder is to have eager's numbers, they are these, bit for bit: its
walks (ir/eager_random.py) and its roundings. Example, dropout of x:

    keep = uniform(x) < 1 - p;  y = x * keep * (1 / (1 - p))
"""

from __future__ import annotations

import struct

from ..errors import Refusal
from ..ir import eager_random
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import BOOL, DOUBLE, FLOAT, INT64, DType
from ..ir.fusion import Seed, Value
from ..ir.limits import between
from ..ir.seed_lengths import order_of
from ..ir.symbols import define
from .casts import check_options
from .table import ALL, BOOLEAN, FLOATING, composite, scalar_type

define("below_one", "({0} == 1 ? 0 : {0})", cheap=True)
define("uniform_in_float16", "(floor({0} * 2048.0f) * 0.00048828125f)")
define("uniform_in_bfloat16", "(floor({0} * 256.0f) * 0.00390625f)")
define("normal_in_float32", "(sqrt(-2 * log(1 - {0})) * cos(6.283185307179586f * {1}))")
define("normal_in_float64", "(sqrt(-2 * log(1 - {0})) * cos(6.283185307179586 * {1}))")
define("rate_of_kept", "(1 - {0})", cheap=True)
define("scale_of_kept", "({0} > 0 ? 1 / {0} : 0)", cheap=True)
# a product of the three: the scale is finite and not negative
define("times_kept", "({0} * ({1} ? {2} : 0))", cheap=True, grows=(1, 1, 1))
define("rounded_product", "rounded_product({0} * {1}, {2})")
define("times_zero", "({0} * 0)", cheap=True)
define("true", "convert<bool>(true)", cheap=True)
define("false", "convert<bool>(false)", cheap=True)

_PROBABILITY = between(0.0, 1.0)


@composite("aten::rand_like", dtypes=ALL, sizes="first", asked="self")
def rand_like(
    b: Builder,
    self,
    dtype: int | None = None,
    layout: int | None = None,
    device: str | None = None,
    pin_memory: bool | None = None,
    memory_format: int | None = None,
) -> Value:
    """Uniform random numbers in [0, 1)"""
    check_options(b, layout, device, pin_memory, memory_format)
    wanted = _wanted("rand_like", self, dtype)
    if b.eager:  # 1 becomes 0, also what is 1 when it has been rounded
        numbers = eager_random.numbers(b, "uniform", self, wanted.register, wanted.itemsize)
        return b.pointwise("below_one", (b.cast(numbers, wanted),), wanted, name="rand")
    if wanted in (FLOAT, DOUBLE):
        return b.uniform(self, wanted)
    # as many bits as the dtype holds, as eager on the CPU: rounding 24 bits would give 1
    return b.pointwise(f"uniform_in_{wanted}", (b.uniform(self),), wanted, name="rand")


@composite("aten::randn_like", dtypes=ALL, sizes="first", asked="self")
def randn_like(
    b: Builder,
    self,
    dtype: int | None = None,
    layout: int | None = None,
    device: str | None = None,
    pin_memory: bool | None = None,
    memory_format: int | None = None,
) -> Value:
    """Normal random numbers of mean 0 and variance 1, from two uniform ones each (Box and Muller 1958)"""
    check_options(b, layout, device, pin_memory, memory_format)
    wanted = _wanted("randn_like", self, dtype)
    own = wanted.register
    if b.eager:  # adding the mean, 0, turns -0 to 0
        numbers = eager_random.numbers(b, "normal", self, own, wanted.itemsize)
        return b.cast(b.pointwise("without_minus_zero", (numbers,), own, name="randn"), wanted)
    return b.pointwise(f"normal_in_{own}", (b.uniform(self, own), b.uniform(self, own)), wanted, name="randn")


def _wanted(name: str, self: Value, dtype: int | None) -> DType:
    """The dtype of the result."""
    wanted = self.dtype if dtype is None else scalar_type(dtype)
    if wanted.name not in FLOATING:
        raise Refusal(f"{name} in {wanted} is not supported")
    return wanted


@composite(
    "aten::dropout",
    dtypes=ALL,
    sizes="first",
    fresh=False,
    secret_view=True,
    keeps_dtype=True,
    in_place_early=True,
)
def dropout(b: Builder, input, p, train: bool) -> Value:
    """`input * mask / (1 - p)`, a random mask being true at a rate of `1 - p`; `input` outside training"""
    b.limit(p, _PROBABILITY, "the probability of dropout")
    if not train or p.literal == 0:
        return input
    return _dropped(b, input, p)[0]


# Not fresh: autodiff's forward has it for a dropout, which may return its operand.
@composite("aten::native_dropout", dtypes=ALL, sizes="first", fresh=False)
def native_dropout(b: Builder, input, p, train: bool | None) -> tuple[Value, Value]:
    """As `dropout`, with the mask; a copy and a mask of true outside training"""
    if train is False:
        mask = b.pointwise("true", (input,), BOOL, own_types=True, name="mask")
        return b.pointwise("copy", (input,), input.dtype), mask
    return _dropped(b, input, p)


@composite("tsfuser::seeded_dropout", dtypes=ALL, sizes="first", table="seed", smooth=True)
def seeded_dropout(b: Builder, self, seed, stream: int, p, order: list) -> Value:
    """As `dropout`, with a mask that follows from `seed`, two integers, and `stream`, a number, so that the
    backward has the same; `order` holds the dims, the outermost in memory first"""
    if self.dtype.name not in FLOATING:
        raise Refusal(f"dropout of a {self.dtype} tensor is not supported")
    if not b.call.decide(sz.eq(b.sizes(seed)[0], 2) if seed.dims else sz.const(0)):
        raise Refusal("a seed is a tensor of two int64")
    if p.literal is None:
        raise Refusal("a seeded dropout whose probability is not a constant")
    b.limit(p, _PROBABILITY, "the probability of dropout")
    uniform = b.seeded_uniform(self, seed, stream, order)
    return _masked(b, self, uniform, p)[0]


# Not fresh: outside of groups it is the mask.
@composite("tsfuser::dropout_seed", dtypes=BOOLEAN, sizes="own", fresh=False, secret_view=True)
def dropout_seed(b: Builder, mask) -> Value | Seed:
    """The operand from which `dropout_mask` makes the mask of a dropout again: on CUDA the seed of its random
    numbers, if the same group draws them and the backward can draw them again; else the mask itself"""
    return b.seed_of(mask) or mask


# The forward may give a mask in one call and a seed in the next.
@composite(
    "tsfuser::dropout_mask",
    dtypes=ALL,
    sizes="like",
    table="saved",
    unguarded=("saved",),
    fixed=("p",),
    fresh=False,
    secret_view=True,
    needs_kernel=True,
)
def dropout_mask(b: Builder, saved, like, p) -> Value:
    """The mask, of the sizes of `like`, that `dropout_seed` has saved, or saved the seed of; `p` is the
    dropout rate"""
    if saved.dtype is BOOL:
        return saved
    if saved.dtype is not INT64 or len(saved.dims) != 1 or p.literal is None:
        raise Refusal("what is saved of a dropout is neither a mask nor a seed")
    order = order_of(len(like.dims), b.call.decide(b.sizes(saved)[0]))
    if order is None:
        raise Refusal("the seed of a dropout does not fit the gradient")
    return _mask(b, b.seeded_uniform(like, saved, 0, order), b.literal(1.0 - p.literal))


def _dropped(b: Builder, input: Value, p: Value) -> tuple[Value, Value]:
    """The result and the mask."""
    if input.dtype.name not in FLOATING:
        raise Refusal(f"dropout of a {input.dtype} tensor is not supported")
    b.limit(p, _PROBABILITY, "the probability of dropout")
    if b.eager:
        return _dropped_as_eager(b, input, p.literal)
    return _masked(b, input, b.uniform(input), p)


def _masked(b: Builder, input: Value, uniform: Value, p: Value) -> tuple[Value, Value]:
    """The result and the mask, by uniform random numbers."""
    if p.literal is None:  # values of their own: once a kernel, not once an element
        keep = b.pointwise("rate_of_kept", (p,), DOUBLE, name="keep")
        scale = b.pointwise("scale_of_kept", (keep,), input.dtype.register, name="scale")
    else:
        keep = b.literal(1.0 - p.literal)
        scale = b.literal(1 / keep.literal if keep.literal else 0.0)
    mask = _mask(b, uniform, keep)
    return b.pointwise("times_kept", (input, mask, scale), input.dtype, name="dropout"), mask


def _mask(b: Builder, uniform: Value, keep: Value) -> Value:
    return b.pointwise("lt", (uniform, keep), BOOL, FLOAT, name="mask")


def _dropped_as_eager(b: Builder, input: Value, p: int | float | complex | None) -> tuple[Value, Value]:
    """The same with eager's numbers: all but float64 compares and scales in float, which 1 - p is rounded to
    before the scale is computed. Where p is 0 or 1, eager's dropout draws nothing."""
    if p is None or isinstance(p, complex):
        raise Refusal("eager's random numbers for a dropout whose probability is not a constant")
    own = input.dtype.register
    keep = _rounded(1.0 - p, own)
    if p in (0, 1):
        mask = b.pointwise("false" if p else "true", (input,), BOOL, own_types=True, name="mask")
        return b.pointwise("times_zero" if p else "copy", (input,), input.dtype, name="dropout"), mask
    scale = b.literal(_rounded(1.0 / keep, own))
    uniform = eager_random.dropout_numbers(b, input)
    mask = b.pointwise("lt", (uniform, b.literal(keep)), BOOL, own, name="mask")
    result = b.pointwise("rounded_product", (input, mask, scale), own, name="dropout")
    return b.cast(result, input.dtype), mask


def _rounded(number: float, dtype: DType) -> float:
    return number if dtype is DOUBLE else struct.unpack("f", struct.pack("f", number))[0]
