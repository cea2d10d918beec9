#include "call/room.h"

#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <utility>

namespace tsfuser {
namespace {

// The mark: shallow copies of a tensor, as saved tensors are, have it too.
struct Room : c10::BackendMeta {
  Room(int64_t dim, const void* data) : dim(dim), data(data) {}
  const int64_t dim;
  const void* const data;  // where the memory begins that has the zeros
};

// Whether zeros lie behind dim `dim` of a tensor with room behind `dim_of_room`: a matrix has both.
bool has_zeros_behind(const at::Tensor& tensor, int64_t dim, int64_t dim_of_room) {
  return dim == dim_of_room || (tensor.dim() == 2 && dim_of_room != 0);
}

// Whether the tensor lies where its plan has put it, and as: code may have given it other memory since.
bool is_as_made(const at::Tensor& tensor, const Room& room) {
  if (tensor.dim() < 2 || tensor.storage_offset() != 0 || tensor.const_data_ptr() != room.data) {
    return false;
  }
  c10::SmallVector<int64_t, 8> inner_to_outer = {-1, -2};
  if (tensor.stride(-2) == 1 && tensor.stride(-1) != 1) {
    std::swap(inner_to_outer[0], inner_to_outer[1]);
  }
  for (int64_t d = 3; d <= tensor.dim(); ++d) {
    inner_to_outer.push_back(-d);
  }
  int64_t step = 1;
  for (const int64_t d : inner_to_outer) {
    if (tensor.stride(d) != step) {
      return false;
    }
    step *= has_zeros_behind(tensor, d, room.dim) ? whole_accesses(tensor.size(d)) : tensor.size(d);
  }
  return step * static_cast<int64_t>(tensor.itemsize()) <= static_cast<int64_t>(tensor.storage().nbytes());
}

}  // namespace

void mark_room(const at::Tensor& tensor, int64_t dim) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(c10::make_intrusive<Room>(dim, tensor.const_data_ptr()));
}

int64_t dim_with_room(const at::Tensor& tensor) {
  const auto* found = dynamic_cast<const Room*>(tensor.unsafeGetTensorImpl()->get_backend_meta());
  return found && is_as_made(tensor, *found) ? found->dim : 0;
}

bool has_room(const at::Tensor& tensor, int64_t dim) {
  return has_zeros_behind(tensor, dim, dim_with_room(tensor));
}

}  // namespace tsfuser
