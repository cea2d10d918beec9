// The gradients of `matmul`, `mm` and `bmm`, an op each. Autodiff's formula for `matmul` is a function with
// a branch for each number of dims, which the interpreter walks through in every step: about 40 nodes a
// gradient. Its results, and those of the other two, are row-major, whatever the operands are. Before, in
// the backward of `q @ k.transpose(-2, -1)`:
//
//     %t = AD_mat_transpose(%q);  %m = AD_matmul_bw_size(%t, %grad, %size)
//
// After: %m = tsfuser::matmul_backward_other(%q, %grad, %size, %k, True), which has the layout of %k: the
// backward of the transpose makes it row-major again, and what reads that does so along its rows. The
// gradient of a matrix has the layout of the matrix in eager, too. That of a batch of them has not, so that
// it stays row-major where the program may see it: then the last operand is False.

#include "torchscript/prepare.h"
#include "torchscript/room_products.h"
#include "call/room.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <cstdint>
#include <optional>
#include <string>

namespace tsfuser {
namespace {

// Whether the gradient of `like` is to lie column by column.
bool is_column_major(const at::Tensor& like, bool also_batches) {
  if (like.dim() == 2) {  // as in eager (torch/csrc/autograd/FunctionsManual.cpp, mm_mat2_backward)
    return like.stride(0) == 1 && like.stride(1) == like.size(0);
  }
  return also_batches && like.dim() > 2 && like.size(-1) > 1 && like.stride(-1) != 1 && like.stride(-2) == 1;
}

// All matrices of a batch as one matrix, below each other.
at::Tensor stacked(const at::Tensor& matrices) {
  int64_t rows = 1;
  for (const int64_t size : matrices.sizes().slice(0, matrices.dim() - 1)) {
    rows *= size;
  }
  return matrices.reshape({rows, matrices.size(-1)});
}

// left @ right, without the views that `matmul` makes where both are one batch of matrices. `may_be_part`:
// of a larger tensor, which the program does not see.
at::Tensor multiplied(const at::Tensor& left, const at::Tensor& right, bool may_be_part) {
  if (may_be_part && (dim_with_room(left) || dim_with_room(right))) {
    return product_with_room(left, right);
  }
  if (left.dim() == 2 && right.dim() == 2) {
    return left.mm(right);
  }
  const bool is_batch = left.dim() == 3 && right.dim() == 3 && left.size(0) == right.size(0);
  return is_batch ? left.bmm(right) : at::matmul(left, right);
}

// left @ right for a gradient of `dims` dims, which batch dims may have to be summed away from. The branches
// are those of autodiff's `AD_matmul_bw_size`.
at::Tensor product(const at::Tensor& left, const at::Tensor& right, int64_t dims, bool column_major,
                   bool may_be_part) {
  const int64_t first = left.dim();
  const int64_t second = right.dim();
  if (first == 0 || second == 0) {
    return left * right;
  }
  if (first == second && first > 2 && dims == 2) {  // one product sums over the batch
    const at::Tensor lefts = stacked(left.transpose(-2, -1));
    const at::Tensor rights = stacked(right);
    return column_major ? rights.t().mm(lefts).t() : lefts.t().mm(rights);
  }
  if (first > 2 && first == second + 1 && dims == 1) {
    return stacked(left.transpose(-2, -1)).t().mm(stacked(right.unsqueeze(-1))).squeeze(-1);
  }
  if (first + second == dims) {  // of vectors
    return at::matmul(left.unsqueeze(first), right.unsqueeze(second == 1 ? 0 : -2));
  }
  if (first == second + dims) {
    return at::matmul(left, right.unsqueeze(second)).squeeze(-1);
  }
  if (second == first + dims) {
    return at::matmul(left.unsqueeze(-2), right).squeeze(-2);
  }
  if (column_major && first > 1 && second > 1) {
    return transposed_with_room(
        multiplied(transposed_with_room(right), transposed_with_room(left), may_be_part));
  }
  return multiplied(left, right, may_be_part);
}

struct Operands {
  at::Tensor left, right;
  int64_t dims;
  bool column_major;
};

Operands popped(torch::jit::Stack& stack) {
  const bool also_batches = torch::jit::pop(stack).toBool();
  const auto like = torch::jit::pop(stack).toOptional<at::Tensor>();
  const c10::IValue sizes = torch::jit::pop(stack);
  at::Tensor right = torch::jit::pop(stack).toTensor();
  at::Tensor left = torch::jit::pop(stack).toTensor();
  const int64_t dims = sizes.isNone() ? left.dim() : static_cast<int64_t>(sizes.toListRef().size());
  return {std::move(left), std::move(right), dims, like && is_column_major(*like, also_batches)};
}

template <bool kMayBePart>
void backward_self(torch::jit::Stack& stack) {
  const Operands of = popped(stack);
  torch::jit::push(stack,
                   product(of.left, transposed_with_room(of.right), of.dims, of.column_major, kMayBePart));
}

template <bool kMayBePart>
void backward_other(torch::jit::Stack& stack) {
  const Operands of = popped(stack);
  torch::jit::push(stack,
                   product(transposed_with_room(of.left), of.right, of.dims, of.column_major, kMayBePart));
}

}  // namespace

void register_matmul_gradients() {
  constexpr auto kind = c10::AliasAnalysisKind::FROM_SCHEMA;
  const std::string of_self = "(Tensor grad, Tensor other, int[]? sizes, Tensor? like, bool also_batches)";
  const std::string of_other = "(Tensor self, Tensor grad, int[]? sizes, Tensor? like, bool also_batches)";
  using torch::jit::Operator;
  static const torch::jit::RegisterOperators registered(
      {Operator("tsfuser::matmul_backward_self" + of_self + " -> Tensor", backward_self<false>, kind),
       Operator("tsfuser::matmul_backward_other" + of_other + " -> Tensor", backward_other<false>, kind),
       Operator("tsfuser::backward_self_of_room" + of_self + " -> Tensor", backward_self<true>, kind),
       Operator("tsfuser::backward_other_of_room" + of_other + " -> Tensor", backward_other<true>, kind)});
}

}  // namespace tsfuser
