// An op that is worth a kernel of its own, though nothing is differentiated with it. TorchScript makes a
// differentiable graph of two nodes or more; what stands alone is left to eager, forward and backward. So
// such an op gets a second node, a cast that is off, which hands its result on:
//
//     %y = aten::batch_norm(%x, ...)        %n = aten::batch_norm(%x, ...)
//                                           %y = aten::_autocast_to_reduced_precision(%n, 0, 0, 0, 0)
//
// Which ops these are, the op table says: those that are slow on a GPU with bfloat16. No dtype is known yet.
// So it is done only where autocast makes bfloat16 on CUDA: elsewhere a differentiable graph without a group
// would cost more of the host's time than eager's node. A step of prepare.cpp; `eager_forms` (prepare.h)
// drops the cast.

#include "torchscript/call_facts.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Use;
using torch::jit::Value;

bool makes_bfloat16() {
  return at::autocast::is_autocast_enabled(at::kCUDA) &&
         at::autocast::get_autocast_dtype(at::kCUDA) == at::kBFloat16;
}

// Whether a reader also needs a query of the result's size or dtype, as a product with noise of its sizes
// does: autodiff then puts the two into different graphs.
bool is_asked(const Value* result) {
  return std::any_of(result->uses().begin(), result->uses().end(), [](const Use& use) {
    const auto outputs = use.user->outputs();
    return !outputs.empty() && std::none_of(outputs.begin(), outputs.end(), [](const Value* output) {
      return may_hold_tensors(output->type());
    });
  });
}

// Whether autodiff puts another op into one graph with the node.
bool has_company(const Node* node) {
  const auto inputs = node->inputs();
  const auto& uses = node->output()->uses();
  return std::any_of(inputs.begin(), inputs.end(),
                     [](const Value* value) {
                       return is_tensor(value) && may_be_inside(behind_profile(value)->node());
                     }) ||
         (!is_asked(node->output()) && std::any_of(uses.begin(), uses.end(), [node](const Use& use) {
           return use.user->owningBlock() == node->owningBlock() && may_be_inside(use.user);
         }));
}

void accompany(Node* node) {
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint behind(node->next());
  Value* off = graph.insertConstant(false);
  Value* any = graph.insertConstant(static_cast<int64_t>(0));
  Node* cast = graph.insertNode(
      graph.create(c10::aten::_autocast_to_reduced_precision, {node->output(), off, off, any, any}, 1));
  cast->copyMetadata(node);
  node->output()->replaceAllUsesWith(cast->output());
  cast->replaceInput(0, node->output());
}

}  // namespace

void pair_single_ops_with_identity_cast(Graph& graph, const Node* first) {
  if (!makes_bfloat16()) {
    return;
  }
  for (Node* node : all_nodes(graph)) {
    if (op_facts().alone.count(node->kind()) != 0 && node->outputs().size() == 1 && node->hasUses() &&
        may_be_inside(node) && !node->isBefore(first) && !has_company(node)) {
      accompany(node);
    }
  }
}

}  // namespace tsfuser
