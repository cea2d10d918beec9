// Products of matrices whose sizes do not hold whole accesses (call/room.h). Before:
//
//     %y = aten::mm(%x, %w)                 %x : 4096 rows of 768, %w : 50,257 columns
//
// After: a product of 50,264 columns, of which %y is a part, in an eighth of the time. The libraries that
// multiply read and write by elements if the dim along which neighbours lie side by side is no multiple of a
// whole access, of one of both operands or of the result, also where its rows begin at accesses (measured on
// an H200). So such a dim is as long as with room. Both operands need zeros behind the dim that they share:
// zeros add nothing. Behind the others may lie anything that can be read. An operand without that is copied,
// if the copy costs less than it saves. But if it lacks only columns (the weight of an inference: 50,257
// rows, transposed), there are two products: of 50,256 columns, and of one.

#include "torchscript/prepare.h"
#include "torchscript/room_products.h"
#include "call/room.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/jit/runtime/custom_operator.h>
#include <torch/csrc/jit/runtime/operator.h>

#include <algorithm>
#include <cstdint>

namespace tsfuser {
namespace {

constexpr int64_t kAlignment = 16;  // bytes of an access

// The dim along which neighbours lie side by side, -1 or -2.
int64_t inner_dim(const at::Tensor& matrices) {
  return matrices.stride(-1) != 1 && matrices.stride(-2) == 1 ? -2 : -1;
}

// Whether each row, or column, begins at a whole access.
bool begins_at_accesses(const at::Tensor& matrices) {
  const auto step = kAlignment / static_cast<int64_t>(matrices.itemsize());
  const int64_t inner = inner_dim(matrices);
  if (matrices.stride(inner) != 1 || reinterpret_cast<uintptr_t>(matrices.const_data_ptr()) % kAlignment) {
    return false;
  }
  for (int64_t d = -matrices.dim(); d < 0; ++d) {
    if (d != inner && matrices.size(d) > 1 && matrices.stride(d) % step) {
      return false;
    }
  }
  return true;
}

// Whether memory holds the matrices one behind another, at equal distances.
bool is_one_batch(const at::Tensor& matrices) {
  for (int64_t d = 0; d + 3 < matrices.dim(); ++d) {
    if (matrices.stride(d) != matrices.size(d + 1) * matrices.stride(d + 1)) {
      return false;
    }
  }
  return true;
}

// Whether the operands are two matrices, or two batches of as many.
bool are_alike(const at::Tensor& a, const at::Tensor& b) {
  const int64_t outer = a.dim() - 2;
  return outer >= 0 && b.dim() == a.dim() && a.sizes().slice(0, outer) == b.sizes().slice(0, outer) &&
         a.size(-1) == b.size(-2) && a.scalar_type() == b.scalar_type() && a.numel() != 0 &&
         b.numel() != 0 && is_one_batch(a) && is_one_batch(b);
}

// `whole`, which has the matrices in one dim at most, as a part with the sizes of a @ b. Autograd, which
// takes views for what programs make, knows no view.
at::Tensor part_of(const at::Tensor& whole, const at::Tensor& a, const at::Tensor& b) {
  const at::AutoDispatchBelowADInplaceOrView no_view;
  c10::SmallVector<int64_t, 5> sizes(a.sizes().begin(), a.sizes().end()), strides(a.dim());
  sizes.back() = b.size(-1);
  strides.end()[-1] = whole.stride(-1);
  strides.end()[-2] = whole.stride(-2);
  int64_t step = whole.stride(0);
  for (int64_t d = a.dim() - 3; d >= 0; --d) {
    strides[d] = step;
    step *= sizes[d];
  }
  return whole.as_strided(sizes, strides);
}

// Whether the result has a dim of size 1: results of a part get other strides there than those of the whole.
bool has_ones(const at::Tensor& a, const at::Tensor& b) {
  const auto outer = a.sizes().slice(0, a.dim() - 1);
  return b.size(-1) == 1 || std::find(outer.begin(), outer.end(), 1) != outer.end();
}

// Whether memory can be read as if each matrix had so many rows and columns. Those behind the last ones may
// be of the next matrix.
bool reaches(const at::Tensor& matrices, int64_t rows, int64_t columns) {
  const int64_t outer = -3 - inner_dim(matrices), inner_size = outer == -2 ? columns : rows;
  if (matrices.stride(outer) < inner_size) {
    return false;
  }
  int64_t last = (rows - 1) * matrices.stride(-2) + (columns - 1) * matrices.stride(-1);
  for (int64_t d = 0; d + 2 < matrices.dim(); ++d) {
    last += (matrices.size(d) - 1) * matrices.stride(d);
  }
  const int64_t end = (matrices.storage_offset() + last + 1) * static_cast<int64_t>(matrices.itemsize());
  return end <= static_cast<int64_t>(matrices.storage().nbytes());
}

// An operand, and what it has to have: `rows` and `columns` that can be read, and zeros behind dim `zeros`,
// 0 for none.
struct Operand {
  at::Tensor matrices;
  int64_t rows, columns, zeros;

  int64_t bytes() const { return matrices.numel() * static_cast<int64_t>(matrices.itemsize()); }

  bool has_all() const {
    return begins_at_accesses(matrices) && (!zeros || has_room(matrices, zeros)) &&
           reaches(matrices, rows, columns);
  }

  // Puts a copy in its place that has all. There are zeros also where they are only read: no product reads
  // memory that nobody has written.
  void copy() {
    const bool turned = inner_dim(matrices) == -2;
    c10::SmallVector<int64_t, 5> sizes(matrices.sizes().begin(), matrices.sizes().end());
    sizes.end()[-2] = turned ? columns : rows;
    sizes.end()[-1] = whole_accesses(turned ? rows : columns);
    at::Tensor whole = at::empty(sizes, matrices.options());
    if (turned) {
      whole = whole.transpose(-1, -2);
    }
    for (const int64_t dim : {-1, -2}) {
      const int64_t size = matrices.size(dim), more = whole.size(dim) - size;
      if (more) {
        whole.narrow(dim, size, more).zero_();
      }
    }
    const at::Tensor part = whole.narrow(-1, 0, matrices.size(-1)).narrow(-2, 0, matrices.size(-2));
    part.copy_(matrices);
    matrices = part;
  }

  at::Tensor widened() const {
    if (matrices.dim() == 2) {
      return matrices.as_strided({rows, columns}, matrices.strides());
    }
    int64_t count = 1;
    for (const int64_t size : matrices.sizes().slice(0, matrices.dim() - 2)) {
      count *= size;
    }
    return matrices.as_strided({count, rows, columns},
                               {matrices.stride(-3), matrices.stride(-2), matrices.stride(-1)});
  }
};

at::Tensor plain(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias) {
  if (bias) {
    return at::addmm(*bias, a, b);
  }
  return a.dim() == 2 && b.dim() == 2 ? a.mm(b) : at::matmul(a, b);
}

// left @ right, plus the bias.
at::Tensor multiplied(const at::Tensor& left, const at::Tensor& right,
                      const std::optional<at::Tensor>& bias) {
  if (!bias) {
    return left.dim() == 2 ? left.mm(right) : left.bmm(right);
  }
  const int64_t more = right.size(-1) - bias->size(0);
  return at::addmm(more ? at::constant_pad_nd(*bias, {0, more}) : *bias, left, right);
}

// left @ right in rows of `step` elements: first the columns that fill whole accesses, then the few others.
at::Tensor in_two_steps(const at::Tensor& left, const at::Tensor& right, int64_t step) {
  const int64_t columns = right.size(1), first = columns / kAccess * kAccess;
  const at::Tensor made = at::empty({left.size(0), step}, left.options());
  at::Tensor begin = made.narrow(1, 0, first), end = made.narrow(1, first, columns - first);
  at::mm_out(begin, left, right.narrow(1, 0, first));
  at::mm_out(end, left, right.narrow(1, first, columns - first));
  return made;
}

// a @ b with room; none where it is best as it is.
std::optional<at::Tensor> with_room(const at::Tensor& a, const at::Tensor& b,
                                    const std::optional<at::Tensor>& bias, const RoomChoice& choice) {
  const auto wide = [](const at::Tensor& matrices, int64_t dim, bool is_inside) {
    return is_inside ? whole_accesses(matrices.size(dim)) : matrices.size(dim);
  };
  const bool left_is_turned = inner_dim(a) == -2, right_is_turned = inner_dim(b) == -2;
  const int64_t rows = wide(a, -2, left_is_turned), columns = wide(b, -1, true);
  const int64_t inner = wide(a, -1, !left_is_turned || right_is_turned);
  const bool has_zeros = inner != a.size(-1), is_part = rows != a.size(-2) || columns != b.size(-1);
  const bool has_gaps = columns != b.size(-1) || (rows != a.size(-2) && a.dim() > 2);
  if (!(has_zeros || is_part) || (has_gaps && !choice.may_have_gaps) || (is_part && has_ones(a, b))) {
    return std::nullopt;
  }
  Operand left{a, rows, inner, has_zeros ? -1 : 0}, right{b, inner, columns, has_zeros ? -2 : 0};
  const Operand narrow{b, inner, b.size(-1), right.zeros};
  const bool two_steps =
      !right.has_all() && a.dim() == 2 && !bias && b.size(-1) > kAccess && narrow.has_all();
  const bool copies_left = !left.has_all(), copies_right = !right.has_all() && !two_steps;
  const int64_t bytes = copies_left * left.bytes() + copies_right * right.bytes();
  const double operations = 2.0 * static_cast<double>(a.numel()) * static_cast<double>(b.size(-1));
  if (bytes && (choice.least < 0 || operations < static_cast<double>(choice.least) * bytes)) {
    return std::nullopt;
  }
  if (copies_left) {
    left.copy();
  }
  if (copies_right) {
    right.copy();
  }
  const at::Tensor made = two_steps ? in_two_steps(left.widened(), narrow.widened(), columns)
                                    : multiplied(left.widened(), right.widened(), bias);
  if (is_part) {
    return part_of(made, a, b);
  }
  c10::SmallVector<int64_t, 5> sizes(a.sizes().begin(), a.sizes().end());
  sizes.back() = columns;
  return made.sizes() == at::IntArrayRef(sizes) ? made : at::_unsafe_view(made, sizes);  // no view of it
}

}  // namespace

at::Tensor product_with_room(const at::Tensor& a, const at::Tensor& b, const std::optional<at::Tensor>& bias,
                             const RoomChoice& choice) {
  const bool recorded = c10::GradMode::is_enabled() &&
                        (a.requires_grad() || b.requires_grad() || (bias && bias->requires_grad()));
  const bool fits = !bias || (a.dim() == 2 && bias->dim() == 1 && bias->size(0) == b.size(-1) &&
                              bias->scalar_type() == a.scalar_type());
  if (!recorded && are_alike(a, b) && fits) {
    if (auto made = with_room(a, b, bias, choice)) {
      return *made;
    }
  }
  return plain(a, b, bias);
}

at::Tensor transposed_with_room(const at::Tensor& matrices) {
  at::Tensor made = matrices.dim() < 2 ? matrices : matrices.transpose(-2, -1);
  if (const int64_t dim = dim_with_room(matrices)) {
    mark_room(made, -3 - dim);
  }
  return made;
}

void register_room_products() {
  static const torch::jit::RegisterOperators registered({torch::jit::Operator(
      "tsfuser::product_of_room(Tensor self, Tensor other, Tensor? bias, bool turned_self, "
      "bool turned_other, bool may_have_gaps, int least) -> Tensor",
      [](torch::jit::Stack& stack) {
        RoomChoice choice;
        choice.least = torch::jit::pop(stack).toInt();
        choice.may_have_gaps = torch::jit::pop(stack).toBool();
        const bool turned_b = torch::jit::pop(stack).toBool(), turned_a = torch::jit::pop(stack).toBool();
        const auto bias = torch::jit::pop(stack).toOptional<at::Tensor>();
        const at::Tensor b = torch::jit::pop(stack).toTensor(), a = torch::jit::pop(stack).toTensor();
        torch::jit::push(stack, product_with_room(turned_a ? transposed_with_room(a) : a,
                                                  turned_b ? transposed_with_room(b) : b, bias, choice));
      },
      c10::AliasAnalysisKind::FROM_SCHEMA)});
}

}  // namespace tsfuser
