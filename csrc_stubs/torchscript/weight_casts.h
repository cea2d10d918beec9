// Autocast's casts of tensors of modules, all of them together.
#pragma once

namespace torch::jit {
struct Graph;
struct Node;
}  // namespace torch::jit

namespace tsfuser {

// A step of prepare.cpp (weight_casts.cpp).
void cast_weights_together(torch::jit::Graph& graph, const torch::jit::Node* first);
// The operator that it makes a node of: tsfuser::cast_together (cast_together.cpp).
void register_cast_operator();
// Whether casts of CPU tensors are groups, too, as on a GPU; for tests. Returns the state before.
bool cast_in_groups_everywhere(bool on);

}  // namespace tsfuser
