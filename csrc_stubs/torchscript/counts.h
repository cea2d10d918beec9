// Numbers that a program adds to tensors of its modules: all are added together when the program ends.
#pragma once

namespace torch::jit {
struct Graph;
struct Node;
}  // namespace torch::jit

namespace tsfuser {

// A step of prepare.cpp (deferred_counts.cpp).
void defer_counts(torch::jit::Graph& graph, const torch::jit::Node* first);
// The operators that it makes nodes of: tsfuser::counts, tsfuser::count and tsfuser::add_counts
// (counts.cpp).
void register_count_operators();

}  // namespace tsfuser
