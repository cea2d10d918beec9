// Which calls a differentiable graph may not take for the sake of ops that were in place: autodiff writes
// ops anew, without the marks of written_dtypes.cpp, also where they get no gradient and so may be of
// integers.
#pragma once

#include <ATen/core/ivalue.h>

#include <utility>
#include <vector>

namespace torch::jit {
struct Node;
}  // namespace torch::jit

namespace tsfuser {

// The tensors that a check of gradients is given, by their places, and the dtypes that were profiled
// (float32 where there were several); none where nothing behind the check was in place.
using ProfiledDtypes = std::vector<std::pair<size_t, at::ScalarType>>;
ProfiledDtypes written_dtypes(const torch::jit::Node& check);

// Whether a tensor is of another kind than it was: bool, integer, floating or complex.
bool differ(const ProfiledDtypes& profiled, at::ArrayRef<c10::IValue> given);

}  // namespace tsfuser
