"""Ops without a row: why they are not fused, for people.

In: an operator kind. Out: a sentence; None if there is nothing to say but that the op has no row. Example:
`sentence("aten::mm")` -> "a matrix product is left to torch's libraries...".
"""

from __future__ import annotations

_PRODUCT = "a matrix product is left to torch's libraries (cuBLAS, MKL); what is around it can be fused"
_CONVOLUTION = "a convolution is left to torch's libraries (cuDNN, oneDNN); what is around it can be fused"
_ATTENTION = "attention in one op is left to torch, which has a kernel for all of it"
_WINDOW = "resampling, and gradients by stored places, are left to torch"
_FILL = (
    "it leaves the layout of the tensor that it changes, while masked_fill gives a row-major one: "
    "write that to have it fused"
)
_JOIN = "joining tensors is left to torch: groups read its result, and it reads theirs"
_PART = "a view of a part of a tensor costs no time of its own: groups read such parts where they are"
_VIEW = "a view costs no time of its own"
_WHOLE = "it copies a tensor as a whole"
_COPY = "it gives a view or, where memory has another order, a copy, which is left to torch"
_LOOK_UP = "looking elements up by their indices is left to torch"
_SORT = "sorting is left to torch"
_NEW = "making a new tensor costs next to nothing: groups read its result"
_SPECIAL = "a special function that eager computes by series and tables: it is left to torch"
_DRAWN = "random numbers of such a distribution are left to torch: groups draw uniform and normal ones"
_SCATTER = "writing elements to places that are no range, or several times, is left to torch"
_RECURRENT = "a whole recurrent network in one op is left to torch: written cell by cell it can be fused"

_WORDS = {
    _PRODUCT: """mm bmm addmm addmv addbmm baddbmm matmul linear mv dot vdot inner ger outer einsum tensordot
        bilinear chain_matmul linalg_matmul linalg_multi_dot linear_backward
        tsfuser::matmul_backward_self tsfuser::matmul_backward_other tsfuser::product_of_room
        tsfuser::backward_self_of_room tsfuser::backward_other_of_room""",
    _CONVOLUTION: """conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d
        conv_transpose3d conv_tbc convolution_backward cudnn_convolution _convolution_mode
        mkldnn_convolution thnn_conv2d""",
    _ATTENTION: """scaled_dot_product_attention _scaled_dot_product_flash_attention
        _scaled_dot_product_efficient_attention _native_multi_head_attention
        _transformer_encoder_layer_fwd""",
    _WINDOW: """max_pool2d_with_indices_backward max_pool3d_with_indices_backward
        adaptive_max_pool2d_backward adaptive_max_pool3d_backward
        upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d
        upsample_bicubic2d upsample_trilinear3d grid_sampler grid_sampler_2d im2col col2im unfold fold
        pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d
        replication_pad1d replication_pad2d""",
    _FILL: "masked_fill_",
    _JOIN: "concatenate hstack vstack dstack",
    _PART: """unbind split split_with_sizes chunk tensor_split diagonal as_strided
        unsafe_chunk unsafe_split""",
    _VIEW: """detach alias broadcast_to broadcast_tensors view_as_real view_as_complex""",
    _WHOLE: "copy repeat lift_fresh_copy",
    _LOOK_UP: """take embedding_bag masked_select nonzero
        scatter scatter_add scatter_ scatter_add_ index_add index_put index_put_
        embedding_dense_backward nll_loss_backward nll_loss2d_backward _unsafe_index _unsafe_masked_index
        _unsafe_masked_index_put_accumulate repeat_interleave""",
    _SCATTER: """scatter_reduce select_scatter slice_scatter diagonal_scatter as_strided_scatter
        masked_scatter index_copy index_reduce index_fill""",
    _SPECIAL: """special_bessel_j1 special_bessel_y0 special_bessel_y1
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1
        special_spherical_bessel_j0 special_airy_ai i0 special_i0e special_i1 special_i1e special_erfcx
        special_log_ndtr special_ndtri digamma polygamma special_zeta igamma igammac
        special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
        special_chebyshev_polynomial_w special_shifted_chebyshev_polynomial_t
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
        special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
        special_laguerre_polynomial_l special_legendre_polynomial_p""",
    _DRAWN: "bernoulli multinomial poisson binomial _standard_gamma _sample_dirichlet exponential geometric",
    _SORT: """sort argsort kthvalue median mode unique_dim histc""",
    _NEW: """zeros ones empty full arange linspace eye tril triu rand randn randint randperm scalar_tensor
        new_zeros new_ones new_empty new_full tensor tril_indices triu_indices empty_like empty_strided
        new_empty_strided empty_permuted logspace prims::iota""",
    _RECURRENT: "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
}
_SENTENCES = {
    name if "::" in name else f"aten::{name}": text
    for text, names in _WORDS.items()
    for name in names.split()
}


def sentence(kind: str) -> str | None:
    """Why an op of that kind, which has no row, is not fused."""
    return _SENTENCES.get(kind)


def left_view(kind: str) -> str:
    """Why a view that has a row may stay outside of groups."""
    return _COPY if kind in ("aten::reshape", "aten::reshape_as", "aten::flatten") else _VIEW


def is_view(kind: str) -> bool:
    """Whether the op without a row only shows memory that is there already."""
    return _SENTENCES.get(kind) in (_PART, _VIEW)


def heavy_kinds() -> list[str]:
    """The operator kinds of matrix products and convolutions."""
    return [kind for kind, text in _SENTENCES.items() if text in (_PRODUCT, _CONVOLUTION)]


def kinds() -> list[str]:
    """All that have a sentence."""
    return sorted(_SENTENCES)
