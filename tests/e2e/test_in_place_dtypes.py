"""In-place ops that became functional, called with other dtypes than those that were profiled: the result has
the dtype that eager's has, or eager's error is raised."""

import pytest
import torch

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.support import fuse, groups, script

pytestmark = pytest.mark.graphs

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
    try:
        return function(*inputs)
    except RuntimeError as error:
        message = str(error).strip().splitlines()[-1].removeprefix("RuntimeError: ")
        return message.replace("long int", "Long")  # clamp_ has names of its own


def assert_alike(ours, theirs):
    if isinstance(theirs, str) or isinstance(ours, str):
        # The functional op may find more to reject, and says that first.
        assert ours == theirs or (isinstance(theirs, str) and "not implemented for" in ours)
        return
    for r, e in zip(ours, theirs):
        assert (r.dtype, r.requires_grad) == (e.dtype, e.requires_grad)
        torch.testing.assert_close(r, e, equal_nan=True)


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
                with torch.no_grad():
                    theirs = outcome(plain["f"], *given)
                    with tsfuser.fuser():  # torch's own fuser for CUDA takes no bools
                        ours = outcome(scripted, *given)
                assert_alike(ours, theirs)


#: by the dtype that is profiled; the ops that become functional before
EARLY = {
    "float": ["sqrt_()", "sigmoid_()", "add_(0.5)", "div_(2)", "clamp_(0.25, 2.5)", "add_(w)", "mul_(v)"],
    "int": ["add_(2)", "mul_(w)"],
}


@pytest.mark.filterwarnings("ignore:a fusion group:tsfuser.TsfuserWarning")
@pytest.mark.parametrize("first, later", [(False, False), (True, True), (False, True), (True, False)])
@pytest.mark.parametrize("profiled, op", [(dtype, op) for dtype, ops in EARLY.items() for op in ops])
def test_what_was_functional_before_profiling_gives_what_eager_gives(device, profiled, op, first, later):
    source = f"def f(x, w, v):\n    y = x * 2\n    y.{op}\n"
    source += "    return torch.tanh(y * v) * v, torch.neg(y * v)\n"
    scripted, plain = script(source), {}
    exec(source, {"torch": torch}, plain)

    def given(a, b, moves):
        return VALUES[a](device), VALUES[b](device), VALUES["float"](device).requires_grad_(moves)

    with tsfuser.fuser():
        for _ in range(4):
            scripted(*given(profiled, "float" if profiled == "float" else "int", first))
        for a in ("int", "bool", "complex", "double", "float"):
            for b in VALUES if "(w)" in op else ["float"]:
                for _ in range(3):
                    inputs = given(a, b, later)
                    assert_alike(outcome(scripted, *inputs), outcome(plain["f"], *inputs))


def history(function):
    """The names of the autograd nodes behind a result."""
    return [function.name()] + [name for f, _ in function.next_functions if f for name in history(f)]


@pytest.mark.parametrize("op", ["exp_()", "add_(w)", "log_()"])
def test_one_graph_is_differentiated_though_the_first_calls_had_no_gradients(device, op):
    if op == "log_()" and by_joint_graphs():
        pytest.skip("a region ends there, as no dtype is known")
    source = f"def f(x, w):\n    y = x * 2\n    y.{op}\n    return torch.tanh(y) * torch.sigmoid(y)\n"
    x, w = torch.rand(4, 5, device=device), torch.rand(4, 5, device=device)
    scripted = fuse(script(source), x, w)
    scripted = fuse(scripted, x.requires_grad_(), w)
    with tsfuser.fuser():
        names = history(scripted(x, w).grad_fn)
    assert len(names) == 2 and "DifferentiableGraphBackward" in names[0]  # then x
