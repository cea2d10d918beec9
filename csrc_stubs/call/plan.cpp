// What a plan has to hold to be run: its own consistency, and whether it serves the arguments of a call.

#include "call/plan.h"
#include "call/numbers.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace tsfuser {
namespace {

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

// Whether C++ can look at the number that the value is, or holds.
bool is_number(const c10::IValue& value) {
  return value.isScalar() || (value.isTensor() && value.toTensor().dim() == 0 && value.toTensor().is_cpu());
}

void require(bool holds, const char* what) {
  if (!holds) {
    throw std::invalid_argument(std::string("tsfuser plan: ") + what);
  }
}

bool below(int64_t index, size_t count) { return index >= 0 && index < static_cast<int64_t>(count); }

}  // namespace

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
    require(a.elements == -1 || is_value(a.elements), "a number of elements is not among the values");
    require(a.elements == -1 || (a.sizes.size() > 1 && (a.room_dim == -1 || a.room_dim == -2)),
            "there is room behind another dim than the last two");
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
            value.toTensor().numel() < 2 || !value.toTensor().is_contiguous() ||
            (launch->cuda && !value.toTensor().is_cuda())) {
          return "a kernel takes the seed from an input that does not hold two int64 on its device";
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

void Plan::mark_failed(const std::string& reason) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (failed()) {
    return;
  }
  failure_ = reason;
  unreported.store("launch", std::memory_order_relaxed);
  failed_.store(true, std::memory_order_release);
}

std::string Plan::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

}  // namespace tsfuser
