// Questions about nodes and values, for rewrites of a graph that torch is about to profile.
#pragma once

#include <torch/csrc/jit/api/function_impl.h>
#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

namespace tsfuser {

// The nodes of the graph and of the blocks inside of them, in the order of the program.
inline void append_nodes(torch::jit::Block* block, std::vector<torch::jit::Node*>& nodes) {
  for (torch::jit::Node* node : block->nodes()) {
    nodes.push_back(node);
    for (torch::jit::Block* inner : node->blocks()) {
      append_nodes(inner, nodes);
    }
  }
}

inline std::vector<torch::jit::Node*> all_nodes(torch::jit::Graph& graph) {
  std::vector<torch::jit::Node*> nodes;
  append_nodes(graph.block(), nodes);
  return nodes;
}

// Visits the nodes that the graph has when the walk begins, in the order of the program, but for those that
// are destroyed on the way: by `destroy`, as the list would still name a node that `node->destroy()` has
// taken from the graph.
//
//     Walk walk(graph);
//     for (Node* node : walk) { ... walk.destroy(node->output()->uses()[0].user); ... }
class Walk {
 public:
  explicit Walk(torch::jit::Graph& graph) : nodes_(all_nodes(graph)) {}

  class Iterator {
   public:
    Iterator(const Walk& walk, size_t place) : walk_(walk), place_(place) { skip_destroyed(); }
    torch::jit::Node* operator*() const { return walk_.nodes_[place_]; }
    Iterator& operator++() {
      ++place_;
      skip_destroyed();
      return *this;
    }
    bool operator!=(const Iterator& other) const { return place_ != other.place_; }

   private:
    void skip_destroyed() {
      while (place_ < walk_.nodes_.size() && walk_.destroyed_.count(walk_.nodes_[place_]) != 0) {
        ++place_;
      }
    }

    const Walk& walk_;
    size_t place_;
  };

  Iterator begin() const { return {*this, 0}; }
  Iterator end() const { return {*this, nodes_.size()}; }

  // With the nodes in its blocks.
  void destroy(torch::jit::Node* node) {
    forget(node);
    node->destroy();
  }

 private:
  void forget(const torch::jit::Node* node) {
    destroyed_.insert(node);
    for (const torch::jit::Block* block : node->blocks()) {
      for (const torch::jit::Node* inner : block->nodes()) {
        forget(inner);
      }
    }
  }

  const std::vector<torch::jit::Node*> nodes_;
  std::unordered_set<const torch::jit::Node*> destroyed_;
};

inline bool is_tensor(const torch::jit::Value* value) {
  return value->type()->kind() == c10::TypeKind::TensorType;
}

inline bool is_optional_tensor(const torch::jit::Value* value) {
  const auto type = value->type()->cast<c10::OptionalType>();
  return type && type->getElementType()->kind() == c10::TypeKind::TensorType;
}

inline bool is_profile(const torch::jit::Node* node) {
  return node->kind() == c10::prim::profile && node->inputs().size() == 1 && node->outputs().size() == 1;
}

// Whether the node does what its schema says, or only hands values on; what Python or another library has
// defined may read what it likes.
inline bool is_known(const torch::jit::Node* node) {
  static const auto ours = c10::Symbol::fromQualString("tsfuser::count").ns();
  static const std::unordered_set<c10::Symbol> kinds = {
      c10::prim::Constant,      c10::prim::If,          c10::prim::Loop,
      c10::prim::ListConstruct, c10::prim::ListUnpack,  c10::prim::TupleConstruct,
      c10::prim::profile,       c10::prim::TupleUnpack, c10::prim::ConstantChunk};
  const auto kind = node->kind();
  const auto* schema = node->maybeSchema();
  const bool of_torch = kind.is_aten() || kind.is_prim() || kind.ns() == ours;
  return kinds.count(kind) != 0 || (schema && of_torch && !schema->is_varret());
}

// Whether the node asks what a differentiable graph is given for its gradients, and hands it on.
inline bool is_gradient_check(const torch::jit::Node* node) {
  static const auto kind = c10::Symbol::fromQualString("prim::RequiresGradCheck");
  return node->kind() == kind;
}

// Whether torch, which stands at `first`, comes past the node: it is behind that, or inside.
inline bool is_passed_later(const torch::jit::Node* node, const torch::jit::Node* first) {
  const torch::jit::Node* around = node->owningBlock()->owningNode();
  while (around && around != first) {
    around = around->owningBlock()->owningNode();
  }
  return around || node->isAfter(first);
}

// The value that a profile node stands before.
inline const torch::jit::Value* behind_profile(const torch::jit::Value* value) {
  return is_profile(value->node()) ? value->node()->input() : value;
}

// Whether the node calls the function that computes the same where a check failed.
inline bool is_fallback(const torch::jit::Node* node) {
  static const auto fallback = c10::Symbol::attr("fallback");
  const torch::jit::Node* function =
      node->kind() == c10::prim::CallFunction ? node->input(0)->node() : nullptr;
  return function && function->kind() == c10::prim::Constant && function->hasAttribute(fallback);
}

// The calls of fallbacks, and the functions called, where a check fails: an If reads the check's last
// result.
inline std::vector<std::pair<torch::jit::Node*, torch::jit::GraphFunction*>> fallbacks(
    const torch::jit::Node& check) {
  std::vector<std::pair<torch::jit::Node*, torch::jit::GraphFunction*>> found;
  for (const auto& use : check.outputs().back()->uses()) {
    if (use.user->kind() != c10::prim::If) {
      continue;
    }
    for (torch::jit::Node* node : use.user->blocks()[1]->nodes()) {
      const auto type = node->kind() == c10::prim::CallFunction
                            ? node->input(0)->type()->cast<c10::FunctionType>()
                            : nullptr;
      if (auto* function = type ? torch::jit::tryToGraphFunction(*type->function()) : nullptr) {
        found.emplace_back(node, function);
      }
    }
  }
  return found;
}

// Torch would put casts of autocast into the fallback once more. The graph that it is of has them, and ops
// that were in place, which get none, may be functional by now.
inline void keep_casts(torch::jit::GraphFunction& fallback) { fallback._set_ignore_amp(true); }

// Whether the schema of the node, or of one inside, says that it writes to an operand.
inline bool writes(const torch::jit::Node* node) {
  const auto* schema = node->maybeSchema();
  return (schema && schema->is_mutable()) ||
         std::any_of(node->blocks().begin(), node->blocks().end(), [](const torch::jit::Block* block) {
           return std::any_of(block->nodes().begin(), block->nodes().end(), writes);
         });
}

}  // namespace tsfuser
