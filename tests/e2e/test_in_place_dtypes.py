"""In-place ops that became functional, called with other dtypes than those that were profiled: the result has
the dtype that eager's has, or eager's error is raised."""

import pytest
import torch

import tsfuser
from kit.support import fuse, groups, script

VALUES = {
    "float": lambda device: torch.rand(4, 5, device=device),
    "double": lambda device: torch.rand(4, 5, device=device, dtype=torch.float64),
    "int": lambda device: torch.randint(1, 5, (4, 5), device=device),
    "bool": lambda device: torch.rand(4, 5, device=device) > 0.5,
    "complex": lambda device: torch.randn(4, 5, device=device, dtype=torch.complex64),
}
#: by the dtype that is profiled; the ops that become functional once the dtypes are known
OPS = {
    "float": ["abs_()", "log_()", "sin_()", "erf_()", "reciprocal_()", "pow_(w)", "atan2_(w)", "floor_()"],
    "bool": ["lt_(1)", "eq_(w)", "logical_not_()", "logical_and_(w)"],
    "int": ["abs_()", "pow_(2)", "remainder_(w * 0 + 3)", "sign_()"],
    "complex": ["log_()", "reciprocal_()"],
}


def outcome(function, *inputs):
    """The results, or the last line of the error."""
    with torch.no_grad():
        try:
            return function(*inputs)
        except RuntimeError as error:
            return str(error).strip().splitlines()[-1].removeprefix("RuntimeError: ")


@pytest.mark.filterwarnings("ignore:a fusion group:tsfuser.TsfuserWarning")
@pytest.mark.parametrize("profiled, op", [(dtype, op) for dtype, ops in OPS.items() for op in ops])
def test_other_dtypes_give_what_eager_gives(device, profiled, op):
    source = f"def f(x, w):\n    y = torch.where(x == x, x, x)\n    y.{op}\n"
    source += "    return torch.where(y == y, y, y), y\n"
    x = VALUES[profiled](device)
    with torch.no_grad():
        scripted, plain = fuse(script(source), x, x), {}
    exec(source, {"torch": torch}, plain)
    assert groups(scripted)
    for a in VALUES.values():
        for b in VALUES.values() if "(w)" in op else [VALUES["float"]]:
            given = a(device), b(device)
            for _ in range(2):
                theirs = outcome(plain["f"], *given)
                with tsfuser.fuser():  # torch's own fuser for CUDA takes no bools
                    ours = outcome(scripted, *given)
                if isinstance(theirs, str) or isinstance(ours, str):
                    # The functional op may find more to reject, and says that first.
                    assert ours == theirs or (isinstance(theirs, str) and "not implemented for" in ours)
                    continue
                for r, e in zip(ours, theirs):
                    assert r.dtype == e.dtype
                    torch.testing.assert_close(r, e, equal_nan=True)
