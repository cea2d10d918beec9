// Products of matrices that end with what their library does on its way: `tsfuser::biased_product` adds a
// bias (tsfuser/grouping/lone_biases.py), `tsfuser::gelu_product` besides applies gelu, in its tanh form
// (tsfuser/grouping/gelu_products.py). In: any tensors, for the second of 16 bits, though the graph was made
// for those that were profiled: what the library does not do runs as ops of torch, one after the other. Out:
// the same values but for roundings. cuBLASLt applies gelu before it stores; elsewhere the result is changed
// in place.

#include "call/arguments.h"
#include "torchscript/hooks.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_addmm_activation.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Stack;

// Whether autocast has ops on the tensor compute in another dtype than the tensor's.
bool casts_others(const at::Tensor& tensor) {
  const auto device = tensor.device().type();
  return at::autocast::is_autocast_enabled(device) &&
         at::autocast::get_autocast_dtype(device) != tensor.scalar_type();
}

// Whether the library that multiplies adds the bias: a row of the product's dtype. What autocast makes of
// one op or two may differ.
bool is_biased_on_its_way(const at::Tensor& bias, const at::Tensor& left, const at::Tensor& right,
                          int64_t columns) {
  const auto dtype = left.scalar_type();
  const bool is_row = bias.dim() == 1 && right.dim() == 2 && bias.size(0) == columns &&
                      bias.device() == left.device() && bias.scalar_type() == dtype &&
                      right.scalar_type() == dtype;
  return is_row && (left.is_cpu() || left.is_cuda()) && !casts_others(left);
}

at::Tensor biased(const at::Tensor& bias, const at::Tensor& left, const at::Tensor& right) {
  return is_biased_on_its_way(bias, left, right, right.dim() == 2 ? right.size(1) : 0)
             ? at::addmm(bias, left, right)
             : at::add(bias, at::mm(left, right));
}

void biased_product(Stack& stack) {
  const at::Tensor right = torch::jit::pop(stack).toTensor(), left = torch::jit::pop(stack).toTensor();
  const at::Tensor bias = torch::jit::pop(stack).toTensor();
  torch::jit::push(stack, biased(bias, left, right));
}

// Whether gelu may be applied to the product as it is made: that has no derivative, nobody may watch which
// ops run, and the rows of a linear's operand have to lie as those of a matrix.
bool is_gelu_on_its_way(const at::Tensor& bias, const at::Tensor& left, const at::Tensor& right,
                        int64_t columns, bool transposed) {
  const bool records = c10::GradMode::is_enabled();
  for (const at::Tensor* tensor : {&bias, &left, &right}) {
    if (refuse_tensor(*tensor) || (records && tensor->requires_grad())) {
      return false;
    }
  }
  const bool is_matrix = left.dim() == 2 || (transposed && left.dim() > 2 && left.is_contiguous());
  return !refuse_mode() && is_matrix && left.numel() > 0 && bias.is_contiguous() &&
         is_biased_on_its_way(bias, left, right, columns);
}

// Whether the product of the operands has the dtype that was profiled, which was one of these two.
void takes_gelu(Stack& stack) {
  const auto dtype = torch::jit::pop(stack).toBool() ? at::kBFloat16 : at::kHalf;
  const at::Tensor right = torch::jit::pop(stack).toTensor(), left = torch::jit::pop(stack).toTensor();
  const at::Tensor bias = torch::jit::pop(stack).toTensor();
  const auto fits = [dtype](const at::Tensor& tensor) {
    return tensor.defined() && tensor.scalar_type() == dtype;
  };
  torch::jit::push(stack, fits(bias) && fits(left) && fits(right) && (left.is_cpu() || left.is_cuda()) &&
                              !casts_others(left));
}

// `transposed`: the right operand is that of a linear.
void gelu_product(Stack& stack) {
  const bool transposed = torch::jit::pop(stack).toBool();
  const at::Tensor right = torch::jit::pop(stack).toTensor(), left = torch::jit::pop(stack).toTensor();
  const at::Tensor bias = torch::jit::pop(stack).toTensor();
  const int64_t columns = right.dim() == 2 ? right.size(transposed ? 0 : 1) : 0;
  if (!is_gelu_on_its_way(bias, left, right, columns, transposed)) {
    const at::Tensor sum = transposed ? at::linear(left, right, bias) : biased(bias, left, right);
    torch::jit::push(stack, at::gelu(sum, "tanh"));
    return;
  }
  const at::Tensor rows = left.dim() == 2 ? left : left.reshape({-1, left.size(-1)});
  const at::Tensor matrix = transposed ? right.t() : right;
  at::Tensor result;
  if (left.is_cuda()) {
    result = at::_addmm_activation(bias, rows, matrix, 1, 1, /*use_gelu=*/true);
  } else {
    result = at::addmm(bias, rows, matrix);
    at::gelu_(result, "tanh");
  }
  if (left.dim() != 2) {
    std::vector<int64_t> sizes = left.sizes().vec();
    sizes.back() = columns;
    result = result.view(sizes);
  }
  torch::jit::push(stack, std::move(result));
}

}  // namespace

void register_products() {
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator("tsfuser::biased_product(Tensor bias, Tensor left, Tensor right) -> Tensor",
                            biased_product, c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::takes_gelu(Tensor bias, Tensor left, Tensor right, "
                            "bool bfloat16) -> bool",
                            takes_gelu, c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::gelu_product(Tensor bias, Tensor left, Tensor right, "
                            "bool transposed) -> Tensor",
                            gelu_product, c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
