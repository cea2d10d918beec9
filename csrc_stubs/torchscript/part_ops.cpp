// The operators of parts (part_twin.cpp): the twin, the part and its gradient in differentiable graphs,
// where a part begins and ends.

#include "torchscript/parts.h"
#include "torchscript/prepare.h"
#include "torchscript/twin_rows.h"

#include <ATen/ops/chunk.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/roll.h>
#include <ATen/ops/select_backward.h>
#include <ATen/ops/slice_backward.h>
#include <ATen/ops/split.h>
#include <ATen/ops/split_with_sizes.h>
#include <ATen/ops/unbind.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <functional>
#include <utility>

namespace tsfuser {

Sizes rolled_dims(int64_t dim, int64_t count, int64_t index) {
  Sizes dims = {dim, count, index};
  dims.erase(std::remove(dims.begin(), dims.end(), kNoDim), dims.end());
  return dims;
}

Sizes negated(Sizes numbers) {
  std::transform(numbers.begin(), numbers.end(), numbers.begin(), std::negate<>());
  return numbers;
}

namespace {

using torch::jit::Operator;
using torch::jit::Stack;

std::vector<at::Tensor> parted(const at::Tensor& self, at::IntArrayRef given, int64_t how, int64_t dim) {
  switch (how) {
    case kEqual: return at::split(self, given.at(0), dim);
    case kSizes: return at::split_with_sizes(self, given, dim);
    case kChunks: return at::chunk(self, given.at(0), dim);
    default: return at::unbind(self, dim);
  }
}

// As prim::ListUnpack does.
void check_count(size_t found, int64_t count) {
  TORCH_CHECK(static_cast<int64_t>(found) == count, "Expected ", count, " elements in a list but found ",
              found);
}

// A tensor of these sizes, of next to no memory.
at::Tensor of_sizes(at::IntArrayRef sizes) { return at::empty({}).expand(sizes); }

// What comes behind the tensor, or its sizes.
struct Numbers {
  Sizes given;
  int64_t how, dim, count, index;
};

Numbers pop_numbers(Stack& stack) {
  Numbers n{};
  n.index = torch::jit::pop(stack).toInt();
  n.count = torch::jit::pop(stack).toInt();
  n.dim = torch::jit::pop(stack).toInt();
  n.how = torch::jit::pop(stack).toInt();
  n.given = torch::jit::pop(stack).toIntVector();
  return n;
}

// The ends of parts of the `given` sizes; none if these do not fill the `whole`.
Sizes ends_of_sizes(const Sizes& given, int64_t whole) {
  Sizes ends;
  for (const int64_t size : given) {
    const int64_t before = ends.empty() ? 0 : ends.back();
    if (size < 0 || size > whole - before) {
      return {};
    }
    ends.push_back(before + size);
  }
  return ends.empty() || ends.back() != whole ? Sizes() : ends;
}

// The ends of the parts; none if the numbers do not fit: then the op itself raises the error.
Sizes quick_ends(const Sizes& sizes, const Numbers& n) {
  const int64_t dim = n.dim + (n.dim < 0 ? static_cast<int64_t>(sizes.size()) : 0);
  if (dim < 0 || dim >= static_cast<int64_t>(sizes.size()) || n.count < 1) {
    return {};
  }
  const int64_t whole = sizes[dim];
  if (n.how == kSizes) {
    return n.count == static_cast<int64_t>(n.given.size()) ? ends_of_sizes(n.given, whole) : Sizes();
  }
  int64_t step = n.how == kUnbound ? 1 : n.given.at(0);
  if (n.how == kChunks) {  // `given` is the number of parts
    step = step > 0 ? (whole + step - 1) / step : 0;
  }
  if (step <= 0 || whole <= (n.count - 1) * step || whole > n.count * step) {
    return {};
  }
  Sizes ends(n.count);
  for (int64_t k = 0; k < n.count; ++k) {
    ends[k] = std::min((k + 1) * step, whole);
  }
  return ends;
}

// Where the parts end; raises what taking so many parts raises.
Sizes ends_of(const Sizes& sizes, const Numbers& n) {
  Sizes ends = quick_ends(sizes, n);
  if (ends.empty()) {
    const auto parts = parted(of_sizes(sizes), n.given, n.how, n.dim);
    check_count(parts.size(), n.count);
    for (const at::Tensor& part : parts) {
      ends.push_back((ends.empty() ? 0 : ends.back()) + (n.how == kUnbound ? 1 : part.size(n.dim)));
    }
  }
  return ends;
}

// Where part `index` begins, and ends.
std::pair<int64_t, int64_t> bounds_of(const Sizes& sizes, const Numbers& n) {
  const Sizes ends = ends_of(sizes, n);
  return {n.index == 0 ? 0 : ends[n.index - 1], ends[n.index]};
}

at::Tensor whole_of(const at::Tensor& self, const Numbers& n) {
  switch (n.how) {
    case kFlat: return self.flatten(n.dim, n.count);
    case kUnflat: return self.unflatten(n.dim, n.given);
    case kRolled: return at::roll(self, n.given, rolled_dims(n.dim, n.count, n.index));
    case kPadded: return at::constant_pad_nd(self, n.given);
    default: return padded_or_same(self, n.given);
  }
}

at::Tensor whole_backward(const at::Tensor& gradient, const Sizes& sizes, const Numbers& n) {
  switch (n.how) {
    case kRolled: return at::roll(gradient, negated(n.given), rolled_dims(n.dim, n.count, n.index));
    case kPadded:
    case kPaddedOrSame: return at::constant_pad_nd(gradient, negated(n.given));
    default: return gradient.reshape(sizes);
  }
}

void run_negated(Stack& stack) { torch::jit::push(stack, negated(torch::jit::pop(stack).toIntVector())); }

}  // namespace

void run_part(Stack& stack) {
  const Numbers n = pop_numbers(stack);
  const at::Tensor self = torch::jit::pop(stack).toTensor();
  if (is_whole(n.how)) {
    torch::jit::push(stack, whole_of(self, n));
    return;
  }
  const auto [start, end] = bounds_of(self.sizes().vec(), n);
  torch::jit::push(stack, n.how == kUnbound ? self.select(n.dim, start) : self.slice(n.dim, start, end));
}

namespace {

void part_start(Stack& stack) {
  const Numbers n = pop_numbers(stack);
  torch::jit::push(stack, bounds_of(torch::jit::pop(stack).toIntVector(), n).first);
}

void part_end(Stack& stack) {
  const Numbers n = pop_numbers(stack);
  torch::jit::push(stack, bounds_of(torch::jit::pop(stack).toIntVector(), n).second);
}

void run_part_backward(Stack& stack) {
  const Numbers n = pop_numbers(stack);
  const Sizes sizes = torch::jit::pop(stack).toIntVector();
  const at::Tensor gradient = torch::jit::pop(stack).toTensor();
  if (is_whole(n.how)) {
    torch::jit::push(stack, whole_backward(gradient, sizes, n));
  } else if (n.how == kUnbound) {
    torch::jit::push(stack, at::select_backward(gradient, sizes, n.dim, n.index));
  } else {
    const auto [start, end] = bounds_of(sizes, n);
    torch::jit::push(stack, at::slice_backward(gradient, sizes, n.dim, start, end, 1));
  }
}

}  // namespace

void register_operators_of_parts() {
  constexpr auto kind = c10::AliasAnalysisKind::FROM_SCHEMA;
  static const torch::jit::RegisterOperators registered(
      {Operator("tsfuser::own_part(Tensor(a) self, int[] given, int how, int dim, int count, int index)"
                " -> Tensor(a)",
                run_part, kind),
       Operator("tsfuser::part_backward(Tensor gradient, int[] sizes, int[] given, int how, int dim,"
                " int count, int index) -> Tensor",
                run_part_backward, kind),
       Operator(
           "tsfuser::part_start(int[] sizes, int[] given, int how, int dim, int count, int index) -> int",
           part_start, kind),
       Operator("tsfuser::part_end(int[] sizes, int[] given, int how, int dim, int count, int index) -> int",
                part_end, kind),
       Operator("tsfuser::negated(int[] numbers) -> int[]", run_negated, kind)});
}

}  // namespace tsfuser
