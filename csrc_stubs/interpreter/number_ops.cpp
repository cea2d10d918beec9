#include "interpreter/number_ops.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/_assert_scalar.h>
#include <ATen/ops/view.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace tsfuser {
namespace {

using torch::jit::Stack;

// As Python makes an int of a float: with its errors, where there is none. TorchScript gives some number.
int64_t whole(double number, const std::string& how) {
  TORCH_CHECK_VALUE(!std::isnan(number), "cannot convert float NaN to integer");
  if (std::isinf(number)) {
    throw std::overflow_error("cannot convert float infinity to integer");
  }
  const double rounded = how == "floor"   ? std::floor(number)
                         : how == "ceil"  ? std::ceil(number)
                         : how == "trunc" ? std::trunc(number)
                                          : std::nearbyint(number);  // half to even
  if (!(rounded >= -0x1p63 && rounded < 0x1p63)) {
    throw std::overflow_error("a number of a compiled graph does not fit into 64 bits");
  }
  return static_cast<int64_t>(rounded);
}

void make_whole(Stack& stack) {
  const std::string how = torch::jit::pop(stack).toStringRef();
  const double number = torch::jit::pop(stack).toDouble();
  torch::jit::push(stack, whole(number, how));
}

// The results of checks are numbers that nobody reads, but which the graph returns: so no pass drops them.
void assert_scalar(Stack& stack) {
  const std::string message = torch::jit::pop(stack).toStringRef();
  at::_assert_scalar(torch::jit::pop(stack).toBool(), message);
  torch::jit::push(stack, int64_t{0});
}

void assert_async(Stack& stack) {
  const std::string message = torch::jit::pop(stack).toStringRef();
  at::_assert_async(torch::jit::pop(stack).toTensor(), message);
  torch::jit::push(stack, int64_t{0});
}

void view_as_dtype(Stack& stack) {
  const at::ScalarType dtype = torch::jit::pop(stack).toScalarType();
  const at::Tensor self = torch::jit::pop(stack).toTensor();
  torch::jit::push(stack, self.view(dtype));
}

}  // namespace

void register_number_ops() {
  static const torch::jit::RegisterOperators registered(
      {torch::jit::Operator("tsfuser::whole(float a, str how) -> int", make_whole,
                            c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::assert_scalar(bool condition, str message) -> int", assert_scalar,
                            c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::assert_async(Tensor condition, str message) -> int", assert_async,
                            c10::AliasAnalysisKind::FROM_SCHEMA),
       torch::jit::Operator("tsfuser::view_as_dtype(Tensor(a) self, int dtype) -> Tensor(a)", view_as_dtype,
                            c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
