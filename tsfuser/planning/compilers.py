"""The kernels of one plan, compiled at the same time.

In: (source, name) pairs. Out: their binaries, from disk or from compilers, in the same order. Example:

    stored = binaries(target, [(source, "fused_add"), (other, "fused_sum")], "cpu")

The thread that plans waits here, and looks around while it does: Ctrl-C, the failure of another kernel, and a
compiler that takes too long end the wait, and all compilers with it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from .. import options
from ..errors import CompileError
from ..target.disk_cache import Stored
from ..target.job import Stop
from . import interrupts
from .progress import progress

_LOOK = 0.05  # seconds between two looks around
_GOODBYE = 1.0  # seconds that killed compilers get to be gone
_MARGIN = 5.0  # seconds that a target gets to give up by itself: NVRTC, in this process, cannot be ended

Kernel = tuple[str, str]  # source, name


def binaries(target, kernels: Sequence[Kernel], device: str) -> list[Stored]:
    """What `target` makes of `kernels` for `device`. Raises Refusal, CompileError, Interrupted."""
    found = {kernel: target.find(*kernel, device) for kernel in dict.fromkeys(kernels)}
    missing = [kernel for kernel, stored in found.items() if stored is None]
    if missing:
        found.update(zip(missing, _compile(target, missing, device)))
    return [found[kernel] for kernel in kernels]


def _compile(target, kernels: Sequence[Kernel], device: str) -> list[Stored]:
    stop = Stop()
    began: dict[Kernel, float] = {}

    def compile_one(kernel: Kernel) -> Stored:
        began[kernel] = time.monotonic()
        return target.compile(*kernel, device, stop=stop)

    pool = ThreadPoolExecutor(min(len(kernels), len(os.sched_getaffinity(0))), "tsfuser compiles")
    futures: dict[Future, Kernel] = {}
    try:
        try:
            futures = {pool.submit(compile_one, kernel): kernel for kernel in kernels}
        except RuntimeError:  # the interpreter is on its way out, or there are too many threads
            return [compile_one(kernel) for kernel in kernels]
        _wait(target, futures, began)
        return [future.result() for future in futures]
    except BaseException:
        stop.now()
        wait(futures, _GOODBYE)
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _wait(target, futures: dict[Future, Kernel], began: dict[Kernel, float]) -> None:
    """Returns when all are done. Raises when one has failed."""
    pending = set(futures)
    seconds = options.get("compile_timeout")
    with progress.waiting(len(futures)) as word:
        while pending:
            done, pending = wait(pending, _LOOK, FIRST_COMPLETED)
            for future in done:
                future.result()  # raises what the compiler did
                word.done()
            interrupts.check()
            now = time.monotonic()
            for kernel in map(futures.get, pending):
                if now - began.get(kernel, now) > seconds + _MARGIN:
                    limit = "TSFUSER_COMPILE_TIMEOUT sets this limit"
                    raise CompileError(
                        f"the compiler did not finish kernel {kernel[1]} in {seconds} s; {limit}"
                    )
            word.tick(target.cache.directory)
