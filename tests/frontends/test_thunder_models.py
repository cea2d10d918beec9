"""The networks of lightning-thunder's own tests, nanoGPT and Llama 2, with tsfuser as an executor."""

import importlib.util

import pytest
import torch
import torch.nn.functional as F

import tsfuser
from kit import thunders
from kit.support import assert_matches
from kit.thunders import strict  # noqa: F401  a fixture of all tests here

if importlib.util.find_spec("thunder") is None:
    pytest.skip("lightning-thunder is not installed", allow_module_level=True)

pytestmark = pytest.mark.graphs
thunder = nanogpt = llama2 = None  # modules, imported when tests run
TERMS = 200  # the longest sums of the models


@pytest.fixture(autouse=True, scope="module")
def loaded():
    global thunder, nanogpt, llama2
    try:
        thunder = thunders.load()
        nanogpt = importlib.import_module("thunder.tests.nanogpt_model")
        llama2 = importlib.import_module("thunder.tests.llama2_model")
    except ImportError as error:
        pytest.skip(str(error))


def gpt_config():
    return nanogpt.GPTConfig(block_size=16, vocab_size=48, n_layer=1, n_head=2, n_embd=16, dropout=0.0)


def llama_arguments():
    sizes = {"dim": 16, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 8}
    return llama2.ModelArgs(**sizes, vocab_size=48, max_seq_len=32)


def rotation(length):
    return llama2.precompute_freqs_cis(4, length)


def words(batch, length):
    return torch.randint(0, 48, (batch, length))


def hidden(batch, length):
    return torch.randn(batch, length, 16)


#: name -> the module, and its inputs for a batch and a length
NETWORKS = {
    "nanoGPT's MLP": (lambda: nanogpt.MLP(gpt_config()), lambda b, n: (hidden(b, n),)),
    "nanoGPT's attention": (lambda: nanogpt.CausalSelfAttention(gpt_config()), lambda b, n: (hidden(b, n),)),
    "nanoGPT": (lambda: nanogpt.GPT(gpt_config()), lambda b, n: (words(b, n),)),
    "Llama's block": (
        lambda: llama2.TransformerBlock(0, llama_arguments()),
        lambda b, n: (hidden(b, n), *rotation(n)),
    ),
    "Llama": (lambda: llama2.Transformer(llama_arguments()), lambda b, n: (words(b, n), words(b, n))),
}


def step(module, function, inputs):
    """The output, and the gradients of the parameters, for a loss of made-up weights."""
    module.zero_grad()
    out = function(*inputs)
    out = out[0] if isinstance(out, tuple) else out  # nanoGPT returns a loss, too
    weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    (out * weights).sum().backward()
    return [out.detach(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)]


def cast(inputs, device, dtype):
    return tuple(x.to(device, dtype if x.is_floating_point() else None) for x in inputs)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16], ids=str
)
@pytest.mark.parametrize(
    "name", [name if name == "Llama" else pytest.param(name, marks=pytest.mark.long) for name in NETWORKS]
)
def test_thunders_networks_train_as_in_eager(name, dtype, device):
    make, inputs = NETWORKS[name]
    module = make().to(device, dtype)
    exact_module = make().to(device, torch.float64)
    exact_module.load_state_dict(module.state_dict())
    jitted = thunder.jit(module, executors=["tsfuser", "sdpa"])
    given = inputs(2, 8)
    eager = step(module, module, cast(given, device, dtype))
    exact = step(exact_module, exact_module, cast(given, device, torch.float64))
    actual = step(module, jitted, cast(given, device, dtype))
    assert len(actual) == len(eager) == len(exact)
    # in bfloat16 each of the ops between two regions rounds
    for ours, plain, wide in zip(actual, eager, exact):
        assert_matches(ours, plain, wide, ops=TERMS if dtype == torch.float32 else 4, strides=False)
    traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    forward, backward = map(thunders.regions, traces)
    assert backward and tsfuser.stats()["launches"] >= len(forward) + len(backward)
    # "sdpa" takes no CPU tensors. Elsewhere it takes the attention whole: what is left of this network's
    # forward is products and views
    attention = any(symbol.sym.name.startswith("sdpafx_") for symbol in thunders.outside(traces[0]))
    assert bool(forward) != (name == "nanoGPT's attention" and attention)
    assert not (attention and device == "cpu")


def test_an_attention_that_no_other_executor_takes_has_regions_both_ways(device):
    make, inputs = NETWORKS["nanoGPT's attention"]
    module = make().to(device)
    jitted = thunder.jit(module, executors=["tsfuser"])
    step(module, jitted, cast(inputs(2, 8), device, torch.float32))
    traces = thunder.last_traces(jitted)[-1], thunder.last_backward_traces(jitted)[-1]
    assert all(map(thunders.regions, traces))


def gpt_block(x, before, qkv, out, between, up, down):
    """nanoGPT's block. thunder's symbolic values take no parameters of modules, so weights are arguments."""
    batch, length, size = x.shape
    q, k, v = F.linear(F.layer_norm(x, (size,), before), qkv).split(size, 2)
    q, k, v = (part.view(batch, length, 2, size // 2).transpose(1, 2) for part in (q, k, v))
    weights = torch.softmax((q @ k.transpose(-2, -1)) * 0.35, -1)
    x = x + F.linear((weights @ v).transpose(1, 2).reshape(batch, length, size), out)
    return x + F.linear(F.gelu(F.linear(F.layer_norm(x, (size,), between), up), approximate="tanh"), down)


def rms_norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def llama_block(x, cosines, sines, before, wq, wk, wv, wo, between, w1, w2, w3):
    """Llama's block, with thunder's rotation of queries and keys."""
    batch, length, size = x.shape
    normed = rms_norm(x, before)
    q, k, v = (F.linear(normed, w).view(batch, length, 4, 4) for w in (wq, wk, wv))
    q, k = llama2.apply_rotary_emb(q, k, cosines, sines)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    weights = torch.softmax((q @ k.transpose(-2, -1)) * 0.5, -1)
    x = x + F.linear((weights @ v).transpose(1, 2).reshape(batch, length, size), wo)
    normed = rms_norm(x, between)
    return x + F.linear(F.silu(F.linear(normed, w1)) * F.linear(normed, w3), w2)


SQUARE, WIDE, NARROW, VECTOR = (16, 16), (64, 16), (16, 64), (16,)
#: name -> the function, the sizes of its weights, and its inputs for a batch and a length
FUNCTIONS = {
    "GPT": (gpt_block, [VECTOR, (48, 16), SQUARE, VECTOR, WIDE, NARROW], lambda b, n: (hidden(b, n),)),
    "Llama": (
        llama_block,
        [VECTOR, *[SQUARE] * 4, VECTOR, WIDE, NARROW, WIDE],
        lambda b, n: (hidden(b, n), rotation(n)[0], rotation(n)[1]),
    ),
}


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.long), torch.bfloat16], ids=str
)
@pytest.mark.parametrize("name", ["GPT", pytest.param("Llama", marks=pytest.mark.long)])
def test_new_sizes_compile_nothing(name, dtype, device):
    """One trace of symbolic values serves batches and lengths, forward and backward. Kernels of the first
    steps, which are of rows that divide by 4 and of others, serve the later ones."""
    function, sizes, inputs = FUNCTIONS[name]
    weights = [torch.randn(size, device=device, dtype=dtype) / 4 for size in sizes]
    jitted = thunder.jit(function, executors=["tsfuser", "sdpa"], cache="symbolic values")
    made = []
    for batch, length in ((2, 8), (3, 8), (3, 7), (5, 8), (7, 8), (4, 7)):
        given = inputs(batch, length)
        found = []
        for run, kind in ((function, torch.float64), (function, dtype), (jitted, dtype)):
            leaves = [w.to(kind, copy=True).requires_grad_() for w in weights]
            found.append(trained(run, cast(given, device, kind), leaves))
        for wide, plain, ours in zip(*found):
            assert_matches(ours, plain, wide, ops=TERMS if dtype == torch.float32 else 4, strides=False)
        stats = tsfuser.stats()
        made.append(stats["kernels_compiled"] + stats["disk_hits"])
    assert thunder.cache_misses(jitted) == 1
    assert made[-1] == made[2], made


def trained(function, inputs, weights):
    out = function(*inputs, *weights)
    incoming = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype)
    out.backward(incoming)
    return [out.detach(), *(w.grad for w in weights)]
