"""`scripts/bench --networks`: whole networks in TorchScript, beside eager and torch.compile, by the clock.

In: names of networks and peers. Out: a `Result` for a network in inference, and one for its training step.
Each runs in a process of its own. All processes warm up side by side, which is when everything is compiled;
then one after the other measures, while the others wait. Example:

    for result in measure(["resnet50"], ["eager", "tsfuser"], large=True, deadline=float("inf")):
        print(result.table())
"""

import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from kit.models import EncoderLayer

from .child import Child
from .compiled_cases import photos, short_gpt2, short_llama, tokens
from .peers import PEERS
from .report import OUT_OF_TIME, Result
from .timing import CUDA

COMPARED = ("eager", "nnc", "compile", "tsfuser")
GRAPHED = ("eager", "compile", "tsfuser")  # those that can run as CUDA graphs
WARM_UP, MOST = 240, 40  # seconds for a process, in which it compiles and in which it measures
GRAPHS_AT_ONCE = 4  # processes: what a graph uses stays allocated
_CHILD = Path(__file__).with_name("networks_child.py")
_ORDER = ("warm-up s", "its", "gpu us", "kernels", "error")


@dataclass(frozen=True)
class Network:
    """`make(large)`: the module; `example(large, n)`: its inputs, of which `n` is a batch size or a length,
    the first one as in `sizes` (small, large). `package`: which it needs. `traced`: it cannot be scripted."""

    title: str
    package: str
    make: Callable
    example: Callable
    sizes: tuple[int, int] = (2, 32)
    traced: bool = False
    channels_last: bool = False

    def installed(self):
        return importlib.util.find_spec(self.package) is not None


class _Encoder(torch.nn.Module):
    """Layers of an encoder, all with the same mask."""

    def __init__(self, layers, width, heads):
        super().__init__()
        self.layers = torch.nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def _sequence(big, n):
    length, width = (256, 768) if big else (6, 16)
    return torch.randn(n, length, width), torch.zeros(n, 1, 1, length)


def _vision(name):
    def make(big):
        import torchvision

        network = getattr(torchvision.models, name)()
        for part in network.modules():
            if isinstance(part, torch.nn.Linear) and not part.weight.any():
                part.reset_parameters()  # ViT's last one, behind which all errors would be multiplied by zero
        return network

    return make


def _convolutions(name, title):
    return Network(f"torchvision's {title}", "torchvision", _vision(name), photos, channels_last=True)


def _transformer(name, title, **facts):
    return Network(f"torchvision's {title}", "torchvision", _vision(name), photos, **facts)


def _language(title, make):
    return Network(
        f"transformers' {title}, 4 layers",
        "transformers",
        make,
        tokens((64, 8192)),
        sizes=(6, 512),
        traced=True,
    )


NETWORKS = {
    "encoder_stack": Network(
        "six encoder layers",
        "torch",
        lambda big: _Encoder(6, 768, 12) if big else _Encoder(2, 16, 2),
        _sequence,
    ),
    "resnet50": _convolutions("resnet50", "ResNet-50"),
    "efficientnet_b0": _convolutions("efficientnet_b0", "EfficientNet-B0"),
    "convnext_tiny": _convolutions("convnext_tiny", "ConvNeXt-T"),
    "densenet121": _convolutions("densenet121", "DenseNet-121"),
    "shufflenet": _convolutions("shufflenet_v2_x1_0", "ShuffleNet v2"),
    "swin_t": _transformer("swin_t", "Swin-T"),
    # Scripted, it asks torch.is_autocast_enabled(): under autocast on CUDA torch's own pass crashes there.
    "vit_b_16": _transformer("vit_b_16", "ViT-B/16", traced=True),
    "gpt2": _language("GPT-2", short_gpt2),
    "llama": _language("Llama", short_llama),
}


def measure(names, peers, large, deadline, graphs=False):
    """Results, as they come, of those networks whose packages are installed; `peers` are of COMPARED.
    `graphs`: each peer runs as a CUDA graph."""
    orders = [
        {"network": name, "training": training, "large": large, "peers": list(peers), "graphs": graphs}
        for name in names
        for training in (False, True)
        if NETWORKS[name].installed()
    ]
    # inductor starts as many compilers in each process as there are cores
    alone = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    side_by_side = max(1, (os.cpu_count() or 1) if CUDA else 1)
    if graphs:
        side_by_side = min(side_by_side, GRAPHS_AT_ONCE)
    while orders:
        some, orders = orders[:side_by_side], orders[side_by_side:]
        children = [Child(_CHILD, alone) for _ in some]
        try:
            yield from _measured(some, children, deadline)
        finally:
            for child in children:
                child.end()


def _measured(orders, children, deadline):
    results = [_result(order) for order in orders]
    end = min(deadline, time.monotonic() + WARM_UP)
    for order, child in zip(orders, children):
        child.send(order, last=False)
    for result, child in zip(results, children):
        for found in child.told(max(0.0, end - time.monotonic()), until="ready"):
            _note(found, result)
    for result, child in zip(results, children):
        seconds = min(MOST, deadline - time.monotonic())
        if child.process.poll() is None and seconds > 0:
            child.send("measure")
            for found in child.told(seconds):
                _note(found, result)
        for cell in result.cells.values():
            for column in [column for column in _ORDER if column in cell]:
                cell[column] = cell.pop(column)
            if "its" not in cell:
                cell.setdefault("error", OUT_OF_TIME)
        yield result


def _result(order):
    network, large = NETWORKS[order["network"]], order["large"]
    training = "training" if order["training"] else "inference"
    shape = list(network.example(large, network.sizes[large])[0].shape)
    details = ["traced" if network.traced else "scripted", training]
    details += ["bfloat16 autocast" if CUDA else "float32"] + ["channels last"] * network.channels_last
    details += ["CUDA graphs"] * order["graphs"]
    title = ", ".join([network.title, str(shape), *details])
    cells = {peer: {} for peer in order["peers"]}
    return Result(f"{order['network']} {training}", title, "its", cells=cells)


def _note(found, result):
    """Adds a finding: of a peer, of all of them where the process failed, or of the network."""
    if "peer" in found:
        result.cells[found.pop("peer")].update(found)
    elif "error" in found:
        for cell in result.cells.values():
            if "its" not in cell:
                cell.setdefault("error", found["error"])
    elif "fact" in found:
        result.facts[found["fact"]] = found["value"]


def summary(results):
    """Geometric means of tsfuser's steps a second, and of its kernel time, over each peer's."""
    lines = []
    for peer in COMPARED[:-1]:
        for column in ("its", "gpu us"):
            for training in ("inference", "training"):
                chosen = [r for r in results if r.name.endswith(training)]
                pairs = [[r.cells.get(name, {}).get(column) for name in ("tsfuser", peer)] for r in chosen]
                ratios = [a / b for a, b in pairs if isinstance(a, float) and isinstance(b, float) and b > 0]
                if ratios:
                    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                    of = f"{PEERS[peer].title}'s, {training}, {len(ratios)} networks"
                    lines.append(f"{column:<8}{mean:>7.3f} of {of}; {min(ratios):.3g} to {max(ratios):.3g}")
    return "\n".join(lines)
