// Products of matrices of which some have room (call/room.h). Before:
//
//     %s = aten::matmul(%q, %k)             %k : 49 columns
//
// After, where %k is marked: what 56 columns give, of which %s is the first 49 of each row. The dim that
// both operands have is as long as with the room of both, or as its own size; zeros add nothing.

#include "torchscript/prepare.h"
#include "torchscript/room_products.h"
#include "call/room.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/_unsafe_view.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>

namespace tsfuser {
namespace {

// The size of dim `dim`, -1 or -2, with its room, if that is the dim that has room.
int64_t wide_size(const at::Tensor& matrices, int64_t dim, int64_t dim_of_room) {
  const int64_t size = matrices.size(dim);
  return dim == dim_of_room ? whole_accesses(size) : size;
}

// Whether memory holds the matrices one behind another, at equal distances.
bool is_one_batch(const at::Tensor& matrices) {
  for (int64_t d = 0; d + 3 < matrices.dim(); ++d) {
    if (matrices.stride(d) != matrices.size(d + 1) * matrices.stride(d + 1)) {
      return false;
    }
  }
  return true;
}

bool are_batches(const at::Tensor& a, const at::Tensor& b) {
  const int64_t outer = a.dim() - 2;
  return outer > 0 && b.dim() == a.dim() && a.sizes().slice(0, outer) == b.sizes().slice(0, outer) &&
         a.size(-1) == b.size(-2) && a.scalar_type() == b.scalar_type() && a.numel() != 0 &&
         b.numel() != 0 && is_one_batch(a) && is_one_batch(b);
}

at::Tensor widened(const at::Tensor& matrices, int64_t rows, int64_t columns) {
  int64_t count = 1;
  for (const int64_t size : matrices.sizes().slice(0, matrices.dim() - 2)) {
    count *= size;
  }
  return matrices.as_strided({count, rows, columns},
                             {matrices.stride(-3), matrices.stride(-2), matrices.stride(-1)});
}

// The product of batches that `are_batches`, of which `whole` has the matrices in one dim, as a part of it.
at::Tensor part_of(const at::Tensor& whole, const at::Tensor& a, const at::Tensor& b) {
  c10::SmallVector<int64_t, 5> sizes(a.sizes().begin(), a.sizes().end()), strides(a.dim());
  sizes.back() = b.size(-1);
  strides.end()[-1] = whole.stride(2);
  strides.end()[-2] = whole.stride(1);
  int64_t step = whole.stride(0);
  for (int64_t d = a.dim() - 3; d >= 0; --d) {
    strides[d] = step;
    step *= sizes[d];
  }
  return whole.as_strided(sizes, strides);
}

// Whether the result has a dim of size 1: results of a part get other strides there than those of the whole.
bool has_ones(const at::Tensor& a, const at::Tensor& b) {
  const auto outer = a.sizes().slice(0, a.dim() - 1);
  return b.size(-1) == 1 || std::find(outer.begin(), outer.end(), 1) != outer.end();
}

}  // namespace

at::Tensor product_with_room(const at::Tensor& a, const at::Tensor& b) {
  const bool recorded = c10::GradMode::is_enabled() && (a.requires_grad() || b.requires_grad());
  const int64_t of_a = dim_with_room(a), of_b = dim_with_room(b);
  if (recorded || (!of_a && !of_b) || !are_batches(a, b)) {
    return at::matmul(a, b);
  }
  const int64_t rows = wide_size(a, -2, of_a), columns = wide_size(b, -1, of_b);
  const int64_t inner = std::min(wide_size(a, -1, of_a), wide_size(b, -2, of_b));  // of both, or of neither
  const bool is_part = rows != a.size(-2) || columns != b.size(-1);
  if (is_part && has_ones(a, b)) {
    return at::matmul(a, b);
  }
  const at::Tensor product = widened(a, rows, inner).bmm(widened(b, inner, columns));
  if (is_part) {
    return part_of(product, a, b);
  }
  c10::SmallVector<int64_t, 5> sizes(a.sizes().begin(), a.sizes().end());
  sizes.back() = columns;
  return at::_unsafe_view(product, sizes);  // autograd knows no view
}

at::Tensor transposed_with_room(const at::Tensor& matrices) {
  at::Tensor made = matrices.dim() < 2 ? matrices : matrices.transpose(-2, -1);
  if (const int64_t dim = dim_with_room(matrices)) {
    mark_room(made, -3 - dim);
  }
  return made;
}

void register_room_products() {
  static const torch::jit::RegisterOperators registered({torch::jit::Operator(
      "tsfuser::product_of_room(Tensor self, Tensor other) -> Tensor",
      [](torch::jit::Stack& stack) {
        const at::Tensor b = torch::jit::pop(stack).toTensor(), a = torch::jit::pop(stack).toTensor();
        torch::jit::push(stack, product_with_room(a, b));
      },
      c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
