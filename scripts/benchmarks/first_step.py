"""How long the first fused steps of the layer_norm block take, in a process of its own.

In: a folder for compiled kernels, in TSFUSER_CACHE_DIR: an empty one for a cold start, the same again for a
warm one. Out: a line of JSON. `measure` runs both. Example:

    TSFUSER_CACHE_DIR=/tmp/empty python first_step.py 64 128 1024
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.blocks import BLOCKS
from benchmarks.peers import PEERS
from benchmarks.report import OUT_OF_TIME, Result
from benchmarks.timing import DEVICE, seconds
from benchmarks.training import step_of

STEPS = 5


def here(shape):
    """Times of the first steps in ms, after eager has started the device and its allocator; what a later step
    takes; counters of tsfuser."""
    import torch

    import tsfuser

    block = BLOCKS["layer_norm"]
    tensors, gradient = block.tensors(shape, DEVICE), torch.randn(shape, device=DEVICE)
    eager = step_of(PEERS["eager"].prepare(block.function, block.numbers), tensors, gradient)
    for _ in range(3):
        eager()
    with PEERS["tsfuser"].context():
        step = step_of(PEERS["tsfuser"].prepare(block.function, block.numbers), tensors, gradient)
        steps = [1e3 * seconds(step)[0] for _ in range(STEPS)]
        later = min(1e3 * seconds(step)[0] for _ in range(5))
    counters = tsfuser.stats()
    return {
        "steps": steps,
        "later": later,
        "compiled": counters["kernels_compiled"],
        "from disk": counters["disk_hits"],
    }


def measure(shape, deadline=float("inf")):
    """A Result of two processes: the first fused step, all that the first steps took beyond later ones. None
    runs after `deadline`, by time.monotonic()."""
    result = Result(
        "start",
        f"first fused step of the layer_norm block {list(shape)}, in a new process",
        "cold ms",
        lower=True,
    )
    with tempfile.TemporaryDirectory(prefix="tsfuser-bench-") as folder:
        for state in ("no kernel on disk", "kernels on disk"):
            command = [sys.executable, __file__, *map(str, shape)]
            environment = {**os.environ, "TSFUSER_CACHE_DIR": folder}
            seconds_left = min(120, deadline - time.monotonic())
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=seconds_left
                )
            except subprocess.TimeoutExpired as error:
                ended = "not measured: the process took more than 120 s"
                result.cells["tsfuser"] = {"error": ended if error.timeout == 120 else OUT_OF_TIME}
                return result
            if done.returncode:
                result.cells["tsfuser"] = {"error": done.stderr.strip().splitlines()[-1]}
                return result
            found = json.loads(done.stdout.splitlines()[-1])
            extra = sum(found["steps"]) - len(found["steps"]) * found["later"]
            result.facts[state] = (
                f"slowest step {max(found['steps']):.1f} ms; the first {STEPS} took {extra:.1f} ms more than "
                f"later ones; kernels: {found['compiled']} compiled, {found['from disk']} from disk"
            )
            result.cells.setdefault("tsfuser", {})[
                {"no kernel on disk": "cold ms", "kernels on disk": "warm ms"}[state]
            ] = max(found["steps"])
    return result


if __name__ == "__main__":
    print(json.dumps(here(tuple(map(int, sys.argv[1:4])))))
