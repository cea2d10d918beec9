"""Under autocast the backward gets what has 16 bits, instead of the float32 copies and what is computed of
them."""

import math

import pytest
import torch
from torch import Tensor

import tsfuser
from kit.support import fresh, no_fallback, script
from tsfuser.frontends.torchscript import passes
from tsfuser.graph.wrapper import GROUP, all_nodes, is_tensor

pytestmark = [
    pytest.mark.graphs,
    pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"),  # a pass has failed
]


def tanh_gelu(x: Tensor, w: Tensor, b: Tensor):
    """As transformers' GPT-2 has it: `pow` and what follows is in float32."""
    h = torch.addmm(b, x, w)
    return 0.5 * h * (1.0 + torch.tanh(0.7978845608028654 * (h + 0.044715 * torch.pow(h, 3.0))))


def scaled_view(x: Tensor, w: Tensor, b: Tensor):
    """As a block of ConvNeXt ends."""
    h = torch.nn.functional.linear(torch.nn.functional.gelu(x), w.t())
    return h.permute(1, 0) * b.unsqueeze(1)


def scaled_part(x: Tensor, w: Tensor, b: Tensor):
    first, second = torch.nn.functional.linear(torch.nn.functional.gelu(x), w.t()).chunk(2, 1)
    return first * b[:12] + torch.exp(second * b[12:])


PROGRAMS = [tanh_gelu, scaled_view, scaled_part]


def tensors(device, sizes=(10, 16, 24)):
    generator = torch.Generator().manual_seed(3)
    m, k, n = sizes
    shapes = ((m, k), (k, n), (n,))
    found = [torch.randn(s, generator=generator) / math.sqrt(max(1, s[0])) for s in shapes]
    return [t.to(device).requires_grad_() for t in found]


def step(function, operands, device, change=None):
    with torch.autocast(device, torch.bfloat16):
        out = function(*operands)
    results = out if isinstance(out, tuple) else (out,)
    loss = results[0].float().square().sum()
    if change is not None:
        with torch.no_grad():
            change(results, operands)
    return [results[0].detach().float(), *torch.autograd.grad(loss, operands)]


def stored(graphs, elements):
    """dtypes of the tensors with as many elements that the groups of the graphs store."""
    found = []
    for optimised in graphs:
        for node in all_nodes(optimised.graph):
            if node.kind() == GROUP:
                for value in node.g("Subgraph").outputs():
                    if (
                        is_tensor(value)
                        and value.type().sizes()
                        and math.prod(value.type().sizes()) == elements
                    ):
                        found.append(value.type().dtype())
    return found


def assert_close(got, want):
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert (mine - theirs).abs().max() <= 2e-2 * theirs.abs().max()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("sizes", [(10, 16, 24), (1, 1, 24), (3, 65, 24)], ids=str)
def test_gradients(device, program, sizes):
    operands, scripted = tensors(device, sizes), fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(4):
            got = step(scripted, operands, device)
    assert_close(got, step(program, operands, device))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_second_derivatives(device, program):
    operands, scripted = tensors(device), fresh(program)

    def second(function):
        with torch.autocast(device, torch.bfloat16):
            out = function(*operands)
        first = torch.autograd.grad(out.float().square().sum(), operands, create_graph=True)
        return torch.autograd.grad(sum(g.float().square().sum() for g in first), operands)

    with tsfuser.fuser():
        for _ in range(4):
            got = second(scripted)
    for mine, theirs in zip(got, second(program), strict=True):
        assert (mine - theirs).abs().max() < 0.05 * theirs.abs().max()


def test_what_is_stored(device):
    """Of a gelu that is written out, its operand, which has 16 bits, and the result; in the backward, the
    gradient of the product."""
    operands, scripted = tensors(device), fresh(tanh_gelu)
    with tsfuser.fuser(), passes.watching() as seen:
        for _ in range(3):
            step(scripted, operands, device)
    assert stored(seen, 240) == [torch.bfloat16, torch.float32, torch.bfloat16]


@pytest.mark.parametrize("program", [scaled_view, scaled_part], ids=lambda f: f.__name__)
def test_a_view_of_a_product_is_not_stored(device, program):
    """It is in memory: the groups store the result, and gradients of 16 bits."""
    operands, scripted = tensors(device), fresh(program)
    with tsfuser.fuser(), passes.watching() as seen:
        for _ in range(3):
            out = step(scripted, operands, device)
    wide = [dtype for dtype in stored(seen, out[0].numel()) if dtype == torch.float32]
    assert len(wide) == 1


def with_product(x: Tensor, w: Tensor, b: Tensor):
    h = torch.mm(x, w)
    return h.transpose(0, 1) * b.unsqueeze(1), h


def with_view(x: Tensor, w: Tensor, b: Tensor):
    h = torch.mm(x, w)
    return h.transpose(0, 1) * b.unsqueeze(1), h.view(-1)


def with_part(x: Tensor, w: Tensor, b: Tensor):
    h = torch.mm(x, w)
    first, second = h.chunk(2, 1)
    return h.transpose(0, 1) * b.unsqueeze(1), second


def with_listed_part(x: Tensor, w: Tensor, b: Tensor):
    h = torch.mm(x, w)
    parts = h.split([20, 4], 1)
    return h.transpose(0, 1) * b.unsqueeze(1), parts[1]


@pytest.mark.parametrize(
    "program", [with_product, with_view, with_part, with_listed_part], ids=lambda f: f.__name__
)
def test_the_program_writes_to_the_product(device, program):
    """What is saved is the float32 copy, which the program cannot reach."""

    def change(results, operands):
        results[1].detach().zero_()

    operands, scripted = tensors(device), fresh(program)
    with tsfuser.fuser():
        for _ in range(4):
            got = step(scripted, operands, device, change)
    assert_close(got, step(program, operands, device))


@pytest.mark.parametrize("line, length", [("x = x + x * 0.5", 40), ("x = x * 1.001", 600)])
def test_deep_graphs(device, line, length):
    """Each value in front of the cast is looked at once, and without recursion."""
    lines = "\n    ".join([line] * length)
    scripted = script(
        f"def f(x: Tensor):\n    {lines}\n    y = x.float()\n    return torch.sin(y) * torch.tanh(y)\n"
    )
    x = (torch.randn(5, 7, device=device) * 1e-3).to(torch.bfloat16).requires_grad_()
    with tsfuser.fuser():
        for _ in range(3):
            [gradient] = torch.autograd.grad(scripted(x).sum(), x)
    assert gradient.dtype == torch.bfloat16 and gradient.isfinite().all()


@pytest.mark.parametrize("cast, kept", [("%n, %f, %o, %o, %e", "Param"), ("%n, %d, %f, %o, %o, %e", "to")])
def test_an_operand_on_another_device_is_not_kept_instead(cast, kept):
    """`x.to(device, dtype)` would copy it from there once more."""
    from tsfuser.frontends.torchscript.training.differentiable import rewrite

    forward = torch._C.parse_ir(f"""graph(%n : Tensor, %w : Tensor):
  %d : Device = prim::Constant[value="cpu"]()
  %f : int = prim::Constant[value=6]()
  %o : bool = prim::Constant[value=0]()
  %e : NoneType = prim::Constant()
  %c : Tensor = aten::to({cast})
  %y : Tensor = aten::mul(%c, %w)
  return (%y, %c)""")
    backward = torch._C.parse_ir(
        "graph(%g : Tensor, %c : Tensor):\n  %r : Tensor = aten::mul(%g, %c)\n  return (%r)"
    )
    forward, *_ = rewrite(forward, backward, 1, [0], [], [1], own=[0])
    assert [v.node().kind()[6:] for v in forward.outputs()] == ["mul", kept]


def test_what_the_program_may_write_to():
    """Whatever a part of a tensor comes through: a list, chunks, a view of a view."""
    from tsfuser.frontends.torchscript.training.saved import SavedValues

    forward = torch._C.parse_ir("""graph(%x : Tensor, %w : Tensor):
  %one : int = prim::Constant[value=1]()
  %two : int = prim::Constant[value=2]()
  %listed : Tensor = aten::mm(%x, %w)
  %list : Tensor[] = aten::split(%listed, %two, %one)
  %p : Tensor, %q : Tensor = prim::ListUnpack(%list)
  %chunked : Tensor = aten::mm(%x, %w)
  %c : Tensor, %d : Tensor = prim::ConstantChunk[chunks=2, dim=1](%chunked)
  %t : Tensor = aten::t(%d)
  %apart : Tensor = aten::mm(%x, %w)
  %v : Tensor = aten::t(%apart)
  %y : Tensor = aten::exp(%v)
  return (%q, %t, %y)""")
    saved = SavedValues(forward, torch._C.parse_ir("graph():\n  return ()"), 3, [], [], [])
    words = "x w one two listed list p q chunked c d t apart v y".split()
    values = [*forward.inputs(), *(v for node in forward.nodes() for v in node.outputs())]
    names = {value.debugName(): word for value, word in zip(values, words, strict=True)}

    def exposed(*written):
        return {names[found] for found in saved.exposed(written)}

    assert exposed(0, 1, 2) == {"x", "w", "listed", "list", "p", "q", "chunked", "c", "d", "t", "y"}
    assert exposed(1) == {"x", "w", "chunked", "c", "d", "t"}
    assert exposed() == {"x", "w"}
