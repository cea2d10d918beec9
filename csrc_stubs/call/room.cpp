#include "call/room.h"

#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace tsfuser {
namespace {

// The mark: shallow copies of a tensor, as saved tensors are, have it too.
struct Room : c10::BackendMeta {};

using Mark = c10::intrusive_ptr<c10::BackendMeta>;

const Mark& mark_of(int64_t dim) {
  static const auto* columns = new Mark(c10::make_intrusive<Room>());
  static const auto* rows = new Mark(c10::make_intrusive<Room>());
  return dim == -1 ? *columns : *rows;
}

}  // namespace

void mark_room(const at::Tensor& tensor, int64_t dim) {
  tensor.unsafeGetTensorImpl()->set_backend_meta(mark_of(dim));
}

int64_t dim_with_room(const at::Tensor& tensor) {
  const c10::BackendMeta* found = tensor.unsafeGetTensorImpl()->get_backend_meta();
  return !found ? 0 : found == mark_of(-1).get() ? -1 : found == mark_of(-2).get() ? -2 : 0;
}

}  // namespace tsfuser
