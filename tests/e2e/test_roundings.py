"""The bounds of the random tests: what cancels is allowed the roundings of its terms, and not many times as
much."""

import pytest
import torch

from kit.random_compare import compare, expectation
from kit.random_ops import Statement
from kit.random_world import Input, Program

pytestmark = pytest.mark.optimized

#: Terms whose sum is 0 but for roundings.
TERMS = (
    "torch.layer_norm({0}, [{0}.size(-1)], eps=0.25)", "torch.group_norm({0}, 1, eps=0.25)",
    "torch.batch_norm({0}.t(), None, None, None, None, True, 0.1, 0.25, False).t()",
    "(torch.sigmoid({0}) - torch.sigmoid({0}).mean(-1, keepdim=True))",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduced", ["sum()", "mean()", "sum(-1)"])
@pytest.mark.parametrize("terms", TERMS)
def test_a_sum_that_cancels_is_allowed_the_roundings_of_its_terms(terms, reduced, dtype):
    x = Input("x", ("a", "b"), dtype, "dense", 7)
    made = (
        Statement(terms, ("x",)),
        Statement(f"{{0}}.{reduced}", ("v0",)),
        Statement(f"{{0}}.abs().{reduced}", ("v0",)),
    )
    statements = tuple((f"v{k}", st) for k, st in enumerate(made))
    expected = expectation(Program((x,), statements, ("v1", "v2"), ({"a": 4, "b": 16},)), 0, "cpu")
    found = {name: eager for name, (eager, _, _) in expected.items()}
    exact, rounding = expected["result 0"][1], torch.finfo(dtype).eps * expected["result 1"][1].max()
    assert not compare(found | {"result 0": (exact + 0.5 * rounding).to(dtype)}, expected)
    assert "differ" in compare(found | {"result 0": (exact + 64 * rounding).to(dtype)}, expected)
