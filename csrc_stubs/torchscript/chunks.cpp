// Chunks, kept from torch's own derivative of them.
//
//     %p, %q = prim::ConstantChunk[chunks=2, dim=1](%x)
//
// becomes
//
//     %p, %q = prim::ListUnpack(tsfuser::chunks(%x, 2, 1))
//
// Autodiff takes `prim::ConstantChunk`, and its derivative is wrong if only some of the chunks get a
// gradient: it joins the gradients that there are. So it raises, or, where a chunk has the size 1 along the
// dim, gives all of them the gradient of one. A list stays outside of differentiable graphs, or becomes
// parts that each have a derivative of their own (part_twin.cpp). The list is an op of ours, since torch
// makes a `prim::ConstantChunk` of each `aten::chunk` whose numbers it knows.

#include "torchscript/nodes.h"
#include "torchscript/twin_rows.h"
#include "torchscript/constants.h"

#include <ATen/core/stack.h>
#include <ATen/ops/chunk.h>
#include <torch/csrc/jit/ir/constants.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

namespace tsfuser {
namespace {

using torch::jit::Graph;
using torch::jit::Node;
using torch::jit::Stack;
using torch::jit::Value;

const auto kOwnChunks = c10::Symbol::fromQualString("tsfuser::chunks");

void run_chunks(Stack& stack) {
  const int64_t dim = torch::jit::pop(stack).toInt(), count = torch::jit::pop(stack).toInt();
  torch::jit::push(stack, at::chunk(torch::jit::pop(stack).toTensor(), count, dim));
}

// Gives the readers of a node's results those of another node.
void hand_over(Node* node, Node* other) {
  other->copyMetadata(node);
  for (size_t k = 0; k < node->outputs().size(); ++k) {
    other->output(k)->copyMetadata(node->output(k));
    node->output(k)->replaceAllUsesWith(other->output(k));
  }
}

// The node of the same block that alone reads the list of chunks, and takes it apart into as many as were
// asked for; null if there is none, or one of the numbers is unknown.
Node* taker_of_chunks(const Node* node) {
  const auto& uses = node->output()->uses();
  Node* taker = uses.size() == 1 ? uses[0].user : nullptr;
  return taker && taker->kind() == c10::prim::ListUnpack && taker->owningBlock() == node->owningBlock() &&
                 known_int(node->input(1)) == static_cast<int64_t>(taker->outputs().size()) &&
                 known_int(node->input(2))
             ? taker
             : nullptr;
}

}  // namespace

void write_chunks(Graph& graph) {
  for (Node* node : all_nodes(graph)) {
    const torch::jit::WithInsertPoint behind(node->next());
    if (node->kind() == c10::aten::chunk) {
      Node* list = graph.insertNode(graph.create(kOwnChunks, node->inputs(), 1));
      list->copyMetadata(node);
      list->output()->setType(node->output()->type());
      node->output()->replaceAllUsesWith(list->output());
    } else if (node->kind() == c10::prim::ConstantChunk) {
      Value* count = graph.insertConstant(node->i(c10::attr::chunks));
      Value* dim = graph.insertConstant(node->i(c10::attr::dim));
      Node* list = graph.insertNode(graph.create(kOwnChunks, {node->input(), count, dim}, 1));
      list->copyMetadata(node);
      list->output()->setType(c10::ListType::ofTensors());
      hand_over(node, graph.insertNode(graph.createListUnpack(list->output(), node->outputs().size())));
    }
  }
}

void restore_chunks(Graph& graph) {
  Walk walk(graph);
  for (Node* node : walk) {
    if (node->kind() != kOwnChunks) {
      continue;
    }
    Node* taker = taker_of_chunks(node);
    if (!taker) {
      put(node, walk, c10::aten::chunk, node->inputs());
      continue;
    }
    Node* chunks = graph.create(c10::prim::ConstantChunk, {node->input(0)}, taker->outputs().size());
    chunks->i_(c10::attr::chunks, known_int(node->input(1)).value());
    chunks->i_(c10::attr::dim, known_int(node->input(2)).value());
    hand_over(taker, chunks->insertBefore(node));
    walk.destroy(taker);
    walk.destroy(node);
  }
}

void register_operators_of_chunks() {
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator("tsfuser::chunks(Tensor(a -> *) self, int chunks, int dim) -> Tensor(a)[]",
                            run_chunks, c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
