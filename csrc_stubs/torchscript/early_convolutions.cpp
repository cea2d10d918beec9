// A convolution between a batch norm and the op that reads the norm's result moves before the norm. Before:
//
//     %a = aten::batch_norm(%x, ..., %mean, %var, %training, ...)
//     %w = prim::GetAttr[name="weight"](%conv);  %s = aten::conv2d(%y, %w, ...)
//     %b = aten::batch_norm(%s, ...)
//     %c = aten::add(%a, %b, 1)
//
// After: %w and %s stand before %a. So it is at the end of a block of a residual network with a convolution
// in its shortcut. A batch norm in training writes to its running statistics. Torch's alias analysis takes
// all tensors of modules for one, so the norm could not pass a convolution, whose weight it might have
// changed, and was in no differentiable graph. But no parameter of a module is a running statistic, which is
// a buffer. A step of prepare.cpp.

#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"

#include <algorithm>
#include <unordered_set>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Value;

bool is_cast_of_any(const Node* node) {
  static const Kinds kinds = {c10::Symbol::fromQualString("aten::type_as"),
                              c10::Symbol::fromQualString("aten::_autocast_to_reduced_precision"),
                              c10::Symbol::fromQualString("aten::_autocast_to_full_precision")};
  return kinds.count(node->kind()) != 0;
}

// What makes the tensor, perhaps behind casts, which may hand it on.
const Node* maker_of(const Value* value) {
  const Node* maker = behind_profile(value)->node();
  return is_cast_of_any(maker) ? maker_of(maker->input(0)) : maker;
}

bool is_parameter_or_none(const Value* value) {
  const Node* maker = maker_of(value);
  if (maker->kind() != c10::prim::GetAttr) {
    return value->type()->kind() == c10::TypeKind::NoneType;
  }
  const auto type = maker->input()->type()->cast<c10::ClassType>();
  const auto slot = type ? type->findAttributeSlot(maker->s(c10::attr::name)) : std::nullopt;
  return slot && (type->is_parameter(*slot) || type->getAttribute(*slot)->kind() == c10::TypeKind::NoneType);
}

bool is_made_by_op(const Value* value) { return op_facts().fresh.count(maker_of(value)->kind()) != 0; }

bool is_convolution(const Node* node) {
  static const Kinds kinds = {c10::aten::conv1d, c10::aten::conv2d, c10::aten::conv3d,
                              c10::aten::_convolution};
  return kinds.count(node->kind()) != 0;
}

// Whether it is a convolution of an op's result, by parameters; or a cast of such a convolution.
bool is_apart_from_statistics(const Node* node) {
  if (is_cast_of_any(node)) {
    return is_made_by_op(node->input(0)) || is_parameter_or_none(node->input(0));
  }
  return is_convolution(node) && is_made_by_op(node->input(0)) && is_parameter_or_none(node->input(1)) &&
         is_parameter_or_none(node->input(2));
}

// The nodes of its block, or around such, that read the node's results.
std::unordered_set<const Node*> readers_of(const Node* node) {
  std::unordered_set<const Node*> found;
  for (const Value* value : node->outputs()) {
    for (const auto& use : value->uses()) {
      const Node* reader = use.user;
      while (reader->owningBlock() != node->owningBlock()) {
        reader = reader->owningBlock()->owningNode();
      }
      found.insert(reader);
    }
  }
  return found;
}

// The nodes between the norm and the first that reads its result that can stand before it; none where no
// convolution is one of them.
std::vector<Node*> may_stand_before(Node* norm) {
  const auto readers = readers_of(norm);
  std::unordered_set<const Node*> staying = {norm};
  std::vector<Node*> moving;
  bool any = false, written = false;
  for (Node* node = norm->next(); readers.count(node) == 0; node = node->next()) {
    if (node->kind() == c10::prim::Return) {
      return {};
    }
    const auto inputs = node->inputs();
    const bool ready = std::none_of(inputs.begin(), inputs.end(), [&staying](const Value* input) {
      return staying.count(input->node()) != 0;
    });
    const bool apart = !written && is_apart_from_statistics(node);
    if (ready && (apart || node->kind() == c10::prim::GetAttr || node->kind() == c10::prim::Constant)) {
      moving.push_back(node);
      any |= is_convolution(node);
    } else {
      staying.insert(node);
      written |= writes(node);
    }
  }
  return any ? moving : std::vector<Node*>();
}

// Whether the graph may give an object another attribute.
bool may_set_attributes(const std::vector<Node*>& nodes) {
  static const Kinds kinds = {c10::prim::SetAttr, c10::prim::CallMethod, c10::prim::CallFunction,
                              c10::prim::PythonOp};
  return std::any_of(nodes.begin(), nodes.end(),
                     [](const Node* node) { return kinds.count(node->kind()) != 0; });
}

}  // namespace

void move_convolutions(Graph& graph, const Node* first) {
  const auto nodes = all_nodes(graph);
  if (may_set_attributes(nodes)) {
    return;
  }
  for (Node* node : nodes) {
    if (node->kind() == c10::aten::batch_norm && node->hasUses() && is_tensor(node->input(3)) &&
        node->owningBlock() == first->owningBlock() && node->isAfter(first)) {
      for (Node* moving : may_stand_before(node)) {
        moving->moveBefore(node);
      }
    }
  }
}

}  // namespace tsfuser
