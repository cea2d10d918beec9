// Code behind a check leaves the branch that it is in. Before:
//
//     %y = prim::If(%wrong)
//       block0():  = prim::RaiseException(%text, %type)  -> (%nothing)
//       block1():  %v = aten::relu(%x)  -> (%v)
//
// After:
//
//     = prim::If(%wrong)
//       block0():  = prim::RaiseException(%text, %type)  -> ()
//       block1():  -> ()
//     %v = aten::relu(%x)
//
// So it falls into one block, and one group, with what follows. It is a step of prepare.cpp: torch
// comes past the nodes at their new place, and none is destroyed.

#include "torchscript/nodes.h"
#include "torchscript/prepare.h"

#include <torch/csrc/jit/ir/ir.h>

#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Block;
using torch::jit::Graph;
using torch::jit::Node;

bool raises(Block* block) {
  for (const Node* node : block->nodes()) {
    if (node->kind() == c10::prim::RaiseException) {
      return true;
    }
  }
  return false;
}

// The block of the branch that the program goes on from, where the other one always raises.
Block* kept(Node* branch) {
  if (branch->kind() != c10::prim::If) {
    return nullptr;
  }
  Block* then = branch->blocks()[0];
  Block* otherwise = branch->blocks()[1];
  return raises(then) == raises(otherwise) ? nullptr : raises(then) ? otherwise : then;
}

void leave(Node* branch, Block* kept) {
  const std::vector<Node*> nodes(kept->nodes().begin(), kept->nodes().end());
  Node* last = branch;
  for (Node* node : nodes) {
    node->moveAfter(last);
    last = node;
  }
  for (size_t i = branch->outputs().size(); i-- > 0;) {
    branch->output(i)->replaceAllUsesWith(kept->outputs()[i]);
    for (Block* block : branch->blocks()) {
      block->eraseOutput(i);
    }
    branch->eraseOutput(i);
  }
}

}  // namespace

void inline_checked_branches(Graph& graph, const Node* first) {
  for (Node* node : all_nodes(graph)) {  // outer ones first: inner ones then stand where they may go further
    if (Block* block = kept(node); block && node->isAfter(first)) {
      leave(node, block);
    }
  }
}

}  // namespace tsfuser
