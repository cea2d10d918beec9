"""What torch.compile's graphs may hold and a torch._C.Graph may not, and why: Python runs these nodes.

In: the target of an FX node. Out: the sentence that `tsfuser.explain` and the logs show, and that
`tsfuser.stats()["left_to_python"]` counts. Example: `cond` -> "a branch that data decide ...". A node that is
not in the list, and yet cannot be translated, has the reason that translate.py or numbers.py gives.
"""

from __future__ import annotations

from typing import Any

_CONTROL = "control flow that data decide is no op of torch's dispatcher: torch runs it, its parts unfused"
_MUTATES = "an op from outside torch that changes its arguments: torch runs it on copies of them"
_KERNEL = "a kernel of the program's own (Triton, inline assembly): torch launches it"
_ATTENTION = "attention whose scores the program computes by a function: torch runs it"
_PART = "a part of the program that is called as a whole: torch runs it"
_RANDOM = "a part whose random numbers are drawn again in the backward: torch saves the generator's state"
_ORDERED = "an op with effects outside its results, which torch keeps in order by tokens"
_OBJECT = "a method of an object of the program's, which no graph can hold"
_SIZES = "a promise about sizes or layouts, which torch checks"
_STORAGE = "it changes which memory a tensor has"

_WORDS = {
    _CONTROL: "cond while_loop scan associative_scan map map_impl switch cudagraph_conditional",
    _MUTATES: "auto_functionalized auto_functionalized_v2",
    _KERNEL: """triton_kernel_wrapper_functional triton_kernel_wrapper_mutation
        inline_asm_elementwise foreach_map""",
    _ATTENTION: "flex_attention flex_attention_backward",
    _PART: """invoke_subgraph wrap wrap_activation_checkpoint tag_activation_checkpoint wrap_with_autocast
        wrap_with_set_grad_enabled hints_wrapper strict_mode local_map_hop invoke_quant invoke_quant_packed
        invoke_leaf_function run_const_graph out_dtype base_hop flat_apply aoti_call_delegate
        executorch_call_delegate""",
    _RANDOM: """run_and_save_rng_state run_with_rng_state graphsafe_run_with_rng_state
        rngprims::philox_rand""",
    _ORDERED: "with_effects print",
    _OBJECT: "call_torchbind getattr",
    _SIZES: """aten::sym_constrain_range aten::sym_constrain_range_for_size
        aten::_assert_tensor_metadata""",
    _STORAGE: """aten::set_ aten::resize_ aten::resize_as_ inductor::resize_storage_bytes_
        fsdp::copy_""",
}
_SENTENCES = {name: text for text, names in _WORDS.items() for name in names.split()}


def reason_for(target: Any) -> str | None:
    """Why a node that calls `target` is left to Python; None if the list does not know it."""
    its_schema = getattr(target, "_schema", None)
    name = its_schema.name if its_schema is not None else getattr(target, "__name__", str(target))
    return _SENTENCES.get(name)
