"""Cuts a random program that fails down to the least that still fails, and prints it as a script.

In: a `Run` with something wrong. Out: a smaller Program with what is wrong with it, and text that needs torch
and tsfuser only. Example:

    program, wrong = shrink(run, "cpu")
    print(script_of(program, "cpu", wrong))
"""

from dataclasses import replace

import torch
from random_programs import MODES, fails
from random_world import valid

ATTEMPTS = 150  # programs tried, each compiled


def shrink(run, device):
    """The least program found that fails in the same modes, and what is wrong with it."""
    program, wrong, left = run.program, run.wrong, ATTEMPTS
    changed = True
    while changed and left > 0:
        changed = False
        for smaller in _smaller(program):
            if left <= 0:
                break
            if valid(smaller) is None:
                continue
            left -= 1
            found = fails(run.seed, smaller, device)
            if found:
                program, wrong, changed = smaller, found, True
                break
    return program, wrong


def _smaller(program):
    """Programs that are one step smaller, the largest steps first."""
    if len(program.calls) > 1:
        for call in program.calls:
            yield replace(program, calls=(call,))
    if len(program.results) > 1:
        for name in program.results:
            yield _pruned(replace(program, results=(name,)))
    for k in reversed(range(len(program.statements))):
        yield from _without(program, k)
    for k, given in enumerate(program.inputs):
        for simpler in (
            replace(given, layout="dense"), replace(given, leaf=False), replace(given, dtype=torch.float32),
            replace(given, dims=given.dims[1:]),
        ):  # fmt: skip
            if simpler != given:
                yield replace(program, inputs=program.inputs[:k] + (simpler,) + program.inputs[k + 1 :])
    for name in program.calls[0]:
        for size in (2, 3):
            if program.calls[0][name] > size:
                yield replace(program, calls=tuple({**call, name: size} for call in program.calls))


def _used(st):
    return [o for k, o in enumerate(st.operands) if f"{{{k}}}" in st.template]


def _without(program, k):
    """The program without statement `k`, its readers taking one of its operands instead."""
    name, st = program.statements[k]
    rest = program.statements[:k] + program.statements[k + 1 :]
    if not name:
        yield replace(program, statements=rest)
        return
    for other in dict.fromkeys(_used(st)):
        swap = lambda o: other if o == name else o  # noqa: E731, B023
        moved = tuple((n, replace(s, operands=tuple(map(swap, s.operands)))) for n, s in rest)
        results = tuple(dict.fromkeys(r for r in map(swap, program.results) if r.startswith("v")))
        yield _pruned(replace(program, statements=moved, results=results))


def _pruned(program):
    """Without statements that nothing depends on; in-place ones stay."""
    needed, kept = set(program.results), []
    for name, st in reversed(program.statements):
        if not name or name in needed:
            needed.update(_used(st))
            kept.append((name, st))
    return replace(program, statements=tuple(reversed(kept)))


_SCRIPT = '''\
# {wrong}
import torch, tsfuser
from torch import Tensor

source = """
{source}"""

{layout}

def arguments(sizes, numbers):
    return [
{inputs}
    ] + numbers

def run(f, given):
    results = list(f(*given))
    leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    ends = [t for t in results if t.requires_grad]
    if not (leaves and ends):
        return results + [x for x in given if isinstance(x, Tensor)]
    steps = [((torch.arange(t.numel()) * 7 % 13 - 6) / 4).reshape(t.shape) for t in ends]
    steps = [step.to(t.device, t.dtype) for step, t in zip(steps, ends)]
    return results + list(torch.autograd.grad(ends, leaves, steps, allow_unused=True))

device = "{device}"
{modes}eager = {{"torch": torch, "Tensor": Tensor}}
exec(source, eager)
scripted = torch.jit.CompilationUnit(source).f
for sizes, numbers in {calls}:
    with tsfuser.fuser():
        for _ in range(4):
            fused = run(scripted, arguments(sizes, numbers))
    for k, (mine, plain) in enumerate(zip(fused, run(eager["f"], arguments(sizes, numbers)))):
        if mine is None or plain is None:
            print(k, mine is plain)
            continue
        off = (mine.detach().double() - plain.detach().double()).abs().max().item() if plain.numel() else 0
        print(k, mine.dtype == plain.dtype, mine.stride() == plain.stride(), "largest difference", off)
print(tsfuser.stats()["fallbacks"])
'''

_LAYOUT = '''\
def make(shape, dtype, layout, seed, leaf):
    low = 0 if dtype in (torch.uint8, torch.bool) else -24
    x = torch.randint(low, 25, shape, generator=torch.Generator().manual_seed(seed))
    x = (x > 12 if dtype == torch.bool else (x / 8).to(dtype)).to(device)
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
'''
_KNOBS = {
    "single": "torch._C._jit_set_nvfuser_single_node_mode({})\n",
    "guards": "torch._C._jit_set_nvfuser_guard_mode({})\n",
    "horizontal": "torch._C._jit_set_nvfuser_horizontal_mode({})\n",
}


def script_of(program, target, wrong, seed=0):
    """The program as a script."""
    lines = []
    for i in program.inputs:
        shape = ", ".join(f'sizes["{d}"]' if isinstance(d, str) else str(d) for d in i.dims)
        lines.append(f"        make([{shape}], {i.dtype}, {i.layout!r}, {i.seed}, {i.leaf}),")
    numbers = [([0.75, 2], [-1.5, 3])[k % 2] for k in range(len(program.calls))]
    return _SCRIPT.format(
        wrong=wrong.replace("\n", "\n# "),
        source=program.source(),
        layout=_LAYOUT,
        inputs="\n".join(lines),
        device="cuda" if target == "cuda" else "cpu",
        modes="".join(_KNOBS[name].format(value) for name, value in MODES[seed % len(MODES)].items()),
        calls=list(zip(program.calls, numbers)),
    )
