// tsfuser::store: writes a value to the memory of the first operand, and returns that operand.
//
// In a group it is the last op on a value, and the kernel writes there
// (tsfuser/frontends/dynamo/in_place.py). This implementation runs if the group runs unfused. Example:
// store(parameter, parameter - rate * gradient).

#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace tsfuser {
namespace {

at::Tensor& store(at::Tensor& self, const at::Tensor& value) { return self.copy_(value); }

}  // namespace
}  // namespace tsfuser

TORCH_LIBRARY_FRAGMENT(tsfuser, m) { m.def("store(Tensor(a!) self, Tensor value) -> Tensor(a!)"); }

TORCH_LIBRARY_IMPL(tsfuser, CompositeExplicitAutograd, m) { m.impl("store", tsfuser::store); }
