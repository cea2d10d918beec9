"""Calls of scripted functions that joint graphs differentiate: operands, and whether one of ours runs.

Example, with the fixture `joint_graphs`: `assert is_packed(scripted, *leaves((3, 4), (4,)))`.
"""

import torch

from tsfuser.joint.packing import PACKED


def is_packed(scripted, *given):
    """Whether the call runs one of our differentiable graphs, as `graph_for` shows."""
    graph = scripted.graph_for(*given)
    return any(node.hasAttribute("joint") for node in graph.findAllNodes(PACKED, True))


def leaves(*sizes, device="cpu", dtype=torch.float64, least=0.0):
    """Random tensors that require gradients, of elements in [least, least + 1)."""
    generator = torch.Generator().manual_seed(3)
    made = (torch.rand(size, generator=generator, dtype=torch.float64) + least for size in sizes)
    return [t.to(device, dtype).requires_grad_() for t in made]
