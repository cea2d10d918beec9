"""What PYTORCH_NVFUSER_DUMP prints while a plan is made.

In: the words of that variable. Out: text on stdout under a headline, and `__tmp_kernel<N>.cu`, `.ptx` and
`.cubin` in the working directory, as nvFuser names them: N counts the kernels of this process. Example:
`show("fusion_ir", "fusion", fusion)` prints if `fusion_ir` is asked for.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable
from pathlib import Path

from torch._logging import trace_structured

from .. import options
from ..errors import CompileError, Refusal
from ..target.function import RUNTIME

#: The words that are about one kernel's code.
KERNEL_WORDS = ("cuda_kernel", "cuda_full", "cuda_to_file", "ptx", "cubin")

_numbers = itertools.count(1)
_shown: set[tuple[str, str]] = set()  # registry: (device, source) of the kernels that were written
_lock = threading.Lock()


def show(word: str, title: str, *values: object, between: str = "\n\n") -> None:
    """Prints `values` if `word` is asked for; else none of them is turned into text."""
    if options.dump(word):
        print(f"\n======= {word}: {title} =======\n\n{between.join(map(str, values))}\n", flush=True)


def trace(name: str, text: Callable[[], str]) -> None:
    """Writes `text()` as an artifact to torch's structured trace, if TORCH_TRACE asks for one."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )


def wants_kernels() -> bool:
    """Whether any of KERNEL_WORDS is asked for."""
    return any(map(options.dump, KERNEL_WORDS))


def kernel(name: str, source: str, device: str, target) -> None:
    """Prints the code of one kernel; files, and what NVRTC makes of it, once a kernel. `target`: that of CUDA
    tensors, None for CPU tensors."""
    show("cuda_kernel", name, source)
    with _lock:
        known = (device, source) in _shown
        _shown.add((device, source))
    if known:
        return
    if options.dump("cuda_full"):
        show("cuda_full", name, whole(source))
    number = next(_numbers)
    if options.dump("cuda_to_file"):
        Path(f"__tmp_kernel{number}.cu").write_text(source)
    for word in ("ptx", "cubin"):
        if options.dump(word):
            show(word, name, _binary(word, number, name, source, device, target))


def _binary(word: str, number: int, name: str, source: str, device: str, target) -> str:
    """Writes PTX or cubin; returns where to, or why not."""
    if target is None:
        return f"there is no {word} of a kernel for CPU tensors"
    path = Path(f"__tmp_kernel{number}.{word}")
    try:
        path.write_bytes(
            target.ptx(source, name, device) if word == "ptx" else target.cubin(source, name, device)
        )
    except (CompileError, Refusal) as error:
        return f"not written: {error}"
    return f"written to {path}"


def whole(source: str) -> str:
    """The source with the runtime headers in the place of its `#include`s, each once, as the compiler sees
    it."""
    seen: set[str] = set()

    def expand(text: str) -> str:
        return re.sub(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', include, text, flags=re.M)

    def include(match: re.Match) -> str:
        header = RUNTIME / match[1]
        if match[1] in seen or not header.is_file():
            return "" if match[1] in seen else match[0]
        seen.add(match[1])
        return f"// ---- {match[1]}\n" + expand(header.read_text().replace("#pragma once\n", ""))

    return expand(source)
