"""Training by `torch.compile(model, backend="tsfuser")`: 200 steps with the losses of eager, and a step of
models as packages have them, with random weights."""

import copy
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tsfuser
from kit.compiled_models import MODELS

pytestmark = [pytest.mark.graphs, pytest.mark.usefixtures("forgotten", "fused_or_error")]


def losses(model, function, batches):
    """The loss of each step, of a task that can be learned."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for x in batches:
        optimizer.zero_grad()
        out = function(x)
        loss = F.mse_loss(out, torch.sin(x[..., : out.shape[-1]] * 2))
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.parametrize("name", ["mlp", "encoder"])
def test_two_hundred_steps_have_the_losses_of_eager(name, device):
    """In double: what rounding adds in a step, the next ones multiply."""
    make_model, make_input = MODELS[name]
    eager = make_model().double().to(device)
    model = copy.deepcopy(eager)
    batches = [make_input(6).double().to(device) for _ in range(200)]
    ours = losses(model, torch.compile(model, backend="tsfuser"), batches)
    plain = losses(eager, eager, batches)
    assert plain[-20:].mean() < 0.9 * plain[:20].mean()  # it learns
    torch.testing.assert_close(ours, plain, rtol=1e-7, atol=1e-9)
    found = tsfuser.stats()
    assert found["fallbacks"] == {} and found["launches"] >= 400


def _torchvision(name):
    import torchvision

    return getattr(torchvision.models, name)(num_classes=10), torch.randn(4, 3, 64, 64)


def _timm(name):
    import timm

    return timm.create_model(name, num_classes=10), torch.randn(2, 3, 64, 64)


def _transformers(config, model, **sizes):
    import transformers

    chosen = getattr(transformers, config)(vocab_size=100, **sizes)
    made = getattr(transformers, model)(chosen)
    made.config.use_cache = False
    return _Logits(made), torch.randint(100, (2, 24))


class _Logits(nn.Module):
    """A model of transformers that takes tokens and returns a tensor."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(input_ids=tokens).logits


PACKAGES = {
    "resnet18": ("torchvision", lambda: _torchvision("resnet18")),
    "convnext_tiny": ("torchvision", lambda: _torchvision("convnext_tiny")),
    "mobilenetv3": ("timm", lambda: _timm("mobilenetv3_small_050")),
    "convnextv2": ("timm", lambda: _timm("convnextv2_atto")),
    "gpt2": (
        "transformers",
        lambda: _transformers(
            "GPT2Config", "GPT2LMHeadModel", n_layer=2, n_embd=64, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        ),
    ),
    "llama": (
        "transformers",
        lambda: _transformers(
            "LlamaConfig", "LlamaForCausalLM", hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2,
        ),
    ),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", PACKAGES)
def test_models_of_packages_train_as_in_eager(name, device):
    package, make = PACKAGES[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    eager, x = make()
    for module in eager.modules():
        if type(module).__name__ in ("StochasticDepth", "DropPath") or isinstance(module, nn.Dropout):
            module.eval()  # draws other numbers
    eager, x = eager.to(device), x.to(device)
    model, exact = copy.deepcopy(eager), copy.deepcopy(eager).double()
    function = torch.compile(model, backend="tsfuser")
    wide = x.double() if x.is_floating_point() else x
    results = []
    for each, call, given in ((model, function, x), (eager, eager, x), (exact, exact, wide)):
        with torch.backends.cudnn.flags(allow_tf32=False):
            out = call(given)
            out.square().mean().backward()
        results.append([out.detach(), *(p.grad for p in each.parameters() if p.grad is not None)])
    for ours, plain, true in zip(*results):
        size, errors = true.abs().max(), [(x.double() - true).abs().max() for x in (ours, plain)]
        assert errors[0] <= 4 * errors[1] + 1e-4 * size
    assert tsfuser.stats()["fallbacks"] == {} and tsfuser.stats()["launches"] > 0
