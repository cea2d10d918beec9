// tsfuser::nll_loss_backward: aten::nll_loss_backward, which is given the sizes of the log-probabilities
// instead of them, as it reads nothing else of them. So nothing of the size of the logits is saved for it.
// Example, for logits [4, 100]:
//
//     tsfuser::nll_loss_backward(gradient, [4, 100], target, None, 1, -100, total_weight)

#include <torch/library.h>
#include <torch/torch.h>

namespace tsfuser {
namespace {

at::Tensor nll_loss_backward(const at::Tensor& gradient, c10::SymIntArrayRef sizes, const at::Tensor& target,
                             const c10::optional<at::Tensor>& weight, int64_t reduction,
                             c10::SymInt ignore_index, const at::Tensor& total_weight) {
  const at::Tensor unread = at::empty_symint(sizes, gradient.options());
  const auto backward = sizes.size() == 4 ? at::nll_loss2d_backward_symint : at::nll_loss_backward_symint;
  return backward(gradient, unread, target, weight, reduction, ignore_index, total_weight);
}

}  // namespace
}  // namespace tsfuser

TORCH_LIBRARY_FRAGMENT(tsfuser, m) {
  m.def(
      "nll_loss_backward(Tensor gradient, SymInt[] sizes, Tensor target, Tensor? weight, int reduction, "
      "SymInt ignore_index, Tensor total_weight) -> Tensor");
}

TORCH_LIBRARY_IMPL(tsfuser, CompositeExplicitAutograd, m) {
  m.impl("nll_loss_backward", tsfuser::nll_loss_backward);
}
