// Writes of a number to a part of a tensor, as TorchScript makes them (number_writes.cpp).
#pragma once

#include <torch/csrc/jit/ir/ir.h>

namespace tsfuser {

// Whether the node is such a write.
bool writes_number(const torch::jit::Node* node);
// The number that it writes.
const torch::jit::Value* number_written(const torch::jit::Node* write);

}  // namespace tsfuser
