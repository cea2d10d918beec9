// tsfuser::seeded_dropout: a dropout whose mask depends on a seed tensor only, so that the backward can
// draw it again.
//
// In: a tensor, a seed of two int64, the number of the dropout, its probability, and the order of the dims
// in memory, outermost first, which numbers the elements. Out: as eager's dropout. Groups compute the same
// mask, bit for bit (codegen/runtime/philox.h). This implementation, by ops on whole tensors, runs outside
// groups, on any device. Its gradient is the same op on the gradient. Example:
//     y = tsfuser::seeded_dropout(x, randint(2^63 - 1, [2]), 0, 0.1, [0, 1])

#include "call/seeded_dropout.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <vector>

namespace tsfuser {
namespace {

constexpr int64_t low_word = 0xffffffff;

struct Product {
  at::Tensor high, low;
};

// The words of factor * x, for words in int64.
Product product_of(int64_t factor, const at::Tensor& x) {
  const at::Tensor upper = x.bitwise_right_shift(16) * factor,
                   lower = x.bitwise_and(low_word >> 16) * factor;
  return {(upper + lower.bitwise_right_shift(16)).bitwise_right_shift(16),
          (x * factor).bitwise_and(low_word)};
}

// Philox 4x32-10, for words in int64: of `count` blocks the numbers in [0, 1), one after the other.
at::Tensor numbers_of(const at::Tensor& seed, int64_t stream, int64_t count) {
  const auto low = [](const at::Tensor& x) { return x.bitwise_and(low_word); };
  const auto high = [&](const at::Tensor& x) { return low(x.bitwise_right_shift(32)); };
  const at::Tensor key = seed.select(0, 0);
  const at::Tensor first =
      seed.select(0, 1).bitwise_right_shift(2).bitwise_and((int64_t{1} << 62) - 1) + stream;
  const at::Tensor blocks = at::arange(count, seed.options());
  at::Tensor k0 = low(key), k1 = high(key);
  at::Tensor a = low(first), b = high(first), c = low(blocks), d = high(blocks);
  for (int round = 0; round < 10; ++round) {
    const Product p = product_of(0xd2511f53, a), q = product_of(0xcd9e8d57, c);
    c = p.high.bitwise_xor(d).bitwise_xor(k1);
    a = q.high.bitwise_xor(b).bitwise_xor(k0);
    b = q.low;
    d = p.low;
    k0 = low(k0 + 0x9e3779b9);
    k1 = low(k1 + 0xbb67ae85);
  }
  std::vector<at::Tensor> words;
  for (const at::Tensor& word : {a, b, c, d}) {
    words.push_back(word.expand_as(blocks));
  }
  return at::stack(words, 1).bitwise_right_shift(8).to(at::kFloat).mul(5.9604644775390625e-8).flatten();
}

at::Tensor seeded_dropout(const at::Tensor& self, const at::Tensor& seed, int64_t stream, double p,
                          at::IntArrayRef order) {
  TORCH_CHECK(seed.scalar_type() == at::kLong && seed.dim() == 1 && seed.size(0) == 2,
              "tsfuser::seeded_dropout: a seed is a tensor of two int64");
  TORCH_CHECK(order.size() == static_cast<size_t>(self.dim()), "tsfuser::seeded_dropout: an order of ",
              order.size(), " dims for a tensor of ", self.dim());
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  return self.mul(kept_elements(self, seed, stream, p, order)).mul(p < 1 ? 1 / (1 - p) : 0.0);
}

at::Tensor shape_of_dropout(const at::Tensor& self, const at::Tensor&, int64_t, double, at::IntArrayRef) {
  return at::empty_like(self);
}

}  // namespace

at::Tensor kept_elements(const at::Tensor& like, const at::Tensor& seed, int64_t stream, double p,
                         at::IntArrayRef order) {
  std::vector<int64_t> strides(order.size());
  int64_t step = 1;
  for (size_t k = order.size(); k-- > 0;) {
    strides.at(order[k]) = step;
    step *= like.size(order[k]);
  }
  const at::Tensor numbers = numbers_of(seed, stream, (like.numel() + 3) / 4);
  return at::as_strided(numbers, like.sizes(), strides).lt(1 - p);
}

}  // namespace tsfuser

TORCH_LIBRARY(tsfuser, m) {
  m.def("seeded_dropout(Tensor self, Tensor seed, int stream, float p, int[] order) -> Tensor");
}

TORCH_LIBRARY_IMPL(tsfuser, CPU, m) { m.impl("seeded_dropout", tsfuser::seeded_dropout); }
TORCH_LIBRARY_IMPL(tsfuser, CUDA, m) { m.impl("seeded_dropout", tsfuser::seeded_dropout); }
TORCH_LIBRARY_IMPL(tsfuser, Meta, m) { m.impl("seeded_dropout", tsfuser::shape_of_dropout); }
