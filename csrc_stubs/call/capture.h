// Whether launches go into a CUDA graph instead of to the device: then what they write is written again by
// each replay, at the same addresses.
#pragma once

#include <c10/core/Device.h>

#include <atomic>

namespace tsfuser {

// Of launches that this thread makes now on the current stream of the device; false on CPU.
bool is_captured(c10::Device device);

// For tests: as if all launches went into a CUDA graph, on CPU, too.
extern std::atomic<bool> capture_pretended;

}  // namespace tsfuser
