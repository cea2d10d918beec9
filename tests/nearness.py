"""How near a fused result must be to eager's, for tests with programs that nobody has looked at.

In: a result, eager's, and the same in double. Out: None, or what is wrong as text. Both are held against the
double one: what is fused may be off as far as eager is, and by roundings that are counted. Example:

    difference(fused, eager, exact, steps=3)
"""

import torch

EPSILON = {
    torch.float16: 2.0**-10,
    torch.bfloat16: 2.0**-7,
    torch.float32: 2.0**-23,
    torch.float64: 2.0**-52,
    torch.complex64: 2.0**-23,
    torch.complex128: 2.0**-52,
}
ULPS = 8  # an elementary function's error: libm and CUDA give 1 to 4 ulps, on either side


def difference(actual, eager, exact, steps, roundings=1, scale=1.0):
    """Integers, bools, dtype, shape, strides, NaN and infinities are equal; numbers are as near to `exact` as
    twice eager's, plus `steps` operations in the register's dtype on numbers of at least `scale`, plus
    `roundings` to the result's own dtype."""
    said = [(str(t.dtype)[6:], tuple(t.shape), t.device.type) for t in (actual, eager)]
    if said[0] != said[1]:
        return f"is {said[0]}, eager {said[1]}"
    if actual.numel() and _strides(actual) != _strides(eager):
        return f"strides {actual.stride()}, eager {eager.stride()} of {tuple(actual.shape)}"
    if eager.dtype not in EPSILON:
        return None if torch.equal(actual, eager) else _worst(actual != eager, actual, eager)
    wide = torch.complex128 if eager.is_complex() else torch.float64
    mine, plain, exact = (t.detach().to(wide) for t in (actual, eager, exact))
    rounded = exact.to(eager.dtype).to(wide)  # of some special values eager's vector code is not sure itself
    same = (mine == plain) | (torch.isnan(mine) & torch.isnan(plain)) | (mine == rounded)
    own, register = EPSILON[eager.dtype], min(EPSILON[eager.dtype], EPSILON[torch.float32])
    size = exact.abs().clamp(min=scale)
    off = torch.where(torch.isfinite(plain), (plain - exact).abs(), 0)  # eager may overflow on the way
    allowed = register * ULPS * steps * size + own * roundings * size + 2 * off
    near = torch.isfinite(exact) & ((mine - exact).abs() <= allowed)
    wrong = ~(same | near)
    return _worst(wrong, actual, eager) if bool(wrong.any()) else None


def _strides(tensor):
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]


def _worst(wrong, actual, eager):
    where = wrong.flatten().nonzero()[:3, 0].tolist()
    pairs = [f"[{i}] {actual.flatten()[i].item()!r}, eager {eager.flatten()[i].item()!r}" for i in where]
    return f"{int(wrong.sum())} of {wrong.numel()} elements differ: {'; '.join(pairs)}"
