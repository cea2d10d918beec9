"""Models of transformers, traced: `torchscript=True`, or a trace of the module's results as tensors.

A trace holds some sizes as numbers, but what it returns for other ones is compared with itself, unfused.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor, nn

from zoo import Program, generator

SMALL = dict(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
    max_position_embeddings=64, attn_implementation="eager", use_cache=False,
)  # fmt: skip
#: No dropout, so that training can be compared.
CERTAIN = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


class Encoder(nn.Module):
    """The last hidden state of tokens under a mask."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.model(tokens, attention_mask=mask)[0]


class EncoderDecoder(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.model(tokens, attention_mask=mask, decoder_input_ids=tokens)[0]


class Vision(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)[0]


class Speech(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, frames: Tensor, tokens: Tensor) -> Tensor:
        return self.model(frames, decoder_input_ids=tokens)[0]


def tokens(size):
    """Two sequences, the second of which is shorter."""
    mask = torch.ones(2, size, dtype=torch.long)
    mask[1, (size + 1) // 2 :] = 0
    return torch.randint(1, 50, (2, size), generator=generator(size)), mask


def images(size):
    return (torch.randn(size, 3, 16, 16, generator=generator(size)),)


def frames(size):
    """Whisper takes spectrograms of one length only: the tokens vary."""
    source = generator(size)
    return torch.randn(1, 8, 24, generator=source), torch.randint(1, 50, (1, size), generator=source)


def build(wrapper, kind, **options):
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**options)
    return wrapper(getattr(transformers, f"{kind}Model")(config))


def traced(inputs, module):
    device = next(module.parameters()).device
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        example = tuple(x.to(device) for x in inputs(7))
        return torch.jit.trace(module, example, strict=False, check_trace=False)


def program(kind, wrapper=Encoder, inputs=tokens, arguments="tokens, mask", **options):
    return Program(
        f"transformers: {kind}",
        ("transformers",),
        functools.partial(build, wrapper, kind, **options),
        inputs,
        arguments,
        script=functools.partial(traced, inputs),
        in_double=False,  # a trace holds dtypes
    )


VISION = {
    name: value
    for name, value in SMALL.items()
    if name not in ("vocab_size", "max_position_embeddings", "use_cache")
} | dict(image_size=16, patch_size=8)  # fmt: skip
PROGRAMS = [
    program("Bert", **SMALL, **CERTAIN),
    program("Roberta", pad_token_id=0, **SMALL, **CERTAIN),
    program("Llama", **SMALL, num_key_value_heads=2),
    program("Qwen3", **SMALL, num_key_value_heads=2, head_dim=8),
    program("Gemma2", **SMALL, num_key_value_heads=2, head_dim=8),
    program(
        "GPT2", vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="eager", use_cache=False,
    ),
    program(
        "T5", EncoderDecoder, vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4,
        dropout_rate=0.0, use_cache=False,
    ),
    program("ViT", Vision, images, "images", **VISION, **CERTAIN),
    program(
        "ConvNext", Vision, images, "images", num_channels=3, patch_size=4, hidden_sizes=[8, 16],
        depths=[1, 1], num_stages=2,
    ),
    program(
        "Whisper", Speech, frames, "frames, tokens", vocab_size=50, num_mel_bins=8, d_model=16,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=12, max_target_positions=64,
        dropout=0.0, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, attn_implementation="eager",
    ),
]  # fmt: skip
