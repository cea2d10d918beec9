"""Networks of torchvision for images and for videos, scripted, of a few pixels."""

from __future__ import annotations

import functools

import torch

from zoo import Program, generator


def build(name: str, **options):
    import torchvision

    torch.manual_seed(0)
    return getattr(torchvision.models, name)(**options)


def images(pixels, size):
    """Two images. Their sides differ from size to size."""
    side = pixels + 4 * size
    return (torch.randn(2, 3, side, pixels, generator=generator(size)),)


#: Without dropout, so that training can be compared.
NETWORKS = {
    "resnet18": (images, 32, {}),
    "mobilenet_v3_small": (images, 32, dict(dropout=0.0)),
    "shufflenet_v2_x0_5": (images, 32, {}),
    "googlenet": (images, 32, dict(init_weights=False, aux_logits=False, dropout=0.0)),
    "SwinTransformer": (
        images,
        32,
        dict(
            patch_size=[4, 4],
            embed_dim=24,
            depths=[1, 1],
            num_heads=[2, 4],
            window_size=[4, 4],
            stochastic_depth_prob=0.0,
        ),
    ),
}
PROGRAMS = [
    Program(
        f"torchvision: {name}",
        ("torchvision",),
        functools.partial(build, name, **options),
        functools.partial(inputs, pixels),
        "images",
        sizes=(2, 3, 1, 5, 7, 4, 6, 8),
        chooses=name in ("googlenet", "resnet18"),
    )
    for name, (inputs, pixels, options) in NETWORKS.items()
]
