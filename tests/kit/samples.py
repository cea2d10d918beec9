"""Arguments for every row of the op table, made from the torch schemas.

In: a row. Out: `Sample`s, each a call of one overload: its arguments by schema name, tensors filled with
special values (0, -0, inf, nan, denormals, limits) and random ones. Example:

    for sample in samples(table.find("aten::add", "Tensor"), ["float32"]):
        sample.eager()
"""

import itertools
import math
from dataclasses import dataclass, field

import torch

from tsfuser.ops import table

TYPES = {name: getattr(torch, name) for name in table.ALL}
MIXED = [
    ("float16", "float32"),
    ("bfloat16", "float16"),
    ("float32", "float64"),
    ("int32", "float16"),
    ("int64", "bfloat16"),
    ("int64", "float32"),
    ("uint8", "int8"),
    ("bool", "int32"),
    ("bool", "float32"),
    ("int8", "int16"),
    ("int32", "int64"),
    ("float32", "complex64"),
    ("float64", "complex64"),
]
ZERO_DIM = [
    ("float16", "float64"),
    ("float16", "int64"),
    ("float32", "float64"),
    ("int8", "int64"),
    ("int32", "float32"),
    ("bool", "int64"),
    ("bfloat16", "float32"),
    ("int64", "float64"),
    ("float32", "complex128"),
]

#: Numbers for arguments of type Scalar or float, by argument name; elsewhere `_NUMBERS`.
_NUMBERS = [2, -3, 0, 1, 0.5, 2.5, True]
_BY_NAME = {
    "alpha": [1, 2, -0.5],
    "value": [1, 3, 0.25],
    "beta": [1, 2.0],
    "threshold": [20, 0.5, -1],
    "eps": [None, 0.25],
    "negative_slope": [0.01, 0.5],
    "lambd": [0.5, 0.1],
    "weight": [0.3, 0.75],
    "min": [-1, None, 0.5, math.nan],
    "max": [1, None, -2.5],
    "min_val": [-1, 0.25],
    "max_val": [1, 2.5],
    "scale": [1, 2.0],
    "input_scale": [1, 0.5],
    "exponent": [2, 3, 0.5, -0.5, -1, -2, 0, 1, 2.5, -3, 5],
    "p": [0.5],
    "nan": [None, 7.5],
    "posinf": [None, 100.0],
    "neginf": [None, -0.1],
    "fill_value": [1, 2.5],
}
_STRUCTURAL = {
    "approximate": ["none", "tanh"],
    "rounding_mode": [None, "trunc", "floor"],
    "decimals": [0, 2, -1],
    "train": [False],
    "is_result": [False, True],
    "self_is_result": [False],
    "copy": [False, True],
    "dtype": [None, 5, 6, 3, 11, 0],
    "cuda_dtype": [5],
    "cpu_dtype": [15],
    "cuda_enabled": [True],
    "cpu_enabled": [True],
}
_POSITIVE = {
    ("celu", "alpha"),
    ("elu", "alpha"),
    ("elu_backward", "alpha"),
    ("softplus", "threshold"),
    ("softplus_backward", "threshold"),
}
NORMS = {"normalization", "batch_norm", "batch_norm_backward", "instance_norm", "group_norm", "rms_norm"}
# families whose samples are made in their tests
_OWN_TESTS = NORMS | {
    "adaptive_pooling",
    "places",
    "place_sums",
    "scans",
    "searching",
    "reduction",
    "softmax",
    "random",
    "lookup",
    "losses",
    "joins",
    "parts",
    "paddings",
    "pooling",
    "pool_gradients",
    "fills",
}


@dataclass
class Sample:
    """A call `name.overload(**arguments)`."""

    row: table.Row
    overload: str
    arguments: dict = field(repr=False)

    @property
    def schema(self):
        return schema_of(self.row.name, self.overload)

    def eager(self, double=False):
        """What torch computes; in float64 (complex128) if `double`. Raises what torch raises."""
        arguments = {
            name: _double(v) if double and isinstance(v, torch.Tensor) else _copy(v)
            for name, v in self.arguments.items()
        }
        return operation(self.row.name, self.overload)(**arguments)

    @property
    def tensors(self):
        return {name: v for name, v in self.arguments.items() if isinstance(v, torch.Tensor)}

    def __str__(self):
        said = [
            f"{n}={str(v.dtype)[6:]}{list(v.shape)}" if isinstance(v, torch.Tensor) else f"{n}={v!r}"
            for n, v in self.arguments.items()
        ]
        return f"{self.row.name}.{self.overload}({', '.join(said)})"


def _copy(x):
    return x.clone() if isinstance(x, torch.Tensor) else x


def _double(x):
    return x.to(torch.complex128) if x.is_complex() else x.double() if x.is_floating_point() else x.clone()


def schema_of(name, overload):
    """The torch schema of an overload, or None where this torch has none."""
    found = [s for s in torch._C._jit_get_schemas_for_operator(name) if s.overload_name == overload]
    return found[0] if found else None


def operation(name, overload):
    """A Python callable for an overload, also for those that only TorchScript has."""
    namespace, _, op = name.partition("::")
    if name == "prim::add_optional":
        return lambda input, bias: input if bias is None else input + bias
    return torch._C._get_operation_overload(f"{namespace}::{op}", overload)[0]


def values(dtype, seed=0, count=24):
    """Special values of `dtype`, then `count` random ones."""
    generator = torch.Generator().manual_seed(seed)
    t = TYPES[dtype]
    if dtype == "bool":
        return torch.tensor([False, True] * (count // 2))
    if dtype in table.INTEGRAL:
        limits = torch.iinfo(t)
        special = [0, 1, 2, 3, 7, 63, 64, 100, limits.max, limits.max - 1, limits.min + 1, limits.min]
        special += [] if dtype == "uint8" else [-1, -2, -7, -100]
        spread = torch.randint(max(limits.min, -20), 20, (count // 2,), generator=generator)
        wide = torch.randint(limits.min // 2, limits.max // 2, (count // 2,), generator=generator)
        return torch.cat([torch.tensor(special), spread, wide]).to(t)
    if dtype in table.COMPLEX:
        parts = torch.randn(2, count + 4, generator=generator, dtype=torch.float64)
        parts[:, :4] = torch.tensor([[0.0, 1.0, -2.0, 0.0], [0.0, 0.0, 0.0, 3.0]])
        return torch.complex(*parts).to(t)
    limits = torch.finfo(t)
    special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -0.5,
        2.0,
        -2.0,
        3.0,
        -3.0,
        6.0,
        0.25,
        -0.25,
        1.5,
        2.5,
        -2.5,
        0.1,
        20.0,
        21.0,
        -30.0,
        100.0,
        1e-3,
        math.pi,
        math.inf,
        -math.inf,
        math.nan,
        limits.max,
        limits.min,
        limits.tiny,
        limits.smallest_normal / 2,
        -limits.eps,
        1 + limits.eps,
        1 - limits.eps / 2,
    ]
    random = torch.randn(count, generator=generator, dtype=torch.float64) * 2
    return torch.cat([torch.tensor(special, dtype=torch.float64), random]).to(t)


def _operands(dtypes, zero_dim=()):
    """One tensor a dtype; the first two pair every value with every other, the rest are permuted. Those in
    `zero_dim` have no dims."""
    pools = [values(d, seed) for seed, d in enumerate(dtypes)]
    if len(pools) > 1:
        a, b = pools[0], pools[1]
        pools[0], pools[1] = a.repeat_interleave(len(b)), b.repeat(len(a))
    n = len(pools[0]) if pools else 0
    result = []
    for k, pool in enumerate(pools):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(k)) if k > 1 else torch.arange(n)
        full = pool.repeat(-(-n // len(pool)))[order]
        result.append(full[7 if full.dtype.is_complex else 16].clone() if k in zero_dim else full)
    return result


def _kinds(schema):
    return {a.name: str(a.type) for a in schema.arguments}


def _choices(row, name, kind):
    if row.name == "aten::to" and name == "dtype":
        return _STRUCTURAL[name][1:]  # eager's to.prim_dtype cannot do without one
    if name in _STRUCTURAL:
        options = _STRUCTURAL[name]
        return options if kind.startswith("Optional") else [x for x in options if x is not None]
    if kind in ("number", "float", "Optional[number]", "Optional[float]"):
        op = row.name[6:]
        options = _BY_NAME.get(name, _NUMBERS)
        if (op, name) in _POSITIVE:
            options = [abs(x) for x in options]
        if kind.endswith("float") or kind.endswith("float]"):
            options = [x if x is None else float(x) for x in options]
        return options if kind.startswith("Optional") else [x for x in options if x is not None]
    if kind == "bool":
        return [False]
    if kind.startswith("Optional"):
        return [None]
    if name == "memory_format":
        return [0]
    raise LookupError(f"no sample for argument `{name}: {kind}` of {row.name}")


def _is_mask(row, name):
    return name in ("condition", "mask")


def samples(row, dtypes=table.ALL, mixed=True):
    """Calls of all overloads of `row`: each dtype for all tensors, then (if `mixed`) different dtypes and
    0-dim tensors. Numbers and structural arguments vary one at a time."""
    # test_gradient_layout, test_operand_room
    if row.family in _OWN_TESTS or row.name in ("tsfuser::laid_out", "tsfuser::with_room"):
        return
    if row.name == "aten::to" and "device" in row.overloads:  # test_pointwise: a sample has no device
        return
    for overload in row.overloads:
        schema = schema_of(row.name, overload)
        if schema is None and row.name != "prim::add_optional":
            continue
        kinds = _kinds(schema) if schema else {"input": "Tensor", "bias": "Optional[Tensor]"}
        tensors = [n for n, k in kinds.items() if k in ("Tensor", "Optional[Tensor]")]
        free = [n for n in tensors if not _is_mask(row, n)]
        others = {n: _choices(row, n, k) for n, k in kinds.items() if n not in tensors}
        base = {n: options[0] for n, options in others.items()}
        variants = [base] + [{**base, n: x} for n, options in others.items() for x in options[1:]]
        single_value = {1} if row.name in ("aten::masked_fill", "aten::fill") and len(free) > 1 else ()
        rows = [((d,) * len(free), single_value, variants) for d in (dtypes if free else dtypes[:1])]
        if mixed and len(free) > 1:
            for pair in MIXED:
                if set(pair) <= set(dtypes):
                    rows += [
                        ((p + (p[0],) * len(free))[: len(free)], single_value, [base])
                        for p in (pair, pair[::-1])
                    ]
            for pair in ZERO_DIM:
                if set(pair) <= set(dtypes):
                    rows.append(((pair + (pair[0],) * len(free))[: len(free)], {1}, [base]))
        for names, zero, choices in rows:
            for choice, optional in itertools.product(choices, _absent(kinds, free)):
                yield _sample(row, overload, kinds, free, names, zero, choice, optional)


def _absent(kinds, free):
    """Which optional tensors are left out: none, or one of them."""
    return [None] + [n for n in free if kinds[n].startswith("Optional")]


def _sample(row, overload, kinds, free, names, zero, choice, absent):
    made = dict(zip(free, _operands(names, zero)))
    count = next((len(t) for t in made.values() if t.dim()), 6)
    arguments = {}
    for name in kinds:
        if name == absent:
            arguments[name] = None
        elif (row.name, name) == ("aten::log_sigmoid_backward", "buffer") and made[
            "self"
        ].is_floating_point():
            arguments[name] = torch.exp(-made["self"].abs())  # what the forward leaves there
        elif name in made:
            arguments[name] = made[name]
        elif name in choice:
            arguments[name] = choice[name]
        else:
            arguments[name] = torch.arange(count) % 3 == 0
    return Sample(row, overload, arguments)
