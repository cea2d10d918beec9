// Which values of a differentiable graph may require a gradient. In: the node of the graph, as torch has
// made it. Out: values in its graph.
#pragma once

#include <unordered_set>

namespace torch::jit {
struct Node;
struct Value;
}  // namespace torch::jit

namespace tsfuser {

std::unordered_set<const torch::jit::Value*> moving_values(const torch::jit::Node& differentiable);

}  // namespace tsfuser
