"""Statements of the families that real programs broke: extremes, loops that run zero times, casts in all
forms, branches that return views, ops that look at strides, and steps of optimizers.

In: a random generator, the names of operands, the first operand. Out: a Statement. Each maker has the name of
its family in `random_families.py`. Example:

    extreme(rng, ("x0", "x1", "c"), x0).template  # -> "torch.amax(torch.tanh({0} - {1}), [1], keepdim=True)"
"""

import torch

from kit.random_ops import Statement

_F = "torch.nn.functional."
_INF = "float('inf')"

# ---- extremes: the backward compares a value that is saved with one that may be computed again

#: Operands of an extreme: a backward would rather compute most of them again than read them.
_COMPARED = (
    "{0}", "{0}", "{0} - {1}", "{0} * {1}", "torch.exp(({0} - {1}) * 0.5)", "torch.atan2({0}, {1} * {1} + 1)",
    "torch.sigmoid({0} - {1})", "torch.sin({0}) * {1}", "{0} / ({1}.abs() + 1)", "torch.tanh({0} * 0.5)",
    "{0} * {1} + {0}", "{0}.float() * 0.375", "torch.rsqrt({0} * {0} + 1) * {1}", "torch.erf({0}) + {1}",
)  # fmt: skip
#: A reader of the operands beside the extreme, and what it compares.
_SECOND = (
    ("", ""), ("", ""), (" + {0}.mean()", ""), (" * {1}.sum().tanh()", ""),
    (" + torch.amax({0})", "gap({0})"),
    (" - torch.amin({1}) * 0.5", "gap(-{1})"), (" + {0}.amax(-1, True).mean()", "gap({0}, [-1])"),
    (" * {1}.max()", "gap({1})"),
)  # fmt: skip


def extreme(rng, operands, tensor):
    """An extreme of a value, and now and then something else of its operands. Only elements that lie apart
    are compared, or a rounding would decide which one is the extreme; exact ones may be equal."""
    compared, rank = rng.choice(_COMPARED), tensor.dim()
    operand = f"({compared})"
    if rank == 0 or rng.random() < 0.2:
        text, jump = _extreme_of_all(rng, operand)
    else:
        text, jump = _extreme_over_dims(rng, operand, rank)
    where = "tie" if compared == "{0}" and "gap(" in jump else "gap"
    second, too = rng.choice(_SECOND)
    if too:
        jump, where = f"torch.minimum(({jump}).min(), ({too}).min())", "gap"
    exact = not second and "(" not in compared and "0.375" not in compared
    return Statement(f"({text}){second}", operands, exact=exact, jump=jump, where=where)


def _extreme_of_all(rng, operand):
    return rng.choice((
        (f"{operand}.max()", f"gap({operand})"), (f"{operand}.min()", f"gap(-{operand})"),
        (f"torch.amax({operand})", f"gap({operand})"), (f"torch.amin({operand})", f"gap(-{operand})"),
        (f"{operand}.median()", f"steps({operand}.flatten(), 0)"),
        (f"torch.linalg.vector_norm({operand}, {_INF})", f"gap({operand}.abs())"),
    ))  # fmt: skip


def _extreme_over_dims(rng, operand, rank):
    dims, keep = rng.sample(range(rank), rng.randint(1, rank)), rng.random() < 0.5
    one, tail = dims[0] - rank * (rng.random() < 0.3), f"keepdim={keep}"
    largest, least = f"gap({operand}, {dims})", f"gap(-{operand}, {dims})"
    return rng.choice((
        (f"torch.amax({operand}, {dims}, {tail})", largest),
        (f"torch.amin({operand}, {dims}, {tail})", least),
        (f"torch.amax({operand}, {dims}, {tail})", largest),
        (f"torch.amin({operand}, {dims}, {tail})", least),
        (f"torch.max({operand}, {one}, {tail})[0]", f"steps({operand}, {one})"),
        (f"torch.min({operand}, {one}, {tail})[0]", f"steps({operand}, {one})"),
        (f"torch.median({operand}, {one}, {tail})[0]", f"steps({operand}, {one})"),
        (f"torch.linalg.vector_norm({operand}, {_INF}, {dims}, {tail})", f"gap({operand}.abs(), {dims})"),
        (f"torch.linalg.vector_norm({operand}, -{_INF}, {dims}, {tail})", f"gap(-{operand}.abs(), {dims})"),
        (f"torch.sort({operand}, {one})[0]", f"steps({operand}, {one})"),
        (f"torch.where({operand} == torch.amax({operand}, {dims}, True), {{0}}, {{1}})", largest),
        (f"torch.where({operand} > torch.amin({operand}, {dims}, True), {operand}, 0.5)", least),
        (f"({operand} - torch.amax({operand}, {dims}, True))", largest),
        (f"torch.clamp({operand}, {{1}}, {{1}} + 1)", f"torch.minimum(({operand} - {{1}}).abs(), "
         f"({operand} - {{1}} - 1).abs())"),
    ))  # fmt: skip


def gap(x, dims=None):
    """How far below the largest element along the dims the next one is; 0 where two are the largest."""
    if x.dim() == 0:
        return x.new_full((), torch.inf)
    dims = list(range(x.dim())) if dims is None else [d % x.dim() for d in dims]
    rows = x.permute([d for d in range(x.dim()) if d not in dims] + dims)
    rows = rows.reshape(*rows.shape[: x.dim() - len(dims)], -1)
    if rows.size(-1) < 2:
        return rows.new_full((), torch.inf)
    two = rows.topk(2, -1).values
    return two[..., 0] - two[..., 1]


def steps(x, dim):
    """The distances between neighbours of the sorted elements along a dim."""
    if x.dim() == 0 or x.size(dim) < 2:
        return x.new_full((), torch.inf)
    return x.sort(dim).values.diff(dim=dim)


# ---- loops: a value that a loop without a turn gives is what entered the loop, so a write to it is to that

_ENTERING = (
    "{0}", "{0}", "{0}", "{0}.view_as({0})", "{0}[0]", "{0}.transpose(0, -1)", "{0}.unsqueeze(0)",
    "{0}.view(-1)", "{0}[..., 1:]",
)  # fmt: skip
_TURNS = (
    "for {out}_i in range(n - 3):", "for {out}_i in range(n - 2):", "for {out}_i in range(0):",
    "for {out}_t in [{0}, {1}][2:]:", "for {out}_t in [{0}, {1}, {0}][:n - 2]:",
    "for {out}_i in range({0}.dim() - {0}.dim()):", "while {out}_k < n - 2:", "while {out}_k < 0:",
)  # fmt: skip
_TURN = ("{out} = {out} * 0.5", "{out} = {out} - 1", "{out} = ({out} + 1) * 0.5", "{out} = {out} + {out}")
_WRITES = (
    "{out}.add_(3)", "{out}.mul_(0.5)", "{out} *= 2", "{out} += 1", "{out}.fill_(1.5)", "{out}.zero_()",
    "{out}.masked_fill_({out} == {out}, 0.25)", "{out}[0] = 5", "{out}.neg_()", "{out}.copy_({out} * 2 + 1)",
    "{out}.sub_(1.5)", "{out}.relu_()", "{out}.clamp_(-1, 1)", "{out}[..., 0] = 1.5",
)  # fmt: skip
#: All of them read what was written: torch, with no fuser too, drops a write to what a loop gives as dead
#: code if nothing reads that.
_AFTER = (
    "", "", "{out} = {out} - {0}", "{out} = {0} * 0.5 + {out}.sum() * 0.125", "{out} = {out} + {0}.sum()",
)  # fmt: skip


def loop(rng, operands, tensor):
    """A loop that runs zero times in some calls or in all, a write behind it, and perhaps a reader."""
    turns, turn, write = rng.choice(_TURNS), rng.choice(_TURN), rng.choice(_WRITES)
    lines = ["{out} = " + rng.choice(_ENTERING), *["{out}_k = 0"] * ("_k" in turns), turns, "    " + turn]
    lines += ["    {out}_k += 1"] * ("_k" in turns)
    if rng.random() < 0.3:
        lines[-1:] = [f"    if {rng.choice(('s > 0', 'n > 2', 'bool(c.any())'))}:", "        " + turn]
        lines += ["    {out}_k += 1"] * ("_k" in turns)
    lines += [write, *filter(None, [rng.choice(_AFTER)])]
    bent = "relu" in write or "clamp" in write
    return Statement("\n".join(lines), operands, "writing", exact=True, smooth=not bent)


# ---- complex: what eager takes of real numbers only, written to a new value or to an input

_REAL = (
    ("abs_()", "{0}"), ("relu_()", "{0}"), ("clamp_(-1, 1)", "{0}.abs() - 1"), ("floor_()", "{0} * 0"),
    ("add_({1})", ""), ("mul_({1})", ""), ("sub_({1} * 2)", ""), ("clamp_(min=0.5)", "{0} - 0.5"),
    ("copy_({1})", ""), ("square_()", ""), ("neg_()", ""), ("abs_().add_(1)", "{0}"), ("round_()", "{0} * 0"),
)  # fmt: skip


def real(rng, operands, tensor):
    """An op in place that has no complex form, or that cannot put complex numbers among real ones."""
    op, jump = rng.choice(_REAL)
    made, after = (
        rng.choice(("{0} * 1", "{0} + 0", "{0}.clone()")),
        rng.choice(("{out} + 1", "{out} * {1}", "{out}")),
    )
    text = "{out} = " + made + "\n{out}." + op + "\n{out} = " + after
    where = "value" if "* 0" in jump else "slope"
    return Statement(text, operands, "writing", True, jump, where if jump else "")


# ---- casts

_DTYPES = ("float32", "float64", "float16", "bfloat16")
_CASTS = (
    "{0}.to({1}.device)", "{0}.to({1}.device, {1}.dtype)", "{0}.to({0}.device, torch.DTYPE)",
    "{0}.to(torch.DTYPE)", "{0}.to(dtype=torch.DTYPE)", "{0}.to(torch.DTYPE, copy=True)", "{0}.to({1})",
    "{0}.to({1}, copy=True)", "{0}.to({0}.device, copy=True)", "{0}.to(device={0}.device, dtype=torch.DTYPE)",
    "{0}.to({1}.dtype)", "{0}.to({0}.dtype)", "{0}.to({0}.device, non_blocking=True)", "{0}.type_as({1})",
    "{0}.to(torch.DTYPE, non_blocking=True, copy=False)", "{0}.float()", "{0}.double()", "{0}.half()",
    "{0}.bfloat16()", "{0}.to(torch.DTYPE).to({0}.dtype)", "{0}.to({1}.device).to(torch.DTYPE)",
    "{0}.to(torch.DTYPE, memory_format=torch.contiguous_format)",
    "{0}.to({0}.device, torch.DTYPE, memory_format=torch.preserve_format)",
    "{0}.to(z)", "{0}.to(z.device)", "z.to({0}.device) + {0}", "c.to({0}) + {0}",
    "c.to({0}.device, {0}.dtype)",
    "{0}.contiguous()", "{0}.to(torch.DTYPE).detach()", "{0}.detach().to(torch.DTYPE)",
)  # fmt: skip
_AROUND = ("CAST", "CAST", "CAST", "CAST * 0.5", "(CAST + 1)", "torch.tanh(CAST)",
           "torch.sigmoid(CAST) * {1}",
           "CAST * {1}", "(CAST).sum()", "({0} * 2 - 1) + CAST")  # fmt: skip


def cast(rng, operands, tensor):
    """A cast, or a move to a device that is none, by itself or in an expression."""
    text = rng.choice(_CASTS).replace("DTYPE", rng.choice(_DTYPES))
    around = rng.choice(_AROUND)
    return Statement(around.replace("CAST", text), operands, exact="torch." not in around)


# ---- views that branches give

_VIEWS = (
    "{0}", "{0}.transpose(0, -1)", "{0}.view(-1)", "{0}.unsqueeze(0)", "{0}[0]", "{0}.flatten()",
    "{0}.view_as({0})", "{0}.squeeze()", "{0}.reshape(-1)", "{0}.expand_as({1})", "{0}.chunk(2, 0)[0]",
    "({0} * 2).transpose(0, -1)", "({0} + 1).transpose(0, -1) * 2", "{0}[..., ::2]", "{0}.contiguous()",
    "(-({0}.transpose(0, -1))).transpose(0, -1)", "({0} - {1}).view(-1)", "{0}.t()", "({0}.t() * 0.5).t()",
    "{0}.narrow(0, 0, 1)", "{0}.detach()", "{0}.to({0}.dtype)", "(({0} + 1).t() * 2).t()",
    "({0}.t() - 1).t()",
)  # fmt: skip
_CHOICES = (
    "n > 2", "s > 0", "bool(c.any())", "bool(c.sum() > 0)", "bool(z > 0)", "not bool(c.all())", "n == 2",
    "{0}.dim() == {1}.dim()", "{0}.size(0) > 3", "{0}.requires_grad", "{0}.is_contiguous()",
    "{0}.dtype == torch.float32",
)  # fmt: skip
_BRANCHES = (
    "if COND:\n    {out} = VIEW\nelse:\n    {out} = VIEW",
    "if COND:\n    {out} = VIEW\nelse:\n    {out} = {0}",
    "{out} = {0}\nif COND:\n    {out} = VIEW",
    "{out} = VIEW if COND else VIEW",
    "if COND:\n    {out} = VIEW\nelif COND:\n    {out} = VIEW\nelse:\n    {out} = VIEW",
    "{out} = {0}\nif COND:\n    if COND:\n        {out} = VIEW\n    {out} = {out}.view_as({out})",
    "if COND:\n    {out}_p = (VIEW, {0})\nelse:\n    {out}_p = ({1}, VIEW)\n{out} = {out}_p[0]",
    "{out} = {0}\nfor {out}_i in range(n - 1):\n    if COND:\n        {out} = {out}.unsqueeze(0)",
)
_READERS = (
    "",
    "",
    "{out} = {out} * 2",
    "{out}.mul_(0.5)",
    "{out}.add_(1)",
    "{out} = {out} + 1",
    "{out}_r = {out}.flip([0])\n{out} = ({out} * 2 - 1) + {out}_r",
    "{out}_r = {out}.flip([0])\n{out} = torch.tanh({out}) + {out}_r + {out}",
)

#: Writes of the program to other memory: what it declares, and what a norm that trains does not.
_BEFORE = (
    "", "", "z.add_(0.5)\n{out}_a = {0} * 0.5",
    "{out}_a = " + _F + "batch_norm({0}.reshape(-1, m.size(0)), m, r, None, None, True, 0.25)",
)  # fmt: skip


def viewed(rng, operands, tensor):
    """A branch whose blocks give views, of other tensors in each."""
    parts = rng.choice(_BRANCHES).replace("COND", "\0").split("\0")
    text = parts[0] + "".join(rng.choice(_CHOICES) + part for part in parts[1:])
    parts = text.split("VIEW")
    text = parts[0] + "".join(rng.choice(_VIEWS) + part for part in parts[1:])
    reader = rng.choice(_READERS)
    text, before = "\n".join(filter(None, [text, reader])), rng.choice(_BEFORE)
    if before:
        text = f"{before}\n" + text.replace("{0}", "{out}_a")
    return Statement(text, operands, "writing", exact="tanh" not in reader and "norm" not in before)


# ---- ops that see strides

_SEEN = (
    "{0}", "({0} * 2)[..., ::2]", "({0} * 2).narrow(DIM, 0, 1)", "({0} + 1).transpose(0, -1)[..., ::2]",
    "({0} * 2).transpose(DIM, -1)", "({0} + {1})", "({0} - 1)[..., 1:]", "torch.roll({0} * 2, 1, DIM)",
    "({0} * 2).expand_as({0})", "({0} + 1).flip([DIM])", "torch.cat([{0} * 2, {0}], DIM)",
    "torch.stack([{0} * 2, {0}], -1)[..., 0]", "({0} * 0.5).unsqueeze(0).expand([2] + {0}.size())",
    "({0} * 2).chunk(2, DIM)[0]", "torch.softmax({0}, DIM)", "({0} * 2).permute(ORDER)",
    "{0}.transpose(0, -1) * 2",
    "({0} * 2).permute(ORDER).contiguous()", "({0} * 2).permute(ORDER).clone()", "{0}.sum(DIM, keepdim=True)",
    "({0} * 2).permute(ORDER).reshape(-1)", "({0} + 1).select(DIM, 0)", "torch.where(c, {0}, 1.0)",
    "{0}.permute(ORDER) + {1}", "torch.zeros_like({0}.permute(ORDER))", "({0} * 2).permute(ORDER)[..., ::2]",
    "({0} * 2).unfold(DIM, 1, 1)", "({0} + 1).diagonal(0, 0, -1)", "({0} * 2).movedim(0, -1)",
    "torch.cumsum({0} * 2, DIM)", _F + "pad({0} * 2, [1, 1])", "({0} * 2).to(torch.float64)",
)  # fmt: skip


def seen(rng, operands, tensor):
    """The strides of a value, as a custom op sees them, or the value in the order of its memory."""
    rank = tensor.dim()
    text = rng.choice(_SEEN) if rank else rng.choice(("{0}", "({0} * 2)", "({0} + {1})"))
    if rank:
        text = text.replace("DIM", str(rng.randrange(rank))).replace(
            "ORDER", str(rng.sample(range(rank), rank))
        )
    op = rng.choice(("strides", "strides", "memory"))
    exact = op == "strides" or "softmax" not in text
    return Statement(f"torch.ops.tsfuser_tests.{op}({text})", operands, exact=exact, smooth=False)


# ---- steps of optimizers, op by op

_UPDATES = (
    "{0}.lerp_({1}, 0.125)", "{0}.mul_(0.5).addcmul_({1}, {1}, value=0.5)",
    "{0}.addcmul_({1}, {2}, value=-0.25)",
    "{0}.addcdiv_({1}, ({2} * {2} + 1).sqrt(), value=-0.25)", "{0}.addcmul_({1}, {2}, value=s)",
    "{0}.add_({1}, alpha=-0.5)", "{0}.mul_(1 - 0.25 * 0.125)",
    "{0}.addcdiv_({1}, {2}.abs().add_(1), value=s)",
    "{0}.mul_(0.875).add_({1}, alpha=0.125)", "{0}.add_({1} / ({2}.square() + 1).sqrt(), alpha=-0.125)",
    "{0}.addcdiv_({1}, {2} * {2} + 1)", "{0}.addcmul_({1}, {2})", "{0}.sub_({1} * 0.125 + {0} * 0.5)",
    "{0}.copy_(torch.addcmul({0}, {1}, {2}, value=0.5))", "{0}.lerp_({1}, s * 0.25)",
    "{0}.addcdiv_({1}, z * z + 1)",
    "{0}.mul_({1}.sign() * 0.125 + 1)", "{0}.add_({1}.pow(2), alpha=0.5)",
)  # fmt: skip


def update(rng, operands, tensor):
    """What a step of an optimizer does to a parameter or to its state."""
    template = rng.choice(_UPDATES)
    rounds = any(word in template for word in ("sqrt", "addcdiv"))
    jump = "{1}" if "sign" in template else ""
    return Statement(template, operands, "inplace", not rounds, jump, "value" if jump else "")
