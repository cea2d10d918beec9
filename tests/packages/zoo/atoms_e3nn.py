"""e3nn's layers, and the potentials that are built of them: MACE and NequIP.

Layers take a tensor of features; potentials take positions, species, and edges as [2, count] indices.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from zoo import Program, generator
from zoo.atoms import molecule

CUTOFF = 3.0


def edges_of(positions: Tensor) -> Tensor:
    """Pairs of atoms that are nearer than the cutoff, in both directions."""
    near = torch.cdist(positions, positions) < CUTOFF
    return (near & ~torch.eye(len(positions), dtype=torch.bool)).nonzero().t().contiguous()


def scripted(module: nn.Module):
    """The scripted module: e3nn's own function for it handles the code that e3nn has generated."""
    from e3nn.util.jit import script

    return script(module)


class Convolution(nn.Module):
    """A message passing layer of e3nn's parts: harmonics, a radial network, a tensor product, a gate."""

    def __init__(self):
        super().__init__()
        from e3nn import nn as e3
        from e3nn import o3

        torch.manual_seed(0)
        self.sh = o3.SphericalHarmonics("0e + 1o + 2e", normalize=True, normalization="component")
        features = o3.Irreps("4x0e + 3x1o")
        scalars, gates = o3.Irreps("4x0e"), o3.Irreps("3x0e")
        self.gate = e3.Gate(scalars, [torch.nn.functional.silu], gates, [torch.sigmoid], o3.Irreps("3x1o"))
        self.embed = o3.Linear("4x0e", features)
        self.product = o3.FullyConnectedTensorProduct(
            features, self.sh.irreps_out, self.gate.irreps_in, shared_weights=False
        )
        self.radial = e3.FullyConnectedNet([8, 16, self.product.weight_numel], torch.nn.functional.silu)
        self.readout = o3.Linear(self.gate.irreps_out, "1x0e")
        self.register_buffer("centres", torch.linspace(0.0, CUTOFF, 8))

    def forward(self, positions: Tensor, features: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        offsets = positions[source] - positions[target]
        radial = torch.exp(-((offsets.norm(2, dim=1)[:, None] - self.centres) ** 2))
        messages = self.product(self.embed(features)[source], self.sh(offsets), self.radial(radial))
        pooled = torch.zeros(
            [positions.size(0), messages.size(1)], dtype=messages.dtype, device=messages.device
        )
        pooled = pooled.index_add(0, target, messages)
        return self.readout(self.gate(pooled))


def convolution_inputs(size):
    positions, _ = molecule(size, (1,))
    return positions, torch.randn(size, 4, generator=generator(size)), edges_of(positions)


class Harmonics(nn.Module):
    def __init__(self):
        super().__init__()
        from e3nn import o3

        self.layer = o3.SphericalHarmonics([0, 1, 2, 3], normalize=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Products(nn.Module):
    """Products of features with each other: of all paths with weights, and of equal irreps."""

    def __init__(self):
        super().__init__()
        from e3nn import o3

        torch.manual_seed(0)
        irreps = "3x0e + 2x1o + 1x2e"
        self.full = o3.FullyConnectedTensorProduct(irreps, irreps, "4x0e + 2x1o")
        self.equal = o3.ElementwiseTensorProduct(irreps, irreps)
        self.norms = o3.Norm(irreps)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.full(x, x), self.equal(x, torch.sigmoid(x)), self.norms(x)


def vectors(size):
    return (torch.randn(size, 3, generator=generator(size)),)


def irreps(size):
    return (torch.randn(size, 14, generator=generator(size)),)


class Mace(nn.Module):
    """MACE's energy and forces, which it computes with `autograd.grad` inside of its forward."""

    def __init__(self):
        super().__init__()
        import numpy
        from e3nn import o3
        from mace import modules

        torch.manual_seed(0)
        blocks = modules.interaction_classes
        self.model = modules.ScaleShiftMACE(
            r_max=CUTOFF, num_bessel=4, num_polynomial_cutoff=5, max_ell=2, num_interactions=2,
            interaction_cls=blocks["RealAgnosticResidualInteractionBlock"],
            interaction_cls_first=blocks["RealAgnosticResidualInteractionBlock"],
            num_elements=3, hidden_irreps=o3.Irreps("4x0e + 4x1o"), MLP_irreps=o3.Irreps("4x0e"),
            atomic_energies=numpy.array([-1.0, -2.0, -3.0]), avg_num_neighbors=6.0, atomic_numbers=[1, 6, 8],
            correlation=2, gate=torch.nn.functional.silu, atomic_inter_scale=1.0, atomic_inter_shift=0.0,
        )  # fmt: skip

    def data(self, positions: Tensor, species: Tensor, edges: Tensor) -> dict[str, Tensor]:
        zeros = torch.zeros([edges.size(1), 3], dtype=positions.dtype, device=positions.device)
        return {
            "positions": positions,
            "node_attrs": torch.nn.functional.one_hot(species, 3).to(positions.dtype),
            "edge_index": edges,
            "batch": torch.zeros_like(species),
            "ptr": torch.tensor([0, species.size(0)], device=species.device),
            "cell": torch.zeros([3, 3], dtype=positions.dtype, device=positions.device),
            "shifts": zeros,
            "unit_shifts": zeros,
        }

    def forward(self, positions: Tensor, species: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model(self.data(positions, species, edges), training=self.training)
        energy, forces = out["energy"], out["forces"]
        assert energy is not None and forces is not None
        return energy, forces


class MaceEnergy(Mace):
    """MACE's energy, for programs that differentiate it themselves."""

    def forward(self, positions: Tensor, species: Tensor, edges: Tensor) -> Tensor:
        energy = self.model(self.data(positions, species, edges), compute_force=False)["energy"]
        assert energy is not None
        return energy


def atoms(size):
    positions, species = molecule(size, (0, 1, 2))
    return positions, species, edges_of(positions)


class Nequip(nn.Module):
    """NequIP's energy and forces, which it computes inside of its forward."""

    def __init__(self):
        super().__init__()
        from nequip.model import model_from_config

        torch.manual_seed(0)
        config = dict(
            model_builders=["SimpleIrrepsConfig", "EnergyModel", "ForceOutput"],
            num_types=3, type_names=["H", "C", "O"], r_max=CUTOFF, num_layers=2, l_max=1, parity=True,
            num_features=4, num_basis=4, avg_num_neighbors=6.0, nonlinearity_type="gate",
            nonlinearity_scalars={"e": "silu", "o": "tanh"}, nonlinearity_gates={"e": "silu", "o": "tanh"},
        )  # fmt: skip
        self.model = model_from_config(config, initialize=False)

    def forward(self, positions: Tensor, species: Tensor, edges: Tensor) -> tuple[Tensor, Tensor]:
        out = self.model({"pos": positions, "edge_index": edges, "atom_types": species[:, None]})
        return out["total_energy"], out["forces"]


def built(kind: type):
    from e3nn.util.jit import compile_mode

    return compile_mode("script")(kind)().eval()


def program(name, needs, kind, inputs, arguments, **facts):
    return Program(name, needs, functools.partial(built, kind), inputs, arguments, scripted, **facts)


EDGES = "positions, species, edges"
MACE = ("mace.modules", "e3nn")
PROGRAMS = [
    program("e3nn: spherical harmonics", ("e3nn",), Harmonics, vectors, "x", trains=False),
    program("e3nn: tensor products", ("e3nn",), Products, irreps, "x"),
    program(
        "e3nn: convolution",
        ("e3nn",),
        Convolution,
        convolution_inputs,
        "positions, features, edges",
        forces=True,
        compiles=False,
    ),
    program("mace: energy", MACE, MaceEnergy, atoms, EDGES, forces=True, compiles=False),
    program("mace: own forces", MACE, Mace, atoms, EDGES, own_forces=True, compiles=False),
    program(  # its attributes hold a dtype
        "nequip: own forces",
        ("nequip.model", "e3nn"),
        Nequip,
        atoms,
        EDGES,
        own_forces=True,
        in_double=False,
        compiles=False,
    ),
]
