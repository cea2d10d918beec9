// A call with lazy conjugates or negatives: views with a bit, of which a kernel that reads their memory does
// not know.
//
// In: the inputs of the call. Out: the same inputs, with a copy in the place of each lazy one, which kernels
// can read. torch's own fallback for such tensors does the same. Example: a group that computes z.conj() * 2
// reads a copy of z.conj(). A call that needs the views themselves runs unfused.
#pragma once

#include "call/arguments.h"
#include "call/plan.h"

#include <ATen/core/stack.h>

namespace tsfuser {

// `gather` of the inputs with copies in the place of lazy tensors. Leaves these in `resolved`.
const char* gather_resolved(at::ArrayRef<c10::IValue> inputs, Arguments& arguments,
                            torch::jit::Stack& resolved);

// Null, or why the plan needs the lazy tensors themselves: it returns one, or writes to the memory of one.
const char* refuse_copies(const Plan& plan, at::ArrayRef<c10::IValue> inputs);

}  // namespace tsfuser
