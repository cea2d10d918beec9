// Has an op that was in place, and became functional, leave the dtype of its tensor as it is, or raise, also
// in calls that bring other dtypes than the profiled ones. Behind autodiff, which takes no such node:
//
//     %s = aten::exp[written=1](%y)          %s = aten::exp(%y);  %t = tsfuser::as_written(%s, %y)
//     %t = aten::type_as(aten::add(          %s = aten::add(...)
//         idle cast of %y, ...), %y)         %t = tsfuser::as_written(%s, %y)
//
// in_place.cpp writes the left side. Autodiff writes ops anew, without their attributes. Casts, by which ops
// of two tensors are told, stay; for the ops of one, calls whose tensors are of another kind than the
// profiled ones go to the fallback of the differentiable graph, which autodiff has not seen.
//
// The fallback of a group, and of a differentiable graph, is profiled and differentiated in its turn: the
// right side becomes the left one again. The call that is profiled computes `as_written` of tensors without
// elements, for its error.

#include "torchscript/written_dtypes.h"
#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"

#include <algorithm>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

c10::Symbol as_written() {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::as_written");
  return kind;
}

c10::Symbol mark() {
  static const auto name = c10::Symbol::attr("written");
  return name;
}

const Value* operand(const Node* node, size_t i) { return behind_profile(node->input(i)); }

Node* maker_of(Node* node, size_t i) {
  Node* maker = node->input(i)->node();
  return is_profile(maker) ? maker->input()->node() : maker;
}

// The op whose result the node casts; a relu may stand between them (in_place.cpp, `keep_dtype`).
Node* cast_op(Node* cast) {
  Node* maker = maker_of(cast, 0);
  const bool hands_on = maker->kind() == c10::aten::relu && maker_of(maker, 0)->inputs().size() > 1;
  return hands_on ? maker_of(maker, 0) : maker;
}

// Whether the node is a cast that in_place.cpp has written behind an op of two tensors.
bool is_cast_back(Node* node) {
  if (node->kind() != c10::aten::type_as || cast_op(node)->inputs().empty()) {
    return false;
  }
  const Node* first = operand(cast_op(node), 0)->node();
  return is_idle_cast(first) && operand(first, 0) == operand(node, 1);
}

// `as_written` of a result, behind the node.
Node* put_check(Node* behind, Value* result, Value* target) {
  Node* check = behind->owningGraph()->create(as_written(), {result, target}, 1);
  check->copyMetadata(behind);
  check->output()->setType(result->type());
  return check->insertAfter(behind);
}

enum class Category { kBool, kInteger, kFloating, kComplex };

Category category(at::ScalarType dtype) {
  return at::isComplexType(dtype)    ? Category::kComplex
         : at::isFloatingType(dtype) ? Category::kFloating
         : dtype == at::kBool        ? Category::kBool
                                     : Category::kInteger;
}

// Whether a change of the dtype is an error, so that the call that is profiled needs no cast.
bool is_mark_enough(const Node* op) {
  return op_facts().retyped.count(op->kind()) != 0 &&
         std::none_of(op->inputs().begin() + 1, op->inputs().end(), is_tensor);
}

// Gives the readers of a check what autodiff takes. An op that autodiff does not take keeps its check.
void leave_out(Node* check) {
  Node* op = cast_op(check);
  if (op->inputs().empty() || operand(op, 0) != operand(check, 1) || !may_be_inside(op)) {
    return;
  }
  if (op == operand(check, 0)->node() && is_mark_enough(op)) {
    op->i_(mark(), 1);
    check->output()->replaceAllUsesWith(op->output());
  } else {
    Node* cast = check->owningGraph()->create(c10::aten::type_as, check->inputs(), 1);
    cast->copyMetadata(check);
    check->output()->replaceAllUsesWith(cast->insertAfter(check)->output());
    for (size_t i = 0; i < op->inputs().size(); ++i) {
      if (is_tensor(op->input(i))) {
        keep_dtype_of_gradient(op, i);
      }
    }
  }
  disarm(check);
}

}  // namespace

void mark_written(Node* op) {
  if (op_facts().retyped.count(op->kind())) {
    op->i_(mark(), 1);
  }
}

void hide_dtype_checks(Graph& graph, const Node*) {
  for (Node* node : all_nodes(graph)) {
    if (node->kind() == as_written() && node->hasUses()) {
      leave_out(node);
    } else if (node->hasAttribute(mark())) {
      disarm(put_check(node, node->output(), node->input(0)));
    } else if (is_cast_back(node)) {
      disarm(put_check(node, node->input(0), node->input(1)));
    }
  }
}

ProfiledDtypes written_dtypes(const Node& check) {
  const auto calls = fallbacks(check);
  const bool any = std::any_of(calls.begin(), calls.end(), [](const auto& call) {
    const auto nodes = all_nodes(*call.second->graph());
    return std::any_of(nodes.begin(), nodes.end(), [](Node* node) { return node->hasAttribute(mark()); });
  });
  ProfiledDtypes profiled;
  for (size_t i = 0; any && i < check.inputs().size(); ++i) {
    const auto type = check.outputs()[i]->type()->cast<c10::TensorType>();
    if (type) {
      profiled.emplace_back(i, type->scalarType().value_or(at::kFloat));
    }
  }
  return profiled;
}

bool differ(const ProfiledDtypes& profiled, at::ArrayRef<c10::IValue> given) {
  return std::any_of(profiled.begin(), profiled.end(), [given](const auto& each) {
    const auto& value = given[each.first];
    return value.isTensor() && value.toTensor().defined() &&
           category(value.toTensor().scalar_type()) != category(each.second);
  });
}

void check_written(Graph& graph) {
  Walk walk(graph);
  for (Node* node : walk) {
    if (node->hasAttribute(mark())) {
      node->removeAttribute(mark());
      Node* check = put_check(node, node->output(), node->input(0));
      node->output()->replaceAllUsesAfterNodeWith(check, check->output());
    } else if (is_cast_back(node)) {
      Node* check = put_check(node, node->input(0), node->input(1));
      check->output()->setType(node->output()->type());
      node->output()->replaceAllUsesWith(check->output());
      walk.destroy(node);
    }
  }
}

}  // namespace tsfuser
