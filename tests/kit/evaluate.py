"""A second, plain way to run a Fusion: every op a loop over whole arrays, all fusions of a run in one
translation unit.

In: fusions with their calls. Out: result tensors. It shares the row's templates and the runtime headers
with the real pipeline, and nothing else, so it tells wrong rows from wrong kernels. Example:

    batch = Batch(); k = batch.add(fusion, call, arguments); batch.compile(); batch.run(k)
"""

import ctypes
import hashlib
import os
import subprocess
import tempfile
from pathlib import Path

import torch

from tsfuser.ir.fusion import Reduce
from tsfuser.ir.symbols import filled, find
from tsfuser.lower.literals import literal

RUNTIME = Path(__file__).resolve().parents[2] / "tsfuser" / "codegen" / "runtime"
HEADERS = ("types.h", "math.h", "activations.h", "complex.h")
_MEMORY = {"half_t": torch.float16, "bfloat16_t": torch.bfloat16}


class Batch:
    """Fusions that are compiled together."""

    def __init__(self):
        self._cases = []  # (fusion, call, arguments, index of its function)
        self._functions = {}  # body -> index
        self._library = None

    def add(self, fusion, call, arguments):
        """Adds a fusion of `arguments` (tensors and numbers in the order of the call's); returns its
        number."""
        body = _body(fusion, call)
        self._cases.append((fusion, call, arguments, self._functions.setdefault(body, len(self._functions))))
        return len(self._cases) - 1

    def source(self):
        head = '#include "types.h"\n#include "math.h"\n#include "complex.h"\n'
        functions = (
            f'extern "C" void case_{k}(void** p, const int64_t* e) {{\n{body}}}\n'
            for body, k in self._functions.items()
        )
        return head + "".join(functions)

    def compile(self, options=("-O0", "-ffp-contract=off", "-fno-math-errno")):
        source = self.source()
        headers = "".join((RUNTIME / name).read_text() for name in HEADERS)
        digest = hashlib.sha256((source + headers + str(options)).encode()).hexdigest()[:24]
        folder = Path(tempfile.gettempdir()) / f"tsfuser-evaluate-{os.getuid()}"
        folder.mkdir(exist_ok=True)
        library = folder / f"{digest}.so"
        if not library.exists():
            text, built = folder / f"{digest}.cpp", folder / f"{digest}.{os.getpid()}.so"
            text.write_text(source)
            command = [
                "g++",
                "-std=c++17",
                "-w",
                "-shared",
                "-fPIC",
                "-DTSFUSER_HOST",
                *options,
                "-iquote",
                str(RUNTIME),
                str(text),
                "-o",
                str(built),
            ]
            done = subprocess.run([*command, "-lm"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[:4000]
            built.rename(library)
        self._library = ctypes.CDLL(str(library))

    def run(self, number):
        """The results of case `number` as tensors."""
        fusion, call, arguments, function = self._cases[number]
        buffers = {i.value.name: arguments[i.index] for i in fusion.inputs}
        for n in fusion.numbers:
            given = arguments[n.index]
            buffers[n.value.name] = torch.tensor([given], dtype=getattr(torch, n.value.dtype.name))
        for op in fusion.ops:
            shape = [call.value(a.extent) for a in op.output.axes]
            buffers[op.output.name] = torch.empty(shape, dtype=getattr(torch, op.output.dtype.register.name))
        stored = []
        for k, o in enumerate(fusion.outputs):
            shape = [1 if a is None else call.value(a.extent) for a in o.value.dims]
            stored.append(torch.empty(shape, dtype=getattr(torch, o.value.dtype.name)))
            buffers[f"out{k}"] = stored[-1]
        pointers = (ctypes.c_void_p * len(buffers))(*(b.data_ptr() for b in buffers.values()))
        extents = [call.value(a.extent) for a in fusion.axes]
        getattr(self._library, f"case_{function}")(pointers, (ctypes.c_int64 * (len(extents) or 1))(*extents))
        return [stored[i] if kind == "output" else arguments[i] for kind, i in fusion.results]


def _body(fusion, call):
    """C++ of one fusion: `p` are the buffers in the order of `Batch.run`, `e` the extents of the axes."""
    extents = {a.name: f"e[{k}]" for k, a in enumerate(fusion.axes)}
    lines, index = [], 0

    def buffer(name, ctype):
        nonlocal index
        lines.append(f"  {ctype}* {name} = ({ctype}*)p[{index}];")
        index += 1

    strides = {}
    for i in fusion.inputs:
        buffer(i.value.name, i.value.dtype.ctype)
        moving = [(a.name, str(call.value(s))) for a, s in zip(i.value.dims, i.strides) if a is not None]
        strides[i.value.name] = moving
    for n in fusion.numbers:
        buffer(n.value.name, n.value.dtype.ctype)
    for op in fusion.ops:
        buffer(op.output.name, op.output.dtype.register.ctype)
        strides[op.output.name] = _dense(op.output.axes, extents)
    for k, o in enumerate(fusion.outputs):
        buffer(f"out{k}", o.value.dtype.ctype)
    for op in fusion.ops:
        lines += _op(op, strides, extents)
    for k, o in enumerate(fusion.outputs):
        at = _offset(_dense(o.value.axes, extents))
        here = f"{o.value.name}[{_offset(strides[o.value.name])}]"
        lines += _loops(o.value.axes, extents, f"out{k}[{at}] = convert<{o.value.dtype.ctype}>({here});")
    return "\n".join(lines) + "\n"


def _dense(axes, extents):
    return [(a.name, "*".join(["1", *(extents[b.name] for b in axes[k + 1 :])])) for k, a in enumerate(axes)]


def _offset(strides):
    return " + ".join(f"{axis} * {stride}" for axis, stride in strides) or "0"


def _loops(axes, extents, statement):
    loops = [f"  for (int64_t {a.name} = 0; {a.name} < {extents[a.name]}; ++{a.name})" for a in axes]
    return [*loops, f"    {{ {statement} }}"]


def _op(op, strides, extents):
    target = f"{op.output.name}[{_offset(strides[op.output.name])}]"
    register = op.output.dtype.register.ctype
    if isinstance(op, Reduce):
        assert op.combine in ("sum", "mean", "squares")
        (operand,) = op.operands
        term = f"convert<{register}>({operand.name}[{_offset(strides[operand.name])}])"
        if op.combine != "sum":
            first = f"{register} n = 0, mean = 0; " + " ".join(
                _loops(op.axes, extents, f"mean += {term}; n += 1;")
            )
            distance = f"const {register} d = {term} - mean; squares += d * d;"
            second = f"{register} squares = 0; " + " ".join(_loops(op.axes, extents, distance))
            return _loops(op.output.axes, extents, f"{first} mean /= n; {second} {target} = {op.combine};")
        zero = _loops(op.output.axes, extents, f"{target} = {register}(0);")
        return zero + _loops((*op.output.axes, *op.axes), extents, f"{target} = {target} + {term};")
    operands = []
    for v in op.operands:
        wanted = (op.compute or v.dtype).register
        if v.literal is not None:
            operand = literal(v.literal, wanted)
        else:
            operand = f"convert<{wanted.ctype}>({v.name}[{'0' if v.is_number else _offset(strides[v.name])}])"
        operands.append(operand)
    template = find(op.symbol).template(op.compute.kind if op.compute else "f").replace("{ctype}", register)
    text = filled(template, operands)
    return _loops(op.output.axes, extents, f"{target} = {text};")
