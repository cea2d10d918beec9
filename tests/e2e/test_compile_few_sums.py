"""Sums at few places, as the gradient of a table of token types: reductions side by side, without atomics."""

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.support import assert_matches
from tsfuser.frontends.dynamo import watch
from tsfuser.frontends.dynamo.groups import added_at
from tsfuser.frontends.dynamo.tracing import embeddings

pytestmark = [pytest.mark.usefixtures("forgotten", "fused_or_error")]
SUMS = "tsfuser::sums_at"


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(added_at, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(embeddings, "SORTING", ("cpu", "cuda"))


def gradients(function, given):
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in given]
    result = function(*leaves)
    wanted = [x for x in leaves if x.is_floating_point()]
    torch.manual_seed(4)
    weights = torch.randn(result.shape, dtype=torch.float64).to(result)
    return [result.detach(), *torch.autograd.grad((result * weights).sum(), wanted)]


def check(function, given, ops=64):
    """Results and gradients are eager's, or nearer to float64. The kinds of all nodes."""
    compiled = torch.compile(function, backend="tsfuser", dynamic=False)
    with watch.watching() as (_, outcomes):
        for _ in range(2):
            mine = gradients(compiled, given)
    wide = [x.double() if x.is_floating_point() else x for x in given]
    for got, eager, exact in zip(mine, gradients(function, given), gradients(function, wide), strict=True):
        assert_matches(got, eager, exact, ops=ops)
        assert got.stride() == eager.stride()
    found = []
    for outcome in outcomes:
        for program, _ in outcome.programs.values():
            groups = [g.g("Subgraph") for g in program.graph.findAllNodes("prim::CudaFusionGroup")]
            found += [node.kind() for block in (program.graph, *groups) for node in block.nodes()]
    return found


def embedded(words, kinds, w, b, ids, types):
    return F.layer_norm(F.embedding(ids, words) + F.embedding(types, kinds), w.shape, w, b)


@pytest.mark.each_value(("rows", "width", "dtype"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [5, 24, 129])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_a_table_of_token_types(device, rows, width, dtype):
    torch.manual_seed(rows * width)
    tables = [torch.randn(n, width, dtype=dtype) for n in (40, rows)]
    given = [*tables, torch.rand(width, dtype=dtype), torch.rand(width, dtype=dtype)]
    given += [torch.randint(n, (3, 50)) for n in (40, rows)]
    kinds = check(embedded, [x.to(device) for x in given])
    assert SUMS in kinds and "tsfuser::add_at" in kinds


def test_more_rows_are_added_at_their_places(device):
    given = [torch.randn(5, 8), torch.randint(5, (30,))]
    kinds = check(lambda table, i: torch.sin(F.embedding(i, table)), [x.to(device) for x in given])
    assert SUMS not in kinds


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_along_each_dim(device, dim, index_dtype):
    def added(x, index):
        sizes = list(x.shape)
        sizes[dim] = 3
        return x.new_zeros(sizes).index_add(dim, index, torch.exp(x) + 1) * 2

    torch.manual_seed(dim)
    x = torch.randn(4, 5, 6).to(device)
    index = torch.randint(3, (x.shape[dim],)).to(device, index_dtype)
    assert SUMS in check(added, [x, index])


LAYOUTS = {
    "transposed": lambda: torch.randn(12, 40).t(),
    "expanded": lambda: torch.randn(40, 1).expand(40, 12),
    "strided": lambda: torch.randn(80, 24)[::2, ::2],
    "shifted": lambda: torch.randn(40 * 12 + 1)[1:].view(40, 12),
    "one column": lambda: torch.randn(50, 1),
    "one": lambda: torch.randn(1, 12),
    "none": lambda: torch.randn(0, 12),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_sizes(device, layout):
    def added(source, index):
        return source.new_zeros(2, source.shape[1]).index_add(0, index, torch.sin(source) * 2) + 1

    torch.manual_seed(3)
    source = LAYOUTS[layout]()
    index = torch.randint(2, (2 * len(source),))[::2]
    compiled = torch.compile(added, backend="tsfuser", dynamic=False)
    given = source.to(device), index.to(device)
    assert_matches(compiled(*given), added(*given), added(given[0].double(), given[1]), ops=64)


def test_indices_that_count_from_the_end(device):
    """The gradient of a row that is read by several indices."""
    given = [torch.randn(2, 16), torch.tensor([-1, 0, 1, -2, 0, 0])]
    assert SUMS in check(lambda x, index: torch.relu(x[index] + 1) * 3, [x.to(device) for x in given])


def test_padding_gets_nothing(device):
    def program(table, ids):
        return torch.tanh(F.embedding(ids, table, padding_idx=1))

    given = [torch.randn(3, 8), torch.randint(3, (30,))]
    assert SUMS in check(program, [x.to(device) for x in given])


def test_numbers_that_are_none_stay_in_their_row(device):
    def added(source, index):
        return source.new_zeros(3, 4).index_add(0, index, source * 2.0)

    source = torch.ones(6, 4, device=device)
    source[1, 0], source[2, 1] = float("nan"), float("inf")
    index = torch.tensor([0, 1, 1, 2, 2, 0], device=device)
    found = torch.compile(added, backend="tsfuser")(source, index)
    torch.testing.assert_close(found, added(source, index), rtol=0, atol=0, equal_nan=True)


def test_an_index_out_of_range_raises(device):
    if device == "cuda":
        pytest.skip("an assertion on the device ends the process")

    def added(source, index):
        return source.new_zeros(2, 4).index_add(0, index, source * 2.0)

    compiled = torch.compile(added, backend="tsfuser")
    source = torch.ones(3, 4, device=device)
    compiled(source, torch.tensor([0, 1, 1], device=device))
    for wrong in (2, -1):
        with pytest.raises((IndexError, RuntimeError)):
            compiled(source, torch.tensor([0, wrong, 1], device=device))


def test_many_16_bit_ones_are_added_up_in_float32(device):
    def added(source, index):
        return source.new_zeros(2, 4).index_add(0, index, source * 1.0)

    source, index = (
        torch.ones(4000, 4, dtype=torch.bfloat16, device=device),
        torch.zeros(4000, dtype=torch.int64),
    )
    found = torch.compile(added, backend="tsfuser")(source, index.to(device))
    assert (found[0] == 4000).all() and (found[1] == 0).all()


def test_the_op_runs_without_a_group(device):
    """As where a call is refused."""
    source, index = torch.randn(9, 5, device=device), torch.randint(3, (9,), device=device)
    found = torch.ops.tsfuser.sums_at(source.bfloat16(), 0, 3, index)
    exact = torch.zeros(3, 5, device=device, dtype=torch.float64).index_add(
        0, index, source.bfloat16().double()
    )
    assert found.dtype == torch.bfloat16 and tsfuser.stats()["launches"] == 0
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2)
