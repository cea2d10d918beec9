// tsfuser::store(self, value): writes a value to the memory of the first operand, and returns that operand.
//
// In a group it is the last op on a value, and the kernel writes there
// (tsfuser/frontends/dynamo/in_place.py). This implementation runs if the group runs unfused. Example:
// store(parameter, parameter - rate * gradient).
//
// tsfuser::add_at(self, dim, index, source): the same of `self.index_add_(dim, index, source)`, where `self`
// are zeros that nobody else has (tsfuser/frontends/dynamo/groups/added_at.py).

#include <ATen/core/Tensor.h>
#include <ATen/ops/index_add.h>
#include <torch/library.h>

namespace tsfuser {
namespace {

at::Tensor& store(at::Tensor& self, const at::Tensor& value) { return self.copy_(value); }

at::Tensor& add_at(at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Tensor& source) {
  return self.index_add_(dim, index, source);
}

}  // namespace
}  // namespace tsfuser

TORCH_LIBRARY_FRAGMENT(tsfuser, m) {
  m.def("store(Tensor(a!) self, Tensor value) -> Tensor(a!)");
  m.def("add_at(Tensor(a!) self, int dim, Tensor index, Tensor source) -> Tensor(a!)");
}

TORCH_LIBRARY_IMPL(tsfuser, CompositeExplicitAutograd, m) {
  m.impl("store", tsfuser::store);
  m.impl("add_at", tsfuser::add_at);
}
