"""What `tsfuser.joint.meta_results` says of ops is what they give."""

import pytest
import torch
from torch.utils import _pytree as pytree

from tsfuser.joint.meta_results import RESULTS, like


def floats(*sizes, dtype=torch.float32):
    return torch.rand(sizes, dtype=dtype)


X, IMAGE, W = floats(4, 8), floats(2, 6, 3, 5), floats(6)
KERNELS = floats(4, 3, 2, 3)
PLACES = [1, 1], [0, 1], [1, 1]  # stride, padding, dilation
TURNED, HALF = floats(8, 4).t(), floats(4, 8, dtype=torch.bfloat16)
WIDE = IMAGE.to(memory_format=torch.channels_last)
TARGET, PIXELS = torch.zeros(4, dtype=torch.int64), torch.zeros(2, 3, 5, dtype=torch.int64)
ONE = torch.ones(())
#: Losses -> what they get before the reduction, and behind it.
POINTWISE = {
    "l1_loss": ((), ()),
    "mse_loss": ((), ()),
    "smooth_l1_loss": ((), (1.0,)),
    "huber_loss": ((), (1.0,)),
    "kl_div": ((), (False,)),
    "soft_margin_loss": ((), ()),
    "binary_cross_entropy": ((X,), ()),
    "binary_cross_entropy_with_logits": ((None, X[0]), ()),
}
CALLS = {
    "aten::cat": [([X, X], 1), ([HALF, X], 0)],
    "aten::stack": [([X, X, X], 1), ([X, X], -1), ([HALF, X], 1)],
    "aten::linear": [(X, floats(5, 8), floats(5)), (X, floats(8), None)],
    "aten::mm": [(X, TURNED.t())],
    "aten::bmm": [(IMAGE[0], IMAGE[1].transpose(1, 2))],
    "aten::addmm": [(floats(4), X, TURNED.t(), 1, 1)],
    "aten::baddbmm": [(floats(1, 3, 1), IMAGE[0], IMAGE[1].transpose(1, 2), 1, 1)],
    "aten::matmul": [
        (X, TURNED.t()),
        (X, floats(8)),
        (floats(4), X),
        (floats(4), floats(4)),
        (floats(2, 1, 4, 8), floats(3, 8, 5)),
        (IMAGE, floats(5)),
        (IMAGE, floats(5, 2)),
    ],
    "tsfuser::matmul_backward_self": [
        (floats(2, 5, 7), floats(2, 3, 7), None, None, False),
        (floats(2, 3, 5, 7), floats(2, 3, 4, 7), [2, 3, 5, 4], floats(2, 3, 4, 5).mT, False),
        (floats(2, 3, 5, 7), floats(1, 3, 4, 7), [2, 3, 5, 4], None, False),
    ],
    "tsfuser::matmul_backward_other": [
        (floats(2, 5, 3), floats(2, 5, 7), None, floats(2, 7, 3).mT, False),
        (floats(2, 3, 4, 5).mT, floats(2, 3, 5, 7), [2, 3, 4, 7], None, False),
    ],
    "aten::convolution": [(IMAGE, KERNELS, None, [1, 1], [1, 0], [1, 1], False, [0, 0], 2)],
    "aten::_convolution": [(IMAGE, KERNELS, W[:4], [2], [1], [1], False, [0], 2, False, False, False, False)],
    "aten::convolution_backward": [
        (floats(2, 4, 2, 5), IMAGE, KERNELS, [4], *PLACES, False, [0, 0], 2, [True, True, True])
    ],
    "aten::max_pool2d_with_indices_backward": [
        (IMAGE, IMAGE, [1, 1], [1, 1], [0, 0], [1, 1], False, torch.zeros(IMAGE.shape, dtype=torch.int64))
    ],
    "aten::conv1d": [(IMAGE[0], floats(2, 3, 2), None, [2], [0], [1], 1)],
    "aten::conv2d": [(IMAGE, KERNELS, W[:4], [2, 1], [0, 2], [1, 2], 2)],
    "aten::conv3d": [(IMAGE[None], floats(2, 6, 2, 2, 1)[:, :2], None, [1], [0], [1], 1)],
    "aten::_grad_sum_to_size": [(TURNED, [4, 8]), (TURNED, [8]), (X, None)],
    "aten::max_pool2d": [(IMAGE, [2, 2], [], [0, 0], [1, 1], False), (IMAGE, [2], [1], [1], [2], False)],
    "aten::max_pool2d_with_indices": [(IMAGE, [2, 2], [1, 2], [1, 0], [1, 1], False)],
    "aten::mv": [(X, floats(8))],
    "aten::adaptive_avg_pool2d": [(IMAGE, [2, 1]), (WIDE, [2, 2]), (IMAGE[0], [1, 1])],
    "aten::digamma": [(TURNED,), (HALF,), (X > 0,)],
    "aten::group_norm": [(IMAGE, 2, W, W, 1e-5, False), (WIDE, 2, None, None, 1e-5, False)],
    "aten::instance_norm": [(i, W, W, None, None, True, 0.1, 1e-5, False) for i in (IMAGE, WIDE)],
    "aten::cumsum": [(TURNED, 0, None), (X > 0, 1, None), (HALF, 1, torch.float32)],
    "aten::cumprod": [(TURNED, 0, None), (X.to(torch.int32), 1, None)],
    "aten::roll": [(TURNED, [1], [0])],
    "aten::tril": [(TURNED, 0)],
    "aten::triu": [(TURNED, 1)],
    "aten::layer_norm": [(X, [8], None, None, 1e-5, True)],
    "aten::native_layer_norm": [(X, [8], floats(8), None, 1e-5)],
    "aten::rms_norm": [(TURNED, [8], floats(8), 1e-5), (HALF, [8], floats(8), None), (WIDE, [5], None, None)],
    "aten::softmax": [(TURNED, 1, None), (HALF, 1, torch.float32)],
    "aten::_softmax": [(TURNED, 1, False)],
    "aten::log_softmax": [(TURNED, 1, None), (HALF, 1, torch.float32)],
    "aten::_log_softmax": [(X, 1, False)],
    "aten::_softmax_backward_data": [(X, X, 1, torch.float32)],
    "aten::_log_softmax_backward_data": [(X, X, 1, torch.float32)],
    "aten::dropout": [(TURNED, 0.5, True)],
    "aten::native_dropout": [(TURNED, 0.5, True)],
    "aten::batch_norm": [(IMAGE, W, W, None, None, True, 0.1, 1e-5, False)],
    "aten::native_batch_norm": [(IMAGE, W, W, W, W, train, 0.1, 1e-5) for train in (True, False)],
    "aten::native_batch_norm_backward": [
        (IMAGE, IMAGE, W, W, W, W, W, True, 1e-5, [True, True, True]),
    ],
    "aten::native_layer_norm_backward": [
        (X, X, [8], floats(4, 1), floats(4, 1), floats(8), floats(8), [True, True, True]),
    ],
    "aten::nll_loss_forward": [(X, TARGET, None, reduction, -100) for reduction in range(3)],
    "aten::nll_loss2d_forward": [(IMAGE, PIXELS, None, reduction, -100) for reduction in range(3)],
    "aten::cross_entropy_loss": [
        *((X, TARGET, None, reduction, -100, 0.0) for reduction in range(3)),
        (IMAGE, PIXELS, None, 0, -100, 0.1),
        *((IMAGE, IMAGE, None, reduction, -100, 0.0) for reduction in range(3)),
        (X[0], X[1], None, 0, -100, 0.0),
    ],
    **{
        f"aten::{kind}": [(TURNED, X, *more[0], reduction, *more[1]) for reduction in range(3)]
        for kind, more in POINTWISE.items()
    },
    "tsfuser::nll_loss_backward": [(ONE, [4, 8], TARGET, None, 1, -100, ONE)],
    "aten::mse_loss_backward": [(ONE, X, X, 1), (X, X, X, 0)],
    "aten::smooth_l1_loss_backward": [(ONE, X, X, 1, 1.0)],
    "aten::huber_loss_backward": [(ONE, X, X, 1, 1.0)],
    "aten::binary_cross_entropy_backward": [(ONE, X, X, None, 1)],
}
#: They run in graphs only, and other tests' graphs run them.
IN_GRAPHS = {
    "prim::BroadcastSizes",
    "aten::copy",  # of a list
    "aten::list",
    "aten::slice",
    "tsfuser::joined_dim",
    "tsfuser::filled",
    "tsfuser::bias_or_zero",
    "tsfuser::batch_norm",
    "tsfuser::batch_norm_backward",
    "tsfuser::group_norm_backward",
    "tsfuser::instance_norm_backward",
}


def test_all_are_compared():
    assert CALLS.keys() | IN_GRAPHS == RESULTS.keys()


@pytest.mark.parametrize("kind, given", [(kind, given) for kind in CALLS for given in CALLS[kind]])
def test_results_are_those_of_the_op(kind, given):
    space, _, name = kind.partition("::")
    names = [a.name for a in overload(space, name, given)._schema.arguments]
    real = overload(space, name, given)(**dict(zip(names, given)))
    without = pytree.tree_map(lambda a: a.to("meta") if isinstance(a, torch.Tensor) else a, given)
    found = RESULTS[kind](*without)
    for own, its in zip(pytree.tree_leaves(found), pytree.tree_leaves(real), strict=True):
        assert (own.dtype, own.shape) == (its.dtype, its.shape)
        wide = [d for d, size in enumerate(its.shape) if size != 1]
        assert [own.stride(d) for d in wide] == [its.stride(d) for d in wide]


def overload(space, name, given):
    """That of the fitting number of arguments."""
    packet = getattr(getattr(torch.ops, space), name)
    found = [getattr(packet, each) for each in packet.overloads() if "out" not in each]
    return next(f for f in found if len(f._schema.arguments) == len(given))


@pytest.mark.parametrize(
    "tensor",
    [X, TURNED, WIDE, ONE, X[:, ::2], X[:0], X[:1].expand(3, 8), ONE.expand(2, 3), ONE.expand(1, 1)],
    ids=lambda t: f"{list(t.shape)} {t.stride()}",
)
def test_memory_like_that_of_a_tensor(tensor):
    there = (
        tensor.to("meta")
        if tensor.is_contiguous()
        else torch.empty_strided(tensor.shape, tensor.stride(), device="meta")
    )
    made, expected = like(there, torch.float16), torch.empty_like(tensor, dtype=torch.float16)
    assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)
