"""Networks and transforms of torchaudio, and the model that silero-vad ships as a file."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from zoo import Program, generator


def random(size, *shape):
    return torch.randn(shape, generator=generator(size))


def seeded(make):
    torch.manual_seed(0)
    return make()


class Conformer(nn.Module):
    def __init__(self):
        super().__init__()
        from torchaudio.models import Conformer

        self.model = Conformer(16, 4, 32, 2, depthwise_conv_kernel_size=7)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return self.model(frames, lengths)[0]


def padded(size):
    """Two sequences, the second of which is shorter."""
    return random(size, 2, size, 16), torch.tensor([size, max(size - 3, 1)])


class Emformer(nn.Module):
    def __init__(self):
        super().__init__()
        from torchaudio.models import Emformer

        self.model = Emformer(16, 4, 32, 2, segment_length=4, right_context_length=1)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return self.model(frames, lengths)[0]


def segments(size):
    return random(size, 2, size + 1, 16), torch.tensor([size, max(size - 3, 1)])


def wav2vec2():
    from torchaudio.models import wav2vec2_model

    return wav2vec2_model(
        extractor_mode="layer_norm",
        extractor_conv_layer_config=[(16, 10, 5), (16, 3, 2)],
        extractor_conv_bias=True,
        encoder_embed_dim=16,
        encoder_projection_dropout=0.0,
        encoder_pos_conv_kernel=4,
        encoder_pos_conv_groups=2,
        encoder_num_layers=2,
        encoder_num_heads=4,
        encoder_attention_dropout=0.0,
        encoder_ff_interm_features=32,
        encoder_ff_interm_dropout=0.0,
        encoder_dropout=0.0,
        encoder_layer_norm_first=True,
        encoder_layer_drop=0.0,
        aux_num_out=5,
    )


class Wav2Vec2(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = wav2vec2()

    def forward(self, waves: Tensor) -> Tensor:
        return self.model(waves)[0]


def conv_tasnet():
    from torchaudio.models import ConvTasNet

    return ConvTasNet(
        num_sources=2, enc_kernel_size=8, enc_num_feats=16, msk_kernel_size=3, msk_num_feats=8,
        msk_num_hidden_feats=16, msk_num_layers=2, msk_num_stacks=2,
    )  # fmt: skip


def wav2letter():
    from torchaudio.models import Wav2Letter

    return Wav2Letter(num_classes=5, input_type="mfcc", num_features=8)


class Features(nn.Module):
    """Transforms that most programs begin with."""

    def __init__(self):
        super().__init__()
        from torchaudio import transforms

        mel = dict(n_fft=64, hop_length=16, n_mels=12)
        self.mel = transforms.MelSpectrogram(8000, **mel)
        self.decibels = transforms.AmplitudeToDB(top_db=80.0)
        self.mfcc = transforms.MFCC(8000, n_mfcc=8, melkwargs=mel)
        self.resample = transforms.Resample(8000, 6000)
        self.stretch = transforms.SpectralCentroid(8000, n_fft=64, hop_length=16)
        self.deltas = transforms.ComputeDeltas()

    def forward(self, waves: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mel = self.deltas(self.decibels(self.mel(waves)))
        return mel, self.mfcc(waves), self.resample(waves), self.stretch(waves)


def silero():
    from importlib.resources import files

    return torch.jit.load(str(files("silero_vad") / "data" / "silero_vad.jit"))


def chunks(size):
    """A batch of chunks: the model takes chunks of 512 samples. It keeps its state between calls of one
    batch size."""
    return 0.1 * random(size, size, 512), 16000


def made(make):
    return functools.partial(seeded, make)


AUDIO = ("torchaudio",)
PROGRAMS = [
    Program("torchaudio: Conformer", AUDIO, made(Conformer), padded, "frames, lengths"),
    Program("torchaudio: Emformer", AUDIO, made(Emformer), segments, "frames, lengths"),
    Program("torchaudio: Wav2Vec2", AUDIO, made(Wav2Vec2), lambda n: (random(n, 2, 200 + 37 * n),), "waves"),
    Program(
        "torchaudio: ConvTasNet", AUDIO, made(conv_tasnet), lambda n: (random(n, 2, 1, 96 * n),), "waves"
    ),
    Program(
        "torchaudio: Wav2Letter", AUDIO, made(wav2letter), lambda n: (random(n, 2, 8, 250 + n),), "frames"
    ),
    Program(
        "torchaudio: features",
        AUDIO,
        made(Features),
        lambda n: (random(n, 2, 400 + 111 * n),),
        "waves",
        trains=False,
    ),
    Program(
        "silero-vad: shipped model",
        ("silero_vad",),
        silero,
        chunks,
        "chunks, rate: int",
        script=lambda module: module,
        stateful=True,
        trains=False,
        compiles=False,
        in_double=False,
    ),
]
