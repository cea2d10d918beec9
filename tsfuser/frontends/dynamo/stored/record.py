"""What is kept of a compiled graph of TorchDynamo.

In: what AOTAutograd knows of it, as its own cache would keep it, and by role ("forward", "backward",
"inference") what runs: a graph, or pieces of one, between which Python runs nodes. Out: bytes; and from these
the function that AOTAutograd would return, without tracing, passes and groups. The bytes hold pickles: who
reads them has to know who has written them, as DiskCache does. Example:

    content = record.write(entry, {"inference": record.written(compiled)})
    call, made = record.read(content, args, aot_config)
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .... import _C
from ....errors import Refusal
from ..pieces import in_order
from ..program import Compiled, boxed, native, piece_call
from ..translation.translate import Translation
from . import fx_record

#: What AOTAutograd keeps for its logs only: long texts.
_FOR_LOGS = ("aot_joint_graph_str", "aot_forward_graph_str", "aot_backward_graph_str", "min_cut_info_str")
_LARGEST = 1 << 20  # bytes of the tensors that a graph owns


@dataclass(frozen=True)
class Program:
    """A graph with groups, written, and what else `GraphProgram` wants."""

    graph: bytes
    constants: tuple[torch.Tensor, ...]
    updates: tuple[tuple[int, int], ...]
    results: tuple[int | None, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    donated: tuple[int, ...]

    @staticmethod
    def of(made: Translation) -> Program:
        """Raises where the graph would not come back as it is."""
        if any(tensor.device.type != "cpu" for tensor in made.constants):
            raise Refusal("it owns a tensor on a GPU")
        if sum(tensor.untyped_storage().nbytes() for tensor in made.constants) > _LARGEST:
            raise Refusal("it owns large tensors")
        with _disable_current_modes():
            written = _C.write_graph(made.graph)
        orders = tuple(None if order is None else tuple(order) for order in made.orders)
        updates = tuple((int(to), int(by)) for to, by in made.updates)
        return Program(
            written, tuple(made.constants), updates, tuple(made.results), orders, tuple(made.donated)
        )

    def translation(self) -> Translation:
        """As `fuse` has left it."""
        orders = [None if order is None else list(order) for order in self.orders]
        return Translation(
            _C.read_graph(self.graph),
            list(self.constants),
            list(self.results),
            list(self.updates),
            orders,
            donated=list(self.donated),
        )


@dataclass(frozen=True)
class Pieces:
    """What runs in the place of a graph that is in pieces: those of `programs`, and of `order` the others.
    `foreign`: nodes that Python runs, and why."""

    order: fx_record.Written
    programs: Mapping[str, Program]
    single: frozenset[str]
    foreign: Mapping[str, str]


@dataclass(frozen=True)
class Made:
    """What was read: the boxed function, typed graphs by piece, and why Python runs the rest."""

    call: Callable[[list], Any]
    graphs: Mapping[str, Translation]
    foreign: Mapping[str, str]


def written(compiled: Compiled) -> Program | Pieces:
    """Raises where it cannot be written."""
    programs = {name: Program.of(translation) for name, (translation, _) in compiled.programs.items()}
    if not compiled.foreign:
        return programs[""]
    if compiled.others:
        raise Refusal("another compiler runs a part of it")
    order = fx_record.write(compiled.module, frozenset(programs))
    return Pieces(order, programs, frozenset(compiled.single), dict(compiled.foreign))


def _made(kept: Program | Pieces) -> Made:
    if isinstance(kept, Program):
        translation = kept.translation()
        return Made(boxed(native(translation)), {"": translation}, {})
    graphs = {name: program.translation() for name, program in kept.programs.items()}
    calls = {name: piece_call(native(graph), name in kept.single) for name, graph in graphs.items()}
    return Made(boxed(in_order(fx_record.read(kept.order), calls)), graphs, kept.foreign)


@dataclass
class _Forward:
    """What AOTAutograd asks for the compiled forward, or inference."""

    call: Callable[[list], Any]

    def load(self, example_inputs: Any) -> Callable[[list], Any]:
        return self.call

    def post_compile(self, result: Callable[[list], Any], config: Any) -> Callable[[list], Any]:
        return result


@dataclass
class _Backward(_Forward):
    """The same for the backward."""

    backward_state_indices: list[int]
    num_symints_saved_for_bw_: int

    def post_compile(self, result: Callable[[list], Any], config: Any) -> Callable[[list], Any]:
        return torch._dynamo.disable(result, reason="a compiled backward is not traced")


def write(entry: Any, programs: Mapping[str, Program | Pieces]) -> bytes:
    """The bytes. Raises where something cannot be written."""
    if entry.maybe_subclass_meta is not None:
        raise Refusal("it takes subclasses of Tensor")
    fields = {f.name: getattr(entry, f.name) for f in dataclasses.fields(entry)}
    fields.update({name: None for name in _FOR_LOGS if name in fields}, compiled_fw=None)
    backward = fields["compiled_bw"]
    if backward is not None:
        fields["compiled_bw"] = (backward.backward_state_indices, backward.num_symints_saved_for_bw_)
    with _disable_current_modes():
        return pickle.dumps((fields, dict(programs)), protocol=5)


def read(
    content: bytes, args: list[Any] | None = None, aot_config: Any = None
) -> tuple[Callable[..., Any], dict[str, Made]]:
    """What AOTAutograd returns, and by role what runs. Without `args` nothing is being traced, and sizes
    have been looked at before."""
    from torch._functorch._aot_autograd.aot_autograd_result import GenericAOTAutogradResult

    with _disable_current_modes():
        fields, programs = pickle.loads(content)
        made = {role: _made(kept) for role, kept in programs.items()}
    calls = {role: found.call for role, found in made.items()}
    backward = fields.pop("compiled_bw")
    fields["compiled_fw"] = _Forward(calls["inference" if backward is None else "forward"])
    # torch refuses to run a backward twice that has been promised the saved tensors' memory. Ours takes
    # that memory only where nobody else holds it (csrc_stubs/call/reuse.h), whatever the first call was like.
    fields["runtime_metadata"].bw_donated_idxs = []
    kept_backward = None if backward is None else _Backward(calls["backward"], *backward)
    entry: Any = GenericAOTAutogradResult(compiled_bw=kept_backward, **fields)
    if args is None:
        entry.guards_expr = None
    return entry.wrap_post_compile(args or [], aot_config or entry.sanitized_aot_config, {}), made
