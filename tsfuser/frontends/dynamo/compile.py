"""What torch.compile calls for `backend="tsfuser"`.

In: an FX graph that TorchDynamo has captured, and example inputs. Out: a callable. AOTAutograd makes the
forward and the backward graph of ATen ops, without in-place ops. The min-cut partitioner chooses what the
forward saves, and what the backward computes again. Example: `torch.compile(model, backend="tsfuser")`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from ...option_parsers import did_you_mean
from ...options import first_graph
from ...planning import failures
from ...planning.compile import expect_cuda
from ...planning.progress import progress
from . import settings as its_settings
from . import watch
from .cuda_graphs import CudaGraphs
from .fx.kept import Kept
from .groups.roundings import Roundings
from .joint_graph.channels_last import channels_last
from .joint_graph.dropout import seed_dropouts
from .joint_graph.partition import LENT, partition
from .joint_graph.repeats import merge_repeats
from .joint_graph.saved_gaps import SavedGaps
from .program import compile_graph
from .stored import torch_cache
from .stored.request import Request, wanted
from .tracing.decompositions import decompositions
from .tracing.whole_ops import whole_ops

MODES = (None, "default", "reduce-overhead")


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """The compiled module. Raises ValueError for unknown options and modes."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import TorchDynamoException, exceptions_allowed_to_be_fallback

    first_graph()
    settings = its_settings.read(options)
    if mode not in MODES:
        like = did_you_mean(mode, filter(None, MODES))
        raise ValueError(
            f"tsfuser has no mode {mode!r}{like}; leave it out, or take 'default' or 'reduce-overhead'"
        )
    expect_cuda()
    graphs = CudaGraphs() if mode == "reduce-overhead" else None
    source = watch.arrived(module)
    request = _request(settings, source, graphs)
    compiler = partial(_compile, settings, source, graphs, Roundings(), SavedGaps(), request)
    forward = partial(compiler, "forward")
    compiled = aot_autograd(
        fw_compiler=forward if request is None else torch_cache.serializable(forward),
        bw_compiler=partial(compiler, "backward"),
        inference_compiler=partial(compiler, "inference"),
        partition_fn=partial(partition, recompute=settings.recompute, layout=settings.channels_last),
        decompositions=decompositions,
        keep_inference_input_mutations=True,
    )
    try:
        varies = any(isinstance(value, torch.SymInt) for value in inputs)
        nodes = f"{len(module.graph.nodes):,} nodes"
        with (
            progress.working(f"tracing and planning a graph of {nodes}"),
            whole_ops(sizes_vary=varies),
            torch_cache.asked(request),
        ):
            return _for_file(partial(compiled, module, inputs), request)
    except (TorchDynamoException, *exceptions_allowed_to_be_fallback):
        raise  # torch breaks the graph, or traces it again
    except Exception as error:
        failures.gave_up("aot_autograd", error, Kept(module).line)
        return module  # which nobody changes


def _for_file(compiled: Callable[[], Any], request: Request | None) -> Callable[..., Any]:
    """What `compiled` makes, as something that torch can write to a file where it wants that."""
    if not torch._functorch.config.bundled_autograd_cache:
        return compiled()
    from .stored.precompiled import for_file, kept_by_us

    if request is not None:
        return for_file(compiled(), request)
    with kept_by_us():
        return for_file(compiled(), request)


def _request(
    settings: its_settings.Settings, source: watch.Source, graphs: CudaGraphs | None
) -> Request | None:
    """Where the compiled graph is looked for, and kept."""
    try:
        if not wanted(graphs is not None):
            return None
        torch_cache.install()
        return Request(settings, source)
    except Exception as error:
        failures.gave_up("stored graphs", error, "")
        return None


def _compile(
    settings: its_settings.Settings,
    source: watch.Source,
    graphs: CudaGraphs | None,
    roundings: Roundings,
    gaps: SavedGaps,
    request: Request | None,
    role: str,
    module: fx.GraphModule,
    inputs: Sequence[Any],
) -> Callable[[list], Any]:
    if role == "inference":
        module = _prepared(module, settings)
    if role == "backward":
        gaps.apply(module)
    donated = _donated(module) if role == "backward" and graphs is None else ()
    origin = watch.Origin(source, role)
    keep = None if request is None else partial(request.note, role)
    with progress.working(f"planning a {role} graph of {len(module.graph.nodes):,} nodes"):
        call = compile_graph(module, settings, origin, donated, roundings.passes(role), gaps, keep)
    if request is not None and request.key is not None:
        torch_cache.mark(call, request.key)
    return call if graphs is None else graphs.recorded(call, module, inputs, role)


def _prepared(module: fx.GraphModule, settings: its_settings.Settings) -> fx.GraphModule:
    """The graph of an inference, changed as `partition` changes others."""
    kept = Kept(module)
    try:
        if settings.recompute:
            seed_dropouts(module)
            merge_repeats(module)
        channels_last(module, settings.channels_last, inference=True)
        return module
    except Exception as error:
        failures.gave_up("inference", error, kept.line)
        return kept.put_back()


def _donated(backward: fx.GraphModule) -> Collection[int]:
    """The inputs of `backward`, which torch compiles now, that the forward made only for it: no arguments or
    results, no views of these, and no tensors that an op from outside torch has seen. Not for CUDA graphs
    (`mode="reduce-overhead"`), which manage this memory themselves."""
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context else None
    lent = {k for k, node in enumerate(backward.graph.find_nodes(op="placeholder")) if LENT in node.meta}
    return frozenset(getattr(metadata, "bw_donated_idxs", None) or ()) - lent
