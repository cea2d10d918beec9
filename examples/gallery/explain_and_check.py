# %% [markdown]
# # Explain and check
#
# Two questions come up with every compiler: what has it done to my program, and is the result right?
# `tsfuser.explain` answers the first, `tsfuser.check` the second.

# %%
import torch

import tsfuser

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


@torch.jit.script
def rank(x, weight, bias):
    scores = torch.sigmoid(torch.matmul(x, weight) + bias) * 2.0 - 1.0
    best, place = torch.sort(scores, descending=True)
    return torch.exp(best - best.amax(-1, keepdim=True)), place


x = torch.randn(64, 40, device=device)
weight, bias = torch.randn(40, 96, device=device), torch.randn(96, device=device)

# %% [markdown]
# ## What is fused
#
# `explain` runs a copy of the function and reports on each op. Nothing of yours is changed. The report
# shows groups with their kernels, and each op that is in no group, with its line and the reason.

# %%
found = tsfuser.explain(rank, x, weight, bias)
print(found)

# %% [markdown]
# The report is made of records, so a test of your program can ask for what matters to it.

# %%
for node in found.left_out:
    print(f"{node.kind}: {node.reason}")
assert [node.kind for node in found.left_out] == ["aten::matmul", "aten::sort"]

# %% [markdown]
# `found.to_html("report.html")` writes the same as a page with a drawing of the graph.
#
# ## Whether it is right
#
# `check` runs each group twice from equal inputs, fused and op by op, and compares. The report is true
# if all groups are equal within the precision of their dtypes. It names the first group that is not.

# %%
report = tsfuser.check(rank, x, weight, bias)
print(report)
assert report

# %% [markdown]
# Both take what `torch.compile(..., backend="tsfuser")` has returned, too. There, `check` also compares
# all results and gradients with eager mode.

# %%
compiled = torch.compile(lambda x: torch.softmax(x * 3.0, -1).log1p(), backend="tsfuser")
report = tsfuser.check(compiled, x)
print(report)
assert report

# %%
stats = tsfuser.stats()
print("launches:", stats["launches"], "fallbacks:", stats["fallbacks"])
assert stats["launches"] > 0 and not stats["fallbacks"]
