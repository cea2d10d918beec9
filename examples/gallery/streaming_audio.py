# %% [markdown]
# # Streaming audio
#
# A stream comes in chunks, and each chunk needs an answer before the next one comes. So calls are short,
# their sizes vary, and a pause for compiling would be heard. This page scripts the front end of a speech
# recogniser: the logarithm of a mel spectrogram, normalised by running statistics, which are handed from
# call to call.

# %%
import torch

import tsfuser

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class FrontEnd(torch.nn.Module):
    """Samples [batch, n] and the state of the stream -> features [batch, frames, bands] and the new state."""

    def __init__(self, size: int = 256, hop: int = 128, bands: int = 40):
        super().__init__()
        self.size, self.hop = size, hop
        self.register_buffer("window", torch.hann_window(size))
        centres = torch.linspace(0, size // 2, bands + 2)
        bins = torch.arange(size // 2 + 1)[:, None]
        rising = (bins - centres[:-2]) / (centres[1:-1] - centres[:-2])
        falling = (centres[2:] - bins) / (centres[2:] - centres[1:-1])
        self.register_buffer("filters", torch.minimum(rising, falling).clamp(min=0.0))

    def forward(self, samples, last, mean, variance):
        # pre-emphasis, which needs the last sample of the chunk before
        emphasised = samples - 0.97 * torch.cat([last, samples[:, :-1]], 1)
        frames = emphasised.unfold(1, self.size, self.hop) * self.window
        spectrum = torch.view_as_real(torch.fft.rfft(frames))
        power = spectrum[..., 0] * spectrum[..., 0] + spectrum[..., 1] * spectrum[..., 1]
        loudness = torch.log(torch.matmul(power, self.filters) + 1e-6)
        mean = 0.95 * mean + 0.05 * loudness.mean(1, keepdim=True)
        variance = 0.95 * variance + 0.05 * (loudness - mean).square().mean(1, keepdim=True)
        features = torch.tanh((loudness - mean) / torch.sqrt(variance + 1e-3) / 3.0)
        return features, samples[:, -1:].clone(), mean, variance  # a view would keep the chunk in memory


def stream(model, chunks):
    """The features of all chunks; what `model` returns beside them is its state for the next chunk."""
    state = (
        torch.zeros(2, 1, device=device),
        torch.zeros(2, 1, 40, device=device),
        torch.ones(2, 1, 40, device=device),
    )
    results = []
    with torch.no_grad():
        for chunk in chunks:
            features, *state = model(chunk, *state)
            results.append(features)
    return results


# %% [markdown]
# The chunks of a network have no fixed length.

# %%
model = FrontEnd().to(device).eval()
sizes = [512, 640, 1024, 768, 896, 1152, 512, 2048, 1408, 640, 960, 1600]
chunks = [torch.randn(2, n, device=device).cumsum(1) * 0.05 for n in sizes]
expected = stream(model, chunks)

scripted = torch.jit.script(model)
with tsfuser.fuser():
    stream(scripted, chunks)  # plans and kernels are made here
    before = tsfuser.stats()
    results = stream(scripted, chunks)
after = tsfuser.stats()
for result, true in zip(results, expected):
    torch.testing.assert_close(result, true, rtol=1e-4, atol=1e-4)

# %% [markdown]
# Once the stream runs, no call enters Python, and nothing is planned or compiled any more.

# %%
for name in ("python_calls", "plans_built", "kernels_compiled", "launches"):
    print(f"{name}: {after[name] - before[name]} in the second stream")
assert after["plans_built"] == before["plans_built"]

# %%
print("fallbacks:", after["fallbacks"])
assert after["launches"] > before["launches"] and not after["fallbacks"]
