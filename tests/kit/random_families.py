"""Families of random programs beyond straight lines of ops, and what their calls do beyond other sizes.

In: a random generator, and the names of families. Out: statements of several lines (branches, loops,
lists), and changes of inputs. `features_of` says which families a seed belongs to. Example:

    features_of(7, FEATURES)  # -> ("branches", "written")
"""

import random
import re

import torch

from kit.random_kinds import cast, extreme, loop, real, seen, update, viewed
from kit.random_ops import Statement, written

#: branches: functions with branches, loops, lists and tuples. autocast: to bfloat16, with matrix products.
#: changes: dtype, rank, layout and requires_grad of inputs change from call to call. written: inputs are
#: written between forward and backward. empty: tensors without elements, and 0-dim ones. special: inf and
#: nan. limits: the largest, least and subnormal numbers of a dtype.
FIRST = ("branches", "autocast", "changes", "written", "empty", "special", "limits")
#: What real programs broke. extremes: the largest and the like, with other readers of their operands. loops:
#: that run zero times, with writes behind them. casts: `to` in all its forms. views: that branches give.
#: strides: custom ops that see them. updates: what optimizers do, op by op. complex: calls with complex
#: inputs after real ones, which eager may reject. optimizers: steps of torch.optim, compiled. modules:
#: networks of them, compiled, most in training.
LATER = ("extremes", "loops", "casts", "views", "strides", "updates", "complex", "optimizers", "modules")
FEATURES = FIRST + LATER
#: Families with generators of their own, which a program has none beside.
ALONE = ("optimizers", "modules")
#: Values that these families do not have: which of them a comparison or a cast gives is up to the kernel.
ORDINARY = ("extremes", "strides", "updates", "complex")
LAYOUTS = ("dense", "transposed", "strided", "shifted", "expanded")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.bool)

_CONDITIONS = (
    "n > 2", "s < 0", "n == 2 and s > 0", "{0}.size(-1) > 3 if {0}.dim() > 0 else n > 2", "{0}.numel() > 8",
    "{0}.dim() == {1}.dim()", "bool(c.any())", "bool(z > 0)", "not bool(c.all())", "{0}.dtype == {1}.dtype",
    "{0}.is_floating_point()",
)  # fmt: skip
_COUNTS = ("n", "n - 1", "{0}.dim()", "3", "n - 3", "len({0}.size())")
_EXACT = (
    "{0} * 0.5",
    "{0} + 1",
    "{0} - {1}",
    "{1} + {0}",
    "{0} * 2 - 1",
    "torch.where(c, {0}, {1})",
    "{0} * s",
)
_SMOOTH = (
    "torch.tanh({0})",
    "torch.sigmoid({0} + {1})",
    "torch.softmax({0} * 0.5, -1)",
    "{0}.mean(-1, keepdim=True) + {1}",
)
#: A step of a loop, of the value so far.
_STEPS = ("{out} * 0.5 + {1}", "{out} - {0}", "({out} + 1) * 0.5", "{out} * 0.5", "{out} + {out}_i")
_ROUNDING_STEPS = ("torch.tanh({out}) + {1}", "torch.sigmoid({out} * {0})")
#: COND, COUNT, A, B, STEP stand for one of the above.
_BLOCKS = (
    "if COND:\n    {out} = A\nelse:\n    {out} = B",
    "if COND:\n    {out} = A\nelif COND:\n    {out} = B\nelse:\n    {out} = A",
    "{out} = A\nif COND:\n    {out} = B",
    "{out} = A\nif COND:\n    {out} = {out} + 1\n    if COND:\n        {out} = {out} * 0.5",
    "{out} = A\nif COND:\n    {out}.mul_(0.5)",
    "{out} = A if COND else B",
    "{out} = A\nfor {out}_i in range(COUNT):\n    {out} = STEP",
    "{out} = A\nfor {out}_i in range(COUNT):\n    if {out}_i == 1:\n        continue\n    {out} = STEP",
    "{out} = A\nfor {out}_i in range(COUNT):\n    if COND:\n        {out} = STEP\n    else:\n"
    "        {out} = {out} - 1",
    "{out} = A\n{out}_i = 0\nwhile {out}_i < COUNT:\n    {out} = STEP\n    {out}_i += 1",
    "{out} = A\nfor {out}_i in range(5):\n    {out} = STEP\n    if {out}_i >= COUNT:\n        break",
    "{out}_l = [A, B]\n{out}_l.append(A)\n{out} = {out}_l[0] + {out}_l[-1]",
    "{out}_l = [A]\nfor {out}_i in range(COUNT):\n    {out}_l.append({out}_l[-1] * 0.5)\n"
    "{out} = {out}_l[-1] - {out}_l[0]",
    "{out} = A\nfor {out}_x in [A, B]:\n    {out} = {out} + {out}_x",
    "{out} = torch.stack([A, A])",
    "{out} = torch.cat([(A).reshape(-1), (B).reshape(-1)])",
    "{out}_t = (A, B)\n{out} = {out}_t[1] + {out}_t[0]",
    "{out}_a, {out}_b = A, B\n{out} = {out}_b - {out}_a",
    "{out} = A\nfor {out}_x in {0}.unbind(0)[:3]:\n    {out} = {out} + {out}_x",
    "{out}_d = {{'a': A, 'b': B}}\n{out} = {out}_d['b'] + 1",
)  # fmt: skip


def features_of(seed, wanted):
    """One to three of the `wanted` families."""
    rng = random.Random(f"families of {seed}")
    chosen = rng.sample(wanted, min(len(wanted), rng.choice((1, 1, 2, 3))))
    if {"special", "limits"} <= set(chosen):
        chosen.remove("special")
    if set(chosen) & set(ORDINARY):
        chosen = [name for name in chosen if name not in ("special", "limits")]
    for name in ALONE:
        if name in chosen:
            return (name,)
    return tuple(name for name in FEATURES if name in chosen)


def makers(features):
    """(weight, maker of statements) of the families."""
    return [(weight, make) for name, weight, make in _MAKERS if name in features]


def block(rng, operands, tensor):
    """Some lines that make a value."""
    exact = rng.random() < 0.6
    text = rng.choice(_BLOCKS)
    parts = _EXACT if exact else _EXACT + _SMOOTH + _SMOOTH
    steps = _STEPS if exact else _STEPS + _ROUNDING_STEPS
    if "for" not in text and "while" not in text:
        steps = steps[:-1]
    choices = {"COND": _CONDITIONS, "COUNT": _COUNTS, "STEP": steps, "A": parts, "B": parts}
    text = re.sub(r"\b(COND|COUNT|STEP|A|B)\b", lambda found: f"({rng.choice(choices[found[0]])})", text)
    return Statement(text, operands, exact=exact)


def product(rng, operands, tensor):
    """What autocast computes in bfloat16."""
    if tensor.dim() < 2:
        return Statement("torch.mm({0}.float().reshape(-1, 1), {0}.float().reshape(1, -1)) * 0.25", operands)
    templates = (
        "torch.matmul({0}, {0}.transpose(-1, -2)) * 0.0625",
        "torch.matmul({0}.float(), {0}.float().mT) * 0.0625",
        "torch.nn.functional.linear({0}, {0}.flatten(0, -2)) * 0.0625",
        "torch.matmul({0}, {1}) * 0.0625", "torch.matmul({0}.transpose(-1, -2), {0}) * 0.0625 + 1",
    )  # fmt: skip
    return Statement(rng.choice(templates), operands)


#: family -> how often it makes which statements, beside those that all programs have
_MAKERS = (
    ("branches", 12, block), ("autocast", 12, product), ("extremes", 24, extreme), ("loops", 10, loop),
    ("loops", 4, written), ("casts", 24, cast), ("views", 16, viewed), ("strides", 16, seen),
    ("updates", 24, update), ("complex", 6, written),
    ("complex", 12, real),
)  # fmt: skip


def complex_calls(rng, inputs, calls):
    """For each call which inputs are complex: none in the first one."""
    able = [i for i in inputs if i.name[0] == "x" and i.dtype.is_floating_point]
    found = [{}]
    for _ in calls[1:]:
        some = [i for i in able if rng.random() < 0.7]
        found.append({i.name: {"dtype": _complex_of(i.dtype)} for i in some} if rng.random() < 0.7 else {})
    return tuple(found)


def _complex_of(dtype):
    return torch.complex128 if dtype == torch.float64 else torch.complex64


def changes(rng, inputs, calls, gradients):
    """For each call what is other in its inputs: name -> fields. Nothing in the first one."""
    return ({}, *({i.name: c for i in inputs if (c := _change(rng, i, gradients))} for _ in calls[1:]))


def _change(rng, given, gradients):
    if not given.name.startswith("x") or rng.random() < 0.4:
        return {}
    kind = rng.choice(("dtype", "layout", "leaf", "rank", "layout"))
    if kind == "dtype":
        dtype = rng.choice([d for d in DTYPES if d != given.dtype])
        return {"dtype": dtype, "leaf": given.leaf and dtype.is_floating_point}
    if kind == "layout":
        return {"layout": rng.choice([name for name in LAYOUTS if name != given.layout])}
    if kind == "leaf":
        return {"leaf": not given.leaf} if gradients and given.dtype.is_floating_point else {}
    return {"dims": given.dims[1:] if given.dims and rng.random() < 0.5 else (1, *given.dims)}


def with_special(x, kind, generator):
    """`x`, a floating tensor, with some of its elements inf or nan, or at the limits of its dtype."""
    if not kind or not x.is_floating_point() or not x.numel():
        return x
    found = torch.finfo(x.dtype)
    infinite = [float("inf"), float("-inf"), float("nan"), -0.0]
    values = {
        "special": infinite,
        "limits": [found.max, found.min, found.tiny, found.tiny / 4, -found.tiny / 2],
    }[kind]
    which = torch.randint(0, len(values), x.shape, generator=generator)
    here = torch.rand(x.shape, generator=generator) < 0.25
    return torch.where(here, torch.tensor(values, dtype=x.dtype)[which], x)
