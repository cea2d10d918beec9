"""Layer normalisation and its derivative, from means and sums of squared distances in the accumulation dtype.

The derivative of `y = xh w + b`, `xh = (x - mean) rstd`, with `g = dy w` over n elements: `dx = rstd (g -
mean(g) - xh mean(g xh))`, `dw = sum(dy xh)`, `db = sum(dy)` (Ba, Kiros, Hinton, Layer Normalization, 2016;
torch's `layer_norm_backward`).
"""

from __future__ import annotations

from ..errors import Refusal
from ..ir import size as sz
from ..ir.build import Builder
from ..ir.dtypes import DType
from ..ir.fusion import Pointwise, Value
from ..ir.layout import contiguous
from ..ir.symbols import CANCELS, define
from ..ir.views import through_memory
from .channels import scaled
from .reduction import mean_of, narrow, squares
from .table import FLOATING, composite

_LARGE = 1 << 20  #: elements that are worth a copy of their own

define("norm_backward", "(({0} - {1} - {2} * {3}) * {4})", cheap=True, grows=(*[CANCELS] * 4, 1))
define("rms_norm_backward", "(({0} - {1} * {2}) * {3})", cheap=True, grows=(*[CANCELS] * 3, 1))


def inner(b: Builder, input: Value, shape: list, *parameters: Value | None) -> list[int]:
    """The last dims of `input`, whose sizes are `shape`, as are those of the `parameters`."""
    first = len(input.dims) - len(shape or ())
    if not shape or first < 0:
        raise Refusal("a normalized shape that does not fit its operand is an error in eager")
    for size, own in zip(shape, b.sizes(input)[first:]):
        if not b.call.decide(sz.eq(own, size)):
            raise Refusal("a normalized shape that does not fit its operand is an error in eager")
    sizes = b.sizes(input)[first:]
    for value in parameters:
        if value is not None and not (len(value.dims) == len(shape) and _equal(b, b.sizes(value), sizes)):
            raise Refusal("a parameter that is not of the normalized shape is an error in eager")
    return list(range(first, len(input.dims)))


def _equal(b: Builder, sizes: tuple, others: tuple) -> bool:
    return all(b.call.decide(sz.eq(size, other)) for size, other in zip(sizes, others))


def _check_parameters(b: Builder, input: Value, *parameters: Value | None) -> DType:
    """The dtype of saved statistics. Parameters have the operand's dtype; on the CPU those of a 16-bit
    operand may be in float."""
    given = {v.dtype for v in parameters if v is not None}
    register = input.dtype.register
    if not given <= {input.dtype} and (b.device != "cpu" or given != {register}):
        raise Refusal(
            f"a normalisation of {input.dtype} with parameters in {', '.join(sorted(map(str, given)))}"
        )
    return register if b.device != "cpu" or register in given else input.dtype


def _in_rows(b: Builder, value: Value, dims: list[int]) -> Value:
    """`value`, or a copy of it row by row where neighbours in memory lie in different rows, as those of an
    image whose channels are normalised: a pass over rows would fetch a sector of memory for each element."""
    decide, strides = b.call.decide, b.layout(value).strides
    across = [d for d in range(dims[0]) if value.dims[d] is not None]
    if value.dims[dims[-1]] is None or decide(sz.eq(strides[dims[-1]], 1)):
        return value
    if not any(decide(sz.eq(strides[d], 1)) for d in across):
        return value
    if not decide(sz.le(_LARGE, sz.product(b.sizes(value)))):
        return value
    narrow_one = _cast_operand(b, value)
    stored = through_memory(b, value if narrow_one is None else narrow_one, contiguous(b.sizes(value)))
    return stored if narrow_one is None else b.cast(stored, value.dtype)


def _cast_operand(b: Builder, value: Value) -> Value | None:
    """The value of 16 bits that `value` is a cast of; None if it is none."""
    made = next((op for op in b.ops if op.output is value), None)
    if not isinstance(made, Pointwise) or made.symbol != "convert" or made.operands[0].is_number:
        return None
    operand = made.operands[0]
    return operand if operand.dtype.itemsize == 2 and operand.dims == value.dims else None


def _layer_norm(
    b: Builder, input: Value, shape: list, weight, bias, eps: Value
) -> tuple[Value, Value, Value]:
    """Result, mean and 1 / standard deviation; the latter two in the accumulation dtype, with reduced dims as
    size 1."""
    dims = inner(b, input, shape, weight, bias)
    input = _in_rows(b, input, dims)
    mean, summed = squares(b, input, dims)
    rstd = b.pointwise("rsqrt_of_mean", (summed, b.count(input, dims), eps), summed.dtype, name="rstd")
    return b.contiguous(scaled(b, "layer_norm", input, mean, rstd, weight, bias, input.dtype)), mean, rstd


@composite(
    "aten::layer_norm", dtypes=FLOATING, sizes="first", symbolic=("normalized_shape",), gradient="strict"
)
def layer_norm(
    b: Builder, input, normalized_shape: list, weight=None, bias=None, eps=None, cudnn_enable: bool = True
) -> Value:
    """`(input - mean) / sqrt(var + eps) * weight + bias` over the last dims"""
    _check_parameters(b, input, weight, bias)
    return _layer_norm(b, input, normalized_shape, weight, bias, eps)[0]


@composite(
    "aten::native_layer_norm", dtypes=FLOATING, sizes=("first", "own", "own"), symbolic=("normalized_shape",)
)
def native_layer_norm(b: Builder, input, normalized_shape: list, weight=None, bias=None, eps=None):
    """layer_norm, the mean and 1 / standard deviation"""
    saved = _check_parameters(b, input, weight, bias)
    result, mean, rstd = _layer_norm(b, input, normalized_shape, weight, bias, eps)
    return result, narrow(b, "mean", mean, saved), narrow(b, "rstd", rstd, saved)


@composite(
    "aten::native_layer_norm_backward",
    dtypes=FLOATING,
    sizes=("input", "weight", "bias"),
    symbolic=("normalized_shape",),
)
def native_layer_norm_backward(
    b: Builder, grad_out, input, normalized_shape: list, mean, rstd, weight, bias, output_mask: list
):
    """The gradients of layer_norm that `output_mask` asks for"""
    if grad_out.dtype is not input.dtype:
        raise Refusal(f"a gradient in {grad_out.dtype} of a layer_norm in {input.dtype}")
    _check_parameters(b, input, weight, bias)
    dims, register = inner(b, input, normalized_shape, weight, bias), input.dtype.register
    input = _in_rows(b, input, dims)
    outer = list(range(dims[0]))
    hat = b.pointwise("normalize", (input, mean, rstd), register, name="normalized")
    gradients: list[Value | None] = [None, None, None]
    if output_mask[0]:
        gradients[0] = gradient(
            b, "layer_norm_backward", grad_out, hat, rstd, weight, dims, input.dtype, centered=True
        )
    if output_mask[1]:
        product = b.pointwise("mul", (grad_out, hat), register)
        gradients[1] = parameter_gradient(b, product, outer, input if weight is None else weight)
    if output_mask[2]:
        gradients[2] = parameter_gradient(b, grad_out, outer, input if bias is None else bias)
    return tuple(gradients)


def gradient(
    b: Builder, name, grad: Value, hat: Value, rstd: Value, weight, dims, dtype: DType, centered: bool
) -> Value:
    """`rstd * (g - mean(g) - hat * mean(g * hat))`, without `mean(g)` where the mean was not subtracted."""
    register = hat.dtype
    g = grad if weight is None else b.pointwise("mul", (grad, weight), register)
    slope = mean_of(b, b.pointwise("mul", (g, hat), register), dims)
    if not centered:
        return b.contiguous(b.pointwise("rms_norm_backward", (g, hat, slope, rstd), dtype, name=name))
    shift = mean_of(b, g, dims)
    return b.contiguous(b.pointwise("norm_backward", (g, shift, hat, slope, rstd), dtype, name=name))


def parameter_gradient(b: Builder, term: Value, outer: list[int], like: Value) -> Value:
    """The sum of `term` over the `outer` dims in the dtype of the parameter."""
    return b.reduce("sum", "sum", term, outer, False, like.dtype)
