"""How near a fused result must be to eager's, for tests with programs that nobody has looked at.

In: a result, eager's, and the same in double. Out: None, or what is wrong as text. Both are held against the
double one: what is fused may be off as far as eager is, and by roundings that are counted. Example:

    difference(fused, eager, exact, steps=3)
"""

import torch

from kit.support import EPSILON, ULPS, relevant_strides, worst


def difference(actual, eager, exact, steps, roundings=1, scale=1.0):
    """Integers, bools, dtype, shape, strides, NaN and infinities are equal; numbers are as near to `exact` as
    twice eager's, plus `steps` operations in the register's dtype on numbers of at least `scale`, plus
    `roundings` to the result's own dtype. Of a complex number this holds for each part; it is as large as
    both together, but for an infinity."""
    said = [(str(t.dtype)[6:], tuple(t.shape), t.device.type) for t in (actual, eager)]
    if said[0] != said[1]:
        return f"is {said[0]}, eager {said[1]}"
    if actual.numel() and relevant_strides(actual) != relevant_strides(eager):
        return f"strides {actual.stride()}, eager {eager.stride()} of {tuple(actual.shape)}"
    if eager.dtype not in EPSILON:
        return None if torch.equal(actual, eager) else worst(actual != eager, actual, eager)
    wide = torch.complex128 if eager.is_complex() else torch.float64
    rounded = exact.to(eager.dtype)  # of some special values eager's vector code is not sure itself
    mine, plain, exact, rounded = (t.detach().to(wide) for t in (actual, eager, exact, rounded))
    size = exact.abs()
    if eager.is_complex():
        parts = [torch.view_as_real(t.resolve_conj()) for t in (mine, plain, exact, rounded)]
        mine, plain, exact, rounded = parts
        size = torch.where(torch.isfinite(size)[..., None], size[..., None], exact.abs())
    same = (mine == plain) | (torch.isnan(mine) & torch.isnan(plain)) | (mine == rounded)
    own, register = EPSILON[eager.dtype], min(EPSILON[eager.dtype], EPSILON[torch.float32])
    size = size.clamp(min=scale)
    off = torch.where(torch.isfinite(plain), (plain - exact).abs(), 0)  # eager may overflow on the way
    allowed = register * ULPS * steps * size + own * roundings * size + 2 * off
    near = torch.isfinite(exact) & ((mine - exact).abs() <= allowed)
    wrong = ~(same | near)
    wrong = wrong.any(-1) if eager.is_complex() else wrong
    return worst(wrong, actual, eager) if bool(wrong.any()) else None
