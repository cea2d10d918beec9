// How long launches take, where somebody has asked for it (group/observe.h).
#pragma once

#include "call/plan.h"

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string>
#include <vector>

namespace tsfuser {

// One launch: seconds by the device's own clock, and the bytes of memory that its tensors take.
struct Timing {
  std::string kernel;
  double seconds;
  int64_t bytes, grid, block_x, block_y, shared;
};

// Where the launches of this thread are timed to; null nearly always.
extern thread_local std::vector<Timing>* timings;

// Launches between two readings of the clock.
void launch_timed(const PreparedLaunch& launch, char* args, void* stream, c10::Device device,
                  at::ArrayRef<c10::IValue> inputs, at::ArrayRef<at::Tensor> allocated);

}  // namespace tsfuser
