// What a group's operator needs to know about the arguments of one call.
//
// In: the top of the interpreter's stack. Out: a structure key (the kinds of the arguments), a leaf vector
// (their sizes, strides, alignments and integers), the tensors' addresses and the device; or the reason why
// the call has to run unfused. Example: one float32 CUDA tensor of sizes (4, 8) gives one structure word
// and the leaves [4, 8, 8, 1, 64].
#pragma once

#include <ATen/core/ivalue.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace tsfuser {

struct Arguments {
  std::vector<uint64_t> structure;
  std::vector<int64_t> leaves;
  std::vector<const void*> addresses;        // by argument; null where it is not a tensor
  c10::Device device{c10::DeviceType::CPU};  // of the CUDA tensors, if there are any
  bool has_cpu_array = false;                // some CPU tensor is not 0-dim
  uint64_t hash = 0;                         // of structure and leaves
};

// Fills `arguments` (its buffers are reused, so steady calls allocate nothing). Returns null, or why the
// group must run unfused.
const char* gather(at::ArrayRef<c10::IValue> inputs, Arguments& arguments);

// Null if a kernel may read the tensor by address, sizes and strides; else the reason.
const char* refuse_tensor(const at::Tensor& tensor);

// Whether this is the reason for a tensor with the conjugate or the negative bit. A kernel may read a copy
// of it, resolved.
bool is_lazy(const char* reason);

// Whether a kernel may read the tensor, or a resolved copy of it.
bool is_readable(const at::Tensor& tensor);

// Whether forward-mode AD carries a tangent along with the tensor, or with what it is a view of.
bool has_tangent(const at::Tensor& tensor);

// Null, or why each op of this thread has to go through torch's dispatcher.
const char* refuse_mode();

// Says which dtypes kernels know: their names with their numbers in c10::ScalarType (tsfuser/ir/dtypes.py).
void set_dtypes(const std::unordered_map<std::string, int64_t>& codes);

// `float32` for torch.float32; null for dtypes that kernels do not know.
const char* dtype_name(c10::ScalarType dtype);
std::optional<c10::ScalarType> dtype_from_name(const std::string& name);

// Largest power of two, at most `most_alignment`, that divides the address; that for null. No vector of a
// kernel is wider; and what torch allocates has it, so that calls with new tensors are calls that were made
// before.
constexpr int64_t most_alignment = 64;
int64_t alignment_of(const void* address);

// Two words a multiplication (as in wyhash): the key of a usual call is hashed in some 20 ns.
inline uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product =
      static_cast<unsigned __int128>(a ^ 0x9e3779b97f4a7c15ull) * (b ^ 0xe7037ed1a0b428dbull);
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace tsfuser
