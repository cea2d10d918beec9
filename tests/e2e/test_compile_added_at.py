"""Sums of rows at places that an index names, added by the group that computes the rows."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kit.allocations import allocations
from kit.programs import build, kernels, stages, tensor
from kit.support import assert_matches
from tsfuser.codegen.emit import source
from tsfuser.frontends.dynamo import watch
from tsfuser.frontends.dynamo.groups import added_at
from tsfuser.frontends.dynamo.rewrites import indexing
from tsfuser.frontends.dynamo.tracing import embeddings
from tsfuser.ir import text
from tsfuser.ir.verify import verify
from tsfuser.ops.lookup import add_at
from tsfuser.segment import records

pytestmark = [pytest.mark.usefixtures("fused_or_error")]
ADD = "tsfuser::add_at"


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """As on a GPU; also of few rows, see test_compile_few_sums."""
    monkeypatch.setattr(indexing, "FEW", 0)
    monkeypatch.setattr(added_at, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(embeddings, "SORTING", ("cpu", "cuda"))


def nodes_of(outcomes):
    """The kinds of nodes of each graph, those in groups as well."""
    found = []
    for outcome in outcomes:
        for program, _ in outcome.programs.values():
            graph = program.graph
            groups = [g.g("Subgraph") for g in graph.findAllNodes("prim::CudaFusionGroup")]
            found.append([node.kind() for block in (graph, *groups) for node in block.nodes()])
    return found


def check(function, given, device, ops=16, dynamic=False, calls=2):
    """Results and gradients are eager's, or nearer to float64. The kinds of the nodes of each graph."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="tsfuser", dynamic=dynamic)
    with watch.watching() as (_, outcomes):
        for _ in range(calls):
            mine = outcome(compiled, given)
    wide = [x.double() if x.is_floating_point() else x for x in given]
    for got, eager, exact in zip(mine, outcome(function, given), outcome(function, wide), strict=True):
        assert_matches(got, eager, exact, ops=ops)
    return nodes_of(outcomes)


def outcome(function, given):
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in given]
    result = function(*leaves)
    wanted = [x for x in leaves if x.is_floating_point()]
    torch.manual_seed(4)
    weights = torch.randn(result.shape, dtype=torch.float64).to(result)
    gradients = torch.autograd.grad((result * weights).sum(), wanted, allow_unused=True)
    return [result.detach(), *(g for g in gradients if g is not None)]


def messages(x, w, source, target):
    """The sums of the messages that the nodes of a graph get along its edges."""
    m = torch.tanh(x[source] * w[:, None])
    return torch.zeros_like(x).index_add(0, target, m)


def spread(x, w, source, target):
    """The same by an index of each element, as graph networks have it."""
    m = torch.sigmoid(x[source] * w[:, None])
    return x.new_zeros(x.shape).scatter_add(0, target[:, None].expand(-1, x.shape[1]), m)


def graph(device, nodes, edges, width, dtype=torch.float32):
    torch.manual_seed(nodes * edges + width)
    x, w = torch.randn(nodes, width), torch.rand(edges)
    ends = [torch.randint(nodes, (edges,)) for _ in range(2)]
    return [x.to(device, dtype), w.to(device, dtype), *(e.to(device) for e in ends)]


SIZES = [(50, 333, 24), (1, 7, 5), (9, 40, 1), (64, 64, 129), (3, 1000, 4)]


@pytest.mark.parametrize("function", [messages, spread])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sums_along_edges(device, function, sizes):
    forward, backward = check(function, graph(device, *sizes), device)
    assert ADD in forward and ADD in backward
    assert not {"aten::index_add", "aten::index_add_", "aten::scatter_add"} & {*forward, *backward}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("function", [messages, spread])
def test_dtypes(device, function, dtype):
    """Sums of 16 bits are added up in float32: those of many ones are not stuck at 256."""
    forward, backward = check(function, graph(device, 20, 300, 8, dtype), device, ops=32)
    assert ADD in forward and ADD in backward
    compiled = torch.compile(function, backend="tsfuser")
    x, w, _, _ = graph(device, 2, 4000, 4, dtype)
    ends = torch.zeros(4000, dtype=torch.int64, device=device)
    found = compiled(x.fill_(20), w.fill_(1), ends, ends)
    assert (found[0] - 4000).abs().max() < 1e-3 and (found[1] == 0).all()


def test_other_sizes_of_a_dynamic_graph(device):
    torch._dynamo.reset()
    compiled = torch.compile(messages, backend="tsfuser", dynamic=True)
    with watch.watching() as (_, outcomes):
        for sizes in [(50, 333, 24), (51, 20, 24), (2, 9, 24), (400, 3, 24)]:
            given = graph(device, *sizes)
            for got, eager in zip(outcome(compiled, given), outcome(messages, given), strict=True):
                assert_matches(got, eager, ops=16)
    assert all(ADD in kinds for kinds in nodes_of(outcomes))


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_along_each_dim(device, dim):
    def added(x, source, index):
        return torch.zeros_like(x).index_add(dim, index, torch.exp(source) + 1)

    torch.manual_seed(dim)
    x, sizes = torch.randn(4, 5, 6).to(device), [4, 5, 6]
    sizes[dim] = 11
    index = torch.randint(x.shape[dim], (11,)).to(device)
    forward, *_ = check(added, [x, torch.randn(sizes).to(device), index], device)
    assert ADD in forward


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided", "shifted"])
def test_layouts(device, layout):
    def added(x, source, index):
        return torch.zeros_like(x).index_add(0, index, torch.sin(source) * 2)

    torch.manual_seed(3)
    source = {
        "transposed": lambda: torch.randn(12, 40).t(),
        "expanded": lambda: torch.randn(40, 1).expand(40, 12),
        "strided": lambda: torch.randn(80, 24)[::2, ::2],
        "shifted": lambda: torch.randn(40 * 12 + 1)[1:].view(40, 12),
    }[layout]()
    index = torch.randint(7, (80,))[::2]
    forward, *_ = check(added, [torch.randn(7, 12).to(device), source.to(device), index.to(device)], device)
    assert ADD in forward


def test_indices_that_count_from_the_end(device):
    """The gradient of a row that is read by several indices."""

    def read(x, index):
        return torch.relu(x[index] + 1) * 3

    x, index = torch.randn(9, 16).to(device), torch.tensor([-1, 0, 8, -9, 3, 3]).to(device)
    _, backward = check(read, [x, index], device)
    assert ADD in backward


def test_embeddings(device):
    def embedded(weight, ids):
        return F.layer_norm(F.embedding(ids, weight, padding_idx=2), [12])

    weight, ids = torch.randn(30, 12).to(device), torch.randint(30, (3, 50)).to(device)
    *_, backward = check(embedded, [weight, ids], device, ops=64)
    assert ADD in backward


@pytest.mark.parametrize("rows, index", [(1 << 20, "int32_t"), (1 << 21, "int64_t")])
def test_large_targets_have_long_indices(rows, index):
    """Of 2^30 and 2^31 elements, whatever is added to them."""

    def program(b, target, places, source):
        return add_at(b, target, 0, places, b.pointwise("mul", (source, source), source.dtype))

    given = tensor(rows, 1024), tensor(50, dtype="int64"), tensor(50, 1024)
    [kernel] = kernels(program, *given)
    assert f"const {index} at_" in source(kernel)


def test_its_texts_are_read_back():
    def program(b, target, places, source):
        return add_at(b, target, 1, places, b.pointwise("mul", (source, source), source.dtype))

    call, fusion = build(program, tensor(6, 9, 4), tensor(50, dtype="int64"), tensor(6, 50, 4))
    assert verify(fusion) is None and text.read(str(fusion)) == fusion
    [stage] = stages(call, fusion)[0]
    assert records.read(str(stage.segment)) == stage.segment
    [update] = fusion.updates
    lost = replace(fusion, ops=tuple(op for op in fusion.ops if op.output != update.at[0]))
    assert "is added is not defined" in verify(lost)


def test_the_kernel_that_adds_is_the_last_one():
    """Where one before it fails, the zeros are still zeros, to which the group's ops add then."""

    def program(b, target, places, source):
        doubled = b.pointwise("add", (source, source), source.dtype)
        result = add_at(b, target, 0, places, doubled)
        total = b.reduce("sum", "sum", doubled, [0], False, source.dtype)
        return result, doubled, b.pointwise("exp", (total,), source.dtype)

    found, _ = stages(*build(program, tensor(60, 512), tensor(5000, dtype="int64"), tensor(5000, 512)))
    adds = [any(buffer.at for buffer in stage.segment.stores) for stage in found]
    assert len(adds) > 1 and adds == [False] * (len(adds) - 1) + [True]


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -0.0])
def test_special_values(device, value):
    x, w, source, target = graph(device, 6, 30, 8)
    x[2, 3] = value
    for function in (messages, spread):
        check(function, [x, w, source, target], device)


def test_an_index_out_of_range_is_eagers_error(device):
    """On a GPU it is an assertion of the device, after which a process computes nothing."""
    if device == "cuda":
        pytest.skip("it would end the process")
    torch._dynamo.reset()
    compiled = torch.compile(messages, backend="tsfuser")
    x, w, source, target = graph(device, 6, 30, 8)
    for _ in range(2):
        compiled(x, w, source, target)
    target[4] = 6
    with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
        compiled(x, w, source, target)
    target[4] = 5
    assert_matches(compiled(x, w, source, target), messages(x, w, source, target), ops=16)


def test_no_tensor_of_what_is_added_is_made(device):
    torch._dynamo.reset()
    compiled = torch.compile(messages, backend="tsfuser")
    given = graph(device, 8, 4096, 32)
    for _ in range(2):
        compiled(*given)
    made, _ = allocations(lambda: compiled(*given), device)
    assert made < 4096 * 32 * 4 / 2


def test_deterministic_algorithms_are_torchs(device):
    torch.use_deterministic_algorithms(True)
    try:
        forward, backward = check(messages, graph(device, 9, 40, 8), device)
    finally:
        torch.use_deterministic_algorithms(False)
    assert ADD not in forward and ADD not in backward


@pytest.mark.parametrize("case", ["onto", "alpha", "returned", "read twice", "integers", "shared zeros"])
def test_what_is_left_to_torch(device, case):
    """Additions to what is not new, or that others read, or of other numbers."""

    def program(x, w, source, target):
        m, z = torch.tanh(x[source]) * w[:, None], torch.zeros_like(x)
        if case == "onto":
            return (x * 2).index_add(0, target, m)
        if case == "alpha":
            return z.index_add(0, target, m, alpha=2)
        if case == "returned":
            return torch.cat([z.index_add(0, target, m), m])
        if case == "read twice":
            return z.index_add(0, target, m) + torch.zeros_like(x).index_add(0, source, m)
        if case == "shared zeros":
            return z.index_add(0, target, m) + z
        count = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        return count.index_add(0, target, (source > 2).long()) * (x * w[0])[:, 0]

    forward, *_ = check(program, graph(device, 9, 40, 8), device)
    assert ADD not in forward or case in ("read twice", "shared zeros", "returned")


@pytest.mark.parametrize("width", [5, 64, 300])
@pytest.mark.parametrize("kind", ["sums of rows", "softmax", "normed", "of all rows", "twice"])
def test_what_depends_on_reductions(device, kind, width):
    """Rows of a reduction's results, or one number a row; two sums in one group."""

    def program(x, w, source, target):
        rows = x[source] * w[:, None]
        if kind == "sums of rows":
            return x.new_zeros(len(x)).index_add(0, target, torch.tanh(rows).sum(1))
        if kind == "softmax":
            return torch.zeros_like(x).index_add(0, target, torch.softmax(rows, 1))
        if kind == "normed":
            return torch.zeros_like(x).index_add(0, target, F.layer_norm(rows, [x.shape[1]]))
        if kind == "of all rows":
            return torch.zeros_like(x).index_add(0, target, rows - rows.mean(0))
        more = x.new_zeros(len(x) + 1, width).index_add(0, source, torch.sin(rows))
        return torch.zeros_like(x).index_add(0, target, torch.cos(rows)) + more[1:]

    forward, *_ = check(program, graph(device, 9, 40, width), device, ops=200)
    assert ADD in forward or kind == "of all rows"


@pytest.mark.parametrize("count", [0, 1])
def test_few_or_no_edges(device, count):
    for function, nodes, width in itertools.product((messages, spread), (1, 5), (1, 8)):
        check(function, graph(device, nodes, count, width), device)
