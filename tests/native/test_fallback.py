"""What does not run fused: right results all the same, reasons counted, failures reported once."""

import signal
import sys

import pytest
import torch

from kit.native_support import ADD, add_plan, group_function, refusing_plan


@pytest.fixture
def add(native, kernels):
    """The scripted a + b, with a planner that serves it."""
    native.set_planner(lambda group, args, varies: add_plan(native, kernels))
    return group_function(ADD, 2)


@pytest.fixture
def reports(native):
    seen = []
    native.set_reporter(lambda kind, group, reason: seen.append((kind, reason)))
    return seen


def subclass(t):
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(t, t.clone())


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda t: t.to_sparse(), "not strided"),
        (lambda t: t.to("meta"), "meta"),
        (subclass, "subclass"),
        (lambda t: t.clone().requires_grad_(), "gradient"),
        (lambda t: torch._efficientzerotensor(t.shape), "cannot read"),
    ],
)
def test_tensors_that_kernels_cannot_read_run_unfused(native, add, reports, make, words):
    t = torch.randn(4)
    x = make(t)
    for _ in range(2):
        result = add(x, x)
    expected = x + x
    assert (
        type(result) is type(expected)
        and result.device == expected.device
        and result.layout == expected.layout
    )
    if not result.is_meta:
        dense = result.to_dense() if result.is_sparse else result
        assert torch.equal(dense.detach(), (expected.to_dense() if expected.is_sparse else expected).detach())
    assert [(kind, words in reason) for kind, reason in reports] == [("input", True)]
    assert list(native.stats()["fallbacks"].values()) == [2]


def test_gradient_flows_through_the_fallback(add):
    x = torch.randn(4, requires_grad=True)
    add(x, x).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 2.0))
    with torch.no_grad():
        assert not add(x, x).requires_grad


@pytest.mark.parametrize("dtype", [torch.bits8, torch.bits16])
def test_unknown_dtype_runs_unfused(native, dtype):
    f = group_function(
        "graph(%a : Tensor):\n  %n : NoneType = prim::Constant()\n  %r : Tensor = aten::clone(%a, %n)\n"
        "  return (%r)",
        1,
    )
    whole = torch.uint8 if dtype == torch.bits8 else torch.uint16
    x = torch.tensor([0, 1, 2, 3], dtype=whole)
    assert torch.equal(f(x.view(dtype)).view(whole), x)
    assert "dtype" in next(iter(native.stats()["fallbacks"]))


def test_undefined_tensor_and_tensor_list_run_unfused(native):
    graph = "graph(%a : Tensor, %l : Tensor[]):\n  %r : Tensor = aten::cat(%l, %d)\n  return (%r)".replace(
        "%r :", "%d : int = prim::Constant[value=0]()\n  %r :"
    )
    a = torch.randn(2)
    assert torch.equal(group_function(graph, 2)(a, [a, a]), torch.cat([a, a]))
    assert native.stats()["fallbacks"] == {"an argument is a list of tensors": 1}


def test_modes_and_transforms_see_the_ops(native, add):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    a = torch.randn(3, 4)
    with Watch():
        add(a[0], a[0])
    assert torch.ops.aten.add.Tensor in seen
    assert torch.equal(torch.vmap(add)(a, a), a + a)
    assert native.stats()["launches"] == 0


def test_refusal_is_remembered_and_counted(native, reports):
    asked = []
    native.set_planner(lambda group, args, varies: asked.append(1) or refusing_plan(native, 6, "too hard"))
    f, a = group_function(ADD, 2), torch.randn(3)
    for _ in range(3):
        assert torch.equal(f(a, a), a + a)
    assert (
        len(asked) == 1
        and native.stats()["fallbacks"] == {"too hard": 3}
        and reports == [("refusal", "too hard")]
    )


class Refusal(Exception):
    pass


@pytest.mark.parametrize(
    "error, reason",
    [
        (ValueError("no way"), "the planner failed: ValueError: no way"),
        (Refusal("A sentence."), "A sentence."),
        (AssertionError(), "the planner failed: AssertionError"),
    ],
)
def test_planner_that_raises_is_asked_once_for_the_structure(native, reports, error, reason):
    asked = []

    def planner(group, args, varies):
        asked.append(1)
        raise error

    native.set_planner(planner)
    f = group_function(ADD, 2)
    for n in (3, 4, 5):
        a = torch.randn(n)
        assert torch.equal(f(a, a), a + a)
    assert len(asked) == 1 and reports == [("planner", reason)] and native.stats()["fallbacks"] == {reason: 3}


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda n: 3, "something else"),
        (lambda n: n.Plan(6, [], [(0, 0, -1)], [], [], []), "checks do not hold"),
        (lambda n: n.Plan(5, [], [], [], [], []), "checks do not hold"),
        (lambda n: n.Plan(6, [], [], [], [], [("input", 2)]), "not among the group's inputs"),
        (
            lambda n: n.Plan(
                6, [], [], [], [n.Launch("host", 1, "k", 0, 0, 0, 0, 0, 8, [(0, "float32", 1)])], []
            ),
            "as a number",
        ),
        (
            lambda n: n.Plan(
                6, [], [], [], [n.Launch("host", 1, "k", 0, 0, 0, 0, 0, 8, [(0, "element", 1)])], []
            ),
            "0-dim",
        ),
        (
            lambda n: n.Plan(
                6, [], [], [], [n.Launch("cuda", 1, "k", 0, 0, 0, 0, 0, 8, [(0, "input", 1)])], []
            ),
            "its device",
        ),
    ],
)
def test_wrong_plan_runs_unfused(native, reports, make, words):
    native.set_planner(lambda group, args, varies: make(native))
    f, a = group_function(ADD, 2), torch.randn(3)
    for _ in range(2):
        assert torch.equal(f(a, a), a + a)
    assert len(reports) == 1 and words in reports[0][1]


def test_a_planner_that_is_not_done_is_asked_again(native, reports):
    """Even where to run unfused is an error."""
    asked = []

    def planner(group, args, varies):
        asked.append(group)
        return None

    native.set_planner(planner)
    native.set_fallback_enabled(False)
    try:
        f, a = group_function(ADD, 2), torch.randn(3)
        for _ in range(3):
            assert torch.equal(f(a, a), a + a)
    finally:
        native.set_fallback_enabled(True)
    assert len(asked) == 3 and reports == []
    assert native.stats()["fallbacks"] == {"its kernels are being compiled in the background": 3}


def test_failed_launch_is_remembered_and_reported_once(native, reports):
    if torch.cuda.is_available():
        pytest.skip("needs a machine where a CUDA launch fails")
    launch = native.Launch("cuda", 1, "some_kernel", 0, 0, 0, 0, 0, 8, [(0, "allocation", 0)])
    groups = []
    native.set_planner(
        lambda group, args, varies: (
            groups.append(group)
            or native.Plan(6, [], [], [("float32", [0], [1])], [launch], [("allocation", 0)])
        )
    )
    f, a = group_function(ADD, 2), torch.randn(3)
    for _ in range(3):
        assert torch.equal(f(a, a), a + a)
    assert len(reports) == 1 and reports[0][0] == "launch"
    assert list(native.stats()["fallbacks"].items()) == [(reports[0][1], 3)]
    assert native.group_plans(groups.pop()) == [(reports[0][1], None)] and not groups


def test_out_of_memory_runs_unfused_and_the_plan_lives_on(native, kernels, reports):
    # values 6 to 11: 10, a size no machine has, n > 10, that size or 0, that size or n, 1
    program = [
        ("const", 10, 0),
        ("const", 1 << 58, 0),
        ("lt", 6, 0),
        ("mul", 7, 8),
        ("max", 9, 0),
        ("const", 1, 0),
    ]
    native.set_planner(
        lambda group, args, varies: native.Plan(
            6, program, [], [("float32", [10], [11])], [], [("allocation", 0)]
        )
    )
    f, large, small = group_function(ADD, 2), torch.randn(11), torch.randn(3)
    for _ in range(2):
        assert torch.equal(f(large, large), large + large)
    assert f(small, small).shape == (3,)
    assert [kind for kind, _ in reports] == ["memory"]
    assert native.stats()["fallbacks"] == {"not enough memory for the outputs of a fused group": 2}
    assert native.stats()["plans_built"] == 1


@pytest.mark.parametrize("planner", [lambda n: refusing_plan(n, 6, "no such luck"), lambda n: 1 / 0])
def test_with_fallback_disabled_the_reason_and_the_group_reach_the_caller(native, planner):
    native.set_planner(lambda group, args, varies: planner(native))
    native.set_fallback_enabled(False)
    f, a = group_function(ADD, 2), torch.randn(3)
    with pytest.raises(RuntimeError, match="(?s)(no such luck|ZeroDivisionError).*aten::add"):
        f(a, a)
    native.set_fallback_enabled(True)
    assert torch.equal(f(a, a), a + a)


def test_interrupted_planning_is_tried_again(native, kernels):
    def planner(group, args, varies):
        native.set_planner(lambda group, args, varies: add_plan(native, kernels))
        raise KeyboardInterrupt

    native.set_planner(planner)
    f, a = group_function(ADD, 2), torch.randn(3)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            f(a, a)
            for _ in range(1000):
                pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert torch.equal(f(a, a), a + a)
    assert native.stats()["plans_built"] == 1


def test_no_planner_no_fusion(native):
    f, a = group_function(ADD, 2), torch.randn(3)
    assert torch.equal(f(a, a), a + a)
    assert native.stats()["fallbacks"] == {"no planner is set": 1}


def test_reporter_that_raises_harms_nothing(native, monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: unraisable.append(event.exc_type))

    def reporter(kind, group, reason):
        raise RuntimeWarning("as with python -W error")

    native.set_reporter(reporter)
    a = torch.randn(3).to_sparse()
    assert torch.equal(group_function(ADD, 2)(a, a).to_dense(), 2 * a.to_dense())
    assert unraisable == [RuntimeWarning]


def test_scripted_function_called_by_the_planner_does_not_deadlock(native, kernels):
    f, g, a = group_function(ADD, 2), group_function(ADD.replace("value=1", "value=2"), 2), torch.randn(3)

    def planner(group, args, varies):
        assert torch.equal(f(a, a), a + a) and torch.equal(g(a, a), 3 * a)
        return add_plan(native, kernels)

    native.set_planner(planner)
    assert torch.equal(f(a, a), a + a)
    assert native.stats()["plans_built"] == 1
