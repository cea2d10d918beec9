"""The blocks of `scripts/bench --blocks`: what large models run between their products.

In: a name. Out: a `Model` as those of dashboard_models.py: a module whose parameters are the tensors that get
gradients, in the dtypes that the block has in a model, and the other tensors as inputs. Example:

    block = BLOCKS["cross_entropy"]
    loss = block.module(large=False)(**block.inputs(large=False, n=8))
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .dashboard_models import Model

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
MOST = 448.0  # the largest float8_e4m3fn


def cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), classes)


def smoothed_cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), classes, label_smoothing=0.1)


def token_log_probabilities(logits: Tensor, classes: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), -1).gather(-1, classes.unsqueeze(-1)).squeeze(-1)


def kl_divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    one, other = torch.log_softmax(logits.float(), -1), torch.log_softmax(teacher.float(), -1)
    return F.kl_div(one, other, reduction="batchmean", log_target=True)


def float8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / MOST
    return (x.float() / scale).clamp(-MOST, MOST).to(E4M3), scale


def float8_tensor(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = x.abs().amax().float().clamp(min=1e-12) / MOST
    narrow = (x.float() / scale).clamp(-MOST, MOST).to(E4M3)
    return narrow, narrow.t().contiguous(), scale


def float8_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 32 with a power of two each, as the OCP's MX formats have them."""
    blocks = x.float().unflatten(-1, (-1, 32))
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-120))) - 8
    narrow = (blocks * torch.exp2(-exponent)).clamp(-MOST, MOST).to(E4M3)
    return narrow.flatten(-2), (exponent + 127).to(torch.uint8).squeeze(-1)


def positions(mask: Tensor) -> Tensor:
    """Positions of the words that a mask leaves, as RoBERTa and OPT count them."""
    return torch.cumsum(mask, 1) * mask + 1


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 4 if x.size(1) < 32 else 32, weight, bias))


def capped_attention(scores: Tensor, mask: Tensor) -> Tensor:
    capped = 50.0 * torch.tanh(scores.float() / 50.0)
    return torch.softmax(capped.masked_fill(mask, -math.inf), -1).to(scores.dtype)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return x * cosine + torch.cat((-other, one), -1) * sine


def rotary(q: Tensor, k: Tensor, wq: Tensor, wk: Tensor, cosine: Tensor, sine: Tensor):
    return tuple(rotated(rms(x, w).transpose(1, 2), cosine, sine) for x, w in ((q, wq), (k, wk)))


def residual_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms(total, weight), total


def geglu(x: Tensor) -> Tensor:
    one, gate = x.chunk(2, -1)
    return one * F.gelu(gate)


def swiglu(x: Tensor) -> Tensor:
    gate, one = x.chunk(2, -1)
    return F.silu(gate) * one


def dequantized(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return ((x.to(BF16) - zero) * scale).to(BF16)


def modulated(x: Tensor, shift: Tensor, scale: Tensor, gate: Tensor) -> Tensor:
    normal = F.layer_norm(x, (x.size(-1),), eps=1e-6)
    return x + gate.unsqueeze(1) * (normal * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1))


def combined(experts: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
    return residual + (experts * weights.unsqueeze(-1)).sum(1)


def embedded(table: Tensor, places: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(words, table) + places, (table.size(1),), weight)


def routed(scores: Tensor) -> tuple[Tensor, Tensor]:
    likely = torch.softmax(scores.float(), -1)
    chosen = likely >= likely.amax(-1, keepdim=True)
    return likely * chosen, chosen.float().mean(0) @ likely.mean(0)


def top_p(logits: Tensor) -> Tensor:
    """What nucleus sampling leaves of sorted logits."""
    likely = torch.softmax(logits.float(), -1)
    before = torch.cumsum(likely, -1) - likely
    return torch.where(before < 0.9, logits, -math.inf)


def places_in_experts(chosen: Tensor) -> Tensor:
    """How many words before each one have gone to the same expert."""
    return (torch.cumsum(chosen, 0) - chosen) * chosen


def adamw(*tensors: Tensor) -> list[Tensor]:
    """A step of AdamW, all tensors of it at once: parameters, gradients, both moments."""
    count = len(tensors) // 4
    p, g, m, v = (list(tensors[k * count : (k + 1) * count]) for k in range(4))
    m = torch._foreach_lerp(m, g, 0.1)
    v = torch._foreach_add(torch._foreach_mul(v, 0.95), torch._foreach_mul(torch._foreach_mul(g, g), 0.05))
    step = torch._foreach_div(m, torch._foreach_add(torch._foreach_sqrt(v), 1e-8))
    return torch._foreach_sub(torch._foreach_mul(p, 0.999), torch._foreach_mul(step, 1e-3)) + m + v


def clipped(*gradients: Tensor) -> list[Tensor]:
    norms = torch.stack(torch._foreach_norm(list(gradients)))
    factor = (1.0 / (torch.linalg.vector_norm(norms) + 1e-6)).clamp(max=1.0)
    return torch._foreach_mul(list(gradients), factor)


class Block(torch.nn.Module):
    """`function` of parameters and inputs, by name, or, where `named` is not set, in their order."""

    def __init__(self, function: Callable, parameters: dict[str, Tensor], named: bool = True):
        super().__init__()
        self.function, self.named = function, named
        for name, tensor in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(tensor))

    def forward(self, **inputs):
        tensors = {**self._parameters, **inputs}
        return self.function(**tensors) if self.named else self.function(*tensors.values())


Sizes = Callable[[bool, int], dict[str, Tensor]]


def _block(function, tensors: Sizes, n, trained="", exact=True, named=True) -> Model:
    """`tensors(large, n)`: all tensors; `trained`: the names of those that get gradients."""
    names = trained.split()

    def make(large):
        made = tensors(large, n if large else 4)
        return Block(function, {name: made[name] for name in names}, named)

    def inputs(large, size):
        return {name: x for name, x in tensors(large, size).items() if name not in names}

    mode = "training" if names else "inference"
    return Model("torch", make, inputs, (4, n), modes=(mode,), block=True, exact=exact)


def _randn(*sizes, dtype=BF16):
    return torch.randn(sizes).to(dtype)


def _logits(words, large, n):
    words = words if large else 50
    return {"logits": _randn(n, words), "classes": torch.randint(words, (n,))}


def _narrow(large, n):
    return {"x": _randn(n, 4096 if large else 64)}


def _heads(large, n):
    length, heads, width = (2048, 16, 128) if large else (6, 2, 8)
    rows = {name: _randn(n, length, heads, width) for name in "qk"}
    angles = torch.rand(length, width)
    cosine, sine = angles.cos().to(BF16), angles.sin().to(BF16)
    return {**rows, "wq": _randn(width), "wk": _randn(width), "cosine": cosine, "sine": sine}


def _scores(large, n):
    length, heads = (1024, 16) if large else (6, 2)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    return {"scores": _randn(n, heads, length, length), "mask": mask}


def _images(large, n):
    channels, side = (320, 64) if large else (8, 4)
    x = _randn(n, channels, side, side).contiguous(memory_format=torch.channels_last)
    return {"x": x, "weight": _randn(channels), "bias": _randn(channels)}


def _rows(width, *names, weight=True):
    def tensors(large, n):
        size = width if large else 16
        made = {name: _randn(n, size) for name in names}
        return {**made, "weight": _randn(size)} if weight else made

    return tensors


def _quantized(large, n):
    width = 4096 if large else 16
    zero = _randn(n, 1)
    return {"x": torch.randint(-128, 128, (n, width), dtype=torch.int8), "scale": _randn(n, 1), "zero": zero}


def _modulation(large, n):
    length, width = (1024, 1152) if large else (5, 16)
    made = {name: _randn(n, width) for name in ("shift", "scale", "gate")}
    return {"x": _randn(n, length, width), **made}


def _experts(large, n):
    width = 2048 if large else 16
    return {
        "experts": _randn(n, 4, width),
        "weights": torch.rand(n, 4).to(BF16),
        "residual": _randn(n, width),
    }


def _chosen_experts(large, n):
    count = 64 if large else 5
    return {"chosen": F.one_hot(torch.randint(count, (n,)), count)}


def _words(large, n):
    count, length, width = (32000, 1024, 1024) if large else (50, 6, 16)
    table, places = _randn(count, width), _randn(length, width)
    return {
        "table": table,
        "places": places,
        "weight": _randn(width),
        "words": torch.randint(count, (n, length)),
    }


def _many(groups, large, n):
    """`groups` times forty tensors of a network, the last of them not negative."""
    sizes = [(1024, 1024), (1024,), (4096, 1024), (4096,)] if large else [(8, 3), (8,)]
    made = [_randn(*sizes[k % len(sizes)], dtype=torch.float32) for k in range(40)]
    return {f"t{g}_{k}": x.abs() + g for g in range(groups) for k, x in enumerate(made)}


BLOCKS: dict[str, Model] = {
    "cross_entropy": _block(cross_entropy, functools.partial(_logits, 128256), 4096, "logits"),
    "cross_entropy_odd": _block(cross_entropy, functools.partial(_logits, 50257), 4096, "logits"),
    "label_smoothing": _block(smoothed_cross_entropy, functools.partial(_logits, 32000), 8192, "logits"),
    "token_log_prob": _block(token_log_probabilities, functools.partial(_logits, 32000), 8192, "logits"),
    "kl_divergence": _block(kl_divergence, _rows(32000, "logits", "teacher", weight=False), 4096, "logits"),
    "float8_rows": _block(float8_rows, _narrow, 16384, exact=False),
    "float8_tensor": _block(float8_tensor, _narrow, 16384, exact=False),
    "float8_blocks": _block(float8_blocks, _narrow, 16384, exact=False),
    "positions": _block(
        positions, lambda big, n: {"mask": (torch.rand(n, 8192 if big else 9) > 0.2).long()}, 1024
    ),
    "group_norm_last": _block(group_norm, _images, 16, "x weight bias"),
    "capped_attention": _block(capped_attention, _scores, 8, "scores"),
    "norms_and_rotary": _block(rotary, _heads, 8, "q k wq wk"),
    "residual_norm": _block(residual_norm, _rows(4096, "x", "residual"), 8192, "x residual weight"),
    "geglu": _block(geglu, _rows(16384, "x", weight=False), 8192, "x"),
    "swiglu": _block(swiglu, _rows(16384, "x", weight=False), 8192, "x"),
    "dequantized": _block(dequantized, _quantized, 16384),
    "modulated": _block(modulated, _modulation, 32, "x shift scale gate"),
    "experts": _block(combined, _experts, 16384, "experts weights residual"),
    "embedding_norm": _block(embedded, _words, 16, "table places weight"),
    "router": _block(routed, lambda big, n: {"scores": _randn(n, 64 if big else 5)}, 65536, "scores"),
    "top_p": _block(
        top_p, lambda big, n: {"logits": _randn(n, 32000 if big else 9).sort(-1, descending=True)[0]}, 1024
    ),
    "places_in_experts": _block(places_in_experts, _chosen_experts, 16384),
    "adamw": _block(adamw, functools.partial(_many, 4), 1, named=False),
    "gradient_clip": _block(clipped, functools.partial(_many, 1), 1, named=False),
}
