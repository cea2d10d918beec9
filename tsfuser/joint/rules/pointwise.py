"""Derivatives of ops that compute each element by itself.

Where operands broadcast, a number or a tensor without dims may be on the CPU beside others on a GPU: torch
takes a condition that is (`where`), but no mask (`masked_fill`).
"""

from __future__ import annotations

import math

import torch

from ...errors import Refusal
from ...ir.dtypes import DTYPES
from ..terms import DTYPE_NUMBERS
from .table import broadcasting, is_whole, rule, structural

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
_ROOT_OF_PI = math.sqrt(math.pi)

#: Of one operand: the factor of the gradient, by the operand x and the result y.
_FACTORS = {
    "exp": lambda x, y: y,
    "exp2": lambda x, y: y * math.log(2),
    "expm1": lambda x, y: y + 1,
    "cos": lambda x, y: -x.sin(),
    "sin": lambda x, y: x.cos(),
    "tan": lambda x, y: y**2 + 1,
    "sinh": lambda x, y: x.cosh(),
    "cosh": lambda x, y: x.sinh(),
    "asin": lambda x, y: (1 - x * x).rsqrt(),
    "acos": lambda x, y: -(1 - x * x).rsqrt(),
    "asinh": lambda x, y: (x**2 + 1).rsqrt(),
    "acosh": lambda x, y: (x**2 - 1).rsqrt(),
    "atanh": lambda x, y: (1 - x**2).reciprocal(),
    "erf": lambda x, y: (-(x**2)).exp() * (2 / _ROOT_OF_PI),
    "erfc": lambda x, y: (-(x**2)).exp() * (-2 / _ROOT_OF_PI),
    "erfinv": lambda x, y: (x.erfinv() ** 2).exp() * (_ROOT_OF_PI / 2),
    "digamma": lambda x, y: x.writer("aten::polygamma", 1, x),
    "lgamma": lambda x, y: x.digamma(),
    "reciprocal": lambda x, y: -(y * y),
    "rsqrt": lambda x, y: y**3 * -0.5,
    "abs": lambda x, y: x.sign(),
    "deg2rad": lambda x, y: math.pi / 180,
    "rad2deg": lambda x, y: 180 / math.pi,
    "special_entr": lambda x, y: -(x.log() + 1),
    "square": lambda x, y: x * 2,
}
#: The same, as a divisor.
_DIVISORS = {
    "log": lambda x, y: x,
    "log2": lambda x, y: x * math.log(2),
    "log10": lambda x, y: x * math.log(10),
    "log1p": lambda x, y: x + 1,
    "sqrt": lambda x, y: y * 2,
    "atan": lambda x, y: x * x + 1,
}
#: torch's derivatives that take the gradient and the operand, or the gradient and the result.
_OF_OPERAND = ("silu", "mish", "hardswish", "hardsigmoid")
_OF_RESULT = ("tanh", "sigmoid")
#: Their steps have no slope.
_STEPS = ("sign", "sgn", "floor", "ceil", "round", "trunc")


def _one_operand() -> None:
    def factor(formula):
        return lambda grad, self, result: grad * formula(self, result)

    def divisor(formula):
        return lambda grad, self, result: grad / formula(self, result)

    for name, formula in _FACTORS.items():
        rule(f"aten::{name}")(factor(formula))
    for name, formula in _DIVISORS.items():
        rule(f"aten::{name}")(divisor(formula))
    for name in _OF_OPERAND:
        rule(f"aten::{name}")(
            lambda grad, self, _kind=f"aten::{name}_backward": grad.writer(_kind, grad, self)
        )
    for name in _OF_RESULT:
        rule(f"aten::{name}")(
            lambda grad, result, _kind=f"aten::{name}_backward": grad.writer(_kind, grad, result)
        )
    rule(*(f"aten::{name}" for name in _STEPS))(lambda grad: grad.zeros_like())


_one_operand()


def _within(number, dtype):
    """The number, which eager's derivative casts. Raises Refusal where that overflows, an error in eager."""
    number = structural(number, "a factor")
    if DTYPES[dtype].largest < abs(number) < math.inf:
        raise Refusal(f"a derivative with a number beyond {dtype} is an error in eager")
    return number


@rule("aten::neg")
def neg(grad):
    return -grad


@rule("aten::to", "aten::type_as")
def cast(grad, self):
    """Back to the device of the operand; all gradients get the dtypes of their operands."""
    device = self.facts.device
    if device is None:
        return grad.to(self)
    return grad if device == grad.facts.device else grad.to(torch.device(device), None, False, False)


@rule(
    "aten::frac",
    "aten::positive",
    "aten::clone",
    "aten::contiguous",
    "aten::alias",
    "tsfuser::rounded",
    "tsfuser::in_format_of",
    "tsfuser::packed",
)
def unchanged(grad):
    return grad


@rule("aten::sinc")
def sinc(grad, self):
    x = self * math.pi
    slope = (x * x.cos() - x.sin()) / (x * self)
    return (grad * slope).masked_fill(self == 0, 0)


@rule("aten::logit")
def logit(grad, self, eps):
    return grad.writer("aten::logit_backward", grad, self, eps)


@rule("aten::nan_to_num")
def nan_to_num(grad, self):
    return grad * self.isfinite()


# ---- activations


@rule("aten::relu")
def relu(grad, result):
    return grad.threshold_backward(result, 0)


@rule("aten::threshold")
def threshold(grad, self, threshold):
    return grad.threshold_backward(self, threshold)


@rule("aten::relu6")
def relu6(grad, self):
    return grad.hardtanh_backward(self, 0, 6)


@rule("aten::hardtanh")
def hardtanh(grad, self, min_val, max_val):
    return grad.hardtanh_backward(self, min_val, max_val)


@rule("aten::hardshrink")
def hardshrink(grad, self, lambd):
    return grad.hardshrink_backward(self, lambd)


@rule("aten::softshrink")
def softshrink(grad, self, lambd):
    return grad.softshrink_backward(self, lambd)


@rule("aten::gelu")
def gelu(grad, self, approximate):
    return grad.gelu_backward(self, approximate=approximate)


@rule("aten::leaky_relu")
def leaky_relu(grad, self, negative_slope):
    return grad.leaky_relu_backward(self, negative_slope, False)


@rule("aten::log_sigmoid")
def log_sigmoid(grad, self):
    return grad * (-self).sigmoid()


@rule("aten::softplus")
def softplus(grad, self, beta, threshold):
    return grad.softplus_backward(self, beta, threshold)


@rule("aten::elu")
def elu(grad, self, alpha, scale, input_scale):
    return grad.elu_backward(alpha, scale, input_scale, False, self)


@rule("aten::selu")
def selu(grad, self):
    return grad.elu_backward(_SELU_ALPHA, _SELU_SCALE, 1, False, self)


@rule("aten::celu")
def celu(grad, self, alpha):
    alpha = _within(alpha, "float32")
    if alpha == 0:
        raise Refusal("celu by 0 is an error in eager")
    return grad.elu_backward(alpha, 1, 1 / alpha, False, self)


@broadcasting("aten::_prelu_kernel", of="self weight")
def prelu(grad, self, weight):
    positive = self > 0
    return positive.where(grad, grad * weight), (grad * self).masked_fill(positive, 0)


# ---- two operands


@broadcasting("aten::add", of="self other")
def add(grad, alpha):
    return grad, _times(grad, alpha)


@broadcasting("aten::sub", of="self other")
def sub(grad, alpha):
    return grad, _times(-grad, alpha)


@broadcasting("aten::rsub", of="self other")
def rsub(grad, alpha):
    return _times(-grad, alpha), grad


def _times(grad, number):
    return grad if not hasattr(number, "writer") and number == 1 else grad * number


@broadcasting("aten::mul", of="self other")
def mul(grad, self, other):
    return grad * other, grad * self


@broadcasting("aten::div", of="self other")
def div(grad, self, other, rounding_mode=None):
    if rounding_mode is not None:
        return grad.zeros_like(), grad.zeros_like()
    if not getattr(other, "is_tensor", False):
        return grad / other
    return grad / other, -grad * (self / other / other)


@broadcasting("aten::remainder", of="self other")
def remainder(grad, self, other):
    return grad, -grad * self.div(other, rounding_mode="floor")


@broadcasting("aten::fmod", of="self other")
def fmod(grad, self, other):
    return grad, -grad * self.div(other, rounding_mode="trunc")


@broadcasting("aten::pow", of="self exponent")
def pow_(grad, self, exponent, result):
    if isinstance(exponent, (int, float)):
        return grad.zeros_like() if exponent == 0 else grad * (self ** (exponent - 1) * exponent)
    if isinstance(self, (int, float)):
        return _power_of_number(grad, self, exponent, result)
    if not exponent.is_tensor:  # eager takes roots for certain numbers, but not for elements of tensors
        by_base = grad * (self ** (exponent - 1) * exponent)
        is_zero = grad.writer("aten::scalar_tensor", exponent, dtype=DTYPE_NUMBERS["float64"]) == 0
        return is_zero.where(0, by_base), None
    self, exponent = _as_tensor(self), _as_tensor(exponent)
    _not_bool(exponent)
    by_base = (exponent == 0).where(0, grad * (exponent * self ** (exponent - 1)))
    flat = (self == 0) & (exponent >= 0)
    return by_base, grad * flat.where(0, result * self.log())


def _power_of_number(grad, self, exponent, result):
    if self == 0:
        return None, grad * (result * -math.inf).masked_fill(exponent >= 0, 0)
    return None, grad * (result * (math.log(self) if self > 0 else math.nan))


def _as_tensor(value):
    """A number that the program computes as a tensor without dims, whatever it is."""
    return (
        value
        if value.is_tensor
        else value.writer("aten::scalar_tensor", value, dtype=DTYPE_NUMBERS["float64"])
    )


@broadcasting("aten::atan2", of="self other")
def atan2(grad, self, other):
    """0 where both are so small that their squares are 0."""
    _not_bool(self)
    square = self * self + other * other
    inverse = square.reciprocal().masked_fill(square == 0, 0)
    return grad * other * inverse, grad * -self * inverse


@broadcasting("aten::copysign", of="self other")
def copysign(grad, self, result):
    return (self == 0).where(0, grad * (result / self)), grad.zeros_like()


@broadcasting("aten::xlogy", of="self other")
def xlogy(grad, self, other):
    if not getattr(self, "is_tensor", False):
        return None, grad * self / other
    return _unless_flat(grad.xlogy(other), self, other, 0), grad * self / other


@broadcasting("aten::special_xlog1py", of="self other")
def xlog1py(grad, self, other):
    if not getattr(self, "is_tensor", False):
        return None, grad * self / (other + 1)
    return _unless_flat(grad.special_xlog1py(other), self, other, -1), grad * self / (other + 1)


def _unless_flat(slope, self, other, limit):
    """0 where `self` is 0 and `other` is up to the limit."""
    if isinstance(other, (int, float)):
        return (self == 0).where(0, slope) if other <= limit else slope
    return ((self == 0) & (_as_tensor(other) <= limit)).where(0, slope)


@broadcasting("aten::hypot", of="self other")
def hypot(grad, self, other, result):
    return grad * (self / result), grad * (other / result)


def _not_bool(*terms):
    """Raises Refusal where eager's derivative subtracts or negates bools, which is an error there."""
    if any(getattr(term, "is_tensor", False) and term.facts.dtype == "bool" for term in terms):
        raise Refusal("a derivative that subtracts bools is an error in eager")


@broadcasting("aten::logaddexp", of="self other")
def logaddexp(grad, self, other):
    _not_bool(self, other)
    return grad / ((other - self).exp() + 1), grad / ((self - other).exp() + 1)


@broadcasting("aten::logaddexp2", of="self other")
def logaddexp2(grad, self, other):
    _not_bool(self, other)
    return grad / ((other - self).exp2() + 1), grad / ((self - other).exp2() + 1)


@broadcasting("aten::addcmul", of="self tensor1 tensor2")
def addcmul(grad, tensor1, tensor2, value):
    return grad, grad * (tensor2 * value), grad * (tensor1 * value)


@broadcasting("aten::addcdiv", of="self tensor1 tensor2")
def addcdiv(grad, tensor1, tensor2, value):
    if is_whole(tensor2):
        raise Refusal("a derivative that divides in place by whole numbers is an error in eager")
    if tensor2.facts.dtype in ("float16", "bfloat16", "float32"):
        value = _within(value, tensor2.facts.dtype)
    return grad, grad * (value / tensor2), -grad * (tensor1 / (tensor2 * tensor2) * value)


@broadcasting("aten::lerp", of="self end weight")
def lerp(grad, self, end, weight):
    return grad * (1 - weight), grad * weight, grad * (end - self)


# ---- choices


def _shared(grad, self, other, less):
    """Equal operands share the gradient."""
    return (self == other).where(grad / 2, grad).masked_fill(less, 0)


@broadcasting("aten::maximum", of="self other")
def maximum(grad, self, other):
    return _shared(grad, self, other, self < other), _shared(grad, self, other, self > other)


@broadcasting("aten::minimum", of="self other")
def minimum(grad, self, other):
    return _shared(grad, self, other, self > other), _shared(grad, self, other, self < other)


@broadcasting("aten::fmax", of="self other")
def fmax(grad, self, other):
    first = (self >= other) | other.isnan()
    return grad.masked_fill(~first, 0), grad.masked_fill(first, 0)


@broadcasting("aten::fmin", of="self other")
def fmin(grad, self, other):
    first = (self <= other) | other.isnan()
    return grad.masked_fill(~first, 0), grad.masked_fill(first, 0)


@broadcasting("aten::where", of="self other")
def where(grad, condition):
    return condition.where(grad, 0), condition.where(0, grad)


@broadcasting("aten::masked_fill", of="self value")
def masked_fill(grad, mask):
    return grad.masked_fill(mask, 0), mask.where(grad, 0)


@broadcasting("aten::clamp", of="self min max")
def clamp(grad, self, min, max):
    """As in eager, bounds have no gradient where they are crossed but for the upper one, which the result is
    then."""
    below, above = None if min is None else self < min, None if max is None else self > max
    if below is None or above is None:
        beyond = above if below is None else below
        inside = (self >= min) if above is None else (self <= max)
        return inside.where(grad, 0), below and beyond.where(grad, 0), above and beyond.where(grad, 0)
    inside = (self >= min) & (self <= max)
    if not getattr(min, "is_tensor", False):
        return inside.where(grad, 0)
    crossed = max < min
    return inside.where(grad, 0), (below & (min < max)).where(grad, 0), (above | crossed).where(grad, 0)


@broadcasting("aten::clamp_min", of="self min")
def clamp_min(grad, self, min):
    return (self >= min).where(grad, 0), (self < min).where(grad, 0)


@broadcasting("aten::clamp_max", of="self max")
def clamp_max(grad, self, max):
    return (self <= max).where(grad, 0), (self > max).where(grad, 0)


@rule("aten::polygamma")
def polygamma(grad, n, self):
    return grad * grad.writer("aten::polygamma", structural(n, "the order of a polygamma") + 1, self)
