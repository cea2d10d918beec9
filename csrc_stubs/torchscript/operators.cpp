// The operators that a fused graph calls, except those of single files: the guard and the group, and ops of
// ours outside of groups.

#include "group/group.h"
#include "torchscript/hooks.h"
#include "torchscript/joint_function.h"
#include "torchscript/nodes.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/threshold_backward.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/jit_exception.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Node;
using torch::jit::Operation;
using torch::jit::Stack;

// Whether the next thing that this thread runs is another group of the same batch.
bool is_followed(const Node* node, c10::Symbol batch) {
  const Node* next = node->next();
  while (next && (next->kind() == c10::prim::Constant || next->kind() == c10::prim::Drop)) {
    next = next->next();
  }
  return next && next->kind() == c10::prim::CudaFusionGroup && next->hasAttribute(batch) &&
         next->i(batch) == node->i(batch);
}

Operation make_group(const Node* node) {
  Group* group = group_of(node);
  const size_t inputs = node->inputs().size();
  static const auto batch = c10::Symbol::attr("batch");
  if (node->hasAttribute(batch)) {
    const bool last = !is_followed(node, batch);
    return [group, inputs, last](Stack& stack) { group->run_in_batch(stack, inputs, last); };
  }
  static const auto dead_inputs = c10::Symbol::attr("dead");
  const auto dead = node->hasAttribute(dead_inputs) ? static_cast<DeadInputs>(node->i(dead_inputs)) : 0;
  return [group, inputs, dead](Stack& stack) { group->run(stack, inputs, /*guard=*/0, dead); };
}

Operation make_guard(const Node* node) {
  const auto& types = node->tys(c10::attr::types);
  const size_t inputs = node->inputs().size();
  TORCH_CHECK(types.size() == inputs, "prim::CudaFusionGuard has ", inputs, " inputs and ", types.size(),
              " types");
  for (const auto& [call, fallback] : fallbacks(*node)) {
    keep_casts(*fallback);
  }
  static const auto patterns = c10::Symbol::attr("patterns");
  return guard_operation(types, node->hasAttribute(patterns) ? node->i(patterns) : 0);
}

void add_optional(Stack& stack) {
  const c10::IValue bias = torch::jit::pop(stack);
  if (!bias.isNone()) {
    at::Tensor input = torch::jit::pop(stack).toTensor();
    torch::jit::push(stack, at::add(input, bias.toTensor()));
  }
}

// The derivative of relu, of a gradient and relu's result. The operands and saved statistics of the batch
// norm in front of relu follow: what is fused computes the result of those.
void relu_backward(Stack& stack) {
  constexpr size_t operands = 9;
  const at::Tensor gradient = torch::jit::peek(stack, 0, operands).toTensor();
  const at::Tensor result = torch::jit::peek(stack, 1, operands).toTensor();
  torch::jit::drop(stack, operands);
  torch::jit::push(stack, at::threshold_backward(gradient, result, 0));
}

// Whether the backward computes the result of a batch norm again: in training, from the values that the norm
// has saved, unless these are rounded to 16 bits, as on the CPU beside parameters of 16 bits. Outside
// training the running statistics may have moved by then.
bool is_computed_again(const at::Tensor& like, const std::optional<at::Tensor>& weight, bool training) {
  const auto exact = at::toOpMathType(like.scalar_type());
  return training && (!like.is_cpu() || like.scalar_type() == exact ||
                      (weight && weight->defined() && weight->scalar_type() == exact));
}

// What the forward keeps of a batch norm's result for the backward: nothing where it is computed again.
void kept_result(Stack& stack) {
  const bool training = torch::jit::pop(stack).toBool();
  const auto weight = torch::jit::pop(stack).toOptional<at::Tensor>();
  const at::Tensor result = torch::jit::pop(stack).toTensor();
  const bool again = is_computed_again(result, weight, training);
  torch::jit::push(stack, again ? at::empty({0}, result.options()) : result);
}

// The result of a batch norm, from the values that the forward has saved. Where that is to be differentiated
// again, it depends on the operands as the forward's result does, also through the statistics.
void batch_norm_result(Stack& stack) {
  constexpr size_t operands = 10;
  const auto take = [&stack](size_t i) { return torch::jit::peek(stack, i, operands); };
  const auto optional = [&take](size_t i) { return take(i).toOptional<at::Tensor>(); };
  const at::Tensor kept = take(0).toTensor(), input = take(1).toTensor();
  const auto weight = optional(2), bias = optional(3), mean = optional(4), var = optional(5);
  const at::Tensor save_mean = take(6).toTensor(), save_invstd = take(7).toTensor();
  const bool training = take(8).toBool();
  const double eps = take(9).toDouble();
  torch::jit::drop(stack, operands);

  const auto computed = [&] {
    const at::NoGradGuard no_gradients;
    std::vector<int64_t> sizes(input.dim(), 1);
    sizes.at(1) = -1;
    const auto dtype = save_mean.scalar_type();
    at::Tensor y = (input.to(dtype) - save_mean.view(sizes)) * save_invstd.view(sizes);
    y = weight && weight->defined() ? y * weight->view(sizes) : y;
    y = bias && bias->defined() ? y + bias->view(sizes) : y;
    return y.to(input.scalar_type());
  };
  const at::Tensor value =
      is_computed_again(input, weight, training) && input.numel() != 0 ? computed() : kept;
  if (!c10::GradMode::is_enabled() || input.numel() == 0) {
    torch::jit::push(stack, input.numel() == 0 ? at::empty_like(input) : value);
    return;
  }
  const at::Tensor again = at::batch_norm(input, weight, bias, training ? std::nullopt : mean,
                                          training ? std::nullopt : var, training, 0, eps, false);
  torch::jit::push(stack, again + (value - again).detach());
}

// A copy without gaps, in which the one of the last two dims stays inside whose neighbours are nearer in
// memory. A tensor of which a product makes no copy is given back.
void packed(Stack& stack) {
  const at::Tensor self = torch::jit::pop(stack).toTensor();
  if (self.layout() != at::kStrided || self.dim() <= 2 || self.is_contiguous()) {
    torch::jit::push(stack, self);
  } else if (self.stride(-2) < self.stride(-1)) {
    torch::jit::push(stack, self.transpose(-2, -1).clone(at::MemoryFormat::Contiguous).transpose(-2, -1));
  } else {
    torch::jit::push(stack, self.clone(at::MemoryFormat::Contiguous));
  }
}

// What a functional op has made, in the dtype of the tensor that the op in place would have written to.
// Raises what that op raises where its result cannot have this dtype.
void as_written(Stack& stack) {
  const at::Tensor target = torch::jit::pop(stack).toTensor(), self = torch::jit::pop(stack).toTensor();
  const auto from = self.scalar_type(), to = target.scalar_type();
  TORCH_CHECK(!at::isFloatingType(from) || !at::isComplexType(to),  // only abs makes these of those
              "In-place abs is not supported for complex tensors.");
  TORCH_CHECK(at::canCast(from, to), "result type ", from, " can't be cast to the desired output type ", to);
  torch::jit::push(stack, self.to(to));
}

// A reshape of memory that nothing else reads: the result counts as new, though it may be a view.
void reshaped(Stack& stack) {
  const std::vector<int64_t> shape = torch::jit::pop(stack).toIntVector();
  const at::Tensor self = torch::jit::pop(stack).toTensor();
  torch::jit::push(stack, self.reshape(shape));
}

// A tensor in the order of a memory format, of which nothing else reads the memory: the result counts as
// new, though it may be the operand.
void ordered(Stack& stack) {
  const auto format = static_cast<at::MemoryFormat>(torch::jit::pop(stack).toInt());
  const at::Tensor self = torch::jit::pop(stack).toTensor();
  torch::jit::push(stack, self.contiguous(format));
}

// The tensor itself, of which the order of dims in memory is wished for: only a group, which stores it
// anyway, heeds that.
void laid_out(Stack& stack) { torch::jit::drop(stack, 1); }

// The order of dims that a permute by `dims`, each of which may count from the end, is undone with.
void inverse_order(Stack& stack) {
  const std::vector<int64_t> dims = torch::jit::pop(stack).toIntVector();
  const auto rank = static_cast<int64_t>(dims.size());
  std::vector<int64_t> inverse(dims.size());
  for (int64_t i = 0; i < rank; ++i) {
    inverse.at(dims[i] < 0 ? dims[i] + rank : dims[i]) = i;
  }
  torch::jit::push(stack, std::move(inverse));
}

// The batch itself. While training, one with a single value a channel is an error, as it is for what the
// program had in this place: "builtins.ValueError", with the sizes where the message has "{}".
void checked_batch(Stack& stack) {
  const c10::IValue error = torch::jit::pop(stack), message = torch::jit::pop(stack);
  if (!torch::jit::pop(stack).toBool()) {
    return;
  }
  const auto sizes = stack.back().toTensor().sizes();
  TORCH_CHECK_INDEX(!sizes.empty(), "list index out of range");
  int64_t values = sizes[0];
  for (size_t d = 2; d < sizes.size(); ++d) {
    values *= sizes[d];
  }
  if (values == 1) {
    std::string text = message.toStringRef();
    const size_t place = text.find("{}");
    if (place != std::string::npos) {
      text.replace(place, 2, c10::str(c10::IValue(sizes)));
    }
    throw torch::jit::JITException(text, error.toStringRef());
  }
}

}  // namespace

void register_operators() {
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator(c10::prim::CudaFusionGroup, make_group,
                            c10::AliasAnalysisKind::INTERNAL_SPECIAL_CASE),
       torch::jit::Operator("prim::CudaFusionGuard(...) -> bool", make_guard,
                            c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("prim::add_optional(Tensor(a) input, Tensor? bias) -> Tensor(a)", add_optional,
                            c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator(
           "tsfuser::relu_backward(Tensor grad_output, Tensor result, int impl_index, Tensor input, "
           "Tensor? weight, Tensor? bias, Tensor save_mean, Tensor save_invstd, bool training) -> Tensor",
           relu_backward, c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::kept_result(Tensor result, Tensor? weight, bool training) -> Tensor",
                            kept_result, c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator(
           "tsfuser::batch_norm_result(Tensor kept, Tensor input, Tensor? weight, Tensor? bias, "
           "Tensor? running_mean, Tensor? running_var, Tensor save_mean, Tensor save_invstd, bool training, "
           "float eps) -> Tensor",
           batch_norm_result, c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator(
           "tsfuser::checked_batch(Tensor(a) batch, bool training, str message, str error) -> Tensor(a)",
           checked_batch, c10::AliasAnalysisKind::FROM_SCHEMA)});
  static const torch::jit::RegisterOperators layouts(
      {torch::jit::Operator("tsfuser::packed(Tensor self) -> Tensor", packed,
                            c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::as_written(Tensor self, Tensor target) -> Tensor", as_written,
                            c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator(
           "tsfuser::with_room(Tensor self, int dim) -> Tensor",
           [](Stack& stack) {  // where no group makes it there is none
             torch::jit::drop(stack, 1);
             packed(stack);
           },
           c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::reshaped(Tensor self, int[] shape) -> Tensor", reshaped,
                            c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::ordered(Tensor self, *, int memory_format=0) -> Tensor", ordered,
                            c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::laid_out(Tensor(a) self, int[] order) -> Tensor(a)", laid_out,
                            c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::inverse_order(int[] dims) -> int[]", inverse_order,
                            c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
