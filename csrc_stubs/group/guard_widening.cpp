#include "group/guard_widening.h"

#include "call/arguments.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

namespace tsfuser {
namespace {

constexpr int64_t most_dims = 8;  // as in grouping/support.py

// Equal for tensors between which no guard can tell: all that a guard looks at is in it, for each dim and
// each pair of dims.
uint64_t pattern_of(at::ArrayRef<c10::IValue> inputs) {
  uint64_t hash = inputs.size();
  for (const c10::IValue& value : inputs) {
    const at::Tensor& tensor = value.toTensor();
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    const c10::Device device = tensor.device();
    hash =
        mix(hash, static_cast<uint64_t>(tensor.scalar_type()) | static_cast<uint64_t>(device.type()) << 8 |
                      static_cast<uint64_t>(device.index() + 1) << 16 | sizes.size() << 32);
    for (size_t d = 0; d < sizes.size(); ++d) {
      uint64_t seen = static_cast<uint64_t>(std::min<int64_t>(sizes[d], 2)) |
                      static_cast<uint64_t>(std::min<int64_t>(strides[d], 2)) << 2;
      for (size_t e = 0; e < sizes.size(); ++e) {
        seen = seen << 2 | static_cast<uint64_t>(strides[d] >= strides[e]) << 1 |
               static_cast<uint64_t>(strides[d] == strides[e] * sizes[e]);
      }
      hash = mix(hash, seen);
    }
  }
  return hash ? hash : 1;
}

// Whether the pattern is in the table, where it is put if there is room.
template <class Slots>
bool keep(Slots& slots, uint64_t pattern) {
  for (auto& slot : slots) {
    uint64_t found = slot.load(std::memory_order_relaxed);
    if (found == 0 && slot.compare_exchange_strong(found, pattern)) {
      return true;
    }
    if (found == pattern) {
      return true;
    }
  }
  return false;
}

}  // namespace

GuardWidening::GuardWidening(size_t patterns, std::vector<bool> scalars)
    : scalars_(std::move(scalars)), met_(patterns) {}

bool GuardWidening::admits(at::ArrayRef<c10::IValue> inputs, bool grad_mode, bool nearly,
                           uint64_t& pattern) {
  if (!can_be_served(inputs, grad_mode)) {
    return false;
  }
  pattern = pattern_of(inputs);
  if (!nearly && !open_.load(std::memory_order_relaxed)) {
    if (keep(met_, pattern)) {
      return false;
    }
    open_ = true;
  }
  return std::none_of(sent_back_.begin(), sent_back_.end(), [pattern](const Slot& slot) {
    return slot.load(std::memory_order_relaxed) == pattern;
  });
}

bool GuardWidening::send_back(uint64_t pattern) { return keep(sent_back_, pattern); }

// Also refused: tensors of several devices, and a 0-dim CPU tensor beside CUDA tensors where there was none,
// since what is computed of such tensors alone is on the CPU.
bool GuardWidening::can_be_served(at::ArrayRef<c10::IValue> inputs, bool grad_mode) const {
  const at::Tensor* on_cuda = nullptr;
  bool on_cpu = false;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].isTensor()) {
      return false;
    }
    const at::Tensor& tensor = inputs[i].toTensor();
    if (!is_readable(tensor) || !dtype_name(tensor.scalar_type()) || tensor.dim() > most_dims ||
        (grad_mode && tensor.requires_grad())) {
      return false;
    }
    if (!tensor.is_cuda()) {
      on_cpu |= tensor.dim() > 0 || !scalars_[i];
    } else if (on_cuda && on_cuda->device() != tensor.device()) {
      return false;
    } else {
      on_cuda = &tensor;
    }
  }
  return !(on_cuda && on_cpu);
}

Admission& last_admission() {
  static thread_local Admission admission;
  return admission;
}

}  // namespace tsfuser
