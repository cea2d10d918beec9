"""lightning-thunder's own tests of ops with tsfuser as the executor, as a plugin of pytest.

    export PYTHONPATH=.:tests TSFUSER_CACHE_DIR=build/cache
    python -m pytest -p kit.thunders_own --noconftest --pyargs thunder.tests.test_ops \\
        -k "tsfuser and float32"

Tests that thunder has for its torch executor get this one, and those for torch.compile's are left out. An op
alone is a region, too, or none of these tests would run fused. Says at the end how many tests had regions.
"""

import collections
import sys
import warnings

from kit import quick, thunders

_regions = collections.Counter()  # test -> how many regions were made in it
_running = []


def pytest_configure(config):
    thunders.load()
    from thunder import extend
    from thunder.tests import framework

    executor = sys.modules["tsfuser.frontends.thunder.executor"]  # the package has its instance by this name

    ours = extend.get_executor("tsfuser")
    executor._LEAST = 1
    make = ours.fuse

    def counted(region, number):
        _regions[_running[-1]] += 1
        return make(region, number)

    ours.fuse = counted
    kind = framework.TorchTestExecutor
    kind.name, kind.executors_list = "tsfuser", lambda self: [ours]
    framework.TorchCompileCatExecutor = framework.TorchCompileXentropyExecutor = framework.TorchExecutor
    warnings.simplefilter("ignore")
    config._quick = quick.level(quick.QUICK)
    config._quick.__enter__()


def pytest_unconfigure(config):
    config._quick.__exit__(None, None, None)


def pytest_runtest_setup(item):
    _running.append(item.name)


def pytest_terminal_summary(terminalreporter):
    passed = {report.nodeid.split("::")[-1] for report in terminalreporter.getreports("passed")}
    fused = passed & set(_regions)
    terminalreporter.write_line(
        f"{len(fused)} of {len(passed)} tests that passed had regions, {sum(_regions.values())} in all"
    )
