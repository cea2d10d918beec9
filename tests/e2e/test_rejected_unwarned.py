"""A call that eager rejects raises, and no warning says before that its result is right."""

import re
import warnings

import pytest
import torch

import tsfuser
from kit.support import assert_matches, fuse

pytestmark = pytest.mark.graphs


def added(x, y):
    return torch.relu(x + y)


def warned(call):
    """The texts of tsfuser's warnings in `call()`, which may raise."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except RuntimeError as error:
            assert re.search("must match the size|dropout probability", str(error)), error
    return [str(w.message) for w in caught if issubclass(w.category, tsfuser.TsfuserWarning)]


def test_sizes_that_do_not_broadcast(device):
    x = torch.rand(6, 4, device=device)
    scripted = fuse(added, x, x)
    for _ in range(2):  # when the call is planned, and when it is known
        assert warned(lambda: scripted(x, x[:, :3])) == []
    assert_matches(scripted(x, x), added(x, x))


def dropped(x, p: float):
    return torch.dropout(x * 2.8203125, p, True)  # which no other test compiles


def test_a_group_that_cannot_be_compiled_is_warned_of_when_its_ops_have_run(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    tsfuser.reset()
    x = torch.rand(6, 4)
    scripted = fuse(dropped, x, 0.5, calls=1)
    with tsfuser.fuser():
        assert warned(lambda: scripted(x, 1.5)) == []
        assert tsfuser.stats()["fallbacks"], "the call has met no group"
        [text] = warned(lambda: scripted(x, 0.5))
        assert warned(lambda: scripted(x, 0.5)) == []
    assert text.startswith("a fusion group (aten::mul, aten::dropout) runs unfused: '/nowhere/c++' is not")
