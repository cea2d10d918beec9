// A padding by nothing, and a slice that is the whole, give their operand back. Before:
//
//     %p = aten::pad(%y, [0, 0, 0, %w], "constant", None);  %s = aten::slice(%p, 1, None, %h, 1)
//
// Eager mode copies %y where %w is 0. The backward copies its gradient, and once more for the slice, into
// zeros. After, %p is %y if %w is 0, and %s is %p if it is not longer than %h:
//
//     %p = tsfuser::pad(%y, [0, 0, 0, %w], "constant", None);  %s = tsfuser::slice(%p, 1, None, %h, 1)
//
// The slice is a twin (twins.h), whose operation this is. Only where nothing can tell the operand from a
// copy: nothing writes to either, and the graph returns neither. Swin-T pads to whole windows and cuts what
// was padded, in each block. It is a step of prepare.cpp.

#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/twin_rows.h"
#include "torchscript/constants.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/slice.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Stack;
using torch::jit::Value;

// Whether the result of an op may be the operand itself: not where gradients are off, which the result
// would not ask for.
bool may_hand_on(const at::Tensor& self) { return at::GradMode::is_enabled() || !self.requires_grad(); }

// Whether the result of the padding may be the operand itself.
bool is_idle(const at::Tensor& self, at::IntArrayRef amounts) {
  return std::all_of(amounts.begin(), amounts.end(), [](int64_t n) { return n == 0; }) &&
         amounts.size() % 2 == 0 && static_cast<int64_t>(amounts.size()) <= 2 * self.dim() &&
         self.is_non_overlapping_and_dense() &&  // else a copy has other strides
         may_hand_on(self);
}

void run_pad(Stack& stack) {
  const auto value = torch::jit::pop(stack).toOptional<double>();
  const std::string mode = torch::jit::pop(stack).toStringRef();
  const auto amounts = torch::jit::pop(stack).toIntVector();
  const at::Tensor self = torch::jit::pop(stack).toTensor();
  torch::jit::push(stack, is_idle(self, amounts) ? self : at::pad(self, amounts, mode, value));
}

bool is_constant_mode(const Value* mode) { return known_string(mode) == "constant"; }

// Whether the value is a tensor of its own, to which nothing writes.
bool is_own_and_kept(const Value* value) {
  const Value* source = behind_profile(value);
  return op_facts().fresh.count(source->node()->kind()) != 0 && is_never_written(source);
}

void write_pad(Graph& graph, Node* node) {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::pad");
  if (node->inputs().size() != 4 || !is_constant_mode(node->input(2)) || !is_own_and_kept(node->input(0)) ||
      !is_never_written(node->output())) {
    return;
  }
  Node* made = graph.create(kind, node->inputs(), 1)->insertAfter(node);
  made->copyMetadata(node);
  node->output()->replaceAllUsesWith(made->output());
}

}  // namespace

at::Tensor padded_or_same(const at::Tensor& self, at::IntArrayRef amounts) {
  return is_idle(self, amounts) ? self : at::constant_pad_nd(self, amounts);
}

void slice_or_whole(Stack& stack) {
  const auto step = torch::jit::pop(stack).toInt();
  const auto end = torch::jit::pop(stack).toOptional<int64_t>();
  const auto start = torch::jit::pop(stack).toOptional<int64_t>();
  const auto dim = torch::jit::pop(stack).toInt();
  at::Tensor self = torch::jit::pop(stack).toTensor();
  const bool known = -self.dim() <= dim && dim < self.dim();
  if (known && step == 1 && start.value_or(0) == 0 && end.value_or(self.size(dim)) >= self.size(dim) &&
      may_hand_on(self)) {
    torch::jit::push(stack, std::move(self));
  } else {
    torch::jit::push(stack, at::slice(self, dim, start, end, step));
  }
}

void drop_whole_slices(Graph& graph, const Node* first) {
  for (Node* node : all_nodes(graph)) {
    if (node->kind() == c10::aten::pad && is_passed_later(node, first)) {
      write_pad(graph, node);
    }
  }
}

void register_pad() {
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator("tsfuser::pad(Tensor(a) self, int[] pad, str mode, float? value) -> Tensor(a)",
                            run_pad, c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
