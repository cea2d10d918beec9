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

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Node;
using torch::jit::Value;

using Nodes = std::unordered_set<const Node*>;

// Whether dead code elimination may drop the node, with all in it, if nothing reads its results.
bool may_be_dropped(const Node* node) {  // NOLINT(misc-no-recursion)
  const auto* schema = node->maybeSchema();
  if (node->hasSideEffects() || (schema && schema->is_mutable())) {
    return false;
  }
  const auto blocks = node->blocks();
  return std::all_of(blocks.begin(), blocks.end(), [](const Block* block) {
    return std::all_of(block->nodes().begin(), block->nodes().end(), may_be_dropped);
  });
}

void insert_all(const Node* node, Nodes& dead) {  // NOLINT(misc-no-recursion)
  dead.insert(node);
  for (const Block* block : node->blocks()) {
    dead.insert(block->return_node());
    for (const Node* inner : block->nodes()) {
      insert_all(inner, dead);
    }
  }
}

// Adds the nodes of the block whose results nothing reads, or only such nodes.
void find_dead(Block* block, Nodes& dead) {  // NOLINT(misc-no-recursion)
  const auto is_idle = [&](const Value* result) {
    return std::all_of(result->uses().begin(), result->uses().end(),
                       [&](const torch::jit::Use& use) { return dead.count(use.user) != 0; });
  };
  for (const Node* node : block->nodes().reverse()) {
    const auto results = node->outputs();
    if (std::all_of(results.begin(), results.end(), is_idle) && may_be_dropped(node)) {
      insert_all(node, dead);
    } else {
      for (const Block* inner : node->blocks()) {
        find_dead(const_cast<Block*>(inner), dead);
      }
    }
  }
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
  Nodes dead;
  find_dead(graph.block(), dead);
  for (Node* node : all_nodes(graph)) {
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
