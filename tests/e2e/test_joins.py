"""cat and stack in groups: values, sizes, dtypes, layouts, and what stays outside."""

import warnings

import pytest
import torch

import tsfuser
from kit.opsweep import plain
from kit.support import (
    all_graphs,
    assert_matches,
    counted,
    fuse,
    fused_as_eager,
    groups,
    kinds,
    script,
)
from tsfuser.frontends.torchscript import passes

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]
JOINS = {"aten::cat", "aten::concat", "aten::stack", "aten::roll", "aten::flip"}
NATIVE = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(7)


def joins_in_groups(scripted):
    return JOINS & {kind for group in groups(scripted) for kind in kinds(group)}


def joined(scripted):
    """Whether groups do all joins of a program, and there are some."""
    outside = any(graph.findAllNodes(kind, True) for graph in all_graphs(scripted) for kind in JOINS)
    return bool(joins_in_groups(scripted)) and not outside


def compare(text, *inputs, ops=20, fused=True, scripted=None):
    """The program of `x, y, z` against eager; all that it joins is joined in groups."""
    scripted = fused_as_eager(text, *inputs, ops=ops, scripted=scripted)
    if fused:
        assert joined(scripted)
    return scripted


ROTATED = "x * y + torch.cat((-x[..., x.size(-1) // 2 :], x[..., : x.size(-1) // 2]), -1) * z"


def merged(name):
    """Heads that are brought side by side, as after attention."""
    return f"({name}.view(-1, 6, 4, {name}.size(2) // 4).transpose(1, 2) * 2.0).transpose(1, 2).flatten(2)"


PROGRAMS = {  # of x[2, 6, 8], y[2, 6, 8]
    "rows": "torch.cat((x.exp(), y), 0) * 2.0",
    "middle": "torch.cat((x, y.exp(), x + y), 1) * 2.0",
    "columns": "torch.cat((x * 2.0, y + 1.0), -1).relu()",
    "of one": "torch.cat((x * 2.0,), 1) + 1.0",
    "of eight": "torch.cat((x, y, x, y, x + y, y, x, x * y), 1).exp()",
    "twice the same": "torch.cat((x, x), 1) * torch.cat((y, y), 1)",
    "of a cat": "torch.cat((torch.cat((x, y.exp()), 2), torch.cat((y, x), 2)), 2) * 3.0",
    "of a cat along another dim": "torch.cat((torch.cat((x, y.exp()), 2), torch.cat((y, x), 2)), 1) * 3.0",
    "of columns and a sum": "torch.cat((x, x.sum(-1, keepdim=True)), -1) * 2.0",
    "of sums along the dim": "torch.cat((x.sum(0), y.sum(0)), 1) * 2.0",
    "of normalised rows": "torch.cat((torch.softmax(x, -1), torch.softmax(y, -1)), -1) * 2.0",
    "of normalised rows, by rows": "torch.cat((torch.softmax(x, -1), y), 0) * 2.0",
    "of a broadcast result": "torch.cat((x[:, :1] + 1.0, y), 1) * 2.0",
    "of numbers broadcast": "torch.cat((torch.zeros_like(x) + 1.0, y), 2) * 2.0",
    "transposed": "torch.cat((x.transpose(1, 2) * 2.0, y.transpose(1, 2)), 1) + 1.0",
    "read transposed": "torch.cat((x, y), 1).transpose(1, 2) * 2.0 + x[:1, :1, :1]",
    "with itself transposed": "torch.cat((x[0, :, :6] * 2.0, x[0, :, :6].t()), 1) + 1.0",
    "merged dims": "(torch.cat((x * 2.0, y), 1).view(x.size(0), -1) + 1.0).relu()",
    "split dims": "torch.cat((x * 2.0, y), 2).view(x.size(0), x.size(1), 4, -1).relu() + 1.0",
    "split and merged dims": "torch.cat((x * 2.0, y), 1).view(x.size(0), 3, -1).relu() + 1.0",
    "of merged heads": f"torch.cat(({merged('x')}, {merged('y')}, x), 2) + 1.0",
    "of merged heads behind": f"torch.cat((x, {merged('x')}), 2) + 1.0",
    "of merged heads at an odd place": f"torch.cat((x[..., :3], {merged('x')}), 2) + 1.0",
    "flat, of a tensor that was flat in another order": "torch.cat((((x * 2.0).flatten() + 1.0).view_as(x)"
    ".transpose(0, 1).relu().reshape(-1), y.flatten() * 2.0), 0) + 1.0",
    "sum along it": "(torch.cat((x, y), -1) * 2.0).sum(-1)",
    "sum along another": "(torch.cat((x, y), -1) * 2.0).sum(1)",
    "sum of all": "(torch.cat((x, y), 1) * 2.0).sum()",
    "softmax": "torch.softmax(torch.cat((x, y * 2.0), -1) * 0.5, -1)",
    "softmax along another": "torch.softmax(torch.cat((x, y * 2.0), -1) * 0.5, 1)",
    "layer norm": "torch.layer_norm(torch.cat((x, y + 1.0), -1) * 2.0, [x.size(-1) + y.size(-1)])",
    "variance": "torch.var(torch.cat((x, y), 1) * 2.0, 1, unbiased=False)",
    "stacked in front": "torch.stack((x * 2.0, y), 0) + 1.0",
    "stacked in between": "torch.stack((x * 2.0, y), 2) + 1.0",
    "stacked behind": "torch.stack((x, y * 2.0, x), -1) + 1.0",
    "stacked and flattened": "torch.stack((x * y - x, x * y + y), -1).flatten(-2) * 2.0",
    "rolled": "torch.roll(x * 2.0, [1], [1]) + y",
    "rolled back": "torch.roll(x * 2.0, [-3], [-1]) + y",
    "rolled far": "torch.roll(x * 2.0, [20], [1]) + torch.roll(y, [-20], [2])",
    "not rolled": "torch.roll(x * 2.0, [0], [1]) + y",
    "rolled windows": "torch.roll(x * y, [-1, -2], [1, 2]) * 2.0",
    "rolled as one": "torch.roll(x * 2.0, 5) + y",
    "rolled sums": "torch.roll(x.sum(2), [2], [1]) * 2.0",
    "sum of rolled": "(torch.roll(x * 2.0, [2], [2]) * y).sum(2)",
    "rolled softmax": "torch.roll(torch.softmax(x, -1), [2], [1]) * 2.0",
    "rolled there and back": "torch.roll(torch.roll(x * 2.0, [2], [2]) + 1.0, [-2], [2]) * y",
    "flipped": "torch.flip(x * 2.0, [1]) + y",
    "flipped rows and columns": "torch.flip(x * 2.0, [0, -1]) + y",
    "flipped and read": "torch.flip(x, [2]) * x + y",
    "sum of flipped": "(torch.flip(x * 2.0, [2]) * y).sum(2)",
    "sum of flipped rows": "(torch.flip(x * 2.0, [1]) * y).sum(1)",
    "flipped softmax": "torch.flip(torch.softmax(x, -1), [2]) * 2.0",
    "flipped cat": "torch.flip(torch.cat((x * 2.0, y), 2), [2]) * 2.0",
    "flipped part": "torch.flip((x * 2.0)[..., 1:], [2]) + 1.0",
    "flipped twice": "torch.flip(torch.flip(x * 2.0, [2]) + 1.0, [2]) * 2.0",
    "concat": "torch.concat((x, y * 2.0), 1) + 1.0",
}


def shapes(program, target, few):
    """One that vectors divide and another; where `few`, one alone: programs take turns. Threads of a GPU have
    vectors of several lengths."""
    odd = [] if "split dims" in program or "heads" in program else [(2, 6, 7)]
    found = [(2, 6, 8), *([(3, 6, 12)] if target != "cpu" or not odd else []), *odd]
    return [found[-(list(PROGRAMS).index(program) % 2)]] if few else found


@pytest.mark.parametrize("program", PROGRAMS)
def test_values(target, device, few, program):
    for shape in shapes(program, target, few):
        x, y = torch.randn(shape, device=device), torch.randn(shape, device=device)
        compare(PROGRAMS[program], x, y)


def rotary(device, shape, dtype=torch.float32):
    return [torch.randn(s, device=device).to(dtype) for s in (shape, shape[2:], shape[2:])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rotary_embedding_is_one_kernel_for_all_shapes_of_a_class(device, target, dtype):
    scripted = script(f"def f(x, y, z):\n    return {ROTATED}\n")
    compare(ROTATED, *rotary(device, (2, 3, 5, 16), dtype), scripted=scripted)
    for shape in ((2, 3, 5, 16), (3, 2, 7, 32), (4, 5, 9, 64)):
        with counted() as rise, torch.no_grad():
            scripted(*rotary(device, shape, dtype))
        assert (rise["launches"], rise["plans_built"], rise["kernels_compiled"]) == (1, 0, 0)
        compare(ROTATED, *rotary(device, shape, dtype), scripted=scripted)


def test_vectors_end_where_a_piece_does(device, target):
    for half in (1, 2, 3, 4, 6, 8, 12, 16):
        compare(ROTATED, *rotary(device, (2, 2, 3, 2 * half), torch.bfloat16))
    for left, right in ((4, 4), (4, 3), (3, 5), (8, 12), (1, 7), (0, 8), (8, 0), (1, 1), (0, 1), (1, 0)):
        x, y = torch.randn(3, left, device=device), torch.randn(3, right, device=device)
        compare("torch.cat((x * 2.0, y), 1) + 1.0", x, y)
        compare("torch.cat((y, x * 2.0), -1) + 1.0", x, y)
        compare("torch.cat((x * 2.0, y, x), 0) + 1.0", x.t(), y.t())


def test_what_lies_around_a_piece_is_not_read(device, target):
    """Memory around each operand is NaN, and 0 times a wrong element would not be 0."""
    memory = torch.full((64, 64), float("nan"), device=device)
    memory[8:12, 8:14], memory[20:24, 8:24] = 1.0, 2.0
    for columns in (slice(8, 14), slice(8, 12), slice(9, 12)):
        x, y = memory[8:12, columns], memory[20:24, 8:24]
        compare("torch.cat((x * 2.0, y), 1) + 1.0", x, y)
        compare("torch.cat((y * 2.0, x, y), 1).sum(1) + 1.0", x, y)


DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int32, torch.int64]
DTYPES += [torch.bool, torch.complex64, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(device, target, dtype):
    def made(*shape):
        return (torch.randn(shape, device=device) * 3).to(dtype)

    compare("torch.cat((x, y), 1) == torch.cat((y, x), 1)", made(5, 4), made(5, 8))
    compare("torch.stack((x, y), 1) == z", made(5, 4), made(5, 4), made(1))


@pytest.mark.graphs
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.int64),
        (torch.int32, torch.bool),
        (torch.float16, torch.bfloat16),
        (torch.complex64, torch.float64),
    ],
)
def test_dtypes_are_promoted(device, target, dtypes):
    x, y = ((torch.randn(3, 5, device=device) * 1000).to(dtype) for dtype in dtypes)
    compare("torch.cat((x, y), 1) + torch.cat((x, y), 1)", x, y)
    compare("torch.stack((y, x), -1) + 1", x, y)


def formats(device):
    plain = torch.randn(2, 4, 3, 5, device=device)
    last = plain.contiguous(memory_format=torch.channels_last)
    yield plain, plain
    yield last, last
    yield plain, last
    yield last.transpose(2, 3), last.transpose(2, 3)
    yield plain[:, ::2], plain[:, 1::2]
    yield plain.expand(2, 4, 3, 5)[:1].expand(2, 4, 3, 5), last
    yield plain[:, :, :1, :1], last[:, :, :1, :1]
    yield plain[:, :1], last[:, :1]


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
def test_memory_formats(device, few, dim, request):
    step = 1 if request.config.getoption("--long") else 4 if few else 2
    for x, y in list(formats(device))[dim % step :: step]:
        compare(f"torch.cat((x, y), {dim}) * 2.0", x, y)
        compare(f"torch.stack((x * 2.0, y), {dim}) * 1.0", x, y)
        compare(f"torch.roll(x, [1], [{dim}]) * 2.0", x)
        compare(f"torch.flip(y, [{dim}]) * 2.0", x, y)
    x = torch.randn(2, 3, 4, 5, 6, device=device).contiguous(memory_format=torch.channels_last_3d)
    compare(f"torch.cat((x, x * 2.0), {dim}) * 2.0", x)


def test_empty_tensors_of_one_dim(device, target):
    empty, x = torch.randn(0, device=device), torch.randn(5, device=device)
    compare("torch.cat((x, y, x)) * 2.0", empty, x)
    compare("torch.cat((x, y)) * 2.0", empty, empty)
    y = torch.randn(3, 4, device=device)
    compare("torch.cat((x, y, y), 1) * 2.0", empty, y, fused=False)  # eager skips what has another rank


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (1, 3), (3, 1), (1, 1)])
def test_sizes_of_0_and_1(device, target, shape):
    x, y = torch.randn(shape, device=device), torch.randn(shape, device=device)
    for dim in (0, 1):
        compare(f"torch.cat((x * 2.0, y), {dim}) + 1.0", x, y)
        compare(f"torch.stack((x * 2.0, y), {dim}) + 1.0", x, y)
        compare(f"torch.roll(x * 2.0, [1], [{dim}]) + torch.flip(x * 3.0, [{dim}])", x)
    compare("torch.stack((x.sum(), y.sum())) + 1.0", x, y)


def test_joining_tensors_alone_is_left_to_torch(device):
    x, y = torch.randn(3, 4, device=device), torch.randn(3, 4, device=device)
    for text in (
        "torch.cat((x, y), 1)",
        "torch.stack((x, y), 1).unsqueeze(1)",
        "torch.cat((x.t(), y.t()), 1)",
    ):
        scripted = fuse(script(f"def f(x, y):\n    return {text}\n"), x, y)
        assert not groups(scripted)
    # what is read by one op of a group does not have to be in it for another one's sake
    mixed = fuse(script("def f(x, y):\n    return torch.cat((x, y), 1), (x * 2.0).relu() + y\n"), x, y)
    assert [JOINS & set(kinds(group)) for group in groups(mixed)] == [set()]


def test_a_list_with_two_readers(device):
    source = """
def f(x, y):
    both = [x * 2.0, y + 1.0]
    return torch.cat(both, 0).relu() + 1.0, torch.cat(both, 1).relu() + 1.0
"""
    x, y = torch.randn(3, 3, device=device), torch.randn(3, 3, device=device)
    scripted = fuse(script(source), x, y)
    for result, eager in zip(scripted(x, y), script(source)(x, y)):
        assert_matches(result, eager, ops=4)
    assert joined(scripted)


def test_a_list_whose_changes_torch_takes_out(device):
    source = """
def f(x, y):
    both = [x * 2.0]
    both.append(y + 1.0)
    return torch.cat(both, 0).relu() + 1.0
"""
    x, y = torch.randn(3, 3, device=device), torch.randn(3, 3, device=device)
    scripted = fuse(script(source), x, y)
    assert_matches(scripted(x, y), script(source)(x, y), ops=4)
    assert joined(scripted)


def test_a_list_that_changes_is_left_to_torch(device):
    source = """
def f(x, y, count: int):
    several = [x * 2.0]
    for _ in range(count):
        several.append(y + 1.0)
    return torch.cat(several, 0).relu() + 1.0
"""
    x, y = torch.randn(3, 3, device=device), torch.randn(3, 3, device=device)
    scripted = fuse(script(source), x, y, 2)
    for count in (2, 0, 3):
        assert_matches(scripted(x, y, count), script(source)(x, y, count), ops=4)
    assert groups(scripted) and not joins_in_groups(scripted)


@pytest.mark.filterwarnings("default::tsfuser.TsfuserWarning")
def test_sizes_that_do_not_fit_are_eagers_error(device):
    text = "torch.cat((x * 2.0, y), 1) + 1.0"
    scripted = compare(text, torch.randn(3, 4, device=device), torch.randn(3, 2, device=device))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        scripted(torch.randn(3, 4, device=device), torch.randn(2, 2, device=device))


def test_what_torch_compile_joins(device):
    def program(x, y):
        turned = torch.cat((-x[..., 4:], x[..., :4]), -1) * y
        return turned + x, torch.stack((x * 2.0, y), 1).relu()

    x, y = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device)
    compiled = torch.compile(program, backend="tsfuser")
    for rows in (3, 5):
        x, y = torch.randn(rows, 8, device=device), torch.randn(rows, 8, device=device)
        with warnings.catch_warnings(), counted() as rise:
            warnings.simplefilter("error", tsfuser.TsfuserWarning)
            for result, eager in zip(compiled(x, y), program(x, y)):
                assert_matches(result, eager, ops=4)
    assert rise["launches"] <= 2


def test_merged_heads_side_by_side_are_one_kernel(device, target):
    text = f"torch.cat(({merged('x')}, {merged('y')}, x), 2) + 1.0"
    scripted = compare(text, torch.randn(2, 6, 16, device=device), torch.randn(2, 6, 16, device=device))
    for shape in ((2, 6, 16), (3, 6, 32)):
        with counted() as rise, torch.no_grad():
            scripted(torch.randn(shape, device=device), torch.randn(shape, device=device))
        assert (rise["launches"], rise["kernels_compiled"]) == (1, 0)


@pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")
def test_a_list_that_stays_outside_has_its_join_with_it(device):
    """A block without gradients comes before; no group gets a list."""
    source = """
def f(x: Tensor, w: Tensor, u: Tensor):
    with torch.no_grad():
        p = torch.matmul(u, w).view(u.size())
    l = [p, torch.matmul(x, w)]
    t = torch.cat([q.view(q.size(0), -1) for q in l], 1).view(p.size(0), 2, l[1].size(1), -1).sum(1)
    return torch.tanh(t) * t
"""
    eager, scripted = plain(source), script(source)
    generator = torch.Generator().manual_seed(2)
    with tsfuser.fuser(), passes.watching() as seen:
        for call in range(7):
            given = [torch.randn(s, generator=generator).to(device) for s in ((2, 8, 8), (8, 8), (2, 8, 8))]
            inputs = [t.requires_grad_(call > 3) for t in given]
            exact = eager(*(t.double() for t in inputs))
            assert_matches(scripted(*inputs), eager(*inputs), exact, ops=16)
    made = [g for o in seen for g in o.graph.findAllNodes("prim::CudaFusionGroup", True)]
    assert not [v for g in made for v in g.inputs() if v.type().annotation_str == "List[Tensor]"]
