"""Norms whose reductions keep the contiguous dim: a small machine takes what has a few columns."""

from dataclasses import replace

import pytest
import torch

import tsfuser
from kit.batch_norms import FORWARD, Normed, parameters
from kit.batch_norms import check as check_batch_norm
from kit.column_norms import CENTRED, GRADIENTS, SOFTMAX, check_gradients, last
from kit.reductions import Fused, check, tensor
from kit.support import counted
from tsfuser.planning import compile as pipeline
from tsfuser.schedule import outer_rows

pytestmark = pytest.mark.usefixtures("single_nodes")


@pytest.fixture
def taken(target, place, monkeypatch):
    """Parameters of the schedule each time that it is applied; it has to be, once at least."""
    if target == "cpu":
        pytest.skip("the host's cache keeps what it reads twice")
    made, apply, machine = [], outer_rows.apply, pipeline._machine
    monkeypatch.setattr(outer_rows, "THREADS", 128)
    monkeypatch.setattr(
        pipeline,
        "_machine",
        lambda device: replace(machine(device), multiprocessors=4, cluster_blocks=0),
    )
    monkeypatch.setattr(
        outer_rows,
        "apply",
        lambda segment, slabs, params: made.append(params) or apply(segment, slabs, params),
    )
    tsfuser.reset()
    yield made
    tsfuser.reset()
    assert made


# of x
SHAPES = {
    "one block": (3, 160, 4, 5),
    "wide slabs": (2, 500, 3, 2),
    "odd columns": (3, 77, 4, 5),
    "many rows": (4, 72, 5, 11),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_with_running_statistics(taken, place, shape):
    """One kernel, and what follows the norm in it."""
    sizes = SHAPES[shape]
    function, x = Normed(FORWARD), last(*sizes, device=place)
    check_batch_norm(function, x, parameters(sizes[1], place), True, 0.1)
    assert len(taken) == 1
    with tsfuser.fuser(), counted() as rise:
        function.scripted(x, *(p.clone() for p in parameters(sizes[1], place)), True, 0.1)
    assert rise["launches"] == 1 and not rise["fallbacks"]


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(3, 128, 4, 5), (4, 64, 3, 7)], ids=str)
def test_dtypes(taken, place, sizes, dtype):
    x = last(*sizes, device=place, dtype=dtype)
    check_batch_norm(
        Normed(FORWARD), x, parameters(sizes[1], place, torch.promote_types(dtype, torch.float32)), True, 0.1
    )


@pytest.mark.parametrize(
    "shape, dtype",
    [*((shape, torch.float32) for shape in list(SHAPES)[:3]), ("one block", torch.bfloat16)],
    ids=str,
)
def test_gradients(taken, place, shape, dtype):
    """Of x, weight and bias in one kernel too."""
    check_gradients(SHAPES[shape], dtype, place)
    assert len(taken) == 2


def test_a_gradient_is_one_kernel(taken, place, device):
    function, x = Normed(GRADIENTS), last(4, 72, 5, 4, device=place).requires_grad_()
    w, b, m, v = parameters(72, place)
    leaves = [x, w.requires_grad_(), b.requires_grad_()]
    with tsfuser.fuser():
        for _ in range(4):
            with counted() as rise:
                y = function.scripted(*leaves, m, v, True, 0.1)
                torch.autograd.grad(y, leaves, torch.ones_like(y))
    assert rise["launches"] == 2 and not rise["fallbacks"]


def test_a_new_length_compiles_nothing(taken, place):
    function = Normed(FORWARD)
    for rows, compiled in ((18, 1), (17, 0), (19, 0)):
        with counted() as rise:
            check_batch_norm(function, last(4, 40, rows, 5, device=place), parameters(40, place), True, 0.1)
        assert rise["kernels_compiled"] + rise["disk_hits"] == compiled, rows


def test_dims_around_the_reduced_one(taken, place):
    """A softmax of which each image has slabs of its own."""
    for sizes in ((3, 50, 40), (2, 260, 33), (5, 2, 64), (1, 300, 40), (40, 20, 3), (9, 30, 1), (66, 2, 3)):
        check(Fused(SOFTMAX), tensor(*sizes, device=place))


@pytest.mark.parametrize("rows, columns", [(2, 130), (33, 97), (200, 34)])
def test_any_number_of_rows(taken, place, rows, columns):
    check(Fused(CENTRED), tensor(rows, columns, device=place))


@pytest.mark.parametrize("sizes", [(40, 3, 64), (150, 3, 64)], ids=str)
def test_tensors_that_are_not_dense(taken, place, sizes):
    x = tensor(*sizes, device=place)
    check(Fused(CENTRED), x[:, 1])
    check(Fused(CENTRED), x[:, :2, 5:])
    check(Fused(CENTRED), x[::2, :1].expand(-1, 2, -1), strides=False)
    check(Fused(CENTRED), x.transpose(0, 1).reshape(3, -1, 32).transpose(0, 1))


@pytest.mark.parametrize("rows", [90, 150])
def test_infinities_and_nan_stay_in_their_columns(taken, place, rows):
    x = tensor(2, rows, 64, device=place)
    x[0, rows - 1, 1], x[0, 0, 3], x[1, 77, 5], x[1, :, 7] = (
        float("inf"),
        float("nan"),
        float("-inf"),
        float("-inf"),
    )
    x[0, : rows // 2, 9] = float("-inf")
    check(Fused(SOFTMAX), x)
    check(Fused(CENTRED), x.flatten(0, 1))


@pytest.mark.parametrize("sizes", [(4, 64, 4, 7), (8, 32, 5, 9)], ids=str)
def test_a_large_mean_costs_no_accuracy(taken, place, sizes):
    x = last(*sizes, device=place) + 1e4
    function = Normed(
        "def f(x, m, v):\n    return torch.relu(torch.batch_norm(x, None, None, m, v, True, 0.1, 1e-5, "
        "False)) * 2.0\n"
    )
    m, v = parameters(sizes[1], place)[2:]
    mine, plain, exact = (m.clone(), v.clone()), (m.clone(), v.clone()), (m.double(), v.double())
    with tsfuser.fuser():
        for _ in range(2):
            actual = function.scripted(x, *(mine := (m.clone(), v.clone())))
    results = zip(
        (actual, *mine), (function.plain(x, *plain), *plain), (function.plain(x.double(), *exact), *exact)
    )
    for a, e, r in results:
        assert float((a - r).abs().max()) <= 2 * float((e - r).abs().max()) + 2e-6 * float(r.abs().max())


def test_what_does_not_fit_is_read_twice(place, target, monkeypatch):
    """Too many rows, or too few columns: the reasons are sentences, and the result is right."""
    if target == "cpu":
        pytest.skip("the host's cache keeps what it reads twice")
    machine = pipeline._machine
    monkeypatch.setattr(
        pipeline,
        "_machine",
        lambda device: replace(machine(device), multiprocessors=4, cluster_blocks=0),
    )
    monkeypatch.setattr(outer_rows, "apply", lambda *_: pytest.fail("this does not fit"))
    monkeypatch.setattr(outer_rows, "THREADS", 64)
    tsfuser.reset()
    check(Fused(CENTRED), tensor(1500, 20, device=place))
    check(Fused(CENTRED), tensor(64, 4, device=place))
    tsfuser.reset()


COMBINED = """
def f(experts, weights, residual):
    y = residual + (experts * weights.unsqueeze(-1)).sum(1)
    return y, y * experts.amax(1)
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chosen, width", [(2, 1024), (4, 1031), (3, 520), (4, 2)])
def test_of_short_columns_a_thread_has_all(taken, place, chosen, width, dtype):
    """What the experts of a token give is added up."""
    tokens = 40
    experts = tensor(tokens, chosen, width, device=place, dtype=dtype)
    weights, residual = (tensor(tokens, n, device=place, dtype=dtype, seed=n) for n in (chosen, width))
    check(Fused(COMBINED), experts, weights, residual)
    assert all(params.down == 1 for params in taken) == (width > 2)
