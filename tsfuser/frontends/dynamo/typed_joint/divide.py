"""Forward and backward of AOTAutograd's joint graph, as the cut of the typed joint graph says.

In: a joint FX graph, and how many of its outputs are the forward's. Out: two FX modules. The passes before
the cut change the typed graph, and so the joint graph of FX (`write_back.py`). Both modules are of its nodes:
torch extracts them, as for its own partitioners, once it is known which nodes the forward saves. Raises
Refusal where something else decides that, such as a checkpoint, or where the graph cannot be translated.

What is saved need not be what eager saves: a program that writes to an input or a result before the backward
gets an error then, as with torch's partitioners. And nobody differentiates the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch
from torch import fx
from torch._functorch import config, partitioners
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ....errors import Refusal
from ....graph.passes import Pass, no_collection, run
from ....graph.wrapper import LIST, Graph, Value, inputs, nodes_of, outputs
from ....joint.cut import chosen
from ....joint.divide import Written
from ....joint.passes import PASSES, Work
from ....joint.results import DERIVATIVES
from ....joint.roles import Roles
from ....ops import table, without_row
from ..fx.insert import is_alike
from ..fx.recomputed import name_recomputed
from ..fx.updates import return_inputs
from .instead import compute_instead, keep_unrounded
from .translate import Translated, translate
from .write_back import leaves, write_back

#: Namespaces of ops that torch's partitioner treats in ways of its own.
_COLLECTIVE = ("_c10d_functional", "_dtensor")
#: The passes before the cut that have something to do here: the others are about ops that torch decomposes,
#: or about what a program may write to. All types are known at first.
_TAKEN = (
    "write_loss_heads",
    "note_eager",
    "read_results",
    "merge_equal_ops",
    "write_norms",
    "write_softmaxes",
    "note_written",
)
_STEPS = tuple(step for step in PASSES if step.name in _TAKEN)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@no_collection()
def divide(joint: fx.GraphModule, results: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward."""
    _check(joint.graph)
    return_inputs(joint.graph)
    translated = translate(partitioners.raise_getitems(joint), results)
    work = Work(
        translated.joint, keep_inputs=True, leave_results=True, filled=partial(_is_filled, translated)
    )
    with unset_fake_temporarily():  # else torch looks each tensor without memory up
        run(work, _steps(translated.joint.graph))
    write_back(translated, joint, work.merged)
    written = [w for w in work.written if _lies_alike(w, translated)]
    values = _saved(translated, varies=any(_is_symbolic(n) for n in joint.graph.find_nodes(op="placeholder")))
    saved = list(dict.fromkeys(node for value in values for node in _nodes(value, translated)))
    forward, backward = partitioners._extract_fwd_bwd_modules(
        joint,
        [node for node in saved if not _is_symbolic(node)],
        saved_sym_nodes=[node for node in saved if _is_symbolic(node)],
        num_fwd_outputs=results,
    )
    name_recomputed(forward, backward)
    numbers = {value.unique() for value in values}
    kept = [w for w in written if numbers.isdisjoint(part.unique() for part in w.parts)]
    pairs = [tuple(translated.nodes[v.unique()][0] for v in (w.value, w.instead)) for w in kept]
    compute_instead(forward, pairs)
    keep_unrounded(backward, [made for made, _ in pairs])
    backward = partitioners.reordering_to_mimic_autograd_engine(backward)
    return partitioners.raise_getitems(forward), partitioners.raise_getitems(backward)


def _steps(graph: Graph) -> list[Pass]:
    """Those that have something to do in the graph. What eager saves matters to `read_results` only."""
    left = set() if config.cse else {"merge_equal_ops"}
    if not nodes_of(graph, DERIVATIVES):
        left |= {"note_eager", "read_results"}
    return [step for step in _STEPS if step.name not in left]


def _is_filled(translated: Translated, value: Value, dim: int) -> bool:
    """Whether it has elements along that dim, for all sizes that the graph is for."""
    nodes = translated.nodes.get(value.unique())
    return nodes is not None and statically_known_true(nodes[0].meta["val"].shape[dim] > 0)


def _lies_alike(written: Written, translated: Translated) -> bool:
    """Whether torch has traced both with the same strides. Else readers read what the forward has."""
    made, instead = (translated.nodes[v.unique()][0] for v in (written.value, written.instead))
    if is_alike(made.meta["val"], instead.meta["val"]):
        return True
    written.value.replaceAllUsesWith(written.instead)
    made.replace_all_uses_with(instead)
    return False


def _check(graph: fx.Graph) -> None:
    """Raises Refusal where the program, or a mode of torch, says what is saved."""
    if config.activation_memory_budget != 1 or getattr(config, "enable_activation_offloading", False):
        raise Refusal("torch has a budget of memory for what is saved")
    if getattr(config, "_sync_decision_cross_ranks", False):
        raise Refusal("several processes decide what is saved")
    for node in graph.nodes:
        if partitioners.must_recompute(node):
            raise Refusal("a checkpoint says what the backward computes again")
        if "memory_budget" in node.meta or node.meta.get("partitioner_tag") == "must_be_in_backward":
            raise Refusal("the program says what the backward does")
        if getattr(node.target, "namespace", None) in _COLLECTIVE:
            raise Refusal("processes exchange tensors")


def _is_symbolic(node: fx.Node) -> bool:
    return isinstance(node.meta["val"], _SYMBOLIC)


def _saved(translated: Translated, varies: bool) -> list[Value]:
    """What the forward saves, in the order of the graph. `varies`: whether sizes do."""
    with unset_fake_temporarily():
        return _chosen(Roles(translated.joint), varies)


def _chosen(roles: Roles, varies: bool) -> list[Value]:
    everything = frozenset(range(len(roles.grads)))
    shown = {root for value in (*roles.given, *roles.results) for root in roles.roots(value)}
    numbers = chosen(roles, dict.fromkeys(shown, everything), again=_again(varies))
    values = [*roles.given, *(v for node in roles.nodes for v in outputs(node))]
    return [value for value in values if value.unique() in numbers]


@cache
def _again(varies: bool) -> frozenset[str]:
    """Ops that the backward may run again. A lookup reads as much as its result has; what is filled with a
    number is that number to a group; `rewrites/ranges.py` makes ranges once, where their sizes are known."""
    lookups = {row.name for row in table.all_rows() if row.family == "lookup"}
    ranges = frozenset() if varies else without_row.RANGES
    return without_row.FILLS | ranges | lookups


def _nodes(value: Value, translated: Translated) -> Iterator[fx.Node]:
    """Those whose results the value is. A list is made of its items again, and a number that no node gives of
    what it is computed from."""
    if value.unique() in translated.numbers:
        yield from (n for n in leaves(translated.numbers[value.unique()]) if isinstance(n, fx.Node))
        return
    found = translated.nodes.get(value.unique(), [])
    if any(isinstance(node.meta["val"], (torch.Tensor, *_SYMBOLIC)) for node in found):
        yield from (node for node in found if node.op != "get_attr")
        return
    if not found and value.node().kind() != LIST and value.type().kind() == "TensorType":
        raise Refusal("a tensor is saved that no node of the graph gives")
    for operand in inputs(value.node()):
        yield from _nodes(operand, translated)
