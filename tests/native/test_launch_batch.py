"""Batches of groups: as many launches as there are kernels and tables are full."""

import pytest
import torch

ADD = """
graph(%a : Tensor, %b : Tensor):
  %one : int = prim::Constant[value=1]()
  %r : Tensor = aten::add(%a, %b, %one)
  return (%r)
"""
ADD_IN_PLACE = ADD.replace("aten::add(", "aten::add_(")
SCALED = """
graph(%a : Tensor, %b : float):
  %r : Tensor = aten::mul(%a, %b)
  return (%r)
"""
SIZES = (5, 300, 7, 129, 1000)  # of the tensors of five groups; a table has room for three


def batch_of_groups(subgraph, negated=False, apart=None):
    """A function of pairs of arguments that runs a group for each pair, all of them in one batch; with
    `negated` the first of each pair, which nobody else has, is negated. `apart`: where another op stands
    between the groups."""
    sub, graph = torch._C.parse_ir(subgraph), torch._C.Graph()
    given = [graph.addInput() for _ in range(2 * len(SIZES))]
    for value, inner in zip(given, list(sub.inputs()) * len(SIZES)):
        value.setType(inner.type())
    first = given[::2]
    if negated:
        first = [graph.appendNode(graph.create("aten::neg", [value], 1)).output() for value in first]
    results = []
    for k, operands in enumerate(zip(first, given[1::2])):
        if k == apart:
            graph.appendNode(graph.create("aten::neg_", [results[-1]], 1))
        node = graph.create("prim::CudaFusionGroup", list(operands), 1)
        node.g_("Subgraph", sub.copy())
        node.i_("batch", 0)
        results.append(graph.appendNode(node).output())
    for value in results:
        graph.registerOutput(value)
    graph.makeMultiOutputIntoTuple()
    return torch._C._create_function_from_graph("f", graph)


def add_plan(native, kernels, args, written=False):
    """c = a + b for float vectors, or a += b."""
    program = [("const", 128, 0), ("ceildiv", 0, 6), ("const", 0, 0), ("const", 1, 0)]
    last = (16, "update", 0) if written else (16, "allocation", 0)
    slots = [(0, "input", 0), (8, "input", 1), last, (24, "int64", 0)]
    launch = native.Launch("host", kernels["batched_add"], "add", 7, 6, 9, 8, 9, 32, slots, batch_capacity=3)
    result = ("input", 0) if written else ("allocation", 0)
    updates = [(0, True)] if written else []
    return native.Plan(6, program, [], [("float32", [0], [9])], [launch], [result], updates=updates)


def pairs():
    return [(torch.randn(n), torch.randn(n)) for n in SIZES]


def flat(given):
    return [x for pair in given for x in pair]


def launches(native, f, given):
    """What `f` gives, and by how many launches."""
    before = native.stats()["launches"]
    found = f(*flat(given))
    return found, native.stats()["launches"] - before


@pytest.mark.parametrize("negated", [False, True])
def test_the_calls_of_a_batch_are_one_launch(native, kernels, negated):
    """Where the operands are intermediate results, their memory is free once all are launched, not before."""
    native.set_planner(lambda group, args, varies: add_plan(native, kernels, args))
    f = batch_of_groups(ADD, negated)
    counts = []
    for _ in range(3):
        given = pairs()
        found, count = launches(native, f, given)
        for (a, b), c in zip(given, found):
            assert torch.equal(c, b - a if negated else a + b)
        counts.append(count)
    assert counts == [len(SIZES), 2, 2]
    assert native.stats()["fallbacks"] == {}


def test_a_call_with_new_sizes_is_launched_by_itself_between_the_others(native, kernels):
    native.set_planner(lambda group, args, varies: add_plan(native, kernels, args))
    f = batch_of_groups(ADD)
    f(*flat(pairs()))
    given = pairs()
    given[2] = (torch.randn(8), torch.randn(8))
    found, count = launches(native, f, given)
    assert all(torch.equal(c, a + b) for (a, b), c in zip(given, found))
    assert count == 3  # the two before, it, the two after


def test_nothing_waits_where_another_op_comes_next(native, kernels):
    native.set_planner(lambda group, args, varies: add_plan(native, kernels, args))
    f = batch_of_groups(ADD, apart=2)
    for expected in (len(SIZES), 2):
        given = pairs()
        found, count = launches(native, f, given)
        for k, ((a, b), c) in enumerate(zip(given, found)):
            assert torch.equal(c, -(a + b) if k == 1 else a + b)
        assert count == expected


@pytest.mark.parametrize("overlaps", [None, "read later", "read before", "written twice"])
def test_what_is_written_keeps_its_order(native, kernels, overlaps):
    native.set_planner(lambda group, args, varies: add_plan(native, kernels, args, written=True))
    f = batch_of_groups(ADD_IN_PLACE)

    def given():
        torch.manual_seed(0)
        found = pairs()
        if overlaps == "read later":
            found[3] = (found[3][0], found[1][0][100:229])
        elif overlaps == "read before":
            found[1] = (found[1][0], found[4][0][:300])
        elif overlaps == "written twice":
            found[3] = (found[4][0][500:629], found[3][1])
        return found

    for expected in (len(SIZES), len(SIZES) if overlaps else 2):
        ours, plain = given(), given()
        found, count = launches(native, f, ours)
        for a, b in plain:
            a.add_(b)
        for (a, b), (c, d), result in zip(ours, plain, found):
            assert torch.equal(a, c) and torch.equal(b, d) and result.data_ptr() == a.data_ptr()
            assert a._version == 1 or overlaps
        assert count == expected


def test_what_waits_is_launched_where_a_later_call_raises(native, kernels):
    """A tensor of inference mode has no version to count."""
    native.set_planner(lambda group, args, varies: add_plan(native, kernels, args, written=True))
    f = batch_of_groups(ADD_IN_PLACE)
    f(*flat(pairs()))
    given = pairs()
    with torch.inference_mode():
        given[2] = (torch.randn(SIZES[2]), given[2][1])
    expected = [a + b for a, b in given]
    with pytest.raises(RuntimeError, match="inference tensor"):
        f(*flat(given))
    assert [torch.equal(a, c) for (a, _), c in zip(given, expected)] == [True] * 3 + [False] * 2


def test_each_of_two_batches_is_launched_when_it_ends(native, kernels):
    """The second batch reads what the first has made."""
    native.set_planner(lambda group, args, varies: add_plan(native, kernels, args))
    sub, graph = torch._C.parse_ir(ADD), torch._C.Graph()
    given = [graph.addInput().setType(torch._C.TensorType.get()) for _ in range(2)]
    for batch in range(2):
        made = []
        for _ in range(3):
            node = graph.create("prim::CudaFusionGroup", given, 1)
            node.g_("Subgraph", sub.copy())
            node.i_("batch", batch)
            made.append(graph.appendNode(node).output())
        given = made[:2]
    graph.registerOutput(made[2])
    f = torch._C._create_function_from_graph("f", graph)
    x, y = torch.randn(300), torch.randn(300)
    for _ in range(3):
        before = native.stats()["launches"]
        assert torch.equal(f(x, y), (x + y) + (x + y))
    assert native.stats()["launches"] - before == 2


def test_launches_that_fail_are_made_up_for(native):
    if torch.cuda.is_available():
        pytest.skip("needs a machine where a CUDA launch fails")
    reports = []
    native.set_reporter(lambda *report: reports.append(report))

    def plan(group, args, varies):
        """On no account with 2.0: such calls are interpreted, so that the first launch comes later."""
        program = [("const", 1, 0), ("const", 0, 0)]
        slots = [(0, "allocation", 0), (8, "float64", 1)]
        launch = native.Launch("cuda", 1, "some_kernel", 3, 3, 3, 4, 3, 16, slots, batch_capacity=3)
        limits = [(1, (-9, 9), (0.0, 1.0), True, True)]
        return native.Plan(
            3, program, [], [("float32", [0], [3])], [launch], [("allocation", 0)], limits=limits
        )

    native.set_planner(plan)
    f = batch_of_groups(SCALED)
    tensors = [torch.randn(n) for n in SIZES]
    for factor in (2.0, 2.0, 0.5, 0.25):
        found = f(*(x for t in tensors for x in (t, factor)))
        assert all(torch.equal(c, t * factor) for t, c in zip(tensors, found))
        assert native.stats()["launches"] == 0
        assert len(reports) == (factor < 1)
