"""Ctrl-C while our Python runs: it is raised in the caller of the group, always, and breaks nothing. Each
caller of Python (planner, reporter, pass, observer) gets the signal at its worst moment."""

import os
import signal
import threading
import time

import pytest
import torch

from kit import other_fusers
from kit.native_support import ADD, add_plan, group_function, refusing_plan


class Interrupted(BaseException):
    """As in tsfuser.planning.interrupts."""

    cause = None


class Noisy:
    """Its `__del__` runs Python, where a KeyboardInterrupt that is due would be raised, and dropped."""

    def __del__(self):
        for _ in range(100):
            pass


@pytest.fixture(autouse=True)
def python_handler():
    """A job in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)
    return [Noisy() for _ in range(10)]


def raised_by(call):
    """What a call, or the next thing after it, raises."""
    try:
        call()
        for _ in range(1000):
            pass
    except BaseException as error:
        return error
    return None


def ask_and_stop(native):
    """A planner that sees the signal at once, and stops."""

    def planner(group, args, varies):
        noisy = ctrl_c()
        assert native.interrupted() and noisy
        raise Interrupted

    return planner


def test_a_planner_that_stops_leaves_the_interrupt_to_the_caller(native, kernels):
    f, a = group_function(ADD, 2), torch.randn(3)
    for fallback in (True, False):  # an interrupt is no failure
        native.reset()
        native.set_fallback_enabled(fallback)
        native.set_planner(ask_and_stop(native))
        results = []
        assert isinstance(raised_by(lambda: results.append(f(a, a))), KeyboardInterrupt)
        assert all(torch.equal(result, a + a) for result in results)
        assert native.stats()["fallbacks"] == {} and not native.interrupted()
        native.set_planner(lambda group, args, varies: add_plan(native, kernels))
        assert torch.equal(f(a, a), a + a) and native.stats()["plans_built"] == 1


def test_a_plan_that_is_ready_all_the_same_is_used(native, kernels):
    def planner(group, args, varies):
        noisy = ctrl_c()
        return noisy and add_plan(native, kernels)

    native.set_planner(planner)
    f, a = group_function(ADD, 2), torch.randn(3)
    assert isinstance(raised_by(lambda: f(a, a)), KeyboardInterrupt)
    assert torch.equal(f(a, a), a + a)
    assert native.stats()["plans_built"] == 1 and native.stats()["launches"] == 2


def test_an_interrupt_that_is_due_before_planning_is_kept_as_well(native, kernels):
    """It comes while C++ runs, here in a kernel: Python has noted it when the next planner is called."""
    asked = []

    def planner(group, args, varies):
        asked.append(native.interrupted())
        return add_plan(native, {"add": kernels["interrupt"]} if len(asked) == 1 else kernels)

    native.set_planner(planner)
    graph = torch._C.Graph()
    a, b = graph.addInput(), graph.addInput()
    for text in (ADD, ADD.replace("value=1", "value=2")):
        node = graph.create("prim::CudaFusionGroup", [a, b], 1)
        node.g_("Subgraph", torch._C.parse_ir(text))
        graph.appendNode(node)
        graph.registerOutput(node.output())
    graph.makeMultiOutputIntoTuple()
    f, x = torch._C._create_function_from_graph("f", graph), torch.randn(3)
    assert isinstance(raised_by(lambda: f(x, x)), KeyboardInterrupt)
    assert asked == [False, True] and native.stats()["plans_built"] == 2


def test_the_reporter_is_not_interrupted(native):
    said = []

    def reporter(kind, group, reason):
        said.append((kind, ctrl_c() and reason))

    native.set_reporter(reporter)
    native.set_planner(lambda group, args, varies: refusing_plan(native, 6, "no such luck"))
    f, a = group_function(ADD, 2), torch.randn(3)
    assert isinstance(raised_by(lambda: f(a, a)), KeyboardInterrupt)
    assert said == [("refusal", "no such luck")]


def test_a_graph_pass_is_not_interrupted(native):
    """Its graph would stay unfused for good."""
    passed = []

    def rewrite(graph):
        noisy = ctrl_c()
        passed.append(len(noisy))
        return graph

    with other_fusers.kept():
        torch._C._jit_set_texpr_fuser_enabled(False)
        native.set_pass(rewrite)
        native.set_enabled(True)

        def program(a, b):
            return torch.relu(a * b) + 1

        f, a = torch.jit.script(program), torch.randn(3)
        errors = [raised_by(lambda: f(a, a)) for _ in range(3)]
    assert passed == [10]
    assert [type(error) for error in errors if error] == [KeyboardInterrupt]


def test_the_observer_is_the_users_and_stops_at_once(native, kernels):
    seen = []

    def observer(*facts):
        seen.append(1)
        noisy = ctrl_c()
        seen.append(noisy)

    native.set_planner(lambda group, args, varies: add_plan(native, kernels))
    f, a = group_function(ADD, 2), torch.randn(3)
    native.set_observer(observer)
    try:
        assert isinstance(raised_by(lambda: f(a, a)), KeyboardInterrupt)
    finally:
        native.set_observer(None)
    assert seen == [1]


def test_the_programs_own_handler_is_called_once(native):
    calls = []
    signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    native.set_planner(ask_and_stop(native))
    f, a = group_function(ADD, 2), torch.randn(3)
    assert raised_by(lambda: f(a, a)) is None
    assert calls == [signal.SIGINT]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_who_ignores_the_signal_is_not_stopped_by_it(native, kernels):
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def planner(group, args, varies):
        ctrl_c()
        assert not native.interrupted()
        return add_plan(native, kernels)

    native.set_planner(planner)
    f, a = group_function(ADD, 2), torch.randn(3)
    assert torch.equal(f(a, a), a + a) and native.stats()["plans_built"] == 1
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_who_insists_is_heard_at_once(native):
    """A planner that does not stop is left on the third Ctrl-C."""
    reached = []

    def planner(group, args, varies):
        for number in range(10):
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(number)

    native.set_planner(planner)
    f, a = group_function(ADD, 2), torch.randn(3)
    assert isinstance(raised_by(lambda: f(a, a)), KeyboardInterrupt)
    assert reached[:2] == [0, 1] and len(reached) < 5


@pytest.mark.parametrize("error", [SystemExit(143), KeyboardInterrupt(), GeneratorExit()])
def test_what_no_code_should_keep_reaches_the_caller(native, error):
    """SystemExit of a handler for SIGTERM, say."""

    def planner(group, args, varies):
        noisy = [Noisy() for _ in range(10)]
        if noisy:
            raise error

    native.set_planner(planner)
    f, a = group_function(ADD, 2), torch.randn(3)
    assert raised_by(lambda: f(a, a)) is error


def test_a_planner_in_another_thread_stops_and_the_main_thread_raises(native):
    """A backward on a GPU plans in a thread of autograd while the main thread waits."""
    started, asked = threading.Event(), []

    def planner(group, args, varies):
        started.set()
        limit = time.monotonic() + 10
        while not native.interrupted() and time.monotonic() < limit:
            time.sleep(0.01)
        asked.append(native.interrupted())
        raise Interrupted

    native.set_planner(planner)
    f, a = group_function(ADD, 2), torch.randn(3)
    results = []
    thread = threading.Thread(target=lambda: results.append(f(a, a)))
    thread.start()
    started.wait()

    def wait():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)

    assert isinstance(raised_by(wait), KeyboardInterrupt)
    thread.join()
    assert asked == [True] and torch.equal(results[0], a + a)
