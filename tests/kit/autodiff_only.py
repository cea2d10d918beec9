"""Tests that hold for scripted training by TorchScript's autodiff only, each with the reason.

`pytest --joint` runs the others with joint graphs (PYTORCH_NVFUSER_ENABLE=joint_graph).
"""

#: By file and test, without parameters; a file alone stands for all its tests.
REASONS: dict[str, str] = {
    "test_differentiable_norms.py::test_a_norm_stays_one_node": "some become others",
}


def reason_of(item) -> str | None:
    """Why the test is left out; None where it holds for both."""
    name = getattr(item, "originalname", None) or item.name
    return REASONS.get(item.path.name) or REASONS.get(f"{item.path.name}::{name}")


def by_joint_graphs() -> bool:
    """Whether joint graphs differentiate: forwards and backwards have other ops then than autodiff's."""
    from tsfuser import _C

    on = _C.use_joint_functions(False)
    _C.use_joint_functions(on)
    return on
