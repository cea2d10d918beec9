#include "call/arguments.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace tsfuser {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::ScalarType;

enum class Tag : uint8_t { Tensor = 1, Bool, Int, Float, Complex, BoolList, IntList, None, String };

constexpr const char* with_tangent =
    "a tensor argument has a tangent of forward-mode AD, which fused kernels do not compute";
constexpr const char* lazy_argument = "a tensor argument is a lazy conjugate or negative";

uint64_t word(Tag tag, uint64_t a = 0, uint64_t b = 0, uint64_t c = 0, uint64_t count = 0) {
  return static_cast<uint64_t>(tag) | (a & 0xff) << 8 | (b & 0xff) << 16 | (c & 0xff) << 24 | count << 32;
}

// All keys that a plain strided CPU or CUDA tensor may carry. Anything else (conj and neg bits, ZeroTensor,
// sparse, quantized, meta, functorch wrappers, subclasses) has a meaning that its address does not tell.
DispatchKeySet plain_keys() {
  return DispatchKeySet({DispatchKey::CPU, DispatchKey::CUDA, DispatchKey::AutogradCPU,
                         DispatchKey::AutogradCUDA, DispatchKey::ADInplaceOrView, DispatchKey::AutocastCPU,
                         DispatchKey::AutocastCUDA});
}

// Modes that want to see every op: tracing, fake tensors, functorch transforms, functionalization.
DispatchKeySet watching_keys() {
  return DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
                         DispatchKey::PreDispatch, DispatchKey::Functionalize,
                         DispatchKey::FuncTorchDynamicLayerFrontMode,
                         DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchBatched,
                         DispatchKey::FuncTorchVmapMode, DispatchKey::FuncTorchGradWrapper});
}

template <class T>
uint64_t hash_words(const std::vector<T>& words, uint64_t seed) {
  size_t i = 0;
  for (; i + 2 <= words.size(); i += 2) {
    seed = mix(seed ^ static_cast<uint64_t>(words[i]), static_cast<uint64_t>(words[i + 1]));
  }
  return i < words.size() ? mix(seed ^ static_cast<uint64_t>(words[i]), words.size()) : seed;
}

// By the number of a c10::ScalarType; empty for those that kernels do not know. Written at import alone.
auto& dtype_names() {
  static std::array<std::string, static_cast<size_t>(ScalarType::NumOptions)> names;
  return names;
}

const char* gather_tensor(const at::Tensor& tensor, bool grad_mode, Arguments& out) {
  if (const char* reason = refuse_tensor(tensor)) {
    return reason;
  }
  if (grad_mode && tensor.requires_grad()) {
    return "a tensor argument requires a gradient, which fused kernels do not record";
  }
  const ScalarType dtype = tensor.scalar_type();
  if (!dtype_name(dtype)) {
    return "a tensor argument has a dtype that kernels do not know";
  }
  const c10::Device device = tensor.device();
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  if (device.is_cuda()) {
    if (out.device.is_cuda() && out.device != device) {
      return "tensor arguments are on more than one CUDA device";
    }
    out.device = device;
  } else if (!sizes.empty()) {
    out.has_cpu_array = true;
  }
  const void* address = tensor.const_data_ptr();
  out.structure.push_back(word(Tag::Tensor, static_cast<uint64_t>(dtype),
                               static_cast<uint64_t>(device.type()),
                               static_cast<uint64_t>(device.index() + 1), sizes.size()));
  out.leaves.insert(out.leaves.end(), sizes.begin(), sizes.end());
  out.leaves.insert(out.leaves.end(), strides.begin(), strides.end());
  out.leaves.push_back(alignment_of(address));
  out.addresses.back() = address;
  return nullptr;
}

const char* gather_list(const c10::IValue& value, Arguments& out) {
  const bool ints = value.isIntList();
  if (!ints && !value.isBoolList()) {
    return value.isTensorList() ? "an argument is a list of tensors"
                                : "an argument is a list of neither ints nor bools";
  }
  const auto items = value.toListRef();
  out.structure.push_back(word(ints ? Tag::IntList : Tag::BoolList, 0, 0, 0, items.size()));
  for (const c10::IValue& item : items) {
    out.leaves.push_back(ints ? item.toInt() : static_cast<int64_t>(item.toBool()));
  }
  return nullptr;
}

void gather_string(const std::string& text, Arguments& out) {
  out.structure.push_back(word(Tag::String, 0, 0, 0, text.size()));
  for (size_t i = 0; i < text.size(); i += sizeof(uint64_t)) {
    uint64_t packed = 0;
    std::memcpy(&packed, text.data() + i, std::min(sizeof(packed), text.size() - i));
    out.structure.push_back(packed);
  }
}

const char* gather_one(const c10::IValue& value, bool grad_mode, Arguments& out) {
  if (value.isTensor()) {
    return gather_tensor(value.toTensor(), grad_mode, out);
  }
  if (value.isInt()) {
    out.structure.push_back(word(Tag::Int));
    out.leaves.push_back(value.toInt());
  } else if (value.isBool()) {
    out.structure.push_back(word(Tag::Bool));
    out.leaves.push_back(value.toBool());
  } else if (value.isDouble()) {
    out.structure.push_back(word(Tag::Float));
  } else if (value.isComplexDouble()) {
    out.structure.push_back(word(Tag::Complex));
  } else if (value.isNone()) {
    out.structure.push_back(word(Tag::None));
  } else if (value.isList()) {
    return gather_list(value, out);
  } else if (value.isString()) {
    gather_string(value.toStringRef(), out);
  } else {
    return "an argument is neither a tensor, a number, a list of ints or bools, a string nor None";
  }
  return nullptr;
}

}  // namespace

void set_dtypes(const std::unordered_map<std::string, int64_t>& codes) {
  for (const auto& [name, code] : codes) {
    if (code >= 0 && code < static_cast<int64_t>(dtype_names().size())) {
      dtype_names()[code] = name;
    }
  }
}

const char* dtype_name(ScalarType dtype) {
  const auto code = static_cast<size_t>(dtype);
  return code < dtype_names().size() && !dtype_names()[code].empty() ? dtype_names()[code].c_str() : nullptr;
}

std::optional<ScalarType> dtype_from_name(const std::string& name) {
  const auto found = std::find(dtype_names().begin(), dtype_names().end(), name);
  if (name.empty() || found == dtype_names().end()) {
    return std::nullopt;
  }
  return static_cast<ScalarType>(found - dtype_names().begin());
}

int64_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address) | most_alignment;
  return static_cast<int64_t>(bits & (~bits + 1));
}

// Takes torch's lock only where a tangent may be there.
bool has_tangent(const at::Tensor& tensor) {
  const auto* meta = tensor.defined() ? torch::autograd::impl::get_autograd_meta(tensor) : nullptr;
  return meta && (meta->fw_grad_ || meta->is_view_) && meta->fw_grad(/*level=*/0, tensor).defined();
}

const char* refuse_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    return "a tensor argument is undefined";
  }
  static const DispatchKeySet plain = plain_keys();
  if (C10_LIKELY((tensor.key_set().raw_repr() & ~plain.raw_repr()) == 0)) {
    return C10_UNLIKELY(has_tangent(tensor)) ? with_tangent : nullptr;
  }
  static const DispatchKeySet lazy = plain | DispatchKeySet({DispatchKey::Conjugate, DispatchKey::Negative});
  if ((tensor.key_set().raw_repr() & ~lazy.raw_repr()) == 0) {
    return has_tangent(tensor) ? with_tangent : lazy_argument;
  }
  if (tensor.is_meta()) {
    return "a tensor argument is on the meta device";
  }
  if (tensor.layout() != c10::kStrided) {
    return "a tensor argument is not strided";
  }
  return "a tensor argument is of a kind that kernels cannot read (quantized, subclass, functorch wrapper, "
         "...)";
}

bool is_lazy(const char* reason) { return reason == lazy_argument; }

bool is_readable(const at::Tensor& tensor) {
  const char* reason = refuse_tensor(tensor);
  return C10_LIKELY(!reason) || is_lazy(reason);
}

const char* refuse_mode() {
  static const DispatchKeySet watching = watching_keys();
  return C10_UNLIKELY(c10::impl::tls_local_dispatch_key_set().included_.has_any(watching))
             ? "a dispatch mode or a functorch transform watches the ops of this thread"
             : nullptr;
}

const char* gather(at::ArrayRef<c10::IValue> inputs, Arguments& out) {
  out.structure.clear();
  out.leaves.clear();
  out.addresses.clear();
  out.device = c10::Device(c10::DeviceType::CPU);
  out.has_cpu_array = false;
  if (const char* reason = refuse_mode()) {
    return reason;
  }
  // What a Python float or an integer division promotes to is part of a plan.
  out.structure.push_back(static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()));
  const bool grad_mode = c10::GradMode::is_enabled();
  for (const c10::IValue& value : inputs) {
    out.addresses.push_back(nullptr);
    if (const char* reason = gather_one(value, grad_mode, out)) {
      return reason;
    }
  }
  if (out.has_cpu_array && out.device.is_cuda()) {
    return "a CPU tensor that is not 0-dim meets CUDA tensors";
  }
  out.hash = hash_words(out.leaves, hash_words(out.structure, inputs.size()));
  return nullptr;
}

}  // namespace tsfuser
