#include "torchscript/graph_snapshot.h"

#include "torchscript/nodes.h"

namespace tsfuser {

GraphSnapshot::GraphSnapshot(torch::jit::Graph& graph)
    : graph_(graph), nodes_(all_nodes(graph)), copy_(graph.copy()) {}

void GraphSnapshot::restore() const {
  Restored own;
  const std::vector<Node*> copied = all_nodes(*copy_);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    own.nodes[copied[i]] = nodes_[i];
  }
  release_all();
  put_nodes_back(*copy_->block(), *graph_.block(), own);
  drop_new_nodes(*graph_.block(), {nodes_.begin(), nodes_.end()});
  put_ends_back(*copy_->block(), *graph_.block(), own);
  put_operands_back(*copy_->block(), *graph_.block(), own);
}

// From then on nothing reads anything.
void GraphSnapshot::release_all() const {
  graph_.return_node()->removeAllInputs();
  for (Node* node : all_nodes(graph_)) {
    node->removeAllInputs();
    for (Block* block : node->blocks()) {
      block->return_node()->removeAllInputs();
    }
  }
}

// New nodes are before them then.
void GraphSnapshot::put_nodes_back(const Block& from, Block& to, const Restored& own) {
  for (const Node* node : from.nodes()) {
    Node* kept = own.nodes.at(node);
    kept->moveBefore(to.return_node());
    while (kept->blocks().size() < node->blocks().size()) {
      kept->addBlock();
    }
    for (size_t i = 0; i < node->blocks().size(); ++i) {
      put_nodes_back(*node->blocks()[i], *kept->blocks()[i], own);
    }
  }
}

void GraphSnapshot::drop_new_nodes(Block& block, const std::unordered_set<const Node*>& old) {
  const std::vector<Node*> nodes(block.nodes().begin(), block.nodes().end());
  for (Node* node : nodes) {
    if (old.count(node) == 0) {
      node->destroy();
      continue;
    }
    for (Block* inner : node->blocks()) {
      drop_new_nodes(*inner, old);
    }
  }
}

void GraphSnapshot::put_ends_back(const Block& from, Block& to, Restored& own) {
  while (to.inputs().size() > from.inputs().size()) {
    to.eraseInput(to.inputs().size() - 1);
  }
  for (size_t i = 0; i < from.inputs().size(); ++i) {
    Value* value = i < to.inputs().size() ? to.inputs()[i] : to.addInput();
    own.values[from.inputs()[i]] = value->setType(from.inputs()[i]->type());
  }
  for (const Node* node : from.nodes()) {
    Node* kept = own.nodes.at(node);
    kept->copyAttributes(*node);
    while (kept->blocks().size() > node->blocks().size()) {
      kept->eraseBlock(kept->blocks().size() - 1);
    }
    while (kept->outputs().size() > node->outputs().size()) {
      kept->eraseOutput(kept->outputs().size() - 1);
    }
    for (size_t i = 0; i < node->outputs().size(); ++i) {
      Value* value = i < kept->outputs().size() ? kept->output(i) : kept->addOutput();
      own.values[node->output(i)] = value->setType(node->output(i)->type());
    }
    for (size_t i = 0; i < node->blocks().size(); ++i) {
      put_ends_back(*node->blocks()[i], *kept->blocks()[i], own);
    }
  }
}

void GraphSnapshot::put_operands_back(const Block& from, Block& to, const Restored& own) {
  for (const Node* node : from.nodes()) {
    Node* kept = own.nodes.at(node);
    for (const Value* input : node->inputs()) {
      kept->addInput(own.values.at(input));
    }
    for (size_t i = 0; i < node->blocks().size(); ++i) {
      put_operands_back(*node->blocks()[i], *kept->blocks()[i], own);
    }
  }
  for (const Value* output : from.outputs()) {
    to.registerOutput(own.values.at(output));
  }
}

}  // namespace tsfuser
