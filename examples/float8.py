"""Scaled floats of 8 bits in plain PyTorch, by the recipes that torchao has: how many kernels each takes.

In: a tensor. Out: its elements in float8, each times a scale that its row, its block or the whole tensor
shares, and the scales. A product of matrices takes both (`torch._scaled_mm`). No op of a recipe is tsfuser's.

    python examples/float8.py            # [4096, 4096] bfloat16 on CUDA, [256, 512] on the CPU
"""

import torch

# 448 is the largest float8_e4m3fn, and 2^8 the largest power of two in it. (TorchScript reads no globals.)


def _scale(amax: torch.Tensor) -> torch.Tensor:
    """What makes the largest magnitude `amax` the largest of float8; computed in float64, as torchao does."""
    return (448.0 / amax.to(torch.float64).clamp(min=1e-12)).to(torch.float32)


def _cast(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`x * scale`, saturated: before torch 2.13 its cast makes NaN of values that are too large."""
    return (x.to(torch.float32) * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def tensorwise(x: torch.Tensor):
    """One scale."""
    scale = _scale(x.abs().amax())
    return _cast(x, scale), scale.reciprocal()


def tensorwise_both(x: torch.Tensor):
    """One scale; the elements row-major, and transposed for the product of the backward. (`contiguous` would
    do, but TorchScript does not know that it copies here.)"""
    scale = _scale(x.abs().amax())
    y = _cast(x, scale)
    return y, y.t().clone(memory_format=torch.contiguous_format), scale.reciprocal()


def rowwise(x: torch.Tensor):
    """A scale for each row."""
    scale = _scale(x.abs().amax(-1, keepdim=True))
    return _cast(x, scale), scale.reciprocal()


def rowwise_power_of_2(x: torch.Tensor):
    """A scale for each row, rounded down to a power of two, so that scaling rounds nothing."""
    scale = torch.exp2(torch.floor(torch.log2(_scale(x.abs().amax(-1, keepdim=True)))))
    return _cast(x, scale), scale.reciprocal()


def blocks_of_128(x: torch.Tensor):
    """A scale for each 128 elements of a row."""
    blocks = x.reshape(x.shape[0], -1, 128)
    scale = _scale(blocks.abs().amax(-1, keepdim=True))
    return _cast(blocks, scale).reshape(x.shape), scale.reciprocal().squeeze(-1)


def squares_of_128(x: torch.Tensor):
    """A scale for each 128 x 128 elements, as for weights."""
    blocks = x.reshape(x.shape[0] // 128, 128, x.shape[1] // 128, 128)
    scale = _scale(blocks.abs().amax([1, 3], keepdim=True))
    return _cast(blocks, scale).reshape(x.shape), scale.reciprocal().squeeze(3).squeeze(1)


def mx(x: torch.Tensor):
    """MXFP8: a power of two for each 32 elements of a row, as float8_e8m0fnu.

    The scale is that of the largest element's exponent. The cast to float8_e8m0fnu takes the nearer power,
    and that of three quarters of a number is the one below the number."""
    blocks = x.reshape(x.shape[0], -1, 32).to(torch.float32)
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = (amax * (0.75 / 256.0)).to(torch.float8_e8m0fnu)
    y = blocks / scale.to(torch.float32).clamp(min=2.0**-126)
    return y.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).reshape(x.shape), scale.squeeze(-1)


def mx_by_bits(x: torch.Tensor):
    """The same with the bits of exponents, as torchao writes it. TorchScript has no `view(dtype)`."""
    blocks = x.reshape(x.shape[0], -1, 32).to(torch.float32)
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = ((amax.view(torch.int32) >> 23) & 0xFF) - 127 - 8
    biased = (exponent.clamp(-127, 128) + 127).to(torch.uint8)
    biased = torch.where(amax.isnan(), 255, biased)
    scale = (biased.to(torch.int32) << 23).view(torch.float32).clamp(min=2.0**-126)
    y = (blocks / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return y.reshape(x.shape), biased.view(torch.float8_e8m0fnu).squeeze(-1)


SCRIPTED = (
    tensorwise, tensorwise_both, rowwise, rowwise_power_of_2, blocks_of_128, squares_of_128, mx
)  # fmt: skip
RECIPES = (*SCRIPTED, mx_by_bits)


def launches(function, x: torch.Tensor) -> int:
    """How many kernels of tsfuser a call launches that is not the first one."""
    import tsfuser

    for _ in range(3):
        function(x)
    tsfuser.reset()
    function(x)
    return tsfuser.stats()["launches"]


def main():
    import tsfuser

    cuda = torch.cuda.is_available()
    shape = (4096, 4096) if cuda else (256, 512)
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda" if cuda else "cpu")
    print(f"{'recipe':20} torch.compile  torch.jit.script")
    for recipe in RECIPES:
        compiled = launches(torch.compile(recipe, backend="tsfuser"), x)
        with tsfuser.fuser():
            scripted = launches(torch.jit.script(recipe), x) if recipe in SCRIPTED else "-"
        print(f"{recipe.__name__:20} {compiled:13}  {scripted:>16}")


if __name__ == "__main__":
    main()
