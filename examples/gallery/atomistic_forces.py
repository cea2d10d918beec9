# %% [markdown]
# # Forces of atoms, with TorchScript
#
# Packages for molecular dynamics script their models: C++ programs such as LAMMPS load them, and ask for
# an energy and the forces, which are its gradient. Such a model is many small pointwise ops between a
# few matrix products, and the number of pairs of atoms changes with each step. Both are what tsfuser is
# for.

# %%
import torch

import tsfuser

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Potential(torch.nn.Module):
    """Radial features of each pair, summed by atom; a small network makes an energy of them."""

    def __init__(self, cutoff: float = 4.0, features: int = 16):
        super().__init__()
        self.cutoff = cutoff
        self.register_buffer("centres", torch.linspace(0.8, cutoff, features))
        self.hidden = torch.nn.Linear(features, 32)
        self.out = torch.nn.Linear(32, 1)

    def energy(self, positions: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        away = positions.index_select(0, first) - positions.index_select(0, second)
        distance = (away * away).sum(1).sqrt().unsqueeze(1)
        smooth = 0.5 * torch.cos(distance * (3.14159265 / self.cutoff)) + 0.5
        radial = torch.exp(-4.0 * (distance - self.centres) ** 2) * smooth
        atoms = torch.zeros(positions.size(0), radial.size(1), dtype=radial.dtype, device=radial.device)
        atoms = atoms.index_add(0, first, radial)
        return self.out(torch.nn.functional.silu(self.hidden(atoms))).sum()

    def forward(self, positions: torch.Tensor, first: torch.Tensor, second: torch.Tensor):
        energy = self.energy(positions, first, second)
        slope = torch.autograd.grad([energy], [positions])[0]
        assert slope is not None
        return energy.detach(), -slope


def neighbours(positions, cutoff):
    """Numbers of the atoms of each pair that is nearer than the cutoff."""
    near = torch.cdist(positions, positions) < cutoff
    near.fill_diagonal_(False)
    return near.nonzero(as_tuple=True)


# %% [markdown]
# A few steps of dynamics. In each one the atoms have moved, so there are more or fewer pairs.

# %%
model = Potential().to(device).requires_grad_(False)
scripted = torch.jit.script(model)
positions = torch.rand(60, 3, device=device) * 9.0
velocity = torch.zeros_like(positions)
with tsfuser.fuser():
    for step in range(8):
        first, second = neighbours(positions, model.cutoff)
        positions = positions.detach().requires_grad_()
        energy, forces = scripted(positions, first, second)
        expected = model(positions, first, second)
        torch.testing.assert_close(forces, expected[1], rtol=1e-4, atol=1e-5)
        print(f"step {step}: {len(first)} pairs, energy {float(energy):.4f}")
        velocity += 0.05 * forces
        positions = positions.detach() + 0.05 * velocity

# %% [markdown]
# The forces are the negative gradient of the energy: a step along them changes the energy by as much as
# they say.

# %%
double = torch.jit.script(Potential().to(device).double().requires_grad_(False))
start = positions.detach().double()
pairs = neighbours(start, model.cutoff)
_, forces = double(start.clone().requires_grad_(), *pairs)
aside = 1e-5 * torch.randn_like(start)
up, _ = double((start + aside).requires_grad_(), *pairs)
down, _ = double((start - aside).requires_grad_(), *pairs)
torch.testing.assert_close((down - up) / 2, (forces * aside).sum(), rtol=1e-5, atol=1e-10)

# %% [markdown]
# ## The same in C++
#
# The program that runs the dynamics loads what `scripted.save("potential.pt")` has written. One call of
# `tsfuser::start()` has it fused there; [C++ programs](../../docs/guide.md#c-programs) says how to
# build.
#
# ```cpp
# #include <torch/script.h>
# #include <tsfuser.h>
#
# tsfuser::start();
# torch::jit::Module model = torch::jit::load("potential.pt");
# for (int step = 0; step < steps; ++step) {
#   torch::Tensor at = positions.detach().requires_grad_();
#   auto result = model.forward({at, first, second}).toTuple();
#   torch::Tensor energy = result->elements()[0].toTensor();
#   torch::Tensor forces = result->elements()[1].toTensor();
#   // move the atoms, and find the new pairs
# }
# ```

# %%
stats = tsfuser.stats()
print("launches:", stats["launches"], "fallbacks:", stats["fallbacks"])
assert stats["launches"] > 0 and not stats["fallbacks"]
