"""Rows that several blocks share, or that one block holds in registers while it fetches the next one: small
blocks and a small machine make such kernels of rows of a few thousand elements, and several iterations of few
rows."""

from dataclasses import replace

import pytest
import torch

import tsfuser
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
from tsfuser.schedule import row_choice, row_params, shared_rows

pytestmark = pytest.mark.usefixtures("single_nodes")


@pytest.fixture(params=["held", "shared"])
def small(target, device, monkeypatch, request):
    """Sources of the kernels that are made under a small machine, whose blocks may hold rows in registers, or
    leave them in shared memory."""
    if request.param == "shared":
        monkeypatch.setattr(shared_rows, "HELD_REGISTERS", 0)
    if target == "cpu":
        pytest.skip("the host has no cooperative blocks, and fetches nothing")
    made, source, machine = [], emit.source, pipeline._machine
    monkeypatch.setattr(row_params, "MAX_ROW_THREADS", 64)
    monkeypatch.setattr(shared_rows, "COOPERATIVE_THREADS", 64)
    monkeypatch.setattr(pipeline, "_machine", lambda device: replace(machine(device), multiprocessors=10))
    monkeypatch.setattr(emit, "source", lambda *given: made.append(source(*given)) or made[-1])
    tsfuser.reset()
    with options.override(disable={"clusters": ""}):
        yield made
    tsfuser.reset()


@pytest.fixture
def sources(small):
    """The same, some of which are cooperative, or hold rows."""
    yield small
    assert any("COOPERATIVE_KERNEL" in text or "load_packed" in text for text in small)


@pytest.mark.parametrize("columns", [4001, 8192, 9002])
def test_norms_and_softmax(sources, device, columns):
    check(Fused(ROWS), *rows_of(columns, 11, device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_any_dtype(sources, device, dtype):
    check(Fused(ROWS), *rows_of(10008, 3, device, dtype))


@pytest.mark.parametrize("sizes", [(5003,), (1, 8192), (3, 2, 4100), (40, 3000)], ids=str)
def test_any_number_of_rows(sources, device, sizes):
    check(Fused(SOFTMAX), tensor(*sizes, device=device))


def test_infinities_and_nan_stay_in_their_rows(sources, device):
    check(Fused(SOFTMAX), with_special_values(device))


@pytest.mark.parametrize("function", ["softmax", "log_softmax"])
def test_the_largest_and_the_sum_of_powers_take_one_meeting(sources, device, function):
    check(Fused(f"def f(x):\n    return torch.{function}(x * 8.0, -1)\n"), tensor(7, 4100, device=device))
    assert all(text.count("sync_cooperative();") == 1 for text in sources if "COOPERATIVE_KERNEL" in text)


def test_a_largest_that_others_want_too_is_known_at_once(sources, device):
    """What is added up is not exp(x - largest) alone, or something else is made of the largest in between."""
    sums = [
        "(x - m).exp().sum(-1), (x - m).sum(-1)",
        "((x - m) * 0.5).exp().sum(-1)",
        "(x - m).exp().sum(-1), x - m",
        "(m - x).exp().sum(-1)",
        "(x - m * 2.0).exp().sum(-1)",
    ]
    for result in sums:
        check(
            Fused(f"def f(x):\n    m = x.amax(-1, True)\n    return {result}\n"),
            tensor(5, 4100, device=device),
        )


def test_rows_that_do_not_lie_side_by_side(sources, device):
    x = tensor(6, 5, 4100, device=device)
    check(Fused(SOFTMAX), x[::2, 1:4, 3:])
    check(Fused(SOFTMAX), x[:, :1].expand(6, 3, 4100))


MEANS = """
def f(x, m, w):
    y = x - m
    return torch.layer_norm(y, [x.size(-1)], w, w, 1e-5) * m, y.sum(0)
"""
STACKED = """
def f(x, m, n, w):
    y = x - torch.stack((m, n), 0)
    return torch.layer_norm(y, [x.size(-1)], w, w, 1e-5) * m, y.sum([0, 1])
"""


@pytest.mark.parametrize("rows", [2, 23, 40])
def test_rows_with_values_of_their_own(small, device, rows):
    """They are loaded a row ahead, but for those that only some rows have."""
    function, x = Fused(MEANS), tensor(rows, 4100, device=device)
    others = tensor(rows, 1, device=device), tensor(4100, device=device)
    check(function, x, *others)
    check(function, x, others[0] * float("nan"), others[1])
    check(function, x.bfloat16(), others[0].bfloat16(), others[1].bfloat16())
    assert any("_ahead[0]" in text for text in small)
    others = tensor(rows, 1, device=device), *others
    check(Fused(STACKED), tensor(2, rows, 4100, device=device), *others)
    assert any("_in ? " in text or "_in &&" in text for text in small)


@pytest.mark.parametrize("result", RESULTS)
def test_gradients(sources, device, result):
    """With the parameters' gradients, which the blocks of a row add up over its rows."""
    check_gradients(result, rows_of(3500, 13, device))


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("count, columns", [(57, 776), (3, 1000), (9, 1024)])
def test_a_block_alone_fetches_its_next_row(small, device, monkeypatch, result, dtype, count, columns):
    """Where registers that hold the parameters' gradients leave too few for rows."""
    monkeypatch.setattr(row_choice, "MIN_BYTES_PER_SM", 1 << 30)
    monkeypatch.setattr(row_choice, "WARP_BLOCK_THREADS", 32)
    monkeypatch.setattr(row_choice, "COLUMN_BLOCK_THREADS", 128)
    check_gradients(result, rows_of(columns, count, device, dtype))
    assert any("fetch_wait" in text for text in small) and not any(
        "COOPERATIVE_KERNEL" in text for text in small
    )


@pytest.mark.parametrize("accesses, together", [(1024, 1), (769, 1), (2050, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "function", ["softmax(x * 0.5, -1)", "layer_norm(x, [x.size(-1)])", "log_softmax(x, -1)"]
)
def test_a_block_holds_a_row_and_fetches_the_next(small, device, function, dtype, accesses, together):
    """Of so many `accesses`, which `together` blocks share: full blocks, and others. The last iteration has
    rows for some blocks only."""
    x = tensor(23, accesses * (16 // dtype.itemsize), device=device, dtype=dtype)
    check(Fused(f"def f(x):\n    return torch.{function}\n"), x)
    held = [text for text in small if "load_packed" in text]
    assert bool(held) == (shared_rows.HELD_REGISTERS > 0)
    assert all(("hide(" in text) == (dtype.itemsize == 2) for text in held)
    assert all(("COOPERATIVE_KERNEL" in text) == (together > 1) for text in held)
    # what threads exchange for a row may still be read when those for the next one begin
    assert all("shared + iteration % 2" in text for text in held if together == 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accesses", [1024, 2050])
@pytest.mark.parametrize(
    "result", ["torch.layer_norm(x, [x.size(-1)], w, b)", "x * (x * x).mean(-1, True).rsqrt() * w"]
)
def test_what_all_rows_share_is_kept(small, device, result, accesses, dtype):
    """Shared memory has a block's part of a weight from its first row to its last."""
    fused = Fused(f"def f(x, w, b):\n    return {result}\n")
    check(fused, *rows_of(accesses * (16 // dtype.itemsize), 23, device, dtype))
    kept = [text for text in small if "load_packed" in text]
    assert bool(kept) == (shared_rows.HELD_REGISTERS > 0)
    assert all(text.count("_prefetched = ") == (3 if "b)" in result else 2) for text in kept)


def test_rows_of_cut_accesses_are_not_held(small, device):
    check(Fused(ROWS), *rows_of(5001, 23, device))
    assert not any("load_packed" in text for text in small)


@pytest.mark.parametrize(
    "result", ["torch.softmax(x[0] * v, -1)", "torch.layer_norm(x[:1].expand(23, 8192), [8192], x[1], x[2])"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_all_rows_share_all_that_is_read_nothing_is_held(small, device, result, dtype):
    x = tensor(3, 8192, device=device, dtype=dtype)
    v = tensor(23, 1, device=device, dtype=dtype, seed=1)
    check(Fused(f"def f(x, v):\n    return {result}\n"), x, v)
    assert not any("load_packed" in text for text in small)


@pytest.mark.parametrize("rows, held", [(10, False), (11, True), (20, True), (21, True)])
@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_known_number(small, device, rows, held, together, dtype):
    """A kernel for one shape, in which the number of iterations is a constant. On ten multiprocessors."""
    columns = 1024 * together * (16 // dtype.itemsize)
    rows = rows if together == 1 else -(-rows // 2)
    source = f"def f(x):\n    return torch.softmax(x.view({rows}, {columns}) * 0.5, -1)\n"
    check(Fused(source), tensor(rows * columns, device=device, dtype=dtype))
    assert any("load_packed" in text for text in small) == (held and shared_rows.HELD_REGISTERS > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows, columns", [(1, 1024), (2, 1024), (3, 1000), (2, 9000)])
def test_few_rows_of_known_number_with_sums_over_them(small, device, rows, columns, dtype):
    """Blocks have one row each, and no loop over rows, whose variable nothing may name."""
    source = f"def f(x):\n    y = x.view({rows}, {columns})\n    z = y - y.mean(-1, True)\n"
    check(
        Fused(source + "    return z, z.sum(0), y.sum(0)\n"),
        tensor(rows * columns, device=device, dtype=dtype),
    )


def test_results_may_take_the_memory_of_held_rows(small, device, monkeypatch):
    """Of what dies with them: a row is fetched before the one in front of it is stored."""
    found, plan = [], pipeline.reuses
    monkeypatch.setattr(pipeline, "reuses", lambda *given: found.append(plan(*given)) or found[-1])
    source = "def f(x, w):\n    return torch.softmax(torch.matmul(x, w) * 0.5, -1)\n"
    check(Fused(source), tensor(23, 8, device=device), tensor(8, 4096, device=device, seed=1))
    assert any(found)
    assert any("load_packed" in text for text in small) == (shared_rows.HELD_REGISTERS > 0)


@pytest.mark.parametrize("sizes", [(3, 5, 40, 52), (7, 2, 33, 31), (2, 9, 6000)], ids=str)
def test_channels_of_a_batch_norm(sources, device, sizes):
    check_channels(sizes, device)


def test_dropout_draws_what_one_block_would(sources, device, monkeypatch):
    check_dropout(3, device, monkeypatch)
