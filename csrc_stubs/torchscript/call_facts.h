// What is known of a call before it runs: the sizes of its tensors, its numbers, and the attributes of its
// modules that the program reads.
//
// In: a graph, then the arguments of a call. Out: the facts as words; two calls with equal words have equal
// facts. Example: for `f(self, x)` that reads `self.stride`, called with a float tensor of [2, 3],
//
//     tensor float on cpu of 2 dims, 2, 3; int, 1
//
// Where only the number of dims is asked for, or whether there is a tensor, the sizes are left out.
#pragma once

#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace torch::jit {
struct Graph;
struct Node;
struct Value;
}  // namespace torch::jit

namespace tsfuser {

// The input of a graph, then the slots of modules, that lead to a value.
struct AttributePath {
  size_t input = 0;
  std::vector<size_t> slots;

  bool operator<(const AttributePath& other) const {
    return std::tie(input, slots) < std::tie(other.input, other.slots);
  }
};

// Whether values of the type are tensors, or hold some.
bool may_hold_tensors(const c10::TypePtr& type);
// Whether values of the type are lists or dicts, or hold some.
bool is_container(const c10::TypePtr& type);
// Whether values of the type are described by facts.
bool has_facts(const c10::TypePtr& type);
// What is there in a call.
const c10::IValue& value_at(const AttributePath& path, at::ArrayRef<c10::IValue> arguments);
// The path to what `prim::GetAttr` nodes read, one behind the other, from an input; none for other values.
std::optional<AttributePath> path_of(const torch::jit::Value* value);

// The arguments by which an `aten::index` looks elements up; none where other values do that. The sizes of
// its result follow from their sizes if they are no masks.
std::vector<const torch::jit::Value*> indices_of(const torch::jit::Node* node);

class CallFacts {
 public:
  using Words = std::vector<int64_t>;

  // Of the inputs, and the attributes of modules, that the values of the graph depend on. All these follow
  // from the facts of a call (static_values.h).
  CallFacts(torch::jit::Graph& graph, const std::vector<const torch::jit::Value*>& values);
  // Whether sizes or numbers of the call's own arguments are among them: they are others from call to call.
  bool has_sizes() const;
  // Replaces `words`. False where an argument has no facts: a tensor that is sparse, nested or undefined, or
  // a mask for an index.
  bool read(at::ArrayRef<c10::IValue> arguments, Words& words) const;

 private:
  struct Fact {
    AttributePath path;
    bool with_sizes;
  };
  std::vector<Fact> facts_;
  std::vector<AttributePath> indices_;
};

}  // namespace tsfuser
