// prim::CudaFusionGuard: may this call run the group that was made for the profiled types?
//
// In: the group's tensor inputs, and their profiled types in the node's `types`. Out: a bool in their
// place. It checks only what the group depends on: dtype, device, rank, requires_grad, which sizes are 1 or
// 0, the order of the strides, and contiguity if it was profiled. Sizes, pointers and aliases are not
// checked. Example: a group profiled with Float(4, 8, strides=[8, 1], device=cpu) takes any contiguous
// float matrix without a size 1 or 0.
//
// A call whose tensors have no gaps, as those profiled, but their dims in another order in memory, passes,
// too: its fallback would nearly always form the same group. So do other types once a guard has refused many
// patterns of them (guard_widening.h).
//
// A tensor that no kernel can read (sparse, with a tangent, of a functorch transform) passes, and the group
// runs its nodes one by one. A fallback would be profiled with a type that does not show the reason: its
// guard would refuse the next such call, and so on.

#include "call/arguments.h"
#include "group/guard_widening.h"
#include "torchscript/hooks.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>
#include <c10/util/SmallVector.h>

#include <algorithm>

namespace tsfuser {

std::atomic<bool> guard_mode{true};

namespace {

enum class Extent : uint8_t { Unknown, Zero, One, Other };

// One profiled type, flattened when the operator is made: a check then reads no TensorType.
struct Expected {
  struct Dim {
    int32_t dim;
    bool contiguous;  // was profiled so
    bool fastest;     // is the first in stride order
  };
  bool known = false;  // else nothing passes
  bool dense = false;  // without gaps, in any order
  int64_t rank = 0;
  int16_t dtype = -1;
  int8_t requires_grad = -1;
  bool has_device = false;
  c10::Device device{c10::DeviceType::CPU};
  // Inside, for usual ranks: between two runs of a guard a network has used up the cache.
  c10::SmallVector<Dim, 4> order;  // from fastest to slowest, unknown ones left out
  c10::SmallVector<Extent, 8> extents;
};

Extent extent_of(int64_t size) { return size == 0 ? Extent::Zero : size == 1 ? Extent::One : Extent::Other; }

Expected flatten(const c10::TypePtr& type) {
  Expected e;
  const auto tensor = type->cast<c10::TensorType>();
  if (!tensor || !tensor->dim()) {
    return e;
  }
  e.known = true;
  e.rank = static_cast<int64_t>(*tensor->dim());
  e.dtype = tensor->scalarType() ? static_cast<int16_t>(*tensor->scalarType()) : -1;
  e.requires_grad = tensor->requiresGrad() ? static_cast<int8_t>(*tensor->requiresGrad()) : -1;
  e.has_device = tensor->device().has_value();
  e.device = tensor->device().value_or(e.device);
  const auto sizes = tensor->sizes();
  for (int64_t d = 0; d < e.rank; ++d) {
    const auto size = sizes.size() ? sizes[d] : std::nullopt;
    e.extents.push_back(size ? extent_of(*size) : Extent::Unknown);
  }
  const auto& strides = tensor->stride_properties();
  for (size_t j = 0; strides.size() && j < *strides.size(); ++j) {
    const auto& stride = strides[j];
    if (stride && stride->stride_index_ && static_cast<int64_t>(*stride->stride_index_) < e.rank) {
      e.order.push_back(
          {static_cast<int32_t>(*stride->stride_index_), stride->contiguous_.value_or(false), j == 0});
    }
  }
  e.dense = static_cast<int64_t>(e.order.size()) == e.rank &&
            std::all_of(e.order.begin(), e.order.end(), [](const auto& dim) { return dim.contiguous; });
  return e;
}

bool strides_agree(const Expected& e, at::IntArrayRef sizes, at::IntArrayRef strides) {
  int32_t inner = -1;  // the slowest dim so far that is not of size 1
  for (const Expected::Dim& expected : e.order) {
    const int32_t d = expected.dim;
    const bool ordered = inner < 0 || strides[d] == 0 || strides[inner] == 0 || strides[d] >= strides[inner];
    if (!ordered) {
      return false;
    }
    if (expected.contiguous) {
      if (expected.fastest) {
        if (strides[d] != 1) {
          return false;
        }
      } else if (inner >= 0 && sizes[d] != 1 && strides[d] != 1 &&
                 strides[d] != strides[inner] * std::max<int64_t>(sizes[inner], 1)) {
        return false;
      }
    }
    if (inner < 0 || sizes[d] != 1) {
      inner = d;
    }
  }
  return true;
}

bool is_unreadable(const c10::IValue& value) {
  return value.isTensor() && value.toTensor().defined() && !is_readable(value.toTensor());
}

// How far a tensor is what was profiled: in nothing that counts, but for the order of its dims in memory, or
// wholly.
enum class Fit : uint8_t { None, OtherOrder, Whole };

Fit fit_of(const Expected& e, const c10::IValue& value, bool grad_mode) {
  if (!e.known || !value.isTensor()) {
    return Fit::None;
  }
  const at::Tensor& tensor = value.toTensor();
  if (!tensor.defined() || tensor.dim() != e.rank ||
      (e.dtype >= 0 && static_cast<int16_t>(tensor.scalar_type()) != e.dtype) ||
      (e.has_device && tensor.device() != e.device) ||
      (e.requires_grad >= 0 && (grad_mode && tensor.requires_grad()) != (e.requires_grad != 0))) {
    return Fit::None;
  }
  const auto sizes = tensor.sizes();
  for (int64_t d = 0; d < e.rank; ++d) {
    if (e.extents[d] != Extent::Unknown && e.extents[d] != extent_of(sizes[d])) {
      return Fit::None;
    }
  }
  if (strides_agree(e, sizes, tensor.strides())) {
    return Fit::Whole;
  }
  return e.dense && tensor.is_non_overlapping_and_dense() ? Fit::OtherOrder : Fit::None;
}

}  // namespace

torch::jit::Operation guard_operation(at::ArrayRef<c10::TypePtr> types, size_t patterns) {
  std::vector<Expected> expected;
  std::vector<bool> scalars;
  for (const c10::TypePtr& type : types) {
    const Expected& e = expected.emplace_back(flatten(type));
    scalars.push_back(e.known && e.rank == 0 && e.has_device && e.device.is_cpu());
  }
  auto widening = patterns ? std::make_shared<GuardWidening>(patterns, std::move(scalars)) : nullptr;
  return [expected = std::move(expected), widening = std::move(widening)](torch::jit::Stack& stack) {
    const size_t count = expected.size();
    Admission& admission = last_admission();
    admission.widening.reset();
    admission.agreed = false;
    bool pass = true, readable = true;
    Fit worst = Fit::Whole;
    if (guard_mode.load(std::memory_order_relaxed)) {
      const auto inputs = torch::jit::last(stack, count);
      const bool grad_mode = c10::GradMode::is_enabled();
      for (size_t i = 0; worst != Fit::None && i < count; ++i) {
        if (C10_UNLIKELY(is_unreadable(inputs[i]))) {
          readable = false;
          break;
        }
        worst = std::min(worst, fit_of(expected[i], inputs[i], grad_mode));
      }
      pass = !readable || worst == Fit::Whole;  // what cannot be read passes, to be run unfused
      admission.agreed = pass && readable;
      if (!pass && widening &&
          widening->admits(inputs, grad_mode, worst == Fit::OtherOrder, admission.pattern)) {
        admission.widening = widening;
        pass = true;
      }
    }
    torch::jit::drop(stack, count);
    torch::jit::push(stack, pass);
  };
}

}  // namespace tsfuser
