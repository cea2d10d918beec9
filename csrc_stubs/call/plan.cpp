#include "call/plan.h"

#include "call/batched_launch.h"
#include "call/reuse.h"
#include "group/observe.h"
#include "group/python.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone_ops.h>
#include <ATen/ops/empty_strided_ops.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <optional>

namespace tsfuser {
namespace {

constexpr size_t args_alignment = 16;

size_t padded(size_t bytes) { return (bytes + args_alignment - 1) / args_alignment * args_alignment; }

size_t slot_bytes(SlotKind kind) {
  switch (kind) {
    case SlotKind::NumberBool: return 1;
    case SlotKind::Int32:
    case SlotKind::NumberInt32:
    case SlotKind::NumberFloat32: return 4;
    case SlotKind::NumberComplex128: return 16;
    case SlotKind::Random:
    case SlotKind::Seeded: return sizeof(RandomState);
    case SlotKind::Element: return 1;  // as wide as the argument's dtype
    default: return 8;
  }
}

template <class T>
void put(char* at, T value) {
  std::memcpy(at, &value, sizeof(T));
}

c10::complex<double> number_of(const c10::IValue& value) {
  if (value.isDouble()) {
    return value.toDouble();
  }
  if (value.isComplexDouble()) {
    return value.toComplexDouble();
  }
  return static_cast<double>(value.isInt() ? value.toInt() : static_cast<int64_t>(value.toBool()));
}

int64_t integer_of(const c10::IValue& value) {
  if (value.isInt()) {
    return value.toInt();
  }
  return value.isBool() ? static_cast<int64_t>(value.toBool())
                        : static_cast<int64_t>(number_of(value).real());
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

// Whether C++ can look at the number that the value is, or holds.
bool is_number(const c10::IValue& value) {
  return value.isScalar() || (value.isTensor() && value.toTensor().dim() == 0 && value.toTensor().is_cpu());
}

at::Tensor new_tensor(c10::Device device, c10::ScalarType dtype, at::IntArrayRef sizes,
                      at::IntArrayRef strides) {
  if (device.is_cpu()) {
    return at::Tensor(at::detail::empty_strided_cpu(sizes, strides, dtype));
  }
  // The backend's own kernel, without BackendSelect and autograd in front of it: it uses whatever allocator,
  // memory pool or capture torch has in force.
  return at::_ops::empty_strided::redispatch(
      c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::fromIntArrayRefUnchecked(sizes),
      c10::fromIntArrayRefUnchecked(strides), dtype, c10::kStrided, device, std::nullopt);
}

void require(bool holds, const char* what) {
  if (!holds) {
    throw std::invalid_argument(std::string("tsfuser plan: ") + what);
  }
}

void clear(const at::Tensor& memory, void* stream) {
  if (memory.is_cpu()) {
    std::memset(memory.mutable_data_ptr(), 0, memory.nbytes());
  } else {
    clear_cuda(memory.mutable_data_ptr(), memory.nbytes(), stream, memory.get_device());
  }
}

bool below(int64_t index, size_t count) { return index >= 0 && index < static_cast<int64_t>(count); }

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

size_t reach(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return 0;
  }
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    last += (tensor.size(d) - 1) * tensor.stride(d);
  }
  return (last + 1) * tensor.itemsize();
}

Plan::~Plan() { release_later(static_cast<PyObject*>(keepalive)); }

void Plan::verify() const {
  require(program.leaf_count >= 0, "a negative leaf count");
  require(random >= 0, "a negative number of random ops");
  size_t known = program.leaf_count;
  for (const Instruction& i : program.instructions) {
    require(i.op == SizeOp::Const || (below(i.a, known) && below(i.b, known)),
            "an operand is not computed yet");
    ++known;
  }
  int32_t after = 0;
  for (const Check& check : program.checks) {
    require(check.instructions >= after &&
                check.instructions <= static_cast<int64_t>(program.instructions.size()),
            "checks are not in order");
    require(below(check.index, program.leaf_count + check.instructions),
            "a check reads a value not computed yet");
    after = check.instructions;
  }
  const auto is_value = [&](int32_t index) { return below(index, known); };
  require(drawn == -1 || is_value(drawn), "what is drawn is not among the values");
  for (const Allocation& a : allocations) {
    require(a.sizes.size() == a.strides.size(), "an allocation has not as many strides as sizes");
    require(std::all_of(a.sizes.begin(), a.sizes.end(), is_value), "a size is not among the values");
    require(std::all_of(a.strides.begin(), a.strides.end(), is_value), "a stride is not among the values");
  }
  for (const auto& launch : launches) {
    require(launch->batch_capacity >= 0, "a negative number of argument structs");
    for (int32_t index : {launch->grid, launch->block_x, launch->block_y, launch->shared, launch->grain}) {
      require(is_value(index), "a launch parameter is not among the values");
    }
    require(launch->cluster == -1 || is_value(launch->cluster),
            "a launch parameter is not among the values");
    for (const auto* slots : {&launch->integers, &launch->slots}) {
      for (const Slot& slot : *slots) {
        require(slot.offset >= 0 && slot.offset + slot_bytes(slot.kind) <= launch->args_bytes,
                "a kernel argument lies outside of the arguments' bytes");
        const bool value = slot.kind == SlotKind::Int32 || slot.kind == SlotKind::Int64;
        require(slot.index >= 0 && (!value || is_value(slot.index)),
                "a kernel argument is not among the values");
        const bool allocation = slot.kind == SlotKind::Allocation || slot.kind == SlotKind::Cleared;
        require(!allocation || below(slot.index, allocations.size()),
                "a kernel argument is not among the allocations");
        require(slot.kind != SlotKind::Random || random > 0,
                "a kernel has random numbers, but its plan has none");
      }
    }
  }
  for (const Reuse& reuse : reuses) {
    require(below(reuse.allocation, allocations.size()) && below(reuse.input, most_dead_inputs),
            "what may lie in an argument's memory is not among the allocations");
    for (const Reuse::Dim& dim : reuse.alike) {
      require(is_value(dim.extent) && is_value(dim.allocation_stride) && is_value(dim.input_stride),
              "a stride is not among the values");
    }
  }
  for (const Result& result : results) {
    require(result.index >= 0 &&
                (result.kind != ResultKind::Allocation || below(result.index, allocations.size())),
            "a result is not among the allocations");
  }
}

const char* Plan::mismatch(at::ArrayRef<c10::IValue> inputs) const {
  for (const auto& launch : launches) {
    for (const Slot& slot : launch->slots) {
      if (slot.kind == SlotKind::Allocation || slot.kind == SlotKind::Cleared ||
          slot.kind == SlotKind::Random || slot.kind == SlotKind::Flag) {
        continue;
      }
      if (!below(slot.index, inputs.size())) {
        return "a kernel argument is not among the group's inputs";
      }
      const c10::IValue& value = inputs[slot.index];
      if (slot.kind == SlotKind::Input || slot.kind == SlotKind::Update) {
        if (!value.isTensor() || (launch->cuda && !value.toTensor().is_cuda())) {
          return "a kernel takes the address of an input that is not a tensor of its device";
        }
      } else if (slot.kind == SlotKind::Seeded) {
        if (!value.isTensor() || value.toTensor().scalar_type() != at::kLong ||
            value.toTensor().numel() != 2 || !value.toTensor().is_contiguous() ||
            (launch->cuda && !value.toTensor().is_cuda())) {
          return "a kernel takes the seed from an input that is not a tensor of two int64 on its device";
        }
      } else if (slot.kind == SlotKind::Element) {
        if (!value.isTensor() || value.toTensor().dim() != 0 || !value.toTensor().is_cpu() ||
            slot.offset + value.toTensor().itemsize() > launch->args_bytes) {
          return "a kernel takes the element of an input that is not a 0-dim CPU tensor, or has no room for "
                 "it";
        }
      } else if (!value.isScalar()) {
        return "a kernel takes as a number an input that is not one";
      }
    }
  }
  for (const Result& result : results) {
    if (result.kind == ResultKind::Input && !below(result.index, inputs.size())) {
      return "a result is not among the group's inputs";
    }
  }
  for (const Limit& limit : limits) {
    if (!below(limit.index, inputs.size()) || !is_number(inputs[limit.index])) {
      return "what has a limit is not among the group's numbers";
    }
  }
  for (const Update& update : updates) {
    if (!below(update.index, inputs.size()) || !inputs[update.index].isTensor()) {
      return "what is to be changed in place is not among the group's tensors";
    }
  }
  for (const Reuse& reuse : reuses) {
    if (!below(reuse.input, inputs.size()) || !inputs[reuse.input].isTensor() ||
        inputs[reuse.input].toTensor().scalar_type() != allocations[reuse.allocation].dtype) {
      return "what may give its memory to a result is not among the group's tensors of its dtype";
    }
  }
  return nullptr;
}

const char* Plan::conflict(const Arguments& arguments, at::ArrayRef<c10::IValue> inputs) const {
  const auto begin = [&](size_t i) { return reinterpret_cast<uintptr_t>(arguments.addresses[i]); };
  for (const Update& update : updates) {
    const uintptr_t from = begin(update.index), to = from + reach(inputs[update.index].toTensor());
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (static_cast<int32_t>(i) != update.index && inputs[i].isTensor() && begin(i) < to &&
          from < begin(i) + reach(inputs[i].toTensor())) {
        return "a tensor that is changed in place shares memory with another argument";
      }
    }
  }
  return nullptr;
}

bool Limit::admits(const c10::IValue& given) const {
  const c10::IValue number = given.isTensor() ? c10::IValue(given.toTensor().item()) : given;
  const auto within = [this](double x) {
    return std::isfinite(x) ? least <= x && x <= most : std::isnan(x) ? nan : infinite;
  };
  if (number.isDouble()) {
    return within(number.toDouble());
  }
  if (number.isComplexDouble()) {
    return within(number.toComplexDouble().real()) && within(number.toComplexDouble().imag());
  }
  const int64_t whole = integer_of(number);
  return low <= whole && whole <= high;
}

bool Plan::admits(at::ArrayRef<c10::IValue> inputs) const {
  return std::all_of(limits.begin(), limits.end(),
                     [&inputs](const Limit& limit) { return limit.admits(inputs[limit.index]); });
}

bool Plan::mark_failed(const std::string& reason) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed()) {
    return false;
  }
  failure_ = reason;
  failed_.store(true, std::memory_order_release);
  return true;
}

std::string Plan::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
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
      allocated[k] = new_tensor(device, wanted[k].dtype, {dims, rank}, {dims + rank, rank});
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
  if (device.is_cuda()) {
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
