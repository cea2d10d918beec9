#include "call/in_order.h"

#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <cstdint>

namespace tsfuser {
namespace {

at::Tensor copied_in_order(const at::Tensor& tensor, at::IntArrayRef order) {
  at::DimVector strides(order.size());
  int64_t expected = 1;
  for (size_t k = order.size(); k-- > 0;) {
    strides[order[k]] = expected;
    expected *= tensor.size(order[k]);
  }
  return at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
}

}  // namespace

at::Tensor in_order(const at::Tensor& tensor, at::IntArrayRef order) {
  if (!tensor.defined() || tensor.layout() != at::kStrided ||
      tensor.dim() != static_cast<int64_t>(order.size()) || tensor.numel() == 0) {
    return tensor;
  }
  int64_t expected = 1;
  for (size_t k = order.size(); k-- > 0;) {
    const int64_t size = tensor.size(order[k]);
    if (size != 1 && tensor.stride(order[k]) != expected) {
      return copied_in_order(tensor, order);
    }
    expected *= size;
  }
  return tensor;
}

}  // namespace tsfuser

TORCH_LIBRARY_FRAGMENT(tsfuser, m) { m.def("in_order(Tensor(a) self, int[] order) -> Tensor(a)"); }

TORCH_LIBRARY_IMPL(tsfuser, CompositeExplicitAutograd, m) { m.impl("in_order", tsfuser::in_order); }
