// Reports of each run of a group: for comparison callbacks, `check`, `explain` and `dump_eff_bandwidth`.
//
// In: a function that Python sets. Out: one call of it after each run of a group, with the group's id, why
// it ran unfused (or ""), its arguments and its results; if asked for, also the results of its nodes run
// one by one, and the time and bytes of each launch. While no function is set, this costs a group one load.
#pragma once

#include "group/python.h"

#include <ATen/core/stack.h>

#include <atomic>

namespace tsfuser {

class Group;

extern std::atomic<bool> observing;

// Runs the group and tells Python of it. Throws c10::Error where Python raises.
void run_observed(Group& group, torch::jit::Stack& stack, size_t input_count);

// Whether what the thread launches for the first CUDA tensor becomes part of a CUDA graph.
bool being_captured(at::ArrayRef<c10::IValue> inputs);

// With the GIL held. None ends it.
void set_observer(py::object function, bool unfused, bool timed);

}  // namespace tsfuser
