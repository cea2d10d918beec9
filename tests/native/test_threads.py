"""Several threads in one group, and the process's life: import twice, fork, exit while threads run."""

import subprocess
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kit import prefork
from kit.native_support import ADD, add_plan, group_function

TESTS = Path(__file__).resolve().parents[1]


def test_threads_that_miss_at_once_build_one_plan(native, kernels):
    made = []

    def planner(group, args, varies):
        made.append(threading.get_ident())
        time.sleep(0.05)  # lets go of the GIL, so that the others come and wait
        return add_plan(native, kernels)

    native.set_planner(planner)
    f, a, barrier = group_function(ADD, 2), torch.randn(100), threading.Barrier(8)

    def work(_):
        barrier.wait()
        return torch.equal(f(a, a), a + a)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    stats = native.stats()
    assert len(made) == stats["plans_built"] == 1
    assert stats["exact_hits"] + stats["class_hits"] == 7 and stats["launches"] == 8


def test_threads_with_mixed_shapes_and_resets(native, kernels):
    native.set_planner(lambda group, args, varies: add_plan(native, kernels))
    f, stop = group_function(ADD, 2), threading.Event()

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(500):
            n = int(torch.randint(1, 400, (), generator=generator))
            a = torch.full((n,), float(seed))
            if not torch.equal(f(a, a), a + a):
                return False
        return True

    def disturb():
        while not stop.wait(0.002):
            native.reset()

    resetter = threading.Thread(target=disturb)
    resetter.start()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    stop.set()
    resetter.join()
    assert native.stats()["fallbacks"] == {}


def test_reset_reaches_the_tables_of_other_threads(native, kernels):
    native.set_planner(lambda group, args, varies: add_plan(native, kernels))
    f, a = group_function(ADD, 2), torch.randn(20)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(f, a, a).result()
        native.reset()
        pool.submit(f, a, a).result()
    assert native.stats()["plans_built"] == 1 and native.stats()["exact_hits"] == 0


def test_two_groups_plan_at_once_without_deadlock(native, kernels):
    def planner(group, args, varies):
        time.sleep(0.01)
        return add_plan(native, kernels)

    native.set_planner(planner)
    graph = torch._C.parse_ir(ADD)
    functions = [group_function(ADD, 2, cache_id=native.group_id(graph, f"{ADD}\n# {k}")) for k in range(4)]
    a = torch.randn(10)
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda i: functions[i % 4](a, a), range(64)))
    assert all(torch.equal(r, a + a) for r in results)
    assert native.stats()["plans_built"] == 4


def run(code: str, timeout=120) -> subprocess.CompletedProcess:
    """A fresh process with `native`, `f` (a group with a planner) and `a` at hand."""
    start = f"""
        import atexit, os, sys, tempfile, threading, time
        late = []  # called after the extension is told of the exit: callbacks run last in, first out
        atexit.register(lambda: [fn() for fn in late])
        sys.path[:0] = [{str(TESTS)!r}]
        import torch
        from kit import native_support as s
        native = s.extension()
        kernels = s.compile_kernels(tempfile.mkdtemp())
        native.set_planner(lambda group, args, varies: s.add_plan(native, kernels))
        f, a = s.group_function(s.ADD, 2), torch.randn(50)
    """
    program = textwrap.dedent(start) + textwrap.dedent(code)
    return prefork.run(["-c", program], timeout=timeout, whole_end=True)


def check(result):
    assert result.returncode == 0, result.stderr[-2000:]
    assert "rror" not in result.stderr, result.stderr[-2000:]
    return result.stdout


def test_exit_waits_for_a_plan_that_is_being_made():
    # What the thread does afterwards is not judged: torch ends badly if threads run ops at exit.
    result = run("""
        def planner(group, args, varies):
            time.sleep(1)
            print("planned", flush=True)
            return s.add_plan(native, kernels)
        native.set_planner(planner)
        threading.Thread(target=lambda: f(a, a), daemon=True).start()
        time.sleep(0.3)
    """)
    assert result.stdout == "planned\n"


def test_calls_after_exit_began_run_unfused():
    out = check(
        run("""
        late.append(lambda: print(torch.equal(f(a, a), a + a), native.stats()["fallbacks"], flush=True))
    """)
    )
    assert out == "True {'the Python interpreter is shutting down': 1}\n"


def test_exit_with_plans_that_hold_python_objects():
    check(
        run("""
        native.set_planner(lambda *_: s.add_plan(native, kernels, keepalive=[kernels, native]))
        native.set_reporter(print)
        native.set_pass(lambda graph: None)
        late.append(lambda: f(a, a))
        f(a, a)
        native.reset()
        f(a, a)
    """)
    )


def test_import_twice_and_in_a_thread():
    out = check(
        run("""
        import importlib.util
        before = len(torch._C._jit_get_all_schemas())
        def again():
            spec = importlib.util.spec_from_file_location("tsfuser._C", native.__file__)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.stats()
        for _ in range(2):
            thread = threading.Thread(target=again)
            thread.start()
            thread.join()
        print(len(torch._C._jit_get_all_schemas()) - before, torch.equal(f(a, a), a + a))
    """)
    )
    assert out.split() == ["0", "True"]


def test_fork_while_another_thread_plans():
    out = check(
        run("""
        torch.set_num_threads(1)
        begun = threading.Event()
        def planner(group, args, varies):
            begun.set()
            time.sleep(0.5)
            return s.add_plan(native, kernels)
        native.set_planner(planner)
        thread = threading.Thread(target=lambda: f(a, a))
        thread.start()
        # before that the thread may hold locks of torch's executor, which the child never gets
        begun.wait(60)
        child = os.fork()
        if child == 0:
            right = torch.equal(f(a, a), a + a)
            print("child", right, flush=True)
            os._exit(0 if right else 1)
        status = os.waitpid(child, 0)[1]
        thread.join()
        print("parent", torch.equal(f(a, a), a + a), status, flush=True)
    """)
    )
    assert out.split() == ["child", "True", "parent", "True", "0"]
