// Results that leave through a loop or a branch stay tensors of their own.
//
// Torch merges equal ops, but not if both results leave the graph: a program may write to one of them. That
// a result leaves through a loop, or through a branch that hands it on, torch does not see. So a program
// without branches of its own has that fault, and one that has some must not get it by having them settled:
//
//     %a = aten::mul(%c, %s);  %b = aten::mul(%c, %s);  %d = prim::Loop(..., %b);  return (%a, %d)
//
// becomes %b = aten::mul(tsfuser::unmerged(%c), %s). The op hands its operand on.

#include "torchscript/nodes.h"
#include "torchscript/settled_branches.h"

#include <torch/csrc/jit/ir/constants.h>
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

constexpr int kDepth = 8;  // of the expressions that are compared

// Whether two of its kind can be compared, without a question to a tensor.
bool is_plain(const c10::IValue& constant) {
  return constant.isNone() || constant.isScalar() || constant.isString() || constant.isIntList() ||
         constant.isDoubleList() || constant.isBoolList();
}

bool compute_the_same(const Node* one, const Node* other, int depth);

bool are_the_same(const Value* one, const Value* other, int depth) {
  if (one == other) {
    return true;
  }
  const auto known = torch::jit::toIValue(one), same = torch::jit::toIValue(other);
  if (known || same) {
    return known && same && is_plain(*known) && known->tagKind() == same->tagKind() && *known == *same;
  }
  return one->offset() == other->offset() && compute_the_same(one->node(), other->node(), depth - 1);
}

bool compute_the_same(const Node* one, const Node* other, int depth) {
  const auto mine = one->inputs(), others = other->inputs();
  return depth > 0 && one->kind() == other->kind() && one->kind() != c10::prim::Param &&
         one->blocks().empty() && mine.size() == others.size() &&
         std::equal(mine.begin(), mine.end(), others.begin(),
                    [depth](const Value* x, const Value* y) { return are_the_same(x, y, depth); });
}

// Whether a loop or a branch may hand the value on.
bool may_leave_unseen(const Value* value) {
  return std::any_of(value->uses().begin(), value->uses().end(), [](const torch::jit::Use& use) {
    return use.user->kind() == c10::prim::Loop ||
           (use.user->kind() == c10::prim::Return && use.user->owningBlock()->owningNode());
  });
}

}  // namespace

void keep_results_apart(Graph& graph) {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::unmerged");
  const std::vector<Node*> nodes = all_nodes(graph);
  for (Node* node : nodes) {
    const auto inputs = node->inputs();
    const auto tensor = std::find_if(inputs.begin(), inputs.end(), is_tensor);
    if (!node->kind().is_aten() || node->outputs().size() != 1 || !is_tensor(node->output()) ||
        tensor == inputs.end() || !may_leave_unseen(node->output())) {
      continue;
    }
    if (std::any_of(nodes.begin(), nodes.end(), [node](const Node* other) {
          return other != node && compute_the_same(node, other, kDepth);
        })) {
      Node* kept = graph.create(kind, {*tensor}, 1)->insertBefore(node);
      node->replaceInput(tensor - inputs.begin(), kept->output());
    }
  }
}

void register_unmerged() {
  static const torch::jit::RegisterOperators registered({torch::jit::Operator(
      "tsfuser::unmerged(Tensor(a) self) -> Tensor(a)", [](torch::jit::Stack&) {},
      c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
