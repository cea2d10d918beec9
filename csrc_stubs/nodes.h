// What the rewriters of graphs that torch is about to profile ask of values.
#pragma once

#include <torch/csrc/jit/ir/ir.h>

namespace tsfuser {

inline bool is_tensor(const torch::jit::Value* value) {
  return value->type()->kind() == c10::TypeKind::TensorType;
}

inline bool is_profile(const torch::jit::Node* node) {
  return node->kind() == c10::prim::profile && node->inputs().size() == 1 && node->outputs().size() == 1;
}

// The value that a profile node stands before.
inline const torch::jit::Value* behind_profile(const torch::jit::Value* value) {
  return is_profile(value->node()) ? value->node()->input() : value;
}

}  // namespace tsfuser
