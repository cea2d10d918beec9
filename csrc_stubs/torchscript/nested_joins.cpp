// A join of the operands of an earlier join, and more, reads the earlier one's result. Before:
//
//     %x = aten::cat([%a, %b], 1);  ...;  %y = aten::cat([%a, %b, %c], 1)
//
// After: %p = tsfuser::joined_before(%x, %a, %b, %c, 2, 1);  %y = aten::cat([%p, %c], 1)
//
// %p is %x if %a and %b have one dtype. Else they are joined anew, in the dtype of %y: an integer that %x
// has as a float might have lost digits.
//
// DenseNet joins all results of a block anew for each of its layers. A differentiable graph takes no more
// than a few tensors; so it takes a join of these two where it would not take that of all. And in the
// backward each of the tensors had a gradient of each layer, which autograd adds one by one; now the sum is
// made for all of them at once. The order in which gradients are added is the same. In calls that record no
// gradients only joins of more tensors than a group reads from memory: of others a group need not store the
// result. A step of prepare.cpp.

#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/twin_rows.h"
#include "torchscript/constants.h"

#include <ATen/core/stack.h>
#include <ATen/ops/cat.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <cstdint>
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
      !is_left_as_made(node->input(0))) {
    return std::nullopt;
  }
  const auto dim = known_int(node->input(1));
  return dim ? std::make_optional(Join{node, *dim}) : std::nullopt;
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

// Of what `first` joined, and of the tensors that `second` joins.
Value* joined_before(const Join& first, const Join& second) {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::joined_before");
  Graph& graph = *second.node->owningGraph();
  const torch::jit::WithInsertPoint before(second.node);
  std::vector<Value*> operands = {first.node->output()};
  const auto all = second.tensors();
  operands.insert(operands.end(), all.begin(), all.end());
  operands.push_back(graph.insertConstant(static_cast<int64_t>(first.tensors().size())));
  operands.push_back(graph.insertConstant(second.dim));
  Node* made = graph.insertNode(graph.create(kind, operands, 1));
  made->copyMetadata(second.node);
  return made->output();
}

void run_joined_before(torch::jit::Stack& stack) {
  const int64_t count = torch::jit::pop(stack).toInt() - 2;  // the interpreter says how many operands
  const int64_t dim = torch::jit::pop(stack).toInt(), some = torch::jit::pop(stack).toInt();
  const auto operands = torch::jit::last(stack, count);
  const auto dtype_of = [](const c10::IValue& operand) { return operand.toTensor().scalar_type(); };
  c10::ScalarType dtype = dtype_of(operands[0]);
  at::Tensor joined = operands[0].toTensor();
  if (!std::all_of(operands.begin() + 1, operands.begin() + 1 + some,
                   [&](const c10::IValue& operand) { return dtype_of(operand) == dtype; })) {
    for (const c10::IValue& operand : operands) {
      dtype = c10::promoteTypes(dtype, dtype_of(operand));
    }
    std::vector<at::Tensor> tensors;
    for (const c10::IValue& operand : operands.slice(1, some)) {
      tensors.push_back(operand.toTensor().to(dtype));
    }
    joined = at::cat(tensors, dim);
  }
  torch::jit::drop(stack, count);
  torch::jit::push(stack, std::move(joined));
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
    const bool stored = node->hasAttribute(recorded()) || tensors.size() > op_facts().most_joined_in_memory;
    if (stored && node->isAfter(first)) {
      const auto longest = std::find_if(joins.rbegin(), joins.rend(), [&](const Join& other) {
        return begins_with(*join, other) && stays(other);
      });
      if (longest != joins.rend()) {
        std::vector<Value*> items = {joined_before(*longest, *join)};
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

void register_nested_joins() {
  static const torch::jit::RegisterOperators registered({torch::jit::Operator(
      "tsfuser::joined_before(...) -> Tensor", run_joined_before, c10::AliasAnalysisKind::PURE_FUNCTION)});
}

}  // namespace tsfuser
