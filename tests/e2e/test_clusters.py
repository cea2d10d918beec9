"""Rows that the blocks of a cluster share: small blocks and a small machine make clusters for rows of a few
thousand elements."""

from dataclasses import replace

import pytest
import torch

import tsfuser
from kit.batch_norms import parameters
from kit.long_rows import (
    RESULTS,
    SOFTMAX,
    check_channels,
    check_dropout,
    check_gradients,
    with_special_values,
)
from kit.reductions import ROWS, Fused, check, rows_of, tensor
from tsfuser import options
from tsfuser.codegen import emit
from tsfuser.planning import compile as pipeline
from tsfuser.schedule import row_params, shared_rows

pytestmark = pytest.mark.usefixtures("single_nodes")


@pytest.fixture
def small(target, device, monkeypatch):
    """Sources of the kernels that are made under a small machine with clusters."""
    if target == "cpu":
        pytest.skip("the host has no clusters")
    if target == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the device has no clusters")
    made, source, machine = [], emit.source, pipeline._machine
    monkeypatch.setattr(row_params, "MAX_ROW_THREADS", 64)
    monkeypatch.setattr(shared_rows, "COOPERATIVE_THREADS", 64)
    monkeypatch.setattr(shared_rows, "MAX_CLUSTER_VECTORS", 8)
    monkeypatch.setattr(pipeline, "_machine", lambda device: replace(machine(device), multiprocessors=10))
    monkeypatch.setattr(emit, "source", lambda *given: made.append(source(*given)) or made[-1])
    tsfuser.reset()
    with options.override(enable={"clusters": ""}):
        yield made
    tsfuser.reset()


def in_clusters(sources):
    return ["CLUSTER_KERNEL" in text for text in sources]


@pytest.fixture(params=["registers", "shared memory"])
def clusters(small, request, monkeypatch):
    """The same, of clusters that keep rows in registers, or in shared memory."""
    if request.param == "shared memory":
        monkeypatch.setattr(shared_rows, "_in_registers", lambda *given: None)
    yield small
    assert any(in_clusters(small))
    fetched = [text for text in small if "CLUSTER_KERNEL" in text and "fetch_wait" in text]
    assert bool(fetched) is (request.param == "shared memory")


@pytest.mark.parametrize("columns", [4001, 8002, 9000])
def test_norms_and_softmax(clusters, device, columns):
    check(Fused(ROWS), *rows_of(columns, 11, device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_any_dtype(clusters, device, dtype):
    check(Fused(ROWS), *rows_of(5008, 7, device, dtype))


@pytest.mark.parametrize("sizes", [(40, 3000), (3, 2, 4100), (10, 2052)], ids=str)
def test_any_number_of_rows(clusters, device, sizes):
    check(Fused(SOFTMAX), tensor(*sizes, device=device))


def test_infinities_and_nan_stay_in_their_rows(clusters, device):
    check(Fused(SOFTMAX), with_special_values(device))


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_the_largest_and_the_sum_of_powers_take_one_exchange(clusters, device, function):
    check(Fused(f"def f(x):\n    return torch.{function}(x * 8.0, -1)\n"), tensor(7, 4100, device=device))
    assert all(text.count("await_mail<") == 1 for text in clusters if "CLUSTER_KERNEL" in text)


TERMS = {  # what they are where a row has no element, and memory is read as 0
    "nan": "x / w",
    "inf": "torch.where(x == 0, float('inf'), x)",
    "-inf": "x.masked_fill(x == 0, float('-inf'))",
}


@pytest.mark.parametrize("disable", [{}, {"clusters": ""}], ids=str)
@pytest.mark.parametrize("columns", [4100, 8204])
@pytest.mark.parametrize("term", TERMS)
def test_moments_do_not_see_what_lies_behind_a_row(small, device, term, columns, disable):
    source = f"def f(x, w, b):\n    return torch.layer_norm({TERMS[term]}, [x.size(-1)], w, b)\n"
    x, w, b = rows_of(columns, 37, device)
    with options.override(enable={}, disable=disable):
        check(Fused(source), x, w.abs() + 1, b)
    assert any("moments_near" in text and "< args." in text for text in small)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_moments_of_rows_of_an_odd_length(small, device, dtype):
    source = "def f(x):\n    return torch.var_mean(x * 0.5, -1)\n"
    for columns in (4101, 8203):
        check(Fused(source), tensor(37, columns, device=device, dtype=dtype))
    assert not tsfuser.stats()["fallbacks"]


def test_many_reductions_of_a_row(clusters, device):
    """More totals than a block has warps, which share the exchange out."""
    source = (
        "def f(x):\n    return x * x.sum(-1, True), x.amax(-1), x.amin(-1), (x * x).sum(-1), x.mean(-1)\n"
    )
    check(Fused(source), tensor(7, 4100, device=device))


@pytest.mark.parametrize("result", RESULTS)
def test_gradients(small, device, result):
    """With the parameters' gradients, which the blocks of a cluster add up over its rows."""
    check_gradients(result, rows_of(3500, 13, device))
    assert any("fetch_wait" in text for text in small if "CLUSTER_KERNEL" in text)


@pytest.mark.parametrize("sizes", [(3, 5, 40, 52), (4, 5, 33, 31), (2, 9, 4000)], ids=str)
def test_channels_of_a_batch_norm(clusters, device, sizes):
    check_channels(sizes, device)


BATCH_NORM_BACKWARD = """
def f(g, x, w, m, v, mean, rstd):
    a, b, c = torch.ops.aten.native_batch_norm_backward(
        g * 2.0, x, w, m, v, mean, rstd, True, 1e-5, [True, True, True])
    return a, b, c
"""


@pytest.mark.parametrize("sizes", [(3, 5, 32, 36), (5, 3, 23, 31)], ids=str)
def test_gradients_of_channels(clusters, device, sizes):
    x, (w, b, m, v) = tensor(*sizes, device=device), parameters(sizes[1], device)
    _, mean, rstd = torch.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5)
    check(Fused(BATCH_NORM_BACKWARD), tensor(*sizes, device=device, seed=9), x, w, m, v, mean, rstd, ops=64)


def test_dropout_draws_what_one_block_would(clusters, device, monkeypatch):
    check_dropout(5, device, monkeypatch)


def test_lengths_that_vary_share_kernels(small, device):
    """Once lengths vary, another one compiles nothing as long as its rows fit a cluster; the blocks of longer
    ones are cooperative."""
    function = Fused("def f(x):\n    return torch.softmax(x * 0.5, -1)\n")
    for columns in (4100, 4400, 6004):
        check(function, tensor(30, columns, device=device))
    assert all(in_clusters(small))
    known = len(small)
    for rows, columns in ((30, 4800), (31, 7776), (77, 9084), (12, 5112)):
        check(function, tensor(rows, columns, device=device))
    assert len(small) == known
    check(function, tensor(30, 30000, device=device))
    assert len(small) == known + 1 and "COOPERATIVE_KERNEL" in small[-1]


def test_few_rows_have_as_many_blocks_as_there_is_work_for(small, device):
    check(Fused(SOFTMAX), tensor(2, 4100, device=device))
    assert not any(in_clusters(small))


@pytest.mark.parametrize("enable, disable", [({}, {}), ({"clusters": ""}, {"clusters": ""})], ids=str)
def test_clusters_are_asked_for_and_not_switched_off(small, device, enable, disable):
    with options.override(enable=enable, disable=disable):
        check(Fused(SOFTMAX), tensor(11, 12300, device=device))
    assert small and not any(in_clusters(small))


TWO_BLOCKS = {  # a norm, with its moments in one exchange; one sum, whose block combines once a row
    "layer_norm": "torch.layer_norm(x * 0.5, [x.size(-1)], w, b)",
    "sum": "(x - x.sum(-1, True)) * w + b",
    "softmax": "torch.softmax(x * w + b, -1)",
}


@pytest.mark.parametrize("disable, found", [({}, True), ({"clusters": ""}, False)], ids=str)
@pytest.mark.parametrize("result", TWO_BLOCKS)
def test_two_blocks_of_a_row_are_a_cluster_by_default(small, device, result, disable, found):
    """They go over many rows, and fetch the next one meanwhile."""
    function = Fused(f"def f(x, w, b):\n    return {TWO_BLOCKS[result]}\n")
    with options.override(enable={}, disable=disable):
        check(function, *rows_of(4100, 37, device))
    assert small and all(made is found for made in in_clusters(small))
    assert all("fetch_wait" in text for text in small)
    exchange = "await_mail<" if found else "load_partial_cooperative<"
    assert all(text.count(exchange) == 1 for text in small)


@pytest.mark.parametrize(
    "columns, disable, found", [(4100, {}, True), (4100, {"clusters": ""}, False), (4101, {}, False)]
)
def test_rows_of_two_tensors_with_wide_accesses_have_clusters_by_default(
    small, device, columns, disable, found
):
    source = "def f(x, y):\n    return torch.softmax(x * y, -1)\n"
    with options.override(enable={}, disable=disable):
        check(Fused(source), tensor(11, columns, device=device), tensor(11, columns, device=device))
    assert small and any(in_clusters(small)) is found
