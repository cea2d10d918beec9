// tsfuser::rows: what the gradient of a linear op's weight reads. Autodiff's formula has `reshape(x, [-1,
// n])`, which raises where n is 0.

#include "torchscript/prepare.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <cstdint>

namespace tsfuser {
namespace {

// The tensor as a matrix, each row of which is along its last dim.
void rows(torch::jit::Stack& stack) {
  const at::Tensor self = torch::jit::peek(stack, 0, 1).toTensor();
  if (self.dim() == 2) {
    return;
  }
  TORCH_CHECK(self.dim() > 0, "a tensor without dims has no rows");
  const int64_t columns = self.size(-1);
  int64_t count = 1;
  for (const int64_t size : self.sizes().slice(0, self.dim() - 1)) {
    count *= size;
  }
  torch::jit::drop(stack, 1);
  torch::jit::push(stack, self.reshape({count, columns}));
}

}  // namespace

void register_rows() {
  static const torch::jit::RegisterOperators registered({torch::jit::Operator(
      "tsfuser::rows(Tensor(a) self) -> Tensor(a)", rows, c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
