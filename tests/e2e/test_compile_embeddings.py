"""Gradients of embedding tables behind torch.compile: rows that are added where torch's op would sort."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tsfuser
from kit.support import assert_matches
from tsfuser.frontends.dynamo.tracing import embeddings
from tsfuser.frontends.dynamo.tracing.decompositions import decompositions

WHOLE = "embedding_dense_backward"


@pytest.fixture
def added(monkeypatch):
    """Rows are added on the CPU, too."""
    monkeypatch.setattr(embeddings, "SORTING", ("cuda", "cpu"))


@pytest.fixture
def deterministic():
    """Switches torch's deterministic algorithms on, until the end of the test."""
    yield lambda: torch.use_deterministic_algorithms(True)
    torch.use_deterministic_algorithms(False)


CASES = {
    "plain": (torch.float32, None, torch.int64, [(3, 7), (2, 9), (4, 5)]),
    "first": (torch.float32, 0, torch.int32, [(11,), (12,)]),
    "half": (torch.float16, -1, torch.int64, [(2, 3, 5), (2, 3, 6)]),
    "rounded": (torch.bfloat16, 3, torch.int32, [(40,), (50,)]),
    "single": (torch.float64, 2, torch.int64, [()]),
    "none": (torch.float32, 1, torch.int64, [(0, 3), (2, 3)]),
}


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten", "fused_or_error", "added")
@pytest.mark.parametrize("case", CASES)
def test_rows_are_added(case, device):
    dtype, padding, index_dtype, shapes = CASES[case]

    def function(table, indices):
        return torch.sigmoid(F.embedding(indices, table, padding_idx=padding) * 1.5)

    table = torch.randn(7, 9, device=device, dtype=dtype, requires_grad=True)
    exact = table.detach().double().requires_grad_()
    compiled = torch.compile(function, backend="tsfuser", fullgraph=True)
    for shape in shapes:
        indices = torch.randint(7, shape, device=device, dtype=index_dtype)
        gradient = torch.randn(*shape, 9, device=device, dtype=dtype)
        if indices.dim() and indices.numel():
            indices.view(-1)[:2] = 7 + padding if padding == -1 else padding or 0
        (found,) = torch.autograd.grad(compiled(table, indices), table, gradient)
        (eager,) = torch.autograd.grad(function(table, indices), table, gradient)
        (wide,) = torch.autograd.grad(function(exact, indices), exact, gradient.double())
        assert_matches(found, eager, wide, ops=100)
        if padding is not None:
            assert not found[padding].any()
    text = str(tsfuser.explain(compiled, table, indices))
    assert ("index_add_ " in text or "add_at" in text) and WHOLE not in text and "no reason" not in text


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten", "added")
def test_tables_of_one_size_and_gradients_that_are_expanded(device):
    def function(one, other, indices):
        return F.embedding(indices, one).sum() + F.embedding(indices, other).sum(0).mean()

    tables = [torch.randn(6, 4, device=device, requires_grad=True) for _ in range(2)]
    indices = torch.tensor([0, 2, 2, 5, 2], device=device)
    compiled = torch.compile(function, backend="tsfuser", fullgraph=True)
    for _ in range(2):  # what is added to has to be new in each call
        found = torch.autograd.grad(compiled(*tables, indices), tables)
        for a, b in zip(found, torch.autograd.grad(function(*tables, indices), tables)):
            assert_matches(a, b, ops=10)


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten")
def test_what_others_read_is_not_written(device):
    def function(x, i, j):
        zeros, more = x.new_zeros(6, 4), x.new_zeros(6, 4)
        kept = zeros.index_add(0, i, x)
        return kept, zeros, more.index_add(0, j, x), x.index_add(0, i, x, alpha=2), torch.sigmoid(kept)

    x = torch.randn(3, 4, device=device)
    i, j = (torch.tensor(k, device=device) for k in ([0, 2, 2], [1, 1, 0]))
    compiled, before = torch.compile(function, backend="tsfuser", fullgraph=True), x.clone()
    for _ in range(2):
        for a, b in zip(compiled(x, i, j), function(x, i, j)):
            assert_matches(a, b, ops=10)
    assert torch.equal(x, before)


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten", "added")
def test_whoever_wants_deterministic_algorithms_gets_them(deterministic, device):
    def function(table, indices):
        return torch.tanh(F.embedding(indices, table))

    table = torch.randn(6, 4, device=device, requires_grad=True)
    indices = torch.tensor([0, 2, 2, 5, 2], device=device)
    compiled = torch.compile(function, backend="tsfuser", fullgraph=True)
    compiled(table, indices).sum().backward()
    assert WHOLE not in str(tsfuser.explain(compiled, table, indices))
    deterministic()
    compiled(table, indices).sum().backward()
    assert WHOLE in str(tsfuser.explain(compiled, table, indices))


def parts(device="cuda", dtype=torch.float32, rows=50, padding=-1, by_frequency=False):
    """The ops that are traced."""
    with FakeTensorMode():
        gradient = torch.empty(2, 3, 8, device=device, dtype=dtype)
        indices = torch.empty(2, 3, device=device, dtype=torch.int64)
        graph = make_fx(
            lambda g, i: torch.ops.aten.embedding_dense_backward(g, i, rows, padding, by_frequency),
            decompositions(),
        )(gradient, indices).graph
    return [n.target.overloadpacket.__name__ for n in graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    "choices",
    [{"device": "cpu"}, {"by_frequency": True}, {"dtype": torch.bfloat16, "rows": 1 << 23}],
    ids=["cpu", "by-frequency", "large"],
)
def test_torchs_op_stays(choices):
    assert parts(**choices) == [WHOLE]


def test_torchs_op_stays_where_it_is_deterministic(deterministic):
    deterministic()
    assert parts() == [WHOLE]


def test_on_a_gpu_rows_are_added():
    assert parts(rows=1 << 23) == ["view", "new_zeros", "view", "index_add"]
    masked = ["eq", "unsqueeze", "masked_fill"]
    assert parts(padding=0) == [*masked, "view", "new_zeros", "view", "index_add"]
    added = ["_to_copy", *masked, "view", "new_zeros", "view", "index_add", "_to_copy"]
    assert parts(dtype=torch.bfloat16, padding=3) == added


BAGS = {
    "sum": ({"mode": "sum"}, torch.float64, torch.int64),
    "mean": ({"mode": "mean"}, torch.float32, torch.int32),
    "mean of some": ({"mode": "mean", "padding_idx": 2}, torch.float64, torch.int64),
    "weighted": ({"per_sample_weights": True, "mode": "sum"}, torch.float64, torch.int32),
    "to the end": ({"mode": "mean", "include_last_offset": True}, torch.float32, torch.int64),
    "half": ({"padding_idx": -1}, torch.float16, torch.int64),
}


@pytest.mark.each_value
@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten", "fused_or_error", "added")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", BAGS)
def test_rows_of_bags_are_added(case, dynamic, device):
    """Bags without rows are among them. A CPU's sums in float32 do not tell which bag a row is in."""
    choices, dtype, index_dtype = BAGS[case]
    choices = dict(choices)
    weighted = choices.pop("per_sample_weights", False)

    def function(table, indices, offsets, weights):
        each = {"per_sample_weights": weights.to(table.dtype)} if weighted else {}
        return torch.sigmoid(F.embedding_bag(indices, table, offsets, **choices, **each) * 1.5)

    table = torch.randn(7, 9, device=device, dtype=dtype, requires_grad=True)
    exact = table.detach().double().requires_grad_()
    compiled = torch.compile(function, backend="tsfuser", fullgraph=True, dynamic=dynamic)
    for count in (11, 12) if dynamic else (11,):
        indices = torch.randint(7, (count,), device=device, dtype=index_dtype)
        indices[3:5] = choices.get("padding_idx", 0) % 7
        last = [count] if "include_last_offset" in choices else []
        offsets = torch.tensor([0, 3, 3, 5, 9, *last], device=device, dtype=index_dtype)
        weights = torch.rand(count, device=device, dtype=dtype)
        given = indices, offsets, weights
        gradient = torch.randn(5, 9, device=device, dtype=dtype)
        (found,) = torch.autograd.grad(compiled(table, *given), table, gradient)
        (eager,) = torch.autograd.grad(function(table, *given), table, gradient)
        (wide,) = torch.autograd.grad(function(exact, *given), exact, gradient.double())
        assert_matches(found, eager, wide, ops=100)
    text = str(tsfuser.explain(compiled, table, *given))
    assert ("index_add_ " in text or "add_at" in text) and "_embedding_bag_backward" not in text


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten", "fused_or_error", "added")
def test_bags_in_rows_of_a_matrix(device):
    """As in DLRM: bags of one row each."""
    tables = [torch.nn.EmbeddingBag(4, 6, mode="sum").to(device).double() for _ in range(3)]
    rows = torch.randint(4, (8, 3), device=device)

    def function():
        found = torch.stack([t(r[:, None]) for t, r in zip(tables, rows.unbind(1))], 1)
        return (found @ found.mT).sum()

    compiled = torch.compile(function, backend="tsfuser")
    leaves = [table.weight for table in tables]
    for a, b in zip(torch.autograd.grad(compiled(), leaves), torch.autograd.grad(function(), leaves)):
        assert_matches(a, b, ops=200)
    assert "_embedding_bag_backward" not in str(tsfuser.explain(compiled))


@pytest.mark.graphs
@pytest.mark.usefixtures("forgotten", "added")
@pytest.mark.parametrize("choices", [{"mode": "max"}, {"scale_grad_by_freq": True}])
def test_what_torch_does_better_with_bags_is_left_to_it(choices, device):
    def function(table, indices, offsets):
        return F.embedding_bag(indices, table, offsets, **choices) * 2

    table = torch.randn(7, 9, device=device, requires_grad=True)
    given = torch.randint(7, (6,), device=device), torch.tensor([0, 2, 4], device=device)
    compiled = torch.compile(function, backend="tsfuser")
    found, eager = (torch.autograd.grad(f(table, *given).sum(), table)[0] for f in (compiled, function))
    assert_matches(found, eager, ops=20)
    assert "index_add" not in str(tsfuser.explain(compiled, table, *given))
