"""Joint graphs where gradients are missing or not asked for: what is read and freed is what eager's nodes
read and free (`tsfuser.joint.partial`)."""

import weakref

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.joint_calls import is_packed, leaves
from kit.opsweep import plain
from kit.support import fresh, script
from tsfuser import _C

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("joint_graphs")]

CALLS = 5
TWICE, WRITTEN = "a second time", "modified by an inplace operation"


def two(x: Tensor, w: Tensor, v: Tensor):
    h = torch.tanh(x * w)
    return h.sin() * 2.0, torch.log(h * v).exp()


def outcome(step):
    """What it gives, or which of the errors of autograd it raises."""
    try:
        return step()
    except RuntimeError as error:
        return next(text for text in (TWICE, WRITTEN) if text in str(error))


def assert_alike(function, steps, *sizes, device="cpu"):
    """What each of the `steps` gives, of results and leaves, as in eager: in a function of its own."""
    scripted = fresh(function)
    with tsfuser.fuser():
        for _ in range(CALLS):
            found = []
            for called in (scripted, function):
                given = leaves(*sizes, device=device, least=0.5)
                made = called(*given)
                found.append([outcome(lambda step=step: step(made, given)) for step in steps])
            for ours, eagers in zip(*found):
                assert isinstance(ours, str) == isinstance(eagers, str) and (ours is None) == (eagers is None)
                if isinstance(ours, str) or ours is None:
                    assert ours == eagers
                else:
                    torch.testing.assert_close(ours, eagers)
        assert is_packed(scripted, *given)
    return found[1]


def gradient(k, of, **options):
    def step(made, given):
        return torch.autograd.grad(made[k].sum(), [given[i] for i in of], allow_unused=True, **options)

    return step


def write(k):
    def step(made, given):
        with torch.no_grad():
            given[k].add_(1.0)

    return step


SIZES = ((3, 4), (4,), (4,))
ALL = (0, 1, 2)


@pytest.mark.parametrize(
    "steps",
    [
        (gradient(0, ALL), gradient(1, ALL)),  # both read h's product
        (gradient(0, ALL), gradient(1, [2])),  # which this does not
        (gradient(1, [2]), gradient(0, ALL), gradient(1, [2])),
        (gradient(0, ALL, retain_graph=True), gradient(1, ALL), gradient(0, ALL)),
        (gradient(1, [2], retain_graph=True), gradient(0, ALL), gradient(1, [2])),
    ],
    ids=range(5),
)
def test_results_that_are_differentiated_one_after_the_other(steps, device):
    found = assert_alike(two, steps, *SIZES, device=device)
    assert any(not isinstance(each, str) for each in found)


@pytest.mark.parametrize("k, of, written", [(0, ALL, 2), (1, ALL, 2), (0, [0], 1), (1, [1], 0)])
def test_a_write_to_what_the_gradients_that_are_asked_for_do_not_need(k, of, written, device):
    assert_alike(two, (write(written), gradient(k, of)), *SIZES, device=device)


def test_nothing_is_computed_again_of_what_eager_saves_for_other_gradients():
    """Of x, which eager saves for the gradient of the first result, but not of its tangent for the second."""

    def f(x: Tensor, w: Tensor, v: Tensor):
        return (x * w).sin(), torch.tanh(x + 1.0) * v

    found = assert_alike(f, (write(0), gradient(1, ALL)), *SIZES)
    assert not isinstance(found[1], str)


def test_missing_gradients_of_results_that_one_op_makes(device):
    """It reads zeros for them."""

    def f(x: Tensor, w: Tensor, v: Tensor):
        a, b = torch.chunk(torch.tanh(x * w), 2, -1)
        return a.sin() * 2.0, b.exp() * 3.0

    assert_alike(f, (gradient(1, [0, 1], retain_graph=True), gradient(0, [1])), *SIZES, device=device)


def test_what_is_not_asked_for_is_none():
    def step(made, given):
        made[1].sum().backward(inputs=[given[2]])
        return [t.grad for t in given]

    found = assert_alike(two, (step,), *SIZES)
    assert found[0][0] is None and found[0][2] is not None


def test_second_derivatives_of_one_of_two_results():
    def step(made, given):
        (first,) = torch.autograd.grad(made[0].sum(), [given[0]], create_graph=True)
        return torch.autograd.grad(first.square().sum(), given, allow_unused=True)

    assert_alike(two, (step,), *SIZES)
    assert_alike(two, (gradient(1, [2]), step), *SIZES)


def test_hooks_unpack_what_is_needed():
    scripted, unpacked = fresh(two), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t) or t)
    with tsfuser.fuser():
        for _ in range(CALLS):
            given = leaves(*SIZES, least=0.5)
            with hooks:
                made = scripted(*given)
            torch.autograd.grad(made[0].sum(), given[:2], retain_graph=True)
            first = len(unpacked)
            torch.autograd.grad((made[0] + made[1]).sum(), given)
            both = len(unpacked) - first
            unpacked.clear()
    assert 0 < first < both


def test_the_part_is_fused():
    scripted = fresh(two)
    with tsfuser.fuser():
        for _ in range(CALLS):
            given = leaves((64, 4), (4,), (4,), least=0.5)
            made = scripted(*given)
            tsfuser.reset()
            torch.autograd.grad(made[0].sum(), given[:2])
    stats = tsfuser.stats()
    assert stats["launches"] > 0 and not stats["fallbacks"], stats


def test_memory_is_freed_when_nothing_reads_it_any_more():
    class Held:
        def __init__(self, tensor):
            self.tensor = tensor

    def apart(x: Tensor, w: Tensor):
        return torch.tanh(x * 2.0).exp(), torch.tanh(w * 3.0).exp()

    def alive(function):
        """How many of the saved values are held: at first, behind one gradient, and behind both."""
        held, counts = weakref.WeakSet(), []

        def pack(tensor):
            held.add(made := Held(tensor))
            return made

        x, w = leaves((3, 4), (4,), least=0.5)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda made: made.tensor):
            results = function(x, w)
        counts.append(len(held))
        for result, leaf in zip(results, (x, w)):
            torch.autograd.grad(result.sum(), leaf)
            counts.append(len(held))
        return counts

    scripted = fresh(apart)
    with tsfuser.fuser():
        scripted(*leaves((3, 4), (4,), least=0.5))  # which torch profiles
        for _ in range(CALLS):
            first, second, third = alive(scripted)
            assert first > second > third == 0


@pytest.mark.passes_fail
def test_a_failure_while_the_part_is_made():
    """The whole backward runs, with zeros for gradients that are missing."""
    scripted, given = fresh(two), leaves(*SIZES, least=0.5)
    before = _C.fail_pass("partial_backward")
    try:
        with tsfuser.fuser(), pytest.warns(UserWarning, match="partial_backward"):
            for k in (0, 1, 0, 1):
                found = torch.autograd.grad(scripted(*given)[k].sum(), given, allow_unused=True)
                wanted = torch.autograd.grad(two(*given)[k].sum(), given, allow_unused=True)
                for ours, eagers in zip(found, wanted):
                    torch.testing.assert_close(ours, torch.zeros_like(ours) if eagers is None else eagers)
    finally:
        _C.fail_pass(before)


def test_a_result_that_eager_computes_again_may_be_written_to():
    """The derivative of a quotient by its divisor."""

    def f(x: Tensor, w: Tensor, v: Tensor):
        y = x * v / w
        return y + 1.0, y

    def step(made, given):
        with torch.no_grad():
            made[1].zero_()
        return torch.autograd.grad(made[0].sum(), given)

    found = assert_alike(f, (step,), *SIZES)
    assert not isinstance(found[0], str)


@pytest.mark.parametrize("op", ["logaddexp", "logaddexp2"])
def test_a_result_of_bools_that_is_only_asked_for_its_dtype(op):
    """Eager raises an error where it differentiates it, and does not here."""
    text = f"""def f(x, c, n: int):
    y = torch.sort(x)[0]
    v = torch.{op}(y, c)
    for k in range(n):
        if x.dtype == v.dtype:
            y = y * 0.5
    return y.sin()
"""
    scripted, eager = script(text), plain(text)
    x, c = torch.rand(4).requires_grad_(), torch.rand(4) > 0.5
    with tsfuser.fuser():
        for _ in range(4):
            found = torch.autograd.grad(scripted(x, c, 2).sum(), x)
            torch.testing.assert_close(found, torch.autograd.grad(eager(x, c, 2).sum(), x))


OF_TWO = """logaddexp logaddexp2 atan2 pow hypot fmod remainder xlogy add mul div sub rsub maximum minimum
fmax fmin copysign float_power special.xlog1py nn.functional.mse_loss
nn.functional.smooth_l1_loss nn.functional.l1_loss nn.functional.huber_loss
nn.functional.binary_cross_entropy nn.functional.binary_cross_entropy_with_logits
nn.functional.kl_div nn.functional.soft_margin_loss""".split()
OF_THREE = ["addcdiv(x, x, c)", "addcdiv(c, x, x)", "addcdiv(x, c, x)", "addcmul(x, x, c)", "lerp(x, x, c)"]
MIXED = [f"{op}({given})" for op in OF_TWO for given in ("x, c", "c, x")] + OF_THREE


@pytest.mark.parametrize("text", MIXED)
def test_what_eager_cannot_differentiate_for_a_dtype_is_an_error_here_too(text):
    """As where its formula subtracts bools, or divides in place by whole numbers."""
    source = f"def f(x, c):\n    return (x * 2 + torch.{text}).sin()\n"
    for dtype in (torch.bool, torch.int64) + (torch.float16,) * ("loss" in text or "entropy" in text):
        scripted, eager = script(source), plain(source)
        x = (torch.rand(4) / 2 + 0.25).requires_grad_()
        c = (torch.rand(4) > 0.5) if dtype == torch.bool else (torch.rand(4) * 2).to(dtype)

        def outcome(f):
            try:
                y = f(x, c)
                return [y, *torch.autograd.grad(y.sum(), x)]
            except RuntimeError as error:
                return str(error).splitlines()[-1]

        expected = outcome(eager)
        with tsfuser.fuser():
            for _ in range(4):
                found = outcome(scripted)
                assert isinstance(found, str) == isinstance(expected, str), (dtype, found, expected)
                if not isinstance(found, str):
                    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-4, equal_nan=True)


def test_behind_a_move_between_devices_a_missing_gradient_is_no_zero(device):
    """Which infinity would make NaN."""

    def program(x: Tensor, y: Tensor):
        moved = torch.tanh(x.to(y.device).to(torch.float16))
        return moved, (moved.to(y.device) * x).detach()

    scripted, y = fresh(program), torch.zeros(1, device=device)
    x = torch.tensor([float("inf"), -float("inf"), 1.0, 0.0], device=device, requires_grad=True)
    with tsfuser.fuser():
        for _ in range(CALLS):
            found, expected = (torch.autograd.grad(f(x, y)[0].sum(), x)[0] for f in (scripted, program))
            torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-3)
    assert is_packed(scripted, x, y)
