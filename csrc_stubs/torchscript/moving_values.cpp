#include "torchscript/moving_values.h"
#include "torchscript/call_facts.h"
#include "torchscript/nodes.h"

#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>

namespace tsfuser {
namespace {

using torch::jit::Value;

// Torch's check, where there is one, says what was profiled.
bool may_require_gradient(const Value* given) {
  const auto* check = given->node();
  if (!is_gradient_check(check)) {
    return may_hold_tensors(given->type());
  }
  const auto type = check->tys(c10::attr::types).at(given->offset())->cast<c10::TensorType>();
  return !type || type->requiresGrad().value_or(true);
}

}  // namespace

std::unordered_set<const Value*> moving_values(const torch::jit::Node& differentiable) {
  auto& graph = *differentiable.g(c10::attr::Subgraph);
  std::unordered_set<const Value*> moving;
  for (size_t i = 0; i < graph.inputs().size(); ++i) {
    if (may_require_gradient(differentiable.input(i))) {
      moving.insert(graph.inputs()[i]);
    }
  }
  for (const auto* node : all_nodes(graph)) {
    const auto inputs = node->inputs();
    const auto moves = [&moving](const Value* value) { return moving.count(value) != 0; };
    if (!node->blocks().empty() || std::any_of(inputs.begin(), inputs.end(), moves)) {
      moving.insert(node->outputs().begin(), node->outputs().end());
    }
  }
  return moving;
}

}  // namespace tsfuser
