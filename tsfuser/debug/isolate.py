"""A scripted function once more, with state of its own: what is run to look at it leaves the original alone.

In: a scripted function, module or method (or what can be scripted) and its arguments. Out: an
`IsolatedScript`: the same program with an executor, parameters, buffers and arguments of its own. Example:

    with isolate(scripted, (x,), {}) as isolated:
        isolated.step()          # forward and, where something requires gradients, backward
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..planning import background

_WANTED = 'a result of torch.jit.script or of torch.compile(..., backend="tsfuser") is needed'


@dataclass
class Isolated:
    """`call` runs a program on the copied modules of `owner`, and on copies of the arguments `given`."""

    name: str
    owner: tuple[Any, ...]
    given: tuple[Any, ...]
    call: Callable[[Sequence[Any]], Any]

    def __post_init__(self) -> None:
        self._gradients: dict[tuple, torch.Tensor] = {}

    def arguments(self) -> list[Any]:
        """Copies of the arguments, for one step."""
        return clones(self.given)

    def step(
        self, given: Sequence[Any] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """One forward and, where results require gradients, backward. Returns the result tensors and the
        gradients of the arguments and parameters. `given`: the `arguments`, where they were made before."""
        given = self.arguments() if given is None else given
        leaves = [x for x in tensors((*self.owner, *given)) if x.requires_grad and x.is_leaf]
        for leaf in leaves:
            leaf.grad = None
        results = tensors(self.call(given))
        wanted = [r for r in results if r.requires_grad and r.is_floating_point()]
        if not wanted:
            return results, []
        torch.autograd.backward(wanted, [self._gradient(r) for r in wanted])
        return results, [leaf.grad for leaf in leaves]

    def _gradient(self, result: torch.Tensor) -> torch.Tensor:
        """Random, as all ones hide mistakes, and the same in each step."""
        key = result.shape, result.dtype, result.device
        if key not in self._gradients:
            generator = torch.Generator().manual_seed(17)
            made = torch.randn(result.shape, generator=generator, dtype=torch.float64)
            self._gradients[key] = made.to(result.device, result.dtype)
        return self._gradients[key]


@dataclass
class IsolatedScript(Isolated):
    """`method`: the function itself, or a module's method. `graph`: the program as scripted, nothing inlined.
    `function` runs it."""

    method: Any
    graph: torch._C.Graph
    function: Any


def is_scripted(fn: Any) -> bool:
    """Whether it is a scripted function, module or method."""
    return isinstance(fn, (torch.jit.ScriptFunction, torch.jit.ScriptModule, torch._C.ScriptMethod))


def scripted(fn: Any) -> Any:
    """`fn` if it is scripted already, else what `torch.jit.script` makes of it; of a method of a module,
    what it makes of the module. Raises TypeError for a function that it does not take."""
    if is_scripted(fn):
        return fn
    name = getattr(fn, "__name__", type(fn).__name__)
    if not callable(fn):
        raise TypeError(f"{_WANTED}, not a value of the type {name}")
    try:
        if inspect.ismethod(fn) and isinstance(fn.__self__, torch.nn.Module):
            return getattr(torch.jit.script(fn.__self__), fn.__name__)
        return torch.jit.script(fn)
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(":")
        text = f"{_WANTED}: {name} is neither, and torch.jit.script does not take it ({said})"
        raise TypeError(text) from error


@contextlib.contextmanager
def isolate(fn: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[IsolatedScript]:
    """A copy of `fn`. Within the block torch's random generators go their own way; after it they are as
    they were before."""
    fn = scripted(fn)
    method = fn.forward if isinstance(fn, torch.jit.ScriptModule) else fn
    owner = fn if isinstance(fn, torch.jit.ScriptModule) else getattr(method, "owner", None)
    given = _bound(method, args, kwargs, own=0 if owner is None else 1)
    own = () if owner is None else (copied_module(owner),)
    name = fn.original_name if isinstance(fn, torch.jit.ScriptModule) else method.name
    graph = method.graph.copy()
    function = torch._C._create_function_from_graph(name, graph.copy())
    before = torch._C._jit_set_num_profiled_runs(1)
    try:
        with generators_of((*own, *given)), background.off():
            yield IsolatedScript(
                name, own, given, lambda copies: function(*own, *copies), method, graph, function
            )
    finally:
        torch._C._jit_set_num_profiled_runs(before)


def generators_of(values: Sequence[Any]) -> Any:
    """A block in which the random generators of the values' devices go their own way."""
    devices = {x.device.index for x in tensors(values) if x.is_cuda}
    return torch.random.fork_rng(devices=sorted(devices))


def copied_module(module: Any) -> Any:
    """A copy with parameters of its own; a plain deepcopy of a scripted one stays tied to the original's by
    autograd."""
    if not isinstance(module, torch.nn.Module):  # as the owner of a method comes
        module = torch.jit._recursive.wrap_cpp_module(module)
    with torch.no_grad():
        copied = copy.deepcopy(module)
    for mine, other in zip(tensors((copied,)), tensors((module,))):
        mine.requires_grad_(other.requires_grad)
    return copied


def _bound(method: Any, args: Sequence[Any], kwargs: dict[str, Any], own: int) -> tuple[Any, ...]:
    """All arguments in order, defaults filled in; without the first `own` ones: the module, whatever the
    method calls it."""
    declared = method.schema.arguments[own:]
    if len(args) > len(declared):
        raise TypeError(f"{method.name} takes {len(declared)} arguments, {len(args)} were given")
    given = dict(zip((a.name for a in declared), args))
    for name, value in kwargs.items():
        if name in given or name not in {a.name for a in declared}:
            raise TypeError(f"{method.name} has no argument {name!r}, or it was given twice")
        given[name] = value
    for a in declared:
        if a.name not in given:
            if not a.has_default_value():
                raise TypeError(f"{method.name} wants an argument {a.name!r}")
            given[a.name] = a.default_value
    return tuple(given[a.name] for a in declared)


def mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with each tensor in its lists, tuples and dicts changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(v, change) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(v, change) for v in value)
    if isinstance(value, dict):
        return {key: mapped(v, change) for key, v in value.items()}
    return value


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value, those of modules included."""
    found: list[torch.Tensor] = []
    mapped(value, lambda t: found.append(t))
    for module in value if isinstance(value, (list, tuple)) else ():
        if isinstance(module, torch.nn.Module):
            found += [*module.parameters(), *module.buffers()]
    return found


def clones(values: Sequence[Any]) -> list[Any]:
    """Copies with the same strides, offsets and requires_grad, lazily conjugate where these are; tensors that
    share memory share it again."""
    storages: dict[int, torch.UntypedStorage] = {}
    return [mapped(v, lambda t: _clone(t, storages)) for v in values]


def _clone(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    plain = tensor.layout == torch.strided and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.is_quantized or tensor.device.type == "meta":
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    source = tensor.untyped_storage()
    key = source.data_ptr()
    if key not in storages:
        storages[key] = source.clone()
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    made.set_(storages[key], tensor.storage_offset(), tensor.size(), tensor.stride())
    made = made.conj() if tensor.is_conj() else made
    made = torch._neg_view(made) if tensor.is_neg() else made
    return made.requires_grad_(tensor.requires_grad)
