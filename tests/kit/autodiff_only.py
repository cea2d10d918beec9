"""Tests that hold for scripted training by TorchScript's autodiff only, each with the reason.

`pytest --joint` runs the others with joint graphs (PYTORCH_NVFUSER_ENABLE=joint_graph,typed_joint).
"""

#: By file and test, without parameters; a file alone stands for all its tests.
REASONS: dict[str, str] = {
    "test_check.py::test_a_program_without_a_group_is_not_equal_but_says_why": "its gradient has a group",
    "test_counters.py::test_checks_of_batches_are_ops": "they are, in the graph of a region",
    "test_differentiable_forms.py::test_a_step_is_logged_where_it_changes_a_graph": "there are no such steps",
    "test_differentiable_norms.py::test_a_norm_stays_one_node": "some become others",
    "test_chains.py::test_gradients_of_many_patterns": "each dtype and rank has a graph of its own",
    "test_direct.py::test_loops_over_dims_that_the_call_names": "each choice of dims has a graph of its own",
    "test_direct.py::test_other_ranks_and_dtypes_take_the_fallback_inside": "each dtype has one, too",
    "test_early_convolutions.py::test_what_may_read_statistics_stays_behind_the_norm": (
        "autodiff gets no graph of which ops have moved"
    ),
    "test_explain_networks.py::test_an_op_that_autodiffs_formula_repeats_has_its_line_where_there_is_one": (
        "there are no formulas of autodiff"
    ),
    "test_explain_networks.py::test_ops_that_autodiff_leaves_out_say_why": "other ops are left out",
    "test_explain_networks.py::test_a_part_that_did_not_run_is_said_to": "parts take such states",
    "test_gradient_dtypes.py::test_a_gradient_that_surely_has_its_dtype_is_not_cast": "all dtypes are known",
    "test_gradient_layout.py::test_a_gradient_lies_as_what_it_is_of": "a region has the views, too",
    "test_joint_table.py::test_no_more_is_saved_and_launched": "both would be joint graphs",
    "test_lookup_limits.py::test_training_is_left_to_eager": "they have derivatives",
    "test_lone_ops.py::test_readers_that_wait_for_its_sizes_are_no_company": "they are seen, too",
    "test_lone_ops.py::test_without_autocast_eager_differentiates_it": "joint graphs need no autocast for it",
    "test_recompute.py::test_under_autocast_the_narrow_product_is_kept": "it watches a step for autodiff",
    "test_stored_passes.py::test_no_hit_where_something_differs": (
        "the graph that calls a program of regions is the same for all, and calls the one at hand"
    ),
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
