// A graph as it is, to be put back where a pass that rewrites it in place fails half-way. The graph gets its
// own nodes back, as torch walks over them at that time and holds on to some. A pass may have made nodes,
// moved nodes, and changed operands, results, blocks, types and attributes; it must have destroyed none.
#pragma once

#include <torch/csrc/jit/ir/ir.h>

#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace tsfuser {

class GraphSnapshot {
 public:
  explicit GraphSnapshot(torch::jit::Graph& graph);
  void restore() const;

 private:
  using Block = torch::jit::Block;
  using Node = torch::jit::Node;
  using Value = torch::jit::Value;
  struct Restored {
    std::unordered_map<const Node*, Node*> nodes;     // of the copy -> of the graph
    std::unordered_map<const Value*, Value*> values;  // the same
  };

  void release_all() const;
  static void put_nodes_back(const Block& from, Block& to, const Restored& own);
  static void drop_new_nodes(Block& block, const std::unordered_set<const Node*>& old);
  static void put_ends_back(const Block& from, Block& to, Restored& own);
  static void put_operands_back(const Block& from, Block& to, const Restored& own);

  torch::jit::Graph& graph_;
  const std::vector<Node*> nodes_;
  const std::shared_ptr<torch::jit::Graph> copy_;  // its nodes are in the same order
};

}  // namespace tsfuser
