// A call of a plan: its launch arguments, what it allocates, and its launches.

#include "call/batched_launch.h"
#include "call/numbers.h"
#include "call/plan.h"
#include "call/reuse.h"
#include "call/room.h"
#include "call/timing.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/clone_ops.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>

namespace tsfuser {
namespace {

constexpr size_t args_alignment = 16;

size_t padded(size_t bytes) { return (bytes + args_alignment - 1) / args_alignment * args_alignment; }

template <class T>
void put(char* at, T value) {
  std::memcpy(at, &value, sizeof(T));
}

void put_number(char* at, SlotKind kind, const c10::IValue& value) {
  switch (kind) {
    case SlotKind::NumberBool: return put<bool>(at, number_of(value) != c10::complex<double>(0));
    case SlotKind::NumberInt32: return put<int32_t>(at, static_cast<int32_t>(integer_of(value)));
    case SlotKind::NumberInt64: return put<int64_t>(at, integer_of(value));
    case SlotKind::NumberFloat32:
      // an int goes to float directly, not by way of double, to round once
      return put<float>(at, value.isInt() ? static_cast<float>(value.toInt())
                                          : static_cast<float>(number_of(value).real()));
    case SlotKind::NumberFloat64: return put<double>(at, number_of(value).real());
    case SlotKind::NumberComplex64:
      return put<c10::complex<float>>(at, c10::complex<float>(number_of(value)));
    default: return put<c10::complex<double>>(at, number_of(value));
  }
}

at::Tensor new_tensor(c10::Device device, c10::ScalarType dtype, at::IntArrayRef sizes,
                      at::IntArrayRef strides) {
  if (device.is_cpu()) {
    return at::Tensor(at::detail::empty_strided_cpu(sizes, strides, dtype));
  }
  // What the backend's own kernel does: it uses whatever allocator, memory pool or capture torch has in
  // force. The caller has made the device the current one.
  return at::Tensor(at::detail::empty_strided_generic(sizes, strides,
                                                      at::detail::getCUDAHooks().getCUDADeviceAllocator(),
                                                      c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype));
}

at::Tensor new_with_room(c10::Device device, const Allocation& wanted, at::IntArrayRef sizes,
                         at::IntArrayRef strides, int64_t elements) {
  static constexpr int64_t step = 1;
  at::Tensor made = new_tensor(device, wanted.dtype, elements, step);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  mark_room(made, wanted.room_dim);
  return made;
}

void clear(const at::Tensor& memory, void* stream) {
  if (memory.is_cpu()) {
    std::memset(memory.mutable_data_ptr(), 0, memory.nbytes());
  } else {
    clear_cuda(memory.mutable_data_ptr(), memory.nbytes(), stream, memory.get_device());
  }
}

// Puts copies in the place of the arguments that have been updated.
void keep_updates(const Plan& plan, torch::jit::Stack& stack, size_t input_count) {
  for (const Update& update : plan.updates) {
    c10::IValue& value = stack[stack.size() - input_count + update.index];
    value = at::_ops::clone::call(value.toTensor(), std::nullopt);
  }
}

c10::IValue value_of(const Result& result, at::ArrayRef<c10::IValue> inputs,
                     at::ArrayRef<at::Tensor> allocated) {
  switch (result.kind) {
    case ResultKind::Allocation: return allocated[result.index];
    case ResultKind::Input: return inputs[result.index];
    case ResultKind::Integer: return static_cast<int64_t>(result.index);
    default: return at::Tensor();
  }
}

}  // namespace

void fill_slots(const Launch& launch, char* args, const Arguments& arguments,
                at::ArrayRef<c10::IValue> inputs, at::ArrayRef<at::Tensor> allocated,
                const RandomState& random, int32_t* flag) {
  for (const Slot& slot : launch.slots) {
    char* at = args + slot.offset;
    if (slot.kind == SlotKind::Input || slot.kind == SlotKind::Update) {
      put(at, arguments.addresses[slot.index]);
    } else if (slot.kind == SlotKind::Allocation || slot.kind == SlotKind::Cleared) {
      put<const void*>(at, allocated[slot.index].const_data_ptr());
    } else if (slot.kind == SlotKind::Element) {
      const at::Tensor& tensor = inputs[slot.index].toTensor();
      std::memcpy(at, arguments.addresses[slot.index], tensor.itemsize());
    } else if (slot.kind == SlotKind::Random) {
      put(at, random);
    } else if (slot.kind == SlotKind::Seeded) {
      const auto seed = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(arguments.addresses[slot.index]));
      put(at, RandomState{seed, seed + sizeof(int64_t), 0, 1});
    } else if (slot.kind == SlotKind::Flag) {
      put(at, launch.cuda ? nullptr : flag);
    } else {
      put_number(at, slot.kind, inputs[slot.index]);
    }
  }
}

bool PreparedCall::serves(const Arguments& arguments) const {
  const size_t leaves = arguments.leaves.size();
  return hash == arguments.hash && structure == arguments.structure &&
         static_cast<size_t>(plan->program.leaf_count) == leaves &&
         std::memcmp(values.data(), arguments.leaves.data(), leaves * sizeof(int64_t)) == 0;
}

std::shared_ptr<const PreparedCall> prepare(std::shared_ptr<const Plan> plan, const Arguments& arguments,
                                            std::vector<int64_t> values) {
  auto call = std::make_shared<PreparedCall>();
  call->structure = arguments.structure;
  call->hash = arguments.hash;
  for (const Allocation& a : plan->allocations) {
    for (const auto* indices : {&a.sizes, &a.strides}) {
      for (int32_t index : *indices) {
        call->dims.push_back(values[index]);
      }
    }
  }
  call->reuses = prepare_reuses(*plan, values, call->dims);
  for (const auto& launch : plan->launches) {
    if (values[launch->grid] <= 0) {
      continue;
    }
    const size_t offset = call->args.size();
    call->args.resize(offset + padded(launch->args_bytes));
    for (const Slot& slot : launch->integers) {
      char* at = call->args.data() + offset + slot.offset;
      const int64_t value = values[slot.index];
      slot.kind == SlotKind::Int32 ? put<int32_t>(at, static_cast<int32_t>(value)) : put<int64_t>(at, value);
    }
    call->launches.push_back({launch.get(), values[launch->grid], values[launch->block_x],
                              values[launch->block_y], values[launch->shared], values[launch->grain],
                              launch->cluster < 0 ? 1 : values[launch->cluster], offset});
  }
  if (plan->drawn >= 0) {  // eager's ops draw also where nothing comes of it
    call->drawn = static_cast<uint64_t>(values[plan->drawn]);
  } else if (!call->launches.empty()) {
    call->drawn = static_cast<uint64_t>(plan->random);
  }
  call->values = std::move(values);
  call->plan = std::move(plan);
  return call;
}

void allocate(const PreparedCall& call, c10::Device device, Tensors& allocated) {
  const int64_t* dims = call.dims.data();
  const std::vector<Allocation>& wanted = call.plan->allocations;
  allocated.resize(wanted.size());
  for (size_t k = 0; k < wanted.size(); ++k) {
    const size_t rank = wanted[k].sizes.size();
    if (!allocated[k].defined()) {
      const at::IntArrayRef sizes(dims, rank), strides(dims + rank, rank);
      allocated[k] = C10_LIKELY(wanted[k].elements < 0)
                         ? new_tensor(device, wanted[k].dtype, sizes, strides)
                         : new_with_room(device, wanted[k], sizes, strides, call.values[wanted[k].elements]);
    }
    dims += 2 * rank;
  }
}

void give_results(const Plan& plan, const Tensors& allocated, torch::jit::Stack& stack, size_t input_count) {
  const auto inputs = torch::jit::last(stack, input_count);
  for (const Update& update : plan.updates) {
    if (update.counted) {
      inputs[update.index].toTensor().unsafeGetTensorImpl()->bump_version();
    }
  }
  // Results that pass an input through are taken before the inputs leave the stack.
  c10::SmallVector<c10::IValue, 8> outputs;
  for (const Result& result : plan.results) {
    outputs.push_back(value_of(result, inputs, allocated));
  }
  torch::jit::drop(stack, input_count);
  for (c10::IValue& output : outputs) {
    stack.emplace_back(std::move(output));
  }
}

size_t run(const PreparedCall& call, const Arguments& arguments, torch::jit::Stack& stack,
           size_t input_count, DeadInputs dead) {
  const Plan& plan = *call.plan;
  const auto inputs = torch::jit::last(stack, input_count);
  const c10::Device device = arguments.device;
  c10::OptionalDeviceGuard guard;
  if (device.is_cuda() && c10::impl::getDeviceGuardImpl(device.type())->getDevice() != device) {
    guard.reset_device(device);
  }
  // Inline storage for usual plans: steady calls do not touch the heap but for the tensors themselves.
  Tensors allocated;
  const bool reused = dead && !call.reuses.empty() && take_memory(call, device, inputs, dead, allocated);
  allocate(call, device, allocated);
  alignas(args_alignment) char few_args[2048];
  std::vector<std::max_align_t> many_args;
  char* args = few_args;
  if (call.args.size() > sizeof(few_args)) {
    many_args.resize(call.args.size() / sizeof(std::max_align_t) + 1);
    args = reinterpret_cast<char*>(many_args.data());
  }
  std::copy(call.args.begin(), call.args.end(), args);
  RandomState random;
  if (C10_UNLIKELY(call.drawn > 0)) {
    random = draw_random(device, call.drawn);
  }
  void* stream = nullptr;
  if (device.is_cuda() && !call.launches.empty()) {
    stream = c10::impl::getDeviceGuardImpl(device.type())->getStream(device).native_handle();
  }
  bool updated = false, launched = false;
  int32_t out_of_range = 0;
  try {
    for (const PreparedLaunch& launch : call.launches) {
      fill_slots(*launch.launch, args + launch.args_offset, arguments, inputs, allocated, random,
                 &out_of_range);
      if (C10_UNLIKELY(launch.launch->cleared >= 0)) {
        clear(allocated[launch.launch->cleared], stream);
      }
      if (C10_UNLIKELY(timings != nullptr)) {
        launch_timed(launch, args + launch.args_offset, stream, device, inputs, allocated);
      } else {
        launch_one(launch, args + launch.args_offset, stream, device);
      }
      updated |= launch.launch->updates;
      launched = true;
    }
    if (C10_UNLIKELY(out_of_range)) {
      throw OutOfRange("an index is out of range");
    }
  } catch (const std::exception& error) {
    if (reused && launched) {
      throw OperandLost(std::string("a kernel failed after another one of its group had written its result "
                                    "over an operand that nobody else held (") +
                        error.what() + ")");
    }
    if (updated) {
      keep_updates(plan, stack, input_count);
    }
    throw;
  }
  if (C10_UNLIKELY(!plan.reuses.empty() && !plan.has_run.load(std::memory_order_relaxed))) {
    plan.has_run.store(true, std::memory_order_relaxed);
  }
  give_results(plan, allocated, stack, input_count);
  return call.launches.size();
}

}  // namespace tsfuser
