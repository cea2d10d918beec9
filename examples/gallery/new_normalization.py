# %% [markdown]
# # A new normalisation
#
# A fusing compiler is of most use for what no library has yet. Here is a norm that divides by the mean
# absolute deviation instead of the standard deviation. It is written with primitive ops and trained, and
# it runs as if somebody had written kernels for it.

# %%
import torch

import tsfuser

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def deviation_norm(x, weight, bias, eps: float = 1e-6):
    """Layer norm, with the mean absolute deviation in the place of the standard deviation."""
    centred = x - x.mean(-1, keepdim=True)
    deviation = centred.abs().mean(-1, keepdim=True)
    return centred / (deviation + eps) * weight + bias


def block(x, residual, weight, bias):
    """Where norms usually are: behind a residual, and before an activation."""
    return torch.nn.functional.gelu(deviation_norm(x + residual, weight, bias))


# %%
width = 384
x, residual = (torch.randn(16, 128, width, device=device, requires_grad=True) for _ in range(2))
weight = torch.ones(width, device=device, requires_grad=True)
bias = torch.zeros(width, device=device, requires_grad=True)
inputs = (x, residual, weight, bias)

# %% [markdown]
# In eager mode the forward launches a kernel for each of its ten ops, and the backward still more.
# Fused, the forward is one kernel: it reads each row once, keeps it in registers or in the cache, and
# computes both means from there.

# %%
compiled = torch.compile(block, backend="tsfuser")
found = tsfuser.explain(compiled, *inputs)
for graph in found.graphs:
    print(graph.title)
    for group in graph.groups:
        print("  ", ", ".join(node.kind.removeprefix("aten::") for node in group.nodes))
        print("  ", "kernels:", len(group.kernels))

# %% [markdown]
# Results and gradients are those of eager mode, up to rounding. A comparison with float64 says which of
# the two is nearer.

# %%
wide = [t.detach().double().requires_grad_() for t in inputs]
exact = torch.autograd.grad(block(*wide).square().mean(), wide)
eager = torch.autograd.grad(block(*inputs).square().mean(), inputs)
fused = torch.autograd.grad(compiled(*inputs).square().mean(), inputs)
for name, e, f, true in zip(("x", "residual", "weight", "bias"), eager, fused, exact):
    torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-8)
    distance = [float((t.double() - true).abs().max() / true.abs().max()) for t in (e, f)]
    print(f"gradient of {name:8}: eager is {distance[0]:.1e} off, fused {distance[1]:.1e}")

# %% [markdown]
# As a scripted function it is fused in the same way.

# %%
scripted = torch.jit.script(block)
with tsfuser.fuser():
    for _ in range(5):
        grads = torch.autograd.grad(scripted(*inputs).square().mean(), inputs)
for e, f in zip(eager, grads):
    torch.testing.assert_close(f, e, rtol=1e-4, atol=1e-8)

# %% [markdown]
# No group ran unfused.

# %%
stats = tsfuser.stats()
print("launches:", stats["launches"], "fallbacks:", stats["fallbacks"])
assert stats["launches"] > 0 and not stats["fallbacks"]
