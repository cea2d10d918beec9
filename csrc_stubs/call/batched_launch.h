// A batched launch: one launch instead of several launches of the same kernel. Its parameter is a table of
// the argument structs of all of them, in which each block finds its own (codegen/runtime/batched.h).
#pragma once

#include "call/plan.h"

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

namespace tsfuser {

// What one launch would be, and its argument struct.
struct BatchPart {
  const PreparedLaunch* launch;
  const char* args;
};

// Whether the one launch can do what the other does, besides its own.
bool can_batch(const PreparedLaunch& a, const PreparedLaunch& b);

// Launches as many of the first parts as one launch can do, all of which `can_batch`; returns how many.
// Throws LaunchError.
size_t launch_batch(c10::ArrayRef<BatchPart> parts, void* stream, c10::Device device);

// Launches what was prepared, by itself. Throws LaunchError.
void launch_one(const PreparedLaunch& launch, char* args, void* stream, c10::Device device);

}  // namespace tsfuser
