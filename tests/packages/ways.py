"""The ways in which programs use a scripted module, as functions of the module and its arguments.

`with_methods` gives a module the methods that some of them call: forces inside of the scripted code, and two
calls side by side. Example:

    energy_and_forces = forces_inside(with_methods(scripted, program), program.inputs(5))
"""

from __future__ import annotations

import torch
from torch import Tensor

METHODS = """
def forces(self, {parameters}, graph: bool):
    energy = self.forward({arguments})
    gradients = torch.autograd.grad([energy.sum()], [{first}], create_graph=graph)
    gradient = gradients[0]
    assert gradient is not None
    return energy, -gradient
"""
FORKED = """
def forked(self, {parameters}):
    first = torch.jit.fork(self.forward, {arguments})
    second = self.forward({arguments})
    return torch.jit.wait(first), second
"""


def with_methods(scripted, program):
    """The module, with `forked` and, if the program has an energy, `forces`."""
    arguments = ", ".join(word.split(":")[0] for word in program.arguments.split(", "))
    words = dict(parameters=program.arguments, arguments=arguments, first=arguments.split(", ")[0])
    if program.forces:
        scripted.define(METHODS.format(**words))
    scripted.define(FORKED.format(**words))
    return scripted


def inference(module, given):
    with torch.no_grad():
        return module(*given)


def with_gradients(module, given):
    """Forces that the module computes itself need gradients."""
    return module(*given)


def forces_outside(module, given):
    energy = module(given[0].requires_grad_(), *given[1:])
    return energy, torch.autograd.grad(energy.sum(), given[0])


def forces_inside(module, given):
    return module.forces(given[0].requires_grad_(), *given[1:], False)


def side_by_side(module, given):
    with torch.no_grad():
        return module.forked(*given)


def training(module, given):
    """Results, and gradients of all parameters and of the first argument, if it is floating-point."""
    if given[0].is_floating_point():
        given[0].requires_grad_()
    out = module(*given)
    return [out, *_gradients(_loss(out), module, given[0])]


def training_on_forces(module, given):
    """The gradients of the parameters go through the forces: a double backward."""
    energy, forces = module.forces(given[0].requires_grad_(), *given[1:], True)
    return [energy, forces, *_gradients(energy.sum() + forces.square().sum(), module)]


def training_on_own_forces(module, given):
    energy, forces = module(*given)
    return [energy, forces, *_gradients(energy.sum() + forces.square().sum(), module)]


def _loss(out):
    """Weights that differ from element to element: the gradient of a plain sum is 0 behind a softmax."""
    if isinstance(out, Tensor):
        weights = torch.arange(out.numel(), dtype=torch.float64, device=out.device) * 7 % 13 - 6
        return (out * weights.reshape(out.shape).to(out.dtype)).mean()
    return sum(_loss(x) for x in out if x is not None and x.is_floating_point())


def _gradients(loss, module, *more):
    """In the order of the parameters; zeros for those that the loss does not depend on."""
    leaves = [p for p in module.parameters() if p.requires_grad]
    leaves += [x for x in more if x.requires_grad]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, found)]
