"""Plans that may write a result over an operand which only the call holds."""

import pytest
import torch

from kit.native_support import ADD

LEAVES = 6  # n, stride, alignment of a and of b


def plan(native, kernels, reuses=((0, 0, []),), broken=False):
    """c = a + b for contiguous float vectors; then, if `broken`, a kernel that cannot be launched, with as
    many blocks as there are hundreds of elements."""
    program = [("const", 128, 0), ("ceildiv", 0, 6), ("const", 0, 0), ("const", 1, 0), ("const", 100, 0)]
    program.append(("div", 0, 10))
    args = [(0, "input", 0), (8, "input", 1), (16, "allocation", 0), (24, "int64", 0)]
    launches = [native.Launch("host", kernels["add"], "add", 7, 6, 9, 8, 9, 32, args)]
    if broken:
        args = [(0, "allocation", 0)]
        launches.append(native.Launch("cuda", 1, "some_kernel", 11, 9, 9, 8, 9, 8, args))
    return native.Plan(
        LEAVES, program, [], [("float32", [0], [9])], launches, [("allocation", 0)], reuses=list(reuses)
    )


def program(native, dead=1):
    """A graph of one group, which may have what both of its inputs lie in; a boxed function."""
    graph = torch._C.Graph()
    values = [graph.addInput() for _ in range(2)]
    group = graph.create("prim::CudaFusionGroup", values, 1)
    group.g_("Subgraph", torch._C.parse_ir(ADD))
    group.i_("dead", dead)
    graph.appendNode(group)
    graph.registerOutput(group.output())
    return native.GraphProgram(graph, [], [], [0], [None], lambda: True, [0, 1])


def added(run, n, held=False):
    """The result, and whether it lies where the first operand did."""
    args = [torch.ones(n), torch.arange(float(n))]
    address, holder = args[0].data_ptr(), args[0] if held else None
    [result] = run(args)
    assert torch.equal(result, 1 + torch.arange(float(n))) and args == []
    assert holder is None or torch.equal(holder, torch.ones(n))
    return result, result.data_ptr() == address


def test_a_dead_operand_that_nobody_holds_gives_its_memory(native, kernels):
    native.set_planner(lambda group, args, varies: plan(native, kernels))
    run = program(native)
    for n in (50, 50, 1000):
        result, taken = added(run, n)
        assert taken and result._version == 0 and not result.requires_grad
    assert not added(run, 50, held=True)[1]
    assert native.stats()["fallbacks"] == {}


@pytest.mark.parametrize("dead", [0, 2])
def test_an_operand_that_is_read_later_keeps_its_memory(native, kernels, dead):
    native.set_planner(lambda group, args, varies: plan(native, kernels))
    assert not added(program(native, dead), 50)[1]


def test_an_empty_operand(native, kernels):
    native.set_planner(lambda group, args, varies: plan(native, kernels))
    added(program(native), 0)


def test_what_is_alike_in_other_sizes_only(native, kernels):
    """The stride of the result, 1, is asked to be the number of elements, where there are several."""
    native.set_planner(lambda group, args, varies: plan(native, kernels, [(0, 0, [(0, 9, 0)])]))
    run = program(native)
    assert not added(run, 50)[1] and added(run, 1)[1]


def test_results_of_inference_mode_are_inference_tensors(native, kernels):
    native.set_planner(lambda group, args, varies: plan(native, kernels))
    run = program(native)
    with torch.inference_mode():
        result, taken = added(run, 50)
        assert taken and result.is_inference()
    assert not added(run, 50)[0].is_inference()


def test_a_first_call_of_several_kernels_falls_back_with_its_operands(native, kernels):
    """A plan takes no memory before all of its kernels have been launched once."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine where a CUDA launch fails")
    native.set_reporter(lambda *report: None)
    native.set_planner(lambda group, args, varies: plan(native, kernels, broken=True))
    assert not added(program(native), 200)[1]
    assert sum(native.stats()["fallbacks"].values()) == 1


def test_a_later_kernel_that_fails_where_an_operand_is_lost_is_an_error(native, kernels):
    """Never a wrong result: the ops would read what has been written over it."""
    if torch.cuda.is_available():
        pytest.skip("needs a machine where a CUDA launch fails")
    native.set_reporter(lambda *report: None)
    native.set_planner(lambda group, args, varies: plan(native, kernels, broken=True))
    run = program(native)
    assert added(run, 50)[1]  # without the kernel that fails
    with pytest.raises(RuntimeError, match="over an operand that nobody else held"):
        added(run, 200)
    assert not added(run, 200)[1]  # from then on the ops are run


@pytest.mark.parametrize(
    "reuses, what",
    [
        ([(1, 0, [])], "among the allocations"),
        ([(0, 63, [])], "among the allocations"),
        ([(0, -1, [])], "among the allocations"),
        ([(0, 0, [(99, 0, 0)])], "among the values"),
    ],
)
def test_a_plan_that_names_what_is_not_there_is_refused(native, kernels, reuses, what):
    with pytest.raises(ValueError, match=what):
        plan(native, kernels, reuses)


@pytest.mark.parametrize("index, dtype", [(2, torch.float32), (0, torch.float64)])
def test_a_plan_for_other_arguments_runs_unfused(native, kernels, index, dtype):
    native.set_reporter(lambda *report: None)
    native.set_planner(lambda group, args, varies: plan(native, kernels, [(0, index, [])]))
    [result] = program(native)([torch.ones(5, dtype=dtype), torch.ones(5, dtype=dtype)])
    assert result.tolist() == [2.0] * 5 and result.dtype == dtype
    (reason,) = native.stats()["fallbacks"]
    assert "may give its memory" in reason
