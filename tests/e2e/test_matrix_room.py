"""Products of two matrices of 16 bits whose rows do not hold whole accesses: logits of 50,257 columns."""

import contextlib
import copy
import itertools
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from kit.allocations import allocations
from kit.support import assert_matches
from tsfuser.frontends.dynamo import watch
from tsfuser.frontends.dynamo.program import compile_graph
from tsfuser.frontends.dynamo.settings import Settings
from tsfuser.graph import matmul_operands, matrix_room, operand_room

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]
PRODUCT, ROOM = "tsfuser::product_of_room", "tsfuser::with_room"
NARROW = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Room on all devices, in products of any size, also where copies do not pay."""
    monkeypatch.setattr(operand_room, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(operand_room, "LEAST", 1)
    monkeypatch.setattr(matrix_room, "LEAST_OPERATIONS", 0)
    monkeypatch.setattr(matmul_operands, "LEAST", 1)


@contextlib.contextmanager
def recorded():
    """Counts the ops of torch that run in the block, by name."""
    found = Counter()
    with torch.profiler.profile() as profile:
        yield found
    found.update(event.name for event in profile.events())


# ---- the product itself


def product_of(rank, turned, may_have_gaps, least, bias):
    """A function of two matrices, which are transposed where `turned` says so, and of a bias."""
    given = "%a : Tensor, %b : Tensor" + ", %bias : Tensor" * bias
    none = "" if bias else "  %bias : NoneType = prim::Constant()\n"
    graph = torch._C.parse_ir(
        f"graph({given}):\n{none}"
        f"  %s : bool = prim::Constant[value={int(turned[0])}]()\n"
        f"  %t : bool = prim::Constant[value={int(turned[1])}]()\n"
        f"  %p : bool = prim::Constant[value={int(may_have_gaps)}]()\n"
        f"  %l : int = prim::Constant[value={least}]()\n"
        f"  %y : Tensor = {PRODUCT}(%a, %b, %bias, %s, %t, %p, %l)\n  return (%y)"
    )
    return torch._C._create_function_from_graph("product", graph)


def operand(rows, columns, turned, layout, dtype, device, batch=()):
    """A matrix, transposed in memory if `turned`, of the given memory."""
    sizes = (*batch, *((columns, rows) if turned else (rows, columns)))
    x = torch.randn(sizes).to(device, dtype)
    if layout == "dense":
        return x
    if layout == "padded":  # rows begin at whole accesses, and nobody says what lies between them
        whole = torch.full((*sizes[:-1], -(-sizes[-1] // 8) * 8), math.nan).to(device, dtype)
        part = whole[..., : sizes[-1]]
        part.copy_(x)
        return part
    memory = torch.full((x.numel() + 1,), math.nan).to(device, dtype)  # begins at no whole access
    return memory[1:].view(sizes).copy_(x)


SIZES = [(24, 32, 57), (24, 57, 32), (57, 24, 32), (33, 57, 41), (1, 32, 57), (24, 32, 1), (24, 1, 57)]
TURNS = list(itertools.product((False, True), repeat=2))
LAYOUTS = ["dense", "padded", "shifted"]


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("m, k, n", SIZES)
def test_products_are_eagers(device, m, k, n, batch):
    """Of all layouts, whatever a product may copy, and whether it may give a part."""
    torch.manual_seed(m * k + n)
    for number, (left, right, may, least) in enumerate(
        itertools.product(LAYOUTS, LAYOUTS, (False, True), (-1, 0))
    ):
        turned, dtype = TURNS[number % 4], NARROW[number % 2]
        a = operand(m, k, turned[0], left, dtype, device, batch)
        b = operand(k, n, turned[1], right, dtype, device, batch)
        got = product_of(len(batch) + 2, turned, may, least, bias=False)(a, b)
        x = a.transpose(-2, -1) if turned[0] else a
        y = b.transpose(-2, -1) if turned[1] else b
        assert_matches(got, x @ y, x.double() @ y.double(), ops=1, strides=not may)
        if may and least == 0 and min(m, n) > 1 and n % 8:
            assert got.stride(-2) % 8 == 0 and got.stride(-1) == 1


@pytest.mark.parametrize("least", [-1, 0])
@pytest.mark.parametrize("may_have_gaps", [False, True])
@pytest.mark.parametrize("m, k, n", SIZES)
def test_products_with_a_bias_are_eagers(device, m, k, n, may_have_gaps, least):
    for dtype, turned in zip(NARROW, ((False, True), (True, False))):
        a = operand(m, k, turned[0], "dense", dtype, device)
        b = operand(k, n, turned[1], "dense", dtype, device)
        bias = torch.randn(n).to(device, dtype)
        got = product_of(2, turned, may_have_gaps, least, bias=True)(a, b, bias)
        x, y = (a.t() if turned[0] else a), (b.t() if turned[1] else b)
        exact = torch.addmm(bias.double(), x.double(), y.double())
        assert_matches(got, torch.addmm(bias, x, y), exact, ops=1, strides=not may_have_gaps)


@pytest.mark.parametrize("least, copies", [(-1, 0), (15, 2), (16, 0)])
def test_a_copy_has_to_pay(device, least, copies):
    """Of 7,296 bytes of both operands, for 109,440 operations."""
    a, b = (torch.randn(s).to(device).half() for s in ((24, 57), (57, 40)))
    product = product_of(2, (False, False), True, least, bias=False)
    product(a, b)
    with recorded() as ops:
        product(a, b)
    assert ops["aten::copy_"] == copies and ops["aten::mm"] == 1


def test_columns_that_a_weight_lacks_are_a_product_of_their_own(device):
    """No copy of a weight of 57 rows, however few rows the other operand has."""
    a, b = (torch.randn(s).to(device).half() for s in ((2, 32), (57, 32)))
    product = product_of(2, (False, True), True, -1, bias=False)
    with recorded() as ops:
        got = product(a, b)
    assert ops["aten::copy_"] == 0 and ops["aten::mm"] == 2 and got.stride() == (64, 1)
    assert_matches(got, a @ b.t(), a.double() @ b.double().t(), ops=1, strides=False)


@pytest.mark.each_value(("turned", "what"))
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("turned", TURNS, ids=str)
def test_what_is_not_finite_stays_where_it_is(device, turned, what):
    """Also where memory between rows holds NaN."""
    for layouts in itertools.product(LAYOUTS, repeat=2):
        a = operand(17, 57, turned[0], layouts[0], torch.float16, device)
        b = operand(57, 41, turned[1], layouts[1], torch.float16, device)
        x, y = (a.t() if turned[0] else a), (b.t() if turned[1] else b)
        x[3, 56], y[2, 40] = what, what
        with torch.backends.mkldnn.flags(enabled=False):
            got = product_of(2, turned, True, 0, bias=False)(a, b)
        exact = x.double() @ y.double()
        assert torch.equal(got.isfinite(), exact.isfinite()) and torch.equal(got.isnan(), exact.isnan())


def test_a_product_that_autograd_records_is_plain(device):
    a, b = (torch.randn(s).to(device).half().requires_grad_() for s in ((24, 32), (32, 57)))
    y = product_of(2, (False, False), True, 0, bias=False)(a, b)
    assert y.stride() == (57, 1)
    y.float().sum().backward()
    assert_matches(a.grad, torch.ones(24, 57).to(device).half() @ b.detach().t(), ops=1)


# ---- behind torch.compile


class Head(nn.Module):
    """The end of a language model."""

    def __init__(self, width=32, words=57, bias=False, returns=False):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=bias)
        self.returns = returns

    def forward(self, x, labels):
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)).float(), labels.view(-1))
        return (loss, logits) if self.returns else loss


def step(model, x, labels, device, dtype):
    """What the model returns under autocast, and all gradients."""
    leaf = x.detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    with torch.autocast(device, dtype=dtype or NARROW[0], enabled=dtype in NARROW):
        found = model(leaf, labels)
    results = found if isinstance(found, tuple) else (found,)
    results[0].backward()
    return [*(r.detach() for r in results), leaf.grad, *(p.grad for p in model.parameters())]


def graphs_of(outcomes):
    """The kinds of the nodes of compiled graphs, those in groups behind their group."""
    return [
        [node.kind() for node in _all_nodes(program.graph)]
        for outcome in outcomes
        for program, _ in outcome.programs.values()
    ]


def _all_nodes(block):
    for node in block.nodes():
        yield node
        if node.hasAttribute("Subgraph"):
            yield from _all_nodes(node.g("Subgraph"))


def compare(model, inputs, device, dtype, dynamic=False):
    """Compiled steps, which are eager's. The kinds of the nodes of forward and backward."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="tsfuser", dynamic=dynamic)
    with watch.watching() as (_, outcomes):
        for x, labels in inputs:
            got = step(compiled, x, labels, device, dtype)
            eager = step(model, x, labels, device, dtype)
            wide = copy.deepcopy(model).double()
            exact = step(wide, x.double(), labels, device, None)
            for mine, theirs, true in zip(got, eager, exact, strict=True):
                assert_matches(mine, theirs, true, ops=2, precision=dtype)
    return graphs_of(outcomes)


def examples(device, rows=24, width=32, words=57, count=2):
    torch.manual_seed(rows)
    return [
        (torch.randn(2, rows, width).to(device), torch.randint(words, (2, rows)).to(device))
        for _ in range(count)
    ]


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_language_model_heads(device, dtype, bias, returns):
    model = Head(bias=bias, returns=returns).to(device)
    forward, backward = compare(model, examples(device), device, dtype)
    assert forward.count(PRODUCT) == 1 and forward.count(ROOM) == 1  # the weight's, for the backward
    assert ("aten::contiguous" in forward or "tsfuser::ordered" in forward) == returns
    assert backward.count(PRODUCT) == 2 and backward.count(ROOM) == 1  # the gradient's, for both products
    assert not {"aten::mm", "aten::addmm"} & {*forward, *backward}


def test_the_backward_makes_no_copy(device, monkeypatch):
    """The forward has stored the weight with zeros, which its backward reads; the gradient has zeros, too."""
    monkeypatch.setattr(matrix_room, "LEAST_OPERATIONS", -1)
    model = Head().to(device)
    compiled = torch.compile(model, backend="tsfuser")
    (x, labels), *_ = examples(device)
    for _ in range(2):
        step(compiled, x, labels, device, torch.bfloat16)
    with recorded() as ops:
        step(compiled, x, labels, device, torch.bfloat16)
    assert ops["aten::mm"] == 3 and not ops["aten::copy_"]


def test_no_group_stores_logits_or_their_gradient_twice(device):
    model = Head(bias=True).to(device)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="tsfuser")
    (x, labels), *_ = examples(device)
    with watch.watching() as (_, outcomes):
        step(compiled, x, labels, device, torch.bfloat16)
    for outcome in outcomes:
        for program, _ in outcome.programs.values():
            for group in program.graph.findAllNodes("prim::CudaFusionGroup"):
                subgraph = group.g("Subgraph")
                returned = {v.debugName() for v in subgraph.outputs()}
                roomed = [n.inputsAt(0).debugName() for n in subgraph.nodes() if n.kind() == ROOM]
                assert returned.isdisjoint(roomed)


@torch.library.custom_op("matrix_room::row_step", mutates_args=())
def row_step(x: torch.Tensor) -> torch.Tensor:
    return torch.full((), float(x.stride(0)), device=x.device)


@row_step.register_fake
def _(x):
    return torch.empty((), device=x.device)


class Looks(torch.autograd.Function):
    """A backward that depends on the strides of the saved tensor."""

    @staticmethod
    def forward(ctx, z, how):
        ctx.save_for_backward(z)
        ctx.how = how
        return torch.sin(z.float())

    @staticmethod
    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        if ctx.how == "op":
            return g * row_step(z), None
        if ctx.how == "view":
            return g * row_step(z[1:].detach()), None
        if ctx.how == "as_strided":
            return g * torch.as_strided(z, (4, 10), (20, 2)).float().sum(), None
        return g * torch.cos(z.float()), None


@pytest.mark.parametrize("how", ["op", "view", "as_strided", "none"])
def test_what_is_saved_has_gaps_only_where_no_stride_is_read(device, how):
    def program(x, w):
        return (Looks.apply(x @ w, how) * 0.5).sum()

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="tsfuser")
    generator = torch.Generator().manual_seed(2)
    x, w = (torch.randn(s, generator=generator).to(device).half() for s in ((24, 32), (32, 57)))
    saved = []
    for function in (compiled, compiled, program):
        leaves = [v.clone().requires_grad_() for v in (x, w)]
        with torch.autograd.graph.saved_tensors_hooks(lambda v: saved.append(v.stride()) or v, lambda v: v):
            loss = function(*leaves)
        loss.backward()
        found = [loss.detach(), *(v.grad for v in leaves)]
        if function is compiled:
            got, strides = found, list(saved)
    for mine, theirs in zip(got, found, strict=True):
        assert_matches(mine, theirs, ops=8)
    assert ((64, 1) in strides) == (how == "none")


def test_what_the_program_gets_a_view_of_is_not_saved_once_more(device):
    """With gaps it would have memory of its own."""

    def program(x, w):
        y = x @ w
        return Looks.apply(y, "none").sum() * 0.5, y.view(2, 12, 57)

    torch._dynamo.reset()
    compiled = torch.compile(program, backend="tsfuser")
    leaves = [torch.randn(s).to(device).half().requires_grad_() for s in ((24, 32), (32, 57))]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda v: saved.append(v) or v, lambda v: v):
        loss, view = compiled(*leaves)
    [product] = [v for v in saved if v.shape == (24, 57)]
    assert product.data_ptr() == view.data_ptr() and view.is_contiguous()
    loss.backward()


@pytest.mark.parametrize("rows, buffers", [(24, 1), (23, 2)])
def test_what_has_room_is_written_over_a_result_with_gaps(device, rows, buffers):
    """Where that is as large in memory: behind 23 rows it has no zeros."""

    def middle(x, v, w):
        return (torch.tanh((x @ v) * 2.0) @ w,)

    torch.manual_seed(rows)
    given = [torch.randn(s).to(device).half() for s in ((rows, 64), (64, 249), (249, 64))]
    run = compile_graph(make_fx(middle)(*given), Settings())
    for _ in range(2):
        (got,) = run(list(given))
    assert_matches(got, middle(*given)[0], middle(*(x.double() for x in given))[0], ops=4)
    own, _ = allocations(lambda: torch.mm(given[0], given[2].t()), device)
    if own > (rows * 249 * 2) + 512:
        pytest.skip("torch's products allocate more than their results on this processor")
    made, _ = allocations(lambda: run(list(given)), device)
    copies, wide, result = 2 * 64 * 256 * 2, rows * 256 * 2, rows * 64 * 2
    zeros = (24 - rows) * 256 * 2 * (buffers - 1)
    assert made - copies - result - zeros <= buffers * wide + 512 * 4  # CUDA rounds sizes up
    assert made - copies - result - zeros > (buffers - 1) * wide


def test_other_sizes_of_a_dynamic_graph(device):
    model = Head().to(device)
    inputs = [*examples(device, 24, count=1), *examples(device, 25, count=1), *examples(device, 7, count=1)]
    inputs += examples(device, 1, count=1)
    compare(model, inputs, device, torch.bfloat16, dynamic=True)


@pytest.mark.parametrize("first", [56, 57])
def test_a_result_that_gets_columns_to_fill(device, first):
    """Strides are eager's whether the traced call had whole accesses or not."""

    def scores(q, k):
        s = q @ k.t()
        return s, s.t(), torch.relu(s) * 2.0, s.reshape(-1)[3:]

    torch._dynamo.reset()
    compiled = torch.compile(scores, backend="tsfuser", dynamic=True)
    for columns in (first, 57, 56, 50, 1, 58):
        q, k = (torch.randn(n, 32).to(device).half() for n in (24, columns))
        for mine, theirs, true in zip(compiled(q, k), scores(q, k), scores(q.double(), k.double())):
            assert_matches(mine, theirs, true, ops=1)


class Odd(nn.Module):
    """Rows of 57 elements everywhere, whose products are read by groups, views and nobody."""

    def __init__(self, width=57):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, 41, bias=False)
        self.third = nn.Linear(41, width)

    def forward(self, x, labels):
        y = torch.tanh(self.first(F.gelu(x)))
        z = self.second(y * 2.0)
        flat = z.reshape(-1)[: z.numel() // 2].sigmoid()
        last = self.third(torch.relu(z))
        return (flat.float().sum() + last.float().square().mean()), z.transpose(0, 1), last.view(-1)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", NARROW)
def test_odd_features(device, dtype, dynamic):
    torch.manual_seed(3)
    compare(Odd().to(device), examples(device, 19, 57), device, dtype, dynamic)


@pytest.mark.parametrize("bias", [False, True])
def test_inference_with_weights_of_16_bits(device, bias):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(57, 57, bias=bias), nn.GELU(), nn.Linear(57, 41, bias=bias), nn.ReLU())
    model.to(device).half()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="tsfuser")
    with torch.no_grad():
        for rows in (33, 33, 1, 40):
            x = torch.randn(rows, 57).to(device).half()
            assert_matches(compiled(x), model(x), copy.deepcopy(model).double()(x.double()), ops=2)


def test_a_weight_that_changes_is_read_anew(device):
    model = nn.Linear(57, 41).to(device).half()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: torch.relu(model(x)), backend="tsfuser")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(33, 57).to(device).half()
            assert_matches(compiled(x), torch.relu(model(x)), ops=1)
            model.weight.mul_(-1.5)
            model.weight.data = model.weight.data * 2.0


def test_what_cannot_be_seen_is_not_there(device):
    """Results have the memory of eager's: strides, and no more elements than these reach."""
    model = Head(returns=True).to(device)
    compiled = torch.compile(model, backend="tsfuser")
    (x, labels), *_ = examples(device)
    _, logits, *gradients = step(compiled, x, labels, device, torch.bfloat16)
    assert logits.is_contiguous() and all(g.is_contiguous() for g in gradients)


def test_neither_few_elements_nor_even_sizes_nor_32_bits(device, monkeypatch):
    for words, dtype, least in ((64, torch.bfloat16, 1), (57, torch.bfloat16, 10**6), (57, torch.float32, 1)):
        monkeypatch.setattr(operand_room, "LEAST", least)
        for kinds in compare(Head(words=words).to(device), examples(device, words=words), device, dtype):
            assert PRODUCT not in kinds and ROOM not in kinds
