"""Plans that serve many calls: a scripted function is called with a long sequence of differing sizes,
layouts, alignments and numbers, and each result is compared with eager's.

The guard is off, so that one group gets whatever comes, and most calls are served by a plan that was made for
another call of its class. A sequence draws its sizes and layouts from a few, so that classes recur.
"""

import random

import pytest
import torch

import tsfuser
from kit.support import assert_matches, counted, no_fallback, script, train

BIAS = """
def f(x, y):
    a = x + y
    return torch.sigmoid(a) * x, torch.relu(y), a * 2
"""
MIXED = """
def f(x, y, z):
    h = (x * y).to(torch.float16)
    return h, h + z, torch.where(x > y, z, h), (x > z) & (y > z)
"""
NUMBERS = """
def f(x, y, n: int, a: float, flag: bool):
    return torch.add(x, y, alpha=n) * a, x * n + flag, torch.clamp(x, min=-a), y - n
"""
INTEGERS = """
def f(x, y, n: int):
    return x + y * n, (x > y) ^ (x == n), torch.where(x < y, x, y).to(torch.float32) / 3, x.to(torch.bool)
"""
COMPLEX = """
def f(x, y):
    z = x * y + x
    return z, z - y, z * 2j
"""
SUMS = """
def f(x, y, s: List[int], t: List[int]):
    p = x * y
    return p, p.sum_to_size(s), (p + x).sum_to_size(t), p.to(torch.float64).sum_to_size(s)
"""
SUMS_OF_SUMS = """
def f(x, y, s: List[int], t: List[int]):
    p = (x * y).sum_to_size(s)
    return (p * y).sum_to_size(t), p, x * y
"""
TRAINED = """
def f(x, y):
    return torch.tanh(x * y + y) * x
"""
SIZES = ((3, 5, 7, 33, 128), (2, 4, 8, 64, 256), (0, 1, 2, 6, 17))


def blank(shape, dtype, generator):
    """Random elements of `dtype`, contiguous."""
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(
            shape, generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32
        ).to(dtype)
    return torch.randint(-9, 9, shape, generator=generator).to(dtype)


def contiguous(x, r):
    return x


def permuted(x, r):
    order = list(range(x.dim()))
    r.shuffle(order)
    return torch.empty_permuted(x.shape, order, dtype=x.dtype).copy_(x)


def pitched(x, r):
    """Rows with a gap between them, which may break their alignment."""
    if x.dim() == 0:
        return x
    wide = torch.zeros([*x.shape[:-1], x.shape[-1] + r.choice([1, 2, 8])], dtype=x.dtype)
    return wide[..., : x.shape[-1]].copy_(x)


def shifted(x, r):
    by = r.choice([1, 2, 4, 8])
    return torch.zeros(x.numel() + by, dtype=x.dtype)[by:].view(x.shape).copy_(x)


def sparse(x, r):
    """Every second element of memory."""
    return torch.zeros([*x.shape, 2], dtype=x.dtype)[..., 0].copy_(x)


def expanded(x, r):
    d = r.randrange(x.dim()) if x.dim() else 0
    return x.narrow(d, 0, 1).expand(x.shape) if x.dim() and x.shape[d] else x


def sliding(x, r):
    """Rows that overlap in memory."""
    if x.dim() < 2 or x.numel() == 0:
        return x
    memory = x.flatten().repeat(2)
    return memory.as_strided(x.shape, [*x.stride()[:-2], 1, 1])


LAYOUTS = (contiguous, permuted, pitched, shifted, sparse, expanded, sliding)


class Calls:
    """Random arguments. A sequence has its own ranks, sizes and layouts; every call takes some of them."""

    def __init__(self, seed, dtypes, device):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(self.random.randrange(1 << 30))
        self.dtypes, self.device = dtypes, device
        self.ranks = [self.random.choice([0, 1, 2, 2, 3, 4]) for _ in dtypes]
        self.ranks[0] = max(self.ranks[0], 2)
        self.layouts = self.random.sample(LAYOUTS, 2) + [contiguous]
        self.sizes = self.random.choice(SIZES)
        self.full = []
        self._chosen = {}

    def usually(self, what, options):
        """One of `options`, mostly that of the last call."""
        if what not in self._chosen or self.random.random() < 0.3:
            self._chosen[what] = self.random.choice(options)
        return self._chosen[what]

    def tensors(self):
        """One tensor a dtype; their shapes broadcast."""
        r = self.random
        if not self.full or r.random() < 0.8:
            self.full = [
                r.choice(self.sizes[: 5 if max(self.ranks) < 3 else 3]) for _ in range(max(self.ranks))
            ]
        result = []
        for k, (rank, dtype) in enumerate(zip(self.ranks, self.dtypes)):
            shape = [1 if r.random() < 0.06 else size for size in self.full[len(self.full) - rank :]]
            if result and r.random() < 0.05 and result[-1].dtype == dtype and len(shape) == result[-1].dim():
                result.append(result[-1])  # the same tensor twice
                continue
            x = self.usually(f"layout {k}", self.layouts)(blank(shape, dtype, self.generator), r)
            result.append(on(x, self.device))
        return result

    def part(self, k, *shapes):
        """Sizes that a tensor of the broadcast of `shapes` can be summed to, for list argument `k`."""
        sizes = list(torch.broadcast_shapes(*shapes))[self.usually(f"start {k}", [0, 0, 1]) :]
        return [
            1 if self.usually(f"one {k} {d}", [False, False, True]) else size for d, size in enumerate(sizes)
        ]


def on(x, device):
    """`x` with its strides and offset on `device`."""
    if device == "cpu":
        return x
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).to(device)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def arguments(source, calls):
    r = calls.random
    tensors = calls.tensors()
    shapes = [x.shape for x in tensors]
    if source == SUMS:
        return [*tensors, calls.part(0, *shapes), calls.part(1, *shapes)]
    if source == SUMS_OF_SUMS:
        first = calls.part(0, *shapes)
        return [*tensors, first, calls.part(1, first, shapes[1])]
    if source == NUMBERS:
        return [*tensors, r.choice([0, 1, -1, 2, 7]), r.choice([0.5, -1.5, 2.0]), r.random() < 0.5]
    if source == INTEGERS:
        return [*tensors, r.choice([0, 1, -1, 3])]
    return tensors


def double(x):
    if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PROGRAMS = {
    "bias": (BIAS, [(torch.float32,) * 2, (torch.float16, torch.float32), (torch.bfloat16,) * 2]),
    "mixed": (MIXED, [(torch.float32, torch.float32, torch.float16)]),
    "numbers": (NUMBERS, [(torch.float32,) * 2, (torch.float64, torch.float16)]),
    "integers": (INTEGERS, [(torch.int64, torch.int32), (torch.uint8, torch.int8)]),
    "complex": (COMPLEX, [(torch.complex64, torch.float32), (torch.complex64,) * 2]),
    "sums": (SUMS, [(torch.float32,) * 2, (torch.float16,) * 2]),
    "sums_of_sums": (SUMS_OF_SUMS, [(torch.float32,) * 2]),
}
# programs that cast: in float64 throughout they would compute something else
ROUNDED = ("mixed", "sums", "sums_of_sums")


@pytest.fixture(autouse=True)
def unguarded():
    """The group gets every call, and may not fall back."""
    before = torch._C._jit_set_nvfuser_guard_mode(False)
    with no_fallback():
        yield
    torch._C._jit_set_nvfuser_guard_mode(before)


def closeness(name, args, theirs):
    """The arguments `ops`, `strides` and `precision` of `assert_matches`: a sum has as many roundings as
    terms, of which most cancel."""
    terms = sum(a.numel() for a in args if isinstance(a, torch.Tensor)) if "sum" in name else 0
    low = [
        a.dtype for a in args if isinstance(a, torch.Tensor) and a.dtype in (torch.float16, torch.bfloat16)
    ]
    return 6 + terms // 16, True, low[0] if low and theirs.is_floating_point() else None


def describe(args):
    return [
        (a.dtype, tuple(a.shape), a.stride(), a.data_ptr() % 64) if isinstance(a, torch.Tensor) else a
        for a in args
    ]


def eager_of(source):
    space = {"torch": torch, "List": list}
    exec(source, space)
    return space["f"]


def compare(name, seed, count, device):
    """`count` calls of one sequence; returns how much the counters rose."""
    source, dtypes = PROGRAMS[name]
    calls = Calls(f"{name}{seed}", dtypes[seed % len(dtypes)], device)
    eager = eager_of(source)
    tsfuser.reset()  # a group keeps a limited number of plans
    with tsfuser.fuser(), counted() as rise:
        scripted = script(source)
        for k in range(count):
            args = arguments(source, calls)
            actual, plain = scripted(*args), eager(*args)
            exact = eager(*map(double, args)) if name not in ROUNDED else [None] * len(plain)
            for i, (mine, theirs, reference) in enumerate(zip(actual, plain, exact)):
                try:
                    assert_matches(mine, theirs, reference, *closeness(name, args, theirs))
                except AssertionError as error:
                    raise AssertionError(
                        f"result {i} of call {k} of {name} {seed}: {describe(args)}: {error}"
                    ) from error
    return rise


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_of_a_sequence_of_calls(device, name, target, request):
    seeds, count = (
        (range(100), 60)
        if request.config.getoption("--long")
        else (range(1), 10 if target == "cpu-fibers" else 20)
    )
    assert sum(compare(name, seed, count, device)["class_hits"] for seed in seeds) > 0


def test_gradients_of_a_sequence_of_calls(device, target, request):
    """Forward and backward groups; which dims are summed depends on sizes that the plans have not seen."""
    seeds, count = (
        (range(30), 40)
        if request.config.getoption("--long")
        else (range(1), 3 if target == "cpu-fibers" else 10)
    )
    eager = eager_of(TRAINED)
    for seed in seeds:
        tsfuser.reset()
        calls = Calls(f"trained{seed}", (torch.float32, torch.float32), device)
        with tsfuser.fuser():
            scripted = script(TRAINED)
            for k in range(count):
                inputs = [x.detach().requires_grad_() for x in calls.tensors()]
                twins = [x.detach().double().requires_grad_() for x in inputs]
                if inputs[0].data_ptr() == inputs[1].data_ptr():
                    inputs[1], twins[1] = inputs[0], twins[0]
                mine, gradients = train(scripted, inputs, calls=4 if k == 0 else 1)
                plain, theirs = train(eager, inputs, calls=1)
                exact, wide = train(eager, twins, calls=1)
                assert_matches(mine, plain, exact, ops=4)
                for a, b, c in zip(gradients, theirs, wide):
                    assert_matches(a, b, c, ops=6 + mine.numel() // 16, strides=False)


def test_a_long_sum_on_the_cpu_is_as_right_as_eagers():
    """One thread may add up all of a row: in float the result would be off by 5e-4."""
    x, y = torch.rand(1, 1 << 22), torch.rand(1, 1 << 22)
    with tsfuser.fuser(), counted() as rise:
        scripted = script("def f(x, y, s: List[int]):\n    return (x * y).sum_to_size(s)\n")
        for _ in range(3):
            actual = scripted(x, y, [1, 1])
    assert rise["launches"] > 0
    assert_matches(actual, (x * y).sum_to_size(1, 1), (x.double() * y.double()).sum_to_size(1, 1))


def test_a_sum_to_sizes_that_do_not_fit_raises():
    with tsfuser.fuser():
        scripted = script("def f(x, s: List[int]):\n    return (x * 2).sum_to_size(s)\n")
        for _ in range(3):
            scripted(torch.rand(3, 4), [1, 4])
        for x, sizes in (
            (torch.rand(1, 4), [3, 4]),
            (torch.rand(3, 4), [2, 4]),
            (torch.rand(3, 4), [1, 3, 4]),
        ):
            with pytest.raises(RuntimeError):
                scripted(x, sizes)


@pytest.mark.parametrize("target", ["cpu-fibers"])
def test_rows_of_many_lengths_take_few_kernels(device, target):
    """The first length gets a kernel that fits it. From the second on, lengths of one power of two share one:
    these eight, which that of the first does not fit, fall into three."""
    with tsfuser.fuser():
        scripted = script("def f(x):\n    return torch.softmax(x * 0.5, -1)\n")
        for length in (260, 260, 260):
            scripted(torch.randn(3, length, device=device))
        with counted() as rise:
            for length in (140, 220, 256, 280, 380, 512, 600, 900):
                x = torch.randn(3, length, device=device)
                torch.testing.assert_close(scripted(x), torch.softmax(x * 0.5, -1))
    assert rise["plans_built"] == 3 and not rise["fallbacks"]
