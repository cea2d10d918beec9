// Values at the front of a graph that are found further behind.
#pragma once

#include <torch/csrc/jit/ir/ir.h>

#include <optional>
#include <unordered_map>

namespace tsfuser {

// Copies, at the insert point, of nodes that depend on constants and modules' attributes alone. Example: for
// a node in
//
//     %s : int = prim::GetAttr[name="stride"](%module);  %c : bool = aten::eq(%s, %one);  prim::If(%c)
//
// the front gets `%s` and `%c` again, so that it knows whether the node will run. Nothing in the graph may
// put another thing into a module.
class Front {
 public:
  using Value = torch::jit::Value;
  // Holds only if a node will run; null: that is never known. `exact`: it holds whenever the node runs.
  struct Running {
    Value* on;
    bool exact;
  };

  explicit Front(torch::jit::Graph& graph) : graph_(graph) {}

  // Of what a module holds.
  Value* attribute(Value* value);
  Running running(const torch::jit::Node* node);

 private:
  Value* copy_of(Value* value);
  Value* surely(Value* condition, bool wanted);
  Value* both(Value* one, Value* other);

  torch::jit::Graph& graph_;
  std::unordered_map<Value*, Value*> copies_;
};

}  // namespace tsfuser
