#include "call/timing.h"

#include "call/batched_launch.h"

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <chrono>

namespace tsfuser {

thread_local std::vector<Timing>* timings = nullptr;

namespace {

// Of the elements that a kernel can touch: an expanded dim is one element wide.
int64_t bytes_of(const at::Tensor& tensor) {
  int64_t count = tensor.itemsize();
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    count *= tensor.stride(d) ? tensor.size(d) : std::min<int64_t>(tensor.size(d), 1);
  }
  return count;
}

int64_t bytes_of(const Launch& launch, at::ArrayRef<c10::IValue> inputs,
                 at::ArrayRef<at::Tensor> allocated) {
  int64_t sum = 0;
  for (const Slot& slot : launch.slots) {
    if (slot.kind == SlotKind::Allocation) {
      sum += bytes_of(allocated[slot.index]);
    } else if (slot.kind == SlotKind::Input || slot.kind == SlotKind::Update) {
      sum += bytes_of(inputs[slot.index].toTensor()) * (slot.kind == SlotKind::Update ? 2 : 1);
    }
  }
  return sum;
}

}  // namespace

void launch_timed(const PreparedLaunch& launch, char* args, void* stream, c10::Device device,
                  at::ArrayRef<c10::IValue> inputs, at::ArrayRef<at::Tensor> allocated) {
  double seconds = 0;
  if (launch.launch->cuda) {
    const c10::Stream on = c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
    c10::Event start(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    c10::Event end(device.type(), c10::EventFlag::BACKEND_DEFAULT);
    start.record(on);
    launch_one(launch, args, stream, device);
    end.record(on);
    end.synchronize();
    seconds = start.elapsedTime(end) * 1e-3;
  } else {
    const auto start = std::chrono::steady_clock::now();
    launch_one(launch, args, stream, device);
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  timings->push_back({launch.launch->name, seconds, bytes_of(*launch.launch, inputs, allocated), launch.grid,
                      launch.block_x, launch.block_y, launch.shared});
}

}  // namespace tsfuser
