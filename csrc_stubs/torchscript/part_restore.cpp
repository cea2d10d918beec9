// What the parts of part_twin.cpp become at the end: outside of differentiable graphs the op that gives them
// all; in one slices, and their gradients.

#include "torchscript/nodes.h"
#include "torchscript/parts.h"
#include "torchscript/twin_rows.h"
#include "torchscript/constants.h"

#include <torch/csrc/jit/ir/constants.h>

#include <utility>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

bool are_same(const Value* value, const Value* other) {
  value = behind_profile(value), other = behind_profile(other);
  const auto constant = torch::jit::toIValue(value), given = torch::jit::toIValue(other);
  return value == other || (constant && given && *constant == *given);
}

// Whether both are parts of one tensor taken apart in one way. The last operand says which part it is.
bool are_siblings(const Node* node, const Node* other) {
  if (node->kind() != other->kind() || node->owningBlock() != other->owningBlock()) {
    return false;
  }
  for (size_t i = 0; i + 1 < node->inputs().size(); ++i) {
    if (!are_same(node->input(i), other->input(i))) {
      return false;
    }
  }
  return true;
}

// The parts beside the node, the node too, in the order of the program.
std::vector<Node*> siblings_of(Node* node) {
  std::vector<Node*> found;
  for (Node* other : node->owningBlock()->nodes()) {
    if (are_siblings(node, other)) {
      found.push_back(other);
    }
  }
  return found;
}

int64_t given_number(const Value* value) { return known_int(value).value(); }

// Has the list that an op of that kind gives, taken apart, take the places of the parts.
void restore_parts(Node* node, c10::Symbol kind, const std::vector<Value*>& operands) {
  const std::vector<Node*> parts = siblings_of(node);
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint before(node);
  const auto count = given_number(node->input(node->inputs().size() - 2));
  Node* whole = graph.insertNode(graph.create(kind, operands, 1));
  whole->output()->setType(c10::ListType::ofTensors());
  Node* taker = graph.insertNode(graph.createListUnpack(whole->output(), count));
  whole->copyMetadata(node);
  taker->copyMetadata(node);
  for (Node* part : parts) {
    Value* taken = taker->output(given_number(part->inputs().back()));
    taken->setType(part->output()->type());
    part->output()->replaceAllUsesWith(taken);
  }
}

// Has the op of a whole take the place of `node`, whose operands from `first` on are the numbers.
void restore_whole(Node* node, Walk& walk, Value* self, Value* given, size_t first) {
  const int64_t how = given_number(node->input(first + 1));
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint before(node);
  const auto number = [&](size_t k) { return node->input(first + 2 + k); };
  std::vector<Value*> operands = {self, given};
  if (how == kFlat) {
    operands = {self, number(0), number(1)};
  } else if (how == kUnflat) {
    operands = {self, number(0), given};
  } else if (how == kRolled) {
    operands.push_back(graph.insertConstant(
        rolled_dims(given_number(number(0)), given_number(number(1)), given_number(number(2)))));
  } else {
    operands.push_back(graph.insertConstant("constant"));
    operands.push_back(graph.insertConstant(c10::IValue()));
  }
  put(node, walk, kind_of(how), operands);
}

// Of a list of numbers, which a graph may also get from outside.
Value* first_item(Graph& graph, Value* list) {
  if (const auto known = known_ints(list); known && !known->empty()) {
    return graph.insertConstant(known->front());
  }
  if (list->node()->kind() == c10::prim::ListConstruct) {
    return list->node()->input(0);
  }
  return graph.insert(c10::aten::__getitem__, {list, 0});
}

}  // namespace

void restore_part(Node* node, Walk& walk) {
  const int64_t how = given_number(node->input(2));
  if (is_whole(how)) {
    restore_whole(node, walk, node->input(0), node->input(1), 1);
    return;
  }
  if (node->hasUses()) {  // else another part of it was restored
    std::vector<Value*> operands = {node->input(0), node->input(1), node->input(3)};
    if (how == kUnbound) {
      operands.erase(operands.begin() + 1);
    } else if (how != kSizes) {
      const torch::jit::WithInsertPoint before(node);
      operands[1] = first_item(*node->owningGraph(), operands[1]);
    }
    restore_parts(node, kind_of(how), operands);
  }
  walk.destroy(node);
}

namespace {

// The place of a part in a tensor of these sizes, before `node`, whose operands from `first` on are the
// numbers.
Value* placed(Node* node, const char* kind, Value* sizes, size_t first) {
  std::vector<Value*> operands = {sizes};
  operands.insert(operands.end(), node->inputs().begin() + first, node->inputs().end());
  Node* made = node->owningGraph()->create(c10::Symbol::fromQualString(kind), operands, 1);
  made->copyMetadata(node);
  made->output()->setType(c10::IntType::get());
  return made->insertBefore(node)->output();
}

// A part in a differentiable graph.
void restore_own_part(Node* node, Walk& walk) {
  Value *self = node->input(0), *dim = node->input(3);
  const int64_t how = given_number(node->input(2));
  if (is_whole(how)) {
    restore_whole(node, walk, self, node->input(1), 1);
    return;
  }
  if (how == kChunks && torch::jit::toIValue(node->input(1))) {  // no ends, which would part groups
    restore_part(node, walk);
    return;
  }
  Graph& graph = *node->owningGraph();
  const torch::jit::WithInsertPoint before(node);
  Value* sizes = graph.insert(c10::aten::size, {self});
  Value* start = placed(node, "tsfuser::part_start", sizes, 1);
  if (how == kUnbound) {
    put(node, walk, c10::aten::select, {self, dim, start});
  } else {
    Value* end = placed(node, "tsfuser::part_end", sizes, 1);
    put(node, walk, c10::aten::slice,
        {self, dim, start, end, graph.insertConstant(static_cast<int64_t>(1))});
  }
}

// The list with the opposite numbers, before `node`.
Value* negated_before(Node* node, Value* list) {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::negated");
  const torch::jit::WithInsertPoint before(node);
  Graph& graph = *node->owningGraph();
  if (const auto known = known_ints(list)) {
    return graph.insertConstant(negated(*known));
  }
  Node* made = graph.insertNode(graph.create(kind, {list}, 1));
  made->copyMetadata(node);
  made->output()->setType(c10::ListType::ofInts());
  return made->output();
}

void restore_part_backward(Node* node, Walk& walk) {
  static const auto select = c10::Symbol::fromQualString("aten::select_backward");
  static const auto slice = c10::Symbol::fromQualString("aten::slice_backward");
  Value *gradient = node->input(0), *sizes = node->input(1), *dim = node->input(4);
  const int64_t how = given_number(node->input(3));
  if (how == kFlat || how == kUnflat) {
    put(node, walk, c10::aten::reshape, {gradient, sizes});
  } else if (is_whole(how)) {
    restore_whole(node, walk, gradient, negated_before(node, node->input(2)), 2);
  } else if (how == kUnbound) {
    put(node, walk, select, {gradient, sizes, dim, node->input(6)});
  } else {
    const torch::jit::WithInsertPoint before(node);
    Value* start = placed(node, "tsfuser::part_start", sizes, 2);
    Value* end = placed(node, "tsfuser::part_end", sizes, 2);
    Value* one = node->owningGraph()->insertConstant(static_cast<int64_t>(1));
    put(node, walk, slice, {gradient, sizes, dim, start, end, one});
  }
}

}  // namespace

std::vector<Helper> helpers_of_parts() {
  return {{"tsfuser::own_part", restore_own_part}, {"tsfuser::part_backward", restore_part_backward}};
}

}  // namespace tsfuser
