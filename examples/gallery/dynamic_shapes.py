# %% [markdown]
# # Dynamic shapes
#
# Sizes are arguments of a kernel. So a call with another size compiles nothing, as long as it needs the
# same kind of kernel. This page counts plans and compiled kernels while the sizes of a batch change.

# %%
import torch

import tsfuser

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def scores(q, mask):
    """A masked softmax over the last dim."""
    return torch.softmax((q * 0.125).masked_fill(mask, -10000.0), -1)


def batch(words):
    q = torch.randn(4, words, 96, device=device)
    return q, q > 1.5


# %% [markdown]
# ## TorchScript
#
# The first calls make the plan and its kernel. The next forty have other sizes.

# %%
scripted = torch.jit.script(scores)
with tsfuser.fuser():
    for words in (20, 21, 22):
        scripted(*batch(words))
    before = tsfuser.stats()
    for words in range(30, 70):
        q, mask = batch(words)
        torch.testing.assert_close(scripted(q, mask), scores(q, mask))
after = tsfuser.stats()
for name in ("plans_built", "kernels_compiled", "launches"):
    print(f"{name}: {before[name]} before, {after[name]} after 40 new shapes")
assert after["launches"] - before["launches"] == 40
assert after["plans_built"] - before["plans_built"] <= 3

# %% [markdown]
# A plan serves a class of calls: those that answer a few questions about sizes alike, such as "are the
# rows longer than a block takes at once?". A call of another class makes one more plan, which then
# stays.
#
# ## torch.compile
#
# With `dynamic=True`, TorchDynamo keeps sizes as symbols, and tsfuser hands them to the kernels.

# %%
compiled = torch.compile(scores, backend="tsfuser", dynamic=True)
compiled(*batch(20))
before = tsfuser.stats()
for words in range(30, 70):
    q, mask = batch(words)
    torch.testing.assert_close(compiled(q, mask), scores(q, mask))
after = tsfuser.stats()
for name in ("graphs", "plans_built", "kernels_compiled"):
    print(f"{name}: {before[name]} before, {after[name]} after 40 new shapes")
assert after["graphs"] == before["graphs"]

# %%
print("fallbacks:", after["fallbacks"])
assert after["launches"] > 0 and not after["fallbacks"]
