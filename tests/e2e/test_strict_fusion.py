"""`torch.jit.strict_fusion` accepts views of a group's result, which are made outside of groups, and still
names what is not fused."""

import pytest
import torch

import tsfuser
from kit.support import fresh, fuse, groups

pytestmark = pytest.mark.graphs


def expand(x, z):
    with torch.jit.strict_fusion():
        return (x + 1.0).relu().expand(3, 4, 5)


def expand_as(x, z):
    with torch.jit.strict_fusion():
        return (x + 1.0).relu().expand_as(z)


def view(x, z):
    with torch.jit.strict_fusion():
        return (x + 1.0).relu().view(-1)


def two_views(x, z):
    with torch.jit.strict_fusion():
        return (x + 1.0).relu().t().unsqueeze(0)


def sizes(x, z):
    with torch.jit.strict_fusion():
        y = (x + 1.0).relu().reshape(x.size(1), x.size(0) * 1)
    return y


def beside_the_result(x, z):
    with torch.jit.strict_fusion():
        y = (x + 1.0).relu()
        return y, y.unsqueeze(0), y.expand_as(z)


def read_behind(x, z):
    with torch.jit.strict_fusion():
        y = (x + 1.0).relu().t()
    return torch.mm(x, y)


VIEWS = [expand, expand_as, view, two_views, sizes, beside_the_result, read_behind]


@pytest.mark.parametrize("program", VIEWS, ids=lambda f: f.__name__)
def test_views_of_a_groups_result_are_accepted(device, program):
    x, z = torch.randn(4, 5, device=device), torch.randn(3, 4, 5, device=device)
    scripted = fuse(program, x, z)
    assert len(groups(scripted)) == 1
    for inputs in ((x, z), (torch.randn(4, 5, device=device), z)):
        actual, eager = scripted(*inputs), program(*inputs)
        for a, e in zip(*((y,) if isinstance(y, torch.Tensor) else y for y in (actual, eager))):
            assert torch.equal(a, e) and a.stride() == e.stride()
    if program is beside_the_result:
        assert actual[0].data_ptr() == actual[1].data_ptr() == actual[2].data_ptr()


def of_an_argument(x, z):
    with torch.jit.strict_fusion():
        return (x + 1.0).relu(), z.expand(3, 4, 5)


def an_unfused_op(x, z):
    with torch.jit.strict_fusion():
        return torch.sort((x + 1.0).relu().t(), 0)[0]


def a_sum_in_between(x, z):
    with torch.jit.strict_fusion():
        y = (x + 1.0).relu()
        return y, torch.add(torch.sort(z, 0)[0], 1.0)


@pytest.mark.parametrize(
    "program, named", [(of_an_argument, "expand"), (an_unfused_op, "sort"), (a_sum_in_between, "add")]
)
def test_other_ops_are_named(device, program, named):
    x, z = torch.randn(4, 5, device=device), torch.randn(3, 4, 5, device=device)
    scripted = fresh(program)
    with tsfuser.fuser(), pytest.raises(RuntimeError, match=f"unfused operators(.|\n)*aten::{named}"):
        for _ in range(4):
            scripted(x, z)
