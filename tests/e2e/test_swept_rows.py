"""Long rows of 16 bits that begin anywhere: each block reads its rows in rounds, of which the last one alone
has bounds."""

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.programs import build, kernels, stages, tensor
from kit.support import assert_matches
from tsfuser.codegen.emit import source
from tsfuser.schedule.machine import GPU

pytestmark = [pytest.mark.usefixtures("fused_or_error")]
ROWS = 2 * GPU.multiprocessors  # from which on a block has a row of its own


def statistics(b, x):
    """The maximum of each row, and the sum of the exponentials of the distances from it."""
    most = b.reduce("max", "max", x, [1], True, x.dtype)
    distance = b.pointwise("sub", (x, most), x.dtype)
    return most, b.reduce("sum", "sum", b.pointwise("exp", (distance,), x.dtype), [1], True, x.dtype)


@pytest.mark.parametrize("strides, vector", [(None, 1), ((50264, 1), 8)])
def test_whole_rounds_have_no_bounds(strides, vector):
    x = tensor(8192, 50257, dtype="bfloat16", strides=strides)
    [stage] = stages(*build(statistics, x))[0]
    assert not stage.params.cooperative and not stage.params.persistent and stage.params.vector == vector
    text = source(kernels(statistics, x)[0])
    rounds = [part.split("\n  }\n")[0] for part in text.split("r < r_whole; ++r) {")[1:]]
    assert len(rounds) == 2  # of the maximum and of the sum
    for whole in rounds:
        assert "i1_size" not in whole and "count" not in whole
        assert ("load<8>(" in whole) == (vector == 8)
    assert text.count("args.i1_size") > 2  # in the rounds that are left


@pytest.mark.parametrize(
    "sizes, dtype, swept",
    [
        ((ROWS, 50257), "bfloat16", True),
        ((ROWS - 1, 50257), "bfloat16", False),  # idle multiprocessors
        ((8192, 50256), "bfloat16", False),  # wide accesses
        ((8192, 50257), "float32", False),  # shared memory fetches them
        ((8192, 2049), "bfloat16", False),  # registers hold them
    ],
    ids=str,
)
def test_which_rows_are_read_in_each_sweep(sizes, dtype, swept):
    [stage] = stages(*build(statistics, tensor(*sizes, dtype=dtype)))[0]
    assert stage.params.persistent != swept


@pytest.mark.parametrize("columns, pitch", [(8193, 8193), (8193, 8200), (4099, 4099), (8192 + 4096, 12289)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_losses_of_long_rows(device, dtype, columns, pitch):
    """With infinities and NaN in some rows; one fills whole rounds."""

    def loss(x, labels):
        return F.cross_entropy(x.float(), labels, reduction="none"), x.float().amax(1)

    torch.manual_seed(columns)
    x = torch.randn(ROWS, pitch).to(device, dtype)[:, :columns]
    x[3, 17], x[5, columns - 1], x[6] = float("inf"), float("nan"), float("-inf")
    labels = torch.randint(columns, (ROWS,)).to(device)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="tsfuser")
    with torch.no_grad():
        for _ in range(2):
            found = compiled(x, labels)
        for mine, eager, exact in zip(found, loss(x, labels), loss(x.double(), labels), strict=True):
            assert_matches(mine, eager, exact, ops=columns)
    assert not tsfuser.stats()["fallbacks"]
