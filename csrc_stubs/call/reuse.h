// Results that are written over operands that nobody reads later: a new tensor takes the memory of a
// group's input.
//
// In: the pairs that a plan allows (Plan::reuses), and the inputs of a call that nobody reads after it.
// Out: tensors in the memory of those inputs that only the stack holds. Example: for y = x * 2, if x is
// dead, y has the address of x; if somebody holds x, or a view of it, y is allocated like any result.
#pragma once

#include "call/plan.h"

#include <vector>

namespace tsfuser {

// Those of the plan's reuses that hold for the values of one call. `dims`: as in PreparedCall.
std::vector<PreparedReuse> prepare_reuses(const Plan& plan, const std::vector<int64_t>& values,
                                          const std::vector<int64_t>& dims);

// Makes tensors in the memory of dead inputs, at their places in `allocated`, where the others are
// undefined. False, with nothing done, where there are none.
bool take_memory(const PreparedCall& call, c10::Device device, at::ArrayRef<c10::IValue> inputs,
                 DeadInputs dead, Tensors& allocated);

}  // namespace tsfuser
