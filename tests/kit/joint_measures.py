"""Programs, and what their training saves and launches: with `tsfuser.joint`, and scripted as today.

Example: `scripted(norm_block, operands(norm_block))` -> `Measure(saved=8448, ours=(1, 2), torchs=(0, 0))`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tsfuser
from tsfuser.frontends.dynamo.groups.passes import fuse
from tsfuser.frontends.dynamo.translation.translate import Translation
from tsfuser.graph.functionalize import functionalize
from tsfuser.graph.types import infer_missing_types
from tsfuser.joint.passes import divide
from tsfuser.joint.reverse import reverse
from tsfuser.joint.seeds import draw_again

from .allocations import allocations
from .derivatives import runnable, traced
from .models import EncoderLayer
from .support import counted, fresh, no_fallback

#: Ops of torch that launch nothing.
_IDLE = frozenset(
    """aten::empty aten::empty_strided aten::empty_like aten::as_strided aten::view aten::_unsafe_view aten::t
    aten::transpose aten::permute aten::expand aten::unsqueeze aten::squeeze aten::select aten::slice
    aten::detach aten::detach_ detach detach_ aten::alias aten::resolve_conj aten::resolve_neg aten::item
    aten::_local_scalar_dense aten::result_type aten::size aten::_reshape_alias aten::split aten::unbind
    aten::split_with_sizes aten::reshape aten::to aten::contiguous aten::narrow aten::chunk aten::flatten
    aten::resize_ aten::as_strided_ aten::new_empty""".split()
)


@dataclass(frozen=True)
class Measure:
    """`saved`: bytes that the forward saves, besides what is its input or result. `ours`, `torchs`: kernels
    that it and the backward launch."""

    saved: int
    ours: tuple[int, int]
    torchs: tuple[int, int]


def norm_block(x: Tensor, w: Tensor, b: Tensor):
    h = F.layer_norm(x, [64], w, b, 1e-5)
    return x + F.silu(h) * 0.5


def mlp(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor):
    return F.linear(F.gelu(F.linear(x, w, b)), v, c)


def image(x: Tensor, w: Tensor, scale: Tensor, shift: Tensor):
    y = F.conv2d(x, w, None, [1, 1], [1, 1])
    return F.relu_(F.batch_norm(y, None, None, scale, shift, True, 0.1, 1e-5))


def encoder(x: Tensor, qkv: Tensor, out: Tensor, w1: Tensor, w2: Tensor, s1: Tensor, t1: Tensor, s2: Tensor):
    h = F.linear(x, qkv).view(x.size(0), x.size(1), 3, 4, 8).permute(2, 0, 3, 1, 4)
    q, k, v = h[0], h[1], h[2]
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.35
    weights = F.dropout(F.softmax(scores, -1), 0.1, True)
    h = torch.matmul(weights, v).transpose(1, 2).reshape(x.size(0), x.size(1), 32)
    x = F.layer_norm(x + F.dropout(F.linear(h, out), 0.1, True), [32], s1, t1, 1e-5)
    h = F.linear(F.gelu(F.linear(x, w1)), w2)
    return F.layer_norm(x + F.dropout(h, 0.1, True), [32], s2, t1, 1e-5)


def rotary(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor):
    h = F.linear(x, w)
    first, second = h.chunk(2, -1)
    return (h * cos + torch.cat([-second, first], -1) * sin) * 0.5


def classify(table: Tensor, w: Tensor, index: Tensor, target: Tensor):
    return F.cross_entropy(F.linear(table[index], w), target)


def head(x: Tensor, w: Tensor, target: Tensor):
    """With logits of 16 bits, as under autocast."""
    return F.cross_entropy(F.linear(x.to(torch.bfloat16), w.to(torch.bfloat16)).float(), target)


def attention(q: Tensor, k: Tensor, v: Tensor):
    """With products of 16 bits, as under autocast."""
    scores = torch.matmul(q.to(torch.bfloat16), k.to(torch.bfloat16).transpose(-1, -2)) * 0.35
    return torch.matmul(F.softmax(scores.float(), -1).to(torch.bfloat16), v.to(torch.bfloat16))


#: Sizes of float32 operands; those of whole numbers say below what.
PROGRAMS = {
    norm_block: [(32, 64), (64,), (64,)],
    mlp: [(4, 16, 32), (128, 32), (128,), (32, 128), (32,)],
    image: [(4, 3, 12, 12), (8, 3, 3, 3), (8,), (8,)],
    encoder: [(4, 16, 32), (96, 32), (32, 32), (64, 32), (32, 64), (32,), (32,), (32,)],
    rotary: [(2, 16, 32), (32, 32), (16, 32), (16, 32)],
    classify: [(50, 32), (40, 32), ((24,), 50), ((24,), 40)],
    head: [(24, 32), (100, 32), ((24,), 100)],
    attention: [(2, 4, 16, 8)] * 3,
}


def operands(program, device="cpu", dtype=torch.float32):
    """Those of whole numbers want no gradient, nor do the angles of `rotary`."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for shape in PROGRAMS[program]:
        if isinstance(shape[0], tuple):
            made.append(torch.randint(shape[1], shape[0], generator=generator).to(device))
        else:
            tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) * 0.3
            made.append(tensor.requires_grad_(program is not rotary or len(made) < 2))
    return made


def scripted(program, given, calls=5):
    """Today's training, once it is fused."""
    function = fresh(program)
    with tsfuser.fuser(), no_fallback():
        for _ in range(calls):
            saved = []
            leaves = [t for t in given if t.requires_grad]
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                result, forward = _counted(lambda: function(*given))
            grad = torch.ones_like(result)
            _, backward = _counted(lambda: torch.autograd.grad(result, leaves, grad))
    return _measure(saved, [*given, result], forward, backward)


class Layers(torch.nn.Module):
    """Encoder layers with one mask, behind each other."""

    def __init__(self, count: int, width: int = 64, heads: int = 4):
        super().__init__()
        self.layers = torch.nn.ModuleList(EncoderLayer(width, heads) for _ in range(count))

    def forward(self, x: Tensor, mask: Tensor):
        for layer in self.layers:
            x = layer(x, mask)
        return x


def trained(module, given, calls=7):
    """Today's training of a module in 16 bits, as autocast has it, once it is fused."""
    # else it shares what was compiled for the last one of its class
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    run, wanted = torch.jit.script(module), list(module.parameters())
    with tsfuser.fuser(), no_fallback():
        for _ in range(calls):
            saved = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
                with torch.autocast(given[0].device.type, torch.bfloat16):
                    result, forward = _counted(lambda: run(*given))
            grad = torch.ones_like(result)
            _, backward = _counted(lambda: torch.autograd.grad(result, wanted, grad))
    return _measure(saved, [*given, *wanted, result], forward, backward)


def compiled(program, given, calls=3, dynamic=False):
    """Training by torch.compile, and its results and gradients."""
    torch._dynamo.reset()
    function = torch.compile(program, backend="tsfuser", dynamic=dynamic, fullgraph=True)
    leaves = [t for t in given if t.requires_grad]
    for _ in range(calls):
        torch.manual_seed(5)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            result, forward = _counted(lambda: function(*given))
        grad = torch.ones_like(result)
        gradients, backward = _counted(lambda: torch.autograd.grad(result, leaves, grad))
    return _measure(saved, [*given, result], forward, backward), result.detach(), gradients


def peak(module, given, calls=7):
    """The most bytes that such a step of training has at one time, besides what was there before."""
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    run, wanted, place = torch.jit.script(module), list(module.parameters()), given[0].device.type

    def step():
        with torch.autocast(place, torch.bfloat16):
            result = run(*given)
        torch.autograd.grad(result, wanted, result.detach())

    with tsfuser.fuser(), no_fallback():
        for _ in range(calls):
            step()
        return allocations(step, place)[1]


def joint(program, given, calls=2):
    """The same with a joint graph, and its results and gradients."""
    mask = [t.requires_grad for t in given]
    given = [t.detach() for t in given]
    graph = infer_missing_types(functionalize(traced(program, given)))
    parts = divide(reverse(graph, mask))
    draw_again(parts)
    forward, backward = program_of(parts.forward), program_of(parts.backward)
    for _ in range(calls):
        made, first = _counted(lambda: forward(*given))
        saved = [given[i] for i in parts.saved_inputs] + [made[i] for i in parts.saved_outputs]
        grads = [torch.ones_like(made[i]) for i in parts.asked]
        gradients, second = _counted(lambda: backward(*grads, *saved))
    tensors = [t for t in saved if isinstance(t, Tensor)]
    measure = _measure(tensors, [*given, *made[: parts.results]], first, second)
    return measure, made[: parts.results], gradients


def program_of(graph):
    """The graph with groups, as torch.compile's door makes them."""
    graph = graph.copy()
    count = len(list(graph.outputs()))
    fuse(Translation(graph, results=list(range(count)), orders=[None] * count))
    return runnable(graph)


def _is_op(event):
    """Not a launch on a GPU, and no op that only arranges."""
    return event.name.startswith("aten::") and event.name not in _IDLE


def _counted(call):
    """What the call gives, and how many kernels of ours and torch's it launches."""
    with counted() as rise, torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        made = call()
    events = [e for e in seen.events() if _is_op(e)]
    leaves = [e for e in events if not any(map(_is_op, e.cpu_children))]
    return made, (rise["launches"], len(leaves))


def _measure(saved, alive, forward, backward):
    known = {t.untyped_storage().data_ptr() for t in alive}
    memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
    size = sum(n for place, n in memory.items() if place not in known)
    return Measure(size, (forward[0], backward[0]), (forward[1], backward[1]))
