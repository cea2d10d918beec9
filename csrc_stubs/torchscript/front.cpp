// See front.h. A condition of which only a part is known, as in `self.flag and f(x)`, is an If that gives a
// bool: it surely does not hold where the part does not.

#include "torchscript/front.h"
#include "torchscript/settled_branches.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"

#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Node;
using torch::jit::Value;

// Ops on numbers that a condition is made of: they have no side effects, and raise no error.
bool is_question(const Node* node) {
  static const Kinds kinds = {c10::aten::eq,      c10::aten::ne,     c10::aten::lt,
                              c10::aten::le,      c10::aten::gt,     c10::aten::ge,
                              c10::aten::__not__, c10::aten::__is__, c10::aten::__isnot__};
  return kinds.count(node->kind()) != 0 && node->output()->type()->kind() == c10::TypeKind::BoolType;
}

}  // namespace

Value* Front::attribute(Value* value) {
  Node* node = value->node();
  if (node->kind() != c10::prim::GetAttr) {
    return node == graph_.param_node() ? value : nullptr;
  }
  const auto found = copies_.find(value);
  if (found != copies_.end()) {
    return found->second;
  }
  Value* owner = attribute(node->input());
  if (!owner) {
    return nullptr;
  }
  Node* copy = graph_.createClone(node, [owner](Value*) { return owner; });
  return copies_[value] = graph_.insertNode(copy)->output();
}

Value* Front::copy_of(Value* value) {
  value = before_note(value);
  Node* node = value->node();
  if (const auto constant = torch::jit::toIValue(value)) {
    return graph_.insertConstant(*constant);
  }
  if (node->kind() == c10::prim::GetAttr) {
    return attribute(value);
  }
  if (!is_question(node)) {
    return nullptr;
  }
  std::unordered_map<Value*, Value*> given;
  for (Value* input : node->inputs()) {
    Value* copy = is_tensor(input) ? nullptr : copy_of(input);
    if (!copy) {
      return nullptr;
    }
    given[input] = copy;
  }
  return graph_.insertNode(graph_.createClone(node, [&given](Value* input) { return given[input]; }))
      ->output();
}

Value* Front::both(Value* one, Value* other) {
  return one && other ? graph_.insert(c10::aten::__and__, {one, other}) : nullptr;
}

// Holds only if the condition will be as wanted; null where that is never known.
Value* Front::surely(Value* condition, bool wanted) {
  condition = before_note(condition);
  if (Value* known = copy_of(condition)) {
    return wanted ? known : graph_.insert(c10::aten::__not__, {known});
  }
  Node* choice = condition->node();
  if (choice->kind() != c10::prim::If) {
    return nullptr;
  }
  Value* result = nullptr;
  for (const bool first : {true, false}) {
    Block* block = choice->blocks()[first ? 0 : 1];
    Value* way = both(surely(choice->input(), first), surely(block->outputs()[condition->offset()], wanted));
    result = result && way ? graph_.insert(c10::aten::__or__, {result, way}) : way ? way : result;
  }
  return result;
}

Front::Running Front::running(const Node* node) {
  Running result{graph_.insertConstant(true), true};
  for (const Block* block = node->owningBlock(); block != graph_.block();) {
    Node* choice = const_cast<Node*>(block->owningNode());
    if (choice->kind() != c10::prim::If) {
      return {nullptr, false};
    }
    result.exact = result.exact && copy_of(choice->input()) != nullptr;
    result.on = both(result.on, surely(choice->input(), block == choice->blocks()[0]));
    block = choice->owningBlock();
  }
  return result;
}

}  // namespace tsfuser
