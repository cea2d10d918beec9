// Combining what the threads of a block have accumulated.
//
// In: an array of accumulators a thread. Out: the combination along x, in every thread, or along y, in those
// of the first row. Threads store their partial results in shared memory, synchronise, and load those of the
// others; every exchange has memory of its own, which nothing overwrites. All threads of the block take
// part; those of a row (same threadIdx.y) are a power of two, or whole warps. Example:
//
//     store_partial_x<Sum>(total, shared);
//     sync_x();
//     load_partial_x<Sum, 4>(total, shared, 0.0f);
#pragma once

#include "kernel.h"
#include "math.h"

#define COMBINER(NAME, EXPRESSION)             \
  struct NAME {                                \
    template <class T>                         \
    DEVICE_MEMBER static T combine(T a, T b) { \
      return EXPRESSION;                       \
    }                                          \
  };
// clang-format off
COMBINER(Sum, a + b)
COMBINER(Product, a * b)
COMBINER(Largest, nan_max(a, b))
COMBINER(Smallest, nan_min(a, b))
COMBINER(LogSum, logaddexp(a, b))
COMBINER(Any, a || b)
COMBINER(All, a && b)
// clang-format on
#undef COMBINER

// How many terms there were, their mean `origin + rest`, and the sum of their squared distances from it. The
// origin is some term, or 0: what is found out is small beside a large mean, and rounds accordingly.
template <class T>
struct moments {
  T count = 0, origin = 0, rest = 0, squares = 0;
};

template <class T>
DEVICE moments<T> moments_of(just<T> count, just<T> origin, just<T> rest, just<T> squares) {
  moments<T> made;
  made.count = count;
  made.origin = origin;
  made.rest = rest;
  made.squares = squares;
  return made;
}

template <class T>
DEVICE T count_of(const moments<T>& of) {
  return of.count;
}

// NaN where a term is infinite, as in eager, whichever thread has it: the squares are NaN then.
template <class T>
DEVICE T mean_of(const moments<T>& of) {
  return of.count > 0 && of.squares == of.squares ? of.origin + of.rest : not_a_number<T>();
}

template <class T>
DEVICE T origin_of(const moments<T>& of) {
  return of.origin;
}

template <class T>
DEVICE T rest_of(const moments<T>& of) {
  return of.rest;
}

template <class T>
DEVICE T squares_of(const moments<T>& of) {
  return of.squares;
}

// 1 / x of a count, to a rounding or two; of a count no denormal number is of interest.
DEVICE double reciprocal(double x) { return 1 / x; }
DEVICE float reciprocal(float x) {
#if defined(TSFUSER_CUDA)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return 1 / x;
#endif
}

// Of terms whose mean is near `centre`: `drift` is the sum of their distances from it, `squares` that of the
// squared ones. Where distances overflow, the centre is the mean.
template <class T>
DEVICE moments<T> moments_near(just<T> count, just<T> centre, just<T> drift, just<T> squares) {
  const T rest = is_finite(drift) ? drift * reciprocal(count) : 0, less = squares - rest * drift;
  return moments_of<T>(count, centre, rest, !is_finite(squares) ? squares : less > 0 ? less : T(0));
}

// Of disjoint sets of terms. Without a branch: a choice for each number.
struct Moments {
  template <class T>
  DEVICE_MEMBER static moments<T> combine(const moments<T>& a, const moments<T>& b) {
    const bool some_a = a.count > 0, some_b = b.count > 0;
    const T count = a.count + b.count, share = b.count * reciprocal(count),
            distance = (b.origin - a.origin) + (b.rest - a.rest);
    const T rest = some_b ? a.rest + distance * share : a.rest;
    const T squares = some_b ? a.squares + b.squares + distance * distance * (a.count * share) : a.squares;
    return moments_of<T>(count, some_a ? a.origin : b.origin, some_a ? rest : b.rest,
                         some_a ? squares : b.squares);
  }
};

// The largest of some x, and the sum of exp(x - largest).
template <class T>
struct online_softmax {
  T largest, sum;
};

template <class T>
DEVICE online_softmax<T> online_softmax_of(just<T> largest, just<T> sum) {
  online_softmax<T> made;
  made.largest = largest;
  made.sum = sum;
  return made;
}

template <class T>
DEVICE T largest_of(const online_softmax<T>& of) {
  return of.largest;
}

template <class T>
DEVICE T sum_of(const online_softmax<T>& of) {
  return of.sum;
}

// Of disjoint sets of x (Milakov, Gimelshein, Online normalizer calculation for softmax, 2018). Where all x
// of a set are -inf, as of an empty one, its sum is no number.
struct OnlineSoftmax {
  template <class T>
  DEVICE_MEMBER static T beside(const online_softmax<T>& set, T largest) {
    if (set.largest == largest) return set.sum;
    return set.largest == -infinity<T>() ? T(0) : set.sum * exp(set.largest - largest);
  }
  template <class T>
  DEVICE_MEMBER static online_softmax<T> combine(const online_softmax<T>& a, const online_softmax<T>& b) {
    const T largest = nan_max(a.largest, b.largest);
    return online_softmax_of<T>(largest, beside(a, largest) + beside(b, largest));
  }
};

#if defined(TSFUSER_HOST)
#include "host_fold.h"
#endif

// The accumulators of a thread, N / Results neighbours into each of the first `Results`; in a tree, which
// rounds less than a chain.
template <class Op, int Results, class T, int N>
DEVICE void fold_lanes(T (&value)[N]) {
#if defined(TSFUSER_HOST)
  static_assert(Results == 1, "a thread of the host works on one row");
  fold_all<Op>(value);
  return;
#endif
#pragma unroll
  for (int result = 0; result < Results; ++result) {
    T* const own = value + result * (N / Results);
#pragma unroll
    for (int half = N / Results / 2; half > 0; half /= 2) {
#pragma unroll
      for (int lane = 0; lane < half; ++lane) own[lane] = Op::combine(own[lane], own[lane + half]);
    }
    value[result] = own[0];
  }
}

#if defined(TSFUSER_CUDA) || defined(TSFUSER_FIBERS)

// 4-byte pieces of a value from the lane that differs in `mask`; `width` lanes take part.
template <class T>
DEVICE T exchange(T value, int mask, int width) {
  if constexpr (sizeof(T) % 4 == 0) {
    unsigned words[sizeof(T) / 4];
    copy_bytes(words, &value, sizeof(T));
#pragma unroll
    for (unsigned i = 0; i < sizeof(T) / 4; ++i)
      words[i] = __shfl_xor_sync(0xffffffffu, words[i], mask, width);
    copy_bytes(&value, words, sizeof(T));
    return value;
  } else {
    return static_cast<T>(__shfl_xor_sync(0xffffffffu, static_cast<int>(value), mask, width));
  }
}

template <class Op, class T>
DEVICE T combine_lanes(T value, int width) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    if (mask < width) value = Op::combine(value, exchange(value, mask, width));
  }
  return value;
}

// Rows within a warp: `Width` neighbours each.
template <class Op, int Width, int N = 0, class T, int M>
DEVICE void reduce_warp(T (&value)[M]) {
#pragma unroll
  for (int lane = 0; lane < (N ? N : M); ++lane) value[lane] = combine_lanes<Op>(value[lane], Width);
}

// Threads along x: `Across` where the compiler knows them, which saves it choices.
template <int Across>
DEVICE int threads_across() {
  return Across ? Across : static_cast<int>(blockDim.x);
}

// Along x: every warp stores one element for each of the first N accumulators, at most 32 warps a block.
template <class Op, int N = 0, int Across = 0, class T, int M>
DEVICE void store_partial_x(T (&value)[M], char* memory) {
  const int across = threads_across<Across>(), width = across < 32 ? across : 32;
#pragma unroll
  for (int lane = 0; lane < (N ? N : M); ++lane) value[lane] = combine_lanes<Op>(value[lane], width);
  if (across <= 32 || threadIdx.x % 32 != 0) return;
  T* const shared = reinterpret_cast<T*>(memory) + threadIdx.y * (across / 32) + threadIdx.x / 32;
#pragma unroll
  for (int lane = 0; lane < (N ? N : M); ++lane) shared[lane * 32] = value[lane];
}

// `Warps`: a power of two, at least as many as a row has.
template <class Op, int Warps, int N = 0, int Across = 0, class T, int M>
DEVICE void load_partial_x(T (&value)[M], char* memory, just<T> identity) {
  const int warps = threads_across<Across>() / 32, lane = threadIdx.x % 32;
  if (warps <= 1) return;
  const T* const shared = reinterpret_cast<const T*>(memory) + threadIdx.y * warps;
#pragma unroll
  for (int k = 0; k < (N ? N : M); ++k)
    value[k] = combine_lanes<Op>(lane % Warps < warps ? shared[k * 32 + lane % Warps] : identity, Warps);
}

template <int Across = 0>
DEVICE void sync_x() {
  if (threads_across<Across>() > 32) __syncthreads();
}

// Rows of a block that combine in their warp before they meet others: one where rows do not fill warps.
DEVICE int warp_rows() {
  const int across = blockDim.x;
  return across < 32 && (across & (across - 1)) == 0 ? 32 / across : 1;
}

// Along y: the rows of a warp are combined first; its first row stores its first N accumulators.
template <class Op, int N = 0, class T, int M>
DEVICE void store_partial_y(T (&value)[M], char* memory) {
  constexpr int count = N ? N : M;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    if (mask < blockDim.x || warp_rows() == 1) break;
#pragma unroll
    for (int lane = 0; lane < count; ++lane)
      value[lane] = Op::combine(value[lane], exchange(value[lane], mask, 32));
  }
  if (threadIdx.y % warp_rows() != 0) return;
  T* const shared =
      reinterpret_cast<T*>(memory) + (threadIdx.y / warp_rows() * blockDim.x + threadIdx.x) * count;
#pragma unroll
  for (int lane = 0; lane < count; ++lane) shared[lane] = value[lane];
}

DEVICE void sync_y() {
  if (blockDim.y > 1) __syncthreads();
}

DEVICE int thread_of_block() { return threadIdx.y * blockDim.x + threadIdx.x; }

// All threads share the results out, and the first ones load their own.
template <class Op, int N = 0, class T, int M>
DEVICE void load_partial_y(T (&value)[M], char* memory, just<T>) {
  constexpr int count = N ? N : M;
  const int pitch = blockDim.x * count, rows = blockDim.y / warp_rows();
  if (rows > 1) {
    T* const shared = reinterpret_cast<T*>(memory);
    for (int i = thread_of_block(); i < pitch; i += blockDim.x * blockDim.y) {
      T total = shared[i];
      for (int row = 1; row < rows; ++row) total = Op::combine(total, shared[row * pitch + i]);
      shared[i] = total;
    }
    __syncthreads();
    if (threadIdx.y > 0) return;
#pragma unroll
    for (int lane = 0; lane < count; ++lane) value[lane] = shared[threadIdx.x * count + lane];
  }
}

// Along y, where every thread needs the result: each warp combines its rows and stores one accumulator for
// each column; after `sync_columns` each of `Warps` warps, a power of two, combines some of the block's
// `Columns` columns and stores them behind the partial results; after another `sync_columns` each thread
// loads those of its own columns.
template <int Columns, int Warps, class T>
DEVICE T* gathered(char* memory) {
  return reinterpret_cast<T*>(memory) + Warps * Columns;
}

// The M columns of a thread, of which `Across` have neighbouring ones, combined over the rows of its warp.
// In each step a thread leaves half of its columns to the one with which it exchanges, until it has one.
// That takes M - 1 combinations instead of M in each step.
template <class Op, int Across, int Mask, int Kept, class T, int M>
DEVICE void scatter_rows(T (&value)[M], int& first) {
  if constexpr (Mask >= Across) {
    const bool upper = thread_of_block() & Mask;
    if constexpr (Kept > 1) {
      constexpr int half = Kept / 2;
#pragma unroll
      for (int i = 0; i < half; ++i) {
        T own = value[i], left = value[half + i];
        if (upper) {
          left = value[i];
          own = value[half + i];
        }
        value[i] = Op::combine(own, exchange(left, Mask, 32));
      }
      first += upper ? half : 0;
      scatter_rows<Op, Across, Mask / 2, half>(value, first);
    } else {
      value[0] = Op::combine(value[0], exchange(value[0], Mask, 32));
      first = upper ? M : first;  // the other thread has this column
      scatter_rows<Op, Across, Mask / 2, 1>(value, first);
    }
  }
}

// How many columns that leaves to a thread.
DEVICE constexpr int left_of_columns(int columns, int across) {
  for (int mask = 16; mask >= across && columns > 1; mask /= 2) columns /= 2;
  return columns;
}

template <class Op, int Columns, class T, int M>
DEVICE void store_partial_columns(T (&value)[M], char* memory) {
  constexpr int across = Columns / M, kept = left_of_columns(M, across);
  static_assert(across <= 32, "each warp has partial results of all columns");
  int first = 0;
  scatter_rows<Op, across, 16, M>(value, first);
  if (first >= M) return;
  T* const shared =
      reinterpret_cast<T*>(memory) + thread_of_block() / 32 * Columns + threadIdx.x * M + first;
#pragma unroll
  for (int i = 0; i < kept; ++i) shared[i] = value[i];
}

template <class Op, int Columns, int Warps, class T, int M>
DEVICE void gather_columns(const T (&)[M], char* memory) {
  const int lane = thread_of_block() % 32, own = thread_of_block() / Warps;
#pragma unroll
  for (int start = 0; start < Columns; start += 32) {
    const int column = start + own;
    const T* const partials = reinterpret_cast<const T*>(memory) + lane % Warps * Columns;
    const T total = combine_lanes<Op>(partials[column < Columns ? column : 0], Warps);
    if (lane % Warps == 0 && column < Columns) gathered<Columns, Warps, T>(memory)[column] = total;
  }
}

DEVICE void sync_columns() { __syncthreads(); }

template <int Columns, int Warps, class T, int M>
DEVICE void receive_columns(T (&value)[M], char* memory) {
#pragma unroll
  for (int lane = 0; lane < M; ++lane)
    value[lane] = gathered<Columns, Warps, T>(memory)[threadIdx.x * M + lane];
}

#else

// A block of the host is one thread.
template <class Op, int Width, int N = 0, class T, int M>
DEVICE void reduce_warp(T (&)[M]) {}
#define NOTHING_TO_COMBINE(NAME)                 \
  template <class Op, int N = 0, class T, int M> \
  DEVICE void NAME(T(&)[M], char*, just<T> = just<T>()) {}
NOTHING_TO_COMBINE(store_partial_x)
NOTHING_TO_COMBINE(store_partial_y)
NOTHING_TO_COMBINE(load_partial_y)
#undef NOTHING_TO_COMBINE
template <class Op, int Warps, int N = 0, class T, int M>
DEVICE void load_partial_x(T (&)[M], char*, just<T>) {}
DEVICE void sync_x() {}
DEVICE void sync_y() {}

#endif
