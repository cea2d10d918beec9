"""Derivatives of products, convolutions, poolings and norms: torch's backward ops, or products."""

from __future__ import annotations

from ...errors import Refusal
from .reductions import mean
from .table import known_rank, rule, structural


def _turned(matrix):
    return matrix.transpose(-2, -1)


def _of_both(grad, self, other, wants, sizes=(None, None)):
    """The gradients of the operands of a product, each in the layout of its operand where both are saved
    (csrc_stubs/torchscript/matmul_gradients.cpp)."""
    likes = (self, other) if len(wants) == 2 else (None, None)
    by_self = (grad, other, sizes[0], likes[0], False)
    by_other = (self, grad, sizes[1], likes[1], False)
    return (
        grad.writer("tsfuser::matmul_backward_self", *by_self) if "self" in wants else None,
        grad.writer("tsfuser::matmul_backward_other", *by_other) if wants != {"self"} else None,
    )


@rule("aten::mm", "aten::bmm", of="self mat2")
def mm(grad, self, mat2, wants):
    return _of_both(grad, self, mat2, wants)


@rule("aten::mv", of="self vec")
def mv(grad, self, vec):
    return grad.unsqueeze(1) * vec, _turned(self).mv(grad)


@rule("aten::dot", of="self tensor")
def dot(grad, self, tensor):
    return grad * tensor, grad * self


@rule("aten::outer", of="self vec2")
def outer(grad, self, vec2):
    return grad.mv(vec2), _turned(grad).mv(self)


@rule("aten::addmm", of="self mat1 mat2", broadcasts=True)
def addmm(grad, mat1, mat2, beta, alpha):
    return grad * beta, grad.mm(_turned(mat2)) * alpha, _turned(mat1).mm(grad) * alpha


@rule("aten::baddbmm", of="self batch1 batch2", broadcasts=True)
def baddbmm(grad, batch1, batch2, beta, alpha):
    return grad * beta, grad.bmm(_turned(batch2)) * alpha, _turned(batch1).bmm(grad) * alpha


@rule("aten::matmul", of="self other", broadcasts=True)
def matmul(grad, self, other, wants):
    """Of any number of dims."""
    return _of_both(grad, self, other, wants, (self.sizes, other.sizes))


@rule("aten::linear", of="input weight bias")
def linear(grad, input, weight, bias):
    """Rows of any number of dims are those of one matrix."""
    if known_rank(weight) == 1:
        rows = grad.unsqueeze(-1)
        by_weight = grad.writer("aten::_grad_sum_to_size", rows * input, weight.sizes)
        return rows * weight, by_weight, grad.sum()
    rows, columns = (grad.writer("tsfuser::rows", value) for value in (grad, input))
    by_bias = bias and grad.writer("aten::_grad_sum_to_size", grad, bias.sizes)
    return grad.matmul(weight), _turned(rows).mm(columns), by_bias


# ---- convolutions and poolings


def _convolution(
    grad, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, wants
):
    """torch's derivative takes batches only."""
    sizes = None if bias is None else [weight.size(1) * groups if transposed else weight.size(0)]
    is_batch = known_rank(input) == known_rank(weight)
    grad, input = (grad, input) if is_batch else (grad.unsqueeze(0), input.unsqueeze(0))
    by_input, *others = grad.writer(
        "aten::convolution_backward",
        *(grad, input, weight, sizes, stride, padding, dilation, transposed, output_padding, groups),
        _asked(wants),
    )
    return (by_input if is_batch else by_input.squeeze(0), *others)


@rule("aten::convolution", "aten::_convolution", of="input weight bias")
def convolution(
    grad, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups, wants
):
    transposed = structural(transposed, "transposed")
    given = (grad, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return _convolution(*given, wants)


@rule("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::_convolution_mode", of="input weight bias")
def conv(grad, input, weight, bias, stride, padding, dilation, groups, wants):
    padding = structural(padding, "a padding")
    if isinstance(padding, str):
        padding = _padding(padding, stride)
    zeros = [0] * len(padding)
    given = (grad, input, weight, bias, stride, padding, dilation, False, zeros, groups)
    return _convolution(*given, wants)


def _padding(word, stride):
    if word != "valid":
        raise Refusal(f"a convolution with padding={word!r} is not differentiated here")
    return [0] * len(structural(stride, "a stride"))


@rule("aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d", of="input weight bias")
def conv_transpose(grad, input, weight, bias, stride, padding, output_padding, groups, dilation, wants):
    given = (grad, input, weight, bias, stride, padding, dilation, True, output_padding, groups)
    return _convolution(*given, wants)


@rule("tsfuser::bias_or_zero", of="bias")
def bias_or_zero(grad):
    return grad


def _avg_pool(kind):
    @rule(kind)
    def write(grad, self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
        args = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
        return grad.writer(f"{kind}_backward", grad, self, *args)


_avg_pool("aten::avg_pool2d")
_avg_pool("aten::avg_pool3d")


@rule("aten::adaptive_avg_pool2d")
def adaptive_avg_pool2d(grad, self, output_size):
    if _is_mean(output_size):
        return mean(grad, self, [-2, -1], True)
    return grad._adaptive_avg_pool2d_backward(self)


@rule("aten::adaptive_avg_pool3d")
def adaptive_avg_pool3d(grad, self, output_size):
    if _is_mean(output_size):
        return mean(grad, self, [-3, -2, -1], True)
    return grad._adaptive_avg_pool3d_backward(self)


def _is_mean(output_size):
    """Whether the result is the mean of all, as which eager computes it."""
    sizes = output_size if isinstance(output_size, list) else [output_size]
    return all(type(size) is int and size == 1 for size in sizes)


@rule("aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices")
def max_pool(grad, self, results, kernel_size, stride, padding, dilation, ceil_mode):
    kind = f"aten::max_pool{len(structural(kernel_size, 'a window'))}d_with_indices_backward"
    return grad.writer(kind, grad, self, kernel_size, stride, padding, dilation, ceil_mode, results[1])


@rule("aten::adaptive_max_pool2d")
def adaptive_max_pool2d(grad, self, results):
    return grad.adaptive_max_pool2d_backward(self, results[1])


@rule("aten::adaptive_max_pool3d")
def adaptive_max_pool3d(grad, self, results):
    return grad.adaptive_max_pool3d_backward(self, results[1])


# ---- norms


#: Kinds whose further results have no gradient of their own: their derivatives take care of them.
STATISTICS = frozenset(
    ("aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm", "tsfuser::batch_norm")
)


def _no_statistics(grads):
    if grads[1] is not None or grads[2] is not None:
        raise Refusal("gradients of a norm's mean and deviation are left to torch")


#: The operands of norms.
_OPERANDS = ("input", "weight", "bias")


def _asked(wants):
    return [name in wants for name in _OPERANDS]


@rule("aten::native_layer_norm", of="input weight bias")
def native_layer_norm(grad, grads, input, normalized_shape, weight, bias, results, wants):
    _no_statistics(grads)
    given = (input, normalized_shape, results[1], results[2], weight, bias)
    return grad.native_layer_norm_backward(*given, _asked(wants))


@rule("aten::group_norm", of="input weight bias")
def group_norm(grad, input, num_groups, weight, bias, eps, wants):
    bias = _like(bias, weight, wants)
    return grad.writer("tsfuser::group_norm_backward", grad, input, num_groups, weight, bias, eps)


def _like(bias, weight, wants):
    """What says that a bias has a gradient, and of which dtype: the weight, which eager saves, unlike the
    bias. A bias without a weight has none in eager's group norm: an error."""
    return None if "bias" not in wants else bias if weight is None else weight


@rule("aten::instance_norm", of="input weight bias")
def instance_norm(grad, input, weight, bias, use_input_stats, eps, wants):
    if structural(use_input_stats, "use_input_stats") is not True:
        raise Refusal("an instance norm by running statistics is left to torch")
    bias = _like(bias, weight, wants)
    return grad.writer("tsfuser::instance_norm_backward", grad, input, weight, bias, eps)


@rule("aten::native_group_norm", of="input weight bias")
def native_group_norm(grad, grads, input, weight, N, C, HxW, group, results, wants):
    _no_statistics(grads)
    given = (input, results[1], results[2], weight, N, C, HxW, group)
    return grad.native_group_norm_backward(*given, _asked(wants))


@rule("aten::native_batch_norm", of="input weight bias")
def native_batch_norm(grad, input, weight, running_mean, running_var, training, eps, results, wants):
    """Running statistics are not read in training, but for their dtype where there is no weight."""
    if structural(training, "training") and weight is not None:
        running_mean = running_var = None
    given = (input, weight, running_mean, running_var, results[1], results[2], training, eps)
    return grad.native_batch_norm_backward(*given, _asked(wants))


@rule("tsfuser::batch_norm", of="input weight bias")
def batch_norm(grad, input, weight, running_mean, running_var, training, eps, results, wants):
    """As that of native_batch_norm, of the implementation that the forward has taken."""
    if structural(training, "training") and weight is not None:
        running_mean = running_var = None
    given = (input, grad, weight, running_mean, running_var, results[1], results[2], training, eps)
    return grad.writer("tsfuser::batch_norm_backward", results[4], *given, _asked(wants), results[3])


@rule("aten::native_dropout_backward", of="grad_output")
def native_dropout_backward(grad, mask, scale):
    return grad.native_dropout_backward(mask, scale)


@rule("aten::native_dropout", of="input")
def native_dropout(grad, results, p, train):
    if not structural(train, "train"):
        return grad
    p = structural(p, "the probability of a dropout")
    return grad.native_dropout_backward(results[1], 0.0 if p == 1 else 1 / (1 - p))


# ---- scaling images up


def _upsampling(kind):
    """Overloads differ in how they give the scales: a number a dim, or a list."""

    @rule(f"aten::{kind}", of="self input")
    def write(
        grad,
        result,
        self=None,
        input=None,
        align_corners=None,
        scale_factors=None,
        scales=None,
        scales_d=None,
        scales_h=None,
        scales_w=None,
    ):
        given, dims = input if self is None else self, known_rank(result) - 2
        sizes = [given.size(d) for d in range(2 + dims)]
        corners = [] if align_corners is None else [align_corners]
        own = {1: [scales], 2: [scales_h, scales_w], 3: [scales_d, scales_h, scales_w]}[dims]
        factors = own if scale_factors is None else structural(scale_factors, "the scales")
        made = [result.size(d) for d in range(2, 2 + dims)]
        by_given = grad.writer(f"aten::{kind}_backward", grad, made, sizes, *corners, *factors)
        return by_given, by_given


for _name in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d"):
    _upsampling(f"upsample_{_name}")
