"""Facts of ops without a row, which passes over graphs ask for; and what torch's own passes take ops for.

An op with a row has its facts there (`Row` in table.py), another one has them here, one set a fact. In: an
operator kind. Out: whether the fact holds. Example: `"aten::mm" in FRESH`. What a person is told about such
ops is in unsupported.py.
"""

from __future__ import annotations


def _aten(words: str) -> frozenset[str]:
    return frozenset(f"aten::{word}" for word in words.split())


#: Their results never share memory with a tensor that was there before.
FRESH = _aten("""
    conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d
    linear addmm addmv addbmm baddbmm mm mv bmm matmul cat stack
    constant_pad_nd
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
    upsample_bicubic2d upsample_trilinear3d
    zeros ones empty full rand randn empty_like scaled_dot_product_attention
""") | {"tsfuser::product_of_room"}
#: Besides those in FRESH: the sizes of their results follow from their operands' sizes, and from numbers.
SIZED = _aten("""
    chunk split split_with_sizes unbind unfold detach sort argsort
    alpha_dropout feature_dropout scaled_dot_product_attention einsum outer tril triu
    empty_like rand_like randn_like new_empty new_zeros new_ones new_full arange linspace eye
    upsample_nearest1d upsample_linear1d pixel_shuffle pixel_unshuffle channel_shuffle
    zero_ fill_ copy_ normal_ uniform_ bernoulli_ bernoulli
""")
#: In-place forms that become functional before any dtype is known (`Row.in_place_early`).
IN_PLACE_EARLY = _aten("rrelu_")
#: They may return an operand, or views of it, though their schemas do not say so (`Row.secret_view`).
SECRET_VIEWS = _aten("""
    feature_dropout alpha_dropout feature_alpha_dropout
    einsum chain_matmul conj_physical to_dense atleast_1d atleast_2d atleast_3d
    broadcast_tensors meshgrid cartesian_prod unsafe_chunk unsafe_split unsafe_split_with_sizes
""")
#: They act on more than their arguments.
ACTING = _aten("warn save wait seed manual_seed set_grad_enabled")

#: Their derivatives in autodiff ask for a gradient of the result's dtype, and save a tensor of that dtype
#: (`Row.gradient` is "strict"). `with_operands` is what becomes of other norms
#: (csrc_stubs/torchscript/operand_twin.cpp).
STRICT_GRADIENT = _aten("""
    mm mv bmm matmul linear
""") | {"tsfuser::with_operands"}
#: Their derivatives give a gradient of the operand's dtype, whatever they get (`Row.gradient` is "cast").
CAST_GRADIENT = frozenset({"tsfuser::joined"})
#: Of their second operand they only read the sizes, the dtype and the layout, on CPUs and on CUDA; with those
#: that have a row.
SIZES_ONLY = _aten("""
    max_pool2d_with_indices_backward max_pool3d_with_indices_backward adaptive_max_pool2d_backward
    adaptive_max_pool3d_backward avg_pool2d_backward avg_pool3d_backward
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
""")

#: They pass no gradient on to their operands.
FLAT = _aten("""
    isclose argsort nonzero count_nonzero
""")
#: Elements of their results are elements of their first operand (`Row.selects`).
SELECTS = _aten("""
    max min median nanmedian mode kthvalue sort
    take masked_select index_put scatter
    fractional_max_pool2d fractional_max_pool3d
""")
#: Of their first operand they read no elements, but its sizes, dtype, device or layout.
LIKE_SELF = _aten("""
    empty_like randint_like new_empty new_zeros new_ones new_full
""")
#: Of their second operand they read no elements.
LIKE_SECOND = frozenset({"tsfuser::bias_or_zero"})
#: They ask a tensor for its sizes, layout or dtype, and give numbers.
ASKS = _aten("size dim numel is_floating_point len sym_size sym_numel") | {"tsfuser::is_channels_last"}

#: They fill a tensor with a number; they make one of some numbers.
FILLS = _aten("full zeros ones scalar_tensor")
RANGES = _aten("arange linspace eye") | {"prims::iota"}
#: They make what nobody has written to yet.
EMPTY = _aten("empty empty_like empty_permuted empty_strided new_empty new_empty_strided")
#: They make zeros.
ZEROS = _aten("zeros new_zeros")

#: They run in the layout of their operands, and cost no more in channels last.
KEEP_LAYOUT = _aten("""
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
    upsample_nearest2d upsample_nearest2d_backward
    _upsample_nearest_exact2d _upsample_nearest_exact2d_backward upsample_bilinear2d
    upsample_bilinear2d_backward upsample_bicubic2d upsample_bicubic2d_backward
    mm addmm bmm baddbmm sym_size sym_numel
""")
#: With their overloads: they read the strides of their operands, or where these begin in their memory.
READ_STRIDES = _aten("""
    as_strided as_strided_scatter as_strided_copy _reshape_alias view.dtype view_as_complex
    sym_stride.int sym_storage_offset
""")
#: With their overloads: they only read the sizes of their operand.
READ_SIZES = _aten("sym_size.int sym_numel")
#: With their overloads: views whose results are parts of their first operand.
PARTS = _aten("split.Tensor split_with_sizes unbind.int diagonal")

#: They raise an error for some elements, which their parts do not, or raise another one.
CHECKED = _aten("binary_cross_entropy multi_margin_loss multilabel_margin_loss_forward take")
#: They scale images up. Decomposed, they would look elements up, and their backwards would sort indices.
UPSAMPLING = _aten("""
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
""")

#: Op -> the number with which torch's peephole pass takes its result for its first operand.
IDENTITIES = {"aten::mul": 1, "aten::div": 1, "aten::add": 0, "aten::sub": 0}
