// Results of a differentiable graph that the program may write to (written_results.cpp).
#pragma once

#include <cstdint>
#include <vector>

namespace torch::jit {
struct Node;
}  // namespace torch::jit

namespace tsfuser {

// Their numbers. What the program returns, its caller may write to.
std::vector<int64_t> written_results(const torch::jit::Node& differentiable);

// The numbers of the operands that an op of the program has made, and that nobody may write to: they are in
// the backward what they were in the forward.
std::vector<int64_t> own_inputs(const torch::jit::Node& differentiable);

// The numbers of the operands that the program is given, or reads from its module, and does not write to;
// its caller may, before the backward.
std::vector<int64_t> given_inputs(const torch::jit::Node& differentiable);

}  // namespace tsfuser
