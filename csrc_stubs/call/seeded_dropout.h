// The mask of a dropout, drawn from a seed by ops on whole tensors: what groups draw, bit for bit.
#pragma once

#include <ATen/core/Tensor.h>

namespace tsfuser {

// Which elements of `like` a dropout of the probability `p` keeps. `seed` begins with two int64; `order`
// holds the dims in the order in which the elements are numbered, outermost first.
at::Tensor kept_elements(const at::Tensor& like, const at::Tensor& seed, int64_t stream, double p,
                         at::IntArrayRef order);

}  // namespace tsfuser
