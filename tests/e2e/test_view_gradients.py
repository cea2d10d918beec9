"""The training graphs of programs written from primitives: autodiff's formulas of means, variances and views
are one group, and the sizes that it asks for cost no memory."""

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.support import all_graphs, assert_matches, fresh, groups, kinds, script, stored, train

pytestmark = pytest.mark.graphs

#: The targets of the larger sweeps: a kernel for fibers is compiled for five GPUs as well: a second each.
NATIVE = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])

# ---- the tutorial's definitions: one group forward, one backward


def composite(input1, input2, weight, bias1, bias2, axis: int, p: float, keepdim: bool):
    norm_input = F.dropout(input1 + bias1, p, training=True) + input2
    return F.layer_norm(norm_input, (input1.size(axis),), weight, bias2)


def primitive(input1, input2, weight, bias1, bias2, axis: int, p: float, keepdim: bool):
    norm_input = F.dropout(input1 + bias1, p, training=True) + input2
    mean = norm_input.mean(axis, keepdim=keepdim)
    diff = norm_input - mean
    diff_sq = diff * diff
    var = diff_sq.mean(axis, keepdim=keepdim)
    return weight * ((norm_input - mean) / torch.sqrt(var + 1e-12)) + bias2


def rms_norm(input1, input2, weight, bias1, bias2, axis: int, p: float, keepdim: bool):
    norm_input = F.dropout(input1 + bias1, p, training=True) + input2
    var = norm_input.mul(norm_input).mean(axis, keepdim)
    return weight * (norm_input / torch.sqrt(var + 1e-12)) + bias2


def block_inputs(device, dtype=torch.float32, sizes=(3, 5, 17)):
    generator = torch.Generator().manual_seed(3)
    shapes = [sizes, sizes, sizes[-1:], sizes[-1:], sizes[-1:]]
    return [torch.randn(s, generator=generator, dtype=dtype).to(device).requires_grad_() for s in shapes]


@pytest.mark.parametrize("function", [composite, primitive, rms_norm])
def test_a_norm_is_one_group_forward_and_one_backward(device, function, axis=-1):
    inputs = block_inputs(device)
    scripted = fresh(function)
    with tsfuser.fuser():
        out, gradients = train(scripted, [*inputs, axis, 0.0, True], calls=5)
    assert len(groups(scripted)) == 2
    expected, wanted = train(function, [*inputs, axis, 0.0, True], calls=1)
    double = [x.detach().double().requires_grad_() for x in inputs]
    exact, exact_gradients = train(function, [*double, axis, 0.0, True], calls=1)
    assert_matches(out, expected, exact, ops=20)
    for mine, plain, reference in zip(gradients, wanted, exact_gradients):
        if plain is not None:
            assert_matches(mine, plain, reference, ops=60, strides=False)


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dims", [[0], [-1], [0, 2], [2, 1], [0, 1, 2]])
def test_the_gradient_of_a_mean(device, dims, keepdim):
    def program(x, y, dims: list[int], keepdim: bool):
        return ((x * y).mean(dims, keepdim) * 2.0).relu()

    program.__annotations__ = {"dims": list[int], "keepdim": bool}
    inputs = [torch.rand(3, 4, 5, device=device).requires_grad_() for _ in range(2)]
    scripted = torch.jit.script(program)
    with tsfuser.fuser():
        out, gradients = train(scripted, [*inputs, dims, keepdim], calls=5)
    expected, wanted = train(program, [*inputs, dims, keepdim], calls=1)
    assert_matches(out, expected, ops=60)
    for mine, plain in zip(gradients, wanted):
        assert_matches(mine, plain, ops=60)
    assert len(groups(scripted)) == 2


def test_a_mean_whose_dims_change_from_call_to_call(device):
    def program(x, y, dims: list[int], keepdim: bool):
        return ((x * y).mean(dims, keepdim) * 2.0).relu()

    inputs = [torch.rand(3, 4, 5, device=device).requires_grad_() for _ in range(2)]
    scripted = torch.jit.script(program)
    with tsfuser.fuser():
        train(scripted, [*inputs, [1], True], calls=4)
        for dims, keepdim in ([1], True), ([2], True), ([0, 1], True), ([2], False), ([0, 1], False):
            out, gradients = train(scripted, [*inputs, dims, keepdim], calls=2)
            expected, wanted = train(program, [*inputs, dims, keepdim], calls=1)
            assert_matches(out, expected, ops=60)
            for mine, plain in zip(gradients, wanted):
                assert_matches(mine, plain, ops=60)


# ---- gradients

TRAINED = [
    "((x * y).unsqueeze(1) * 2.0).squeeze(1).relu() + x",
    "(x * y).t().tanh() * y.t()",
    "((x * y).permute(1, 0) * 2.0).sigmoid()",
    "(x.unsqueeze(2) * y.unsqueeze(1)).mean(1) * 2.0",
    "torch.softmax((x * y).t() * 2.0, -1).t() * x",
    "(x * y).var(1, keepdim=True) * x",
    "(x * 2.0).var([0, 1], unbiased=False) * y",
    "(x / (x * y).std(0)).relu()",
    "((x - x.mean(1, keepdim=True)) / x.std(-1, keepdim=True)).relu() * y",
]


@pytest.mark.parametrize("text", TRAINED)
def test_gradients_through_views(device, text):
    scripted, plain = (script(f"def f(x, y):\n    return {text}\n") for _ in range(2))
    inputs = [torch.rand(4, 5, device=device).requires_grad_() for _ in range(2)]
    with tsfuser.fuser():
        out, gradients = train(scripted, inputs, calls=5)
    with torch.jit.fuser("fuser0"):
        expected, wanted = train(plain, inputs, calls=1)
    assert_matches(out, expected, ops=30)
    for mine, eager in zip(gradients, wanted):
        assert_matches(mine, eager, ops=60, strides=False)
    assert len(groups(scripted)) == 2


# ---- sizes of values that are not stored


def test_a_norm_stores_nothing_for_its_sizes(device):
    """The mask, the normalisation's input and the root, which the backward reads (it computes the quotient
    again), and the result."""
    scripted = torch.jit.script(rms_norm)
    with tsfuser.fuser():
        train(scripted, [*block_inputs(device), 2, 0.0, True], calls=4)
    forward = groups(scripted)[0]
    assert "aten::native_dropout" in kinds(forward) and stored(forward) == 4


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize(
    "text",
    [
        "(x * y).mean(-1, keepdim=True) * y + x",
        "(x * y).mean([0], keepdim=True) * 2.0 + y",
        "(x * y).unsqueeze(-2) * y.unsqueeze(-1) * 2.0",
        "(x * y).unsqueeze(0).squeeze(0) * 2.0 + x",
        "((x * y).t() * 2.0).t() + x",
    ],
)
def test_sizes_of_tensors_of_other_ranks(device, text):
    """Sizes are computed before the guard, so also of tensors that are not of the rank that was profiled."""
    scripted, plain = (script(f"def f(x, y):\n    return {text}\n") for _ in range(2))
    ranks = [(4, 5), (5,)] if "t()" in text else [(3, 4, 5), (4, 5), (1, 5), (2, 3, 4, 5)]
    for sizes in ranks:
        inputs = [torch.rand(sizes, device=device).requires_grad_() for _ in range(2)]
        with tsfuser.fuser():
            out, gradients = train(scripted, inputs, calls=4)
        with torch.jit.fuser("fuser0"):
            expected, wanted = train(plain, inputs, calls=1)
        assert_matches(out, expected, ops=60)
        for mine, eager in zip(gradients, wanted):
            assert_matches(mine, eager, ops=60, strides=False)


SIZE_OPERATORS = [
    ("reduced_sizes", ([4, 8, 2], [-1], True), [4, 8, 1]),
    ("reduced_sizes", ([4, 8, 2], [2, 0], False), [8]),
    ("reduced_sizes", ([4, 8, 2], [], False), []),
    ("reduced_sizes", ([4, 8, 2], None, True), [1, 1, 1]),
    ("reduced_sizes", ([4], [5], False), [4]),
    ("squeezed_sizes", ([1, 8, 1], None), [8]),
    ("squeezed_sizes", ([1, 8, 1], [-1, 1]), [1, 8]),
    ("squeezed_sizes", ([1, 8], []), [1, 8]),
    ("unsqueezed_sizes", ([4, 8], 1), [4, 1, 8]),
    ("unsqueezed_sizes", ([4, 8], -1), [4, 8, 1]),
    ("unsqueezed_sizes", ([], 7), [1]),
    ("permuted_sizes", ([4, 8, 2], [2, 0, -2]), [2, 4, 8]),
    ("permuted_sizes", ([4, 8], None), [8, 4]),
    ("swapped_sizes", ([4, 8, 2], 0, -1), [2, 8, 4]),
    ("swapped_sizes", ([], 0, -1), []),
    ("sliced_sizes", ([4, 8], -1, None, None, 1), [4, 8]),
    ("sliced_sizes", ([4, 8], 1, 2, -1, 1), [4, 5]),
    ("sliced_sizes", ([4, 8], 1, 1, 100, 3), [4, 3]),
    ("sliced_sizes", ([4, 8], 0, -9, 3, 2), [2, 8]),
    ("sliced_sizes", ([4, 8], 1, 6, 2, 1), [4, 0]),
    ("sliced_sizes", ([4, 8], 5, 0, 2, 1), [4, 8]),
    ("selected_sizes", ([4, 8, 2], 1), [4, 2]),
    ("selected_sizes", ([4, 8, 2], -1), [4, 8]),
    ("selected_sizes", ([], 0), []),
    ("joined_size", ([4, 8, 2], -1, False), 2),
    ("joined_size", ([0], 1, False), 0),
    ("joined_size", ([4, 8, 2], -1, True), 1),
    ("part_start", ([4, 8], [3], 0, -1, 3, 0), 0),
    ("part_start", ([4, 8], [3], 0, -1, 3, 2), 6),
    ("part_end", ([4, 8], [3], 0, -1, 3, 2), 8),
    ("part_end", ([4, 8], [1, 0, 3], 1, 0, 3, 2), 4),
    ("part_start", ([4, 8], [1, 0, 3], 1, 0, 3, 2), 1),
    ("part_start", ([4, 8], [], 2, 0, 4, 3), 3),
    ("joined_sizes", ([4, 8], [4, 3], -1), [4, 11]),
    ("joined_sizes", ([4, 8], [0], 0), [4, 8]),
    ("joined_sizes", ([0], [4, 8], 0), [4, 8]),
    ("joined_sizes", ([4, 8], [2], 0), [4, 8]),
    ("joined_sizes", ([4], [3], 2), [4]),
    ("value_or", (None, 7), 7),
    ("value_or", (3, 7), 3),
    ("viewed_sizes", ([4, 8], [2, 16], None), [2, 16]),
    ("viewed_sizes", ([4, 8], None, [2, -1, 4]), [2, 4, 4]),
    ("viewed_sizes", ([4, 8], [-1], None), [32]),
    ("viewed_sizes", ([], [1, -1], None), [1, 1]),
    ("viewed_sizes", ([0, 8], [0, -1], None), [0, 0]),
    ("flattened_sizes", ([4, 8, 2], 0, -1), [64]),
    ("flattened_sizes", ([4, 8, 2], 1, 2), [4, 16]),
    ("flattened_sizes", ([4, 8, 2], -2, -2), [4, 8, 2]),
    ("flattened_sizes", ([], 0, -1), [1]),
    ("expanded_sizes", ([4, 1, 2], [3, -1, 5, 2]), [3, 4, 5, 2]),
    ("expanded_sizes", ([4], [-1, 4]), [-1, 4]),
    ("expanded_sizes", ([4, 2], [2]), [2]),
    ("padded_sizes", ([4, 8, 2], [1, 2]), [4, 8, 5]),
    ("padded_sizes", ([4, 8, 2], [0, 0, -3, 1]), [4, 6, 2]),
    ("padded_sizes", ([4], [-9, 1, 2, 2]), [0]),
    ("padded_sizes", ([4], [1]), [4]),
    ("flattened_sizes", ([4, 8], 0, 3), [4, 8]),
]


@pytest.mark.parametrize("name, arguments, wanted", SIZE_OPERATORS)
def test_size_arithmetic(name, arguments, wanted):
    assert getattr(torch.ops.tsfuser, name)(*arguments) == wanted


# ---- views of results of a differentiable graph, written in place


def written_inside(x, w):
    made = torch.erfc(x)
    other = torch.cos(made)
    view = made.squeeze()
    view.div_(x * x + 1)
    return other, view


def returned(x, w):
    return (x * w + 1.0).unsqueeze(0), torch.exp(x)


def written_and_read(x, w):
    view = (torch.exp(x) * w).unsqueeze(-1)
    view.mul_(w.unsqueeze(-1))
    return view * 2.0, torch.sigmoid(x)


@pytest.mark.parametrize("function", [written_inside, returned, written_and_read])
def test_a_view_of_what_a_graph_has_made_may_be_written_to(device, function):
    """It has the gradient of the written values, though the graph keeps no history of its base. The caller
    writes, too."""

    def gradients(program, dtype=torch.float32):
        generator = torch.Generator().manual_seed(4)
        sizes = [] if function is written_inside else [5]
        x, w = (torch.rand(sizes, generator=generator).to(device, dtype).requires_grad_() for _ in range(2))
        results = program(x, w)
        view = results[1 if function is written_inside else 0]
        view.mul_(3.0)
        return [*results, *torch.autograd.grad(view.sum(), (x, w), allow_unused=True)]

    exact, expected = gradients(function, torch.float64), gradients(function)
    scripted = fresh(function)
    with tsfuser.fuser():
        for _ in range(4):
            results = gradients(scripted)
    for mine, plain, reference in zip(results, expected, exact):
        assert (mine is None) == (plain is None)
        if plain is not None:
            assert_matches(mine, plain, reference, ops=20)


def test_a_view_shares_its_versions_with_what_the_backward_reads(device):
    """Where the graph keeps what was written to, the backward says so, as eager's does."""

    def program(x, w):
        made = torch.mm(x, w)
        view = torch.relu(made).t()
        return view, torch.sigmoid(made)

    x, w = (torch.rand(4, 4, device=device).requires_grad_() for _ in range(2))
    scripted = fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            view, _ = scripted(x, w)
            view.mul_(2.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                view.sum().backward()


# ---- permuted gradients


def permuted(x, w):
    return torch.tanh(x.permute(0, -2, -1, 1) * w).permute(0, 3, 1, 2) * 2.0


def permuted_by(x, w, dims: list[int]):
    return torch.tanh(x.permute(dims) * w) * 2.0


@pytest.mark.parametrize("dims", [None, [0, 2, 3, 1], [0, -2, -1, 1], [-1, 0, 1, 2]])
def test_the_inverse_order_of_a_permute_is_no_loop(device, dims):
    torch.manual_seed(7)
    function = permuted if dims is None else permuted_by
    sizes = (2, 3, 4, 5)
    x = torch.randn(sizes, device=device, requires_grad=True)
    last = sizes[(dims or [0, -2, -1, 1])[-1]]
    inputs = [x, torch.randn(last, device=device, requires_grad=True), *([dims] if dims else [])]
    scripted = fresh(function)
    with tsfuser.fuser():
        out, gradients = train(scripted, inputs)
    expected, theirs = train(function, inputs, calls=1)
    assert_matches(out, expected, ops=4)
    for mine, other in zip(gradients, theirs):
        assert_matches(mine, other, ops=60)
        assert mine.stride() == other.stride()
    backward = [graph for graph in all_graphs(scripted) if "AutogradAllNonZero" in str(graph)]
    assert backward
    for graph in backward:
        assert "prim::Loop" not in str(graph) and "aten::_set_item" not in str(graph)


def test_a_graph_without_groups_is_profiled_no_more(device):
    def products(x, w):
        return torch.matmul(torch.matmul(x, w), w.t())

    inputs = [torch.randn(4, 4, device=device, requires_grad=True) for _ in range(2)]
    scripted = fresh(products)
    with tsfuser.fuser():
        _, gradients = train(scripted, inputs)
    for mine, theirs in zip(gradients, train(products, inputs, calls=1)[1]):
        assert_matches(mine, theirs, ops=60)
    # the program's, its forward and its backward; a joint graph has a node that is shown, too
    assert len(all_graphs(scripted)) == 3 + by_joint_graphs()
    assert not any("prim::profile" in str(graph) for graph in all_graphs(scripted))
