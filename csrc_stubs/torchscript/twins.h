// Ops of ours that do what an op of ATen does, and that TorchScript's autodiff takes where it leaves ATen's.
#pragma once

#include <ATen/core/interned_strings.h>

#include <string>
#include <utility>
#include <vector>

namespace torch::jit {
struct Graph;
struct Node;
}  // namespace torch::jit

namespace tsfuser {

// Registers the twins. Once, before there are graphs that have some.
void register_twins();

// The kind of the node's twin; nothing's kind (`c10::Symbol()`) where it has none.
c10::Symbol twin_of(const torch::jit::Node& node);

// Twins in the graph become ATen's ops.
void restore_twins(torch::jit::Graph& graph);

// The kinds of the twins, and what each stands for: `tsfuser::view`, `aten::view`.
std::vector<std::pair<std::string, std::string>> twins();

}  // namespace tsfuser
