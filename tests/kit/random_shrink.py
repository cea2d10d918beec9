"""Cuts a random program that fails down to the least that still fails, and prints it as a script.

In: a `Run` with something wrong. Out: a smaller Program with what is wrong with it, and text that needs torch
and tsfuser only. Example:

    program, wrong = shrink(run, "cpu")
    print(script_of(program, "cpu", wrong))
"""

from dataclasses import replace

import torch

from kit.random_compiled import DYNAMIC
from kit.random_programs import fails
from kit.random_scripted import MODES
from kit.random_world import valid

ATTEMPTS = 150  # programs tried, each compiled


def shrink(run, device, door="script"):
    """The least program found that fails in the same modes, and what is wrong with it."""
    program, wrong, left = run.program, run.wrong, ATTEMPTS
    changed = True
    while changed and left > 0:
        changed = False
        for smaller in _candidates(program):
            if left <= 0:
                break
            left -= 1
            found = fails(run.seed, smaller, device, door)
            if found:
                program, wrong, changed = smaller, found, True
                break
    return program, wrong


def _candidates(program):
    """Smaller programs that can be compared."""
    if "modules" in program.features:
        return program.smaller()
    if "optimizers" in program.features:
        return iter(())
    return (smaller for smaller in _smaller(program) if valid(smaller) is not None)


def _smaller(program):
    """Programs that are one step smaller, the largest steps first."""
    if len(program.calls) > 1:
        for k, call in enumerate(program.calls):
            yield replace(program, calls=(call,), changes=program.changes[k : k + 1])
            rest = [j for j in range(len(program.calls)) if j != k]
            yield replace(
                program, calls=tuple(program.calls[j] for j in rest), changes=_of(program.changes, rest)
            )
    for change in {}, *({name: fields} for found in program.changes for name, fields in found.items()):
        if program.changes and program.changes[1:] != (change,) * (len(program.calls) - 1):
            yield replace(program, changes=({}, *[change] * (len(program.calls) - 1)))
    if "autocast" in program.features:
        yield replace(
            program, features=tuple(f for f in program.features if f != "autocast") or ("branches",)
        )
    if program.written:
        yield replace(program, written=program.written[1:])
    if len(program.results) > 1:
        for name in program.results:
            yield _pruned(replace(program, results=(name,)))
    for k in reversed(range(len(program.statements))):
        yield from _without(program, k)
    for k, given in enumerate(program.inputs):
        for simpler in (
            replace(given, layout="dense"), replace(given, leaf=False), replace(given, dtype=torch.float32),
            replace(given, dims=given.dims[1:]), replace(given, special=""),
        ):  # fmt: skip
            if simpler != given:
                yield replace(program, inputs=program.inputs[:k] + (simpler,) + program.inputs[k + 1 :])
    for name in program.calls[0]:
        for size in (2, 3):
            if program.calls[0][name] > size:
                yield replace(program, calls=tuple({**call, name: size} for call in program.calls))


def _of(changes, calls):
    return tuple(changes[k] for k in calls) if changes else ()


def _without(program, k):
    """The program without statement `k`, its readers taking one of its operands instead."""
    name, st = program.statements[k]
    rest = program.statements[:k] + program.statements[k + 1 :]
    if not name:
        yield replace(program, statements=rest)
        return
    for other in dict.fromkeys(st.used()):
        swap = lambda o: other if o == name else o
        moved = tuple((n, replace(s, operands=tuple(map(swap, s.operands)))) for n, s in rest)
        results = tuple(dict.fromkeys(r for r in map(swap, program.results) if r.startswith("v")))
        yield _pruned(replace(program, statements=moved, results=results))


def _pruned(program):
    """Without statements that nothing depends on; in-place ones stay."""
    needed, kept = set(program.results), []
    for name, st in reversed(program.statements):
        if not name or name in needed or st.kind == "writing":
            needed.update(st.used())
            kept.append((name, st))
    return replace(program, statements=tuple(reversed(kept)))


_SCRIPT = '''\
# {wrong}
import contextlib
import torch, tsfuser
from torch import Tensor
{ops}
source = """
{source}"""

{layout}

def run(f, given):
    try:
        with torch.autocast(device, torch.bfloat16) if {autocast} else contextlib.nullcontext():
            results = list(f(*given))
    except Exception as error:
        return [torch.tensor(0), print("raises:", error)]
    leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    ends = [t for t in results if t.requires_grad]
    steps = [((torch.arange(t.numel()) * 7 % 13 - 6) / 4).reshape(t.shape) for t in ends]
    steps = [step.to(t.device, t.dtype) for step, t in zip(steps, ends)]
    with torch.no_grad():
        for k in {written}:
            given[k].logical_not_() if given[k].dtype == torch.bool else given[k].add_(1)
    found = results + [x for x in given if isinstance(x, Tensor)]
    if not (leaves and ends):
        return found
    try:
        return found + list(torch.autograd.grad(ends, leaves, steps, allow_unused=True))
    except RuntimeError as error:
        return found + [torch.tensor(0), print("backward:", error)]

device = "{device}"
calls = [
{calls}]
{modes}eager = {{"torch": torch, "Tensor": Tensor}}
exec(source, eager)
{doors}for arguments in calls:
    with fusing():
        fused = run(mine, arguments())
    with plainly():
        plain = run(unfused, arguments())
    for k, found in enumerate(zip(fused, plain, run(eager["f"], arguments()))):
        print(k)
        for name, t in zip(("fused", "unfused", "eager"), found):
            said = t if t is None else (t.dtype, t.requires_grad, t.stride(), t.flatten()[:8].tolist())
            print("  ", name, said)
print(tsfuser.stats()["fallbacks"])
'''

_DOORS = {
    "script": """\
mine, unfused = torch.jit.CompilationUnit(source).f, torch.jit.CompilationUnit(source).f
fusing, plainly = tsfuser.fuser, lambda: torch.jit.fuser("none")
for function, context in (mine, fusing), (unfused, plainly):
    with context():
        for arguments in calls * 2:
            for _ in range(3):
                run(function, arguments())
""",
    "compile": """\
backends = ("tsfuser", "aot_eager")
mine, unfused = (torch.compile(eager["f"], backend=name, dynamic={dynamic}) for name in backends)
fusing, plainly = contextlib.nullcontext, contextlib.nullcontext
""",
}
_LAYOUT = """\
def make(shape, dtype, layout, seed, leaf, special=""):
    low = 0 if dtype in (torch.uint8, torch.bool) else -24
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(low, 25, shape, generator=generator)
    x = x > 12 if dtype == torch.bool else (x / 8).to(dtype)
    if x.is_complex():
        x = x + 1j * torch.randint(low, 25, shape, generator=generator) / 8
    if special and x.is_floating_point() and x.numel():
        f, inf = torch.finfo(dtype), float("inf")
        limits = [f.max, f.min, f.tiny, f.tiny / 4, -f.tiny / 2]
        values = {"special": [inf, -inf, float("nan"), -0.0], "limits": limits}[special]
        which = torch.randint(0, len(values), x.shape, generator=generator)
        here = torch.rand(x.shape, generator=generator) < 0.25
        x = torch.where(here, torch.tensor(values, dtype=dtype)[which], x)
    x = x.to(device)
    if layout == "transposed":
        order = list(range(x.dim()))[::-1]
        x = x.permute(order).contiguous().permute(order)
    elif layout == "strided":
        x = torch.stack([x, x], -1)[..., 0]
    elif layout == "shifted":
        x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    elif layout == "expanded" and x.dim() and x.size(0):
        x = x[:1].expand(x.shape)
    elif layout == "last" and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x.requires_grad_(leaf)
"""
_KNOBS = {
    "single": "torch._C._jit_set_nvfuser_single_node_mode({})\n",
    "guards": "torch._C._jit_set_nvfuser_guard_mode({})\n",
    "horizontal": "torch._C._jit_set_nvfuser_horizontal_mode({})\n",
}


def script_of(program, target, wrong, seed=0, door="script"):
    """The program as a script."""
    if "modules" in program.features:
        return f"# {wrong}\n{program.script()}"
    if "optimizers" in program.features:
        return f"# {wrong}\n{program.source()}"
    ops = "from kit import strided_ops  # PYTHONPATH=tests\n" if "tsfuser_tests" in program.source() else ""
    return _SCRIPT.format(
        doors=_DOORS[door].replace("{dynamic}", str(DYNAMIC[seed % 2])),
        ops=ops,
        wrong=wrong.replace("\n", "\n# "),
        source=program.source(),
        layout=_LAYOUT,
        calls="".join(_call(program, k) for k in range(len(program.calls))),
        device="cuda" if target == "cuda" else "cpu",
        autocast="autocast" in program.features,
        written=[k for k, i in enumerate(program.inputs) if i.name in program.written],
        modes="".join(_KNOBS[name].format(value) for name, value in MODES[seed % len(MODES)].items()),
    )


def _call(program, k):
    """The arguments of a call, as text."""
    sizes, lines = program.calls[k], []
    for i in program.inputs_of(k):
        shape = tuple(sizes.get(d, d) for d in i.dims)
        lines.append(f"        make({shape}, {i.dtype}, {i.layout!r}, {i.seed}, {i.leaf}, {i.special!r}),\n")
    return f"    lambda: [\n{''.join(lines)}        {('0.75, 2', '-1.5, 3')[k % 2]},\n    ],\n"
