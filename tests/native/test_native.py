"""`tsfuser._C` on its own: plans made by hand, kernels compiled from a few lines of C++."""

import ctypes
import random

import pytest
import torch

from kit.native_support import ADD, add_plan, group_function, refusing_plan
from tsfuser.ir.size import OPERATIONS


def unfused(native):
    return native.stats()["fallbacks"]


# Programs


def test_size_operations_are_those_of_python(native):
    names = sorted(OPERATIONS)
    numbers = [0, 1, 2, 3, 5, 7, 8, 63, 64, 65, 1 << 20, (1 << 31) - 1, 1 << 31, 12345678901]
    plan = native.Plan(2, [(name, 0, 1) for name in names], [], [], [], [])
    for a in numbers:
        for b in numbers:
            if a * b < 1 << 63:
                assert plan.evaluate([a, b]) == [a, b, *(OPERATIONS[name](a, b) for name in names)], (a, b)


def test_division_floors_and_division_by_zero_is_zero(native):
    plan = native.Plan(2, [("div", 0, 1), ("mod", 0, 1), ("ceildiv", 0, 1)], [], [], [], [])
    assert plan.evaluate([-7, 2])[2:] == [-4, 1, -3]
    assert plan.evaluate([7, 0])[2:] == [0, 0, 0]


def test_long_program_equals_python(native):
    generator = random.Random(0)
    program, names = [], ["add", "sub", "min", "max", "ceildiv", "eq", "lt", "le"]
    for k in range(60):
        program.append((generator.choice(names), generator.randrange(4 + k), generator.randrange(4 + k)))
    values = [6, 4, 1, 128]
    for name, a, b in program:
        values.append(OPERATIONS[name](values[a], values[b]))
    assert native.Plan(4, program, [], [], [], []).evaluate(values[:4]) == values


def test_first_check_that_fails_ends_the_evaluation(native):
    plan = native.Plan(1, [("const", 4, 0), ("mod", 0, 1)], [(0, 0, 8), (2, 2, 0)], [], [], [])
    assert plan.evaluate([8]) == [8, 4, 0]
    assert plan.evaluate([12]) is None
    assert plan.evaluate([8, 8]) is None


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(instructions=[("add", 0, 1)]), "not computed yet"),
        (dict(instructions=[("sqrt", 0, 0)]), "sqrt"),
        (dict(checks=[(1, 0, 0)]), "not in order"),
        (dict(checks=[(0, 1, 0)]), "not computed yet"),
        (dict(allocations=[("float32", [0], [])]), "strides"),
        (dict(allocations=[("float32", [3], [0])]), "size"),
        (dict(allocations=[("float99", [0], [0])]), "float99"),
        (dict(results=[("allocation", 0)]), "result"),
        (dict(results=[("output", 0)]), "output"),
        (dict(random=-1), "random"),
    ],
)
def test_plan_that_points_outside_is_refused(native, change, words):
    fields = dict(leaf_count=1, instructions=[], checks=[], allocations=[], launches=[], results=[]) | change
    with pytest.raises(ValueError, match=words):
        native.Plan(**fields)


@pytest.mark.parametrize(
    "slot, words",
    [
        ((0, "int64", 9), "values"),
        ((28, "int64", 0), "bytes"),
        ((0, "allocation", 0), "allocations"),
        ((0, "int128", 0), "int128"),
        ((0, "random", 0), "plan has none"),
        ((4, "random", 0), "bytes"),
    ],
)
def test_kernel_argument_that_points_outside_is_refused(native, kernels, slot, words):
    with pytest.raises(ValueError, match=words):
        launch = native.Launch("host", kernels["copy"], "copy", 0, 0, 0, 0, 0, 32, [slot])
        native.Plan(1, [], [], [], [launch], [])


# Lookup


def test_exact_hit_class_hit_and_miss(native, kernels):
    calls = []

    def planner(group, args, varies):
        calls.append(args)
        return add_plan(native, kernels)

    native.set_planner(planner)
    f = group_function(ADD, 2)
    a, b = torch.randn(1000), torch.randn(77)
    assert torch.equal(f(a, a), a + a)
    assert calls == [(("tensor", "float32", "cpu", (1000,), (1,), calls[0][0][5]),) * 2]
    assert torch.equal(f(b, b), b + b)
    assert torch.equal(f(a, a), a + a)
    stats = native.stats()
    assert len(calls) == stats["plans_built"] == 1
    assert (stats["exact_hits"], stats["class_hits"], stats["launches"], stats["fallbacks"]) == (1, 1, 3, {})


def test_call_of_another_class_gets_another_plan(native, kernels):
    native.set_planner(
        lambda group, args, varies: (
            add_plan(native, kernels)
            if args[0][3] == args[1][3]
            else refusing_plan(native, 6, "sizes differ")
        )
    )
    f = group_function(ADD, 2)
    a, one = torch.randn(8), torch.randn(1)
    assert torch.equal(f(a, a), a + a)
    assert torch.equal(f(a, one), a + one)
    assert torch.equal(f(a, one), a + one)
    assert unfused(native) == {"sizes differ": 2}


def test_dtype_rank_and_string_are_part_of_the_structure(native):
    graph = """
graph(%a : Tensor, %s : str, %l : int[], %n : NoneType):
  return (%a)
"""
    seen = []

    def planner(group, args, varies):
        seen.append(args)
        return native.Plan(len(args[0][3]) * 2 + 1 + len(args[2][2]), [], [], [], [], [("input", 0)])

    native.set_planner(planner)
    f = group_function(graph, 4)
    a = torch.randn(3)
    for args in [
        (a, "x", [1], None),
        (a, "a longer string", [1], None),
        (a.double(), "x", [1], None),
        (a[None], "x", [1], None),
        (a, "x", [1, 2], None),
    ]:
        for _ in range(2):
            assert f(*args) is args[0] or torch.equal(f(*args), args[0])
    assert len(seen) == 5
    assert seen[1][1:] == (("other", "a longer string"), ("list", "int", (1,)), ("other", None))


def test_many_sizes_stay_right_when_the_exact_table_overflows(native, kernels):
    native.set_planner(lambda group, args, varies: add_plan(native, kernels))
    f = group_function(ADD, 2)
    for n in [*range(1, 700), *range(700, 0, -1)]:
        a = torch.full((n,), float(n))
        assert torch.equal(f(a, a), a + a)
    assert native.stats()["plans_built"] == 1


def test_groups_with_equal_arguments_keep_their_own_plans(native, kernels):
    graph = torch._C.parse_ir(ADD)
    first, second = (native.group_id(graph, text) for text in ("adds", "passes through"))
    through = native.Plan(6, [], [], [], [], [("input", 1)])
    native.set_planner(lambda group, args, varies: add_plan(native, kernels) if group == first else through)
    f, g, a = group_function(ADD, 2, cache_id=first), group_function(ADD, 2, cache_id=second), torch.randn(9)
    for _ in range(3):
        assert torch.equal(f(a, a), a + a) and torch.equal(g(a, a), a)
    assert native.stats()["exact_hits"] == 4


def test_number_of_plans_is_bounded(native):
    made = []

    def planner(group, args, varies):
        made.append(args)
        return native.Plan(6, [], [(0, 0, args[0][3][0])], [], [], [("input", 0)])

    native.set_planner(planner)
    f = group_function(ADD, 2)
    for n in range(1, 301):
        a = torch.zeros(n)
        assert torch.equal(f(a, a), a)
    assert len(made) == 256
    assert unfused(native) == {"more classes of calls than a group keeps plans for": 44}


def test_same_text_is_one_group_and_cache_id_names_it(native, kernels):
    graph = torch._C.parse_ir(ADD)
    first = native.group_id(graph, "some text")
    assert native.group_id(graph, "some text") == first != native.group_id(graph, "other text")
    assert native.group_text(first) == "some text"
    assert str(native.group_graph(first)) == str(graph)
    seen = []
    native.set_planner(lambda group, args, varies: seen.append(group) or add_plan(native, kernels))
    a = torch.randn(4)
    group_function(ADD, 2, cache_id=first)(a, a)
    assert seen == [first]
    with pytest.raises(IndexError):
        native.group_text(10**6)


def test_reset_drops_plans_and_counters(native, kernels):
    native.set_planner(lambda group, args, varies: add_plan(native, kernels))
    f, a = group_function(ADD, 2), torch.randn(5)
    f(a, a)
    native.reset()
    assert native.stats()["plans_built"] == 0
    assert torch.equal(f(a, a), a + a)
    assert native.stats()["plans_built"] == 1


def test_plan_keeps_its_object_until_it_is_dropped(native, kernels):
    import weakref

    class Module:
        pass

    module = Module()
    watch = weakref.ref(module)
    native.set_planner(
        lambda group, args, varies, box=[module]: add_plan(native, kernels, keepalive=box.pop())
    )
    f, a = group_function(ADD, 2), torch.randn(5)
    f(a, a)
    del module
    assert watch() is not None
    native.reset()
    native.stats()
    assert watch() is None


# Launch


def test_outputs_have_the_planned_dtype_sizes_and_strides(native):
    graph = "graph(%a : Tensor):\n  return (%a, %a, %a)"
    program = [("const", k, 0) for k in (2, 3, 0, 1)]  # values 3..6 behind the three leaves of one 1-d tensor
    allocations = [("float64", [3, 4], [6, 3]), ("bool", [3, 4], [5, 6]), ("complex64", [], [])]
    native.set_planner(
        lambda group, args, varies: native.Plan(
            3, program, [], allocations, [], [("allocation", k) for k in (0, 1, 2)]
        )
    )
    x, y, z = group_function(graph, 1)(torch.randn(4))
    assert (x.dtype, x.shape, x.stride()) == (torch.float64, (2, 3), (1, 2))
    assert (y.dtype, y.shape, y.stride(), y.untyped_storage().nbytes()) == (torch.bool, (2, 3), (0, 1), 3)
    assert (z.dtype, z.shape) == (torch.complex64, ())
    assert not x.requires_grad and x.is_leaf


def test_input_can_be_a_result(native):
    graph = "graph(%a : Tensor, %b : Tensor):\n  return (%b, %a)"
    native.set_planner(
        lambda group, args, varies: native.Plan(6, [], [], [], [], [("input", 1), ("input", 0)])
    )
    a, b = torch.randn(2), torch.randn(2)
    x, y = group_function(graph, 2)(a, b)
    assert x.data_ptr() == b.data_ptr() and y.data_ptr() == a.data_ptr()


def test_grid_of_zero_launches_nothing(native, kernels):
    native.set_planner(lambda group, args, varies: add_plan(native, kernels))
    a = torch.randn(0)
    assert group_function(ADD, 2)(a, a).shape == (0,)
    assert native.stats()["launches"] == 0


def test_kernel_gets_its_launch_parameters(native, kernels):
    program = [("const", k, 0) for k in (1, 32, 4, 100, 6)]
    launch = native.Launch(
        "host", kernels["parameters"], "parameters", 3, 4, 5, 6, 3, 8, [(0, "allocation", 0)]
    )
    native.set_planner(
        lambda group, args, varies: native.Plan(
            3, program, [], [("int64", [7], [3])], [launch], [("allocation", 0)]
        )
    )
    result = group_function("graph(%a : Tensor):\n  return (%a)", 1)(torch.randn(1))
    assert result.tolist() == [1, 32, 4, 100, 0, 1]


@pytest.mark.parametrize("cluster, runs", [(0, 1), (1, 16), (-1, 16)])
def test_blocks_of_clusters_stay_in_one_thread(native, kernels, cluster, runs):
    """Values: 3 is 16 blocks, 4 is 1; -1 means no clusters, and a cluster of 1 block needs no other."""
    program = [("const", 16, 0), ("const", 1, 0)]
    args = [(0, "allocation", 0)]
    of = -1 if cluster < 0 else 3 + cluster
    launch = native.Launch("host", kernels["threads"], "threads", 3, 4, 4, 4, 4, 8, args, of)
    native.set_planner(
        lambda group, args, varies: native.Plan(
            3, program, [], [("int64", [3], [4])], [launch], [("allocation", 0)]
        )
    )
    result = group_function("graph(%a : Tensor):\n  return (%a)", 1)(torch.randn(1))
    assert len(set(result.tolist())) <= runs and (cluster != 0 or len(set(result.tolist())) == 1)


def test_a_cluster_is_among_the_values(native, kernels):
    launch = native.Launch("host", kernels["threads"], "threads", 0, 0, 0, 0, 0, 8, [], 3)
    with pytest.raises(ValueError, match="a launch parameter is not among the values"):
        native.Plan(3, [], [], [], [launch], [])


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="torch runs one thread")
def test_blocks_are_spread_over_torchs_threads(native, kernels):
    program = [("const", 16, 0), ("const", 1, 0)]
    launch = native.Launch("host", kernels["threads"], "threads", 3, 4, 4, 4, 4, 8, [(0, "allocation", 0)])
    native.set_planner(
        lambda group, args, varies: native.Plan(
            3, program, [], [("int64", [3], [4])], [launch], [("allocation", 0)]
        )
    )
    result = group_function("graph(%a : Tensor):\n  return (%a)", 1)(torch.randn(1))
    assert len(set(result.tolist())) == torch.get_num_threads()


def slots_of(native, kernels, graph, inputs, leaves, *slots, random=0):
    """The bytes that a kernel gets for `slots`, called with `inputs`."""
    program = [("const", 64, 0), ("const", 1, 0), ("const", -5, 0)]
    args = [(0, "allocation", 0), *((8 + offset, kind, index) for offset, kind, index in slots)]
    one = leaves + 1
    launch = native.Launch("host", kernels["copy"], "copy", one, one, one, one, one, 72, args)
    allocation = ("uint8", [leaves], [one])
    native.set_planner(
        lambda group, args, varies: native.Plan(
            leaves, program, [], [allocation], [launch], [("allocation", 0)], random=random
        )
    )
    return group_function(graph, len(inputs))(*inputs)


@pytest.mark.each_value(("kind", "value"), ("dtype", "value"))
@pytest.mark.parametrize(
    "kind, dtype",
    [
        ("bool", torch.bool),
        ("int32_number", torch.int32),
        ("int64_number", torch.int64),
        ("float32", torch.float32),
        ("float64", torch.float64),
        ("complex64", torch.complex64),
        ("complex128", torch.complex128),
    ],
)
@pytest.mark.parametrize(
    "type, value", [("int", 3), ("int", -(2**40) - 1), ("float", 2.75), ("bool", True), ("bool", False)]
)
def test_number_arguments_are_converted(native, kernels, kind, dtype, type, value):
    if kind == "int32_number" and abs(value) >= 2**31:
        pytest.skip("does not fit")
    graph = f"graph(%a : Tensor, %s : {type}):\n  return (%a)"
    leaves = 3 + (type != "float")
    data = slots_of(native, kernels, graph, (torch.randn(1), value), leaves, (16, kind, 1))
    assert data[16 : 16 + dtype.itemsize].view(dtype).item() == torch.tensor(value).to(dtype).item()


def test_where_the_random_numbers_of_a_call_on_the_cpu_begin(native, kernels):
    """Each random op has the next 64 bits of torch's generator; kernels get the address of these keys."""
    graph, a = "graph(%a : Tensor):\n  return (%a)", torch.zeros(())
    torch.manual_seed(5)
    expected = [torch.empty((), dtype=torch.int64).random_(-(2**63), None).item() for _ in range(5)]
    torch.manual_seed(5)
    for count in (2, 3):
        data = slots_of(native, kernels, graph, (a,), 1, (0, "random", 0), random=count)
        address, *rest = data[:32].view(torch.int64).tolist()
        keys = (ctypes.c_int64 * count).from_address(address)
        assert list(keys) == expected[:count] and rest == [0, 0, 2]
        del expected[:count]
        native.reset()


def test_complex_number_element_and_integers_of_the_program(native, kernels):
    graph = "graph(%a : Tensor, %s : complex, %t : Tensor):\n  return (%a)"
    element = torch.tensor(7.5, dtype=torch.bfloat16)
    data = slots_of(
        native,
        kernels,
        graph,
        (torch.randn(1), 2 - 3j, element),
        4,
        (0, "complex128", 1),
        (16, "complex64", 1),
        (24, "element", 2),
        (28, "int32", 6),
        (32, "int64", 6),
    )
    assert data[:16].view(torch.complex128).item() == data[16:24].view(torch.complex64).item() == 2 - 3j
    assert data[24:26].view(torch.bfloat16).item() == 7.5
    assert data[28:32].view(torch.int32).item() == data[32:40].view(torch.int64).item() == -5


def test_runs_in_inference_mode_and_in_a_backward(native, kernels):
    native.set_planner(lambda group, args, varies: add_plan(native, kernels))
    f, a = group_function(ADD, 2), torch.randn(6)
    with torch.inference_mode():
        assert f(a, a).is_inference()

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return f(grad, grad)

    x = torch.randn(6, requires_grad=True)
    Double.apply(x).backward(a)
    assert torch.equal(x.grad, a + a)
    assert unfused(native) == {}


def test_profiler_shows_the_kernels_range(native, kernels):
    native.set_planner(lambda group, args, varies: add_plan(native, kernels))
    f, a = group_function(ADD, 2), torch.randn(6)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        f(a, a)
    assert "run_fused_kernel" in {event.key for event in profile.key_averages()}
