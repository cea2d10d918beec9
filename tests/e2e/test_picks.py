"""Many tensors joined in groups: one load from the one that has the element, whatever their sizes, layouts,
dtypes and places in memory are."""

import re

import pytest
import torch

from kit.support import (
    all_graphs,
    assert_matches,
    counted,
    fuse,
    groups,
    kinds,
    no_fallback,
    script,
)
from tsfuser.planning import compile as pipeline

pytestmark = [pytest.mark.filterwarnings("error::tsfuser.TsfuserWarning")]
MANY = 12


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(5)


@pytest.fixture
def sources(monkeypatch):
    """Sources of the kernels that are made."""
    made, source = [], pipeline.emit.source
    monkeypatch.setattr(pipeline.emit, "source", lambda *given: made.append(source(*given)) or made[-1])
    return made


def program(count, text, more=""):
    """The program of the expression `text` of a list `xs` of tensors, each an argument."""
    names = ", ".join(f"x{k}" for k in range(count))
    return f"def f({names}{more}):\n    return {text.replace('xs', f'[{names}]')}\n"


def compare(text, tensors, scripted=None, fused=True, ops=4):
    """The program against eager; that it joins in a group, if `fused`."""
    source = program(len(tensors), text)
    scripted, plain = scripted or script(source), script(source)
    with torch.jit.fuser("fuser0"), torch.no_grad():
        eager = plain(*tensors)
        exact = plain(*(t.double() if t.is_floating_point() else t for t in tensors))
    with no_fallback(), torch.no_grad():
        fuse(scripted, *tensors)
        assert_matches(scripted(*tensors), eager, exact, ops=ops)
    if fused:
        joins = {"aten::cat", "aten::stack"}
        assert not any(graph.findAllNodes(kind, True) for graph in all_graphs(scripted) for kind in joins)
    return scripted


def loads(text):
    """The lines of a kernel that read what is joined."""
    return [line for line in text.splitlines() if re.search(r"= .*(?<!args\.)\b(cat|stack)_\d+_from\b", line)]


def images(device, widths, side=6, dtype=torch.float32, last=False):
    form = torch.channels_last if last else torch.contiguous_format
    made = [torch.randn(2, width, side, side, device=device).to(dtype) for width in widths]
    return [x.contiguous(memory_format=form) for x in made]


@pytest.mark.parametrize("last", [False, True])
def test_one_load_for_all(device, target, sources, last):
    tensors = images(device, [8] * 24, 4, torch.bfloat16, last)
    scripted = compare("torch.cat(xs, 1).relu() * 2.0", tensors)
    [text] = sources
    assert len(loads(text)) == 1 and "_in = " not in text
    assert f"const bfloat16_t* {re.search('(cat_[0-9]+)_from', text)[1]}_from[24];" in text
    if target != "cpu":
        assert "= load<8>(" in loads(text)[0]
    assert len(text.splitlines()) < 60
    # piece sizes are numbers of the call
    for widths in ([8] * 24, [16] * 23 + [8], [8, 24] * 12):
        tensors = images(device, widths, 4, torch.bfloat16, last)
        with counted() as rise:
            compare("torch.cat(xs, 1).relu() * 2.0", tensors, scripted)
        assert rise["kernels_compiled"] == 0 and rise["plans_built"] == 0


PROGRAMS = {
    "rows": "torch.cat(xs, 0) * 2.0",
    "columns": "torch.cat(xs, -1).relu() * 2.0",
    "stacked in front": "torch.stack(xs, 0) * 2.0",
    "stacked in between": "torch.stack(xs, 1).relu() * 2.0",
    "stacked behind": "torch.stack(xs, -1) * 2.0 + 1.0",
    "sum along it": "(torch.cat(xs, -1) * 2.0).sum(-1)",
    "sum along another": "(torch.cat(xs, 1) * 2.0).sum(0)",
    "softmax": "torch.softmax(torch.cat(xs, -1) * 0.5, -1)",
    "softmax along another": "torch.softmax(torch.cat(xs, -1) * 0.5, 1)",
    "variance of stacked": "torch.var(torch.stack(xs, 1) * 2.0, 1, unbiased=False)",
    "sum of stacked": "(torch.stack(xs, -1) * 2.0).sum(-1)",
    "transposed": "torch.cat(xs, 1).transpose(1, 2) * 2.0 + 1.0",
    "split dims": "torch.cat(xs, 2).view(2, 3, 4, -1).relu() + 1.0",
    "merged dims": "(torch.cat(xs, 1).view(2, -1) + 1.0).relu()",
    "twice": "torch.cat(xs, 1) * 2.0 + torch.cat(xs, 1).exp()",
    "sum of all": "(torch.cat(xs, 0) * 2.0).sum()",
    "flipped": "torch.flip(torch.cat(xs, 2), [2]) * 2.0",
    "a part": "torch.cat(xs, 2)[..., 3:7] * 2.0",
    "beside one of them": "torch.stack(xs, 0) * 2.0 + x1",
    "in a cat": "torch.cat((torch.cat(xs, 1), x0 * 2.0), 1) + 1.0",
}


@pytest.mark.parametrize("text", PROGRAMS)
@pytest.mark.parametrize("count", [3, MANY])
def test_values(device, target, text, count):
    compare(PROGRAMS[text], [torch.randn(2, 3, 4, device=device) for _ in range(count)], ops=20)


@pytest.mark.parametrize("count", [9, 16, 17, 31, 32])
def test_any_number_of_tensors(device, count):
    compare("torch.cat(xs, 1) * 2.0", [torch.randn(3, k % 5, device=device) for k in range(count)])


def test_more_are_left_to_torch(device):
    scripted = compare(
        "(torch.cat(xs, 1) * 2.0).relu()", [torch.randn(3, 2, device=device)] * 33, fused=False
    )
    assert [set(kinds(group)) & {"aten::cat"} for group in groups(scripted)] == [set()]
    mixed = [torch.randn(3, 2, device=device).to(d) for d in [torch.float32, torch.float64] * 5]
    scripted = compare("(torch.cat(xs, 1) * 2.0).relu()", mixed, fused=False)
    assert [set(kinds(group)) & {"aten::cat"} for group in groups(scripted)] == [set()]


@pytest.mark.parametrize("dim", [0, 1])
def test_sizes_of_0_and_1(device, target, dim):
    for sizes in (
        [0, 3, 0, 0, 1, 1, 4, 0, 2, 0],
        [1] * 10,
        [0] * 9 + [1],
        [1] + [0] * 9,
        [0] * 10,
        [5] + [1] * 9,
    ):
        shapes = [(n, 3) if dim == 0 else (3, n) for n in sizes]
        compare(f"torch.cat(xs, {dim}) * 2.0", [torch.randn(s, device=device) for s in shapes])


DTYPES = [
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(device, target, dtype):
    made = [(torch.randn(4, 2 * k, device=device) * 3).to(dtype) for k in range(10)]
    compare("torch.cat(xs, 1) == torch.cat(xs, 1).flip(1)", made)


def test_what_lies_in_other_tensors_is_not_seen(device, target):
    """0 times an element of another tensor would not be 0."""
    tensors = [
        torch.full((3, 8), value, device=device) for value in [1.0, float("nan"), 2.0, float("inf")] * 3
    ]
    for dim in (0, 1):
        compare(f"torch.cat(xs, {dim}) * 1.0", tensors)
        compare(f"torch.stack(xs, {dim}) * 0.0", tensors)


def test_what_lies_around_a_tensor_is_not_read(device, target):
    memory = torch.full((40, 64), float("nan"), device=device)
    memory[8:12, 8:24] = torch.randn(4, 16, device=device)
    for columns in (slice(8, 16), slice(9, 16), slice(9, 10)):
        compare("torch.cat(xs, 1) * 2.0", [memory[8:12, columns]] * 10)
        compare("torch.cat(xs, 1).sum(1) * 2.0", [memory[8:12, columns], memory[8:12, 8:24]] * 5)


def odd_layouts(device):
    """Tensors of [2, 8, 4, 4] that lie in memory in every way."""
    plain = torch.randn(2, 8, 4, 4, device=device)
    wide = torch.randn(2, 16, 4, 8, device=device)
    yield plain
    yield plain.contiguous(memory_format=torch.channels_last)
    yield plain.transpose(2, 3)
    yield plain[:1].expand(2, 8, 4, 4)
    yield plain[:, :, :1, :1].expand(2, 8, 4, 4)
    yield wide[:, ::2, :, 1::2]
    yield wide.flatten()[3:515].view(2, 8, 8, 4)[:, :, ::2]
    yield torch.randn(4, 8, 2, 4, device=device).permute(2, 1, 0, 3)


@pytest.mark.parametrize("dim", [0, 1, 3])
def test_memory_formats(device, target, dim):
    tensors = list(odd_layouts(device))
    compare(f"torch.cat(xs, {dim}) * 2.0", [*tensors, *tensors[:3]])
    compare(f"torch.stack(xs, {dim}) * 2.0", tensors)
    lasts = [tensors[1]] * 9
    compare(f"torch.cat(xs, {dim}) * 2.0", lasts)
    # another layout of the same class of calls, or a new plan
    compare(f"torch.cat(xs, {dim}) * 2.0", [x[:, :, :3] for x in lasts])


def test_views_of_tensors(device, target):
    views = "[" + ", ".join(f"x{k}[:, {k % 3}:].transpose(0, 1)" for k in range(10)) + "]"
    names = ", ".join(f"x{k}" for k in range(10))
    text = f"torch.cat({views}, 0) * 2.0"
    scripted = script(f"def f({names}):\n    return {text}\n")
    tensors = [torch.randn(4, 6, device=device) for _ in range(10)]
    with no_fallback(), torch.no_grad():
        fuse(scripted, *tensors)
        assert_matches(scripted(*tensors), script(f"def f({names}):\n    return {text}\n")(*tensors), ops=4)


def test_what_is_computed_is_stored_first(device, target):
    """Of more than eight tensors, those that the group computes go through memory; fewer are chosen from."""
    names = ", ".join(f"x{k}" for k in range(10))
    values = ", ".join(f"x{k} * {k}.0" if k % 3 == 0 else f"x{k}" for k in range(10))
    tensors = [torch.randn(3, 4, device=device) for _ in range(10)]
    for dim in (0, 1):
        source = f"def f({names}):\n    return torch.cat([{values}], {dim}).relu() + 1.0\n"
        scripted = script(source)
        with no_fallback(), torch.no_grad():
            fuse(scripted, *tensors)
            assert_matches(scripted(*tensors), script(source)(*tensors), ops=4)


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Conv2d(2, 2, 1, bias=False), torch.nn.Conv2d(2, 2, 1, bias=False)
        self.norm = torch.nn.BatchNorm2d(2 * MANY)

    def forward(self, image: torch.Tensor):
        x, y = self.left(image), self.right(image)
        joined = torch.cat((x, y, x, y, x, y, x, y, x, y, x, y), 1)
        return torch.relu(self.norm(joined))


def test_a_check_of_what_is_joined_does_not_part_it_from_its_norm(device):
    """As in DenseNet, where a norm asks for the rank: it is known from that of the tensors."""
    module = Normed().to(device).eval()
    [image] = images(device, [2], 3)
    scripted = torch.jit.script(module)
    with no_fallback(), torch.no_grad():
        fuse(scripted, image)
        assert_matches(scripted(image), module(image), ops=8)
    assert [{"aten::cat", "aten::batch_norm"} <= set(kinds(group)) for group in groups(scripted)] == [True]


def test_indices_of_64_bits(device, target, sources, monkeypatch):
    monkeypatch.setattr("tsfuser.schedule.pointwise.is_wide", lambda *given: True)
    compare("torch.cat(xs, 1) * 3.0", [torch.randn(3, k, device=device) for k in range(12)])
    assert "int64_t cat" in sources[0] and re.search(r"passed<15>\(args.cat_\d+_ends", sources[0])


def test_gradients(device, target):
    """Lists of more than eight are joined outside of differentiable graphs. The backward is slices."""
    for count in (4, 10):
        source = program(count, "(torch.cat(xs, 1) * 2.0).sigmoid()")
        scripted, plain = script(source), script(source)
        for _ in range(4):
            tensors = [torch.randn(3, 4, device=device, requires_grad=True) for _ in range(count)]
            weight = torch.randn(3, 4 * count, device=device)
            grads = torch.autograd.grad(scripted(*tensors), tensors, weight)
            for grad, eager in zip(grads, torch.autograd.grad(plain(*tensors), tensors, weight)):
                assert_matches(grad, eager, ops=8)


def test_what_torch_compile_joins(device):
    def joined(*tensors):
        return torch.cat(tensors, 1).relu() * 2.0

    compiled = torch.compile(joined, backend="tsfuser")
    for rows in (3, 5):
        tensors = [torch.randn(rows, 4, device=device, requires_grad=True) for _ in range(12)]
        with counted() as rise:
            result, eager = compiled(*tensors), joined(*tensors)
        assert_matches(result, eager, ops=4)
        weight = torch.randn_like(eager)
        for grad, own in zip(*(torch.autograd.grad(y, tensors, weight) for y in (result, eager))):
            assert_matches(grad, own, ops=4)
    assert rise["launches"] == 1
