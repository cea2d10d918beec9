# %% [markdown]
# # First steps
#
# tsfuser fuses the pointwise ops, reductions and norms of a program into a few kernels. This page
# compiles a module with it, looks at what was fused, and does the same with TorchScript. Everything here
# runs on CPU tensors as well as on CUDA tensors.

# %%
import torch

import tsfuser

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Block(torch.nn.Module):
    """A feed-forward block: norm, matrix product, gate, residual."""

    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.scale = torch.nn.Parameter(torch.rand(width))
        self.project = torch.nn.Linear(width, 2 * width)

    def forward(self, x):
        gate, value = self.project(self.norm(x) * self.scale).chunk(2, -1)
        return x + torch.nn.functional.silu(gate) * value


block = Block(64).to(device)
x = torch.randn(8, 32, 64, device=device)

# %% [markdown]
# ## torch.compile
#
# tsfuser is a backend of `torch.compile`. A program that only does this needs no `import tsfuser`.

# %%
compiled = torch.compile(block, backend="tsfuser")
y = compiled(x)
torch.testing.assert_close(y, block(x))

# %% [markdown]
# `tsfuser.explain` says what was fused, in which kernels, and why the rest was not. The matrix product
# is left to the library that computes it best. What is before it is one kernel, and so is what is behind
# it.

# %%
with torch.no_grad():
    print(tsfuser.explain(compiled, x))

# %% [markdown]
# Training works the same way. The backward has groups of its own.

# %%
compiled(x).square().mean().backward()
print({name: tuple(p.grad.shape) for name, p in block.named_parameters()})

# %% [markdown]
# ## TorchScript
#
# Scripted programs are fused inside `with tsfuser.fuser():`. torch profiles the first call, and tsfuser
# fuses in the second one.

# %%
scripted = torch.jit.script(block)
with tsfuser.fuser(), torch.no_grad():
    for _ in range(3):
        z = scripted(x)
torch.testing.assert_close(z, y)

# %% [markdown]
# The counters tell that kernels ran, and that no group had to run unfused. All pages of this gallery end
# with such a check.

# %%
stats = tsfuser.stats()
print("launches:", stats["launches"], "fallbacks:", stats["fallbacks"])
assert stats["launches"] > 0 and not stats["fallbacks"]
