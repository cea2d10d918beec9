"""What graphs look like after fusion: which nodes are in which group, seen from a scripted function."""

import pytest
import torch

import tsfuser
from kit.support import all_graphs, fuse, groups, kinds, no_fallback, script

pytestmark = pytest.mark.graphs


def chain(x, y):
    return ((x + y) * 2.0).relu()


@pytest.fixture
def xy(device):
    return torch.randn(5, 7, device=device), torch.randn(5, 7, device=device)


def test_a_chain_is_one_group_behind_a_guard(xy):
    scripted = fuse(chain, *xy)
    (group,) = groups(scripted)
    assert kinds(group) == ["aten::add", "aten::mul", "aten::relu"]
    text = str(scripted.graph_for(*xy))
    assert "prim::CudaFusionGuard" in text and "fallback_function" in text


def test_nothing_is_fused_when_off(xy):
    from kit.support import fresh

    scripted = fresh(chain)
    for _ in range(4):
        scripted(*xy)
    assert groups(scripted) == []


def test_nodes_on_both_sides_of_an_unfused_op_are_two_groups(device):
    def program(x):
        y = (x + 1.0).relu()
        z = torch.sort(y, 0)[0]
        return (z * 2.0).tanh()

    scripted = fuse(program, torch.randn(4, 6, device=device))
    assert sorted(map(kinds, groups(scripted))) == [["aten::add", "aten::relu"], ["aten::mul", "aten::tanh"]]


def test_siblings_are_one_group_only_in_horizontal_mode(device):
    def program(x, s):
        return x + s, x * s

    x, s = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device)
    assert len(groups(fuse(program, x, s))) == 1
    before = torch._C._jit_set_nvfuser_horizontal_mode(False)
    try:
        assert groups(fuse(program, x, s)) == []
    finally:
        torch._C._jit_set_nvfuser_horizontal_mode(before)


def test_a_single_node_is_a_group_only_in_single_node_mode(device):
    def program(x):
        return x.tanh()

    x = torch.randn(4, 6, device=device)
    assert groups(fuse(program, x)) == []
    before = torch._C._jit_set_nvfuser_single_node_mode(True)
    try:
        assert kinds(*groups(fuse(program, x))) == ["aten::tanh"]
    finally:
        torch._C._jit_set_nvfuser_single_node_mode(before)


def test_skipped_kinds_stay_outside(xy):
    def program(x, y):
        return (x * y + 1.0).relu()

    torch._C._jit_set_nvfuser_skip_node_kind("aten::mul", True)
    try:
        assert [kinds(group) for group in groups(fuse(program, *xy))] == [["aten::add", "aten::relu"]]
    finally:
        torch._C._jit_set_nvfuser_skip_node_kind("aten::mul", True)


def test_groups_in_branches_and_loops(device):
    def program(x, flag: bool, n: int):
        if flag:
            x = (x + 1.0).relu()
        for _ in range(n):
            x = (x * 0.5).tanh()
        return x

    x = torch.randn(4, 6, device=device)
    scripted = fuse(program, x, True, 2)
    assert len(groups(scripted)) >= 2
    with no_fallback():
        torch.testing.assert_close(scripted(x, True, 3), program(x, True, 3))
        torch.testing.assert_close(scripted(x, False, 1), program(x, False, 1))


def test_an_in_place_op_on_a_fresh_tensor_joins_the_group(device):
    def program(x):
        y = x * 2.0
        y += 1.0
        return y.relu_()

    x = torch.randn(4, 6, device=device)
    scripted = fuse(program, x)
    assert kinds(*groups(scripted)) == ["aten::mul", "aten::add", "aten::relu"]
    assert torch.equal(scripted(x), program(x))


def test_an_in_place_op_with_a_tensor_that_nothing_else_reads_joins_the_group(device):
    def program(x, w):
        y = x * 2.0
        y.add_(w)
        y.pow_(w).clamp_(-2, 2)
        return y

    x, w = torch.rand(4, 6, device=device), torch.rand(4, 6, device=device)
    scripted = fuse(program, x, w)
    assert kinds(*groups(scripted)) == ["aten::mul", "aten::add", "aten::pow", "aten::clamp"]
    torch.testing.assert_close(scripted(x, w), program(x, w))


@pytest.mark.parametrize("name", ["add_", "gt_"])
def test_an_in_place_op_keeps_the_dtype_of_its_target(device, name):
    """`y + w` would be of float64, `y > w` of bool."""
    source = f"def program(x, w):\n    y = x * 2.0\n    y.{name}(w)\n    return y, y * w\n"
    x, w = torch.rand(4, 6, device=device), torch.rand(4, 6, device=device, dtype=torch.float64)
    scripted, space = fuse(script(source), x, w), {}
    exec(source, space)
    for mine, plain in zip(scripted(x, w), space["program"](x, w)):
        assert mine.dtype == plain.dtype
        torch.testing.assert_close(mine, plain)


@pytest.mark.parametrize("name", ["pow_", "atan2_", "copysign_"])
@pytest.mark.parametrize("guarded", [True, False])
def test_an_in_place_op_keeps_the_dtype_of_a_later_call(device, name, guarded):
    """Its functional form, made for operands of one dtype, promotes others."""
    source = f"def program(x, w):\n    y = x * 2.0\n    y.{name}(w)\n    return y.relu() * 2.0\n"
    x, w = torch.rand(2, 4, 6, device=device)
    scripted, space = fuse(script(source), x, w), {}
    exec(source, space)
    before = torch._C._jit_set_nvfuser_guard_mode(guarded)
    try:
        for left, right in ((x, w.double()), (x.double(), w), (x, w)):
            for _ in range(3):
                mine, plain = scripted(left, right), space["program"](left, right)
                assert mine.dtype == plain.dtype
                torch.testing.assert_close(mine, plain)
    finally:
        torch._C._jit_set_nvfuser_guard_mode(before)


def test_an_in_place_op_on_an_input_keeps_its_effect(device):
    def program(x):
        x += 1.0
        return (x * 2.0).relu()

    x = torch.randn(4, 6, device=device)
    scripted = fuse(program, x.clone())
    mine, plain = x.clone(), x.clone()
    assert torch.equal(scripted(mine), program(plain)) and torch.equal(mine, plain)


def test_identical_graphs_of_two_functions_share_their_plans(device):
    def program(x):
        return (x * 3.5).sigmoid()

    x = torch.randn(4, 6, device=device)
    first = fuse(program, x)
    built = tsfuser.stats()["plans_built"]
    second = fuse(program, x)
    assert tsfuser.stats()["plans_built"] == built
    assert groups(first)[0].i("cache_id") == groups(second)[0].i("cache_id")


def test_another_rank_fails_the_guard_and_is_fused_in_the_fallback(device):
    def program(x, y):
        return ((x + y) * 2.0).relu()

    x, y = torch.randn(4, 6, device=device), torch.randn(4, 6, device=device)
    scripted = fuse(program, x, y)
    with tsfuser.fuser():
        a, b = torch.randn(2, 3, 4, device=device), torch.randn(2, 3, 4, device=device)
        launched = []
        for _ in range(4):
            before = tsfuser.stats()["launches"]
            assert torch.equal(scripted(a, b), program(a, b))
            launched.append(tsfuser.stats()["launches"] - before)
    assert launched[0] == 0 and launched[-1] == 1
    assert torch.equal(scripted(x, y), program(x, y))


def test_strict_fusion_accepts_our_groups(device):
    def program(x):
        with torch.jit.strict_fusion():
            return (x + 1.0).relu()

    scripted = fuse(program, torch.randn(4, 6, device=device))
    assert len(groups(scripted)) == 1 and len(all_graphs(scripted)) == 1
