# %% [markdown]
# # Training a small GPT with torch.compile
#
# A GPT that learns letters, with two layers. The model, its loss and the optimizer are all compiled by
# tsfuser. It learns the source of `torch.nn.functional`, which is on every machine that has torch.

# %%
import inspect

import torch
import torch.nn.functional as F

import tsfuser

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

text = inspect.getsource(torch.nn.functional)[:40000].encode("ascii", "ignore")
data = torch.tensor(list(text), device=device)

# %%
WIDTH, HEADS, LENGTH, LETTERS = 64, 4, 64, 128


class Layer(torch.nn.Module):
    """Attention and a feed-forward network, each behind a norm."""

    def __init__(self):
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.merge = torch.nn.Linear(WIDTH, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.merge(heads.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(torch.nn.Module):
    """Letters [batch, length] and the letters that follow -> the loss."""

    def __init__(self):
        super().__init__()
        self.letters = torch.nn.Embedding(LETTERS, WIDTH)
        self.places = torch.nn.Embedding(LENGTH, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, LETTERS, bias=False)

    def forward(self, letters, following):
        x = self.letters(letters) + self.places.weight[: letters.size(1)]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), following.flatten())


def batch():
    starts = torch.randint(len(data) - LENGTH - 1, (8,), device=device).tolist()
    rows = torch.stack([data[start : start + LENGTH + 1] for start in starts])
    return rows[:, :-1], rows[:, 1:]


# %% [markdown]
# ## The step
#
# Compiled are the model with its loss, forward and backward, and the optimizer's step. AdamW's update of
# all parameters is one group.

# %%
model = GPT().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
compiled = torch.compile(model, backend="tsfuser")
update = torch.compile(optimizer.step, backend="tsfuser")

letters, following = batch()
torch.testing.assert_close(compiled(letters, following), model(letters, following))

losses = []
for step in range(40):
    loss = compiled(*batch())
    loss.backward()
    update()
    optimizer.zero_grad()
    losses.append(float(loss.detach()))
    if step % 10 == 0:
        print(f"step {step}: loss {losses[-1]:.2f}")
print(f"mean of the last five: {sum(losses[-5:]) / 5:.2f}")
assert sum(losses[-5:]) / 5 < losses[0] - 1.0

# %% [markdown]
# ## What was fused
#
# Two graphs were translated for the model, its forward and its backward, and one for the optimizer. The
# groups of both layers share their kernels.

# %%
stats = tsfuser.stats()
for name in ("graphs", "groups", "kernels_compiled", "disk_hits", "launches", "fallbacks", "graphs_unfused"):
    print(f"{name}: {stats[name]}")
assert stats["launches"] > 0 and not stats["fallbacks"] and not stats["graphs_unfused"]
