"""What torch.compile made, once more: compiled anew from a copy, so that the original is left alone.

In: a module or function that was compiled with `backend="tsfuser"`, and its arguments. Out: a
`IsolatedCompiled`: the same program with modules, arguments and graphs of its own. Example:

    with isolate_compiled(torch.compile(model, backend="tsfuser"), (x,), {}) as isolated:
        isolated.step()          # forward and, where something requires gradients, backward
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..frontends.dynamo.any_size import context_of, take_over
from ..planning import background
from .isolate import Isolated, copied_module, generators_of, mapped

TORCH_COMPILE = "_torchdynamo_orig_callable"


@dataclass
class IsolatedCompiled(Isolated):
    """`eager` makes one more copy, which runs the program as it is, or in float64."""

    eager: Callable[[bool], Isolated]


def compiled(fn: Any) -> Any:
    """What torch.compile returned for `fn`: `fn` itself, its compiled `forward`, or what `fn.compile()` has
    it call; None where `fn` was not compiled."""
    if isinstance(fn, torch.jit.ScriptModule):
        return None
    inner = getattr(fn, "_compiled_call_impl", None) if isinstance(fn, torch.nn.Module) else None
    if inner is not None:
        return inner
    if hasattr(fn, TORCH_COMPILE) or hasattr(fn, "_orig_mod"):
        return fn
    forward = getattr(fn, "forward", None) if isinstance(fn, torch.nn.Module) else None
    return forward if hasattr(forward, TORCH_COMPILE) else None


@contextlib.contextmanager
def isolate_compiled(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[IsolatedCompiled]:
    """A copy of the compiled function. Within the block torch's random generators go their own way.
    Raises TypeError where another backend than tsfuser compiles it."""
    from torch._dynamo.eval_frame import innermost_backend

    context = context_of(fn)
    choices = _choices(innermost_backend(context.callback), name_of(fn))
    program, owner = _copied_program(fn)
    given = (*args, *kwargs.values())

    def call(function: Callable, given: Sequence[Any]) -> Any:
        plain = given[: len(args)]
        return function(*plain, **dict(zip(kwargs, given[len(args) :])))

    def eager(exact: bool) -> Isolated:
        program, owner = _copied_program(fn)
        values = given
        if exact:
            for module in owner:
                module.double()
            values = tuple(mapped(value, _in_float64) for value in given)
        return Isolated(name_of(fn), owner, values, functools.partial(call, program))

    def backend(module: Any, inputs: Any) -> Any:
        """One of its own, as compiled code is told apart by backends."""
        from ..frontends.dynamo import backend

        return backend(module, inputs, **choices)

    again = torch.compile(
        _separate(program), backend=backend, fullgraph=context.fullgraph, dynamic=context._dynamic
    )
    take_over(context, again)
    with generators_of((*owner, *given)), _left_as_found(backend), background.off():
        yield IsolatedCompiled(name_of(fn), owner, given, functools.partial(call, again), eager)


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    exact = tensor.detach().double() if tensor.is_floating_point() else tensor
    return exact.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else exact


def _choices(backend: Any, name: str) -> dict[str, Any]:
    """The options of torch.compile. CUDA graphs, which are a mode, would hide the groups' runs."""
    from ..frontends.dynamo import backend as ours

    function: Any = getattr(backend, "compiler_fn", backend)
    choices = dict(getattr(backend, "kwargs", {}))
    while isinstance(function, functools.partial):
        function, choices = function.func, {**function.keywords, **choices}
    if function is not ours:
        other = getattr(backend, "compiler_name", None) or getattr(function, "__name__", "another one")
        raise TypeError(f'{name} is compiled by the backend {other}: compile it with backend="tsfuser"')
    choices.pop("mode", None)
    return choices


def name_of(fn: Any) -> str:
    """Of the module's class, or of the function."""
    original = getattr(fn, "_orig_mod", None)
    if original is not None:
        return type(original).__name__
    owner = getattr(original_of(fn), "__self__", None)
    name = getattr(fn, "__name__", type(fn).__name__)
    return type(owner).__name__ if name.endswith(("call_impl", "forward")) and owner is not None else name


def original_of(fn: Any) -> Any:
    """The module or function that was compiled."""
    if hasattr(fn, "_orig_mod"):
        return fn._orig_mod
    found = getattr(fn, TORCH_COMPILE)
    if inspect.ismethod(fn):  # the decorator stands in the class
        return types.MethodType(found, fn.__self__)
    from torch._dynamo import external_utils

    code = getattr(found, "__code__", None)
    if code is not None and code.co_filename == external_utils.__file__:  # around a function of torch's
        return found.__wrapped__
    return found


def _copied_program(fn: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The program on copies of its modules, and those copies."""
    original = original_of(fn)
    if isinstance(original, torch.nn.Module):
        module = copied_module(original)
        return module, (module,)
    owner = getattr(original, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        module = copied_module(owner)
        if original.__func__ is torch.nn.Module._call_impl:  # of `module.compile()`
            return module, (module,)
        return types.MethodType(original.__func__, module), (module,)
    return _with_copies(original)


def _with_copies(function: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A Python function with copies of the modules, tensors and optimizers that it closes over, or finds
    among its globals; and those modules. Shared tensors and modules are shared by the copies, too."""
    if not isinstance(function, types.FunctionType):
        return function, ()
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or ()))
    kinds = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer)
    names = [name for name in code.co_names if name in function.__globals__]
    found = {name: function.__globals__[name] for name in names}
    found.update((name, cell.cell_contents) for name, cell in cells.items() if cell != types.CellType())
    with torch.no_grad():
        copies = copy.deepcopy({name: value for name, value in found.items() if isinstance(value, kinds)})
    closure = tuple(types.CellType(copies[name]) if name in copies else cell for name, cell in cells.items())
    made = types.FunctionType(
        code, {**function.__globals__, **copies}, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made, tuple(value for value in copies.values() if isinstance(value, torch.nn.Module))


def _separate(program: Any) -> Any:
    """What is given to torch.compile. torch counts what it has compiled by code objects, so functions, and
    the `forward`s of the user's modules, get their own."""
    from torch._dynamo.external_utils import wrap_inline

    owner = getattr(program, "__self__", program)
    for module in owner.modules() if isinstance(owner, torch.nn.Module) else ():
        forward = type(module).forward
        if not _is_torchs(module) and isinstance(forward, types.FunctionType):
            vars(module).setdefault("forward", types.MethodType(_with_code_of_its_own(forward), module))
    if isinstance(program, types.FunctionType):
        return _with_code_of_its_own(program)
    if inspect.ismethod(program) and isinstance(program.__func__, types.FunctionType):
        return types.MethodType(_with_code_of_its_own(program.__func__), program.__self__)
    if isinstance(program, torch.nn.Module) and not _is_torchs(program):
        return program
    return _with_code_of_its_own(wrap_inline(program))  # as torch does, with one code object for all


def _is_torchs(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _with_code_of_its_own(function: types.FunctionType) -> types.FunctionType:
    made = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@contextlib.contextmanager
def _left_as_found(backend: Callable[..., Any]) -> Iterator[None]:
    """After the block torch has forgotten the graphs that `backend` compiled in it, and their sizes."""
    from torch._dynamo import convert_frame, guards, pgo
    from torch._dynamo.eval_frame import innermost_backend

    compiled_codes: dict[int, types.CodeType] = {}
    handle = convert_frame.register_bytecode_hook(lambda code, new: compiled_codes.update({id(code): code}))
    sizes = copy.deepcopy(dict(pgo.get_code_state()))
    try:
        yield
    finally:
        handle.remove()
        state = pgo.get_code_state()
        state.clear()
        state.update(sizes)
        for code in compiled_codes.values():
            for entry in torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code):
                found = innermost_backend(entry.backend)
                if getattr(found, "compiler_fn", found) is backend:
                    gone = guards.DeletedGuardManagerWrapper("tsfuser has looked at it")
                    entry.guard_manager.extra_state.invalidate(entry, gone)
