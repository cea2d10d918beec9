"""The models of `scripts/bench --dashboard`: a fixed list; a model that fails stays in it.

In: a name. Out: a `Model`, which makes the module with random weights from a configuration, and inputs of a
batch size. The layers of transformers have their real widths, and there are 2 to 4 of them. Dropouts are
off, so that results can be compared. Example:

    model = MODELS["gpt2"]
    module, inputs = model.module(large=False), model.inputs(large=False, n=2)
    module(**inputs).loss.backward()
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from kit.compiled_models import DLRM


@dataclass(frozen=True)
class Model:
    """`make(large)`: the module. `example(large, n)`: keyword arguments of a batch of `n`, and `targets`, if
    the module itself has no loss: classes, or numbers. `sizes`: the batch sizes, small and large. `block`: it
    has its dtypes, and its results no loss. `exact`: float64 says what is right, else eager itself."""

    package: str
    make: Callable
    example: Callable
    sizes: tuple[int, int]
    modes: tuple[str, ...] = ("training", "inference")
    block: bool = False
    exact: bool = True

    def installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None

    def module(self, large: bool) -> torch.nn.Module:
        torch.manual_seed(0)
        module = self.make(large)
        for part in module.modules():
            if isinstance(part, torch.nn.modules.dropout._DropoutNd):
                part.p = 0.0
        return module

    def inputs(self, large: bool, n: int) -> dict:
        torch.manual_seed(n)
        return self.example(large, n)


_NARROW = dict(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=99
)


def _configured(module, config, real, small):
    """A module of transformers by the names of its class and of its configuration's class."""

    def make(large):
        transformers = importlib.import_module("transformers")
        made = getattr(transformers, config)(**(real if large else small))
        for name, value in vars(made).items():
            if "drop" in name and isinstance(value, float):
                setattr(made, name, 0.0)
        made.use_cache = False
        return getattr(transformers, module)(made)

    return make


def _tokens(words, length, **more):
    """A batch of `n` sequences, with the words to predict; `more`: name -> length of a second sequence."""

    def example(large, n):
        count, size = (words, length) if large else (99, 12)
        tokens = torch.randint(count, (n, size))
        if more:
            [(name, other)] = more.items()
            second = torch.randint(count, (n, other if large else 8))
            return {"input_ids": tokens, name: second, "labels": second}
        return {"input_ids": tokens, "labels": tokens.clone()}

    return example


def _language(name, words, sizes, length=512, small=None, head="ForCausalLM", n=16, more=None, **real):
    """A language model of transformers: its class is `name` and `head`, its configuration's `name` and
    Config."""
    real = {**real, "vocab_size": words}
    make = _configured(name + head, name + "Config", {**real, **sizes}, {**real, **(small or _NARROW)})
    return Model("transformers", make, _tokens(words, length, **(more or {})), (2, n))


def _wide(width, heads, layers=4, inner=None):
    return dict(
        hidden_size=width,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        intermediate_size=inner or 4 * width,
    )


_MASKED = "ForMaskedLM"
_GROUPED = {**_NARROW, "num_key_value_heads": 1}
_SMALL_GPT2 = dict(n_embd=32, n_layer=1, n_head=2, vocab_size=99)
_SMALL_BART = {
    "d_model": 32,
    "vocab_size": 99,
    **{
        f"{side}_{name}": k for side in ("encoder", "decoder") for name, k in (("layers", 1), ("ffn_dim", 64))
    },
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
}
_BART = {
    "d_model": 768,
    **{
        f"{side}_{name}": k
        for side in ("encoder", "decoder")
        for name, k in (("layers", 2), ("ffn_dim", 3072))
    },
    **{f"{side}_attention_heads": 12 for side in ("encoder", "decoder")},
}
_SMALL_OPT = dict(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    ffn_dim=64,
    vocab_size=99,
    word_embed_proj_dim=32,
)
_OPT = dict(
    hidden_size=768, num_hidden_layers=4, num_attention_heads=12, ffn_dim=3072, word_embed_proj_dim=768
)

_LANGUAGE = {
    "gpt2": _language(
        "GPT2", 50257, dict(n_embd=768, n_layer=4, n_head=12), 1024, _SMALL_GPT2, "LMHeadModel", n=8
    ),
    "bert": _language("Bert", 30522, _wide(768, 12), head=_MASKED),
    "roberta": _language(
        "Roberta",
        50265,
        {**_wide(768, 12), "max_position_embeddings": 514},
        small={**_NARROW, "pad_token_id": 98},
        head=_MASKED,
    ),
    "electra": _language(
        "Electra", 30522, {**_wide(256, 4, inner=1024), "embedding_size": 128}, n=32, is_decoder=True
    ),
    "mobilebert": _language(
        "MobileBert",
        30522,
        dict(num_hidden_layers=4),
        128,
        dict(num_hidden_layers=1, vocab_size=640),  # its embeddings have to be narrower than its vocabulary
        _MASKED,
        n=64,
    ),
    "deberta": _language("DebertaV2", 128100, _wide(768, 12, layers=2), head=_MASKED, n=8),
    "distilbert": _language(
        "DistilBert",
        30522,
        dict(dim=768, n_layers=4, n_heads=12, hidden_dim=3072),
        128,
        dict(dim=32, n_layers=1, n_heads=2, hidden_dim=64, vocab_size=99),
        _MASKED,
        n=64,
    ),
    "albert": _language("Albert", 30000, {**_wide(768, 12), "embedding_size": 128}, head=_MASKED),
    "xglm": _language(
        "XGLM",
        256008,
        dict(d_model=1024, ffn_dim=4096, num_layers=2, attention_heads=16),
        256,
        dict(d_model=32, ffn_dim=64, num_layers=1, attention_heads=2, vocab_size=99),
        n=4,
    ),
    "opt": _language("OPT", 50272, _OPT, small=_SMALL_OPT, n=8),
    "t5": _language(
        "T5",
        32128,
        dict(d_model=768, d_ff=3072, d_kv=64, num_layers=2, num_decoder_layers=2, num_heads=12),
        512,
        dict(d_model=32, d_ff=64, d_kv=16, num_layers=1, num_decoder_layers=1, num_heads=2, vocab_size=99),
        "ForConditionalGeneration",
        n=16,
        more={"decoder_input_ids": 512},
        dropout_rate=0.0,
    ),
    "bart": _language(
        "Bart",
        50265,
        _BART,
        512,
        _SMALL_BART,
        "ForConditionalGeneration",
        n=8,
        more={"decoder_input_ids": 512},
    ),
    "llama": _language(
        "Llama", 32000, {**_wide(2048, 16, inner=5632), "num_key_value_heads": 4}, 1024, _GROUPED, n=4
    ),
    "mistral": _language(
        "Mistral", 32000, {**_wide(2048, 16, inner=5632), "num_key_value_heads": 4}, 1024, _GROUPED, n=4
    ),
    "qwen3": _language(
        "Qwen3",
        151936,
        {**_wide(1024, 16, inner=3072), "num_key_value_heads": 8, "head_dim": 64},
        1024,
        {**_GROUPED, "head_dim": 16},
        n=4,
    ),
    "gemma2": _language(
        "Gemma2",
        256000,
        {**_wide(1152, 8, layers=2, inner=4608), "num_key_value_heads": 4, "head_dim": 144},
        1024,
        {**_GROUPED, "head_dim": 16},
        n=2,
    ),
    "phi": _language("Phi", 51200, _wide(1024, 16), 1024, n=4),
    "pythia": _language("GPTNeoX", 50304, _wide(1024, 16), 1024, n=4),
    "mixtral": _language(
        "Mixtral",
        32000,
        {**_wide(1024, 16, layers=2, inner=2816), "num_key_value_heads": 4, "num_local_experts": 8},
        512,
        {**_GROUPED, "num_local_experts": 4},
        n=4,
    ),
}


def _whisper(large):
    sizes = {**(_BART if large else _SMALL_BART), "num_mel_bins": 80 if large else 8}
    words = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=[])
    lengths = dict(max_source_positions=1500 if large else 16, max_target_positions=448 if large else 16)
    sizes = {"vocab_size": 51865, **sizes, **words, **lengths, "begin_suppress_tokens": None}
    return _configured("WhisperForConditionalGeneration", "WhisperConfig", sizes, sizes)(large)


def _speech(large, n):
    bands, length, words = (80, 3000, 51865) if large else (8, 32, 99)
    tokens = torch.randint(3, words, (n, 128 if large else 8))
    return {"input_features": torch.randn(n, bands, length), "decoder_input_ids": tokens, "labels": tokens}


_WAV = dict(_wide(768, 12), num_labels=8)
_SMALL_WAV = dict(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    conv_dim=(16, 16),
    conv_stride=(5, 2),
    conv_kernel=(10, 3),
    num_feat_extract_layers=2,
    num_labels=8,
)
_WAV_OFF = dict(layerdrop=0.0, apply_spec_augment=False)


def _waves(large, n):
    return {"input_values": torch.randn(n, 32000 if large else 800), "labels": torch.randint(8, (n,))}


def _clip(large):
    text = {**_wide(512, 8), "vocab_size": 49408} if large else dict(_NARROW)
    sight = {**_wide(768, 12), "patch_size": 32} if large else {**_NARROW, "image_size": 32, "patch_size": 16}
    sizes = dict(text_config=text, vision_config=sight, projection_dim=512 if large else 16)
    return _configured("CLIPModel", "CLIPConfig", sizes, sizes)(large)


def _pairs(large, n):
    words, length, side = (49408, 77, 224) if large else (99, 12, 32)
    tokens = torch.randint(words, (n, length))
    return {"input_ids": tokens, "pixel_values": torch.randn(n, 3, side, side), "return_loss": True}


_SPEECH_AND_SIGHT = {
    "whisper": Model("transformers", _whisper, _speech, (2, 8)),
    "wav2vec2": Model(
        "transformers",
        _configured(
            "Wav2Vec2ForSequenceClassification",
            "Wav2Vec2Config",
            {**_WAV, **_WAV_OFF},
            {**_SMALL_WAV, **_WAV_OFF},
        ),
        _waves,
        (2, 16),
    ),
    "clip": Model("transformers", _clip, _pairs, (2, 64)),
}


def _photos(side, name="x", small=64):
    def example(large, n):
        length = side if large else small
        return {name: torch.randn(n, 3, length, length), "targets": torch.randint(1000, (n,))}

    return example


def _timm(name, n, side=224, small=64, sized=False):
    """`small`: the side of a photo in tests. `sized`: the model is made for photos of one side."""

    def make(large):
        options = {"img_size": side if large else small} if sized else {}
        return importlib.import_module("timm").create_model(name, **options)

    return Model("timm", make, _photos(side, small=small), (2, n))


def _torchvision(name, n, side=224, small=64, **options):
    def make(large):
        return getattr(importlib.import_module("torchvision").models, name)(**options)

    return Model("torchvision", make, _photos(side, small=small), (2, n))


_VISION = {
    "resnet18": _torchvision("resnet18", 128),
    "resnet50": _torchvision("resnet50", 64),
    "densenet121": _torchvision("densenet121", 64),
    "shufflenet": _torchvision("shufflenet_v2_x1_0", 128),
    "squeezenet": _torchvision("squeezenet1_1", 128),
    "vgg16": _torchvision("vgg16", 32),
    "mnasnet": _torchvision("mnasnet1_0", 128),
    "convnext": _timm("convnext_base", 32),
    "swin": _timm("swin_base_patch4_window7_224", 32, small=224),
    "mixer": _timm("mixer_b16_224", 64, sized=True),
    "cait": _timm("cait_xxs24_224", 64, sized=True),
    "mobilenetv3": _timm("mobilenetv3_large_100", 128),
    "nfnet": _timm("dm_nfnet_f0", 64, 192),
    "efficientnet": _timm("efficientnet_b0", 64),
    "vit": _timm("vit_base_patch16_224", 64, sized=True),
    "beit": _timm("beit_base_patch16_224", 64, sized=True),
    "mobilevit": _timm("mobilevit_s", 64, 256),
    "regnet": _timm("regnety_032", 64),
    "res2net": _timm("res2net50_14w_8s", 64),
    "ghostnet": _timm("ghostnet_100", 128),
    "repvgg": _timm("repvgg_a2", 64),
    "levit": _timm("levit_128", 128, small=224),
    "inception": _timm("inception_v3", 64, 299, small=96),
}


def _graph(layer, **options):
    """Three layers of torch_geometric; `n` is a number of thousand nodes, each of which has 16 edges."""

    class Network(torch.nn.Module):
        def __init__(self, large):
            super().__init__()
            made = getattr(importlib.import_module("torch_geometric.nn"), layer)
            widths = (128, 256, 256, 1000) if large else (8, 16, 16, 1000)
            self.layers = torch.nn.ModuleList(made(a, b, **options) for a, b in zip(widths, widths[1:]))

        def forward(self, x, edges):
            for layer in self.layers[:-1]:
                x = torch.relu(layer(x, edges))
            return self.layers[-1](x, edges)

    def example(large, n):
        nodes = n * 1000 if large else 10 * n
        x, edges = torch.randn(nodes, 128 if large else 8), torch.randint(nodes, (2, 16 * nodes))
        return {"x": x, "edges": edges, "targets": torch.randint(1000, (nodes,))}

    return Model("torch_geometric", Network, example, (2, 20))


_GRAPHS = {
    "gcn": _graph("GCNConv"),
    "sage": _graph("SAGEConv"),
    "gat": _graph("GATConv"),
}


def _clicks(large, n):
    return {"x": torch.randn(n, 256 if large else 8), "targets": torch.rand(n, 1)}


def _recommender(large):
    return DLRM(256, 64, 26, 1024) if large else DLRM()


_OTHERS = {"dlrm": Model("torch", _recommender, _clicks, (4, 4096))}

MODELS: dict[str, Model] = {**_LANGUAGE, **_SPEECH_AND_SIGHT, **_VISION, **_GRAPHS, **_OTHERS}
