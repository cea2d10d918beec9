"""Potentials of atoms that need no e3nn: torchani and torchmd-net.

Each takes positions, species and, where the package wants it, the molecule of each atom, and gives energies.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from zoo import Program, generator


def molecule(size: int, species: tuple[int, ...], spread: float = 1.2) -> tuple[Tensor, Tensor]:
    """Positions of `size` atoms on a shaken grid, so that none are close, and a species for each."""
    source = generator(size)
    side = max(round(size ** (1 / 3) + 0.5), 1)
    cells = torch.cartesian_prod(*[torch.arange(side)] * 3)[torch.randperm(side**3, generator=source)[:size]]
    positions = (cells + 0.4 * torch.rand(len(cells), 3, generator=source)) * spread
    return positions, torch.tensor(species)[torch.randint(len(species), (len(cells),), generator=source)]


class Ani(nn.Module):
    """ANI with the arguments of the other potentials."""

    def __init__(self, **options):
        super().__init__()
        from torchani.arch import simple_ani

        torch.manual_seed(0)
        self.model = simple_ani(("H", "C", "N", "O"), lot="wb97x-631gd", ensemble_size=2, **options)

    def forward(self, positions: Tensor, species: Tensor) -> Tensor:
        return self.model((species, positions)).energies


def ani_inputs(size):
    """Two conformations of `size` atoms."""
    first, species = molecule(size, (1, 6, 7, 8))
    second, _ = molecule(size + 100, (1,))
    return torch.stack([first, second[:size]]), torch.stack([species, species])


def ani_in_double():
    """As torchani's own models are used in most scripts."""
    return Ani().double()


def ani_inputs_in_double(size):
    positions, species = ani_inputs(size)
    return positions.double(), species


MD = dict(
    precision=32, embedding_dimension=16, num_layers=2, num_rbf=8, rbf_type="expnorm", trainable_rbf=True,
    activation="silu", cutoff_lower=0.0, cutoff_upper=4.0, max_z=10, max_num_neighbors=64, atom_filter=-1,
    prior_model=None, output_model="Scalar", reduce_op="sum", derivative=False, neighbor_embedding=True,
    attn_activation="silu", num_heads=4, distance_influence="both", aggr="add",
    equivariance_invariance_group="O(3)",
)  # fmt: skip


class MdNet(nn.Module):
    """A potential of torchmd-net whose energies are its only result."""

    def __init__(self, kind: str):
        super().__init__()
        from torchmdnet.models.model import create_model

        torch.manual_seed(0)
        self.model = create_model({**MD, "model": kind})

    def forward(self, positions: Tensor, species: Tensor, molecules: Tensor) -> Tensor:
        return self.model(species, positions, molecules)[0]


def md_inputs(size):
    """`size` atoms in a molecule for every six."""
    positions, species = molecule(size, (1, 6, 7, 8))
    return positions, species, torch.arange(size) * (1 + size // 6) // size


KINDS = ("graph-network", "transformer", "equivariant-transformer", "tensornet")
PROGRAMS = [
    Program("torchani: ANI", ("torchani",), Ani, ani_inputs, "positions, species", forces=True),
    Program(
        "torchani: ANI in float64",
        ("torchani",),
        ani_in_double,
        ani_inputs_in_double,
        "positions, species",
        forces=True,
    ),
    Program(
        "torchani: ANI with repulsion and dispersion",
        ("torchani",),
        functools.partial(Ani, repulsion=True, dispersion=True),
        ani_inputs,
        "positions, species",
        forces=True,
    ),
] + [
    Program(
        f"torchmd-net: {kind}",
        ("torchmdnet",),
        functools.partial(MdNet, kind),
        md_inputs,
        "positions, species, molecules",
        forces=True,
        compiles=False,
    )
    for kind in KINDS
]
