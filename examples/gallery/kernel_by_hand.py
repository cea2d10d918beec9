# %% [markdown]
# # A kernel by hand
#
# Each kernel that tsfuser makes can be looked at. On a GPU it can also be launched without tsfuser, as a
# `cupy.RawKernel`: to measure it, or to change its source and try again.

# %%
import torch

import tsfuser

device = "cuda" if torch.cuda.is_available() else "cpu"


@torch.jit.script
def shifted(x, bias):
    return torch.relu(x * 2.0 + bias)


x, bias = torch.randn(100, 64, device=device), torch.randn(64, device=device)
found = tsfuser.explain(shifted, x, bias)
print(found.kernels)

# %% [markdown]
# One kernel prints with its inputs, its schedule and its source. This one was made for the device on
# which this page was built.

# %%
kernel = found.kernels[0]
print(kernel)

# %% [markdown]
# `arguments` gives what the plan would launch the kernel with for these inputs: grid, block, the struct
# of arguments, and new tensors for the results. This works for inputs of all sizes that the plan serves.

# %%
launch = kernel.arguments(x=x, bias=bias)
print("grid", launch.grid, "block", launch.block)
print([tuple(tensor.shape) for tensor in launch.tensors])

# %% [markdown]
# The rest needs a GPU and CuPy. `raw()` compiles the source, and the kernel writes into
# `launch.tensors`.

# %%
if device == "cuda":
    kernel.raw()(launch.grid, launch.block, launch.args, shared_mem=launch.shared_mem)
    torch.testing.assert_close(launch.tensors[0], torch.relu(x * 2.0 + bias))

# %% [markdown]
# A changed source runs in the same way. Here the kernel multiplies by 3 instead of 2.

# %%
if device == "cuda":
    from dataclasses import replace

    changed = replace(kernel, source=kernel.source.replace("2.0", "3.0"))
    launch = changed.arguments(x=x, bias=bias)
    changed.raw()(launch.grid, launch.block, launch.args, shared_mem=launch.shared_mem)
    torch.testing.assert_close(launch.tensors[0], torch.relu(x * 3.0 + bias))

# %%
stats = tsfuser.stats()
print("launches:", stats["launches"], "fallbacks:", stats["fallbacks"])
assert stats["launches"] > 0 and not stats["fallbacks"]
