// Products of matrices some of which have room, or get some, and transposed matrices that keep it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace tsfuser {

struct RoomChoice {
  bool may_have_gaps = true;  // in memory: nobody can tell the result from a tensor without
  int64_t least = -1;         // operations for each byte of a copy that the product makes; -1: it makes none
};

// a @ b, plus `bias` in each row.
at::Tensor product_with_room(const at::Tensor& a, const at::Tensor& b,
                             const std::optional<at::Tensor>& bias = {}, const RoomChoice& choice = {});

// A view with the last two dims exchanged; the tensor itself where it has fewer.
at::Tensor transposed_with_room(const at::Tensor& matrices);

}  // namespace tsfuser
