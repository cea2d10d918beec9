"""The statements that random programs are made of.

In: a random generator, the values so far. Out: `Statement`s: text with `{0}`, `{1}` for operands. `jump` is
an expression that is 0 where the statement's value (`where` "value") or only its derivative ("slope", or
"tie" where exact operands may be equal) jumps, or where rounded values that it compares are equal ("gap"):
there a rounding error would be blown up, so operands must be exact or lie away from it. Example:

    Statement("torch.relu({0})", ("v3",), jump="{0}", where="slope")
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Statement:
    """`kind`: `value`, `view`, `writing` for several lines that give a value and change what shares its
    memory, or `inplace`, which has no result of its own. `exact`: exact operands give an exact result as long
    as its dtype holds it. `smooth` is False for what has no gradient to compare."""

    template: str
    operands: tuple
    kind: str = "value"
    exact: bool = False
    jump: str = ""
    where: str = ""
    smooth: bool = True

    def text(self, out=""):
        """`out`: the name of the result, which only statements of several lines have in them."""
        return self.template.format(*self.operands, out=out)

    def used(self):
        """The operands that stand in the text."""
        return [o for k, o in enumerate(self.operands) if f"{{{k}}}" in self.template]

    def lines(self, name):
        """What stands in the program."""
        text = self.text(name)
        whole = not name or "{out}" in self.template
        return text.split("\n") if whole else [f"{name} = {text}"]


_F = "torch.nn.functional."
#: Pointwise: exact on exact operands.
EXACT = (
    "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} * 0.5", "{0} + 2", "{0} - 1.5", "2 * {0}", "1 - {0}", "-{0}",
    "{0} + s", "{0} * s", "{0} + n", "torch.add({0}, {1}, alpha=2)", "torch.sub({0}, {1}, alpha=3)",
    "torch.rsub({0}, {1})", "torch.addcmul({0}, {1}, {2}, value=0.5)", "torch.square({0})", "{0}.clone()",
    "{0}.to(torch.float32)", "{0}.to(torch.float64)", "{0}.to(torch.float16)", "{0}.type_as({1})",
    "{0}.float()", "{0}.to({1})", "{0} / 2", "torch.zeros_like({0})", "torch.ones_like({0}) + {1}",
    "torch.full_like({0}, 0.25) * {0}", "{0}.masked_fill(c, 0.5)", "torch.where(c, {0}, {1})",
    "torch.where(c, {0}, 1.0)", "torch.where(c, 0.0, {0})", "{0} + z", "z * {0}", "torch.pow({0}, 2)",
)  # fmt: skip
#: Pointwise: smooth.
SMOOTH = (
    "{0} / ({1}.abs() + 1)", "1.0 / ({0} * {0} + 1)", "torch.sigmoid({0})", "torch.tanh({0})",
    "torch.exp(-{0} * {0})", "torch.expm1(-({0} * {0}))", "torch.log1p({0} * {0})", "torch.sin({0})",
    "torch.log({0} * {0} + 1)", "torch.sqrt({0} * {0} + 1)", "torch.rsqrt({0} * {0} + 1)",
    "torch.cos({0})", "torch.atan({0})", "torch.atan2({0}, {1} * {1} + 1)", "torch.erf({0})",
    _F + "gelu({0})", _F + "gelu({0}, approximate='tanh')", _F + "silu({0})", _F + "softplus({0})",
    _F + "mish({0})", "torch.reciprocal({0} * {0} + 1)", "torch.lerp({0}, {1}, 0.25)",
    "torch.logaddexp({0}, {1})", "torch.hypot({0}, {1} * {1} + 1)", "torch.erfc({0})", "torch.asinh({0})",
    "torch.exp2(-{0} * {0})", "torch.sinh({0} * 0.125)", "torch.pow({0} * {0} + 1, 0.5)",
    _F + "logsigmoid({0})",
    "torch.addcdiv({0}, {1}, {2} * {2} + 1)", "torch.pow(2.0, -{0} * {0})", "torch.tan({0} * 0.03125)",
)  # fmt: skip
#: Pointwise: continuous, but the derivative jumps; with where.
KINKED = (
    ("torch.relu({0})", "{0}"), ("{0}.abs()", "{0}"), (_F + "leaky_relu({0}, 0.125)", "{0}"),
    ("torch.maximum({0}, {1})", "{0} - {1}"), ("torch.minimum({0}, {1})", "{0} - {1}"),
    ("torch.max({0}, {1})", "{0} - {1}"), ("torch.clamp({0}, -1, 1)", "{0}.abs() - 1"),
    ("torch.clamp({0}, min=0.5)", "{0} - 0.5"), ("torch.clamp({0}, max=s)", "{0} - s"),
    (_F + "hardtanh({0})", "{0}.abs() - 1"), (_F + "relu6({0})", "{0} * ({0} - 6)"),
    ("torch.fmax({0}, {1})", "{0} - {1}"), (_F + "threshold({0}, 0.0, 0.0)", "{0}"),
)  # fmt: skip
#: The same, not exact.
BENT = (
    (_F + "elu({0})", "{0}"), (_F + "hardswish({0})", "{0}.abs() - 3"), (_F + "selu({0})", "{0}"),
    (_F + "hardsigmoid({0})", "{0}.abs() - 3"), (_F + "celu({0})", "{0}"),
)  # fmt: skip
_WHOLE = "{0} - torch.round({0})"
#: The value itself jumps.
JUMPING = (
    ("{0} < {1}", "{0} - {1}"), ("{0} <= {1}", "{0} - {1}"), ("{0} > 0", "{0}"), ("{0} >= 1", "{0} - 1"),
    ("{0} == {1}", "{0} - {1}"), ("{0} != 0", "{0}"), ("{0} > s", "{0} - s"), ("torch.floor({0})", _WHOLE),
    ("torch.ceil({0})", _WHOLE), ("torch.trunc({0})", _WHOLE), ("torch.frac({0})", _WHOLE),
    ("torch.round({0})", "{0} - torch.floor({0}) - 0.5"), ("torch.sign({0})", "{0}"),
    ("torch.isnan({0})", "{0} * 0 + 1"), ("torch.isfinite({0})", "{0} * 0 + 1"),
    ("{0}.to(torch.int32)", _WHOLE), ("{0}.to(torch.int64)", _WHOLE), ("{0}.to(torch.bool)", "{0}"),
    ("torch.logical_not({0})", "{0}"), ("torch.logical_and({0}, {1})", "{0} * {1}"),
    ("torch.where({0} > {1}, {0}, {1} * 2)", "{0} - {1}"), ("{0}.masked_fill({0} < 0, 1.0)", "{0}"),
    (_F + "threshold({0}, 0.5, -1.0)", "{0} - 0.5"), (_F + "hardshrink({0})", "{0}.abs() - 0.5"),
    ("torch.heaviside({0}, {1})", "{0}"), ("torch.signbit({0})", "{0}"),
    ("torch.remainder({0}, 1.5)", "{0} / 1.5 - torch.round({0} / 1.5)"),
    ("torch.fmod({0}, 2)", "{0} / 2 - torch.round({0} / 2)"),
)  # fmt: skip
#: Of integers and bools.
INTEGRAL = (
    "{0} & {1}", "{0} | {1}", "{0} ^ {1}", "torch.bitwise_not({0})", "{0} & 3", "torch.remainder({0}, 3)",
    "torch.div({0}, 2, rounding_mode='floor')", "torch.div({0}, 3, rounding_mode='trunc')", "{0} >> 1",
    "torch.logical_xor({0}, {1})",
)  # fmt: skip
INPLACE = (
    "{0}.add_({1})", "{0}.sub_({1})", "{0}.mul_({1})", "{0}.mul_(0.5)", "{0}.add_(1)", "{0} += {1}",
    "{0} *= 2", "{0}.clamp_(-2, 2)", "{0}.relu_()", "{0}.zero_()", "{0}.neg_()", "{0}.fill_(1.5)",
    "{0}.copy_({1})", "{0}.sigmoid_()", "{0}.tanh_()", "{0}.div_({1} * {1} + 1)", "{0}.masked_fill_(c, 0.25)",
)  # fmt: skip
_KINKS_IN_PLACE = {"{0}.clamp_(-2, 2)": "{0}.abs() - 2", "{0}.relu_()": "{0}"}
_ROUNDING_IN_PLACE = ("{0}.sigmoid_()", "{0}.tanh_()", "{0}.div_({1} * {1} + 1)")
FOREIGN = ("torch.sort({0}, -1)[0]", "torch.cat([{0}, {0}], -1)", "torch.flip({0}, [-1])", "torch.tril({0})")


def statement(rng, values, others=(), left_out=()):
    """A random statement over `values`, a dict of name to tensor. `others`: (weight, maker) besides those of
    here, of which some may be `left_out`."""
    names = list(values)
    recent = names[-4:]
    pick = lambda: rng.choice(recent if rng.random() < 0.5 else names)
    operands = (pick(), pick(), pick())
    tensor = values[operands[0]]
    makers = (
        (6, _exact), (6, _smooth), (3, _kinked), (1, _bent), (3, _jumping), (1, _integral), (4, reduction),
        (3, normal), (5, view), (3, merged), (2, written), (0.5, _foreign), *others,
    )  # fmt: skip
    makers = [(weight, make) for weight, make in makers if make not in left_out]
    (make,) = rng.choices([m for _, m in makers], [weight for weight, _ in makers])
    return make(rng, operands, tensor)


def _exact(rng, operands, tensor):
    return Statement(rng.choice(EXACT), operands, exact=True)


def _smooth(rng, operands, tensor):
    return Statement(rng.choice(SMOOTH), operands)


def _kinked(rng, operands, tensor):
    template, jump = rng.choice(KINKED)
    return Statement(template, operands, exact=True, jump=jump, where="slope")


def _bent(rng, operands, tensor):
    template, jump = rng.choice(BENT)
    return Statement(template, operands, jump=jump, where="slope")


def _jumping(rng, operands, tensor):
    template, jump = rng.choice(JUMPING)
    return Statement(template, operands, exact=True, jump=jump, where="value")


def _integral(rng, operands, tensor):
    return Statement(rng.choice(INTEGRAL), operands, exact=True, jump="{0} * 0", where="value")


def written(rng, operands, tensor):
    template = rng.choice(INPLACE)
    jump = _KINKS_IN_PLACE.get(template, "")
    exact = template not in _ROUNDING_IN_PLACE
    return Statement(template, operands, "inplace", exact, jump, "slope" if jump else "")


def _foreign(rng, operands, tensor):
    return Statement(rng.choice(FOREIGN), operands, exact=True)


def _dims(rng, rank):
    """Some dims, one of them counted from the end now and then."""
    chosen = rng.sample(range(rank), rng.randint(1, rank))
    return [d - rank if rng.random() < 0.3 else d for d in chosen]


def reduction(rng, operands, tensor):
    rank = tensor.dim()
    if rank == 0:
        return Statement("{0}.sum()", operands, exact=True)
    dims, keep = _dims(rng, rank), rng.random() < 0.5
    one, tail = dims[0], f"keepdim={keep}"
    number = max(tensor.numel(), 1)
    return rng.choice(
        [
            Statement("{0}.sum()", operands, exact=True),
            Statement(f"{{0}}.sum({dims}, {tail})", operands, exact=True),
            Statement(f"{{0}}.sum({one}, {tail}, dtype=torch.float32)", operands, exact=True),
            Statement(f"{{0}}.mean({dims}, {tail})", operands),
            Statement("{0}.mean()", operands),
            Statement(f"torch.amax({{0}}, {dims}, {tail})", operands, exact=True, smooth=False),
            Statement(f"torch.amin({{0}}, {dims}, {tail})", operands, exact=True, smooth=False),
            Statement("{0}.max()", operands, exact=True, smooth=False),
            Statement(f"{{0}}.var({dims}, unbiased={rng.random() < 0.5}, {tail})", operands),
            Statement(f"torch.sqrt({{0}}.var({dims}, unbiased=False, {tail}) + 1)", operands),
            Statement(f"torch.std({{0}} * 0.5, {dims}, unbiased=False, {tail})", operands, smooth=False),
            Statement(f"torch.logsumexp({{0}}, {dims}, {tail})", operands),
            Statement(f"torch.prod({{0}} * 0.5, {one}, {tail})", operands, smooth=False),
            Statement(f"torch.linalg.vector_norm({{0}}, 2, {dims}, {tail})", operands, smooth=False),
            Statement(f"({{0}} > 0).any({one}, {tail})", operands, exact=True, jump="{0}", where="value"),
            Statement(f"({{0}} > 0).sum({dims}, {tail})", operands, exact=True, jump="{0}", where="value"),
            Statement("({0}.sum() / %d)" % number, operands),
        ]
    )


def normal(rng, operands, tensor):
    rank = tensor.dim()
    if rank == 0:
        return Statement("torch.sigmoid({0})", operands)
    dim = rng.randrange(-rank, rank)
    sizes = "[{0}.size(-1)]" if rank == 1 or rng.random() < 0.7 else "[{0}.size(-2), {0}.size(-1)]"
    found = [
        f"torch.softmax({{0}}, {dim})", f"torch.log_softmax({{0}}, {dim})", f"{_F}softmax({{0}} * s, {dim})",
        f"{_F}layer_norm({{0}}, {sizes})", f"{_F}layer_norm({{0}}, {sizes}, eps=0.25)",
        f"{_F}rms_norm({{0}}, {sizes}, eps=0.25)",
        f"({{0}} - {{0}}.mean({dim}, keepdim=True)) / ({{0}}.var({dim}, unbiased=False, keepdim=True) + 1)",
        f"{{0}} * torch.rsqrt(({{0}} * {{0}}).mean({dim}, keepdim=True) + 0.5)",
    ]  # fmt: skip
    if rank >= 2:
        found += [f"{_F}batch_norm({{0}}, None, None, training=True, eps=0.25)"]
    if rank >= 3:
        found += [f"{_F}group_norm({{0}}, 1, eps=0.25)", f"{_F}instance_norm({{0}}, eps=0.25)"]
    return Statement(rng.choice(found), operands)


def view(rng, operands, tensor):
    rank = tensor.dim()
    found = [
        f"{{0}}.unsqueeze({rng.randint(-rank - 1, rank)})", "{0}.squeeze()", "{0}.reshape(-1)",
        "{0}.view_as({0})",
    ]  # fmt: skip
    if rank:
        a, b = rng.randrange(rank), rng.randrange(rank)
        order = rng.sample(range(rank), rank)
        found += [
            f"{{0}}.transpose({a}, {b})", f"{{0}}.permute({order})", f"{{0}}.permute({order}).contiguous()",
            f"{{0}}.squeeze({a})", f"{{0}}.flatten({min(a, b)}, {max(a, b)})", "{0}.expand_as({1})",
            "{0}.unsqueeze(0).expand([2] + {0}.size())", f"{{0}}.chunk(2, {a})[0]",
            f"torch.movedim({{0}}, {a}, {b})", "{0}.reshape({0}.size(0), -1)", "{0}.view({0}.size(0), -1)",
            f"{{0}}.narrow({a}, 0, 1)", "{0}[0]", "{0}[..., 1:]", "{0}[..., ::2]", "{0}.reshape_as({1})",
        ]  # fmt: skip
        if rank <= 2:
            found += ["{0}.t()", "{0}.t() + {1}.t()"]
    template = rng.choice(found)
    computes = "+" in template and "[2]" not in template
    return Statement(template, operands, "value" if computes else "view", True)


def merged(rng, operands, tensor):
    """Computed values whose dims are merged, and split again in the same or another way."""
    rank = tensor.dim()
    if rank < 2:
        return view(rng, operands, tensor)
    a, b = sorted(rng.sample(range(rank), 2))
    order = rng.sample(range(rank), rank)
    one = rng.choice(
        [
            f"({{0}} * 2).flatten({a}, {b})", "({0} + {1}).reshape(-1)", "(2 - {0}).view({0}.size(0), -1)",
            f"({{0}} * 2).transpose({a}, {b}).reshape({{0}}.size({b}), -1)",
            f"(-{{0}}).permute({order}).reshape(-1, {{0}}.size({a}))", f"{{0}}.permute({order}).reshape(-1)",
            f"({{0}} + {{1}}).reshape({{0}}.size({b}), -1)",
            f"({{0}} * 2).unflatten({a}, [-1, 1]).flatten({a})",
            f"({{0}} * 0.5).reshape(-1, {rng.randint(1, 4)})", "({0} + {0}.sum(-1, True)).flatten()",
        ]
    )  # fmt: skip
    templates = [
        f"{one} + 1", f"({one} + 1).view_as({{0}}) * {{0}}", f"({one} * 0.5).sum(-1)", f"{one} * {{1}}",
        f"({one} + 2).sum(0) * 0.5", f"({one} - 1).reshape(-1) + ({{0}} * 3).transpose({a}, {b}).reshape(-1)",
        f"({one} * 2).reshape_as({{0}}).permute({order}) + 1",
        f"({one} + 1).reshape(-1, {rng.randint(1, 4)}) * 2",
        f"({one} + 1).unsqueeze(0) * {{0}}.sum({a}).unsqueeze(-1)",
        f"{one}.reshape(-1, {rng.randint(1, 4)}) + 1",
        f"{one}.unsqueeze(-1).reshape_as({{0}}) * 2",
        f"{one}.view_as({{0}}).permute({order}).reshape(-1) - 1",
        f"{one}.reshape(-1).expand(3, -1).reshape(-1, 2) - 1",
    ]  # fmt: skip
    rounding = [
        f"torch.softmax({one} * 0.5, -1)",
        f"({one} + 1).mean(-1, True) * {one}",
        f"torch.tanh({one}) + {one}",
    ]
    template = rng.choice(templates + rounding)
    return Statement(template, operands, exact=template in templates)


def dtypes():
    """Of inputs, by weight."""
    return [
        (8, torch.float32), (3, torch.float16), (3, torch.bfloat16), (2, torch.float64), (1, torch.int64),
        (1, torch.int32), (0.5, torch.uint8), (0.5, torch.int8), (0.3, torch.int16), (1, torch.bool),
    ]  # fmt: skip
