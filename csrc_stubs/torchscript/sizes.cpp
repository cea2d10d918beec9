// Operators that compute the sizes of a result from those of the operands, before the group, if the program
// reads only the sizes of that result; and `product_from` for loops of the program (products.cpp).
//
// In: the sizes of an operand, of any rank, because no guard has checked it yet. Out: the sizes of the
// result. Dims out of range are ignored: the op itself will raise the error. Example:
// tsfuser::reduced_sizes([4, 8, 2], [-1], True) -> [4, 8, 1].

#include "torchscript/hooks.h"

#include <torch/csrc/jit/runtime/custom_operator.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace tsfuser {
namespace {

using torch::jit::Stack;
using Sizes = std::vector<int64_t>;

// For each of `rank` dims, whether it is among `dims`; all are where `dims` is None or, if `empty_is_all`,
// empty.
std::vector<bool> named(const c10::IValue& dims, int64_t rank, bool empty_is_all) {
  if (dims.isNone()) return std::vector<bool>(rank, true);
  const Sizes list = dims.toIntVector();
  std::vector<bool> result(rank, empty_is_all && list.empty());
  for (int64_t d : list) {
    d += d < 0 ? rank : 0;
    if (0 <= d && d < rank) result[d] = true;
  }
  return result;
}

void reduced_sizes(Stack& stack) {
  const bool keepdim = torch::jit::pop(stack).toBool();
  const c10::IValue dims = torch::jit::pop(stack);
  const Sizes sizes = torch::jit::pop(stack).toIntVector();
  const auto gone = named(dims, static_cast<int64_t>(sizes.size()), true);
  Sizes result;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (!gone[d])
      result.push_back(sizes[d]);
    else if (keepdim)
      result.push_back(1);
  }
  torch::jit::push(stack, std::move(result));
}

void squeezed_sizes(Stack& stack) {
  const c10::IValue dims = torch::jit::pop(stack);
  const Sizes sizes = torch::jit::pop(stack).toIntVector();
  const auto asked = named(dims, static_cast<int64_t>(sizes.size()), false);
  Sizes result;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (!asked[d] || sizes[d] != 1) result.push_back(sizes[d]);
  }
  torch::jit::push(stack, std::move(result));
}

void unsqueezed_sizes(Stack& stack) {
  int64_t dim = torch::jit::pop(stack).toInt();
  Sizes sizes = torch::jit::pop(stack).toIntVector();
  const auto rank = static_cast<int64_t>(sizes.size());
  dim = std::clamp<int64_t>(dim < 0 ? dim + rank + 1 : dim, 0, rank);
  sizes.insert(sizes.begin() + dim, 1);
  torch::jit::push(stack, std::move(sizes));
}

// Without `dims`, in reverse.
void permuted_sizes(Stack& stack) {
  const c10::IValue dims = torch::jit::pop(stack);
  Sizes sizes = torch::jit::pop(stack).toIntVector();
  const auto rank = static_cast<int64_t>(sizes.size());
  Sizes result;
  if (dims.isNone()) {
    result.assign(sizes.rbegin(), sizes.rend());
  } else {
    for (int64_t d : dims.toIntVector()) {
      d += d < 0 ? rank : 0;
      if (0 <= d && d < rank) result.push_back(sizes[d]);
    }
  }
  torch::jit::push(stack, std::move(result));
}

void swapped_sizes(Stack& stack) {
  int64_t last = torch::jit::pop(stack).toInt();
  int64_t first = torch::jit::pop(stack).toInt();
  Sizes sizes = torch::jit::pop(stack).toIntVector();
  const auto rank = static_cast<int64_t>(sizes.size());
  first += first < 0 ? rank : 0;
  last += last < 0 ? rank : 0;
  if (0 <= first && first < rank && 0 <= last && last < rank) std::swap(sizes[first], sizes[last]);
  torch::jit::push(stack, std::move(sizes));
}

// Ends are as Python takes them.
void sliced_sizes(Stack& stack) {
  const int64_t step = torch::jit::pop(stack).toInt();
  const c10::IValue end = torch::jit::pop(stack), start = torch::jit::pop(stack);
  int64_t dim = torch::jit::pop(stack).toInt();
  Sizes sizes = torch::jit::pop(stack).toIntVector();
  const auto rank = static_cast<int64_t>(sizes.size());
  dim += dim < 0 ? rank : 0;
  if (0 <= dim && dim < rank && step > 0) {
    const int64_t size = sizes[dim];
    const auto place = [size](const c10::IValue& given, int64_t otherwise) {
      const int64_t n = given.isNone() ? otherwise : given.toInt();
      return std::clamp<int64_t>(n < 0 ? n + size : n, 0, size);
    };
    const int64_t length = std::max<int64_t>(place(end, size) - place(start, 0), 0);
    sizes[dim] = length / step + (length % step != 0);
  }
  torch::jit::push(stack, std::move(sizes));
}

void selected_sizes(Stack& stack) {
  int64_t dim = torch::jit::pop(stack).toInt();
  Sizes sizes = torch::jit::pop(stack).toIntVector();
  const auto rank = static_cast<int64_t>(sizes.size());
  dim += dim < 0 ? rank : 0;
  if (0 <= dim && dim < rank) sizes.erase(sizes.begin() + dim);
  torch::jit::push(stack, std::move(sizes));
}

// Those of view and of reshape, whose arguments have different names: one of them is None. Where one is -1,
// the others say what it is.
void viewed_sizes(Stack& stack) {
  const c10::IValue shape = torch::jit::pop(stack);
  const c10::IValue size = torch::jit::pop(stack);
  const Sizes sizes = torch::jit::pop(stack).toIntVector();
  Sizes result = (size.isNone() ? shape : size).toIntVector();
  int64_t elements = 1, known = 1;
  for (int64_t n : sizes) elements *= n;
  for (int64_t n : result) known *= n < 0 ? 1 : n;
  for (int64_t& n : result) {
    if (n < 0) n = known == 0 ? 0 : elements / known;
  }
  torch::jit::push(stack, std::move(result));
}

// Those that are asked for, but where -1 stands for the size that there is.
void expanded_sizes(Stack& stack) {
  Sizes result = torch::jit::pop(stack).toIntVector();
  const Sizes sizes = torch::jit::pop(stack).toIntVector();
  for (size_t k = 1; k <= sizes.size() && k <= result.size(); ++k) {
    int64_t& size = result[result.size() - k];
    if (size < 0) size = sizes[sizes.size() - k];
  }
  torch::jit::push(stack, std::move(result));
}

// `pad` has two numbers for each of the last dims, the last one first.
void padded_sizes(Stack& stack) {
  const Sizes pad = torch::jit::pop(stack).toIntVector();
  Sizes sizes = torch::jit::pop(stack).toIntVector();
  for (size_t k = 0; k + 1 < pad.size() && k / 2 < sizes.size(); k += 2) {
    int64_t& size = sizes[sizes.size() - 1 - k / 2];
    size = std::max<int64_t>(size + pad[k] + pad[k + 1], 0);
  }
  torch::jit::push(stack, std::move(sizes));
}

void flattened_sizes(Stack& stack) {
  int64_t end = torch::jit::pop(stack).toInt();
  int64_t start = torch::jit::pop(stack).toInt();
  Sizes sizes = torch::jit::pop(stack).toIntVector();
  if (sizes.empty()) sizes.push_back(1);
  const auto rank = static_cast<int64_t>(sizes.size());
  start += start < 0 ? rank : 0;
  end += end < 0 ? rank : 0;
  if (0 <= start && start <= end && end < rank) {
    for (int64_t d = start + 1; d <= end; ++d) sizes[start] *= sizes[d];
    sizes.erase(sizes.begin() + start + 1, sizes.begin() + end + 1);
  }
  torch::jit::push(stack, std::move(sizes));
}

// `start` times the sizes from number `first` on.
void product_from(Stack& stack) {
  int64_t product = torch::jit::pop(stack).toInt();
  const int64_t first = torch::jit::pop(stack).toInt();
  const c10::List<int64_t> sizes = torch::jit::pop(stack).toIntList();
  for (size_t d = first; d < sizes.size(); ++d) product *= sizes.get(d);
  torch::jit::push(stack, product);
}

}  // namespace

void register_size_operators() {
  using torch::jit::Operator;
  constexpr auto kind = c10::AliasAnalysisKind::FROM_SCHEMA;
  static const torch::jit::RegisterOperators registered(
      {Operator("tsfuser::reduced_sizes(int[] sizes, int[]? dim, bool keepdim) -> int[]", reduced_sizes,
                kind),
       Operator("tsfuser::squeezed_sizes(int[] sizes, int[]? dim) -> int[]", squeezed_sizes, kind),
       Operator("tsfuser::unsqueezed_sizes(int[] sizes, int dim) -> int[]", unsqueezed_sizes, kind),
       Operator("tsfuser::permuted_sizes(int[] sizes, int[]? dims) -> int[]", permuted_sizes, kind),
       Operator("tsfuser::swapped_sizes(int[] sizes, int dim0, int dim1) -> int[]", swapped_sizes, kind),
       Operator("tsfuser::sliced_sizes(int[] sizes, int dim, int? start, int? end, int step) -> int[]",
                sliced_sizes, kind),
       Operator("tsfuser::selected_sizes(int[] sizes, int dim) -> int[]", selected_sizes, kind),
       Operator("tsfuser::viewed_sizes(int[] sizes, int[]? size, int[]? shape) -> int[]", viewed_sizes,
                kind),
       Operator("tsfuser::expanded_sizes(int[] sizes, int[] size) -> int[]", expanded_sizes, kind),
       Operator("tsfuser::padded_sizes(int[] sizes, int[] pad) -> int[]", padded_sizes, kind),
       Operator("tsfuser::product_from(int[] sizes, int first, int start) -> int", product_from, kind),
       Operator("tsfuser::flattened_sizes(int[] sizes, int start_dim, int end_dim) -> int[]",
                flattened_sizes, kind)});
}

}  // namespace tsfuser
