"""Zeros behind operands of products of matrices of 16 bits, so that the products read whole accesses."""

import math

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.native_support import group_function
from kit.support import all_graphs, assert_matches, counted, fresh, groups, kinds, no_fallback, train
from tsfuser.frontends.torchscript import passes
from tsfuser.graph import matmul_operands, matrix_room, operand_room
from tsfuser.planning.plan import Plan, verify

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]
NARROW = (torch.bfloat16, torch.float16)
ROOM, PRODUCT = "tsfuser::with_room", "tsfuser::product_of_room"


@pytest.fixture(autouse=True)
def everywhere(monkeypatch):
    """Room on all devices, behind operands of any size."""
    monkeypatch.setattr(operand_room, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(operand_room, "LEAST", 1)
    monkeypatch.setattr(matmul_operands, "LEAST", 1)
    monkeypatch.setattr(matrix_room, "LEAST_OPERATIONS", 0)


def attend(x: Tensor, bias: Tensor):
    """Attention with heads, of which the scores have a bias."""
    n, t, c = x.shape
    heads = (x * 1.5).view(n, t, 3, 2, c // 6).permute(2, 0, 3, 1, 4)
    q, k, v = heads[0], heads[1], heads[2]
    scores = torch.matmul(q * 0.25, k.transpose(-2, -1))
    scores = torch.softmax(scores + bias, -1)
    return torch.matmul(scores, v).transpose(1, 2).reshape(n, t, c // 3) * 2.0


def tensors(device, dtype, n=3, t=49, c=48, gradients=False):
    generator = torch.Generator().manual_seed(t)
    sizes = (n, t, c), (2, t, t)
    made = [torch.randn(s, generator=generator).to(device, dtype) for s in sizes]
    return [x.requires_grad_(gradients) for x in made]


def exact(function, inputs):
    return function(*(x.detach().double() for x in inputs))


def rooms(scripted):
    return [kind for g in groups(scripted) for kind in kinds(g) if kind == ROOM]


def is_used(scripted):
    return any(g.findNode(PRODUCT, True) is not None for g in all_graphs(scripted))


@pytest.mark.parametrize("dtype", NARROW)
def test_attention(device, dtype):
    x, bias = tensors(device, dtype)
    scripted = fresh(attend)
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            got = scripted(x, bias)
    assert_matches(got, attend(x, bias), exact(attend, (x, bias)), ops=1)
    assert len(rooms(scripted)) == 3  # k, what softmax gives, and v
    assert is_used(scripted)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("t", [49, 63])
def test_gradients(device, dtype, t):
    x, bias = tensors(device, dtype, t=t, gradients=True)
    scripted = fresh(attend)
    with tsfuser.fuser(), no_fallback(), passes.watching() as seen:
        out, gradients = train(scripted, (x, bias))
    want, expected = train(attend, (x, bias), calls=1)
    of_exact, exact_gradients = train(
        attend, [v.detach().double().requires_grad_() for v in (x, bias)], calls=1
    )
    for got, eager, true in zip(
        [out, *gradients], [want, *expected], [of_exact, *exact_gradients], strict=True
    ):
        assert_matches(got, eager, true, ops=2)
    for node in (n for o in seen for n in o.graph.findAllNodes("prim::CudaFusionGroup", True)):
        subgraph = node.g("Subgraph")
        returns = {v.debugName() for v in subgraph.outputs()}
        with_room = [n.inputsAt(0).debugName() for n in subgraph.nodes() if n.kind() == ROOM]
        assert returns.isdisjoint(with_room)  # what the backward reads is stored once
    made = [
        n.kind() for o in seen for kind in matmul_operands.PLAIN for n in o.graph.findAllNodes(kind, True)
    ]
    assert set(made) == set(matmul_operands.PLAIN)


def test_guards_let_gaps_pass_and_no_gradient_gets_lost(device):
    """The graph was profiled without gaps and without gradients. No fallback is fused anew."""
    scripted = fresh(attend)
    with tsfuser.fuser(), no_fallback():
        with passes.watching() as seen:
            for _ in range(2):  # inference is fused in the second call
                scripted(*tensors(device, torch.bfloat16))
            fused = len(seen)
            assert fused
            for _ in range(3):
                scripted(*tensors(device, torch.bfloat16))
        assert len(seen) == fused
        x, bias = tensors(device, torch.bfloat16, gradients=True)
        out, gradients = train(scripted, (x, bias))
    want, expected = train(attend, (x, bias), calls=1)
    for mine, theirs in zip([out, *gradients], [want, *expected], strict=True):
        assert_matches(mine, theirs, ops=2)


LATER = [(3, 51, 48), (1, 64, 48), (3, 56, 96), (2, 7, 48), (2, 1, 48), (0, 5, 48), (1, 127, 48)]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("later", LATER, ids=str)
def test_other_lengths_of_the_same_program(device, later, gradients):
    """Also multiples of 8, behind which there is nothing."""
    scripted = fresh(attend)
    for n, t, c in ((3, 49, 48), later):
        x, bias = tensors(device, torch.bfloat16, n, t, c, gradients)
        with tsfuser.fuser():
            got, of_mine = train(scripted, (x, bias)) if gradients else (scripted(x, bias), [])
            got = got if gradients else [scripted(x, bias) for _ in range(2)][-1]
        eager, of_eager = train(attend, (x, bias), calls=1) if gradients else (attend(x, bias), [])
        for mine, theirs in zip([got, *of_mine], [eager, *of_eager], strict=True):
            assert_matches(mine, theirs, ops=2)


def test_a_length_between_compiles_nothing(device):
    scripted = fresh(attend)
    with tsfuser.fuser(), no_fallback(), torch.no_grad():
        for t in (49, 50, 51):
            scripted(*tensors(device, torch.bfloat16, t=t))
        with counted() as counts:
            for t in (53, 55, 61):
                x, bias = tensors(device, torch.bfloat16, t=t)
                assert_matches(scripted(x, bias), attend(x, bias), ops=1)
    assert counts["plans_built"] == 0


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_where_it_is(device, what):
    """Zeros lie behind rows: what they are multiplied by is zeros, too. oneDNN's products for AMX spread a
    NaN into neighbouring rows, so the CPU multiplies without oneDNN here."""
    x, bias = tensors(device, torch.bfloat16)
    x[0, 3], bias[1, 5] = what, -math.inf
    scripted = fresh(attend)
    with tsfuser.fuser(), no_fallback(), torch.backends.mkldnn.flags(enabled=False):
        for _ in range(3):
            got = scripted(x, bias)
        eager = attend(x, bias)
    true = exact(attend, (x, bias))
    assert torch.equal(got.isnan(), true.isnan()) and true[1:].isnan().any() and not true[1:].isnan().all()
    assert_matches(got.nan_to_num(), eager.nan_to_num(), true.nan_to_num(), ops=1)


def returned(q: Tensor, k: Tensor):
    s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
    return s, torch.softmax(s, -1) * 2.0


def flattened(q: Tensor, k: Tensor):
    s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
    return s.view(-1), torch.softmax(s, -1) * 2.0


def flattened_inside(q: Tensor, k: Tensor):
    s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
    return torch.relu(s.view(s.size(0), -1)) * 2.0, torch.softmax(s, -1) * 2.0


def asked(q: Tensor, k: Tensor):
    s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
    return s * float(s.stride(0)), torch.softmax(s, -1) * 2.0


def asked_whether_dense(q: Tensor, k: Tensor):
    s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
    return (s * 2.0 if s.is_contiguous() else s * 3.0), torch.softmax(s, -1) * 2.0


def in_a_view(q: Tensor, k: Tensor):
    s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
    return s.transpose(0, 1), torch.softmax(s, -1) * 2.0


def written(q: Tensor, k: Tensor):
    s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
    y = torch.softmax(s, -1)
    s.add_(1.0)
    return y, s * 2.0


def operand_written(q: Tensor, k: Tensor):
    twice = k * 2.0
    turned = twice.transpose(-2, -1)
    s = torch.matmul(q * 0.5, turned)
    twice.mul_(0.5)
    return s * 2.0, torch.matmul(q * 0.25, turned) * 2.0


def written_if_contiguous(q: Tensor, k: Tensor):
    s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
    s.contiguous().mul_(2.0)
    return s * 2.0, torch.softmax(s, -1) * 2.0


def written_if_viewed(q: Tensor, k: Tensor):
    s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
    s.reshape(-1).add_(1.0)
    torch.flatten(s, 1)[:, 0].fill_(1.0)
    return s * 2.0, torch.softmax(s, -1) * 2.0


def strided(q: Tensor, k: Tensor):
    s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
    return torch.as_strided(s, [4, 100], [200, 1]) * 2.0, torch.softmax(s, -1) * 2.0


def resized(q: Tensor, k: Tensor):
    s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
    return torch.softmax(s, -1) * 2.0, s.resize_([4, 2401]) * 2.0


def one_column(q: Tensor, k: Tensor):
    s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
    return s.unsqueeze(-1).view(-1, 1) * 2.0, torch.softmax(s, -1) * 2.0


def shared(q: Tensor, k: Tensor):
    """An operand of one product as the first, and of another as the second."""
    w = torch.tanh(k)
    s = torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-2, -1)), -1), w)
    return s * 2.0, torch.matmul(w, w.transpose(-2, -1)).view(-1, 49) * 2.0


#: Programs that write to what a backward of eager's reads.
INFERENCE_ONLY = [operand_written, written_if_contiguous, written_if_viewed, resized]
LOOKING = [
    written_if_contiguous,
    written_if_viewed,
    strided,
    resized,
    one_column,
    shared,
    returned,
    flattened,
    flattened_inside,
    asked,
    asked_whether_dense,
    in_a_view,
    written,
    operand_written,
]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("batch", [(4,), ()], ids=str)
@pytest.mark.parametrize("program", LOOKING, ids=lambda f: f.__name__)
def test_a_product_that_the_program_can_look_at_is_eagers(device, program, batch, gradients):
    generator = torch.Generator().manual_seed(4)
    if gradients and program in INFERENCE_ONLY or (program, batch) == (resized, ()):  # to more elements
        return
    sizes = (*batch, 49, 16)
    q, k = (torch.randn(sizes, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            found = []
            for function in (scripted, program):
                leaves = [x.clone().requires_grad_(gradients) for x in (q, k)]
                results = function(*leaves)
                if gradients:
                    (results[0].float().sum() + results[1].float().square().sum()).backward()
                found.append([*results, *(x.grad for x in leaves if gradients)])
            for mine, theirs in zip(*found, strict=True):
                assert_matches(mine.detach(), theirs.detach(), ops=1)
                assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("sizes", [(1, 49, 49), (4, 1, 49), (4, 49, 1), (1, 1, 49)], ids=str)
def test_strides_of_what_is_made_of_a_part_are_eagers(device, sizes):
    """Also where a dim has one element, whose stride says nothing."""

    def program(q: Tensor, k: Tensor):
        s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
        return s.clone(), s.permute(1, 0, 2).neg(), torch.zeros_like(s.transpose(0, 1)), s.float().exp()

    n, rows, columns = sizes
    scripted = fresh(program)
    with tsfuser.fuser():
        for a, b in [(49, 49)] * 3 + [(rows, columns)] * 2:
            q, k = (torch.randn(n, t, 16).to(device, torch.bfloat16) for t in (a, b))
            for mine, theirs in zip(scripted(q, k), program(q, k), strict=True):
                assert_matches(mine, theirs)
                assert mine.stride() == theirs.stride()


def test_a_result_that_is_no_part_is_no_view(device):
    def program(p: Tensor, v: Tensor):
        return torch.matmul(torch.softmax(p * 1.5, -1), torch.tanh(v))

    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            p, v = (torch.randn(4, 49, n).to(device, torch.bfloat16) for n in (49, 16))
            out = scripted(p, v)
            assert not out._is_view()
            out.detach_()
    assert is_used(scripted)


def test_views_of_a_part_with_other_lengths(device):
    """A view keeps the rows of the sizes that were profiled, and not of others."""

    def program(q: Tensor, k: Tensor):
        s = torch.matmul(q * 0.5, (k * 2.0).transpose(-2, -1))
        return torch.relu(s.view(s.size(0), k.size(1), q.size(1))) * 2.0, torch.softmax(s, -1) * 2.0

    scripted = fresh(program)
    with tsfuser.fuser():
        for a, b in [(49, 49)] * 3 + [(33, 49), (49, 33), (63, 33)]:
            q, k = (torch.randn(4, t, 16).to(device, torch.bfloat16) for t in (a, b))
            for mine, theirs in zip(scripted(q, k), program(q, k), strict=True):
                assert_matches(mine, theirs)


def operand_viewed(x: Tensor, y: Tensor):
    v = y + 1.0
    r = torch.softmax(v.view(-1, v.size(-1)) * 0.5, -1) + 1.0
    return torch.matmul(torch.sigmoid(x), v) * 2.0, r


def result_viewed(x: Tensor, y: Tensor):
    s = torch.matmul(y * 0.5, torch.tanh(y).transpose(-2, -1))
    p = torch.softmax(s.view(s.size(0), -1), -1)
    return torch.matmul(p.view(s.size(0), s.size(1), s.size(2)), torch.sigmoid(y)), p * 2.0


@pytest.mark.parametrize("program", [operand_viewed, result_viewed], ids=lambda f: f.__name__)
def test_what_is_kept_may_be_viewed_in_the_backward(device, program):
    """There it is the softmax that is computed again."""
    generator = torch.Generator().manual_seed(9)
    sizes = (3, 47, 47), (3, 47, 23)
    x, y = (torch.randn(s, generator=generator).to(device, torch.bfloat16) for s in sizes)
    y.requires_grad_()

    def step(function):
        y.grad = None
        a, b = function(x, y)
        (a.float().square().sum() + b.float().square().sum()).backward()
        return a.detach(), b.detach(), y.grad

    scripted = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(6):
            got = step(scripted)
    for mine, theirs in zip(got, step(program), strict=True):
        assert_matches(mine, theirs, ops=2)


@pytest.mark.parametrize("gradients", [False, True])
def test_an_operand_that_is_viewed_as_one_row(device, gradients):
    """Its other readers read it without gaps, also where it is kept for the backward."""

    def program(x: Tensor, y: Tensor):
        p = torch.softmax(torch.matmul(x * 0.5, torch.tanh(y).transpose(-2, -1)), -1)
        r = torch.relu(p.view(-1) * 2.0).view(p.size(0), p.size(1), p.size(2))
        v = torch.sigmoid(y)
        return torch.matmul(p, v) * 2.0 + torch.matmul(r, v)

    generator = torch.Generator().manual_seed(8)
    given = [torch.randn(4, 49, 16, generator=generator).to(device, torch.bfloat16) for _ in range(2)]
    inputs, scripted = [x.requires_grad_(gradients) for x in given], fresh(program)
    with tsfuser.fuser(), no_fallback():
        if gradients:
            out, mine = train(scripted, inputs)
        else:
            out, mine = [scripted(*inputs) for _ in range(3)][-1], []
    want, theirs = train(program, inputs, calls=1) if gradients else (program(*inputs), [])
    for got, eager in zip([out, *mine], [want, *theirs], strict=True):
        assert_matches(got, eager, ops=2)


def test_a_write_to_what_a_kept_operand_is_a_view_of_is_an_error(device):
    def program(s: Tensor, v: Tensor):
        p = torch.softmax(s * 0.5, -1)
        o = torch.matmul(p.flatten(0, 1), (v + 1.0).flatten(0, 1))
        p.add_(0.5)
        return p, o

    scripted = fresh(program)
    s, v = (torch.randn(4, 1, *n, device=device).to(torch.float16) for n in ((22, 53), (53, 16)))
    with tsfuser.fuser():
        for function in (program, *[scripted] * 5):
            p, o = function(s, v.requires_grad_())
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                (p.float().sum() + o.float().square().sum()).backward()


def test_a_kept_operand_that_gets_other_memory_has_no_room(device):
    """Hooks of saved tensors may put what they like into the place of one."""

    def unpacked(pair):
        tensor, dense = pair
        tensor = tensor.detach()
        with torch.no_grad():
            return tensor.set_(dense)

    def dense(x):
        turned = x.detach().transpose(-2, -1).contiguous().transpose(-2, -1)
        return x, turned if x.dim() > 1 and x.stride(-1) != 1 else x.detach().contiguous().clone()

    scripted = fresh(attend)
    x, bias = tensors(device, torch.bfloat16, gradients=True)
    with tsfuser.fuser():
        train(scripted, (x, bias))
        with torch.autograd.graph.saved_tensors_hooks(dense, unpacked):
            _, gradients = train(scripted, (x, bias))
    for mine, theirs in zip(gradients, train(attend, (x, bias), calls=1)[1], strict=True):
        assert_matches(mine, theirs, ops=2)


@pytest.mark.parametrize("direct", [False, True])
def test_gradients_that_the_program_gets_are_eagers(device, direct):
    """The gradient of an input may be the product itself."""

    def of_tanh(p: Tensor, v: Tensor):
        return torch.matmul(torch.softmax(p * 1.5, -1), torch.tanh(v)) * 2.0

    def of_input(p: Tensor, v: Tensor):
        return torch.matmul(torch.softmax(p * 1.5, -1), v) * 2.0

    function = of_input if direct else of_tanh
    generator = torch.Generator().manual_seed(6)
    sizes = (4, 33, 49), (4, 49, 16)
    inputs = [torch.randn(s, generator=generator).to(device, torch.bfloat16).requires_grad_() for s in sizes]
    scripted = fresh(function)
    with tsfuser.fuser(), no_fallback():
        out, gradients = train(scripted, inputs)
    want, expected = train(function, inputs, calls=1)
    for mine, theirs in zip([out, *gradients], [want, *expected], strict=True):
        assert_matches(mine, theirs, ops=1)
        assert mine.stride() == theirs.stride()


def test_second_derivatives(device):
    """Those of a backward that is recorded are as near to the exact ones as eager's."""
    given = tensors(device, torch.bfloat16, n=2, t=33)

    def penalty(function, dtype=torch.bfloat16):
        leaf, bias = (x.detach().to(dtype, copy=True).requires_grad_() for x in given)
        (slope,) = torch.autograd.grad(function(leaf, bias).float().sum(), leaf, create_graph=True)
        slope.float().square().sum().backward()
        return leaf.grad.double()

    scripted, true = fresh(attend), penalty(attend, torch.float64)
    with tsfuser.fuser():
        errors = [(penalty(scripted) - true).norm() for _ in range(4)]
    assert max(errors) <= 1.1 * (penalty(attend) - true).norm()


@pytest.mark.parametrize("t", [8, 9, 48])
def test_no_room_where_it_would_be_large_or_nothing(device, t):
    """Nine rows would become sixteen."""
    scripted = fresh(attend)
    x, bias = tensors(device, torch.bfloat16, t=t)
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            got = scripted(x, bias)
    assert_matches(got, attend(x, bias), ops=1)
    assert not rooms(scripted) and not is_used(scripted)


def test_no_room_for_32_bits(device):
    scripted = fresh(attend)
    x, bias = tensors(device, torch.float32)
    with tsfuser.fuser(), no_fallback():
        for _ in range(3):
            got = scripted(x, bias)
    assert_matches(got, attend(x, bias), exact(attend, (x, bias)), ops=1)
    assert not rooms(scripted) and not is_used(scripted)


@pytest.mark.parametrize(
    "columns_inside, sizes",
    [(True, (3, 5, 13)), (False, (3, 13, 16)), (True, (2, 3, 1, 31)), (False, (2, 31, 1))],
)
def test_memory_holds_zeros_behind_the_elements(device, columns_inside, sizes):
    """What the product reads: behind each row, or behind each matrix."""
    dim = -1 if columns_inside else -2
    function = group_function(
        f"graph(%x : Tensor):\n  %d : int = prim::Constant[value={dim}]()\n"
        "  %y : Tensor = aten::neg(%x)\n  %r : Tensor = tsfuser::with_room(%y, %d)\n  return (%r)",
        inputs=1,
    )
    x = torch.randn(sizes, device=device)
    with no_fallback():
        y = function(x)
    assert torch.equal(y, -x)
    wide = -(-sizes[dim] // 8) * 8
    whole = list(sizes)
    whole[dim] = wide
    steps = torch.empty(whole).stride()
    assert y.stride() == steps
    memory = torch.as_strided(y, whole, steps)
    assert torch.equal(memory.narrow(dim, 0, sizes[dim]), -x)
    assert not memory.narrow(dim, sizes[dim], wide - sizes[dim]).any()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("sizes", [(5, 13), (8, 13), (13, 16), (13, 31), (31, 13)], ids=str)
def test_memory_holds_zeros_around_a_matrix(device, sizes, turned):
    function = group_function(
        "graph(%x : Tensor):\n  %d : int = prim::Constant[value=-1]()\n"
        "  %y : Tensor = aten::neg(%x)\n  %r : Tensor = tsfuser::with_room(%y, %d)\n  return (%r)",
        inputs=1,
    )
    x = torch.randn(sizes, device=device)
    rows, columns = (-(-size // 8) * 8 for size in sizes)
    with no_fallback():
        y = function(x.t() if turned else x)
    y = y.t() if turned else y
    assert torch.equal(y, -x) and y.stride() == (columns, 1)
    memory = torch.as_strided(y, (rows, columns), y.stride())
    assert not memory[sizes[0] :].any() and not memory[:, sizes[1] :].any()
    assert y.untyped_storage().nbytes() == rows * columns * 4


@pytest.mark.parametrize(
    "sizes, room, complaint",
    [
        ((0,), (0, 0, -1), "another dim"),
        ((0, 0, 0), (0, 0, -3), "another dim"),
        ((0, 0, 0), (0, 5, -1), "number of elements"),
        ((0, 0, 0), (1, 0, -1), "not among the allocations"),
        ((0, 0, 0), (0, 0, -2), None),
    ],
)
def test_a_plan_has_room_behind_one_of_the_last_two_dims(sizes, room, complaint):
    program = (("const", 4, 0), ("const", 6, 0))
    found = verify(Plan(0, program, allocations=(("float16", sizes, sizes),), rooms=(room,)))
    assert found is None if complaint is None else complaint in found
