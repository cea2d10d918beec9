// Twins: ops of ours that do what an op of ATen does. TorchScript's autodiff takes a twin where it does not
// take the op itself.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace torch::jit {
struct Graph;
}  // namespace torch::jit

namespace tsfuser {

// Registers the twins. Once, before there are graphs that have some.
void register_twins();

// Ops of the graph, wherever they stand, become their twins: torch profiles the operands of both. The ops
// stay, without readers, since torch holds on to them.
void write_twins(torch::jit::Graph& graph);

// Twins in the graph become ATen's ops.
void restore_twins(torch::jit::Graph& graph);

// The kinds of the twins, and what each stands for: `tsfuser::view`, `aten::view`.
std::vector<std::pair<std::string, std::string>> twins();

}  // namespace tsfuser
