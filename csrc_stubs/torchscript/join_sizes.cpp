// The sizes of tensors that are joined are computed from those of the tensors. Before:
//
//     %r = aten::relu(%x);  %c = aten::cat([%r, %y], 1);  %s = aten::size(%c)
//
// After: %s = tsfuser::joined_sizes(aten::size(%x), aten::size(%y), 1)
//
// What asks for the rank, as each norm does, gets tsfuser::joined_dim(aten::dim(%x), aten::dim(%y)).
//
// So a channel shuffle, which views what was joined by its sizes, is in one differentiable graph with what
// is joined: the sizes are known before it. Where an op of such a graph has the sizes of its operand, those
// of the operand are asked for. A step of prepare.cpp.

#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/twin_rows.h"

#include <ATen/core/stack.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Stack;
using torch::jit::Value;
using Sizes = std::vector<int64_t>;

// Dims out of range, and sizes that do not fit, are ignored: the op itself raises the error.
void joined_sizes(Stack& stack) {
  int64_t dim = torch::jit::pop(stack).toInt();
  const Sizes other = torch::jit::pop(stack).toIntVector();
  Sizes sizes = torch::jit::pop(stack).toIntVector();
  const auto is_nothing = [](const Sizes& of) { return of.size() == 1 && of[0] == 0; };
  if (is_nothing(sizes) || is_nothing(other)) {  // may stand beside tensors of any rank
    torch::jit::push(stack, is_nothing(sizes) ? other : sizes);
    return;
  }
  const auto rank = static_cast<int64_t>(sizes.size());
  dim += dim < 0 ? rank : 0;
  if (0 <= dim && dim < rank && sizes.size() == other.size()) {
    sizes[dim] += other[dim];
  }
  torch::jit::push(stack, std::move(sizes));
}

// Of tensors of these ranks: where they differ, it is that of those that are not nothing.
void joined_dim(Stack& stack) {
  const int64_t count = torch::jit::pop(stack).toInt();  // the interpreter says how many operands
  int64_t most = 0;
  for (const c10::IValue& dim : torch::jit::last(stack, count)) {
    most = std::max(most, dim.toInt());
  }
  torch::jit::drop(stack, count);
  torch::jit::push(stack, most);
}

// What an op has taken that gives results of its sizes, as far up as that goes.
Value* source_of(Value* value) {
  static const auto checked = c10::Symbol::fromQualString("tsfuser::checked_batch");
  Node* maker = value->node();
  const auto inputs = maker->inputs();
  const bool alike = is_profile(maker) || maker->kind() == checked ||
                     op_facts().same_sizes.count(maker->kind()) != 0 ||
                     (op_facts().broadcast.count(maker->kind()) != 0 &&
                      std::count_if(inputs.begin(), inputs.end(),
                                    [](const Value* input) { return is_tensor(input); }) == 1);
  return alike && value->offset() == 0 && !inputs.empty() && is_tensor(maker->input(0))
             ? source_of(maker->input(0))
             : value;
}

// The tensors that the node joins; none where it does not, or where something may change their sizes.
std::vector<Value*> joined_by(Node* node) {
  if (node->kind() != c10::aten::cat) {
    return {};
  }
  Node* list = node->input(0)->node();
  std::vector<Value*> sources;
  if (list->kind() != c10::prim::ListConstruct || list->inputs().size() > op_facts().most_joined_in_memory ||
      !is_joined_only(node->input(0))) {
    return {};
  }
  for (Value* tensor : list->inputs()) {
    sources.push_back(source_of(tensor));
    if (!is_never_written(tensor) || !is_never_written(sources.back())) {
      return {};
    }
  }
  return sources;
}

Value* sizes_of_join(Graph& graph, const Node* join, const std::vector<Value*>& sources) {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::joined_sizes");
  Value* sizes = graph.insert(c10::aten::size, {sources[0]});
  for (size_t k = 1; k < sources.size(); ++k) {
    Value* other = graph.insert(c10::aten::size, {sources[k]});
    sizes = graph.insert(kind, {sizes, other, join->input(1)});
  }
  return sizes;
}

Value* dim_of_join(Graph& graph, const std::vector<Value*>& sources) {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::joined_dim");
  std::vector<Value*> dims;
  std::unordered_set<Value*> asked;
  for (Value* source : sources) {
    if (asked.insert(source).second) {
      dims.push_back(graph.insert(c10::aten::dim, {source}));
    }
  }
  Value* dim = graph.insertNode(graph.create(kind, dims, 1))->output();
  return dim->setType(c10::IntType::get());
}

}  // namespace

void size_joins(Graph& graph, const Node* first) {
  for (Node* node : all_nodes(graph)) {
    const bool asks = node->kind() == c10::aten::size || node->kind() == c10::aten::dim;
    if (!asks || node->inputs().size() != 1 || !node->isAfter(first)) {
      continue;
    }
    Node* join = node->input()->node();
    join = is_profile(join) ? join->input()->node() : join;
    const auto sources = joined_by(join);
    if (sources.empty()) {
      continue;
    }
    const torch::jit::WithInsertPoint behind(node->next());
    Value* answer =
        node->kind() == c10::aten::size ? sizes_of_join(graph, join, sources) : dim_of_join(graph, sources);
    answer->node()->copyMetadata(node);
    node->output()->replaceAllUsesWith(answer);
  }
}

void register_join_sizes() {
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator("tsfuser::joined_sizes(int[] sizes, int[] other, int dim) -> int[]",
                            joined_sizes, c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::joined_dim(...) -> int", joined_dim,
                            c10::AliasAnalysisKind::PURE_FUNCTION)});
}

}  // namespace tsfuser
