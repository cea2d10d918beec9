"""A group's kernels as a Python file that runs by itself, for reports and experiments: change the source in
it, run it again, and see times and whether the results still agree with torch's ops.

In: the kernels of one group, in order. Out: the text of the file: what is known of them, then `standalone`'s
code. Example:

    kernel = tsfuser.explain(scripted, x).kernels[0]
    Path("kernel.py").write_text(kernel.script())
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from pprint import pformat

import torch

from .. import options
from ..codegen.emit import WITHOUT_CONTRACTION
from ..ir import size as sz
from ..ir.call import TensorArg
from ..planning import compile as pipeline
from ..target import cxx
from ..target.function import RUNTIME
from ..target.host import HostTarget
from ..version import __version__
from . import standalone
from .raw import Planned

_HEADER = '''"""{what} of a fusion group, written by tsfuser {version}. Run it: python {file}

It needs torch, and {needs}. The inputs are random, with the sizes, strides and dtypes of the call that was
explained. It prints the time of each kernel and of torch's ops, and compares their results.
"""
'''


def script(kernels: Sequence[tuple[Planned, str]], file: str = "kernel.py") -> str:
    """`kernels`: each with its source, all of one group, up to the one that is wanted. Raises ValueError for
    one that CuPy cannot launch."""
    last = kernels[-1][0]
    on_gpu = last.device.startswith("cuda")
    for plan, _ in kernels:
        if plan.kernel.cluster:
            raise ValueError(f"{plan.kernel.name} is launched in clusters, which CuPy cannot do")
    value = lambda size: last.call.value(sz.as_size(size))
    made = [
        (dtype, tuple(map(value, sizes)), tuple(map(value, strides)), elements and value(elements))
        for dtype, sizes, strides, elements in last.allocated
    ]
    known = {
        "DEVICE": last.device,
        "INPUTS": [
            (arg.dtype, arg.sizes, arg.strides) if isinstance(arg, TensorArg) else number
            for arg, number in zip(last.call.args, last.numbers)
        ],
        "MADE": made,
        "RESULTS": [
            (k, place[1])
            for k, place in enumerate(last.results)
            if place[0] == "output" and _is_last(kernels)
        ],
        "COMPILER": _nvrtc(kernels) if on_gpu else _cpp(),
        "NEAR": _near(last.graph),
        "RANDOM": any("random" in p.source[0] for plan, _ in kernels for p in plan.kernel.params),
    }
    names = ", ".join(plan.kernel.name for plan, _ in kernels)
    what = f"{names}: kernel{'s' if len(kernels) > 1 else ''}"
    needs = "CuPy with its NVRTC" if on_gpu else "the C++ compiler that COMPILER names"
    parts = [_HEADER.format(what=what, version=__version__, file=file, needs=needs), _IMPORTS]
    parts += [f"{name} = {pformat(of, width=100)}\n" for name, of in known.items()]
    parts += [f'GRAPH = """\n{last.graph}"""\n', "LAUNCHES = [\n", *(_launch(*k) for k in kernels), "]\n"]
    headers = _headers([source for _, source in kernels]).items()
    parts += ["HEADERS = {\n", *(f'    "{name}": {_quoted(text)},\n' for name, text in headers), "}\n"]
    return "".join([*parts, _code()])


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)
_IMPORTS = "\nfrom __future__ import annotations\n\n"


def _code() -> str:
    """`standalone` without its docstring, its first import and the variables that each script sets."""
    text = Path(standalone.__file__).read_text()
    text = text.split("from __future__ import annotations\n", 1)[1]
    return re.sub(r"^[A-Z]+: \w+ = .*\n", "", text, flags=re.M)


def _near(graph: str) -> float:
    """Some roundings of the narrowest dtype that the ops compute in, or of float32 in each op."""
    kinds = {"BFloat16": torch.bfloat16, "Half": torch.float16, "Float8": torch.float8_e4m3fn}
    narrowest = max((torch.finfo(t).eps for name, t in kinds.items() if name in graph), default=0.0)
    return max(16 * graph.count(" = aten::") * torch.finfo(torch.float32).eps, 4 * narrowest)


def _is_last(kernels: Sequence[tuple[Planned, str]]) -> bool:
    """Whether all kernels of the group are there, so that its results are made."""
    return len(kernels) == len(kernels[-1][0].siblings)


def _launch(plan: Planned, source: str) -> str:
    """An entry of LAUNCHES."""
    value = lambda size: plan.call.value(sz.as_size(size))
    k = plan.kernel
    packed, addresses = plan.packed()
    block: tuple[int, ...] = (value(k.block_x), value(k.block_y))
    if plan.device.startswith("cuda"):
        block = (*block, 1)
    sizes = f"{value(k.grid)}, {block}, {value(k.shared)}"
    return (
        f'    (\n        "{k.name}",\n        {_quoted(source)},\n        {sizes},\n'
        f"        {packed!r},\n        {addresses!r},\n    ),\n"
    )


def _quoted(text: str) -> str:
    """A text over several lines, as it is where it can be."""
    escaped = text.replace("\\", "\\\\").replace('"""', r"\"\"\"")
    return f'"""{escaped}"""'


def _headers(sources: Sequence[str]) -> dict[str, str]:
    """Those of the runtime that the sources include, and that these include."""
    found: dict[str, str] = {}
    waiting = list(sources)
    while waiting:
        for name in _INCLUDE.findall(waiting.pop()):
            if name not in found and (RUNTIME / name).is_file():
                found[name] = (RUNTIME / name).read_text()
                waiting.append(found[name])
    return found


def _cpp() -> list[str]:
    target = HostTarget(pipeline.cache_in(options.cache_dir()), fibers=options.host_launch() != "block")
    quiet = "-Wno-psabi"  # the remark that GCC 4.5 passed vectors in another way
    return [*cxx.find_compiler(), *target.flags(), quiet]


def _nvrtc(kernels: Sequence[tuple[Planned, str]]) -> list[str]:
    fma = not options.disabled("fma") and not any(s.startswith(WITHOUT_CONTRACTION) for _, s in kernels)
    most = options.get("max_registers")
    more = [] if most is None else [f"--maxrregcount={most}"]
    return ["-std=c++17", f"--fmad={str(fma).lower()}", *more]
