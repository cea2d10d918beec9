"""What decides how a graph is compiled besides the graph: versions, options, modes and flags of torch.

In: nothing; the state of this thread and process. Out: a tuple of plain values that are equal only where a
graph is compiled to the same. Raises Refusal where a mode runs code that cannot be written down. Example: the
same model has another record under autocast, with `torch.use_deterministic_algorithms(True)`, and with
another `options={"skip": [...]}`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .... import options
from ....errors import Refusal
from ....planning import ahead, compile, stored_plans
from ..settings import Settings

_FORMAT = 1  # of the files


def surroundings(settings: Settings, devices: set[str]) -> tuple:
    """`devices`: those of the graph's tensors. Raises Refusal."""
    _check_modes()
    return (
        _FORMAT,
        stored_plans.VERSIONS,
        tuple((device, _identity(device, device in devices)) for device in sorted(devices | {"cpu"})),
        lasting(settings),
        _torch_state(),
        _configurations(),
    )


def _identity(device: str, is_needed: bool) -> str:
    """What compiles for the device. A machine with a GPU may have no compiler for the CPU."""
    try:
        found = compile.identity(device)
    except (Refusal, OSError):
        found = None
    if found is None and is_needed:
        raise Refusal(f"nothing can be compiled for {device}")
    return repr(found)


def lasting(settings: Settings) -> tuple:
    """What must not change between the forward and the first backward, which is compiled when it comes."""
    state = options.state
    ours = (
        repr(settings),
        repr(stored_plans.chosen_options()),
        repr((state.enabled, state.single_node_mode, state.horizontal_mode, state.guard_mode)),
        repr(sorted(state.skip_kinds)),
        repr(ahead.settings()),
    )
    return *ours, torch.get_deterministic_debug_mode()


def lasting_everywhere(settings: Settings) -> tuple:
    """The facts that a process must share to run a graph of another one, besides those in torch's guards."""
    return _FORMAT, stored_plans.VERSIONS, lasting(settings)


def _check_modes() -> None:
    if _get_current_dispatch_mode_stack() or torch._C._len_torch_function_stack():
        raise Refusal("a mode of Python sees each op")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise Refusal("it is inside a transform of functorch")
    if torch._dynamo.compiled_autograd.in_compiled_autograd_region:
        raise Refusal("it is a backward of compiled autograd")
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fakify_first_call or torch._functorch.config.debug_assert:
        raise Refusal("the first call is special")


def _torch_state() -> tuple[Any, ...]:
    """What tracing, decompositions and torch's choice of kernels depend on."""
    cuda, cudnn = torch.backends.cuda, torch.backends.cudnn
    autocast = tuple(
        (device, torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device)))
        for device in ("cpu", "cuda")
    )
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.is_autocast_cache_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        str(torch.get_default_dtype()),
        str(torch.get_default_device()),
        torch.get_float32_matmul_precision(),
        cuda.matmul.allow_tf32,
        str(torch._C._get_cublas_allow_fp16_reduced_precision_reduction()),
        str(torch._C._get_cublas_allow_bf16_reduced_precision_reduction()),
        cudnn.enabled,
        cudnn.allow_tf32,
        cudnn.deterministic,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.backends.mkldnn.enabled,
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.opt_einsum.is_available(),
        torch.backends.opt_einsum.enabled,
        torch.backends.opt_einsum.strategy,
        torch.backends.cpu.get_cpu_capability(),
        os.environ.get("ONEDNN_MAX_CPU_ISA"),
        torch.cuda.is_available() and torch.cuda.current_device(),
    )


def _configurations() -> tuple[str, ...]:
    """Those of torch's compiler that are asked before inductor would be, whole."""
    from torch._dynamo import config as of_dynamo
    from torch._functorch import config as of_functorch

    return _in_order(of_functorch.get_config_copy()), _in_order(of_dynamo.get_config_copy())


def _in_order(value: Any) -> str:
    """A text that is the same in each process. torch's own hash of a configuration is not: it has sets."""
    if isinstance(value, dict):
        return str(sorted(f"{_in_order(k)}: {_in_order(item)}" for k, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}{sorted(map(_in_order, value))}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}{[*map(_in_order, value)]}"
    text = repr(value)
    if " at 0x" in text:
        raise Refusal(f"a configuration of torch's compiler holds {text}")
    return text
