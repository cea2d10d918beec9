"""Steps of random networks (random_modules.py).

In: a random generator, the name of a value, the shapes of all values. Out: a text in which `{0}` is the value
and `@nn.Linear(8, 4)@` a module, and further operands. Example: `("@nn.GELU()@({0}).transpose(1, 2)", ())`.
"""

from math import prod

ACTIVATIONS = (
    "F.gelu({0})", "torch.relu({0})", "F.silu({0})", "torch.tanh({0})", "F.leaky_relu({0})", "F.elu({0})",
    "{0} * 0.5 + 1", "@nn.Dropout(0.0)@({0})", "@nn.ReLU(inplace=True)@({0} * 1)", "F.hardswish({0})",
    "torch.sigmoid({0}) * {0}", "torch.softmax({0}, -1)", "({0} * 2).add_(1)",
)  # fmt: skip


def step(rng, value, shapes):
    """One step, or a checkpoint of several, one behind the other; the text is "" if there is none."""
    others = tuple(name for name in shapes if name not in (value, "x") and shapes[name] == shapes[value])
    kind = rng.random()
    if others and kind < 0.15:
        return rng.choice(("{0} + {1}", "{0} * torch.sigmoid({1})", "torch.where({1} > 0, {0}, {1})")), (
            rng.choice(others),
        )
    if kind < 0.25 and (pair := _joined(rng, value, shapes)):
        return pair
    if kind < 0.4:
        inner = "t"
        for _ in range(rng.randint(1, 3)):
            made = one(rng, shapes[value]) if inner == "t" else rng.choice(ACTIVATIONS)
            inner = made.replace("{0}", f"({inner})" if inner != "t" else inner) if made else inner
        return f"checkpoint(lambda t: {inner}, {{0}}, use_reentrant=False)", ()
    return one(rng, shapes[value]), ()


def one(rng, shape):
    """A step of one operand of that shape."""
    kinds = [_view, _view, _view, _activation, _module, _module, _module, _between, _part, _reduced]
    return rng.choice(kinds)(rng, shape)


def _joined(rng, value, shapes):
    """`cat` with a value that differs in one dim at most."""
    shape = shapes[value]
    fits = [
        (name, dim)
        for name, other in shapes.items()
        if name != "x" and len(other) == len(shape)
        for dim in range(len(shape))
        if all(a == b for d, (a, b) in enumerate(zip(shape, other)) if d != dim)
    ]
    if not fits:
        return None
    name, dim = rng.choice(fits)
    return f"torch.cat([{{0}}, {{1}}], {dim})", (name,)


def _activation(rng, shape):
    return rng.choice(ACTIVATIONS)


def _view(rng, shape):
    rank = len(shape)
    dims = list(range(rank))
    rng.shuffle(dims)
    made = ["{0}.unsqueeze(%d)" % rng.randint(0, rank), "{0}.flip(%d)" % rng.randrange(rank)]
    if rank > 1:
        a, b = dims[:2]
        first = rng.randrange(rank - 1)
        made += [f"{{0}}.transpose({a}, {b})"] * 4 + [f"{{0}}.permute({dims})"] * 3
        made += [f"{{0}}.flatten({first}, {rng.randint(first + 1, rank - 1)})"] * 2
        made += ["{0}.reshape(-1, %d)" % shape[-1], "{0}.reshape(%d, -1)" % shape[0]]
        made += ["{0}.view(-1, %d)" % shape[-1], "{0}.view(%d, -1)" % shape[0], "{0}.contiguous()"]
        made += [f"torch.roll({{0}}, {rng.randint(1, 3)}, {a})"]
    if rank == 4:
        made += ["{0}.contiguous(memory_format=torch.channels_last)"] * 2
    if 1 in shape:
        made += ["{0}.squeeze(%d)" % shape.index(1), "{0}.expand(%s)" % [3 if n == 1 else -1 for n in shape]]
    split = [(d, k) for d, n in enumerate(shape) for k in (2, 3, 4) if n % k == 0 and n > k]
    for d, k in split[:3]:
        made += [f"{{0}}.unflatten({d}, ({k}, -1))", f"{{0}}.unflatten({d}, (-1, {k}))"]
    return rng.choice(made)


def _part(rng, shape):
    d = rng.randrange(len(shape))
    size = shape[d]
    if size < 2:
        return ""
    colons = ":, " * d
    made = [
        f"{{0}}[{colons}::2]",
        f"{{0}}[{colons}{rng.randrange(size)}]",
        f"{{0}}[{colons}:{rng.randint(1, size - 1)}]",
        f"{{0}}.narrow({d}, 1, {size - 1})",
        f"{{0}}.chunk(2, {d})[0] * 2",
        f"torch.cat({{0}}.chunk(2, {d})[::-1], {d})",
        f"torch.stack({{0}}.unbind({d})[:2], {rng.randrange(len(shape))})",
    ]
    if size % 2 == 0:
        made += [f"F.glu({{0}}, {d})", f"torch.cat([t.relu() for t in {{0}}.split({size // 2}, {d})], {d})"]
    return rng.choice(made)


def _reduced(rng, shape):
    d = rng.randrange(len(shape))
    made = [f"{{0}}.mean({d}, keepdim=True)", f"{{0}} - {{0}}.mean({d}, keepdim=True)", f"{{0}}.sum({d})"]
    made += [
        f"{{0}}.cumsum({d}) * 0.25",
        f"F.pad({{0}}, (1, {rng.randint(0, 2)}))",
        f"F.normalize({{0}}, dim={d})",
    ]
    if len(shape) > 1:
        made += ["({0} @ {0}.transpose(-1, -2)) * 0.1"]
    return rng.choice(made)


def _module(rng, shape):
    rank, last = len(shape), shape[-1]
    wide = rng.choice((1, 3, 4, 8))
    made = [
        f"@nn.Linear({last}, {wide})@({{0}})",
        f"@nn.LayerNorm({last})@({{0}})",
        f"@nn.RMSNorm({last})@({{0}})",
    ]
    if rank > 1:
        made += [f"@nn.LayerNorm({list(shape[-2:])})@({{0}})", f"@nn.PReLU({shape[1]})@({{0}})"]
        made += _on_channels(rng, shape, wide)
    if rank == 3 and prod(shape[1:]) < 200:
        made += [f"@nn.MultiheadAttention({last}, {2 if last % 2 == 0 else 1}, batch_first=True)@"
                 "({0}, {0}, {0}, need_weights=False)[0]"]  # fmt: skip
    return rng.choice(made)


def _between(rng, shape):
    """A module on channels that were the last dim, and are so again: as in a Conformer, or in ConvNeXt."""
    if len(shape) not in (3, 4):
        return ""
    there, back = {3: ([0, 2, 1], [0, 2, 1]), 4: ([0, 3, 1, 2], [0, 2, 3, 1])}[len(shape)]
    wide = rng.choice((2, 4, 8))
    before = rng.choice(
        ("{0}", f"@nn.Linear({shape[-1]}, {wide})@({{0}})", f"@nn.Linear({shape[-1]}, {wide})@({{0}})")
    )
    moved = [shape[0], shape[-1] if before == "{0}" else wide, *shape[1:-1]]
    inner = rng.choice(_on_channels(rng, moved, wide)).replace("{0}", f"{before}.permute({there})")
    return f"{inner}.permute({back})"


def _on_channels(rng, shape, wide):
    """Modules whose dim 1 has the channels."""
    rank, channels = len(shape), shape[1]
    groups = rng.choice([k for k in (1, 2, 3, 4) if channels % k == 0])
    norms = [f"@nn.GroupNorm({groups}, {channels})@({{0}})"]
    norms += [f"@nn.BatchNorm{max(rank - 2, 1)}d({channels})@({{0}})"] * 2 if rank in (2, 3, 4) else []
    if rank not in (3, 4):
        return norms
    d = rank - 2
    norms += [f"@nn.InstanceNorm{d}d({channels}, affine=True)@({{0}})"]
    convolution = f"{channels}, {wide * groups}, {rng.choice((1, 3))}, padding=1, groups={groups}"
    convolutions = [f"@nn.Conv{d}d({convolution})@({{0}})"] * 3
    convolutions += [f"@nn.ConvTranspose{d}d({channels}, {wide}, 2, stride=2)@({{0}})"]
    size, up = rng.choice((2, 3)), rng.random() < 0.3
    words = f"{size}, {rng.choice((1, 2))}, {rng.choice((0, size // 2))}, ceil_mode={up}"
    windows = [f"@nn.AvgPool{d}d({words})@({{0}})", f"@nn.MaxPool{d}d({words})@({{0}})"]
    windows += [f"@nn.AdaptiveAvgPool{d}d({rng.randint(1, 3)})@({{0}})", "F.interpolate({0}, scale_factor=2)"]
    if d == 2 and channels % 4 == 0:
        windows += ["F.pixel_shuffle({0}, 2)", "F.channel_shuffle({0}, 2)"]
    return norms + convolutions + windows
