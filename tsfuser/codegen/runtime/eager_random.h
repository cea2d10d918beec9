// The random numbers of torch's own CUDA kernels, bit for bit (PYTORCH_NVFUSER_ENABLE=eager_random).
//
// In: where the random numbers of a call start, a walk of tsfuser/ir/eager_random.py, and the index of an
// element. Out: the number that eager's kernel gives to that element. Eager starts `threads` threads, whose
// number is the high half of the Philox counter. In each round a thread draws blocks of 4 words; the low
// half counts them. With a `width` of 1 the words of a block go to elements that are `threads` apart; else a
// thread takes `width` neighbours a round, ATen's aligned vectors. Example, the third element of a dropout:
//
//     float u = eager_number<eager_uniform<float>>(random, counter, threads, width, 2);
#pragma once

#include "types.h"
#include "math.h"
#include "vector.h"
#include "philox.h"

// Of `block` words, number `word` belongs to the element; the block is number `draw` of the thread.
struct eager_place {
  uint32_t thread, draw, word;
};

// `count`: how many numbers a block gives.
DEVICE eager_place eager_place_of(uint32_t index, uint32_t threads, uint32_t width, uint32_t count) {
  if (width > 1) {
    const uint32_t group = index / width, lane = index % width;
    const uint32_t draws = (width + 3) / 4;  // a vector of 2 leaves half a block unused
    return {group % threads, group / threads * draws + lane / 4, lane % 4};
  }
  const uint32_t round = index / threads;
  return {index % threads, round / count, round % count};
}

DEVICE philox_block eager_block(const random_start& start, int64_t counter, const eager_place& at) {
  const random_stream stream = stream_of(start, 0);
  return philox(stream.keys, stream.low + static_cast<uint64_t>(counter) + at.draw, at.thread);
}

// Word `i` of a block; an array that a variable indexes would leave the registers.
DEVICE uint32_t word_of(const philox_block& block, int i) {
  uint32_t result = block.words[0];
#pragma unroll
  for (int k = 1; k < 4; ++k) {
    if (i == k) result = block.words[k];
  }
  return result;
}

// The 53 bits of a double from words `i` and `i + 1`.
DEVICE uint64_t bits_53(const philox_block& block, int i) {
  return word_of(block, i) ^ static_cast<uint64_t>(word_of(block, i + 1)) << 21;
}

// `a * b`, rounded before anything is added to it.
template <class T>
DEVICE T rounded_product(T a, T b) {
#if defined(TSFUSER_CUDA)
  if constexpr (same_type<T, float>::value) return __fmul_rn(a, b);
  if constexpr (same_type<T, double>::value) return __dmul_rn(a, b);
#endif
  return a * b;
}

// cuRAND's formulas (curand_uniform.h, curand_normal.h): the numbers of one block.
template <class T>
struct eager_uniform;  // in (0, 1]
template <class T>
struct eager_normal;

template <>
struct eager_uniform<float> {
  using type = float;
  enum : int { count = 4 };
  static DEVICE_MEMBER float number(const philox_block& block, int i) {
    return static_cast<float>(word_of(block, i)) * 2.3283064365386963e-10f + 1.1641532182693481e-10f;
  }
};

template <>
struct eager_uniform<double> {
  using type = double;
  enum : int { count = 2 };
  static DEVICE_MEMBER double number(const philox_block& block, int i) {
    return static_cast<double>(bits_53(block, 2 * i)) * 1.1102230246251565e-16 + 5.5511151231257827e-17;
  }
};

template <>
struct eager_normal<float> {
  using type = float;
  enum : int { count = 4 };
  static DEVICE_MEMBER float number(const philox_block& block, int i) {
    const float radius = eager_uniform<float>::number(block, i & ~1);
    const float turn = 2.3283064e-10f * 6.2831855f, word = static_cast<float>(word_of(block, i | 1));
    const float s = sqrt(-2.0f * log(radius));
#if defined(TSFUSER_CUDA)
    const float angle = __fmaf_rn(word, turn, turn / 2);
    return (i & 1 ? __cosf(angle) : __sinf(angle)) * s;
#else
    const float angle = word * turn + turn / 2;
    return (i & 1 ? cos(angle) : sin(angle)) * s;
#endif
  }
};

template <>
struct eager_normal<double> {
  using type = double;
  enum : int { count = 2 };
  static DEVICE_MEMBER double number(const philox_block& block, int i) {
    const double s = sqrt(-2.0 * log(eager_uniform<double>::number(block, 0)));
    const double bits = static_cast<double>(bits_53(block, 2));
    const double half_turns = bits * 2.2204460492503131e-16 + 1.1102230246251565e-16;
#if defined(TSFUSER_CUDA)
    double sine, cosine;
    sincospi(half_turns, &sine, &cosine);
    return (i ? cosine : sine) * s;
#else
    return (i ? cos(half_turns * 3.1415926535897932) : sin(half_turns * 3.1415926535897932)) * s;
#endif
  }
};

template <class Law>
DEVICE typename Law::type eager_number(const random_start& start, int64_t counter, int64_t threads,
                                       int64_t width, int64_t index) {
  const eager_place at = eager_place_of(static_cast<uint32_t>(index), static_cast<uint32_t>(threads),
                                        static_cast<uint32_t>(width), Law::count);
  return Law::number(eager_block(start, counter, at), static_cast<int>(at.word));
}

// The numbers of N neighbours. Where these are whole blocks, as in a dropout of aligned memory, each block
// is drawn once.
template <class Law, int N>
DEVICE vec<typename Law::type, N> eager_numbers(const random_start& start, int64_t counter, int64_t threads,
                                                int64_t width, int64_t first) {
  vec<typename Law::type, N> result;
  if constexpr (N % 4 == 0 && Law::count == 4) {
    if (width % 4 == 0 && first % 4 == 0) {
#pragma unroll
      for (int k = 0; k < N; k += 4) {
        const eager_place at =
            eager_place_of(static_cast<uint32_t>(first + k), static_cast<uint32_t>(threads),
                           static_cast<uint32_t>(width), 4);
        const philox_block block = eager_block(start, counter, at);
#pragma unroll
        for (int i = 0; i < 4; ++i) result[k + i] = Law::number(block, i);
      }
      return result;
    }
  }
#pragma unroll
  for (int lane = 0; lane < N; ++lane) {
    result[lane] = eager_number<Law>(start, counter, threads, width, first + lane);
  }
  return result;
}
