"""The passes that make groups, as ordered lists that a front end puts together.

In: a graph whose values carry types. Out: the same graph with `prim::CudaFusionGroup` nodes. A front end runs
`BEFORE_GROUPS`, `MAKE_GROUPS`, its guards, `SETTLE` and `FINISH`. Order, and why:

  read_trials           before the first pass that asks rows about nodes
  rewrites              see graph/rewrites.py
  move_chunks           after the types; a node behind a chunk may be grouped with readers of the chunk
  split_views           before groups: a view with two readers could not be inside and outside
  make_groups           the choice of nodes, with all types known
  clean_groups          before size arithmetic is made, and before a fallback is copied from the subgraph
  drop_size_only        after cleaning (fewer nodes to follow), before guards: a fallback has the outputs
  inline_small_groups   what cleaning left with nothing to win returns to the graph
  end_products          before dtypes are what a group returns: it looks for groups of one output
  replace_dtype_only    after size-only outputs, which may be asked for their dtypes, too
  (guards)              after all changes of the groups' outputs, since a fallback copies the subgraph
  merge_views           after all groups are final: what is outside now stays there
  tidy                  drops layout hints that no group heeds, and what has no reader any more; reshapes
                        and operands of products outside of groups are what they were; lists stand before
                        their readers
  name_groups           last: the cache id stands for the final text
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .. import _C, options
from ..graph import cleanup
from ..graph.containers import sink_containers
from ..graph.copied_reshapes import restore_reshapes
from ..graph.effects import Effects, remove_dead_code
from ..graph.layout_hints import drop_layout_hints
from ..graph.matmul_operands import drop_copies
from ..graph.passes import Pass
from ..graph.rewrites import REWRITES
from ..graph.wrapper import (
    CONSTANT,
    GROUP,
    Graph,
    Value,
    all_nodes_of,
    facts,
    graph_inputs,
    is_tensor,
    outputs,
)
from ..planning import background, batched, stored_trials
from . import gelu_products, lone_biases, sizes
from .chunks import move_chunks
from .dtype_only import replace_dtype_only_outputs
from .groups import Group, make_groups
from .outline import inline
from .support import Refusals
from .views import Split, merge_views, split_views


@dataclass
class Work:
    """What the passes share: the graph, its groups from the last to the first (inner blocks before outer
    ones), and where the refusals go. `lone_reductions`: on a GPU a reduction is a group, also where nothing
    is fused with it. `has_products`: there are products of matrices, and from `end_products` on, some that do
    more than multiply. `profiled`: the types are those of one call, and other calls may have others."""

    graph: Graph
    refusals: Refusals
    lone_reductions: bool = False
    profiled: bool = False
    groups: list[Group] = field(default_factory=list)
    effects: Effects | None = None
    split: Split = field(default_factory=Split)
    has_products: bool = False

    @property
    def is_done(self) -> bool:
        """Whether groups were made and nothing is left to do: no groups, and no products that could take over
        an op of torch's."""
        return self.effects is not None and not self.groups and not self.has_products

    def __str__(self) -> str:
        return str(self.graph)


def _make_groups(work: Work) -> None:
    work.effects = Effects(work.graph)
    work.groups = make_groups(work.graph, work.effects, work.refusals, work.lone_reductions)
    kinds = (lone_biases.PRODUCT, *gelu_products.PRODUCTS)
    work.has_products = any(work.graph.findNode(kind, True) is not None for kind in kinds)
    stored_trials.keep()  # no later pass asks rows for their results


def _split_views(work: Work) -> None:
    work.split = split_views(work.graph)


def _clean_groups(work: Work) -> None:
    for group in work.groups:
        cleanup.clean(group.node.g("Subgraph"), merge=not group.written)
        cleanup.merge_equal_outputs(group.node)
        if not group.written:
            cleanup.release_idle_casts(work.graph, group.node)
        cleanup.drop_unused_inputs(group.node)


def _drop_size_only(work: Work) -> None:
    queries = sizes.Queries(work.graph, work.effects)
    work.groups = [g for g in work.groups if sizes.drop_size_only_outputs(work.graph, g.node, queries)]


def _inline_small_groups(work: Work) -> None:
    least = 1 if options.state.single_node_mode else 2
    alone = work.lone_reductions
    small = [g for g in work.groups if not cleanup.has_work(g.node.g("Subgraph"), least, alone)]
    work.groups = [g for g in work.groups if g not in small]
    for group in small:
        give_back(work, group, "once dead and repeated work was gone, its group had less than two ops")


def give_back(work: Work, group: Group, reason: str) -> None:
    """Puts the group's nodes back into the graph, with the reason."""
    for node in group.node.g("Subgraph").nodes():
        if node.kind() != CONSTANT:
            work.refusals.add(node, reason)
    made = inline(work.graph, group.node)
    work.effects.learn([v for node in made for v in outputs(node)], group.written)


def _end_products(work: Work) -> None:
    """Products of matrices do what the library that multiplies does on its way, instead of groups."""
    added, applied = _return_biases(work), _apply_gelus(work)
    work.has_products = added or applied


def _return_biases(work: Work) -> bool:
    """Whether a product adds a bias now."""
    changed = False
    for product in all_nodes_of(work.graph, (lone_biases.PRODUCT,)):
        reader = lone_biases.reader_of(product, work.effects)
        if reader is None:
            continue
        written = work.effects.is_written(reader.output())
        group = next((g for g in work.groups if g.node == reader), None)
        if group is not None:
            work.groups.remove(group)
            give_back(work, group, lone_biases.REASON)
        made = lone_biases.add_in_product(work.graph, product)
        work.effects.learn([made], written)
        work.refusals.add(made.node(), lone_biases.PRODUCT_REASON)
        changed = True
    return changed


def _apply_gelus(work: Work) -> bool:
    """Whether a product applies gelu now."""
    changed = False
    for product in all_nodes_of(work.graph, (lone_biases.PRODUCT, *gelu_products.PRODUCTS)):
        reader = gelu_products.gelu_behind(product, work.effects)
        if reader is None:
            continue
        result = reader.output()
        group = next((g for g in work.groups if g.node == reader), None)
        if group is not None:
            read = next(iter(result.uses()))
            work.groups.remove(group)
            give_back(work, group, gelu_products.REASON)
            result = read.user.inputsAt(read.offset)
        if product.kind() == lone_biases.PRODUCT:
            product = lone_biases.add_in_product(work.graph, product).node()
            work.effects.learn(outputs(product), written=False)
        made, instead = gelu_products.apply_gelu(work.graph, product, result, checked=work.profiled)
        work.effects.learn(instead, written=False)
        work.refusals.add(made, gelu_products.REASON)
        changed = True
    return changed


def _replace_dtype_only(work: Work) -> None:
    for group in work.groups:
        replace_dtype_only_outputs(work.graph, group.node)


def _tidy(work: Work) -> None:
    drop_layout_hints(work.graph)
    restore_reshapes(work.graph)
    drop_copies(work.graph)
    remove_dead_code(work.graph)
    if work.effects is not None and work.effects.writes:
        sink_containers(work.graph)


def _name_groups(work: Work) -> None:
    for node in work.graph.findAllNodes(GROUP, True):
        subgraph = node.g("Subgraph")
        text = identity(subgraph) + batched.MARK * node.hasAttribute("batch")
        node.i_("cache_id", _C.group_id(subgraph, text))
        background.mark(node.i("cache_id"), options.in_background())


def identity(subgraph: Graph) -> str:
    """The text under which groups share their plans: the nodes under canonical names, without sizes and
    source lines, and dtype, device and rank of each input."""
    types = [_describe(v) for v in graph_inputs(subgraph)]
    return f"# {', '.join(types)}\n{operations(subgraph)}"


def operations(subgraph: Graph) -> str:
    """The nodes under canonical names, without types and source lines."""
    canonical = torch._C._jit_pass_canonicalize(subgraph, False)
    torch._C._jit_pass_erase_shape_information(canonical)
    return canonical.str(False)


def _describe(value: Value) -> str:
    """An input's type as `float32[2 dims] on cpu`, or `int`."""
    if not is_tensor(value):
        return str(value.type())
    dtype, device, rank = facts(value.type())
    return f"{dtype}[{rank} dims] on {device}"


def _on_graph(name: str, rewrite: Callable[[Graph], object]) -> Pass:
    return Pass(name, lambda work: rewrite(work.graph))


BEFORE_GROUPS = (
    Pass("read_trials", lambda _: stored_trials.read()),
    *(_on_graph(name, rewrite) for name, rewrite in REWRITES),
    _on_graph("move_chunks", move_chunks),
    Pass("split_views", _split_views),
)
MAKE_GROUPS = (
    Pass("make_groups", _make_groups),
    Pass("clean_groups", _clean_groups),
    Pass("drop_size_only", _drop_size_only),
    Pass("inline_small_groups", _inline_small_groups),
    Pass("end_products", _end_products),
    Pass("replace_dtype_only", _replace_dtype_only),
)
SETTLE = (Pass("merge_views", lambda work: merge_views(work.graph, work.split)),)
FINISH = (
    Pass("tidy", _tidy),
    Pass("name_groups", _name_groups),
)
