#include "interpreter/number_ops.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/_assert_scalar.h>
#include <ATen/ops/view.h>
#include <c10/util/Exception.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
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

int64_t floor_divided(int64_t a, int64_t b) {
  if (b == 0) {
    throw ZeroDivision("integer division or modulo by zero");
  }
  if (b == -1) {  // the processor stops at the least number
    if (a == std::numeric_limits<int64_t>::min()) {
      throw std::overflow_error("a number of a compiled graph does not fit into 64 bits");
    }
    return -a;
  }
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

int64_t remainder(int64_t a, int64_t b) {
  if (b == 0) {
    throw ZeroDivision("integer modulo by zero");
  }
  const int64_t rest = b == -1 ? 0 : a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

double remainder(double a, double b) {
  if (b == 0) {
    throw ZeroDivision("float modulo by zero");
  }
  const double rest = std::fmod(a, b);
  if (rest == 0) {
    return std::copysign(0.0, b);
  }
  return (rest < 0) != (b < 0) ? rest + b : rest;
}

double divided(double a, double b) {
  if (b == 0) {
    throw ZeroDivision("division by zero");
  }
  return a / b;
}

// The result of a function of the C library, where Python has one.
double function_result(double operand, double result) {
  TORCH_CHECK_VALUE(!std::isnan(result) || std::isnan(operand), "math domain error");
  if (std::isinf(result) && std::isfinite(operand)) {
    TORCH_CHECK_VALUE(operand != 0, "math domain error");  // a logarithm
    throw std::overflow_error("math range error");
  }
  return result;
}

int64_t shifted_left(int64_t a, int64_t count) {
  TORCH_CHECK_VALUE(count >= 0, "negative shift count");
  const int64_t made = count < 64 ? static_cast<int64_t>(static_cast<uint64_t>(a) << count) : 0;
  if (a != 0 && (count >= 64 || made >> count != a)) {
    throw std::overflow_error("a number of a compiled graph does not fit into 64 bits");
  }
  return made;
}

int64_t shifted_right(int64_t a, int64_t count) {
  TORCH_CHECK_VALUE(count >= 0, "negative shift count");
  return a >> std::min<int64_t>(count, 63);
}

// An op of two numbers of one type.
template <class Number, Number (*compute)(Number, Number)>
void run_numbers(Stack& stack) {
  const Number b = torch::jit::pop(stack).to<Number>(), a = torch::jit::pop(stack).to<Number>();
  torch::jit::push(stack, compute(a, b));
}

torch::jit::Operator operator_of(const char* schema, void (*run)(Stack&)) {
  return torch::jit::Operator(schema, run, c10::AliasAnalysisKind::FROM_SCHEMA);
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
      {operator_of("tsfuser::whole(float a, str how) -> int", make_whole),
       operator_of("tsfuser::floordiv(int a, int b) -> int", run_numbers<int64_t, floor_divided>),
       operator_of("tsfuser::remainder.int(int a, int b) -> int", run_numbers<int64_t, remainder>),
       operator_of("tsfuser::remainder.float(float a, float b) -> float", run_numbers<double, remainder>),
       operator_of("tsfuser::div(float a, float b) -> float", run_numbers<double, divided>),
       operator_of("tsfuser::function_result(float operand, float result) -> float",
                   run_numbers<double, function_result>),
       operator_of("tsfuser::__lshift__(int a, int b) -> int", run_numbers<int64_t, shifted_left>),
       operator_of("tsfuser::__rshift__(int a, int b) -> int", run_numbers<int64_t, shifted_right>),
       operator_of("tsfuser::assert_scalar(bool condition, str message) -> int", assert_scalar),
       operator_of("tsfuser::assert_async(Tensor condition, str message) -> int", assert_async),
       operator_of("tsfuser::view_as_dtype(Tensor(a) self, int dtype) -> Tensor(a)", view_as_dtype)});
}

}  // namespace tsfuser
