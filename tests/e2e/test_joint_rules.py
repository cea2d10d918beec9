"""Derivatives that tsfuser writes itself, each beside eager's, at several sizes; and programs of them."""

import pytest
import torch
import torch.nn.functional as F

from kit import opinfo
from kit.derivatives import built, judge, ours_and_eagers
from kit.joint_programs import LEFT, MASKS, OTHERS, PROGRAMS, heads, infos, tensors
from tsfuser.errors import Refusal
from tsfuser.joint.passes import divide


@pytest.mark.parametrize("info", infos(), ids=opinfo.title)
def test_an_op(info, request):
    most = None if request.config.getoption("--long") else 4
    if opinfo.title(info) in LEFT:
        pytest.skip(LEFT[opinfo.title(info)])
    assert judge(info, most=most).startswith("right")


def test_lists_name_infos():
    newer = {"native_group_norm"}  # which torch 2.11 does not list
    assert set(OTHERS) | LEFT.keys() <= {opinfo.title(i) for i in opinfo.op_db()} | newer


BESIDE_A_NUMBER = {
    name: getattr(torch, name)
    for name in """add mul div rsub pow fmod atan2 xlogy hypot logaddexp logaddexp2 maximum minimum fmax fmin
    copysign clamp_min clamp_max""".split()
} | {
    "xlog1py": torch.special.xlog1py,
    "where": lambda x, y: torch.where(x > y, x, y),
    "clamp": lambda x, y: torch.clamp(x, y, y + 1),
    "lerp": lambda x, y: torch.lerp(x, x * 2, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y),
}


@pytest.mark.parametrize("mask", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("op", BESIDE_A_NUMBER)
def test_a_tensor_without_dims_may_be_on_the_cpu(device, op, swapped, mask):
    """As in eager, whatever the other operand is on."""
    x, y = torch.rand(3, 4, dtype=torch.float64).to(device) + 1, torch.tensor(1.5, dtype=torch.float64)

    def program(x, y):
        return BESIDE_A_NUMBER[op](y, x) if swapped else BESIDE_A_NUMBER[op](x, y)

    try:
        expected = program(*(t.clone().requires_grad_(wants) for t, wants in zip((x, y), mask)))
        expected.backward(torch.ones_like(expected))
    except RuntimeError:
        pytest.skip("eager does not take it")
    function, joint = built(program, [x, y], mask)
    for own, its in zip(*ours_and_eagers(function, joint, program, [x, y], mask), strict=True):
        torch.testing.assert_close(own, its, rtol=1e-10, atol=1e-12, check_device=False)


# ---- programs


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_a_program_at_two_sets_of_sizes(program, mask):
    function, joint = built(program, tensors(PROGRAMS[program][0]), mask)
    assert joint.differentiated == tuple(i for i, wants in enumerate(mask) if wants)
    for shapes in PROGRAMS[program]:
        found = ours_and_eagers(function, joint, program, tensors(shapes), mask)
        for own, its in zip(*found, strict=True):
            torch.testing.assert_close(own, its, rtol=1e-10, atol=1e-12)


def test_widths_and_shifts_that_the_program_computes():
    """A graph for other sizes, too, which crops where this one pads."""

    def program(x):
        return torch.roll(F.pad(x, [0, 3 - x.size(1)]), [x.size(0) - 1], [0]).sin()

    function, joint = built(program, [torch.ones(4, 2, dtype=torch.float64)], (True,))
    for sizes in ((4, 2), (3, 5), (5, 1)):
        x = torch.randn(sizes, dtype=torch.float64)
        for own, its in zip(*ours_and_eagers(function, joint, program, [x], (True,)), strict=True):
            torch.testing.assert_close(own, its, rtol=1e-10, atol=1e-12)


def test_the_copy_that_products_read_is_made_once():
    """Of the heads of an attention, for the products of forward and backward."""

    def program(x, v):
        q, k = x.view(8, 64, 2, 4, 16).permute(2, 0, 3, 1, 4).tanh().unbind(0)
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v

    given = [torch.randn(8, 64, 128), torch.randn(8, 4, 64, 16)]
    _, joint = built(program, given, (True, True))
    parts = divide(joint)
    assert parts.forward.findNode("tsfuser::packed") and not parts.backward.findNode("tsfuser::packed")


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32, torch.float32), (torch.float32,) * 3])
def test_gradients_have_the_dtypes_of_their_operands(dtypes):
    given = [torch.randn(shape, dtype=dtype) for shape, dtype in zip(PROGRAMS[heads][0], dtypes)]
    mask = MASKS[0]
    function, joint = built(heads, given, mask)
    for own, its in zip(*ours_and_eagers(function, joint, heads, given, mask), strict=True):
        torch.testing.assert_close(own, its)


def test_infinite_gradients_do_not_spread():
    """What was not chosen has a gradient of 0, not 0 times infinity."""

    def program(x, y):
        return torch.where(x > 0, x.exp(), y).clamp(max=2.0)

    x, y = torch.tensor([-800.0, 800.0, 0.5]), torch.tensor([1.0, float("inf"), 3.0])
    function, joint = built(program, [x, y], (True, True))
    given = torch.tensor([float("inf"), 1.0, float("nan")])
    _, by_x, by_y = function(x, y, given)
    own = [t.clone().requires_grad_() for t in (x, y)]
    expected = torch.autograd.grad(program(*own), own, given)
    torch.testing.assert_close((by_x, by_y), expected, equal_nan=True)


def test_a_dropout():
    """The gradient passes where the value did."""

    def program(x):
        return F.dropout(x * 1.0, 0.25, True)

    x = torch.randn(400, dtype=torch.float64)
    function, _ = built(program, [x], (True,))
    result, gradient = function(x, torch.ones_like(x))
    kept = result != 0
    assert kept.any() and not kept.all()
    torch.testing.assert_close(gradient, kept.double() / 0.75)


def test_an_input_that_no_result_depends_on_has_no_gradient():
    _, joint = built(lambda x, y: x * 2 + y.detach(), [torch.ones(3), torch.ones(3)], (True, True))
    assert joint.differentiated == (0,)


@pytest.mark.parametrize(
    "program, reason",
    [(lambda x: torch.special.erfcx(x), "erfcx"), (lambda x: (x * 1j).real, "complex")],
)
def test_what_has_no_derivative_is_refused(program, reason):
    with pytest.raises(Refusal, match=reason):
        built(program, [torch.ones(3)], (True,))


@pytest.mark.parametrize("mask", [(False, True, True), (True, False, False), (True, True, False)], ids=str)
def test_a_convolution_computes_the_gradients_that_are_wanted(mask):
    """The images of a network want none."""
    x, w, b = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 2, 2), torch.randn(4)
    _, joint = built(lambda x, w, b: F.conv2d(x, w, b).sin(), [x, w, b], mask)
    node = joint.graph.findNode("aten::convolution_backward")
    assert list(node.inputs())[-1].toIValue() == list(mask)
