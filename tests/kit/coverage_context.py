"""A plugin of pytest for scripts/coverage: notes the file of the test that runs a line.

In: tests, in a process that measures coverage. Out: coverage's contexts, as `tests/e2e/test_explain.py`; what
runs before the first test, as imports, has none. Example: `pytest -p kit.coverage_context tests/pure`.
"""

import coverage
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    measured = coverage.Coverage.current()
    if measured is not None:
        measured.switch_context(item.location[0])
    yield
