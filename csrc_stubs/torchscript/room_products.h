// Products of matrices some of which have room, and transposed matrices that keep it.
#pragma once

#include <ATen/core/Tensor.h>

namespace tsfuser {

// a @ b. Where one of them has room, the result may be a part of a larger tensor.
at::Tensor product_with_room(const at::Tensor& a, const at::Tensor& b);

// A view with the last two dims exchanged; the tensor itself where it has fewer.
at::Tensor transposed_with_room(const at::Tensor& matrices);

}  // namespace tsfuser
