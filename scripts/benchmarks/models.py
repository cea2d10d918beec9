"""Training steps of the networks of tests/kit/models.py: forward and backward in eager, compiled and fused.

In: the name of a case and peers. Out: a `Result`, with device times after `profile`. Example:

    measured = Trained("resnet_basic_amp", peers, settings)
    measured.profile(copy_bandwidth())
    print(measured.result.table())

Sizes are those of `large` in tests/kit/models.py on a CUDA device, of `small` elsewhere."""

import copy
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from .accuracy import beyond
from .peers import PEERS
from .report import Result
from .timing import CUDA, DEVICE, kernels, seconds, steps_per_second
from .training import WARM_UP, attempt

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from kit import models

DROPOUT = 0.1  # while timed; results are compared without


@dataclass(frozen=True)
class Case:
    """A network and how it is trained. `autocast`: forward in bfloat16. `channels_last`: of images."""

    model: str
    title: str
    autocast: bool = False
    channels_last: bool = False


CASES = {
    "resnet_basic": Case("resnet_basic", "ResNet basic block"),
    "resnet_basic_amp": Case("resnet_basic", "ResNet basic block", True, True),
    "resnet_bottleneck_amp": Case("resnet_bottleneck", "ResNet bottleneck with shortcut", True, True),
    "unet_amp": Case("unet", "U-Net of one level", True, True),
    "encoder": Case("encoder", "transformer encoder layer, dropout 0.1"),
    "encoder_amp": Case("encoder", "transformer encoder layer, dropout 0.1", True),
    "gpt_amp": Case("gpt", "GPT block: rotary embedding, RMS norm, SwiGLU", True),
    "lstm": Case("lstm", "LSTM, cell by cell"),
}
COMPARED = ("eager", "script", "compile", "tsfuser")


def prepared(peer, module):
    """The module as the peer runs it."""
    if peer == "compile":
        return torch.compile(module)
    if peer == "eager":
        return module
    # else it shares what was compiled for the last one of its class
    torch.jit._recursive.concrete_type_store = torch.jit._recursive.ConcreteTypeStore()
    return torch.jit.script(module)


class Trained:
    """A case with each of the peers; `result` has steps a second and, after `profile`, device times."""

    def __init__(self, name, peers, settings, tiny=False):
        self.case, self.settings, self.steps = CASES[name], settings, {}
        torch.manual_seed(0)
        self.size = "large" if CUDA and not tiny else "small"
        self.module, self.inputs = models.build(self.case.model, self.size, DEVICE)
        if self.case.channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)
            self.inputs = tuple(x.contiguous(memory_format=torch.channels_last) for x in self.inputs)
        with torch.no_grad():
            self.shape = copy.deepcopy(self.module)(*self.inputs).shape
        details = ["bfloat16 autocast"] * self.case.autocast + ["channels last"] * self.case.channels_last
        title = ", ".join([self.case.title, str(list(self.inputs[0].shape)), *(details or ["float32"])])
        self.result = Result(name, title, "its")
        for key in COMPARED:
            if key in peers:
                cell = self.result.cells[key] = {}
                attempt(cell, settings, lambda: self.measure(key))

    def trained(self, peer, dropout=0.0, autocast=None, dtype=torch.float32):
        """A step of a copy of the module in `dtype`, as the peer runs it: it returns the result and all
        gradients."""
        module = copy.deepcopy(self.module).to(dtype)
        for part in module.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = dropout
        run = prepared(peer, module)
        inputs = [x.to(dtype) if x.is_floating_point() else x for x in self.inputs]
        leaf = inputs[0].detach().requires_grad_()
        autocast = self.case.autocast if autocast is None else autocast
        gradient = torch.randn(self.shape, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
        if self.case.channels_last:  # as the next convolution would give it
            gradient = gradient.contiguous(memory_format=torch.channels_last)
        gradients = {gradient.dtype: gradient}  # so that no step casts it

        def step():
            module.zero_grad(set_to_none=True)
            leaf.grad = None
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                out = run(leaf, *inputs[1:])
            if out.dtype not in gradients:
                gradients[out.dtype] = gradient.to(out.dtype)
            out.backward(gradients[out.dtype])
            return [out.detach(), leaf.grad, *(p.grad for p in module.parameters())]

        return step

    def wrong_by(self):
        """How far tsfuser is off, beyond eager: from float64 or, with autocast, from float32."""
        dtype = torch.float32 if self.case.autocast else torch.float64
        exact = [x.double() for x in self.trained("eager", autocast=False, dtype=dtype)()]
        eager = [x.double() for x in self.trained("eager")()]
        with PEERS["tsfuser"].context():
            step = self.trained("tsfuser")
            for _ in range(4):
                fused = [x.double() for x in step()]
        return beyond(fused, eager, exact, torch.bfloat16 if self.case.autocast else torch.float32)

    def measure(self, key):
        """Steps a second, and how long the first steps took, compilers included."""
        if key == "tsfuser" and (wrong := self.wrong_by()) > 64:
            raise ArithmeticError(f"wrong result: {wrong:.3g} roundings beyond eager's")
        with PEERS[key].context():
            step = self.trained(key, DROPOUT)
            start, _ = seconds(lambda: [step() for _ in range(WARM_UP)] and None)
            count = max(self.settings.steps // 5, 2)
            its = steps_per_second(step, count, self.settings.repeats)
        self.steps[key] = step
        return {"its": its, "start s": start}

    def profile(self, bandwidth):
        """Adds device time and kernels to each cell."""
        for key, step in self.steps.items():
            attempt(self.result.cells[key], self.settings, lambda: self.device_times(key, step))

    def device_times(self, key, step):
        with PEERS[key].context():
            measured = kernels(step, 5)
        return {} if measured is None else {"gpu us": measured[0], "kernels": measured[1]}
