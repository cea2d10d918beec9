"""Rows with columns that only some of them share: the gradient of a bias that all images of a batch share is
added up in the pass over rows that computes the terms (`schedule/rows.py`)."""

import pytest
import torch

import tsfuser
from kit.opsweep import plain
from kit.programs import build, kernels, stages, tensor
from kit.support import assert_matches, fuse, no_fallback, script
from tsfuser.ops import table
from tsfuser.schedule.machine import GPU, HOST

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]

#: What rows are made of, and what is stored.
PROGRAMS = {
    "softmax": ("torch.softmax(x + y, -1)", "p * y, (p * y).sum(0)"),
    "kept": ("torch.softmax(x, -1)", "p, (p * x).sum([0], keepdim=True)"),
    "some in between": ("torch.layer_norm(x, [x.size(-1)])", "p + 1, p.sum(1)"),
    "two": ("torch.layer_norm(x, [x.size(-1)])", "p * 2, (p * x).sum([0, 2]), p.sum([0, 2])"),
    "largest": ("torch.softmax(x, -1)", "p, (p - x).amax(0)"),
    "of all and of some": ("torch.layer_norm(x, [x.size(-1)])", "p, p.sum([0, 1, 2]), (p * x).sum(0)"),
}


def compare(program, *inputs):
    """With eager, fused."""
    rows, stored = PROGRAMS[program]
    source = f"def f({', '.join('xy'[: len(inputs)])}):\n    p = {rows}\n    return {stored}\n"
    eager, scripted = plain(source), script(source)
    want = eager(*inputs)
    exact = eager(*(x.double() for x in inputs))
    with no_fallback(), torch.no_grad():
        fuse(scripted, *inputs)
        found = scripted(*inputs)
    for got, theirs, true in zip(found, want, exact):
        assert_matches(got, theirs, true, ops=50)


def gradients(b, x, g, bias):
    """Of a softmax of x + bias, and of the bias."""
    x = b.pointwise("add", (x, bias), b.promote(x, bias))
    p = table.find("aten::softmax", "int").build(b, self=x, dim=-1)
    back = table.find("aten::_softmax_backward_data", "")
    d = back.build(b, grad_output=g, output=p, dim=-1, input_dtype=6)
    return d, b.reduce("sum", "sum", d, [0], False, d.dtype)


def operands(batch, heads, length, dtype="float32"):
    return [
        *[tensor(batch, heads, length, length, dtype=dtype)] * 2,
        tensor(1, heads, length, length, strides=(heads * length**2, length**2, length, 1)),
    ]


@pytest.mark.parametrize("length, wanted", [(49, (16, 4)), (64, (16, 1)), (200, (32, 2)), (384, (32, 3))])
def test_one_pass_adds_up_and_a_second_kernel_its_parts(length, wanted):
    first, second = stages(*build(gradients, *operands(64, 3, length)))[0]
    assert first.schedule.reduction.apart and (first.params.warp, first.params.unroll) == wanted
    assert not second.segment.uses_reductions and len(second.segment.reductions) == 1
    assert len(kernels(gradients, *operands(64, 3, length))) == 2  # verified after each pass


def test_blocks_run_at_the_same_time():
    """Each goes over at least two rows, and no part is empty."""
    for batch in (3, 64, 4096):
        call, fusion = build(gradients, *operands(batch, 3, 49))
        (first, second), _ = stages(call, fusion)
        parts, rows = call.decide(second.segment.axes[0].extent), 128 // 16
        stripes, at_once = -(-3 * 49 // rows), GPU.multiprocessors * first.params.resident
        assert parts == min((batch + 1) // 2, at_once // stripes)


def test_rows_longer_than_a_warp_are_read_where_they_are_used():
    (first, _), _ = stages(*build(gradients, *operands(64, 3, 1536)))
    assert first.schedule.reduction.apart and not first.params.warp and not first.params.prefetched


def test_columns_of_all_rows_come_first():
    def program(b, x):
        p = table.find("aten::softmax", "int").build(b, self=x, dim=-1)
        some = b.reduce("sum", "sum", p, [0], False, p.dtype)
        return p, some, b.reduce("sum", "sum", p, [0, 1], False, p.dtype)

    first, *others = stages(*build(program, tensor(64, 32, 512)))[0]
    assert not first.schedule.reduction.apart and len(first.segment.reductions) == 3
    assert [len(s.segment.reductions) for s in others] == [1, 1]


@pytest.mark.parametrize(
    "sizes",
    [
        (64, 1, 3),  # fewer rows of columns than a block has threads for
        (4, 2, 20000),  # blocks share a row
    ],
)
def test_where_it_gains_nothing_kernels_are_as_before(sizes):
    found, _ = stages(*build(gradients, *operands(*sizes)))
    assert not any(s.schedule.reduction and s.schedule.reduction.apart for s in found)


def test_the_host_adds_up_in_a_pass_of_its_own():
    found, _ = stages(*build(gradients, *operands(64, 3, 49)), HOST)
    assert len(found) == 2 and not any(s.schedule.reduction.apart for s in found)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "sizes",
    [(5, 3, 4, 49), (33, 2, 9, 64), (1, 16, 2, 7), (70, 1, 31, 130), (9, 2, 3, 1100), (4, 3, 2, 2048)],
)
def test_values(program, dtype, sizes, device):
    x = torch.randn(sizes, dtype=torch.float64).to(dtype).to(device)
    others = [torch.randn(sizes[1:]).to(dtype).to(device)] if program == "softmax" else []
    compare(program, x, *others)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_infinities_and_nans_stay_where_they_are(dtype, device):
    x = torch.randn(9, 3, 8, 49, dtype=dtype, device=device)
    x[0, 0, 0], x[1, 1, 1, 1], x[2, 2, 7, -1] = float("-inf"), float("nan"), float("inf")
    compare("kept", x)


ATTENTION = """
def f(q: Tensor, k: Tensor, v: Tensor, bias: Tensor):
    scores = torch.matmul(q, k.transpose(-2, -1)) * 0.25 + bias
    return torch.matmul(torch.softmax(scores, -1), v)
"""


def test_an_attention_with_a_bias_for_all_images(device):
    eager, scripted = plain(ATTENTION), script(ATTENTION)
    with tsfuser.fuser():
        for batch in (12, 12, 12, 7, 1):
            leaves = [
                torch.randn(sizes, dtype=torch.float64, device=device, requires_grad=True)
                for sizes in (*[(batch, 3, 17, 8)] * 3, (1, 3, 17, 17))
            ]
            g = torch.randn(batch, 3, 17, 8, dtype=torch.float64, device=device)
            want = torch.autograd.grad(eager(*leaves), leaves, g)
            got = torch.autograd.grad(scripted(*leaves), leaves, g)
            for mine, theirs in zip(got, want):
                assert_matches(mine, theirs, ops=100, strides=False)
