// A join of what another one has put together before, and more, reads that one's result. Before:
//
//     %x = aten::cat([%a, %b], 1);  ...;  %y = aten::cat([%a, %b, %c], 1)
//
// After: %y = aten::cat([%x, %c], 1)
//
// DenseNet joins all results of a block anew for each of its layers. A group takes no more than a few
// tensors; so it takes a join of these two where it would not take that of all. And in the backward each of
// the tensors had a gradient of each layer, which autograd adds one by one; now the sum is made for all of
// them at once. The order in which gradients are added is the same. In calls that record no gradients only
// joins of more tensors than a group takes: of others a group need not store the result. A step of
// prepare.cpp.

#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/twin_rows.h"

#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

// A cat of tensors that the graph lists, along a known dim.
struct Join {
  Node* node;
  int64_t dim;

  at::ArrayRef<Value*> tensors() const { return node->input(0)->node()->inputs(); }
};

std::optional<Join> join_of(Node* node) {
  if (node->kind() != c10::aten::cat || node->input(0)->node()->kind() != c10::prim::ListConstruct ||
      !is_joined_only(node->input(0))) {
    return std::nullopt;
  }
  const auto dim = torch::jit::toIValue(node->input(1));
  return dim && dim->isInt() ? std::make_optional(Join{node, dim->toInt()}) : std::nullopt;
}

c10::Symbol recorded() {
  static const auto name = c10::Symbol::attr("recorded");
  return name;
}

// Whether the node has run wherever the other one does.
bool dominates(const Node* node, const Node* other) {
  for (const auto* block = other->owningBlock(); block;
       block = block->owningNode() ? block->owningNode()->owningBlock() : nullptr) {
    if (block == node->owningBlock()) {
      return node->isBefore(other);
    }
  }
  return false;
}

// Whether `first` has put together what `second` begins with.
bool begins_with(const Join& second, const Join& first) {
  const auto all = second.tensors(), some = first.tensors();
  return first.dim == second.dim && some.size() < all.size() &&
         std::equal(
             some.begin(), some.end(), all.begin(),
             [](const Value* a, const Value* b) { return behind_profile(a) == behind_profile(b); }) &&
         dominates(first.node, second.node);
}

// Whether the result is still what the tensors are together.
bool stays(const Join& join) {
  const auto tensors = join.tensors();
  return is_never_written(join.node->output()) &&
         std::all_of(tensors.begin(), tensors.end(), is_own_and_stays);
}

}  // namespace

void record_joins(Graph& graph) {
  for (Node* node : all_nodes(graph)) {
    if (node->kind() == c10::aten::cat) {
      node->i_(recorded(), 1);
    }
  }
}

void nest_joins(Graph& graph, const Node* first) {
  std::vector<Join> joins;  // in the order of the program, with the tensors that it lists
  std::vector<std::pair<Node*, std::vector<Value*>>> nested;
  for (Node* node : all_nodes(graph)) {
    const auto join = join_of(node);
    if (!join) {
      continue;
    }
    const auto tensors = join->tensors();
    const bool stored = node->hasAttribute(recorded()) || tensors.size() > op_facts().most_joined;
    if (stored && node->isAfter(first)) {
      const auto longest = std::find_if(joins.rbegin(), joins.rend(), [&](const Join& other) {
        return begins_with(*join, other) && stays(other);
      });
      if (longest != joins.rend()) {
        std::vector<Value*> items = {longest->node->output()};
        items.insert(items.end(), tensors.begin() + longest->tensors().size(), tensors.end());
        nested.emplace_back(node, std::move(items));
      }
    }
    joins.push_back(*join);
  }
  for (const auto& [node, items] : nested) {
    node->replaceInput(0, graph.createList(c10::TensorType::get(), items)->insertBefore(node)->output());
  }
}

}  // namespace tsfuser
