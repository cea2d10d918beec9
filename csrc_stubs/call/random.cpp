// The start of the random numbers of a call. It comes from torch's own generators, so that manual_seed,
// get_rng_state, checkpointing and CUDA graphs work for fused code as for eager ops.
//
// CUDA: the start is the state that torch's kernels use, and the offset advances by 4 for each random op. A
// kernel gives each op its own value of Philox's low counter words, offset / 4 + the number of the op, and
// each element its own value of the high words. So 4 is enough for any number of elements, and no later
// kernel gets the same numbers. If the numbers have to be eager's, the offset advances as for eager's ops.
//
// CPU: each random op draws the key of a Philox sequence that it alone uses.
//
// So the numbers of an op follow from the state of the generator and from the random ops before it, however
// these are grouped: a checkpoint runs one program in two forms, without and with gradients.

#include "call/plan.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/cuda/PhiloxCudaState.h>

#include <dlfcn.h>

#include <vector>

namespace tsfuser {
namespace {

// at::CUDAGeneratorImpl::philox_cuda_state. The header of that class wants a CUDA toolkit, so the function
// is taken from the library by its name; calling it is calling a function whose first argument is `this`.
using PhiloxCudaState = at::PhiloxCudaState (*)(c10::GeneratorImpl* generator, uint64_t increment);

PhiloxCudaState philox_cuda_state() {
  static const PhiloxCudaState found = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);  // never closed, like torch itself
    void* symbol = library ? dlsym(library, "_ZN2at17CUDAGeneratorImpl17philox_cuda_stateEm") : nullptr;
    return reinterpret_cast<PhiloxCudaState>(symbol);
  }();
  return found;
}

RandomState draw_cuda(c10::Device device, uint64_t blocks) {
  const PhiloxCudaState draw = philox_cuda_state();
  if (!draw) {
    throw RandomError("this torch does not give out the state of its CUDA random generator");
  }
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const at::PhiloxCudaState state = draw(generator.unsafeGetGeneratorImpl(), 4 * blocks);
  if (!state.captured_) {
    return {state.seed_.val, state.offset_.val, 0, 0};
  }
  const auto address = [](const int64_t* pointer) {
    return static_cast<uint64_t>(reinterpret_cast<uintptr_t>(pointer));
  };
  return {address(state.seed_.ptr), address(state.offset_.ptr), state.offset_intragraph_, 1};
}

}  // namespace

RandomState draw_random(c10::Device device, uint64_t blocks) {
  if (device.is_cpu()) {
    auto* generator = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
    thread_local std::vector<uint64_t> keys;  // the kernels of this call are done when another one draws
    keys.resize(blocks);
    const std::lock_guard<std::mutex> lock(generator->mutex_);
    for (uint64_t& key : keys) {
      key = generator->random64();
    }
    return {static_cast<uint64_t>(reinterpret_cast<uintptr_t>(keys.data())), 0, 0, 2};
  }
  try {
    return draw_cuda(device, blocks);
  } catch (const c10::Error&) {  // captured by other means than torch's own: eager has the same to say
    throw RandomError("the CUDA graph being captured does not know torch's random generator");
  }
}

}  // namespace tsfuser
