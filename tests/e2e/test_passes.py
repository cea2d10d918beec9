"""The graph pass on graphs written by hand: what becomes a group, what stays outside, what a group looks
like. No device is needed, so these graphs are typed for CUDA as well."""

import gc
import random
import sys

import pytest
import torch

import tsfuser
from kit.handwritten import CPU, CUDA, FULL, XY, fuse_graph, fused, graph, typed
from kit.support import fresh, kinds
from tsfuser import _C
from tsfuser.errors import Refusal
from tsfuser.frontends.torchscript import passes
from tsfuser.graph.effects import SECRET_VIEWS
from tsfuser.graph.passes import Pass
from tsfuser.graph.passes import run as run_passes
from tsfuser.graph.wrapper import GROUP, GUARD
from tsfuser.grouping.support import Refusals
from tsfuser.ops import table, trials
from tsfuser.ops.trials import NodeArg

pytestmark = pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")


# ---- what becomes a group


def test_the_group_stands_behind_a_guard_with_the_original_nodes_as_fallback():
    after = fuse_graph(graph(XY, "%a = aten::add(%x, %y, 1)\n%b = aten::relu(%a)", "%b"))
    (guard,) = after.findAllNodes(GUARD, True)
    (choice,) = after.findAllNodes("prim::If", False)
    true, false = choice.blocks()
    assert [n.kind() for n in true.nodes()] == [GROUP] and [n.kind() for n in false.nodes()] == [
        "prim::FallbackGraph"
    ]
    assert [t.str() for t in guard.tys("types")] == [FULL, FULL]
    assert "cache_id" in next(true.nodes()).attributeNames()
    fallback = next(false.nodes()).g("Subgraph")
    assert [n.kind() for n in fallback.nodes()][-2:] == ["aten::add", "aten::relu"]
    assert all(v.type().dim() is None for v in fallback.inputs())


def test_a_graph_with_nothing_to_fuse_is_returned_unchanged():
    for body in ("%b = aten::relu(%x)", "%a = aten::mm(%x, %y)\n%b = aten::argsort(%a, 0, False)"):
        before = graph(XY, body, "%b")
        text = str(before)
        assert passes.fuse(before) is before and str(before) == text


def test_a_node_is_refused_for_its_number_where_one_like_it_has_another():
    body = """%a = aten::softshrink(%x, {})
        %b = aten::neg(%a)
        %c = aten::softshrink(%y, {})
        %d = aten::neg(%c)"""
    both = ["aten::softshrink", "aten::neg"]
    assert fused(XY, body.format(0.5, 0.25), "%b, %d") == [both, both]
    assert fused(XY, body.format(0.5, -0.25), "%b, %d") == [both]


def test_a_node_whose_result_autocast_gave_another_dtype_is_left_to_torch():
    """On CUDA `square` calls `pow`, which autocast computes in float32; that cast is in no graph."""
    half, refusals = typed(4, 8, dtype="BFloat16"), Refusals()
    body = "%a = aten::neg(%x)\n%b = aten::relu(%a)\n%c = aten::square(%b)\n%d = aten::neg(%c)"
    seen = {"%a": half, "%b": half}
    after = fuse_graph(graph({"%x": half}, body, "%d", seen), refusals)
    assert [kinds(g) for g in after.findAllNodes(GROUP, True)] == [["aten::neg", "aten::relu"]]
    (said,) = [said for text, said in refusals.entries if "aten::square" in text]
    assert said == "aten::square gave float32 while profiling, not bfloat16: autocast is on"
    alone = graph({"%x": half}, body, "%d", {**seen, "%c": half, "%d": half})
    assert len(kinds(fuse_graph(alone).findNode(GROUP, True))) == 4


def test_siblings_that_share_only_constants_are_no_group():
    assert fused(XY, "%a = aten::add(%x, 1, 1)\n%b = aten::sub(%y, 1, 1)", "%a, %b") == []


def test_siblings_that_share_a_zero_dim_tensor_are_a_group_on_cuda_and_none_if_it_is_on_the_cpu():
    body = "%a = aten::add(%x, %s, 1)\n%b = aten::mul(%y, %s)"
    assert fused({**XY, "%s": typed()}, body, "%a, %b") == [["aten::add", "aten::mul"]]
    assert fused({**XY, "%s": typed(device=CPU)}, body, "%a, %b") == []


def test_tensors_come_first_and_numbers_that_are_not_constant_stay_inputs():
    after = fuse_graph(graph({"%n": "int", **XY}, "%a = aten::add(%x, %y, %n)\n%b = aten::mul(%a, %n)", "%b"))
    (group,) = after.findAllNodes(GROUP, True)
    assert [v.debugName() for v in group.inputs()] == ["x", "y", "n"]


def test_a_list_of_numbers_that_only_the_group_reads_is_made_inside():
    body = "%s : int[] = prim::ListConstruct(%n, 8)\n%a = aten::relu(%x)\n%b = aten::sum_to_size(%a, %s)"
    after = fuse_graph(graph({"%x": FULL, "%n": "int"}, body, "%b"))
    (group,) = after.findAllNodes(GROUP, True)
    assert sorted(kinds(group)) == ["aten::relu", "aten::sum_to_size", "prim::ListConstruct"]
    assert [v.debugName() for v in group.inputs()] == ["x", "n"]
    assert after.findNode("prim::ListConstruct", False) is None


def test_a_list_that_others_read_too_is_an_input():
    body = "%s : int[] = prim::ListConstruct(%n, 8)\n%a = aten::relu(%x)\n%b = aten::sum_to_size(%a, %s)"
    (group,) = fuse_graph(graph({"%x": FULL, "%n": "int"}, body, "%b, %s")).findAllNodes(GROUP, True)
    assert [v.node().kind() for v in group.inputs()] == ["prim::Param", "prim::ListConstruct"]


def test_a_constant_tensor_is_an_input_that_the_guard_does_not_check():
    before = graph(XY, "%a = aten::add(%x, %y, 1)\n%b = aten::relu(%a)", "%b")
    y = list(before.inputs())[1]
    constant = before.create("prim::Constant", [], 1)
    constant.t_("value", torch.zeros(4, 8))
    before.prependNode(constant)
    constant.output().setType(y.type())
    y.replaceAllUsesWith(constant.output())
    after = fuse_graph(before)
    assert next(iter(after.findAllNodes(GUARD, True))).inputsSize() == 1
    assert next(iter(after.findAllNodes(GROUP, True))).inputsSize() == 2


# ---- devices


def test_cpu_scalar_arithmetic_is_fused_only_where_it_feeds_a_cuda_op():
    inputs = {"%x": FULL, "%s": typed(device=CPU), "%t": typed(device=CPU)}
    scalar = {"%a": typed(device=CPU)}
    body = "%a = aten::add(%s, %t, 1)\n%b = aten::mul(%a, %x)"
    assert fused(inputs, body, "%b", scalar) == [["aten::add", "aten::mul"]]
    assert fused(inputs, body + "\n%c = aten::relu(%b)", "%c, %a", scalar) == [["aten::mul", "aten::relu"]]
    assert (
        fused(
            inputs,
            "%a = aten::add(%s, %t, 1)\n%b = aten::relu(%a)",
            "%b",
            {**scalar, "%b": typed(device=CPU)},
        )
        == []
    )


def test_a_zero_dim_cpu_op_joins_a_cpu_group():
    inputs = {"%x": typed(4, 8, device=CPU), "%s": typed(device=CPU)}
    types = {"%a": typed(device=CPU), "%b": typed(4, 8, device=CPU)}
    assert fused(inputs, "%a = aten::neg(%s)\n%b = aten::mul(%a, %x)", "%b", types) == [
        ["aten::neg", "aten::mul"]
    ]


def test_devices_do_not_mix():
    inputs = {**XY, "%u": typed(4, 8, device="cuda:1"), "%h": typed(4, 8, device=CPU)}
    refusals = Refusals()
    body = "%a = aten::add(%x, %u, 1)\n%b = aten::relu(%h)\n%c = aten::mul(%x, %y)\n%d = aten::neg(%u)"
    types = {"%b": typed(4, 8, device=CPU), "%d": typed(4, 8, device="cuda:1")}
    fuse_graph(graph(inputs, body, "%a, %b, %c, %d", types), refusals)
    alone = "none of the nodes around it can be fused, and a group of one op saves nothing"
    assert [sentence for _, sentence in refusals.entries] == [
        "its tensors are on different devices: cuda:0, cuda:1", alone, alone, alone
    ]  # fmt: skip
    assert fused(inputs, body, "%a, %b, %c, %d", types) == []


# ---- refusals


def test_what_is_refused_is_kept_with_the_reason():
    refusals = Refusals()
    body = "%a = aten::argsort(%x, 0, False)\n%b = aten::relu(%a)\n%c = aten::neg(%n)"
    fuse_graph(graph({**XY, "%n": "Tensor"}, body, "%b, %c", {"%c": "Tensor"}), refusals)
    (node, why), (_, because), (alone, _) = refusals.entries
    assert "aten::argsort(%x" in node and why == "sorting is left to torch"
    assert because == "%n was not seen while profiling: its dtype, device or rank is unknown"
    assert "aten::relu(" in alone


def test_the_partition_log_shows_refused_nodes(capfd):
    from tsfuser import options

    with options.override(log_levels={"partition": 1}):
        fuse_graph(graph(XY, "%a = aten::mm(%x, %y)\n%b = aten::relu(%a)", "%b"))
    text = capfd.readouterr().err
    assert (
        "[partition] aten::mm is not fused: a matrix product is left to torch's libraries" in text
        and "aten::mm(%x, %y)" in text
    )


@pytest.mark.passes_fail
def test_a_failing_pass_warns_once_and_leaves_the_graph(monkeypatch):
    def broken(work):
        raise RuntimeError("a test broke this pass")

    monkeypatch.setattr(passes, "PASSES", (*passes.PASSES[:9], passes.Pass("broken", broken)))
    before = graph(XY, "%a = aten::add(%x, %y, 1)\n%b = aten::relu(%a)", "%b")
    text = str(before)
    with pytest.warns(tsfuser.TsfuserWarning, match="a test broke this pass"):
        assert passes.fuse(before) is before
    assert passes.fuse(before) is before and str(before) == text  # a second warning would be an error here


# ---- types


def test_a_type_that_the_profile_missed_is_inferred():
    body = """%a : Tensor = aten::add(%x, %h, 1)
              %b : Tensor = aten::gt(%a, 0)
              %c : Tensor = aten::type_as(%b, %h)"""
    inputs = {"%x": typed(4, 8, dtype="Half"), "%h": typed(8)}
    after = fuse_graph(graph(inputs, body, "%c"))
    (group,) = after.findAllNodes(GROUP, True)
    found = [n.output().type() for n in group.g("Subgraph").nodes() if n.kind().startswith("aten")]
    assert [(t.dtype(), t.dim(), str(t.device())) for t in found] == [
        (torch.float32, 2, CUDA),
        (torch.bool, 2, CUDA),
        (torch.float32, 2, CUDA),
    ]


def test_profile_nodes_give_their_types_and_vanish():
    text = f"""graph(%x : Tensor):
      %1 : int = prim::Constant[value=1]()
      %2 : Tensor = prim::profile[profiled_type={FULL}, seen_none=0](%x)
      %3 : Tensor = aten::add(%2, %1, %1)
      %4 : Tensor = prim::profile[profiled_type={FULL}, seen_none=0](%3)
      %5 : Tensor = aten::relu(%4)
      %6 : Tensor = prim::profile[profiled_type={FULL}, seen_none=0](%5)
      %7 : Tensor = prim::profile[profiled_type=Tensor, seen_none=0](%5)
      return (%6, %7)"""
    after = fuse_graph(torch._C.parse_ir(text))
    assert after.findNode("prim::profile", True) is None
    assert next(iter(after.findAllNodes(GUARD, True))).tys("types")[0].str() == FULL


def test_two_records_that_disagree_leave_what_they_agree_on():
    text = f"""graph(%x : Tensor):
      %1 : Tensor = prim::profile[profiled_type={FULL}, seen_none=0](%x)
      %2 : Tensor = aten::relu(%1)
      %3 : Tensor = prim::profile[profiled_type={typed(4, 9)}, seen_none=0](%x)
      %4 : Tensor = aten::mul(%2, %3)
      %5 : Tensor = prim::profile[profiled_type={FULL}, seen_none=0](%2)
      %6 : Tensor = prim::profile[profiled_type={FULL}, seen_none=0](%4)
      return (%6)"""
    (guard,) = fuse_graph(torch._C.parse_ir(text)).findAllNodes(GUARD, True)
    (seen,) = guard.tys("types")
    assert seen.varyingSizes() == [4, None] and seen.dtype() == torch.float32 and str(seen.device()) == CUDA


# ---- order and aliasing


def test_readers_of_a_written_tensor_stay_on_their_side_of_the_write():
    body = """%a = aten::mul(%x, %y)
              %b = aten::relu(%a)
              %w = aten::clamp_(%x, 0, 1)
              %c = aten::mul(%x, %b)
              %d = aten::relu(%c)"""
    assert fused(XY, body, "%d") == [["aten::mul", "aten::relu"], ["aten::mul", "aten::relu"]]


def test_a_write_elsewhere_does_not_split_a_group():
    body = """%a = aten::mul(%x, %y)
              %w = aten::clamp_(%z, 0, 1)
              %b = aten::relu(%a)"""
    assert fused({**XY, "%z": FULL}, body, "%b") == [["aten::mul", "aten::relu"]]


def test_what_is_written_after_it_leaves_the_group_is_a_tensor_of_its_own():
    """The two products are equal, but one of them is changed in place."""
    body = "%a = aten::mul(%x, %y)\n%b = aten::mul(%x, %y)\n%w = aten::zero_(%a)"
    after = fuse_graph(graph(XY, body, "%a, %b"))
    (group,) = after.findAllNodes(GROUP, True)
    assert kinds(group) == ["aten::mul", "aten::mul"] and group.outputsSize() == 2


def test_a_cast_that_may_be_a_view_of_a_written_tensor_stays_outside():
    body = "%a = aten::type_as(%x, %y)\n%b = aten::relu(%a)\n%c = aten::neg(%b)\n%w = aten::clamp_(%x, 0, 1)"
    assert fused(XY, body, "%c, %a") == [["aten::relu", "aten::neg"]]


def test_only_views_hand_their_operand_through():
    """A row that returns its operand makes the group return the caller's own tensor: right only where eager
    may do so as well."""
    checked = 0
    for row in table.all_rows():
        for schema in torch._C._jit_get_schemas_for_operator(row.name):
            if schema.overload_name in row.overloads:
                view = row.name in SECRET_VIEWS or any(r.alias_info for r in schema.returns)
                checked += 1
                assert view or not any(
                    returns_operand(row, schema, dtype) for dtype in ("bool", "int32", "float32")
                ), str(schema)
    assert checked > 100


def returns_operand(row, schema, dtype):
    """Whether the row hands an operand through when numbers are 1 and what is optional is absent."""
    answers = {"Tensor": NodeArg("tensor", dtype, 2), "str": NodeArg("string", constant="none")}
    answers["List[int]"] = NodeArg("list", constant=(1,))
    answers |= {name: NodeArg("number", "int", None, 1) for name in ("number", "int", "float", "bool")}
    args = {a.name: answers.get(str(a.real_type.annotation_str), NodeArg("none")) for a in schema.arguments}
    trial = trials._trial(row, tuple(sorted(args.items())), CPU, table.FLOAT, None)
    if trial is None:
        return False
    builder, values = trial
    try:
        results = row.build(builder, **values)
    except Refusal:
        return False
    return any(
        r is v for r in (results if isinstance(results, tuple) else (results,)) for v in values.values()
    )


# ---- large graphs


def large(nodes):
    generator, lines, values = random.Random(0), [], ["%x", "%y"]
    for i in range(nodes):
        a, b = values[-1], generator.choice(values[-20:])
        op = generator.choice(
            [f"add({a}, {b}, 1)", f"mul({a}, {b})", f"relu({a})", f"tanh({b})", f"mm({a}, {b})"]
        )
        lines.append(f"%v{i} = aten::{op}")
        values.append(f"%v{i}")
    return graph(XY, "\n".join(lines), values[-1])


def test_the_work_of_the_pass_grows_with_the_nodes_only():
    """Counted in calls of Python functions, which no other process slows down."""
    few, many = (calls_of_the_pass(nodes) for nodes in (2_000, 8_000))
    assert many < 6 * few  # four times the nodes


def calls_of_the_pass(nodes):
    before, calls = large(nodes), 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        after = fuse_graph(before)
    finally:
        sys.setprofile(None)
    after.lint()
    assert len(after.findAllNodes(GROUP, True)) > nodes // 100
    return calls


def test_groups_are_bounded():
    from tsfuser.grouping import cluster

    body = "\n".join(f"%v{i} = aten::tanh(%v{i - 1})" for i in range(1, 1000))
    lengths = list(map(len, fused({"%v0": FULL}, body, "%v999")))
    assert sum(lengths) == 999 and max(lengths) == cluster.MAX_NODES
    wide = "\n".join(f"%w{i} = aten::add(%x, %v{i}, 1)" for i in range(300))
    inputs = {"%x": FULL, **{f"%v{i}": FULL for i in range(300)}}
    after = fuse_graph(graph(inputs, wide, ", ".join(f"%w{i}" for i in range(300))))
    counts = [g.inputsSize() + g.outputsSize() for g in after.findAllNodes(GROUP, True)]
    assert len(counts) > 1 and max(counts) <= cluster.MAX_ARGUMENTS


def test_equal_groups_have_one_cache_id_whatever_their_sizes():
    ids = []
    for sizes in ((4, 8), (5, 9)):
        types = {name: typed(*sizes) for name in ("%x", "%y", "%a", "%b")}
        inputs = {name: types[name] for name in ("%x", "%y")}
        after = fuse_graph(graph(inputs, "%a = aten::add(%x, %y, 1)\n%b = aten::relu(%a)", "%b", types))
        ids.append(next(iter(after.findAllNodes(GROUP, True))).i("cache_id"))
    assert ids[0] == ids[1] and "aten::relu" in _C.group_text(ids[0])


def test_the_collector_of_cycles_waits_for_a_pass_alone():
    seen = []

    def fail(_):
        seen.append(gc.isenabled())
        raise ValueError("no such graph")

    for before in (True, False):
        (gc.enable if before else gc.disable)()
        try:
            with pytest.raises(ValueError, match="no such graph"):
                run_passes(None, (Pass("fail", fail),))
            assert gc.isenabled() == before
        finally:
            gc.enable()
    assert seen == [False, False]


def test_the_insert_point_does_not_stay_at_a_node_that_may_go():
    """Torch puts it back where it was, and aborts the process if that node is gone. Here the size of a
    group's result is computed before the group."""

    def program(x: torch.Tensor):
        y = torch.relu(x.transpose(1, 2)[..., ::2]) * 2.0
        return y.sum(-1), torch.zeros(y.size(0), y.size(2)) + y.reshape(y.size(0), -1).size(1)

    scripted = fresh(program)
    with tsfuser.fuser(), passes.watching() as seen:
        for _ in range(3):
            scripted(torch.randn(4, 47, 3, 16))
    assert seen and {outcome.graph.insertPoint().kind() for outcome in seen} == {"prim::Return"}
