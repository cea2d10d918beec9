"""Derivatives that have no derivative in torch, in forms that have one, for second derivatives."""

from __future__ import annotations


def silu_backward(grad_output, self):
    slope = self.sigmoid()
    return grad_output * (slope * (self * (1 - slope) + 1))


def mish_backward(grad_output, self):
    bent = self.softplus().tanh()
    return grad_output * (bent + self * ((1 - bent * bent) * self.sigmoid()))


FORMS = {"aten::silu_backward": silu_backward, "aten::mish_backward": mish_backward}
#: Those of which there is no such form here.
WITHOUT = frozenset(f"aten::{name}_backward" for name in ("native_group_norm", "hardsigmoid", "logit"))
