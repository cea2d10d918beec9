"""What tests of `tsfuser.joint` differentiate: OpInfos, and programs with several ops.

Example: `PROGRAMS[heads]` holds two sets of sizes for the program below.
"""

import torch
import torch.nn.functional as F

from . import opinfo

_STATISTICS = "its other results have gradients there, which are left to torch"
_WRITES = "it writes to running statistics"
#: OpInfos that the op table names and that have no derivative here, or are not compared, and why.
LEFT = {
    "_softmax_backward_data": "a second derivative",
    "nn.functional.max_pool1d": "the first samples ask for places, which another op gives",
    "native_group_norm": _STATISTICS,
    "native_layer_norm": _STATISTICS,
    "_native_batch_norm_legit": _WRITES,
    "nn.functional.instance_norm": _WRITES,
    "nn.functional.batch_norm": "eager takes vectors without elements, its op with statistics does not",
    "nn.functional.pad.circular": "no op of torch takes it back",
    "nextafter": "eager has no derivative",
    "norm.nuc": "singular values",
    "linalg.norm": "orders of matrices",
    "linalg.norm.subgradients_at_zero": "orders of matrices",
    "nn.functional.dropout": "random: test_a_dropout",
    "sum_to_size": "torch's trace has the sizes of one sample",
    "fill": "torch cannot trace it",
}
#: Ops without a row that have one.
OTHERS = """
    addmm baddbmm bmm mm mv dot outer matmul nn.functional.linear nn.functional.conv_transpose1d
    nn.functional.conv_transpose2d nn.functional.embedding nn.functional.max_pool2d nn.functional.avg_pool2d
    nn.functional.adaptive_avg_pool2d nn.functional.nll_loss nn.functional.mse_loss
    nn.functional.smooth_l1_loss nn.functional.huber_loss nn.functional.binary_cross_entropy
    nn.functional.binary_cross_entropy_with_logits nn.functional.kl_div nn.functional.l1_loss
    nn.functional.interpolate.bilinear nn.functional.interpolate.bicubic chunk split unbind cumsum cummax sort
    topk median mode kthvalue tril triu diagonal unfold repeat tile scatter scatter_add index_add index_put
    index_fill index_copy masked_select digamma polygamma.polygamma_n_1
""".split()


def infos():
    chosen = [i for i in opinfo.op_db() if i.supports_autograd and torch.float64 in i.supported_dtypes("cpu")]
    rowed = {id(i) for i in opinfo.named()}
    return [i for i in chosen if id(i) in rowed or opinfo.title(i) in OTHERS]


# ---- programs


def norm_block(x, w, b):
    h = F.layer_norm(x + b, [x.size(-1)], w, b, 1e-5)
    return F.gelu(h) * x, h.sum(-1)


def attention(x, w, b):
    q = (x @ w).view(x.size(0), -1, 2, 3).transpose(1, 2)
    scores = (q @ q.transpose(-1, -2)) * 0.5
    return (scores.softmax(-1) @ q).transpose(1, 2).reshape(x.size(0), -1, 6) + b[:6]


def image(x, w, b):
    y = F.conv2d(x, w, b[: w.size(0)], padding=1)
    return F.max_pool2d(F.batch_norm(y, None, None, None, None, True, 0.1, 1e-5).relu(), 2)


def signal(x, w, b):
    """Strides, dilation and groups, and padding by a word."""
    y = F.conv1d(x, w, b, stride=2, padding=1, dilation=2, groups=2)
    return F.conv1d(y, w, None, padding="valid", groups=2).sin()


def rotary(x, w, b):
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1) * w + x * b.cos()


def heads(x, w, b):
    """A value that is returned, read twice and returned again."""
    h = (x * w).tanh()
    return h, h * b, h


def step(x, w, b):
    target = (x[:, 0] > 0).long()
    return F.cross_entropy(F.linear(x, w, b), target) + (b**2).mean()


PROGRAMS = {
    norm_block: [((2, 5, 8), (8,), (8,)), ((3, 1, 8), (8,), (8,))],
    attention: [((2, 5, 4), (4, 6), (8,)), ((1, 3, 4), (4, 6), (7,))],
    image: [((2, 3, 8, 6), (4, 3, 3, 3), (4,)), ((3, 3, 5, 9), (4, 3, 3, 3), (6,))],
    signal: [((2, 4, 19), (4, 2, 3), (4,)), ((1, 4, 12), (4, 2, 2), (4,))],
    rotary: [((2, 5, 8), (8,), (8,)), ((4, 1, 6), (6,), (6,))],
    heads: [((4, 8), (8,), (1,)), ((3, 5), (1,), (5,))],
    step: [((6, 8), (5, 8), (5,)), ((1, 3), (7, 3), (7,))],
}
MASKS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]


def tensors(shapes, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype) for shape in shapes]
