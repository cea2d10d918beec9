"""What the graph pass makes of a group's inside and of its outputs: no-ops, results of which only sizes or
the dtype are asked, results that must be tensors of their own."""

import pytest
import torch

import tsfuser
from kit.handwritten import FULL, XY, fuse_graph, fused, graph, typed
from kit.support import CALLS, assert_matches, fresh, fuse, groups, kinds, stored, train
from tsfuser.errors import Refusal
from tsfuser.graph.wrapper import GROUP
from tsfuser.ir.call import Call, TensorArg
from tsfuser.planning.parse import parse

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning"), pytest.mark.graphs]


# ---- cleaning


def ops_of(body, dtype="float32"):
    """The names of the ops of the Fusion that a plan for 4 x 8 tensors of `dtype` would have."""
    tensor = TensorArg(dtype, "cpu", (4, 8), (8, 1))
    return [op.name for op in parse(graph(XY, body, "%z"), Call((tensor, tensor)), "cpu").ops]


def test_no_ops_inside_a_group_vanish_from_its_plan():
    body = "%a = aten::mul(%x, %y)\n%b = aten::mul(%a, 1.0)\n%c = aten::sub(%b, 0, 1)\n%z = aten::relu(%c)"
    assert ops_of(body) == ["mul", "relu"]


@pytest.mark.parametrize(
    "op", ["aten::add(%a, 0.0, 1)", "aten::sub(%a, 1, 1)", "aten::mul(%a, 2)", "aten::sub(%a, 0, 2)"]
)
def test_ops_that_are_nearly_no_ops_stay(op):
    """`x + 0.0` turns -0.0 into 0.0."""
    assert len(ops_of(f"%a = aten::mul(%x, %y)\n%b = {op}\n%z = aten::relu(%b)")) >= 3


@pytest.mark.parametrize("op", ["aten::div(%a, 1)", "aten::mul(%a, 1.0)"])
def test_integers_keep_a_true_division_and_a_product_with_a_float(op):
    assert len(ops_of(f"%a = aten::mul(%x, %y)\n%b = {op}\n%z = aten::relu(%b)", "int64")) >= 3


def test_a_no_op_whose_result_leaves_the_group_stays():
    assert ops_of("%a = aten::mul(%x, %y)\n%z = aten::mul(%a, 1)") == ["mul", "mul"]


def test_a_result_of_cpu_scalars_does_not_leave_a_cuda_group():
    """As it may where the group was made for CUDA tensors, and the guard is off."""
    call = Call((TensorArg("float32", "cpu", (), ()), TensorArg("float32", "cuda:0", (4, 8), (8, 1))))
    body = "%a = aten::add(%x, 1, 1)\n%b = aten::relu(%a)\n%z = aten::mul(%b, %y)"
    assert len(parse(graph(XY, body, "%z"), call, "cuda:0").outputs) == 1
    with pytest.raises(Refusal, match="is on the CPU"):
        parse(graph(XY, body, "%z, %b"), call, "cuda:0")


@pytest.mark.parametrize("guarded", [True, False])
def test_what_is_a_no_op_for_one_dtype_converts_another(device, guarded):
    """A product with 1.0 gives floating results of integers, also in the group that was made for floats."""

    def program(x, y):
        return (x * 1.0).abs() + y * 1.0

    scripted = fuse(program, *torch.randn(2, 4, 8, device=device))
    assert groups(scripted)
    before = torch._C._jit_set_nvfuser_guard_mode(guarded)
    try:
        x = torch.arange(-16, 16, device=device).view(4, 8)
        for _ in range(CALLS):
            assert_matches(scripted(x, x), program(x, x), ops=2)
    finally:
        torch._C._jit_set_nvfuser_guard_mode(before)


def test_a_group_that_is_put_back_keeps_what_converts_other_dtypes(device):
    def program(x, y, z):
        return x * 1.0 + y, (z * 2.0).relu()

    scripted = fuse(program, *torch.randn(3, 4, 8, device=device))
    assert len(groups(scripted)) == 1
    x = torch.arange(32, device=device).view(4, 8)
    for _ in range(CALLS):
        assert_matches(scripted(x, x, x)[0], program(x, x, x)[0])


def test_a_group_of_one_op_after_cleaning_is_put_back():
    assert fused(XY, "%a = aten::mul(%x, 1)\n%b = aten::add(%a, %y, 1)", "%b") == []


def test_casts_that_change_nothing_are_no_group():
    assert fused(XY, "%a = aten::type_as(%x, %y)\n%b = aten::type_as(%a, %y)", "%b") == []


# ---- sizes and dtypes


def test_an_output_of_which_only_the_size_is_asked_is_not_stored():
    body = """%a = aten::add(%x, %b, 1)
              %c = aten::relu(%a)
              %s : int[] = aten::size(%a)
              %n : int = aten::size(%a, 1)
              %r : int = aten::dim(%a)"""
    after = fuse_graph(graph({"%x": FULL, "%b": typed(8)}, body, "%c, %s, %n, %r"))
    (group,) = after.findAllNodes(GROUP, True)
    assert group.outputsSize() == 1
    assert after.findNode("prim::BroadcastSizes", False).inputsSize() == 2


@pytest.mark.parametrize("dims, keepdim", [("0", "True"), ("1", "False"), ("0, -1", "True"), ("", "False")])
def test_a_reduction_of_which_only_the_size_is_asked_is_not_stored(dims, keepdim):
    body = f"""%a = aten::add(%x, %b, 1)
               %d : int[] = prim::ListConstruct({dims})
               %m = aten::mean(%a, %d, {keepdim}, None)
               %c = aten::relu(%a)
               %s : int[] = aten::size(%m)"""
    after = fuse_graph(graph({"%x": FULL, "%b": typed(8)}, body, "%c, %s"))
    (group,) = after.findAllNodes(GROUP, True)
    assert group.outputsSize() == 1 and "aten::mean" not in kinds(group)


def test_the_size_of_a_sum_of_reductions_is_their_broadcast():
    body = """%d : int[] = prim::ListConstruct(1)
              %m = aten::mean(%x, %d, True, None)
              %a = aten::add(%m, %b, 1)
              %v = aten::sum(%a, %d, False, None)
              %c = aten::relu(%a)
              %s : int[] = aten::size(%c)
              %t : int[] = aten::size(%v)"""
    after = fuse_graph(graph({"%x": FULL, "%b": typed(8)}, body, "%v, %s, %t"))
    assert after.findNode("prim::BroadcastSizes", False).inputsSize() == 2


def test_a_query_that_the_program_makes_itself_is_used():
    body = """%q : int[] = aten::size(%x)
              %a = aten::relu(%x)
              %c = aten::neg(%a)
              %s : int[] = aten::size(%a)"""
    after = fuse_graph(graph(XY, body, "%c, %q, %s"))
    assert len(after.findAllNodes("aten::size", True)) == 1


def test_a_group_whose_sizes_alone_are_asked_vanishes():
    body = "%a = aten::add(%x, %y, 1)\n%b = aten::relu(%a)\n%s : int[] = aten::size(%b)"
    after = fuse_graph(graph(XY, body, "%s"))
    assert after.findNode(GROUP, True) is None or after.findNode("aten::relu", True) is not None


def test_an_output_without_a_size_rule_is_kept():
    body = """%a = aten::relu(%x)
              %b = aten::sum_to_size(%a, %l)
              %s : int[] = aten::size(%b)
              %c = aten::neg(%a)"""
    (group,) = fuse_graph(graph({"%x": FULL, "%l": "int[]"}, body, "%c, %s", {"%b": typed(8)})).findAllNodes(
        GROUP, True
    )
    assert group.outputsSize() == 2


def test_an_output_of_which_only_the_dtype_is_asked_becomes_a_number():
    body = "%a = aten::add(%x, %y, 1)\n%b = aten::relu(%a)\n%t : int = prim::dtype(%a)"
    (group,) = fuse_graph(graph(XY, body, "%b, %t")).findAllNodes(GROUP, True)
    assert [v.node().kind() for v in group.g("Subgraph").outputs()] == ["aten::relu", "prim::dtype"]
    assert group.outputsAt(1).type().kind() == "IntType"


# ---- running


def test_size_and_dtype_outputs_are_right_behind_a_failing_guard(device):
    def program(x, b):
        a = x + b
        return a.relu(), a.size(), a.size(0), a.dim(), a.dtype

    scripted = fuse(program, torch.randn(4, 8, device=device), torch.randn(8, device=device))
    assert stored(groups(scripted)[0]) == 1 and groups(scripted)[0].outputsSize() == 2
    with tsfuser.fuser():
        for shape in ((4, 8), (3, 8), (1, 8), (2, 3, 8)):
            for dtype in (torch.float32, torch.float64):
                x, b = (
                    torch.randn(shape, device=device, dtype=dtype),
                    torch.randn(8, device=device, dtype=dtype),
                )
                got, want = scripted(x, b), program(x, b)
                assert (
                    torch.equal(got[0], want[0]) and tuple(got[1]) == tuple(want[1]) and got[2:4] == want[2:4]
                )


@pytest.mark.parametrize("guarded", [True, False])
def test_a_dtype_is_that_of_this_call(device, guarded):
    def program(x, y):
        a = x + y
        return a.relu(), torch.zeros([1], dtype=(a * 2).dtype)

    x, y = torch.randn(2, 4, 8, device=device)
    scripted = fuse(program, x, y)
    before = torch._C._jit_set_nvfuser_guard_mode(guarded)
    try:
        for left, right in ((x, y), (x.double(), y), (x.int(), y.short()), (x.half(), y.bfloat16())):
            for _ in range(CALLS):
                assert scripted(left, right)[1].dtype == program(left, right)[1].dtype
    finally:
        torch._C._jit_set_nvfuser_guard_mode(before)


def test_a_group_of_which_only_a_dtype_is_left(device):
    def program(x, y):
        return torch.zeros([1], dtype=(x + y).relu().dtype)

    x, y = torch.randn(2, 4, 8, device=device)
    scripted = fuse(program, x, y)
    assert groups(scripted)
    assert scripted(x, y).dtype == torch.float32 and scripted(x.double(), y).dtype == torch.float64


def test_a_list_of_sizes_that_is_changed_in_place_is_no_other_list(device):
    def program(x, b):
        a = x + b
        s, t = a.size(), a.size()
        s[0] = 77
        return a.relu(), s, t

    x, b = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    scripted = fuse(program, x, b)
    with tsfuser.fuser():
        assert groups(scripted) and scripted(x, b)[1:] == ([77, 8], [4, 8])


def test_sizes_are_asked_after_an_in_place_op_that_changes_them(device):
    def program(x, b, flag: bool):
        x = x.clone()
        x.unsqueeze_(0)
        a = x + b
        n = 0
        if flag:
            n = x.size()[0] + a.size()[0]
        return a.relu(), n

    x, b = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    scripted = fuse(program, x, b, True)
    with tsfuser.fuser():
        assert scripted(x, b, True)[1] == 2 and scripted(x, b, False)[1] == 0


def test_sizes_asked_in_a_branch(device):
    def program(x, b, flag: bool):
        a = x * b
        n = 0
        if flag:
            n = x.size()[0] + a.size()[1]
        return a.relu(), n

    x, b = torch.randn(4, 8, device=device), torch.randn(8, device=device)
    scripted = fuse(program, x, b, True)
    with tsfuser.fuser():
        assert groups(scripted)[0].outputsSize() == 1
        assert scripted(x, b, True)[1] == 12 and scripted(x, b, False)[1] == 0


def test_the_forward_of_a_training_step_stores_no_intermediate_for_its_size(device):
    def program(x, b):
        return torch.relu((x + b) * 2.0) * 0.5 + b

    x = torch.randn(4, 8, device=device, requires_grad=True)
    b = torch.randn(8, device=device, requires_grad=True)
    scripted = fresh(program)
    with tsfuser.fuser():
        torch._C._debug_set_autodiff_subgraph_inlining(False)
        try:
            out, gradients = train(scripted, (x, b))
        finally:
            torch._C._debug_set_autodiff_subgraph_inlining(True)
    want, expected = train(program, (x, b), calls=1)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(gradients, expected)
    assert sorted(group.outputsSize() for group in groups(scripted)) == [
        2,
        2,
    ]  # output and relu's result; two gradients


def test_no_two_results_share_memory_that_eager_keeps_apart(device):
    def program(x):
        y = x * 1.0
        z = y * 1
        return y, z, x.relu() * 1.0

    x = torch.randn(4, 8, device=device)
    scripted = fuse(program, x)
    with tsfuser.fuser():
        places = {t.data_ptr() for t in (x, *scripted(x))}
    assert groups(scripted) and len(places) == 4
