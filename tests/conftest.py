"""Fixtures and options of all tests; helpers are in kit/.

`device` runs a test once a target: "cpu", "cpu-fibers" (the CUDA launch shape on the host, a fiber a thread)
and, where there is one, "cuda". `--long` turns the sweeps marked `long` on, runs all cases of
the tests marked `each_value`, and raises the number of random programs and of samples of ops.
"""

import contextlib
import gc
import importlib.util
import os
import sys
import tempfile
import warnings
from pathlib import Path

import pytest

from kit import autodiff_only, cases, other_fusers, torch_ops
from kit.launches import FIBERS

# Else each worker compiles all modules of tests, and each process that they start all of tsfuser.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A thread of OpenMP that waits for work leaves its core to others: by default it spins, and half of the CPU's
# time goes there. Two are enough to find what threads do wrong. Read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("TSFUSER_PROGRESS", "0")  # what tests look for on stderr does not depend on the machine
# What tracing and planning do is tested, in each run.
os.environ.setdefault("TSFUSER_STORED_PLANS", "0")
os.environ.setdefault("TSFUSER_STORED_GRAPHS", "0")
os.environ.setdefault(
    "TSFUSER_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"tsfuser-tests-{os.getuid()}")
)
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run the long sweeps, and more random programs")
    parser.addoption("--packages", action="store_true", help="run models of other packages (tests/packages)")
    parser.addoption("--targets", help="run tests with a device on these targets only, e.g. cpu,cuda")
    parser.addoption(
        "--joint",
        action="store_true",
        help="scripted training and torch.compile by typed joint graphs; left out is kit/autodiff_only.py",
    )
    parser.addoption(
        "--each", type=int, help="run so many cases of each test, spread over them, where tools slow a run"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "long: a sweep that runs with --long only")
    config.addinivalue_line(
        "markers",
        "each_value(*pairs): of the combinations of its parameters run as few as have each value of each "
        "parameter, and of each of the pairs of parameters, on each target; with --long all. Without this "
        "mark it is so on cpu-fibers, where cpu has more, and elsewhere each value is run with two values of "
        "each other parameter",
    )
    config.addinivalue_line(
        "markers", "graphs: about graphs more than kernels; on cpu-fibers with --long or --targets only"
    )
    config.addinivalue_line(
        "markers",
        "optimized: a module about what g++ makes of kernels at -O3; others have -O0 without --long",
    )
    config.addinivalue_line("markers", "passes_fail: a test that has passes of tsfuser fail")
    config.addinivalue_line("markers", "quick: a test of an `optimized` module that has -O0, as others have")
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.*is deprecated:DeprecationWarning")
    config.pluginmanager.register(_Failures(config))
    if "hypothesis" in sys.modules or _has_hypothesis():
        from hypothesis import HealthCheck, settings

        common = dict(deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
        settings.register_profile("quick", max_examples=100, derandomize=True, **common)
        settings.register_profile("long", max_examples=2000, **common)
        settings.load_profile("long" if config.getoption("--long") else "quick")


def pytest_ignore_collect(collection_path, config):
    """Tests of other packages are not even imported without --packages."""
    folder = Path(__file__).parent / "packages"
    return True if collection_path == folder and not config.getoption("--packages") else None


class _Failures:
    """Names what failed at once: a run that is cut off prints no summary."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.write_line(f"\nFAILED {report.nodeid} ({report.when})")


def _has_hypothesis():
    return importlib.util.find_spec("hypothesis") is not None


def pytest_collection_modifyitems(config, items):
    if config.getoption("--joint"):
        _deselect({item for item in items if autodiff_only.reason_of(item)}, config, items)
    if config.getoption("--each"):
        _deselect_all_but(config.getoption("--each"), config, items)
    if not config.getoption("--long"):
        _deselect(cases.of_long_runs(items), config, items)


def _deselect_all_but(count, config, items):
    """Leaves `count` of each test's cases."""
    tests = {}
    for item in items:
        tests.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    taken = {found[k * len(found) // count] for found in tests.values() for k in range(count)}
    _deselect({item for item in items if item not in taken}, config, items)


def _deselect(left, config, items):
    """Takes the set `left` out of `items`."""
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The garbage collector waits until all is collected, of which it took two fifths. From then on it leaves
    out what is imported, and comes less often: it took an eighth of the time of tests of torch.compile."""
    gc.disable()
    try:
        return (yield)
    finally:
        torch_ops.keep_ops()
        gc.freeze()
        gc.set_threshold(100000, 20, 20)
        gc.enable()


def pytest_make_parametrize_id(val):
    """Names of ops without "::". One process gets all cases of a module, whose name would end there."""
    return val.replace("::", ".") if isinstance(val, str) and "::" in val else None


def targets():
    """The targets of this machine. pure tests import no torch, so it is imported here only when asked."""
    import torch

    return ["cpu", "cpu-fibers"] + (["cuda"] if torch.cuda.is_available() else [])


def pytest_generate_tests(metafunc):
    own = any("target" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "target" in metafunc.fixturenames and not own:
        asked = metafunc.config.getoption("--targets")
        chosen = [name for name in targets() if not asked or name in asked.split(",")]
        short = not asked and not metafunc.config.getoption("--long")
        if short and any(metafunc.definition.iter_markers("graphs")):
            chosen.remove("cpu-fibers")
        metafunc.parametrize("target", chosen, scope="module")


@pytest.fixture
def joint_graphs():
    """Training by joint graphs in one test."""
    with _joint_graphs():
        yield


@contextlib.contextmanager
def _joint_graphs():
    from tsfuser import _C, options

    before = _C.use_joint_functions(True)
    try:
        with options.override(enable={**options.get("enable"), "joint_graph": "", "typed_joint": ""}):
            yield
    finally:
        _C.use_joint_functions(before)


@pytest.fixture(scope="module", autouse=True)
def joint_graphs_throughout(request):
    """Training by joint graphs in all tests, with --joint."""
    if not request.config.getoption("--joint") or request.path.parent.name == "pure":
        yield
        return
    with _joint_graphs():
        yield


@pytest.fixture(scope="module", autouse=True)
def optimization(request):
    """How much g++ optimises kernels for the CPU: as users get them, or in less time."""
    if request.path.parent.name not in ("e2e", "frontends", "gpu", "packages"):  # others start no pipeline
        yield
        return
    from kit import quick, torch_records

    torch_records.leave_out()
    users = request.config.getoption("--long") or request.node.get_closest_marker("optimized")
    with quick.level(quick.USERS if users else quick.QUICK):
        yield


@pytest.fixture(autouse=True)
def quick_among_optimized(request, optimization):
    if request.node.get_closest_marker("quick") is None or request.config.getoption("--long"):
        yield
        return
    from kit import quick

    with quick.level(quick.QUICK):
        yield


@pytest.fixture
def forgotten():
    """For tests of torch.compile: graphs, plans and counters of other tests are forgotten."""
    import torch

    import tsfuser
    from kit import torch_records

    torch._dynamo.reset()
    torch_records.leave_out()
    torch._dynamo.utils.counters.clear()
    tsfuser.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def store(tmp_path):
    """An empty disk cache in which graphs and plans are kept."""
    from tsfuser import options
    from tsfuser.planning import compile

    compile._target.cache_clear()  # they hold the cache
    with options.override(stored_graphs=True, stored_plans=True, cache_dir=tmp_path / "cache"):
        yield tmp_path / "cache"
    compile._target.cache_clear()


@pytest.fixture(autouse=True)
def no_pass_fails(request):
    """A pass that gives up is a mistake, which would hide as "unfused"; but for the tests marked
    `passes_fail`, which have one fail."""
    before = _failures()
    yield
    if request.node.get_closest_marker("passes_fail") is None:
        assert _failures() == before, f"a pass of tsfuser failed: {dict(_failed())}"


def _failures():
    """How many passes of this process have failed; pure tests import no torch."""
    module = sys.modules.get("tsfuser.planning.failures")
    return module.total if module else 0


def _failed():
    return sys.modules["tsfuser.planning.failures"].snapshot()["passes_failed"]


@pytest.fixture(autouse=True)
def no_switch_stays():
    """A switch of torch's other fusers that a test leaves changes what later tests of its process see."""
    before = other_fusers.switches()
    yield
    assert not other_fusers.set_back(before)


@pytest.fixture(autouse=True)
def unwarned_of_late_switch():
    """Tests compare what is fused with what ran unfused before: nobody is told of that."""
    module = sys.modules.get("tsfuser.debug.unfused_functions")  # pure tests import no torch
    with module.unwarned() if module else contextlib.nullcontext():
        yield


@pytest.fixture
def fused_or_error():
    """What runs unfused is an error."""
    import tsfuser

    with warnings.catch_warnings():
        warnings.simplefilter("error", tsfuser.TsfuserWarning)
        yield


@pytest.fixture(scope="session")
def nvrtc():
    """A CudaTarget that compiles without a GPU; None where there is no NVRTC."""
    from tsfuser.errors import Refusal
    from tsfuser.target.cuda import CudaTarget, supported_archs
    from tsfuser.target.disk_cache import DiskCache

    try:
        supported_archs()
    except Refusal:
        return None
    return CudaTarget(DiskCache(tempfile.mkdtemp(prefix="tsfuser-nvrtc-")))


def _without_tf32():
    """With TF32 a convolution's error is that of the algorithm that cuDNN takes for a layout. A context, as
    torch.testing, once imported, forbids to set the flag."""
    import torch

    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


@pytest.fixture
def device(target, monkeypatch, request):
    """A device string for `torch.rand(..., device=device)`; the mode of the host target is set while the
    test runs. The kernels of "cpu-fibers" are those that a GPU would get, so NVRTC compiles them, too."""
    import tsfuser
    from kit import nvrtc
    from tsfuser import options
    from tsfuser.target.host import HostTarget

    if target == "cuda":
        with _without_tf32():
            yield target
        return
    if target != "cpu-fibers":
        yield target
        return
    for_host, for_gpu = HostTarget.find, nvrtc.compiler()

    def for_both(self, source, name, *rest):
        if for_gpu is not None:
            nvrtc.check(for_gpu, source, name, every=request.config.getoption("--long"))
        return for_host(self, source, name, *rest)

    monkeypatch.setattr(HostTarget, "find", for_both)
    tsfuser.reset()  # plans of the other mode
    with options.override(host_launch=FIBERS):
        yield "cpu"
    tsfuser.reset()


@pytest.fixture
def place(target):
    """The device of a target. Unlike `device` it has NVRTC compile nothing, for tests of many kernels."""
    import tsfuser
    from tsfuser import options

    tsfuser.reset()
    exact = _without_tf32() if target == "cuda" else contextlib.nullcontext()
    with exact, options.override(host_launch=FIBERS if target == "cpu-fibers" else "block"):
        yield "cuda" if target == "cuda" else "cpu"
    tsfuser.reset()


@pytest.fixture
def few(target, request):
    """Whether a test of many kernels leaves most of them to the other targets and to --long: g++ and NVRTC
    compile each that fibers run, and a fiber does the work of a thread."""
    return target == "cpu-fibers" and not request.config.getoption("--long")


@pytest.fixture
def kept_branches():
    """Scripted functions keep the branches that follow from sizes and attributes."""
    from tsfuser import _C

    previous = _C.settle_branches(False)
    yield
    _C.settle_branches(previous)


@pytest.fixture
def single_nodes():
    """A group of one op is a group, too."""
    import torch

    previous = torch._C._jit_set_nvfuser_single_node_mode(True)
    yield
    torch._C._jit_set_nvfuser_single_node_mode(previous)


@pytest.fixture
def as_on_a_gpu(target, monkeypatch):
    """Threads of `cpu-fibers` add up in the dtype of a GPU's, which eager's do on CUDA only."""
    from tsfuser.ops import reduction

    if target == "cpu-fibers":
        monkeypatch.setattr(reduction, "VARIANCES_IN_DOUBLE", ())
