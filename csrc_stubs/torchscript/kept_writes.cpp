// Some passes of torch drop nodes by what schemas say: unrolling of loops does. The schema of batch norm
// does not say that it updates running statistics, so torch would drop a batch norm that only does that. In
// a copy of a graph with fewer branches results may be dead that the program reads in other calls. Before
// and after:
//
//     %y = aten::batch_norm(%x, ..., %mean, %var, %training, ...)
//                                                                      = tsfuser::kept(%y)
//
// Autodiff moves nodes by what schemas say: two batch norms that update the same statistics might change
// places, or one with what reads its statistics. After, if anything else reads %mean:
//
//      = tsfuser::updated(%mean)
//     %y = aten::batch_norm(%x, ..., %mean, %var, %training, ...)
//      = tsfuser::updated(%mean)
//
// By its schema, this op writes to %mean. Once the graph is differentiated, `forget_order` removes it.
//
// Part of a program has `tsfuser::written_later(%y)` as its end where the program writes to %y behind it: of
// `%y = %x + 0` torch makes %x else, and saves that for a derivative. `forget_noted_writes` removes it.

#include "torchscript/kept_writes.h"
#include "torchscript/constants.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <map>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

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

const auto kUpdated = c10::Symbol::fromQualString("tsfuser::updated");
const auto kWrittenLater = c10::Symbol::fromQualString("tsfuser::written_later");

// Equal for two values that surely are one tensor: a value, or the attributes that lead from one to it.
using Place = std::pair<const Value*, std::string>;

Place place_of(const Value* value) {
  std::string path;
  for (value = behind_profile(value); value->node()->kind() == c10::prim::GetAttr;
       value = value->node()->input()) {
    path.insert(0, "." + value->node()->s(c10::attr::name));
  }
  return {value, std::move(path)};
}

// The statistics that the node updates in some call.
std::vector<Value*> updated_by(Node* node) {
  std::vector<Value*> found;
  for (const char* name : {"running_mean", "running_var"}) {
    if (may_write(node) && node->hasNamedInput(name) && !node->namedInput(name)->mustBeNone()) {
      found.push_back(node->namedInput(name));
    }
  }
  return found;
}

void destroy_all(torch::jit::Graph& graph, c10::Symbol kind) {
  Walk walk(graph);
  for (Node* node : walk) {
    if (node->kind() == kind) {
      walk.destroy(node);
    }
  }
}

}  // namespace

void order_writes(torch::jit::Graph& graph, const Node*) {
  std::map<Place, std::unordered_set<const Node*>> readers;
  const auto nodes = all_nodes(graph);
  for (Node* node : nodes) {
    for (const Value* value : updated_by(node)) {
      readers[place_of(value)];
    }
  }
  for (const Node* node : readers.empty() ? std::vector<Node*>() : nodes) {
    for (const Value* value : node->inputs()) {
      const auto found = is_profile(node) || node->kind() == c10::prim::GetAttr
                             ? readers.end()
                             : readers.find(place_of(value));
      if (found != readers.end()) {
        found->second.insert(node);
      }
    }
  }
  for (Node* node : nodes) {
    for (Value* value : updated_by(node)) {
      if (readers[place_of(value)].size() > 1) {
        graph.create(kUpdated, {value}, 0)->insertBefore(node)->copyMetadata(node);
        graph.create(kUpdated, {value}, 0)->insertAfter(node)->copyMetadata(node);
      }
    }
  }
}

void forget_order(torch::jit::Graph& graph) { destroy_all(graph, kUpdated); }

void note_write(Value* value) {
  torch::jit::Graph& graph = *value->owningGraph();
  graph.appendNode(graph.create(kWrittenLater, {value}, 0));
}

void forget_noted_writes(torch::jit::Graph& graph) { destroy_all(graph, kWrittenLater); }

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
  const auto drop = [](torch::jit::Stack& stack) { stack.pop_back(); };
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator("tsfuser::kept(Tensor value) -> ()", drop, c10::AliasAnalysisKind::CONSERVATIVE),
       torch::jit::Operator("tsfuser::updated(t(a!) statistics) -> ()", drop,
                            c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::written_later(t(a!) value) -> ()", drop,
                            c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
