// A node that does nothing behind each loop whose result has one reader. Before:
//
//     %b : Tensor = prim::Loop(%n, %true, %a)
//       block0(%i : int, %c : Tensor):  %e = aten::sub(%c, %a, %1)  -> (%true, %e)
//     %d : Tensor = aten::add(%a, %b, %1)
//
// After: the same with `tsfuser::loop_end()` between the loop and %d.
//
// Torch's interpreter runs what has one reader, and stands directly before it, when it gathers the reader's
// operands: %a of the add first, then the loop. So the last use of %a that it meets is the one in the loop,
// and there it takes %a out of its register: the second iteration finds none ("Expected Tensor but got
// None"). The nodes of the profiler keep the two apart, and so does what stands there once they are gone.

#include "torchscript/prepare.h"

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Node;

const c10::Symbol& end_kind() {
  static const auto kind = c10::Symbol::fromQualString("tsfuser::loop_end");
  return kind;
}

// Notes the nodes that are loops, or have some, and may be run as an operand. Whether the block has a loop.
bool find_loops(Block* block, std::vector<Node*>& found) {
  bool any = false;
  for (Node* node : block->nodes()) {
    bool loops = node->kind() == c10::prim::Loop;
    for (Block* inner : node->blocks()) {
      loops |= find_loops(inner, found);
    }
    if (loops && node->outputs().size() == 1 && node->output()->uses().size() == 1) {
      found.push_back(node);
    }
    any |= loops;
  }
  return any;
}

}  // namespace

void end_loops(torch::jit::Graph& graph) {
  std::vector<Node*> loops;
  find_loops(graph.block(), loops);
  for (Node* node : loops) {
    if (node->next()->kind() != end_kind()) {
      graph.create(end_kind(), 0)->insertAfter(node);
    }
  }
}

void register_loop_end() {  // its alias analysis keeps it from being dead code
  static const torch::jit::RegisterOperators registered({torch::jit::Operator(
      "tsfuser::loop_end() -> ()", [](torch::jit::Stack&) {}, c10::AliasAnalysisKind::CONSERVATIVE)});
}

}  // namespace tsfuser
