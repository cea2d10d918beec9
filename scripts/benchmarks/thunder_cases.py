"""The models of `scripts/bench --thunder`, and what they are run with.

In: a name. Out: a `Case`; or, for a name of `EXECUTORS`, the function that `thunder.jit` makes of a module.
Example: `run = jitted("thunder_tsfuser", module)`.

GPT's and Llama's blocks are those of lightning-thunder's own tests. On CUDA devices modules and inputs are in
bfloat16: lightning-thunder has no need of autocast then.
"""

import importlib
import importlib.util

import torch
from torch import nn

from .compiled_cases import Case, kit

#: peer -> executors, in order; None for thunder's own choice
EXECUTORS = {
    "thunder": None,
    "thunder_compile": ("sdpa", "torchcompile"),
    "thunder_tsfuser": ("tsfuser", "sdpa"),
}


def missing():
    """Why nothing can be measured; None where lightning-thunder loads."""
    if importlib.util.find_spec("thunder") is None:
        return "lightning-thunder is not installed: pip install '.[thunder]'"
    try:
        load()
    except ImportError as error:
        return str(error)
    return None


def load():
    return importlib.import_module("kit.thunders").load()


def jitted(peer, module):
    """The module with thunder and the executors of the peer."""
    thunder, names = load(), EXECUTORS[peer]
    if names is None:
        return thunder.jit(module)
    importlib.import_module("thunder.executors.torch_compile")  # has "torchcompile"
    return thunder.jit(module, executors=list(names))


class Norms(nn.Module):
    """A residual, layer norm, GELU and RMS norm, with no matrix product."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(width), nn.Parameter(torch.ones(width))

    def forward(self, x):
        y = nn.functional.gelu(self.norm(x) + x, approximate="tanh")
        wide = y.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(y) * self.scale


class LlamaBlock(nn.Module):
    """Llama's block with the rotation of its positions."""

    def __init__(self, width, heads):
        super().__init__()
        llama = importlib.import_module("thunder.tests.llama2_model")
        sizes = {"dim": width, "n_layers": 1, "n_heads": heads, "multiple_of": 8}
        self.block = llama.TransformerBlock(0, llama.ModelArgs(**sizes, vocab_size=64, max_seq_len=1024))
        cosines, sines = llama.precompute_freqs_cis(width // heads, 1024)
        self.register_buffer("cosines", cosines)
        self.register_buffer("sines", sines)

    def forward(self, x):
        return self.block(x, self.cosines[: x.shape[1]], self.sines[: x.shape[1]])


def _gpt_block(width, heads):
    load()
    gpt = importlib.import_module("thunder.tests.nanogpt_model")
    sizes = {"block_size": 1024, "vocab_size": 64, "n_layer": 1, "n_head": heads, "n_embd": width}
    return gpt.Block(gpt.GPTConfig(**sizes, dropout=0.0))


def _llama_block(width, heads):
    load()
    return LlamaBlock(width, heads)


def _case(title, make, small, large, sizes, rank=3):
    """`make(*small)` or `make(*large)`, whose first number is the width of its inputs."""

    def module(big):
        made = make(*(large if big else small))
        return made.to(torch.bfloat16) if torch.cuda.is_available() else made

    def example(big, n):
        width = (large if big else small)[0]
        shape = (16 if big else 2, n, width) if rank == 3 else (n, width)
        return (torch.randn(shape, dtype=torch.bfloat16 if torch.cuda.is_available() else torch.float32),)

    return Case(title, module, example, sizes)


CASES = {
    "mlp": _case("MLP: linear, gelu, layer norm, linear, tanh", kit.MLP, (12,), (1024,), (4, 8192), rank=2),
    "norms": _case("residual, layer norm, GELU, RMS norm", Norms, (16,), (1024,), (6, 1024)),
    "gpt_block": _case("nanoGPT's block", _gpt_block, (16, 2), (768, 12), (6, 512)),
    "llama_block": _case("Llama's block", _llama_block, (16, 4), (1024, 16), (6, 512)),
}
