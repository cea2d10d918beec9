"""What a trial build of a row runs depends on nothing but the code and its arguments: outcomes are kept on
disk (planning/stored_trials.py)."""

import pytest
from test_layers import PACKAGE, imports_of, name_of

MODULES = {name_of(path) for path in PACKAGE.rglob("*.py")}
RUN_BY_TRIALS = sorted((*(PACKAGE / "ir").rglob("*.py"), *(PACKAGE / "ops").rglob("*.py")))


@pytest.mark.parametrize("path", RUN_BY_TRIALS, ids=lambda path: "/".join(name_of(path)))
def test_rows_read_no_options(path):
    own, others = imports_of(path, MODULES)
    assert not {name for name in own if name[0] not in ("ir", "ops", "errors")}
    assert not others & {"os", "sys", "platform", "time", "random", "torch"}
