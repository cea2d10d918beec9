// Max pooling that says in 8 bits which element of its window is the largest, where torch's indices have 64.
// Groups write and read these numbers; here is what runs without a group.
//
//     tsfuser::max_pool(x, [2, 2], [2, 2], [0, 0], [1, 1], False)
//         the largest elements; and their offsets: 3 is row 1, column 1 of a window
//     tsfuser::max_pool_backward(gradient, offsets, [8, 64, 56, 56], [2, 2], [2, 2], [0, 0], [1, 1], False)
//         the gradient for x of these sizes, in the memory format of `gradient`

#include <torch/library.h>
#include <torch/torch.h>

#include <tuple>

namespace tsfuser {
namespace {

using at::IntArrayRef;

// Where windows begin along a dim: before the tensor, where there is a padding.
at::Tensor starts(const at::Tensor& windows, int64_t dim, int64_t step, int64_t padding) {
  const at::Tensor numbers = at::arange(windows.sym_size(dim), windows.options().dtype(at::kLong));
  const at::Tensor found = numbers * step - padding;
  return dim == -2 ? found.unsqueeze(1) : found;
}

std::tuple<at::Tensor, at::Tensor> max_pool(const at::Tensor& self, IntArrayRef kernel, IntArrayRef stride,
                                            IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  const auto [values, indices] =
      at::max_pool2d_with_indices(self, kernel, stride, padding, dilation, ceil_mode);
  const at::Tensor width = at::scalar_tensor(self.sym_size(-1), indices.options());
  const at::Tensor rows = at::floor_divide(indices, width);
  const at::Tensor columns = indices - rows * width;
  const at::Tensor row = at::floor_divide(rows - starts(values, -2, stride[0], padding[0]), dilation[0]);
  const at::Tensor column =
      at::floor_divide(columns - starts(values, -1, stride[1], padding[1]), dilation[1]);
  return {values, (row * kernel[1] + column).to(at::kChar)};
}

at::Tensor max_pool_backward(const at::Tensor& gradient, const at::Tensor& offsets,
                             c10::SymIntArrayRef sizes, IntArrayRef kernel, IntArrayRef stride,
                             IntArrayRef padding, IntArrayRef dilation, bool ceil_mode) {
  const at::Tensor numbers = offsets.to(at::kLong);
  const at::Tensor row = at::floor_divide(numbers, kernel[1]);
  const at::Tensor column = numbers - row * kernel[1];
  const at::Tensor rows = row * dilation[0] + starts(offsets, -2, stride[0], padding[0]);
  const at::Tensor columns = column * dilation[1] + starts(offsets, -1, stride[1], padding[1]);
  const at::Tensor width = at::scalar_tensor(sizes.back(), numbers.options());
  const at::Tensor unread = at::empty_symint(sizes, gradient.options(), gradient.suggest_memory_format());
  return at::max_pool2d_with_indices_backward(gradient, unread, kernel, stride, padding, dilation, ceil_mode,
                                              rows * width + columns);
}

}  // namespace
}  // namespace tsfuser

TORCH_LIBRARY_FRAGMENT(tsfuser, m) {
  m.def(
      "max_pool(Tensor self, int[2] kernel_size, int[2] stride, int[2] padding, int[2] dilation, "
      "bool ceil_mode) -> (Tensor, Tensor)");
  m.def(
      "max_pool_backward(Tensor grad_output, Tensor offsets, SymInt[] sizes, int[2] kernel_size, "
      "int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode) -> Tensor");
}

TORCH_LIBRARY_IMPL(tsfuser, CompositeExplicitAutograd, m) {
  m.impl("max_pool", tsfuser::max_pool);
  m.impl("max_pool_backward", tsfuser::max_pool_backward);
}
