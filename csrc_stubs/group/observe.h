// Reports of each run of a group: for comparison callbacks, `check`, `explain` and `dump_eff_bandwidth`.
//
// In: a function that Python sets. Out: one call of it after each run of a group, with the group's id, why
// it ran unfused (or ""), its arguments and its results; if asked for, also the results of its nodes run
// one by one, and the time and bytes of each launch. While no function is set, this costs a group one load.
#pragma once

#include "call/plan.h"
#include "group/python.h"

#include <ATen/core/stack.h>

#include <atomic>
#include <string>
#include <vector>

namespace tsfuser {

class Group;

extern std::atomic<bool> observing;

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

// Runs the group and tells Python of it. Throws c10::Error where Python raises.
void run_observed(Group& group, torch::jit::Stack& stack, size_t input_count);

// With the GIL held. None ends it.
void set_observer(py::object function, bool unfused, bool timed);

}  // namespace tsfuser
