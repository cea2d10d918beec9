"""`mode="reduce-overhead"`: compiled graphs as CUDA graphs, by torch's own CUDA graph trees.

In: the callable of an FX graph, and the graph. Out: a callable that records its launches and replays them; or
the same callable if the graph cannot be recorded. Then torch's log `perf_hints` says why, as with inductor. A
graph is not recorded if its sizes vary, if it uses CPU tensors or several devices, if it changes an input
that is neither parameter nor buffer, or if it has ops of Python or ops that a CUDA graph cannot hold.
Example:

    graphs = CudaGraphs()                             # one for each graph of TorchDynamo
    call = graphs.recorded(call, module, inputs, "forward")
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

#: Higher-order ops that only launch kernels.
_LAUNCHERS = ("auto_functionalized", "auto_functionalized_v2", "triton_kernel_wrapper_functional")


class CudaGraphs:
    """The CUDA graphs of one graph of TorchDynamo. A backward is recorded only if its forward is. `device`:
    the index of the forward's device; None if the forward is not recorded."""

    def __init__(self) -> None:
        self.device: int | None = None

    def recorded(
        self, call: Callable[[list], Any], module: fx.GraphModule, inputs: Sequence[Any], role: str
    ) -> Callable[[list], Any]:
        """The callable that records and replays, or `call`. `role`: forward, backward or inference. Must be
        called while torch compiles the module."""
        if role == "backward" and self.device is None or not _is_on_cuda(module):
            return call
        static = _static_inputs(module, len(inputs), role)
        reason = _why_not(module, static)
        if reason is None:
            return self._recorded(call, module, inputs, role, static)
        from torch._inductor.cudagraph_utils import log_cudagraph_skip_and_bump_counter

        log_cudagraph_skip_and_bump_counter(reason)
        return self._backward_unrecorded(call) if role == "backward" else call

    def _recorded(
        self,
        call: Callable[[list], Any],
        module: fx.GraphModule,
        inputs: Sequence[Any],
        role: str,
        static: Sequence[int],
    ) -> Callable[[list], Any]:
        from torch._dynamo.backends import cudagraphs
        from torch._inductor.cudagraph_trees import cudagraphify_impl
        from torch._inductor.cudagraph_utils import get_placeholder_info

        self.device = cudagraphs.get_device_index(module)
        made = cudagraphify_impl(
            call,
            list(inputs),
            static,
            device_index=self.device,
            is_backward=role == "backward",
            is_inference=role == "inference",
            stack_traces=cudagraphs.get_stack_traces(module),
            placeholders=get_placeholder_info(module.graph),
            mutated_input_idxs=cudagraphs.find_input_mutations(module.graph),
        )
        made._boxed_call = True
        return made

    def _backward_unrecorded(self, call: Callable[[list], Any]) -> Callable[[list], Any]:
        """Tells the trees when the backward runs: that frees what the forward has saved."""
        from torch._inductor.cudagraph_trees import get_manager

        def run(args: list) -> Any:
            manager = get_manager(self.device, create_if_none_exists=False)
            if manager is not None:
                manager.set_to_running_backward()
            return call(args)

        marked: Any = run
        marked._boxed_call = True
        return marked


def _static_inputs(module: fx.GraphModule, count: int, role: str) -> Sequence[int]:
    """The inputs whose address does not change from call to call: in a backward what the forward saved, else
    parameters and buffers."""
    if role == "backward":
        from torch._inductor.utils import count_tangents

        return range(count_tangents(module))
    context = torch._guards.TracingContext.try_get()
    known = context.fw_metadata.static_input_indices if context and context.fw_metadata else None
    return [k for k in known or () if k < count]


def _is_on_cuda(module: fx.GraphModule) -> bool:
    """Whether the graph works on a CUDA tensor."""
    found = (node.meta.get("val") for node in module.graph.nodes)
    return any(isinstance(value, torch.Tensor) and value.is_cuda for value in found)


def _why_not(module: fx.GraphModule, static: Sequence[int]) -> str | None:
    """Why the graph cannot be recorded, in torch's words; None if it can."""
    from torch._dynamo.backends import cudagraphs
    from torch._inductor.cudagraph_utils import (
        check_multiple_devices_or_any_cpu_nodes,
        format_default_skip_message,
    )
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    nodes = list(module.graph.nodes)
    if any(isinstance(node.meta.get("val"), torch.SymInt) for node in nodes if node.op == "placeholder"):
        return format_default_skip_message("sizes that vary")
    if cudagraphs.find_input_mutations(module.graph) - set(static):
        return format_default_skip_message("an input that changes in place")
    devices = cudagraphs.get_device_node_mapping(module)
    if (reason := check_multiple_devices_or_any_cpu_nodes(devices)) is not None:
        return reason
    if (node := get_first_incompatible_cudagraph_node(module)) is not None:
        return format_default_skip_message(f"an op that no CUDA graph holds ({node.name})")
    for node in nodes:
        target = node.target
        if isinstance(target, torch._ops.HigherOrderOperator) and target.name() not in _LAUNCHERS:
            return format_default_skip_message(f"an op of Python ({node.name})")
    return None


def forget() -> None:
    """Frees all recorded graphs; `torch._dynamo.reset()` calls it."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is not None:
        trees.reset_cudagraph_trees()
