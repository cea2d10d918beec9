// Which values of a graph are known from the facts of a call (call_facts.h), whatever the elements of its
// tensors are.
//
// In: a graph that torch is about to profile. Out: for each value whether it follows from the facts; of a
// tensor, whether its sizes do. Example: in
//
//     %n : int = aten::size(%x, %zero);  %c : bool = aten::gt(%n, %one);  %s = aten::sum(%x, %none)
//     %i : float = aten::Float(%s)
//
// all but `%i` do, of `%s` the sizes. What is not surely known does not follow. A list that something
// unknown is written to makes all lists unknown: none is followed through memory.
#pragma once

#include <string>
#include <unordered_set>

namespace torch::jit {
struct Block;
struct Graph;
struct Node;
struct Value;
}  // namespace torch::jit

namespace tsfuser {

// Whether a node asks whether a value is None.
bool asks_for_none(const torch::jit::Node* node);
// Whether it asks for the dtype or the device of a tensor.
bool asks_type(const torch::jit::Node* node);
// Whether it is an op such as `add_`, which writes to its first operand, and keeps its sizes.
bool writes_in_place(const torch::jit::Node* node);

class StaticValues {
 public:
  explicit StaticValues(torch::jit::Graph& graph);

  // Whether all nodes are of kinds that are known: else nothing follows from anything.
  bool knows_all() const { return knows_all_; }
  bool follows(const torch::jit::Value* value) const;

 private:
  void visit(torch::jit::Block* block, bool certain);
  void visit_if(torch::jit::Node* node, bool certain);
  void visit_loop(torch::jit::Node* node, bool certain);
  void visit_writes(const torch::jit::Node* node, bool certain);
  bool inputs_follow(const torch::jit::Node* node, bool for_sizes = false) const;
  bool outputs_follow(const torch::jit::Node* node) const;
  void leave_out(const torch::jit::Value* value);

  std::unordered_set<const torch::jit::Value*> unknown_;
  std::unordered_set<std::string> set_attributes_;  // names of attributes that the program sets
  bool containers_change_ = false;                  // some list or dict is written to, in unknown ways
  bool sizes_change_ = false;                       // and some tensor gets other sizes
  bool knows_all_ = true;
  bool grew_ = false;
};

}  // namespace tsfuser
