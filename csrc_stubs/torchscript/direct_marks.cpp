// Which node of a program is which DirectGraph: torch copies the nodes between the two steps that make one.

#include "torchscript/direct.h"
#include "torchscript/nodes.h"

#include <torch/csrc/jit/ir/ir.h>

#include <map>

namespace tsfuser {
namespace {

using torch::jit::Node;

const auto& direct_mark() {
  static const auto mark = c10::Symbol::attr("direct");
  return mark;
}

struct Marks {
  std::mutex mutex;
  int64_t next = 0;
  std::map<int64_t, std::weak_ptr<DirectGraph>> graphs;
};

Marks& marks() {
  static Marks* m = new Marks;  // leaked: threads may ask as long as they run
  return *m;
}

// The only differentiable graph of the If's first block, which gives its results.
Node* only_graph(Node& choice) {
  Node* found = nullptr;
  for (Node* node : choice.blocks()[0]->nodes()) {
    if (node->kind() == c10::prim::DifferentiableGraph && !found) {
      found = node;
    } else if (node->kind() != c10::prim::Drop) {
      return nullptr;
    }
  }
  return found && choice.blocks()[0]->outputs() == found->outputs() ? found : nullptr;
}

// Whether the fallback's call takes the inputs of the graph, and gives a tuple of its results.
bool stands_for(Node& call, Node& graph, const Node& check) {
  const auto given = call.inputs().slice(1), inputs = graph.inputs();
  bool same = given.size() == inputs.size();
  for (size_t i = 0; same && i < given.size(); ++i) {
    const auto* value = inputs[i]->node() == &check ? check.input(inputs[i]->offset()) : inputs[i];
    same = value == given[i];
  }
  if (!same || call.outputs().size() != 1 || call.output()->uses().size() != 1) {
    return false;
  }
  Node* unpacked = call.output()->uses()[0].user;
  return unpacked->kind() == c10::prim::TupleUnpack && unpacked->outputs() == call.owningBlock()->outputs();
}

}  // namespace

std::shared_ptr<DirectGraph> DirectGraph::behind(const Node& check) {
  const auto calls = fallbacks(check);
  if (calls.size() != 1) {
    return nullptr;
  }
  Node& choice = *calls[0].first->owningBlock()->owningNode();
  Node* graph = only_graph(choice);
  if (!graph || !stands_for(*calls[0].first, *graph, check)) {
    return nullptr;
  }
  const auto made = std::make_shared<DirectGraph>();
  const std::lock_guard<std::mutex> lock(marks().mutex);
  graph->i_(direct_mark(), marks().next);
  marks().graphs[marks().next++] = made;
  return made;
}

std::shared_ptr<DirectGraph> DirectGraph::marked(Node& node) {
  if (!node.hasAttribute(direct_mark())) {
    return nullptr;
  }
  const int64_t mark = node.i(direct_mark());
  node.removeAttribute(direct_mark());
  const std::lock_guard<std::mutex> lock(marks().mutex);
  const auto found = marks().graphs.find(mark);
  if (found == marks().graphs.end()) {
    return nullptr;
  }
  const auto graph = found->second.lock();
  marks().graphs.erase(found);
  return graph;
}

}  // namespace tsfuser
