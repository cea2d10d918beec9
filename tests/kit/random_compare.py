"""What a call of a random program should give, and whether an outcome is that.

In: a Program and the number of a call. Out: eager's tensors with the exact ones and how far off a result
may be, which is measured: by eager's own error, and by running the program in double with noise as large as
roundings are. Example:

    expected = expectation(program, 0, "cpu")
    wrong = compare(outcome, expected)             # "" where nothing is
"""

import contextlib
import math
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kit.random_outcome import RAISED, REFUSED, saved_copies, wide_of
from kit.random_runs import epsilons, noisy, refusals
from kit.random_world import run_plain
from kit.support import EPSILON

TRIALS = 3  # runs with noise


def expectation(program, call, device, trials=TRIALS):
    """Name -> (eager's tensor, the exact one, how far off it may be: None for not at all). With fewer
    `trials` this is less, and takes less time; special values take them all. Where the backward may raise,
    since a saved value was written, there are `RAISED` and what its gradients would be. It may if eager's
    does, or would if casts made no copies: what is saved may be the operand of a cast. Raises ValueError
    where eager's results are not finite, and the program has no special values."""
    plain, found = run_plain(program, call, device), {}
    if any(name.startswith(REFUSED) for name in plain):
        true = torch.tensor(True)
        return dict.fromkeys((*plain, *refusals(program, call, device)), (true, true, None))
    if "prod(" in program.source() and _has_large_products(program, call, device):
        raise ValueError("a product may overflow on the way, or not, by its order")
    if RAISED in plain or (program.written and RAISED in noisy(program, call, saving=contextlib.nullcontext)):
        found[RAISED] = torch.tensor(True), torch.tensor(True), None
        with saved_copies():
            plain = run_plain(program, call, device)
    roundings, still = epsilons(program, call)
    exact = noisy(program, call)
    special = {"special", "limits"} & set(program.features)
    trials = TRIALS if special else trials
    shaken = [noisy(program, call, roundings, seed) for seed in range(1, trials + 1)]
    for name, eager in plain.items():
        if name not in exact:
            raise ValueError(f"{name} has no gradient in double")
        wanted = exact[name]
        if not eager.is_floating_point() and not eager.is_complex():
            others = [s[name] for s in shaken] if special else []
            found[name] = eager, wanted, _any_where_they_differ(others, wanted)
            continue
        if special:
            others = [eager.cpu().double(), *(s[name] for s in shaken)]
            allowed = _apart(others, wanted, _least(roundings, eager.dtype))
            if "limits" in special and eager.dtype == torch.float64:
                allowed = _where_doubles_suffice(allowed, wanted)
            found[name] = eager, wanted, allowed
            continue
        if not bool(torch.isfinite(eager).all() and torch.isfinite(wanted).all()):
            raise ValueError(f"{name} of eager is not finite")
        kind, number = name.split()[:2]
        names = {"result": program.results, "input": [i.name for i in program.inputs]}.get(kind, ())
        if names and names[int(number)] in still:
            found[name] = eager, wanted, None
            continue
        others = eager.cpu().to(wide_of(eager)), *(s[name] for s in shaken)
        off = max(_largest(other - wanted) for other in others)
        if math.isnan(sum(_largest(other) for other in others)):
            raise ValueError(f"{name} with noise is not a number")
        found[name] = eager, wanted, 4 * off + last_roundings(eager.dtype, wanted)
    return found


class _Products(TorchDispatchMode):
    """Whether, of a product of many numbers, some may overflow: with a 0 among the others it is NaN then, and
    0 in another order."""

    may_overflow = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.prod and args[0].is_floating_point():
            most = torch.finfo(torch.promote_types(args[0].dtype, torch.float32)).max
            large = args[0].double().abs().nan_to_num(1.0, 1.0).clamp(min=1.0).log()
            total = large.sum(*args[1:2]) if len(args) > 1 and isinstance(args[1], int) else large.sum()
            self.may_overflow |= bool((total > math.log(most)).any())
        return func(*args, **(kwargs or {}))


def _has_large_products(program, call, device):
    """Looks at a run of its own: autograd computes other gradients under a mode."""
    with _Products() as products:
        run_plain(program, call, device)
    return products.may_overflow


def _least(roundings, dtype):
    """The largest epsilon that a program has anywhere."""
    return max([EPSILON[dtype], *filter(None, roundings)])


def _apart(others, wanted, epsilon):
    """How far off each element may be, where some are inf or nan: by a multiple of the errors of `others`,
    and by roundings of numbers of ordinary size. Infinite where even the roundings of doubles, or the order
    in which a sum adds, decide what is finite; also where something overflows in eager's dtype that does not
    in
    double: then it may in a group, or not, which keeps more digits of values that it does not store.
    `others`: eager's, and those with noise."""
    offs = torch.stack([(other - wanted).abs() for other in others])
    ordinary = wanted.abs()[wanted.abs() < 100.0]
    scale = float(ordinary.max()) if ordinary.numel() else 0.0
    overflowed = others[0].isfinite() != wanted.isfinite()
    allowed = 16 * offs.amax(0) + 256 * epsilon * (wanted.abs() + scale)
    unsure = torch.stack([_differ_beyond_finite(other, wanted) for other in others[1:]]).any(0)
    return torch.where(unsure | overflowed, torch.inf, allowed)


def _where_doubles_suffice(allowed, wanted):
    """`allowed`, but anything where the exact values, which are doubles, have overflowed. Products and sums
    of numbers near the largest double do so in one order of a sum, and without an FMA, and not in another."""
    return torch.where(wanted.isfinite(), allowed, torch.inf)


def _any_where_they_differ(others, wanted):
    """How far off bools may be: by anything where inf or nan make another one of them, else not at all."""
    unsure = sum((other != wanted for other in others), torch.zeros_like(wanted, dtype=torch.bool))
    return torch.where(unsure, torch.inf, 0.0) if bool(unsure.any()) else None


def _differ_beyond_finite(x, y):
    """Where one is finite and the other is not, or both are not, and differ."""
    return (x.isfinite() != y.isfinite()) | (~x.isfinite() & (x != y) & ~(x.isnan() & y.isnan()))


def _largest(x):
    return float(x.abs().max()) if x.numel() else 0.0


def last_roundings(dtype, wanted):
    """How far off results of `dtype` may be by the last operations on them: one rounding to it, 64 in
    registers."""
    finite = wanted[wanted.isfinite()]
    return (2 * EPSILON[dtype] + 64 * min(EPSILON[dtype], EPSILON[torch.float32])) * _largest(finite)


def all_roundings(program, call, dtype, wanted):
    """How far off a gradient of `dtype` may be that only TorchScript gives, so that eager's error is no
    measure: by one rounding of each statement, and the last ones."""
    roundings, _ = epsilons(program, call)
    finite = wanted[wanted.isfinite()]
    return last_roundings(dtype, wanted) + 2 * sum(filter(None, roundings)) * _largest(finite)


def adds_gradients(program):
    """Whether gradients of several readers of a value may add up. The first one to come decides about the
    strides of the sum, and within TorchScript's differentiable graphs that is another one than in eager."""
    if "branches" in program.features:
        return True
    read = Counter([n for _, st in program.statements for n in st.operands] + list(program.results))
    return max(read.values()) > 1


def gradients_with_free_strides(program, expected):
    """The names of them."""
    return {name for name in expected if name.startswith("gradient")} if adds_gradients(program) else set()


def compare(actual, expected):
    """What is wrong with the outcome of a call; "" for nothing."""
    return next(iter(differences(actual, expected).values()), "")


def differences(actual, expected, free=frozenset()):
    """Name -> what is wrong with it; "" stands for which tensors share memory. A backward that may raise
    does, or gives the gradients of the values before the write. A call that eager rejects raises what eager
    says, of that op or of another one. `free`: names of tensors that may have any strides."""
    if RAISED in expected:
        left_out = "gradient" if RAISED in actual else RAISED
        expected = {name: wanted for name, wanted in expected.items() if not name.startswith(left_out)}
    if raised := [name for name in actual if name.startswith(REFUSED) and name in expected]:
        expected = {name: expected[name] for name in raised}
    found = {name: f"{name} is not there in eager" for name in actual if name not in expected}
    for name, wanted in expected.items():
        what = (
            _difference(name, actual[name], *wanted, name in free) if name in actual else f"{name} is missing"
        )
        if what:
            found[name] = what
    return found or {name: what for name, what in (("", _aliases(actual, expected)),) if what}


def _difference(name, mine, eager, exact, allowed, free):
    """Of one tensor. `free`: it may have other strides."""
    said = [(t.dtype, tuple(t.shape), t.device) for t in (mine, eager)]
    if said[0] != said[1]:
        return f"{name} is {said[0]}, eager {said[1]}"
    strides = [[s for n, s in zip(t.shape, t.stride()) if n > 1] for t in (mine, eager)]
    if mine.numel() and strides[0] != strides[1] and not free:
        return f"{name} of {tuple(mine.shape)} has strides {mine.stride()}, eager {eager.stride()}"
    if allowed is None:
        wrong = mine != eager
    else:
        off = (mine.cpu().to(wide_of(mine)) - exact.to(wide_of(exact))).abs()
        same = (mine == eager) | (mine.isnan() & eager.isnan()) | (mine == exact.to(mine))
        near = (off <= allowed) | (torch.as_tensor(allowed) == torch.inf)
        wrong = ~(near.to(mine.device) | same)
    if not bool(wrong.any()):
        return ""
    where = wrong.flatten().nonzero()[:3, 0].tolist()
    both = [(i, mine.flatten()[i].item(), eager.flatten()[i].item()) for i in where]
    pairs = [f"[{i}] {a!r}, eager {b!r}" for i, a, b in both]
    bound = ""
    if allowed is not None:
        number = torch.as_tensor(allowed).broadcast_to(mine.shape).flatten()[where[0]].item()
        bound = f" (allowed: {number:.3g})"
    return f"{name}: {int(wrong.sum())} of {wrong.numel()} differ{bound}: {'; '.join(pairs)}"


def _aliases(actual, expected):
    """Whether the same tensors share memory."""
    eager = {name: t for name, (t, _, _) in expected.items()}
    shared = [_sharing(found) for found in (actual, eager)]
    return "" if shared[0] == shared[1] else f"share memory: {shared[0]}, in eager: {shared[1]}"


def _sharing(tensors):
    by_place = {}
    for name, t in tensors.items():
        if t.numel() and not name.startswith("gradient"):
            by_place.setdefault(t.untyped_storage().data_ptr(), []).append(name)
    return sorted(names for names in by_place.values() if len(names) > 1)
