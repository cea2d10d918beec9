"""torch's own list of ops, op_db, against the op table: each op that the table names, in a function of its
own, fused alone.

Here a few samples of each; with --long all samples, torch's longer lists, and all dtypes. Run with -s for the
counts.
"""

import itertools

import pytest
import torch

from kit.opinfo import extremal, named, op_db, programs, row_of, rows, title, transposed
from kit.opsweep import Tally, single_nodes, sweep

DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.int8,
    torch.uint8, torch.int16, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
FLOATING = [t for t in DTYPES if t.is_floating_point]
#: Samples of an op in the short form, by target and dtype; "cuda" is as "cpu". Of float32 all ops are swept
#: there; of the other dtypes every third one, another third for each dtype.
SHORT = {
    "cpu": {torch.float32: 1, torch.bfloat16: 1, torch.int32: 1, torch.complex64: 1},
    "cpu-fibers": {torch.float16: 1},
}
BRIEF = {"cpu": {torch.float32: 1}, "cpu-fibers": {torch.float16: 1}}
BRIEFER = {"cpu": {torch.float32: 1}, "cpu-fibers": {}}
PARTS = 8  # of the ops, which run side by side
RANDOM = {"nn.functional.dropout", "rand_like", "randn_like"}  # other numbers than eager's, see test_random
TIES = {"topk"}  # of equal elements eager finds any, see test_places
_DECIMALS = "aten::round.decimals is not in the op table"
_WINDOWS = "a padding that reads windows of its operand"
_DIVISION = "a division by unknown integers raises on the CPU where one is 0, which a kernel cannot"
#: Ops that are not fused, or not in some dtypes, and why not. A refusal that is not listed is a failure.
REFUSED = {
    "clone": "a copy alone is left to torch",
    "fill": "a constant alone is left to torch",
    "full_like": "a constant alone is left to torch",
    "ones_like": "a constant alone is left to torch",
    "zeros_like": "a constant alone is left to torch",
    "to": "to its own dtype a tensor is handed on",
    "linalg.norm": "aten::linalg_norm is not in the op table",
    "linalg.norm.subgradients_at_zero": "aten::linalg_norm is not in the op table",
    "norm.nuc": "a norm of matrices",
    **{
        f"nn.functional.adaptive_{kind}_pool{count}d": "samples are of sizes that do not divide, or of views"
        for kind in ("avg", "max")
        for count in (1, 2, 3)
    },
    "nn.functional.prelu": "aten::prelu is not in the op table; only what it is made of",
    "nextafter": "of 16-bit numbers: the next one is not that of float",
    "nn.functional.pad.circular": _WINDOWS,
    "nn.functional.pad.reflect": _WINDOWS,
    "nn.functional.pad.replicate": _WINDOWS,
    "nn.functional.pad.replicate_negative": _WINDOWS,
    "round.decimals_0": _DECIMALS,
    "round.decimals_3": _DECIMALS,
    "round.decimals_neg_3": _DECIMALS,
    "div.floor_rounding": _DIVISION,
    "div.trunc_rounding": _DIVISION,
    "floor_divide": _DIVISION,
    "fmod": _DIVISION,
    "remainder": _DIVISION,
    "nn.functional.max_pool1d": "the first samples ask for places, which it has from windows along two dims",
    "native_dropout_backward": "of integers: its result is a float in eager",
}


def of(dtypes, short):
    """Runs a test for each of the dtypes: a few samples of all ops, as `short` has it, or with --long all of
    them, by parts of the ops."""
    parameters = [
        pytest.param(dtype, None, part, id=f"{dtype}-{part}"[6:], marks=pytest.mark.long)
        for dtype in dtypes
        for part in range(PARTS)
    ]
    for dtype in dtypes:
        counts = {target: of_dtype[dtype] for target, of_dtype in short.items() if dtype in of_dtype}
        if counts:
            parameters.append(pytest.param(dtype, counts, None, id=str(dtype)[6:]))
    return pytest.mark.parametrize("dtype, counts, part", parameters)


@pytest.fixture
def count(request, target, counts):
    """How many samples of an op; None for all."""
    if counts is None:
        return None
    if request.config.getoption("--long"):
        pytest.skip("the parts have these samples, too")
    here = "cpu" if target == "cuda" else target
    return counts[here] if here in counts else pytest.skip("runs with --long")


@pytest.fixture
def ops(request, part):
    """The ops of a part, or those of the short form."""
    if part is not None:
        return named()[part::PARTS]
    dtype = request.getfixturevalue("dtype")
    return named() if dtype == torch.float32 else named()[DTYPES.index(dtype) % 3 :: 3]


def swept(ops, place, dtype, count, training=False, limits=False, **options):
    """(op, program) of `ops` for a dtype, but for what crashes torch alone."""
    for info in ops:
        supported = info.supported_backward_dtypes if training else info.supported_dtypes
        if title(info) in RANDOM | TIES or dtype not in supported(place):
            continue
        if options.get("inplace") and info.inplace_variant is None:
            continue
        for program in programs(info, dtype, place, count, training=training, **options):
            if training and "batch_norm" in info.name and not program.arguments[0].numel():
                continue  # TorchScript's own backward of it reads a tensor that is not defined
            if limits and "eps=-" in program.source:
                continue  # 1 / sqrt(x - eps): of a rounding of 0 it is infinite, NaN or large
            yield title(info), extremal(info, program) if limits else program


def check(tally, what):
    print(f"\n{what}: {tally}")
    for reason, count in tally.reasons.most_common(8):
        print(f"    {count} x {reason}")
    assert tally.ran
    assert not tally.wrong, f"{len(tally.wrong)} of {tally}:\n" + "\n".join(tally.wrong[:20])


def swept_alone(programs, what, **options):
    """Sweeps programs, each in a group of one node."""
    tally = Tally()
    with single_nodes():
        sweep(programs, tally, **options)
    check(tally, what)
    return tally


@of(DTYPES, SHORT)
def test_an_op_gives_what_eager_gives(place, target, dtype, count, ops):
    programs = swept(ops, place, dtype, count)
    if count is None:
        programs = itertools.chain(programs, swept(ops, place, dtype, None, reference=True))
    tally = swept_alone(programs, f"{dtype} on {target}")
    taken = {title(i) for i in ops if str(dtype)[6:] in row_of(i).dtypes}
    never = {op for op in tally.ran if op in taken and not tally.fused[op]}
    assert never <= REFUSED.keys(), f"never fused: {sorted(never - REFUSED.keys())}"


@of(FLOATING, BRIEF)
def test_gradients(place, target, dtype, count, ops):
    programs = swept(ops, place, dtype, count, training=True)
    swept_alone(programs, f"{dtype} on {target} with gradients", gradients=True, roundings=8)


@of(DTYPES, BRIEFER)
def test_ops_in_place(place, target, dtype, count, ops):
    swept_alone(swept(ops, place, dtype, count, inplace=True), f"{dtype} on {target} in place")


@pytest.mark.parametrize("trained", [False, True])
@of([torch.bfloat16, torch.float16], {"cpu": {torch.bfloat16: 1}})
def test_autocast(place, target, dtype, count, ops, trained):
    """Operators whose operands autocast casts, also where it does so in the ops that they are made of."""
    programs = swept(ops, place, dtype, count, training=trained)
    with torch.autocast(torch.device(place).type, torch.bfloat16):
        what = f"{dtype} on {target} under autocast"
        swept_alone(programs, what, gradients=trained, roundings=8 if trained else 1)


@of(FLOATING, BRIEFER)
def test_limits_infinities_and_nan(place, target, dtype, count, ops):
    swept_alone(swept(ops, place, dtype, count, limits=True), f"{dtype} on {target}, limits")


@of(DTYPES, BRIEFER)
def test_other_layouts(place, target, dtype, count, ops):
    programs = ((op, transposed(program)) for op, program in swept(ops, place, dtype, count))
    swept_alone(programs, f"{dtype} on {target}, transposed")


@pytest.mark.parametrize("part", range(PARTS))
def test_without_guards_a_group_serves_other_dtypes_and_numbers(request, place, target, ops, part):
    everything = request.config.getoption("--long")
    if target == "cpu-fibers" and not everything:
        pytest.skip("runs with --long")
    tally = Tally()
    with single_nodes(guards=False):
        dtypes, count = (DTYPES, None) if everything else ((torch.float32, torch.int64), 1)
        pairs = [pair for dtype in dtypes for pair in swept(ops, place, dtype, count, dynamic=True)]
        sweep(sorted(pairs, key=lambda pair: pair[0]), tally, shared=True)
    check(tally, f"part {part} of {PARTS} on {target} without guards")


_OPERATOR = "the name of an operator: test_op_rows"
_GRADIENT = "the gradient of an op of the list: test_gradients here, test_op_rows"
_INNER = "what torch makes of an op of the list: test_op_rows, and the tests of its family"
#: Rows of which op_db has no entry, and what tests them.
UNLISTED = {
    **{f"aten::__{name}__": _OPERATOR for name in ("and", "or", "xor", "lshift", "rshift")},
    **{
        f"aten::{name}_backward": _GRADIENT
        for name in """
            _batch_norm_impl_index _fused_rms_norm elu gelu hardshrink hardsigmoid hardswish hardtanh
            leaky_relu log_sigmoid logit mish native_batch_norm native_group_norm native_layer_norm select
            sigmoid silu slice softplus softshrink tanh threshold
        """.split()
    },
    "aten::_log_softmax_backward_data": _GRADIENT,
    "aten::_autocast_to_full_precision": "made by autocast: test_torch_features",
    "aten::_autocast_to_reduced_precision": "made by autocast: test_torch_features",
    "aten::_batch_norm_impl_index": _INNER,
    "aten::_fused_rms_norm": _INNER,
    "aten::_grad_sum_to_size": _INNER,
    "aten::_log_softmax": _INNER,
    "aten::_native_batch_norm_legit_functional": _INNER,
    "aten::_native_batch_norm_legit_no_training": _INNER,
    "aten::_softmax": _INNER,
    "aten::_to_copy": _INNER,
    "aten::native_dropout": "random: test_dropout",
    "aten::concat": "another name of cat",
    "tsfuser::view_as_dtype": "aten::view with a dtype: test_compile_left_to_python",
    "aten::special_logsumexp": "another name of logsumexp",
    "aten::swapaxes": "another name of transpose",
    "aten::swapdims": "another name of transpose",
    "aten::type_as": "another form of to",
    "tsfuser::as_written": "made of ops in place: test_in_place_dtypes",
    "prim::add_optional": _INNER,
    "tsfuser::group_norm_backward": "made by autodiff: test_differentiable_norms",
    "tsfuser::instance_norm_backward": "made by autodiff: test_differentiable_norms",
    "tsfuser::rms_norm_backward": "made by autodiff: test_differentiable_norms",
    "tsfuser::in_format_of": "made by joint graphs: test_joint_norms",
    "tsfuser::index_backward": "made by autodiff: test_index_gradients",
    **{
        f"aten::{name}": "losses: test_class_losses"
        for name in "cross_entropy_loss nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd".split()
    },
    "aten::index": "made of `x[i]`: test_indexing",
    "tsfuser::filled": "made of writes to parts: test_number_writes",
    "tsfuser::relu_backward": "made of relu's gradient: test_relu_mask",
    "tsfuser::kept_result": "made from the saved tensors of a batch norm: test_norm_results",
    "tsfuser::batch_norm_result": "made from the saved tensors of a batch norm: test_norm_results",
    "tsfuser::rows": "made of the gradient of linear: test_special_gradients",
    "tsfuser::additive_mask": "made of masks that attentions share: test_shared_masks",
    "tsfuser::packed": "made of operands of matrix products: test_matmul_operands",
    "tsfuser::with_room": "made of operands of matrix products: test_operand_room",
    "tsfuser::ordered": "made of `contiguous` where it copies: test_copied_reshapes",
    "tsfuser::reshaped": "made of reshapes that copy: test_copied_reshapes",
    "tsfuser::rounded": "made in regions of thunder: test_thunder_narrow",
    "tsfuser::unrounded": "made in regions of thunder: test_thunder_narrow",
    "tsfuser::nll_loss_backward": "made of gradients of losses: test_compile_class_losses",
    "tsfuser::gather_backward": "made of gradients of gather: test_compile_lookups",
    "tsfuser::extreme_backward": "made of gradients of max and min along a dim: test_places",
    "tsfuser::batch_norm_backward": "made of gradients of batch norms in joint graphs: test_joint_rules",
    "tsfuser::seeded_dropout": "made of dropouts of torch.compile: test_compile_dropout",
    "tsfuser::dropout_seed": "made of dropouts in training: test_dropout_seeds",
    "tsfuser::dropout_mask": "made of dropouts in training: test_dropout_seeds",
    "tsfuser::sums_at": "made of sums at few places: test_compile_few_sums",
    "tsfuser::sums_by_place": "made of sums in scripted programs: test_scripted_sums",
    "tsfuser::add_at": "made of sums at places that an index names: test_compile_added_at",
    "tsfuser::store": "made of copies at the end of compiled graphs: test_compile_in_place",
    **dict.fromkeys(
        [
            "aten::max_pool2d_with_indices",
            "aten::max_pool3d_with_indices",
            "aten::avg_pool2d_backward",
            "aten::avg_pool3d_backward",
            "tsfuser::max_pool",
            "tsfuser::max_pool_backward",
        ],
        "made of poolings and their gradients: test_pooling",
    ),
    **dict.fromkeys(
        [
            "aten::_adaptive_avg_pool2d",
            "aten::_adaptive_avg_pool3d",
            "aten::_adaptive_avg_pool2d_backward",
            "aten::_adaptive_avg_pool3d_backward",
        ],
        "made of poolings to a size and their gradients: test_adaptive_pooling",
    ),
    "tsfuser::laid_out": "the layout of gradients: test_gradient_layout",
}


def test_what_torch_does_not_list():
    listed = {row_of(info).name for info in op_db() if row_of(info)}
    unlisted = {row.name for row in rows().values()} - listed
    newer = {"aten::native_group_norm"}  # which torch 2.11 does not list
    assert unlisted - UNLISTED.keys() - newer == set()
    assert listed & UNLISTED.keys() == set()
