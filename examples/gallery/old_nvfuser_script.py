# %% [markdown]
# # An old nvFuser script
#
# This program is written as programs were when torch had nvFuser: a fused bias, dropout and residual as
# in Megatron-LM, and the switches at its top. torch still has these switches, but they do nothing any
# more. With `import tsfuser` they work again; nothing else is changed.
#
# If you do not want to edit the script at all, run it by `python -m tsfuser run script.py`.

# %%
import torch

import tsfuser  # the only new line

device = "cuda" if torch.cuda.is_available() else "cpu"

torch._C._jit_set_profiling_executor(True)
torch._C._jit_set_profiling_mode(True)
torch._C._jit_override_can_fuse_on_cpu(False)
torch._C._jit_override_can_fuse_on_gpu(False)
torch._C._jit_set_texpr_fuser_enabled(False)
torch._C._jit_set_nvfuser_enabled(True)
torch._C._debug_set_autodiff_subgraph_inlining(False)

# %%


def bias_dropout_add(x, bias, residual, prob, training):
    # type: (Tensor, Tensor, Tensor, float, bool) -> Tensor
    out = torch.nn.functional.dropout(x + bias, p=prob, training=training)
    return residual + out


@torch.jit.script
def bias_dropout_add_fused_train(x, bias, residual, prob):
    # type: (Tensor, Tensor, Tensor, float) -> Tensor
    return bias_dropout_add(x, bias, residual, prob, True)


@torch.jit.script
def bias_gelu(bias, y):
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


# %% [markdown]
# In training, torch profiles two calls before it optimises. From the third one on, the forward and the
# backward are fused.

# %%
hidden = 256
x = torch.randn(64, 4, hidden, device=device, requires_grad=True)
bias = torch.zeros(hidden, device=device, requires_grad=True)
residual = torch.randn(64, 4, hidden, device=device)

for _ in range(5):
    out = bias_dropout_add_fused_train(bias_gelu(bias, x), bias, residual, 0.1)
    out.sum().backward()

# %% [markdown]
# `print(bias_gelu.graph_for(bias, x))` prints the graph with its fusion groups, as it did with nvFuser.
# `tsfuser.explain` says the same in fewer words, for the backward as well.

# %%
for graph in tsfuser.explain(bias_gelu, bias, x).graphs:
    for group in graph.groups:
        print(f"{graph.title}:", ", ".join(node.kind.removeprefix("aten::") for node in group.nodes))

# %%
result = bias_gelu(bias, x)
torch.testing.assert_close(result, torch.nn.functional.gelu(x + bias, approximate="tanh"))

# %%
stats = tsfuser.stats()
print("groups:", stats["groups"], "launches:", stats["launches"], "fallbacks:", stats["fallbacks"])
assert stats["launches"] > 0 and not stats["fallbacks"]
