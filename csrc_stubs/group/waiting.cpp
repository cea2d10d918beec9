#include "group/waiting.h"

#include "call/counters.h"
#include "group/group.h"

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <utility>

namespace tsfuser {
namespace {

// Whether it is one launch at most, of a kernel that can be launched for several calls at once, and all that
// the call does. A number in the memory of a CPU tensor is read before the launch: kernels for the CPU may
// have changed it until then.
bool is_one_batchable_launch(const PreparedCall& call) {
  if (call.drawn > 0 || call.launches.size() > 1) {
    return false;
  }
  return std::all_of(call.launches.begin(), call.launches.end(), [](const PreparedLaunch& prepared) {
    const Launch& launch = *prepared.launch;
    return launch.batch_capacity > 0 && launch.cleared < 0 &&
           (launch.cuda || std::none_of(
                               launch.slots.begin(), launch.slots.end(),
                               [](const Slot& slot) { return slot.kind == SlotKind::Element; }));
  });
}

}  // namespace

Waiting& Waiting::mine() {
  static thread_local Waiting waiting;
  return waiting;
}

bool Waiting::add(Group& group, torch::jit::Stack& stack, size_t input_count) {
  static thread_local Arguments arguments;
  const auto inputs = torch::jit::last(stack, input_count);
  if (gather(inputs, arguments) || (!calls_.empty() && arguments.device != device_)) {
    return false;
  }
  const PreparedCall* call = group.ready_call(arguments, inputs);
  if (!call || !is_one_batchable_launch(*call)) {
    return false;
  }
  Tensors allocated;
  try {
    const c10::DeviceGuard guard(arguments.device);
    allocate(*call, arguments.device, allocated);
  } catch (const std::exception&) {
    return false;  // it runs out of memory again, or does not, now that nothing waits
  }
  const bool launched = !call->launches.empty();
  calls_.push_back({&group, call->plan, launched ? &call->launches.front() : nullptr, args_.size(),
                    inputs_.size(), input_count, allocated_.size(), !launched});
  device_ = arguments.device;
  if (launched) {
    const size_t begin = args_.size();
    args_.insert(args_.end(), call->args.begin(), call->args.end());
    fill_slots(*call->launches.front().launch, args_.data() + begin, arguments, inputs, allocated, {},
               nullptr);
    add_ranges(*call->plan, arguments, inputs);
  }
  inputs_.insert(inputs_.end(), inputs.begin(), inputs.end());
  allocated_.insert(allocated_.end(), allocated.begin(), allocated.end());
  counters().add(Count::ExactHits);
  give_results(*call->plan, allocated, stack, input_count);
  return true;
}

void Waiting::add_ranges(const Plan& plan, const Arguments& arguments, at::ArrayRef<c10::IValue> inputs) {
  const size_t first = ranges_.size();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto begin = reinterpret_cast<uintptr_t>(arguments.addresses[i]);
    ranges_.push_back(
        {begin, begin && inputs[i].isTensor() ? begin + reach(inputs[i].toTensor()) : begin, false});
  }
  for (const Update& update : plan.updates) {
    ranges_[first + update.index].written = true;
    updates_ = true;
  }
}

// Within one call, what is written overlaps nothing (Plan::conflict).
bool Waiting::in_conflict() {
  if (!updates_) {
    return false;
  }
  std::sort(ranges_.begin(), ranges_.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  uintptr_t end = 0, written_end = 0;  // of the ranges before
  for (const Range& range : ranges_) {
    if (range.begin == range.end) {
      continue;
    }
    if (range.begin < (range.written ? end : written_end)) {
      return true;
    }
    end = std::max(end, range.end);
    written_end = range.written ? std::max(written_end, range.end) : written_end;
  }
  return false;
}

void Waiting::launch() {
  if (calls_.empty()) {
    return;
  }
  std::string reason;
  try {
    RECORD_FUNCTION("run_fused_kernel", c10::ArrayRef<const c10::IValue>());
    const size_t launches = launch_all(!in_conflict());
    counters().add(Count::Launches, static_cast<int64_t>(launches));
    return clear();
  } catch (const LaunchError& error) {
    reason = error.what();
  } catch (...) {
    clear();
    throw;
  }
  const Waiting failed = std::exchange(*this, {});  // what is interpreted may have groups of its own
  failed.run_unfused(reason);
}

size_t Waiting::launch_all(bool together) {
  static thread_local std::vector<BatchPart> parts;
  static thread_local std::vector<Call*> members;
  const c10::DeviceGuard guard(device_);
  void* stream = nullptr;
  if (device_.is_cuda()) {
    stream = c10::impl::getDeviceGuardImpl(device_.type())->getStream(device_).native_handle();
  }
  size_t launches = 0;
  for (size_t i = 0; i < calls_.size(); ++i) {
    if (calls_[i].done) {
      continue;
    }
    parts.clear();
    members.clear();
    for (size_t j = i; j < (together ? calls_.size() : i + 1); ++j) {
      Call& call = calls_[j];
      if (!call.done && (j == i || can_batch(*calls_[i].launch, *call.launch))) {
        parts.push_back({call.launch, args_.data() + call.args});
        members.push_back(&call);
      }
    }
    for (size_t begin = 0; begin < parts.size(); ++launches) {
      const size_t end = begin + launch_batch(c10::ArrayRef<BatchPart>(parts).slice(begin), stream, device_);
      for (; begin < end; ++begin) {
        members[begin]->done = true;
      }
    }
  }
  return launches;
}

void Waiting::run_unfused(const std::string& reason) const {
  for (const Call& call : calls_) {
    if (call.done) {
      continue;
    }
    const auto begin = inputs_.begin() + static_cast<std::ptrdiff_t>(call.input);
    torch::jit::Stack stack(begin, begin + static_cast<std::ptrdiff_t>(call.input_count));
    call.group->run_after_failure(call.plan, reason, stack);
    for (size_t i = 0; i < call.plan->results.size(); ++i) {
      const Result& result = call.plan->results[i];
      if (result.kind == ResultKind::Allocation) {
        allocated_[call.allocation + result.index].copy_(stack[i].toTensor());
      }
    }
  }
}

void Waiting::clear() {
  calls_.clear();
  args_.clear();
  inputs_.clear();
  allocated_.clear();
  ranges_.clear();
  updates_ = false;
}

}  // namespace tsfuser
