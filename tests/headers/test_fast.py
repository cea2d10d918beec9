"""Fast forms are off by no more than their symbols state, and right where numbers are special.

Each is computed of every number that 16 bits hold and of random ones in float32, beside the exact form in
double. Without a GPU its instructions are emulated, off by as much as they may be: all upwards, all
downwards, each in a direction of its own."""

import re

import pytest
import torch

import tsfuser.ops  # noqa: F401  it defines the symbols
from kit import harness
from tsfuser.ir.symbols import all_symbols, fast_of, filled, find

SYMBOLS = {symbol.name: symbol for symbol in all_symbols() if symbol.fast}
#: What stands for the numbers among a symbol's operands.
NUMBERS = {
    "softplus": (1.0, 20.0),
    "elu": (1.0, 1.0, 1.0),
    "celu": (1.5,),
    "softplus_backward": (1.0, 20.0),
    "elu_backward": (1.5, 1.0, 1.0),
}
#: What is exact in double, too, where the exact form's formula cancels.
REFERENCES = {
    "gelu": "(0.5 * {0} * erfc({0} * -0.7071067811865476))",
    "gelu_tanh": "({0} / (1 + exp(-1.5957691216057308 * ({0} + 0.044715 * {0} * {0} * {0}))))",
}
#: In which direction approximations err; None: each in its own.
SIDES = (None, -1, 1)
CASES = [(name, side, target) for name in SYMBOLS for side in SIDES for target in ("fibers",)]
CASES += [(name, None, "cuda") for name in SYMBOLS if "cuda" in harness.HERE]
LEAST = 2.0**-140  # a hundredth of bfloat16's smallest number


def count(symbol):
    """How many operands it has."""
    return 1 + max(int(k) for k in re.findall(r"\{(\d+)\}", symbol.templates["f"]))


def source(symbol):
    """A kernel that computes the fast form, the exact one in float and in double, and what errors are
    relative to."""
    name, n, fast = symbol.name, count(symbol), symbol.fast
    given = [f"args.x{k}[i]" for k in range(n)]
    wide = [f"static_cast<double>({x})" for x in given]
    exact = filled(REFERENCES.get(name, symbol.templates["f"]), wide)
    scales = [filled(of, wide) if of else f"fabs({exact})" for of in (fast.of, fast.exact_of or fast.of)]
    fields = "".join(f"const float* x{k}; " for k in range(n)) + "float* fast; float* plain; "
    return f"""
struct Args_{name} {{ {fields}double* exact; double* scale; double* plain_scale; int64_t n; }};
KERNEL({name}_compared, Args_{name}, 1) {{
  for (int64_t i = blockIdx.x; i < args.n; i += gridDim.x) {{
    args.fast[i] = {filled(find(fast_of(name)).template(), given)};
    args.plain[i] = {filled(symbol.templates["f"], given)};
    args.exact[i] = {exact};
    args.scale[i] = {scales[0]};
    args.plain_scale[i] = {scales[1]};
  }}
}}"""


def sources(side):
    """The kernels of all symbols."""
    define = "" if side is None else f"#define TSFUSER_APPROX_ERROR {side}.0f\n"
    return f'{define}#include "tsfuser.h"' + "".join(map(source, SYMBOLS.values()))


def operands(symbol):
    """Tensors of float32; the last one that is no number has all numbers of 16 bits."""
    generator = torch.Generator().manual_seed(3)
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    plain = torch.randn(1 << 16, generator=generator)
    own = [bits.view(torch.bfloat16).float(), bits.view(torch.float16).float(), plain, plain * 16]
    own += [1 + plain * 0.01, plain * 0.1]
    x = torch.cat(own)
    numbers = NUMBERS.get(symbol.name, ())
    others = [torch.randn(len(x), generator=generator) for _ in range(count(symbol) - 1 - len(numbers))]
    return [*others, x, *(torch.full_like(x, number) for number in numbers)]


def compared(name, side, target):
    """Operands; the fast form's results, the exact one's in float and in double, what each is relative
    to."""
    symbol, device = SYMBOLS[name], harness.device(target)
    given = [x.to(device) for x in operands(symbol)]
    n = given[0].numel()
    made = [torch.empty(n, dtype=dtype, device=device) for dtype in [torch.float32] * 2 + [torch.float64] * 3]
    harness.Kernel(sources(side), f"{name}_compared", target)(*given, *made, n, grid=256)
    return [x.cpu() for x in given], *(x.cpu() for x in made)


@pytest.mark.each_value
@pytest.mark.parametrize("name, side, target", CASES)
def test_a_fast_form_is_off_by_no_more_than_its_symbol_states(name, side, target):
    given, fast, plain, exact, scale, plain_scale = compared(name, side, target)
    symbol, finite = SYMBOLS[name], exact.abs() < 3.4e38
    for x, error, of in ((fast, symbol.fast.error, scale), (plain, symbol.fast.exact, plain_scale)):
        # an exact form that overflows on the way gives 0, or infinity
        checked = finite & plain.isfinite() & (of < 3.4e38) & (plain != 0)
        off = ((x.double() - exact).abs() - LEAST).clamp(min=0) / of.clamp(min=2.0**-149)
        off = torch.where(checked, off, 0)
        assert checked.sum() > 1000
        worst = off.argmax()
        found = f"2^{off[worst].log2():.2f}, stated 2^{torch.tensor(error).log2():.2f}"
        assert off[worst] <= error, f"{found}, at {[v[worst].item() for v in given]}"


@pytest.mark.parametrize("name, side, target", [case for case in CASES if case[1] is None])
def test_special_values_are_those_of_the_exact_form(name, side, target):
    given, fast, plain, exact, scale, _ = compared(name, side, target)
    assert torch.equal(fast.isnan(), plain.isnan()), given[-1][fast.isnan() != plain.isnan()]
    margin = 1 - 4 * SYMBOLS[name].fast.error  # within which it may overflow, or not
    infinite = plain.isinf() & ~(exact.abs() * margin < 3.4028e38)
    assert torch.equal(fast[infinite], plain[infinite])
    assert not fast[plain.isfinite() & (exact.abs() < 3.4028e38 * margin)].isinf().any()
    zero = (fast == 0) & (exact == 0)
    assert torch.equal(fast[zero].signbit(), plain[zero].signbit())
