"""Fixtures: the extension alone, without a Python planner, and host kernels from the system compiler."""

import pytest

from kit import native_support as support


@pytest.fixture
def native():
    """The extension with empty caches, and with the callbacks that were set before put back afterwards."""
    native = support.extension()
    before = (
        native.set_planner(None),
        native.set_reporter(None),
        native.set_pass(None),
        native.set_differentiable(None),
    )
    enabled, guard_mode = native.enabled(), native.guard_mode()
    native.reset()
    yield native
    native.set_planner(before[0])
    native.set_reporter(before[1])
    native.set_pass(before[2])
    native.set_differentiable(before[3])
    native.set_enabled(enabled)
    native.set_guard_mode(guard_mode)
    native.set_fallback_enabled(True)
    native.reset()


@pytest.fixture(scope="session")
def kernels(tmp_path_factory):
    """name -> address of the host kernels in native_support.KERNELS."""
    return support.compile_kernels(tmp_path_factory.mktemp("kernels"))
