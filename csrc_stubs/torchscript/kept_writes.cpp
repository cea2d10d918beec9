// Some passes of torch drop nodes by what schemas say: unrolling of loops does. The schema of batch norm
// does not say that it updates running statistics, so torch would drop a batch norm that only does that. In
// a copy of a graph with fewer branches results may be dead that the program reads in other calls. Before
// and after:
//
//     %y = aten::batch_norm(%x, ..., %mean, %var, %training, ...)
//                                                                      = tsfuser::kept(%y)

#include "torchscript/kept_writes.h"
#include "torchscript/constants.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <unordered_set>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Node;
using torch::jit::Value;

// Whether dead code elimination may drop the node if nothing reads its results.
bool may_be_dropped(const Node* node) {
  const auto* schema = node->maybeSchema();
  return !node->hasSideEffects() && node->blocks().empty() && !node->outputs().empty() &&
         !(schema && schema->is_mutable());
}

// The nodes whose results nothing reads, or only such nodes.
std::unordered_set<const Node*> dead_nodes(const std::vector<Node*>& nodes) {
  std::unordered_set<const Node*> dead;
  const auto is_idle = [&](const Value* result) {
    return std::all_of(result->uses().begin(), result->uses().end(),
                       [&](const torch::jit::Use& use) { return dead.count(use.user) != 0; });
  };
  for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
    const auto results = (*node)->outputs();
    if (may_be_dropped(*node) && std::all_of(results.begin(), results.end(), is_idle)) {
      dead.insert(*node);
    }
  }
  return dead;
}

// Whether it updates statistics in some call.
bool may_write(const Node* node) {
  if (op_facts().writers.count(node->kind()) == 0) {
    return false;
  }
  for (const char* name : {"training", "use_input_stats"}) {
    if (node->hasNamedInput(name)) {
      const auto on = known_bool(node->namedInput(name));
      return !on || *on;
    }
  }
  return true;
}

}  // namespace

void keep_writes(torch::jit::Graph& graph) {
  static const auto kept = c10::Symbol::fromQualString("tsfuser::kept");
  const auto nodes = all_nodes(graph);
  const auto dead = dead_nodes(nodes);
  for (Node* node : nodes) {
    if (may_write(node) && dead.count(node) != 0) {
      graph.create(kept, {node->output(0)}, 0)->insertAfter(node)->copyMetadata(node);
    }
  }
}

void register_kept_writes() {
  static const torch::jit::RegisterOperators registered({torch::jit::Operator(
      "tsfuser::kept(Tensor value) -> ()", [](torch::jit::Stack& stack) { stack.pop_back(); },
      c10::AliasAnalysisKind::CONSERVATIVE)});
}

}  // namespace tsfuser
