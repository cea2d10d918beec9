"""Attention whose scores the program computes by a function (`flex_attention`), compiled by inductor.

In: a piece of a graph that is left to Python. Out: a boxed function in its place, or None where inductor does
not compile it; then torch runs it as it is, which stores all scores. Only this piece is inductor's: what is
before and after it stays in groups. Example: in `flex_attention((q * 2).sin(), k, v, score_mod=f).cos() * 2`
there are two kernels of tsfuser's, and one of inductor's between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext
from torch.fx.experimental.proxy_tensor import make_fx

from ... import log

_NAMES = ("flex_attention", "flex_attention_backward")
REASON = "attention whose scores the program computes by a function: inductor compiles it"


def has_attention(piece: fx.GraphModule) -> bool:
    """Whether the piece is for inductor."""
    return any(map(is_attention, piece.graph.nodes))


def is_attention(node: fx.Node) -> bool:
    """Whether the node calls `flex_attention`, or its backward."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") in _NAMES


def compiled(piece: fx.GraphModule) -> Callable[[list], Any] | None:
    """What runs in the place of the piece; its result is the piece's."""
    given = [node.meta.get("val") for node in piece.graph.find_nodes(op="placeholder")]
    if not all(isinstance(value, (torch.Tensor, torch.SymInt, int)) for value in given):
        return None
    module, is_single = _with_tuple(piece)
    try:
        from torch._inductor.compile_fx import compile_fx_inner
        from torch._inductor.decomposition import select_decomp_table

        # inductor has lowerings for what its own decompositions leave, in the program's functions, too
        traced = make_fx(module, select_decomp_table())(*given)
        traced.graph.eliminate_dead_code()
        traced.recompile()
        with TracingContext.report_output_strides():  # AOTAutograd would take them for our results'
            function = compile_fx_inner(traced, given)
    except Exception as error:  # no compiler here, or a form that inductor's kernels do not have
        log.write("partition", f"inductor does not compile attention: {type(error).__name__}: {error}", "")
        return None
    wanted = [tuple(value.stride()) if isinstance(value, torch.Tensor) else None for value in given]
    fixed = [strides if strides and all(map(_is_int, strides)) else None for strides in wanted]
    return lambda args: _run(function, fixed, is_single, args)


def _is_int(stride: Any) -> bool:
    return isinstance(stride, int)


def _with_tuple(piece: fx.GraphModule) -> tuple[fx.GraphModule, bool]:
    """A copy of the piece whose result is a tuple, and whether the piece's is a single value."""
    graph = fx.Graph()
    result = graph.graph_copy(piece.graph, {})
    is_single = isinstance(result, fx.Node)
    graph.output((result,) if is_single else tuple(result))
    return fx.GraphModule(piece, graph), is_single


def _run(
    function: Callable[[list], Sequence[Any]],
    strides: Sequence[tuple[int, ...] | None],
    is_single: bool,
    args: list,
) -> Any:
    """Inductor's code takes the strides of its arguments for granted."""
    given = [
        arg if wanted is None or arg.stride() == wanted else _laid_out(arg, wanted)
        for arg, wanted in zip(args, strides)
    ]
    args.clear()
    found = function(given)
    return found[0] if is_single else tuple(found)


def _laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)
