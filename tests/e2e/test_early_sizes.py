"""Sizes of results of groups follow from those of the groups' operands
(csrc_stubs/torchscript/early_sizes.cpp, and the rules of tsfuser/grouping/size_rules.py): a channel shuffle
is in one differentiable graph with what it shuffles, windows of an image with what normalised it."""

import pytest
import torch

import tsfuser
from kit.autodiff_only import by_joint_graphs
from kit.opsweep import plain
from kit.support import all_graphs, assert_matches, groups, script, stored, train
from tsfuser import _C
from tsfuser.ops import table

pytestmark = pytest.mark.graphs

SHUFFLE = """
    b, c, h, k = y.size()
    y = y.view(b, 2, c // 2, h, k).transpose(1, 2).contiguous().view(b, c, h, k)
    return torch.sigmoid(y * 2.0)
"""
JOINS = {
    "chunks": "p, q = x.chunk(2, 1); y = torch.cat((torch.tanh(p * 2.0), torch.relu(q)), 1)",
    "three": "y = torch.cat((torch.tanh(x), w * 2.0, torch.relu(x), w.exp()), 1)",
    "last dim": "y = torch.cat((torch.tanh(x), torch.relu(x) * 2.0), -1)",
    "other sizes": "y = torch.cat((torch.tanh(x), w[:, :2] * 2.0, x[:, :2]), 1)",
    "broadcast": "y = torch.cat((torch.tanh(x) + w[:1], x * 2.0), 1)",
    "convolution": "y = torch.cat((x * 2.0, torch.relu(torch.conv2d(x, k))), 1)",
    "a branch": "y = torch.cat((x * 2.0, torch.tanh(w)), 1)\n    if y.size(1) > 4:\n        y = torch.sin(y)",
}


def functions(join):
    lines = "".join(f"    {line.strip(' ')}\n" for line in JOINS[join].split("; "))
    source = f"def f(x: Tensor, w: Tensor, k: Tensor):\n    x = x * 1.5\n{lines}{SHUFFLE.lstrip(chr(10))}"
    return plain(source), script(source)


def operands(device="cpu", sizes=(3, 4, 5, 6)):
    generator = torch.Generator().manual_seed(3)
    shapes = (sizes, sizes, (sizes[1], sizes[1], 1, 1))
    made = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [t.to(device).requires_grad_() for t in made]


@pytest.mark.parametrize("join", JOINS)
def test_a_shuffle_is_eagers_for_any_sizes(device, join):
    eager, scripted = functions(join)
    with tsfuser.fuser():
        for sizes in [(3, 4, 5, 6)] * 2 + [(2, 4, 3, 2), (1, 8, 1, 7), (3, 4, 5, 6)]:
            inputs = operands(device, sizes)
            out, gradients = train(scripted, inputs)
            want, expected = train(eager, inputs, calls=1)
            for got, theirs in zip([out, *gradients], [want, *expected]):
                assert (got is None) == (theirs is None)
                if got is not None:
                    assert_matches(got, theirs, ops=100)


def test_a_shuffle_is_one_group_each_way(device):
    _, scripted = functions("three")
    x, w, k = operands(device)
    with tsfuser.fuser():
        with torch.no_grad():
            for _ in range(3):
                scripted(x, w, k)
            assert len(groups(scripted)) == 1
        _, scripted = functions("three")
        train(scripted, [x, w, k])
        assert len(groups(scripted)) == 2


@pytest.mark.parametrize("join", ["chunks", "three", "last dim"])
def test_a_shuffle_is_differentiated_with_what_it_shuffles(join):
    _, scripted = functions(join)
    with tsfuser.fuser():
        train(scripted, operands())
    graphs = [g for g in all_graphs(scripted) if g.findNode("prim::DifferentiableGraph", True)]
    assert [len(g.findAllNodes("prim::DifferentiableGraph", True)) for g in graphs] == [1]
    assert not [node for node in graphs[0].nodes() if node.kind() == "aten::cat"]


def test_what_is_joined_is_not_stored_for_its_sizes(device):
    source = """
def f(x: Tensor, w: Tensor):
    y = torch.tanh(torch.cat((x * 2.0, w * 3.0, x), 1))
    return torch.sigmoid(y) + y.size(1)
"""
    eager, scripted = plain(source), script(source)
    x, w, _ = (t.detach() for t in operands(device))
    with tsfuser.fuser():
        for other in (w, w, w, w, w[:, :2], w[:, 1:]):
            assert_matches(scripted(x, other), eager(x, other), ops=20)
    assert [stored(group) for group in groups(scripted)] == [1]


#: y is made of x[4, 6, 2] and w of that size; the rest of the program needs its sizes.
RULES = {
    "same": "y = torch.layer_norm(torch.relu(x * w), [x.size(2)])",
    "broadcast": "y = torch.tanh(x[:1] * w[:, :1] + 1.0)",
    "broadcast of three": "y = torch.where(x > w[:, :1], x[..., :1], 2.0) + torch.addcmul(w, x, x[:1])",
    "reduced": "y = torch.exp(x).sum([-1, 0], keepdim=True) * w.mean(1, True)",
    "reduced away": "y = (x * w).var(1) + x.amax(0)[None, 0]",
    "all reduced": "y = (x * w).sum() * x.mean([0, 1, 2], True)",
    "squeezed": "y = (x * w)[:, :1].squeeze(1) + x[..., :1].squeeze()[:, :1]",
    "unsqueezed": "y = torch.tanh(x * w).unsqueeze(-2) + 1.0",
    "permuted": "y = torch.tanh(x * w).permute(-1, 0, 1) * 2.0",
    "swapped": "y = torch.tanh(x * w).transpose(-1, 0) * 2.0",
    "sliced": "y = torch.tanh(x * w)[1:, ::2, :-1] * 2.0",
    "selected": "y = torch.tanh(x * w)[:, -1] * 2.0",
    "viewed": "y = torch.tanh(x * w).view(-1, x.size(2)).reshape(x.size(1), -1) * 2.0",
    "flattened": "y = torch.tanh(x * w).flatten(1) + 1.0",
    "padded": "y = torch.nn.functional.pad(torch.tanh(x * w), [1, 2, 0, -1]) * 2.0",
    "windows": "y = torch.roll(torch.nn.functional.pad(torch.sin(x * w), [0, 0, 1, 1]), [1], [1]) * 2.0",
    "joined": "y = torch.sin(torch.cat((torch.tanh(x) * 2.0, w[:1]), 0))",
    "a list that grows": "l = [x.size(0), -1]\n    y = torch.tanh(x * w).view(l)\n    l.append(3)",
    "a list that is changed": "l = [-1, 2]\n    y = torch.tanh(x * w).view(l)\n    l[1] = x.size(0)",
    "a branch": "y = torch.tanh(x * w)\n    if y.size(0) > 3:\n        y = y[:3] * 2.0",
    "a loop": "y = torch.tanh(x * w)\n    for i in range(2):\n        y = torch.cat((y, y), y.dim() - 1)",
    "a loop's own": "y = x * w\n    for i in range(2):\n        z = torch.tanh(y)\n"
    "        y = torch.sigmoid(z).view(z.size(0), -1).view(z.size())",
    "into another tensor": "z = torch.empty(0, dtype=x.dtype, device=x.device)\n"
    "    torch.mul(x.detach(), 2.0, out=z)\n    y = (x * w + z.size(0)) * z.mul(w)",
    "written to": "y = torch.tanh(x * w)\n    z = y * 1.0\n    z.transpose_(0, 1)\n    y = y + z.mean()",
}
ASKED = {
    "all": "s = y.size()\n    return torch.sigmoid(y).reshape(-1) * s[0] + len(s)",
    "one": "return torch.sigmoid(y).reshape(y.size(0) * y.size(-1), -1) * 2.0",
    "the rank": "return torch.sigmoid(y).unsqueeze(y.dim()) * y.dim()",
    "dtype and device": "n = torch.ones(1, dtype=y.dtype, device=y.device)\n    return torch.sigmoid(y) * n",
}


#: By default each rule is asked for all sizes, and for one other thing.
ASKED_OF_RULES = [
    pytest.param(rule, asked, marks=() if asked == "all" or k % 3 == n else pytest.mark.long)
    for k, rule in enumerate(RULES)
    for n, asked in enumerate(ASKED, -1)
    if (rule, asked) != ("all reduced", "one")
]


@pytest.mark.parametrize("rule, asked", ASKED_OF_RULES)
def test_rules(device, rule, asked):
    text = f"def f(x: Tensor, w: Tensor):\n    {RULES[rule]}\n    {ASKED[asked]}\n"
    eager, scripted = plain(text), script(text)
    with tsfuser.fuser():
        for sizes in [(4, 6, 2)] * 4 + [(3, 2, 4), (4, 6, 2), (5, 3, 2)]:
            inputs = operands(device, sizes)[:2]
            out, gradients = train(scripted, inputs, calls=1)
            want, expected = train(eager, inputs, calls=1)
            for got, theirs in zip([out, *gradients], [want, *expected]):
                assert_matches(got, theirs, ops=100, strides=False)


@pytest.mark.parametrize("rule", ["same", "viewed", "padded", "windows", "joined", "permuted", "selected"])
def test_what_makes_a_tensor_is_in_one_graph_with_what_needs_its_sizes(rule):
    text = f"def f(x: Tensor, w: Tensor):\n    {RULES[rule]}\n    {ASKED['all']}\n"
    scripted = script(text)
    with tsfuser.fuser():
        train(scripted, operands(sizes=(4, 6, 2))[:2])
    (graph,) = [g for g in all_graphs(scripted) if g.findNode("prim::DifferentiableGraph", True)]
    assert len(graph.findAllNodes("prim::DifferentiableGraph", True)) == 1


@pytest.mark.parametrize(
    "body, said",
    [
        ("y = torch.tanh(x * w); return y.size(7)", "Dimension out of range"),
        ("y = torch.tanh(x * w); return y.size(n) + (y * 2.0).sum()", "Dimension out of range"),
        ("y = torch.tanh(x * w).view(n, 5); return y.size(0)", "invalid for input of size"),
        ("y = torch.tanh(x * w).view(n, 5); return y * y.size(0)", "invalid for input of size"),
        ("y = torch.tanh(x) + w[:, :n]; return y * y.size(0)", "must match the size"),
        ("y = torch.tanh(x).permute(0, n, 1); return y * y.size(0)", "imension"),
        ("y = torch.tanh(x * w).view(n, 5); return y.dtype", "invalid for input of size"),
        ("y = torch.tanh(x * w).view(n, 5); return y.dtype + y.size(0)", "invalid for input of size"),
    ],
)
@pytest.mark.filterwarnings("ignore::tsfuser.TsfuserWarning")
def test_errors_are_eagers(body, said):
    lines = "".join(f"    {line.strip()}\n" for line in body.split("; "))
    text = f"def f(x: Tensor, w: Tensor, n: int):\n{lines}"
    eager, scripted = plain(text), script(text)
    x, w, _ = operands(sizes=(4, 6, 2))
    with tsfuser.fuser():
        for function in (eager, *[scripted] * 4):
            with pytest.raises((RuntimeError, IndexError), match=said):
                function(x, w, 4)


SIZES = {
    "nothing": "e = torch.zeros(0, dtype=torch.float64); y = torch.cat((e, torch.tanh(x), e, x), 0)",
    "turned": "z = x * 2.0; y = torch.cat((z, x), 0); z.transpose_(0, 1)",
    "with a dim more": "z = x * 2.0; y = torch.cat((z, torch.tanh(x)), 0); z.unsqueeze_(0)",
    "joined twice": "z = torch.cat((x, x * 2.0), 0); y = torch.cat((torch.tanh(z), x), 0)",
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_those_of_the_result(name):
    lines = "".join(f"    {line.strip()}\n" for line in SIZES[name].split("; "))
    source = (
        f"def f(x: Tensor):\n{lines}    s = y.size()\n    return (y * 2.0).view(s[0] * s[1], -1) + s[0]\n"
    )
    eager, scripted = plain(source), script(source)
    with tsfuser.fuser():
        for sizes in [(2, 3, 4)] * 4 + [(3, 3, 2)] * 2:
            x = torch.randn(sizes, dtype=torch.float64, requires_grad=True)
            out, gradients = train(scripted, [x], calls=1)
            want, expected = train(eager, [x], calls=1)
            assert_matches(out, want, ops=20)
            assert_matches(gradients[0], expected[0], ops=20)


def test_errors_are_the_ops():
    source = """
def f(x: Tensor, y: Tensor):
    z = torch.cat((torch.tanh(x), y * 2.0), 1)
    n, c = z.size()
    return z.view(c, n) * 2.0
"""
    scripted = script(source)
    x = torch.randn(4, 3, requires_grad=True)
    with tsfuser.fuser():
        for _ in range(4):
            train(scripted, [x, x])
        for other in (torch.randn(5, 3), torch.randn(4, 3, 2)):
            with pytest.raises(RuntimeError):
                scripted(x, other)


MOVED = {
    "windows": "y = y.view(2, b // 2, -1).transpose(0, 1).reshape(b, -1)",
    "rolled": "y = torch.roll(y, [1, 2], [0, 1])[:, :c]",
    "padded": "y = torch.nn.functional.pad(y, [0, 1])[:, 1:].contiguous()",
    "selected": "y = y.view(b, 1, c).expand(-1, 2, -1)[:, 1]",
}
NOISE = """
def f(x: Tensor, w: Tensor):
    b, c = x.size()
    y = torch.mm(torch.tanh(x), w)
    {}
    noise = torch.empty([y.size(0), 1], dtype=y.dtype, device=y.device)
    noise.fill_(0.5)
    return torch.sigmoid(y * noise) * 2.0
"""


@pytest.mark.parametrize("moved", MOVED)
def test_what_only_moves_elements_is_in_one_group_with_what_asks_for_its_dtype(device, moved):
    """Noise of the dtype of the result comes between the two, as in stochastic depth behind windows."""
    text = NOISE.format(MOVED[moved])
    eager, scripted = plain(text), script(text)
    with tsfuser.fuser():
        for b in (4, 4, 4, 6):
            inputs = [
                torch.randn(sizes, dtype=torch.float64, device=device, requires_grad=True)
                for sizes in ((b, 6), (6, 6))
            ]
            out, gradients = train(scripted, inputs)
            want, expected = train(eager, inputs, calls=1)
            for got, theirs in zip([out, *gradients], [want, *expected]):
                assert_matches(got, theirs, ops=100, strides=False)
    found = [g for g in all_graphs(scripted) if g.findNode("prim::DifferentiableGraph", True)]
    moving = {row.name for row in table.all_rows() if row.moves}
    assert found and (len(found) == 1 or by_joint_graphs())
    for graph in found:
        assert not {node.kind() for node in graph.nodes()} & {*moving, *(kind for kind, _ in _C.twins())}
