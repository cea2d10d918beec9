"""Joins of lists that a program appends to are in groups (csrc_stubs/torchscript/grown_lists.cpp), and so is
code behind a check that raises (checked_branches.cpp)."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import tsfuser
from kit.support import fresh, groups

pytestmark = [pytest.mark.usefixtures("forgotten", "fused_or_error"), pytest.mark.graphs]

CALLS = 4


def dense(x: Tensor, k: int) -> Tensor:
    features = [x * 2]
    features.append(torch.tanh(torch.cat(features, 1)) * 0.5)
    features.append(torch.sin(torch.cat(features, 1)) + 1)
    return torch.cat(features, 1).sigmoid()


def stacked(x: Tensor, k: int) -> Tensor:
    rows: list[Tensor] = []
    rows.append(x.sin())
    rows.append(x * 3)
    y = torch.stack(rows, 1) * 2
    rows.append(x.cos())
    return torch.cat([y, torch.stack(rows, 1) + 1], 1)


def read_in_branches(x: Tensor, k: int) -> Tensor:
    features = [x]
    features.append(x * 2)
    if k > 1:
        y = torch.cat(features, 1) * 2
    else:
        y = torch.cat(features, 1) + 1
    features.append(y.tanh())
    trained = False
    for feature in features:
        trained = trained or feature.requires_grad
    z = torch.cat(features, 1) * (2 if trained else 3)
    return z + len(features) + features[-1].size(0)


def behind_checks(x: Tensor, k: int) -> Tensor:
    y = x * 2
    if k < 0:
        raise ValueError("negative")
    elif x.dim() != 2:
        raise ValueError("of another rank")
    else:
        y = y.relu()
        if k > 100:
            raise ValueError("large")
        z = y.exp()
    return z * y + x


def written_later(x: Tensor, k: int) -> Tensor:
    a = x * 2
    features = [a]
    features.append(x.sin())
    y = torch.cat(features, 1) * 2
    a.add_(1)
    features.append(a * 3)
    return torch.cat([torch.cat(features, 1), y], 1).tanh()


def appended_in_a_branch(x: Tensor, k: int) -> Tensor:
    features = [x]
    if k > 1:
        features.append(x.sin())
    features.append(x * 2)
    return torch.cat(features, 1).tanh() * 2


def handed_out(x: Tensor, k: int) -> tuple[Tensor, list[Tensor]]:
    features = [x * 2]
    y = torch.cat(features, 1).tanh() * 2
    features.append(y)
    return torch.cat(features, 1).exp() * 2, features


def shortened(x: Tensor, k: int) -> Tensor:
    features = [x, x * 2]
    features.append(x.sin())
    last = features.pop(0)
    return torch.cat(features, 1).tanh() * 2 + last[:, :1]


def ran(function, x, k, trained):
    x = x.clone().requires_grad_(trained)
    out = function(x, k)
    out = torch.cat([out[0], *out[1]], 1) if isinstance(out, tuple) else out
    if not trained:
        return [out]
    out.sum().backward()
    return [out.detach(), x.grad]


WITH_JOINS = [dense, stacked, read_in_branches, written_later]
LEFT = [appended_in_a_branch, handed_out, shortened]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("function", [*WITH_JOINS, behind_checks, *LEFT])
def test_results_are_as_in_eager_mode(device, function, trained):
    torch.manual_seed(0)
    cases = [(torch.randn(3, 5, device=device), 2, trained), (torch.randn(4, 2, device=device), 1, trained)]
    made = fresh(function)
    with tsfuser.fuser():
        found = [ran(made, *case) for case in cases for _ in range(CALLS)]
    expected = [ran(function, *case) for case in cases for _ in range(CALLS)]
    for ours, eager in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-6)


def joined_in_groups(scripted):
    kinds = ("aten::cat", "aten::stack")
    return sum(len(g.g("Subgraph").findAllNodes(kind)) for g in groups(scripted) for kind in kinds)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "function, joins", [(dense, 3), (stacked, 2), (read_in_branches, 2), (written_later, 1)]
)
def test_joins_are_in_groups(function, joins, trained):
    x = torch.randn(3, 5)
    made = fresh(function)
    with tsfuser.fuser():
        for _ in range(CALLS):
            ran(made, x, 2, trained)
    assert joined_in_groups(made) >= joins
    graph = torch.jit.last_executed_optimized_graph()
    assert not graph.findAllNodes("aten::append"), graph


def test_code_behind_checks_is_in_one_group_with_what_is_before():
    made = fresh(behind_checks)
    x = torch.randn(3, 5)
    with tsfuser.fuser():
        for _ in range(CALLS):
            made(x, 2)
        assert len(groups(made)) == 1
        for arguments, message in [((x, -1), "negative"), ((x, 101), "large"), ((x[0], 2), "another rank")]:
            with pytest.raises(torch.jit.Error, match=message):
                made(*arguments)
        torch.testing.assert_close(made(x, 2), behind_checks(x, 2))


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(width)
        self.conv = torch.nn.Conv2d(width, 3, 1)
        self.sparing = False

    def forward(self, features: list[Tensor]) -> Tensor:
        if self.sparing:
            for x in features:
                if x.requires_grad:
                    raise ValueError("not here")
        joined = torch.cat(features, 1)
        return self.conv(F.relu(self.norm(joined)))


class Dense(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(4 + 3 * k) for k in range(3))

    def forward(self, x: Tensor) -> Tensor:
        features = [x * 2]  # x itself might be a running statistic
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


@pytest.mark.parametrize("training", [False, True])
def test_a_dense_block(device, training):
    torch.manual_seed(0)
    eager = Dense().to(device).train(training)
    state = {name: value.clone() for name, value in eager.state_dict().items()}
    made = torch.jit.script(eager)
    x = torch.randn(2, 4, 5, 5, device=device)

    def step(module):
        module.load_state_dict(state)
        leaf = x.clone().requires_grad_(training)
        with torch.set_grad_enabled(training):
            out = module(leaf)
        if not training:
            return [out]
        out.square().sum().backward()
        return [out.detach(), leaf.grad, *(b.clone() for b in module.buffers())]

    with tsfuser.fuser():
        found = [step(made) for _ in range(CALLS)]
        assert joined_in_groups(made) >= (0 if training else 3)
        if training:
            with pytest.raises((ValueError, torch.jit.Error), match="more than 1 value per channel"):
                made(torch.randn(1, 4, 1, 1, device=device))
        assert "asked_item" not in str(tsfuser.explain(made, x))
    for ours in found:
        torch.testing.assert_close(ours, step(eager), rtol=1e-4, atol=1e-5)
