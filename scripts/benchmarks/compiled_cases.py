"""The models of `scripts/bench --compile`.

In: a name, and whether sizes are those of figures. Out: a `Case`: a module, and inputs of a size that
changes. Example: `case = CASES["mlp"]; case.module(large=False)(*case.inputs(large=False, n=3))`.

Small ones are those of tests/kit/compiled_models.py; `PACKAGES` has whole networks of torchvision, timm and
transformers with random weights, where these are installed.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from kit import compiled_models as kit


@dataclass(frozen=True)
class Case:
    """`make(large)`: a module; `example(large, n)`: its inputs, of which `n` is a batch size or a length, the
    first one as in `sizes`. `autocast`: to bfloat16, on CUDA devices. `trains`: a step has a backward."""

    title: str
    make: Callable
    example: Callable
    sizes: tuple[int, int]  # the first `n`, small and large
    autocast: bool = False
    trains: bool = True

    def module(self, large):
        torch.manual_seed(0)
        return self.make(large)

    def inputs(self, large, n):
        torch.manual_seed(n)
        return self.example(large, n)

    def first(self, large):
        return self.sizes[large]


def _images(small, large, side):
    return lambda big, n: (torch.randn(n, large if big else small, side if big else 8, side if big else 8),)


def tokens(words):
    return lambda big, n: (torch.randint(words[big], (16 if big else 2, n)),)


def _llama(big):
    return kit.Llama(1024, 16, 16, 1024).eval() if big else kit.Llama(length=32).eval()


CASES = {
    "mlp": Case(
        "MLP: linear, gelu, layer norm, linear, tanh",
        lambda big: kit.MLP(1024 if big else 12),
        lambda big, n: (torch.randn(n, 1024 if big else 12),),
        (4, 8192),
    ),
    "residual": Case(
        "residual block of two convolutions with batch norm",
        lambda big: kit.Residual(64 if big else 8),
        _images(8, 64, 56),
        (4, 64),
        autocast=True,
    ),
    "encoder": Case(
        "transformer encoder layer, attention written out",
        lambda big: kit.Encoder(768, 12) if big else kit.Encoder(),
        lambda big, n: (torch.randn(16 if big else 2, n, 768 if big else 16),),
        (7, 512),
        autocast=True,
    ),
    "gpt": Case(
        "GPT block with rotary embedding",
        lambda big: kit.GPT(768, 12, 4096) if big else kit.GPT(),
        tokens((32, 4096)),
        (6, 512),
        autocast=True,
    ),
    "llama": Case(
        "Llama block that fills its cache, inference",
        _llama,
        lambda big, n: (torch.randn(16 if big else 2, n, 1024 if big else 16),),
        (6, 512),
        autocast=True,
        trains=False,
    ),
    "unet": Case(
        "U-Net block with group norm",
        lambda big: kit.UNet(64 if big else 8),
        _images(8, 64, 64),
        (4, 32),
        autocast=True,
    ),
    "convnext": Case(
        "ConvNeXt block",
        lambda big: kit.ConvNext(96 if big else 8),
        _images(8, 96, 56),
        (4, 32),
        autocast=True,
    ),
    "lstm": Case(
        "LSTM cell over the steps of a sequence",
        lambda big: kit.LSTMCell(512 if big else 8),
        lambda big, n: (torch.randn(16 if big else 3, n, 512 if big else 8),),
        (4, 256),
    ),
    "vae": Case(
        "variational autoencoder of linear layers",
        lambda big: kit.VAE(784, 64) if big else kit.VAE(),
        lambda big, n: (torch.randn(n, 848 if big else 16),),
        (4, 4096),
    ),
    "dlrm": Case(
        "DLRM: embeddings, their products, MLPs",
        lambda big: kit.DLRM(256, 64, 26, 1024) if big else kit.DLRM(),
        lambda big, n: (torch.randn(n, 256 if big else 8),),
        (4, 4096),
    ),
    "rotary": Case(
        "rotary embedding alone: slices, cat",
        lambda big: kit.Rotary(64 if big else 8),
        lambda big, n: (torch.randn(32 if big else 2, 12 if big else 3, n, 64 if big else 8),),
        (4, 1024),
    ),
    "shuffle": Case(
        "channel shuffle alone: chunk, cat, view, transpose",
        lambda big: kit.Shuffled(116 if big else 8),
        _images(8, 116, 28),
        (4, 128),
    ),
}


class _Logits(torch.nn.Module):
    """A network of transformers that returns a tensor."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, tokens):
        return self.network(tokens, use_cache=False).logits


def _resnet(big):
    from torchvision.models import resnet50

    return resnet50()


def _timm(name):
    def make(big):
        import timm

        return timm.create_model(name)

    return make


def short_gpt2(big):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 768, "n_layer": 4, "n_head": 12} if big else {"n_embd": 32, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return _Logits(GPT2LMHeadModel(GPT2Config(vocab_size=8192 if big else 64, **sizes, **dropout)))


def short_llama(big):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(zip(("hidden_size", "intermediate_size"), (1024, 2816) if big else (32, 64)))
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 4}
    heads = heads if big else {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    return _Logits(LlamaForCausalLM(LlamaConfig(vocab_size=8192 if big else 64, **sizes, **heads)))


def photos(big, n):
    return (torch.randn(n, 3, 224, 224),)


PACKAGES = {
    "torchvision_resnet50": Case("torchvision's ResNet-50", _resnet, photos, (2, 32), autocast=True),
    "timm_convnext": Case("timm's ConvNeXt-atto", _timm("convnext_atto"), photos, (2, 32), autocast=True),
    "timm_vit": Case("timm's ViT-tiny", _timm("vit_tiny_patch16_224"), photos, (2, 64), autocast=True),
    "transformers_gpt2": Case(
        "transformers' GPT-2, 4 layers", short_gpt2, tokens((64, 8192)), (6, 512), autocast=True
    ),
    "transformers_llama": Case(
        "transformers' Llama, 4 layers", short_llama, tokens((64, 8192)), (6, 512), autocast=True
    ),
}
