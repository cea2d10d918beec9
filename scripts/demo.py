"""The main job, shown: nvFuser's README example on whatever device is there. Run by scripts/demo, which sets
up what is missing.

Prints the fused graph, eager against fused, the generated kernel, a speed figure and the counters.
"""

import contextlib
import io
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

import tsfuser

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def forward(x, bias):
    o = x + bias
    o = o * torch.sigmoid(o)
    o = o * 0.5 + 1.0
    return o.relu() - x * 0.1


def title(text):
    print(f"\n=== {text} ===\n", flush=True)


def milliseconds(function, sets, repeats=30):
    """Median time of a call over several input sets."""
    times = []
    for i in range(repeats + 5):
        x, bias = sets[i % len(sets)]
        if DEVICE == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function(x, bias)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            function(x, bias)
            times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[5:])


def main():
    torch.manual_seed(0)
    rows = 1 << 16 if DEVICE == "cuda" else 1 << 12
    sets = [(torch.randn(rows, 1024, device=DEVICE), torch.randn(1024, device=DEVICE)) for _ in range(3)]
    x, bias = sets[0]
    scripted = torch.jit.script(forward)
    dump = io.StringIO()
    with torch.jit.fuser("fuser2"):
        with tsfuser.options.override(dump={"cuda_kernel": ""}), contextlib.redirect_stdout(dump):
            for _ in range(4):
                fused = scripted(x, bias)

    title(f"The program's graph on {DEVICE}: a guard, the fusion group, the original nodes as the fallback")
    print(scripted.graph_for(x, bias))
    title("The kernel that was generated for it")
    print(dump.getvalue().strip() or "compiled by an earlier run; taken from the disk cache")
    title("Eager against fused")
    eager, exact = forward(x, bias), forward(x.double(), bias.double())
    print(f"largest difference between fused and eager:   {(fused - eager).abs().max().item():.3g}")
    print(f"largest error of fused against float64:       {(fused - exact).abs().max().item():.3g}")
    print(f"largest error of eager against float64:       {(eager - exact).abs().max().item():.3g}")
    torch.testing.assert_close(fused, eager)
    title("Speed")
    with torch.no_grad():
        slow, fast = milliseconds(forward, sets), milliseconds(scripted, sets)
    moved = 2 * x.nbytes / fast / 1e6
    print(
        f"[{rows}, 1024] float32: eager {slow:.3f} ms, fused {fast:.3f} ms: "
        f"{slow / fast:.1f} times as fast, {moved:.0f} GB/s"
    )
    title("tsfuser.stats()")
    for name, value in tsfuser.stats().items():
        print(f"{name:>18}: {value}")


if __name__ == "__main__":
    main()
