// tsfuser::rounded and tsfuser::unrounded: where a 16-bit value of a group is rounded.
//
// A group computes in float, and rounds a 16-bit result where it stores it. `rounded` rounds it for those
// who read it in the group, too; `unrounded` is a cast that does not round there. These implementations run
// if the group runs unfused: then there are only rounded values. Example: rounded(x + y); unrounded(g,
// bfloat16).

#include <ATen/core/Tensor.h>
#include <torch/library.h>

namespace tsfuser {
namespace {

at::Tensor rounded(const at::Tensor& self) { return self.clone(); }

at::Tensor unrounded(const at::Tensor& self, at::ScalarType dtype) {
  return self.to(dtype, /*non_blocking=*/false, /*copy=*/true);
}

}  // namespace
}  // namespace tsfuser

TORCH_LIBRARY_FRAGMENT(tsfuser, m) {
  m.def("rounded(Tensor self) -> Tensor");
  m.def("unrounded(Tensor self, ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(tsfuser, CompositeExplicitAutograd, m) {
  m.impl("rounded", tsfuser::rounded);
  m.impl("unrounded", tsfuser::unrounded);
}
