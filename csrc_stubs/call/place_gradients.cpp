// Gradients of reads at places. They are given the sizes of the tensor that was read, not its elements, so
// nothing of that size is saved for them. Groups make them by comparing each place with its index.
//
//     tsfuser::nll_loss_backward(gradient, [4, 100], target, None, 1, -100, total_weight)
//         aten::nll_loss_backward for log-probabilities [4, 100]
//     tsfuser::gather_backward(gradient, [4, 100], 1, index)
//         of gather(x, 1, index) for x [4, 100]
//     tsfuser::extreme_backward(gradient, [4, 100], 1, index)
//         of x.max(1), whose places are the index; a gradient of -0.0 stays so, as in eager
//
// tsfuser::sums_at(source, 0, 2, index): new zeros [2, ...] to which the source is added at the index, those
// of 16 bits in float32. Groups make the few sums as reductions side by side.
//
// tsfuser::sums_by_place(source, [9, 4], 0, index, parts, checks): new zeros [9, 4].scatter_add(0, index,
// source). With `parts`, the index of a part holds for all of its elements; with `checks`, too, sizes are
// those that index_add takes. Scripted programs differentiate it, where it is in no group.

#include <torch/library.h>
#include <torch/torch.h>

#include <utility>
#include <vector>

namespace tsfuser {
namespace {

at::Tensor nll_loss_backward(const at::Tensor& gradient, c10::SymIntArrayRef sizes, const at::Tensor& target,
                             const c10::optional<at::Tensor>& weight, int64_t reduction,
                             c10::SymInt ignore_index, const at::Tensor& total_weight) {
  const at::Tensor unread = at::empty_symint(sizes, gradient.options());
  const auto backward = sizes.size() == 4 ? at::nll_loss2d_backward_symint : at::nll_loss_backward_symint;
  return backward(gradient, unread, target, weight, reduction, std::move(ignore_index), total_weight);
}

at::Tensor gather_backward(const at::Tensor& gradient, c10::SymIntArrayRef sizes, int64_t dim,
                           const at::Tensor& index) {
  return at::zeros_symint(sizes, gradient.options()).scatter_add_(dim, index, gradient);
}

at::Tensor extreme_backward(const at::Tensor& gradient, c10::SymIntArrayRef sizes, int64_t dim,
                            const at::Tensor& index) {
  return at::zeros_symint(sizes, gradient.options()).scatter_(dim, index, gradient);
}

at::Tensor sums_at(const at::Tensor& source, int64_t dim, int64_t size, const at::Tensor& index) {
  std::vector<c10::SymInt> sizes = source.sym_sizes().vec();
  sizes.at(at::maybe_wrap_dim(dim, source.dim())) = size;
  const auto dtype = source.scalar_type();
  const auto wide = dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
  const auto zeros = at::zeros_symint(sizes, source.options().dtype(wide));
  return zeros.index_add_(dim, index, source.to(wide)).to(dtype);
}

at::Tensor sums_by_place(const at::Tensor& source, c10::SymIntArrayRef sizes, int64_t dim,
                         const at::Tensor& index, bool parts, bool checks) {
  at::Tensor sums = at::zeros_symint(sizes, source.options());
  if (parts && checks) {
    return sums.index_add_(dim, index, source);
  }
  if (!parts) {
    return sums.scatter_add_(dim, index, source);
  }
  std::vector<int64_t> shape(source.dim(), 1);
  shape.at(at::maybe_wrap_dim(dim, source.dim())) = -1;
  return sums.scatter_add_(dim, index.view(shape).expand_as(source), source);
}

}  // namespace
}  // namespace tsfuser

TORCH_LIBRARY_FRAGMENT(tsfuser, m) {
  m.def(
      "nll_loss_backward(Tensor gradient, SymInt[] sizes, Tensor target, Tensor? weight, int reduction, "
      "SymInt ignore_index, Tensor total_weight) -> Tensor");
  m.def("gather_backward(Tensor gradient, SymInt[] sizes, int dim, Tensor index) -> Tensor");
  m.def("extreme_backward(Tensor gradient, SymInt[] sizes, int dim, Tensor index) -> Tensor");
  m.def("sums_at(Tensor source, int dim, int size, Tensor index) -> Tensor");
  m.def(
      "sums_by_place(Tensor source, SymInt[] sizes, int dim, Tensor index, bool parts, bool checks) -> "
      "Tensor");
}

TORCH_LIBRARY_IMPL(tsfuser, CompositeExplicitAutograd, m) {
  m.impl("nll_loss_backward", tsfuser::nll_loss_backward);
  m.impl("gather_backward", tsfuser::gather_backward);
  m.impl("extreme_backward", tsfuser::extreme_backward);
  m.impl("sums_at", tsfuser::sums_at);
}

TORCH_LIBRARY_IMPL(tsfuser, CompositeImplicitAutograd, m) {
  m.impl("sums_by_place", tsfuser::sums_by_place);
}
