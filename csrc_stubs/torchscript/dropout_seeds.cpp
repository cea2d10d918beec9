// What the forward of a differentiable graph saves of a dropout, outside of groups: the operators of two
// rows of tsfuser/ops/random.py, for the nodes that tsfuser/frontends/torchscript/training/dropout.py makes.
//
//   tsfuser::dropout_seed   the mask itself: only a group knows the seed of its random numbers
//   tsfuser::dropout_mask   the mask that was saved, or drawn again from the seed that a group has saved
//
// So the backward has the mask of the forward, whichever of the two runs in a group.

#include "call/seeded_dropout.h"
#include "torchscript/hooks.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <numeric>
#include <vector>

namespace tsfuser {
namespace {

// The order of dims that the length of a seed stands for (tsfuser/ir/seed_lengths.py).
std::vector<int64_t> order_of_length(int64_t rank, int64_t length) {
  std::vector<int64_t> order(rank);
  std::iota(order.begin(), order.end(), 0);
  for (int64_t k = 2; k < length; ++k) {
    std::next_permutation(order.begin(), order.end());
  }
  return order;
}

void keep_mask(torch::jit::Stack&) {}

void dropout_mask(torch::jit::Stack& stack) {
  const double p = torch::jit::pop(stack).toDouble();
  const at::Tensor like = torch::jit::pop(stack).toTensor();
  const at::Tensor saved = torch::jit::pop(stack).toTensor();
  // The mask of an empty tensor has that tensor's dtype.
  if (saved.scalar_type() != at::kLong || saved.dim() != 1 || saved.size(0) < 2) {
    torch::jit::push(stack, saved);
    return;
  }
  const at::Tensor seed = saved.to(like.device());
  torch::jit::push(stack, kept_elements(like, seed, 0, p, order_of_length(like.dim(), saved.size(0))));
}

}  // namespace

void register_dropout_seeds() {
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator("tsfuser::dropout_seed(Tensor(a) mask) -> Tensor(a)", keep_mask,
                            c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::dropout_mask(Tensor(a) saved, Tensor like, float p) -> Tensor(a)",
                            dropout_mask, c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
