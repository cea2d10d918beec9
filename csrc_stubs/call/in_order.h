// tsfuser::in_order: a tensor with its dims in a given order in memory.
//
//     at::Tensor y = in_order(x, {0, 2, 1});  // x itself if it lies so, else a copy that does

#pragma once

#include <ATen/core/Tensor.h>

namespace tsfuser {

// `order`: the dims from the outermost in memory to the innermost; the result has no gaps. A tensor that is
// not strided, or has another number of dims or no elements, is returned as it is.
at::Tensor in_order(const at::Tensor& tensor, at::IntArrayRef order);

}  // namespace tsfuser
