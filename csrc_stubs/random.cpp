// Seed and offset for the random numbers of a call, from torch's own generators, so that manual_seed,
// get_rng_state and checkpointing see what fused code uses as they see eager ops.
//
// CUDA: the pair that torch's kernels start from; the offset advances by 4 for each random op. A kernel
// gives each op a value of Philox's low counter words of its own, offset / 4 + its number, and tells elements
// apart by the high words, so 4 is enough for any number of elements, and no later kernel meets the numbers
// again. CPU: one draw is the key of a Philox sequence that only this call sees.

#include "plan.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

namespace tsfuser {
namespace {

RandomState draw_cuda(c10::Device device, int32_t ops) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const RandomState state{generator.current_seed(), generator.get_offset()};
  generator.set_offset(state.offset + 4 * static_cast<uint64_t>(ops));
  return state;
}

}  // namespace

RandomState draw_random(c10::Device device, int32_t ops) {
  if (device.is_cpu()) {
    auto* generator = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    return {generator->random64(), 0};
  }
  try {
    return draw_cuda(device, ops);
  } catch (const c10::Error&) {  // torch gives neither away during a capture, whose replays need fresh ones
    throw RandomError("the random generator cannot be read now (a CUDA graph is being captured)");
  }
}

}  // namespace tsfuser
