"""Columns that the blocks of a cluster share: small blocks and a small machine make clusters for norms over a
few hundred rows."""

from dataclasses import replace

import pytest
import torch

import tsfuser
from kit.batch_norms import FORWARD, Normed, parameters
from kit.batch_norms import check as check_batch_norm
from kit.column_norms import CENTRED, SOFTMAX, check_gradients, last
from kit.reductions import Fused, check, tensor
from kit.support import counted, fuse, script
from tsfuser import options
from tsfuser.planning import compile as pipeline
from tsfuser.schedule import outer_rows

pytestmark = pytest.mark.usefixtures("single_nodes")


@pytest.fixture
def small(target, place, monkeypatch):
    """Parameters of the schedule each time that it is applied, under a small machine with clusters."""
    if target == "cpu":
        pytest.skip("the host has no clusters")
    if target == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the device has no clusters")
    made, apply, machine = [], outer_rows.apply, pipeline._machine
    monkeypatch.setattr(outer_rows, "THREADS", 64)
    monkeypatch.setattr(outer_rows, "VECTORS", (4, 3, 2, 1))
    monkeypatch.setattr(pipeline, "_machine", lambda device: replace(machine(device), multiprocessors=16))
    monkeypatch.setattr(
        outer_rows,
        "apply",
        lambda segment, slabs, params: made.append(params) or apply(segment, slabs, params),
    )
    tsfuser.reset()
    yield made
    tsfuser.reset()


@pytest.fixture
def clusters(small):
    yield small
    assert small and all(params.cluster for params in small)


# of x: rows that fill the blocks of a cluster or not, whole slabs or a part of one
SHAPES = {
    "whole": (4, 64, 16, 4),
    "odd rows": (3, 48, 11, 7),
    "odd columns": (3, 77, 6, 5),
    "fourteen blocks": (8, 16, 16, 7),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_forward_with_running_statistics(clusters, place, shape):
    """One kernel, and what follows the norm in it."""
    sizes = SHAPES[shape]
    function, x = Normed(FORWARD), last(*sizes, device=place)
    check_batch_norm(function, x, parameters(sizes[1], place), True, 0.1)
    with tsfuser.fuser(), counted() as rise:
        function.scripted(x, *(p.clone() for p in parameters(sizes[1], place)), True, 0.1)
    assert rise["launches"] == 1 and not rise["fallbacks"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(clusters, place, dtype):
    x = last(3, 64, 10, 7, device=place, dtype=dtype)
    check_batch_norm(
        Normed(FORWARD), x, parameters(64, place, torch.promote_types(dtype, torch.float32)), True, 0.1
    )


@pytest.mark.parametrize(
    "shape, dtype",
    [*((shape, torch.float32) for shape in list(SHAPES)[:3]), ("whole", torch.bfloat16)],
    ids=str,
)
def test_gradients(clusters, place, shape, dtype):
    """Of x, weight and bias in one kernel too."""
    check_gradients(SHAPES[shape], dtype, place)
    assert len(clusters) == 2


def test_two_exchanges(clusters, place):
    """A softmax: the sums of powers are exchanged beside the largest values."""
    for sizes in ((2, 150, 40), (3, 200, 33), (1, 300, 64)):
        check(Fused(SOFTMAX), tensor(*sizes, device=place))


def test_tensors_that_are_not_dense(clusters, place):
    x = tensor(150, 3, 128, device=place)
    check(Fused(CENTRED), x[:, 1])
    check(Fused(CENTRED), x[:, :2, 5:])
    check(Fused(CENTRED), x.transpose(0, 1).reshape(3, -1, 64).transpose(0, 1))


def test_infinities_and_nan_stay_in_their_columns(clusters, place):
    x, inf = tensor(2, 150, 64, device=place), float("inf")
    x[0, 149, 1], x[0, 0, 3], x[1, 77, 5], x[1, :, 7] = inf, float("nan"), -inf, -inf
    x[0, :140, 9] = -inf
    check(Fused(SOFTMAX), x)
    check(Fused(CENTRED), x.flatten(0, 1))


def test_lengths_that_vary_share_a_kernel(small, place):
    """Once lengths vary, another one compiles nothing as long as a slab fits a cluster."""
    function = Normed(FORWARD)
    for rows in (40, 41, 43):
        check_batch_norm(function, last(4, 64, rows, 2, device=place), parameters(64, place), True, 0.1)
    assert all(params.cluster for params in small)
    for rows in (44, 53, 60):
        with counted() as rise:
            check_batch_norm(function, last(4, 64, rows, 2, device=place), parameters(64, place), True, 0.1)
        assert rise["kernels_compiled"] + rise["disk_hits"] == 0, rows


@pytest.mark.parametrize("sizes", [(2000, 64), (20, 8)], ids=["too many rows", "too few slabs"])
def test_what_a_cluster_cannot_keep_is_read_twice(small, place, sizes):
    check(Fused(CENTRED), tensor(*sizes, device=place))
    assert not small


def test_clusters_are_switched_off(small, place):
    with options.override(disable={"clusters": ""}):
        check(Fused(CENTRED), tensor(200, 64, device=place))
    assert not any(params.cluster for params in small)


@pytest.mark.parametrize("chosen", ["m", "m.to(torch.int8) > 0"])
def test_columns_of_narrow_tensors_that_are_read_one_by_one(device, chosen):
    """As many threads along a row as read bytes at full speed would be more than a warp has. But each warp
    must have partial results of all columns."""
    text = f"""
def f(g, m, x):
    a = g.masked_fill({chosen}, 0)
    return (a * 0.5 * x).sum([0, 1]) + a.sum([0, 1])
"""
    torch.manual_seed(0)
    g = torch.randn(16, 2, 16, 33, device=device)
    x = torch.randn(33, 16, 2, 16, device=device).permute(3, 2, 1, 0)
    m = (torch.randn(16896, device=device) < 0).as_strided((16, 2, 16, 33), (1, 16, 1056, 32))
    eager = {"torch": torch}
    exec(text, eager)
    found = fuse(script(text), g, m, x)(g, m, x)
    torch.testing.assert_close(found, eager["f"](g, m, x), rtol=1e-5, atol=1e-5)
