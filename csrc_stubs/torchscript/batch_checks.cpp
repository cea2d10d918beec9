// One op for batch norm's check that a batch has more than one value per channel. Before:
//
//      = prim::If(%training)
//       block0():
//         %s = aten::size(%x);  %n = aten::__getitem__(%s, 0);  %p = tsfuser::product_from(%s, 2, %n)
//         %one = aten::eq(%p, 1)
//          = prim::If(%one)
//           block0():  %m = aten::format(%message, %s);  prim::RaiseException(%m, %error)  -> ()
//     %y = aten::batch_norm(%x, ...)
//
// After: %c = tsfuser::checked_batch(%x, %training, %message, %error);  %y = aten::batch_norm(%c, ...)
//
// This saves six ops, a list and two branches at each batch norm. Besides, torch cuts differentiable graphs
// at nodes with side effects: a branch that raises is such a node, an op that raises is not. This is a step
// of prepare.cpp, after fold_products. The If stays in the graph, but its branch is never taken.

#include "torchscript/nodes.h"
#include "torchscript/op_facts.h"
#include "torchscript/prepare.h"
#include "torchscript/constants.h"

#include <torch/csrc/jit/ir/constants.h>

#include <algorithm>
#include <optional>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Use;
using torch::jit::Value;

bool is_string(const Value* value) { return known_string(value).has_value(); }

bool is_product(const Node* node, const Value* sizes) {
  static const auto product = c10::Symbol::fromQualString("tsfuser::product_from");
  if (node->kind() != product || node->input(0) != sizes || known_int(node->input(1)) != 2) {
    return false;
  }
  const Node* first = node->input(2)->node();
  return first->kind() == c10::aten::__getitem__ && first->input(0) == sizes &&
         known_int(first->input(1)) == 0;
}

// What the op takes: the tensor whose sizes are looked at, the message with a place for them, and the
// error.
struct BatchCheck {
  Value* batch;
  Value* message;
  Value* error;
};

// The check that the inner If is the end of.
std::optional<BatchCheck> check_of(const Node* inner) {
  const Node* compared = inner->input()->node();
  const Block* taken = inner->blocks()[0];
  std::vector<const Node*> raising;
  std::copy_if(taken->nodes().begin(), taken->nodes().end(), std::back_inserter(raising),
               [](const Node* node) { return node->kind() != c10::prim::Constant; });
  if (compared->kind() != c10::aten::eq || known_int(compared->input(1)) != 1 || !inner->outputs().empty() ||
      inner->blocks()[1]->nodes().begin() != inner->blocks()[1]->nodes().end() || raising.size() != 2 ||
      raising[0]->kind() != c10::aten::format || raising[1]->kind() != c10::prim::RaiseException ||
      raising[1]->inputs().size() != 2) {
    return std::nullopt;
  }
  const Node *format = raising[0], *raise = raising[1];
  const Node* size = format->inputs().size() == 2 ? format->input(1)->node() : inner;
  const bool known = size->kind() == c10::aten::size && size->inputs().size() == 1 &&
                     is_product(compared->input(0)->node(), size->output()) && is_string(format->input(0)) &&
                     raise->input(0) == format->output() && is_string(raise->input(1));
  if (!known) {
    return std::nullopt;
  }
  return BatchCheck{const_cast<Value*>(size->input()), const_cast<Value*>(format->input(0)),
                    const_cast<Value*>(raise->input(1))};
}

// The inner If of an If that does nothing but the check; else null.
const Node* only_check(const Node* node) {
  static const Kinds kinds = {c10::prim::Constant,
                              c10::prim::Loop,  // of products.cpp
                              c10::aten::size,     c10::aten::len,
                              c10::aten::sub,      c10::aten::__getitem__,
                              c10::aten::eq,       c10::Symbol::fromQualString("tsfuser::product_from")};
  if (node->kind() != c10::prim::If || !node->outputs().empty() ||
      node->blocks()[1]->nodes().begin() != node->blocks()[1]->nodes().end()) {
    return nullptr;
  }
  const Node* inner = nullptr;
  for (const Node* each : node->blocks()[0]->nodes()) {
    if (each->kind() == c10::prim::If && !inner) {
      inner = each;
    } else if (kinds.count(each->kind()) == 0) {
      return nullptr;
    }
  }
  return inner;
}

// The batch norms of the value behind the node, in its block.
std::vector<Use> norms_behind(const Node* node, const Value* value) {
  std::vector<Use> found;
  for (const Use& use : value->uses()) {
    if (is_profile(use.user)) {
      const auto more = norms_behind(node, use.user->output());
      found.insert(found.end(), more.begin(), more.end());
    } else if (use.user->kind() == c10::aten::batch_norm && use.offset == 0 && use.user->hasUses() &&
               use.user->owningBlock() == node->owningBlock() && use.user->isAfter(node)) {
      found.push_back(use);
    }
  }
  return found;
}

// Whether no group takes the node that makes the batch: the op between would part it from the batch norm's.
bool is_apart(const Value* batch) {
  static const Kinds kinds = {c10::aten::conv1d, c10::aten::conv2d, c10::aten::conv3d, c10::aten::linear,
                              c10::prim::Param};
  return kinds.count(behind_profile(batch)->node()->kind()) != 0;
}

}  // namespace

void check_batches(Graph& graph, const Node*) {
  static const auto checked = c10::Symbol::fromQualString("tsfuser::checked_batch");
  for (Node* node : all_nodes(graph)) {
    const Node* inner = only_check(node);
    const auto check = inner ? check_of(inner) : std::nullopt;
    const auto readers =
        check && is_apart(check->batch) && check->batch->node()->owningBlock() == node->owningBlock()
            ? norms_behind(node, check->batch)
            : std::vector<Use>();
    if (readers.empty()) {
      continue;
    }
    const torch::jit::WithInsertPoint before(node);
    Value* message = graph.insertConstant(*torch::jit::toIValue(check->message));
    Value* error = graph.insertConstant(*torch::jit::toIValue(check->error));
    Node* made = graph.insertNode(graph.create(checked, {check->batch, node->input(), message, error}, 1));
    made->copyMetadata(node);
    for (const Use& use : readers) {
      Node* profile = use.user->input(0)->node();
      (is_profile(profile) ? profile : use.user)->replaceInput(0, made->output());
    }
    node->replaceInput(0, graph.insertConstant(false));
  }
}

}  // namespace tsfuser
