// Views of tensors that no op with a derivative has made, which several parts of a graph read, stay outside
// of differentiable graphs:
//
//     %v = aten::unsqueeze(%x, 0);  %a = aten::mul(%p, %v)
//     %h = aten::cumsum(%a, 0);  %b = aten::mul(%h, %v)
//
// becomes %v = aten::unsqueeze(%x, 0);  %w = tsfuser::apart(%v);  and both products read %w.
//
// The reason: autodiff takes such a view into the differentiable graph of its first reader, and returns it
// to the others. But torch lets no such graph return what may be one of its inputs: it moves the view out of
// the graph, with all that depends on it. `apart` gives its operand back; autodiff does not know it, and a
// view alone is too small for a graph. So autograd differentiates the view, as in eager. The inverse is a
// helper of the twins' (twins.cpp). A step of prepare.cpp.
//
// The same holds for an op that may hand its operand on though its schema does not say so, and whose result
// the program returns, perhaps as a view:
//
//     %c = aten::type_as(%x, %z);  %r = aten::reshape(%c, [-1]);  return (%r)
//
// becomes %c = aten::type_as(tsfuser::apart(%x), tsfuser::apart(%z));  %d = tsfuser::apart(%c);  ...
//
// Torch would have a differentiable graph return %r. That is a tensor of its own for autograd, while it is a
// view of %x in eager if the cast changes nothing: what is written to %x later changes how %r is
// differentiated.

#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/twin_rows.h"
#include "torchscript/constants.h"

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

constexpr const char* kApart = "tsfuser::apart";

// Whether the node gives a view of its first operand, as its schema says, and autodiff takes it. A list of
// views is none.
bool is_view_inside(const Node* node) {
  const auto* schema = node->outputs().size() == 1 ? node->maybeSchema() : nullptr;
  if (!schema || schema->is_mutable() || schema->arguments().empty() || schema->returns().size() != 1) {
    return false;
  }
  return schema->arguments()[0].alias_info() && schema->returns()[0].alias_info() &&
         is_tensor(node->input(0)) && is_tensor(node->output()) && may_be_inside(node);
}

bool is_tensor_op_outside(const Node* node) {
  const auto of_tensors = [](at::ArrayRef<const Value*> values) {
    return std::any_of(values.begin(), values.end(), is_tensor);
  };
  return !is_profile(node) && of_tensors(node->inputs()) && of_tensors(node->outputs()) &&
         !may_be_inside(node);
}

// Whether an op that no differentiable graph takes stands between the readers of the value.
bool are_readers_apart(const Value* value) {
  const auto& uses = value->uses();
  if (uses.size() < 2) {
    return false;
  }
  const Node *first = uses[0].user, *last = first;
  for (const auto& use : uses) {
    if (use.user->owningBlock() != value->node()->owningBlock()) {
      return true;
    }
    first = use.user->isBefore(first) ? use.user : first;
    last = use.user->isAfter(last) ? use.user : last;
  }
  for (const Node* node = first; node != last; node = node->next()) {
    if (is_tensor_op_outside(node)) {
      return true;
    }
  }
  return false;
}

Value* apart(Value* value, Node* place) {
  static const auto kind = c10::Symbol::fromQualString(kApart);
  return value->owningGraph()->create(kind, {value}, 1)->insertAfter(place)->output();
}

// Has all readers of a view read what is kept apart.
void keep_apart(Node* view) {
  Value* kept = apart(view->output(), view);
  view->output()->replaceAllUsesAfterNodeWith(kept->node(), kept);
}

// Whether the node may give a copy, of which there must be one only: behind a write to its operand another
// one would be a copy of other elements.
bool may_copy(const Node* view) {
  static const Kinds kinds = {c10::aten::contiguous,
                              c10::aten::flatten,
                              c10::aten::reshape,
                              c10::aten::reshape_as,
                              c10::aten::to,
                              c10::aten::type_as,
                              c10::Symbol::fromQualString("aten::ravel"),
                              c10::Symbol::fromQualString("aten::resolve_conj"),
                              c10::Symbol::fromQualString("aten::resolve_neg"),
                              c10::Symbol::fromQualString("tsfuser::part"),  // a flatten
                              c10::Symbol::fromQualString("tsfuser::reshape")};
  return kinds.count(view->kind()) != 0;
}

// Gives readers behind `first` a view of their own; null where there are none. It is of the operand that is
// kept apart, so that torch does not take it for the same.
Node* own_view_behind(Node* view, Node* first) {
  if (may_copy(view)) {
    return nullptr;
  }
  std::vector<torch::jit::Use> uses = view->output()->uses();
  uses.erase(std::remove_if(uses.begin(), uses.end(),
                            [first](const torch::jit::Use& use) { return !use.user->isAfter(first); }),
             uses.end());
  if (uses.empty() || first->owningBlock() != view->owningBlock()) {
    return nullptr;
  }
  Value* operand = apart(const_cast<Value*>(behind_profile(view->input(0))), first);
  Node* own = view->owningGraph()->createClone(view, [](Value* value) { return value; });
  own->insertAfter(operand->node())->replaceInput(0, operand);
  for (const auto& use : uses) {
    use.user->replaceInput(use.offset, own->output());
  }
  return own;
}

// Whether the node is a dropout that may make a new tensor. Where it does, it is no view; where it may do
// either, differentiable.cpp looks at it.
bool is_dropout_of_training(const Node* node) {
  if (node->kind() != c10::aten::dropout) {
    return false;
  }
  return known_bool(node->input(2)).value_or(true);
}

// Whether the node may hand its first operand on, unknown to torch's alias analysis.
bool is_view_unseen(const Node* node) {
  if (is_dropout_of_training(node)) {
    return false;
  }
  const auto* schema = node->outputs().size() == 1 ? node->maybeSchema() : nullptr;
  return schema && op_facts().handed_on.count(node->kind()) != 0 && schema->returns().size() == 1 &&
         !schema->returns()[0].alias_info();
}

// Whether the node's result may be its first operand, or a view of it.
bool is_view(const Node* node) {
  if (node->inputs().empty()) {
    return false;
  }
  const auto* schema = node->maybeSchema();
  return is_profile(node) || op_facts().handed_on.count(node->kind()) != 0 ||
         node->kind() == c10::prim::ListUnpack || node->kind() == c10::prim::ConstantChunk ||
         (schema && !schema->arguments().empty() && schema->arguments()[0].alias_info());
}

// Whether a differentiable graph may make the memory of the value.
bool is_made_inside(const Value* value) {
  const Node* maker = value->node();
  while (is_view(maker)) {
    maker = maker->input(0)->node();
  }
  return may_be_inside(maker);
}

// Whether the value, or a view of it, leaves its block by another way than the node `but`.
bool is_returned(const Value* value, const Node* but = nullptr) {
  const auto& uses = value->uses();
  return std::any_of(uses.begin(), uses.end(), [but](const torch::jit::Use& use) {
    const Node* user = use.user;
    if (user == but) {
      return false;
    }
    if (user->kind() == c10::prim::ListConstruct && is_left_as_made(user->output())) {
      return false;
    }
    const auto outputs = user->outputs();
    return user->kind() == c10::prim::Return || user->kind() == c10::prim::TupleConstruct ||
           user->kind() == c10::prim::ListConstruct || user->kind() == c10::prim::DictConstruct ||
           (use.offset == 0 && is_view(user) &&
            std::any_of(outputs.begin(), outputs.end(),
                        [but](const Value* output) { return is_returned(output, but); }));
  });
}

// Whether the memory of the node's operand leaves its block by another way, too.
bool is_operand_returned(const Node* node) {
  for (const Value* value = node->input(0);;) {
    if (is_returned(value, node)) {
      return true;
    }
    if (!is_view(value->node())) {
      return false;
    }
    value = value->node()->input(0);
  }
}

// Keeps the node apart from what makes its operands, and from what reads its result.
void keep_alone(Node* node) {
  for (size_t i = 0; i < node->inputs().size(); ++i) {
    Value* operand = const_cast<Value*>(behind_profile(node->input(i)));
    if (is_tensor(operand)) {
      Value* kept = apart(operand, node);
      kept->node()->moveBefore(node);
      node->replaceInput(i, kept);
    }
  }
  keep_apart(node);
}

}  // namespace

void keep_views_apart(Graph& graph, const Node* first) {
  for (Node* node : all_nodes(graph)) {
    if (!is_view_inside(node) || may_be_inside(behind_profile(node->input(0))->node()) ||
        !are_readers_apart(node->output())) {
      continue;
    }
    Node* view = node->isAfter(first) ? node : own_view_behind(node, const_cast<Node*>(first));
    if (view && are_readers_apart(view->output())) {
      keep_apart(view);
    }
  }
  for (Node* node : all_nodes(graph)) {
    if (is_view_unseen(node) && may_be_inside(node) && is_returned(node->output()) &&
        (!is_made_inside(node->input(0)) || is_operand_returned(node))) {
      keep_alone(node);
    }
  }
}

std::vector<Helper> helpers_of_views() {
  return {{kApart, [](Node* node, Walk& walk) {
             node->output()->replaceAllUsesWith(node->input(0));
             walk.destroy(node);
           }}};
}

void register_operators_of_views() {
  static const torch::jit::RegisterOperators registered({torch::jit::Operator(
      "tsfuser::apart(Tensor(a) self) -> Tensor(a)", [](torch::jit::Stack&) {},
      c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
