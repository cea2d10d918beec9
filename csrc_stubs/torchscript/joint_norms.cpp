// Norms of joint graphs. Batch norms: torch's, but of a batch without elements, which torch takes for
// itself.
//
// `aten::_batch_norm_impl_index` gives no statistics for such a batch, and its derivative no gradient if
// there is no weight. Here statistics have an element a channel, and the gradient is there, so that ops
// around them need not ask.

#include "torchscript/hooks.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/_batch_norm_impl_index.h>
#include <ATen/ops/_batch_norm_impl_index_backward.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <array>
#include <optional>

namespace tsfuser {
namespace {

using torch::jit::Stack;

void batch_norm(Stack& stack) {
  constexpr size_t operands = 9;
  const auto take = [&stack](size_t i) { return torch::jit::peek(stack, i, operands); };
  const auto optional = [&take](size_t i) { return take(i).toOptional<at::Tensor>(); };
  const at::Tensor input = take(0).toTensor();
  const auto weight = optional(1), bias = optional(2), mean = optional(3), var = optional(4);
  const bool training = take(5).toBool(), cudnn = take(8).toBool();
  const double momentum = take(6).toDouble(), eps = take(7).toDouble();
  torch::jit::drop(stack, operands);
  auto [result, save_mean, save_invstd, reserve, implementation] =
      at::_batch_norm_impl_index(input, weight, bias, mean, var, training, momentum, eps, cudnn);
  if (input.numel() == 0 && training) {
    save_mean = at::zeros({input.size(1)}, save_mean.options());
    save_invstd = at::zeros_like(save_mean);
  }
  torch::jit::push(stack, result, save_mean, save_invstd, reserve, implementation);
}

void batch_norm_backward(Stack& stack) {
  constexpr size_t operands = 12;
  const auto take = [&stack](size_t i) { return torch::jit::peek(stack, i, operands); };
  const auto optional = [&take](size_t i) { return take(i).toOptional<at::Tensor>(); };
  const int64_t implementation = take(0).toInt();
  const at::Tensor input = take(1).toTensor(), gradient = take(2).toTensor();
  const auto weight = optional(3), mean = optional(4), var = optional(5);
  const auto save_mean = optional(6), save_invstd = optional(7);
  const bool training = take(8).toBool();
  const double eps = take(9).toDouble();
  const auto asked = take(10).toBoolList();
  const at::Tensor reserve = take(11).toTensor();
  torch::jit::drop(stack, operands);
  const std::array<bool, 3> mask{asked.get(0), asked.get(1), asked.get(2)};
  auto [by_input, by_weight, by_bias] =
      at::_batch_norm_impl_index_backward(implementation, input, gradient, weight, mean, var, save_mean,
                                          save_invstd, training, eps, mask, reserve);
  if (mask[0] && !by_input.defined()) {
    by_input = at::zeros_like(input);
  }
  torch::jit::push(stack, by_input, by_weight, by_bias);
}

// The operand in the memory format that `like` has: channels-last, or row-major, as eager's
// root-mean-square norm gives its result.
void in_format_of(Stack& stack) {
  const at::Tensor like = torch::jit::pop(stack).toTensor();
  const at::Tensor value = torch::jit::pop(stack).toTensor();
  torch::jit::push(stack, value.contiguous(like.suggest_memory_format()));
}

}  // namespace

void register_joint_norms() {
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator(
           "tsfuser::batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, "
           "Tensor? running_var, bool training, float momentum, float eps, bool cudnn_enabled) -> "
           "(Tensor, Tensor, Tensor, Tensor, int)",
           batch_norm, c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator(
           "tsfuser::batch_norm_backward(int impl_index, Tensor input, Tensor grad_output, Tensor? weight, "
           "Tensor? running_mean, Tensor? running_var, Tensor? save_mean, Tensor? save_var_transform, "
           "bool train, float eps, bool[3] output_mask, Tensor reservedSpace) -> (Tensor, Tensor, Tensor)",
           batch_norm_backward, c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::in_format_of(Tensor(a) self, Tensor like) -> Tensor(a)", in_format_of,
                            c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
