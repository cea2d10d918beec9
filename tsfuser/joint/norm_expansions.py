"""Norms that become others before they are differentiated: those that return what their derivatives read, or
what eager computes. Example:

    %y = aten::layer_norm(%x, ...)   ->   %y, %mean, %rstd = aten::native_layer_norm(%x, ...)
"""

from __future__ import annotations

import torch

from ..errors import Refusal
from ..graph.wrapper import LIST, inputs
from .expansions import cast, expansion
from .node_facts import PARAM, root, row_major
from .rules.table import argument, known_rank, structural
from .terms import DTYPE_NUMBERS, Term

#: Of these eager saves a copy of the operand, where that has gaps or another order.
COPIED = frozenset(("aten::group_norm", "aten::instance_norm"))
_WIDE = {"float16": "float32", "bfloat16": "float32"}


@expansion("aten::layer_norm")
def layer_norm(input, normalized_shape, weight, bias, eps):
    return input.native_layer_norm(normalized_shape, weight, bias, eps)[0]


@expansion("aten::rms_norm")
def rms_norm(input, normalized_shape, weight, eps):
    """Eager's formula: CPUs have no op that also returns the root, in eager mode. It casts 16 bits to
    float32, and saves that; but CUDA has a kernel for operands of one dtype, which saves the operand."""
    wanted = _items(normalized_shape)
    dims = [-d for d in range(len(wanted), 0, -1)]
    dtype, device, _ = input.facts
    if dtype not in DTYPE_NUMBERS:
        return None
    given, input = input, _checked(input, wanted)
    if eps is None:
        eps = torch.finfo(getattr(torch, _WIDE.get(dtype, dtype))).eps
    if weight is not None:
        if known_rank(weight) != len(wanted):
            raise Refusal("a norm with a weight of other dims is an error in eager")
        weight = _checked(weight, wanted)
    is_one = weight is None or weight.facts.dtype == dtype
    wide = input if is_one and device != "cpu" else cast(input, _WIDE.get(dtype, dtype))
    wide = input.writer("tsfuser::in_format_of", wide, given)  # a view may have other strides
    scaled = wide * ((wide**2).mean(dims, True) + eps).rsqrt()
    return cast(scaled if weight is None else scaled * weight, dtype)


def _items(sizes):
    """The sizes of a list: numbers, or terms where the program computes them."""
    if isinstance(sizes, Term) and sizes.value.node().kind() == LIST:
        made = [argument(sizes.writer, value) for value in inputs(sizes.value.node())]
    else:
        made = structural(sizes, "the sizes of a norm")
    if any(isinstance(size, int) and size < 0 for size in made):
        raise Refusal("negative sizes of a norm are an error in eager")
    # To a view -1 is the size that is left, but 0 is an error, as there are elements.
    return [size if isinstance(size, int) else size.writer("prim::max", size, 0) for size in made]


def _checked(input, wanted):
    """A view of `input` that raises where its last sizes are not those wanted: of as many elements, one of
    several that differ is larger than that there is, and nothing expands that."""
    rank = known_rank(input)
    if not 0 < len(wanted) <= rank:
        raise Refusal("a norm over more dims than there are is an error in eager")
    whole = input.writer.known(
        input.view([*(input.size(d) for d in range(rank - len(wanted))), *wanted]), input.facts
    )
    return whole if len(wanted) == 1 else input.writer.known(whole.expand(input.sizes), input.facts)


@expansion("aten::group_norm")
def group_norm(input, num_groups, weight, bias, eps, cudnn_enabled):
    dense = _dense(input, input.facts.device == "cpu" and input.facts.rank in (4, 5))
    return dense and input.writer("aten::group_norm", dense, num_groups, weight, bias, eps, cudnn_enabled)


@expansion("aten::instance_norm")
def instance_norm(
    input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled
):
    """Eager saves no weight, but a copy for each sample."""
    dense = _dense(input, False)
    copied = weight is not None and weight.value.node().kind() != "aten::clone"
    if dense is None and not copied:
        return None
    given = (bias, running_mean, running_var, use_input_stats, momentum, eps, cudnn_enabled)
    return input.writer("aten::instance_norm", dense or input, weight.clone() if copied else weight, *given)


def _dense(input, is_image):
    """What eager's norm copies, and saves, where it is given something that has gaps or another order; None
    where it saves what it is given. `is_image`: it may be channels last."""
    layout = row_major(input.value) if root(input.value).node().kind() == PARAM else None
    if layout is not False:
        return None
    return input.writer("tsfuser::in_format_of", input, input) if is_image else input.contiguous()


@expansion("aten::batch_norm")
def batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled):
    if (input.facts.rank or 0) < 2:
        return None
    given = (weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    return input.writer("tsfuser::batch_norm", input, *given)[0]
