#include "call/reuse.h"

#include "call/room.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <algorithm>

namespace tsfuser {
namespace {

bool is_alike(const Reuse& reuse, const std::vector<int64_t>& values) {
  return std::all_of(reuse.alike.begin(), reuse.alike.end(), [&values](const Reuse::Dim& dim) {
    return values[dim.extent] == 1 || values[dim.allocation_stride] == values[dim.input_stride];
  });
}

// Whether nobody but the stack can reach the memory of the tensor, which is all that its storage has: no
// other tensor, no view, nothing saved for a backward, no other process and nobody who has lent it to torch.
bool is_sole(const at::Tensor& tensor, size_t bytes, c10::Device device) {
  if (tensor.use_count() != 1 || tensor.device() != device || tensor.requires_grad()) {
    return false;
  }
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  return storage.use_count() == 1 && tensor.storage_offset() == 0 && storage.nbytes() == bytes &&
         storage.data_ptr().get_deleter() == c10::GetAllocator(device.type())->raw_deleter();
}

at::Tensor tensor_in(const c10::Storage& storage, c10::ScalarType dtype, at::IntArrayRef sizes,
                     at::IntArrayRef strides) {
  const auto key = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                             c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

}  // namespace

std::vector<PreparedReuse> prepare_reuses(const Plan& plan, const std::vector<int64_t>& values,
                                          const std::vector<int64_t>& dims) {
  std::vector<PreparedReuse> found;
  for (const Reuse& reuse : plan.reuses) {
    size_t begin = 0;
    for (int32_t k = 0; k < reuse.allocation; ++k) {
      begin += 2 * plan.allocations[k].sizes.size();
    }
    const Allocation& made = plan.allocations[reuse.allocation];
    const size_t rank = made.sizes.size();
    const at::IntArrayRef sizes{dims.data() + begin, rank}, strides{dims.data() + begin + rank, rank};
    const size_t bytes = made.elements < 0
                             ? at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(made.dtype))
                             : static_cast<size_t>(values[made.elements]) * c10::elementSize(made.dtype);
    if (bytes > 0 && is_alike(reuse, values)) {
      found.push_back({reuse.allocation, reuse.input, bytes, begin});
    }
  }
  return found;
}

bool take_memory(const PreparedCall& call, c10::Device device, at::ArrayRef<c10::IValue> inputs,
                 DeadInputs dead, Tensors& allocated) {
  const Plan& plan = *call.plan;
  // The first time, a later kernel of the plan may turn out to be one that cannot be launched.
  if (call.launches.size() > 1 && !plan.has_run.load(std::memory_order_relaxed)) {
    return false;
  }
  bool taken = false;
  for (const PreparedReuse& reuse : call.reuses) {
    const DeadInputs bit = DeadInputs{1} << reuse.input;
    if (!(dead & bit) || (taken && allocated[reuse.allocation].defined())) {
      continue;
    }
    const at::Tensor& old = inputs[reuse.input].toTensor();
    if (!is_sole(old, reuse.bytes, device)) {
      continue;
    }
    const Allocation& made = plan.allocations[reuse.allocation];
    const int64_t* sizes = call.dims.data() + reuse.dims;
    const size_t rank = made.sizes.size();
    allocated.resize(plan.allocations.size());
    allocated[reuse.allocation] = tensor_in(old.unsafeGetTensorImpl()->unsafe_storage(), made.dtype,
                                            {sizes, rank}, {sizes + rank, rank});
    if (made.elements >= 0) {
      mark_room(allocated[reuse.allocation], made.room_dim);
    }
    dead &= ~bit;
    taken = true;
  }
  return taken;
}

}  // namespace tsfuser
