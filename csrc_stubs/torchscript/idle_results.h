// Results of a differentiable graph that no gradient ever comes for (idle_results.cpp).
#pragma once

#include <cstdint>
#include <vector>

namespace torch::jit {
struct Node;
}  // namespace torch::jit

namespace tsfuser {

// Their numbers: all that reads such a result asks for facts, or gives what has no gradient.
std::vector<int64_t> idle_results(const torch::jit::Node& differentiable);

}  // namespace tsfuser
