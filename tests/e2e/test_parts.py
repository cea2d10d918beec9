"""Parts of tensors and paddings in groups: slices, selected places, their gradients."""

import warnings

import pytest
import torch

import tsfuser
from kit.support import (
    all_graphs,
    assert_matches,
    counted,
    fuse,
    fused_as_eager,
    groups,
    kinds,
    no_fallback,
    script,
    train,
)

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]
KINDS = {f"aten::{name}" for name in ("slice", "select", "narrow", "pad", "constant_pad_nd")}
KINDS |= {"aten::slice_backward", "aten::select_backward"}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


def compare(text, *inputs, ops=20, fused=True):
    """The program of `x, y, z` against eager; all parts are taken in groups."""
    scripted = fused_as_eager(text, *inputs, ops=ops)
    if fused:
        assert KINDS & {kind for group in groups(scripted) for kind in kinds(group)}
        assert not any(graph.findAllNodes(kind, True) for graph in all_graphs(scripted) for kind in KINDS)
    return scripted


SLICE = "torch.ops.aten.slice_backward"
PROGRAMS = {  # of x[4, 6, 8], y[4, 6, 8]
    "halves": "(x * 2.0)[..., :4] * torch.sigmoid((x + y)[..., 4:])",
    "rotated": "x * y + torch.cat((-(x * y)[..., 4:], (x * y)[..., :4]), -1) * 2.0",
    "odd places": "(x * 2.0)[..., 1:6] + (y + 1.0)[..., 3:]",
    "every second": "(x * 2.0)[..., ::2] * (y * 2.0)[..., 1::2]",
    "every third": "(x * 2.0)[:, ::3] * (y * 2.0)[:, 1::3]",
    "from the end": "(x * 2.0)[:, -4:-1] + (y * 2.0)[:, :3]",
    "beyond the end": "(x * 2.0)[:, 2:100] + 1.0",
    "of length 1": "(x * 2.0)[:, 2:3] + y",
    "of a slice": "(x * 2.0)[:, 1:5][:, 1:3][..., 2:6] + 1.0",
    "selected": "(x * 2.0)[1] + y",
    "selected from the end": "(x * 2.0)[:, -1] + (y + 1.0)[:, 0]",
    "selected twice": "(x * 2.0)[:, 1, 2] + (y + 1.0)[:, 0, -1]",
    "a difference": "(x * y)[:, 1:] - (x * y)[:, :-1]",
    "narrow": "(x * 2.0).narrow(1, 1, 4).relu() + 1.0",
    "of a sum": "(x.sum(0) * 2.0)[1:4] + 1.0",
    "of a softmax": "torch.softmax(x, -1)[..., 2:5] * 2.0",
    "of rows of a softmax": "torch.softmax(x, -1)[:, 2:5] * 2.0",
    "with a sum": "(x * 2.0)[..., 2:7].sum(-1) + 1.0",
    "of a cat": "(torch.cat((x * 2.0, y), -1) + 1.0)[..., 4:12] * 2.0",
    "of a cat, all of one": "(torch.cat((x * 2.0, y), 1) + 1.0)[:, 6:] * 2.0",
    "every second of a cat": "(torch.cat((x * 2.0, y), -1) + 1.0)[..., ::2] * 2.0",
    "selected from a cat": "(torch.cat((x * 2.0, y), -1) + 1.0)[..., 9] * 2.0",
    "transposed": "(x * 2.0).transpose(1, 2)[:, 2:6] + 1.0",
    "merged": "((x * 2.0)[:, 1:4].reshape(4, -1) + 1.0).relu()",
    "split": "((x * 2.0)[:, 1:5].reshape(4, 2, 2, -1) + 1.0).relu()",
    "of a view": "((x * 2.0).view(4, 2, 3, 8)[:, :, 1:] + 1.0).relu()",
    "of merged dims": "((x * 2.0).view(4, -1)[:, 5:17] + 1.0).relu()",
    "heads": "(x + y).view(4, 6, 2, 4).transpose(1, 2)[..., 2:] * 2.0 "
    "- (x + y).view(4, 6, 2, 4).transpose(1, 2)[..., :2]",
    "padded": "torch.constant_pad_nd(x * 2.0, [1, 2], 0.5) + 1.0",
    "padded rows": "torch.constant_pad_nd(x * 2.0, [0, 0, 2, 1], 1.0) + 1.0",
    "padded and cut": "torch.constant_pad_nd(x * 2.0, [-2, 3, 1, -1], 1.0) + 1.0",
    "padded with 0": "torch.constant_pad_nd(x, [4, 4]) * 2.0",
    "all dims padded": "torch.constant_pad_nd(x * 2.0, [1, 1, 2, 2, 3, 0], 1.0) + 1.0",
    "padded with nothing": "torch.constant_pad_nd(x * 2.0, [0, 0], 0.5) + 1.0",
    "cut": "torch.constant_pad_nd(x * 2.0, [-1, 0, 0, -1], 0.5) + 1.0",
    "pad": "torch.nn.functional.pad(x * 2.0, [1, 2]) + 1.0",
    "padded sums": "torch.constant_pad_nd(x.sum(-1, keepdim=True), [1, 2], 0.5) + 1.0",
    "sum of padded": "(torch.constant_pad_nd(x * 2.0, [4, 4], 1.0) * 2.0).sum(-1)",
    "shifted": "x + torch.constant_pad_nd((x * 2.0)[:, :-1], [0, 0, 1, 0], 0.0)",
    "a slice's gradient": "torch.ops.aten.slice_backward(x * 2.0, [4, 6, 16], 2, 4, 12, 1) + 1.0",
    "a slice's gradient at the end": "torch.ops.aten.slice_backward(x * 2.0, [4, 16, 8], 1, -6, "
    "9223372036854775807, 1) + 1.0",
    "every second place": f"{SLICE}(x * 2.0, [4, 6, 16], 2, 0, 16, 2) + 1.0",
    "every second place from the second": f"{SLICE}(x * 2.0, [4, 13, 8], 1, 1, 13, 2) + 1.0",
    "every third place up to the last": f"{SLICE}(x * 2.0, [14, 6, 8], 0, 4, 14, 3) * 3.0",
    "places of a grid": f"{SLICE}({SLICE}(x * 2.0, [4, 6, 16], 2, 1, 16, 2), [4, 12, 16], 1, 0, 12, 2)"
    f" + {SLICE}({SLICE}(y * 2.0, [4, 6, 16], 2, 0, 16, 2), [4, 12, 16], 1, 1, 12, 2)",
    "two slices' gradients": "torch.ops.aten.slice_backward(x * 2.0, [4, 6, 16], 2, 0, 8, 1) + "
    "torch.ops.aten.slice_backward(y * 3.0, [4, 6, 16], 2, 8, 16, 1)",
    "a place's gradient": "torch.ops.aten.select_backward(x * 2.0, [4, 5, 6, 8], 1, -2) + 1.0",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_values(device, target, program):
    x, y = torch.randn(4, 6, 8, device=device), torch.randn(4, 6, 8, device=device)
    compare(PROGRAMS[program], x, y)


def test_one_plan_serves_all_sizes_and_places_of_a_class(device, target):
    source = """
def f(x, start: int, length: int):
    y = (x * 2.0).narrow(1, start, length)
    return torch.cat((y + 1.0, y), 1) * 2.0
"""
    scripted, plain = script(source), script(source)
    with no_fallback(), torch.no_grad():
        fuse(scripted, torch.randn(3, 13, device=device), 1, 7)
        scripted(torch.randn(3, 15, device=device), 3, 5)
        for columns, start, length in ((17, 5, 9), (23, 7, 11), (33, 9, 13)):
            x = torch.randn(3, columns, device=device)
            with counted() as rise:
                result = scripted(x, start, length)
            assert (rise["launches"], rise["kernels_compiled"]) == (1, 0)
            with torch.jit.fuser("fuser0"):
                assert_matches(result, plain(x, start, length), ops=4)


@pytest.mark.each_value
@pytest.mark.graphs
@pytest.mark.parametrize("end", [3, 4, 6, 100, -1, -2, -7, 0])
@pytest.mark.parametrize("start", [0, 1, 2, 4, 6, 9, -1, -3, -9])
def test_ends_of_slices(device, start, end):
    for columns in (6, 1, 0):
        compare(f"(x * 2.0)[:, {start}:{end}] * 2.0", torch.randn(5, columns, device=device))


@pytest.mark.graphs
def test_errors_are_eagers(device):
    for text, right, wrong in (
        ("(x * 2.0)[:, 4] + 1.0", (3, 5), (3, 4)),
        ("(x * 2.0).narrow(1, 2, 3) + 1.0", (3, 5), (3, 4)),
        ("torch.constant_pad_nd(x * 2.0, [-3, 0, 1, 1], 1.0) + 1.0", (3, 5), (3, 2)),
        ("torch.constant_pad_nd(x * 2.0, [-3, 4], 1.0) + 1.0", (3, 5), (3, 2)),
        ("torch.constant_pad_nd(x * 2.0, [4, -3], 1.0) + 1.0", (3, 5), (3, 2)),
    ):
        scripted = compare(text, torch.randn(right, device=device))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises((RuntimeError, IndexError)):
                scripted(torch.randn(wrong, device=device))


DTYPES = [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_paddings(device, target, dtype):
    x = (torch.randn(4, 6, device=device) * 3).to(dtype)
    for value in (1, 2.5, True):
        compare(f"torch.constant_pad_nd(x, [1, 2], {value}) == x[0, 0]", x)


@pytest.mark.parametrize("pads", [[-1, 1], [-1, 2], [1, -1], [2, -2], [-2, 0, 1, 0], [0, 1], [-1, 1, -1, 1]])
def test_paddings_of_few_places(device, target, pads):
    """To none, one or two places: with what was there, with another part of it, or with nothing of it."""
    cut = -min(pads)
    for columns in (0, 1, 2, 3):
        if columns >= cut:
            compare(
                f"torch.constant_pad_nd(x * 2.0, {pads}, 0.5) + 1.0", torch.randn(3, columns, device=device)
            )
            compare(
                f"torch.constant_pad_nd(x.t() * 2.0, {pads}, 0.5) + 1.0",
                torch.randn(columns, 3, device=device),
            )


@pytest.mark.graphs
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_paddings_alone(device, target, dtype):
    x = (torch.randn(4, 1, device=device) * 3).to(dtype)
    for value in (1, 2.7, True):
        compare(f"torch.constant_pad_nd(x, [-1, 1], {value}) == x", x)


@pytest.mark.parametrize(
    "start, end, size", [(0, 0, 1), (1, 1, 1), (1, 9, 1), (-1, -1, 1), (0, 0, 2), (3, 1, 0)]
)
def test_gradients_of_empty_slices(device, target, start, end, size):
    text = f"torch.ops.aten.slice_backward(x * 2.0, [3, {size}], 1, {start}, {end}, 1) + 1.0"
    compare(text, torch.randn(3, 0, device=device))


@pytest.mark.graphs
@pytest.mark.parametrize("dynamic", [True, False])
def test_parts_of_few_places_train(device, forgotten, dynamic):
    def program(x):
        y = x.exp()
        rest = torch.nn.functional.pad(y[:, 1:] * 2.0, (1, 0)) + torch.constant_pad_nd(x.sin(), [1, -1], 0.5)
        steps = y[:, ::2].sum(1), y[1::3, 1::2].sin(), y[::4] + 1.0
        return rest * torch.cat((x[:, :0], y), 1), y[1:, 1:] - y[:-1, :-1], (y[:, 1:] * 2.0).sum(0), *steps

    compiled = torch.compile(program, backend="tsfuser", dynamic=dynamic)
    for shape in ((4, 5), (3, 1), (1, 1), (2, 2), (0, 1), (1, 3)):
        ours, eagers = (torch.randn(shape, device=device).requires_grad_() for _ in range(2))
        with torch.no_grad():
            ours.copy_(eagers)
        results = []
        for function, x in ((compiled, ours), (program, eagers)):
            made = function(x)
            sum((part.cos() * 2.0).sum() for part in made).backward()
            results.append([*(part.detach() for part in made), x.grad])
        for a, b in zip(*results):
            assert_matches(a, b, ops=20)


def in_a_part(x, w, k):
    """Sums, each over all of its row, of which one part of the results is made."""
    total = (w * k).sum(1, keepdim=True)
    return torch.cat((total.expand(-1, 3), x[:, 3:]), 1) + x * k


def beside_a_padding(x, w, k):
    mean = (w * k).mean(1, keepdim=True)
    return x + torch.nn.functional.pad(mean.expand(-1, x.size(1) - 3), (3, 0)), x * k


def of_one_number(x, w, k):
    """What is the same along rows is read in a part of each."""
    padded = torch.nn.functional.pad(w[:1, :1].expand(x.size(0), 6), (2, 0)) * 1.5
    return padded, padded.sum(1)


@pytest.mark.parametrize("program", [in_a_part, beside_a_padding, of_one_number])
def test_reductions_of_whole_rows_in_parts(device, forgotten, program):
    operands = torch.randn(3, 6, 40, device=device)
    with no_fallback():
        found = torch.compile(program, backend="tsfuser")(*operands)
    expected = program(*operands)
    exact = program(*operands.double())
    for ours, eager, value in zip(*(r if isinstance(r, tuple) else (r,) for r in (found, expected, exact))):
        assert_matches(ours, eager, value, ops=60)


@pytest.mark.graphs
def test_other_modes_are_left_to_torch(device):
    def program(x):
        return torch.nn.functional.pad(x * 2.0 + 1.0, [1, 1], "reflect") * 2.0 + 1.0

    x = torch.randn(2, 3, 5, device=device)
    scripted = fuse(program, x)
    assert [set(kinds(group)) for group in groups(scripted)] == [{"aten::mul", "aten::add"}] * 2
    assert_matches(scripted(x), program(x), ops=4)


def test_formats_of_paddings(device, target):
    x = torch.randn(2, 4, 3, 5, device=device)
    for y in (x, x.contiguous(memory_format=torch.channels_last), x.transpose(1, 2), x[..., ::2]):
        compare("torch.constant_pad_nd(y * 2.0, [1, 2, 1, 0], 1.0) * x[0, 0, 0, 0]".replace("y", "x"), y)
        compare("torch.nn.functional.pad(x, [1, 2, 1, 0]) * 2.0", y)
        for pads in ([0, 0], [0, 0, 0, 0], [-1, 0, 0, -1]):
            compare(f"torch.constant_pad_nd(x * 2.0, {pads}, 1.0)", y)
            compare(f"torch.constant_pad_nd(x, {pads}, 1.0) * 2.0", y)


def test_what_lies_around_a_part_is_not_read(device, target):
    memory = torch.full((64, 64), float("nan"), device=device)
    memory[8:12, 8:16] = 1.0
    for columns in (slice(8, 16), slice(8, 12), slice(9, 12)):
        x = memory[8:12, columns]
        compare("torch.constant_pad_nd(x * 2.0, [4, 4, 4, 4], 0.0).sum(1)", x)
        compare("torch.constant_pad_nd((x + 1.0)[:, 1:-1], [8, 8], 0.0) * 2.0", x)


def test_a_part_that_leaves_its_group_stays_a_view(device):
    def program(x):
        y = x * 2.0
        return y, y[:, 1:].relu() + 1.0, y[:, 2:]

    x = torch.randn(4, 6, device=device)
    scripted = fuse(program, x)
    y, _, part = scripted(x)
    assert part.data_ptr() == y.data_ptr() + 2 * y.element_size() and part._base is not None


@pytest.mark.graphs
def test_rotary_embedding_backward_is_one_kernel(device):
    def program(x, cos, sin):
        left, right = x[..., : x.size(-1) // 2], x[..., x.size(-1) // 2 :]
        return x * cos + torch.cat((-right, left), -1) * sin

    compiled = torch.compile(program, backend="tsfuser", dynamic=True)
    cos, sin = torch.randn(5, 16, device=device), torch.randn(5, 16, device=device)
    for batch in (2, 3):
        x = torch.randn(batch, 3, 5, 16, device=device)
        given = torch.randn_like(x)
        ours, eagers = x.clone().requires_grad_(), x.clone().requires_grad_()
        with counted() as rise:
            result = compiled(ours, cos, sin)
            result.backward(given)
        eager = program(eagers, cos, sin)
        eager.backward(given)
        assert_matches(result.detach(), eager.detach(), ops=4)
        assert_matches(ours.grad, eagers.grad, ops=4)
        assert rise["launches"] == 2


ATTENTION = """
def f(x, w, n: int):
    q, k, v = torch.matmul(x * 1.5, w).split(n, 2)
    q = q.view(q.size(0), q.size(1), 2, -1).transpose(1, 2)
    k = k.view(k.size(0), k.size(1), 2, -1).transpose(1, 2)
    v = v.view(v.size(0), v.size(1), 2, -1).transpose(1, 2)
    return torch.sigmoid(torch.nn.functional.scaled_dot_product_attention(q, k, v) * 2.0)
"""


def test_parts_that_no_differentiable_graph_reads_stay_a_list(device):
    """Their gradients are joined then, by one kernel, as in eager."""
    scope = {"torch": torch}
    exec(ATTENTION, scope)
    scripted = script(ATTENTION)
    generator = torch.Generator().manual_seed(4)
    x, w = (torch.randn(s, generator=generator).to(device).requires_grad_() for s in ((2, 5, 8), (8, 24)))
    with tsfuser.fuser():
        out, gradients = train(scripted, (x, w, 8))
        want, expected = train(scope["f"], (x, w, 8), calls=1)
    exact, slopes = train(
        scope["f"], [x.detach().double().requires_grad_(), w.detach().double().requires_grad_(), 8], calls=1
    )
    for found in zip([out, *gradients], [want, *expected], [exact, *slopes]):
        assert_matches(*found, ops=200, strides=False)
    nodes = [n.kind() for n in scripted.graph_for(x, w, 8).nodes()]
    assert "aten::split" in nodes and "tsfuser::part" not in nodes


@pytest.mark.parametrize("part", ["[:, 0:]", "[0:][:, :]", "[:, -0:, :]"])
def test_a_part_that_is_the_whole_stays_in_the_kernel_of_a_norm(device, part):
    source = f"""def f(x: Tensor):
    y = torch.nn.functional.layer_norm(x * 2.0, [x.size(2)]){part}
    return y.to(torch.float64) * 3.0
"""
    scripted, plain = script(source), script(source)
    x = torch.randn(4, 6, 10, device=device)
    with torch.jit.fuser("fuser0"):
        eager, exact = plain(x), plain(x.double())
    with no_fallback():
        fuse(scripted, x)
        with counted() as rise:
            found = scripted(x)
    assert_matches(found, eager, exact, ops=60, precision=torch.float32)
    assert rise["launches"] == 1
