// Combining what the threads of a block have accumulated.
//
// In: an array of accumulators a thread, `shared` memory for one element of each thread. Out: the combination, in every thread. The threads of a row (same
// threadIdx.y) are a power of two, or whole warps with one row a block. All threads of the block call it. Example: `reduce_x<Sum>(total, shared)`.
#pragma once

#include "kernel.h"
#include "math.h"

#define COMBINER(NAME, EXPRESSION)       \
  struct NAME {                          \
    template <class T>                   \
    DEVICE_MEMBER static T combine(T a, T b) { \
      return EXPRESSION;                 \
    }                                    \
  };
COMBINER(Sum, a + b)
COMBINER(Product, a* b)
COMBINER(Largest, nan_max(a, b))
COMBINER(Smallest, nan_min(a, b))
COMBINER(Any, a || b)
COMBINER(All, a && b)
#undef COMBINER

// The lanes of a thread, into lane 0; in a tree, which rounds less than a chain.
template <class Op, class T, int N>
DEVICE void fold_lanes(T (&value)[N]) {
#pragma unroll
  for (int half = N / 2; half > 0; half /= 2) {
#pragma unroll
    for (int lane = 0; lane < half; ++lane) value[lane] = Op::combine(value[lane], value[lane + half]);
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
    for (unsigned i = 0; i < sizeof(T) / 4; ++i) words[i] = __shfl_xor_sync(0xffffffffu, words[i], mask, width);
    copy_bytes(&value, words, sizeof(T));
    return value;
  } else {
    return static_cast<T>(__shfl_xor_sync(0xffffffffu, static_cast<int>(value), mask, width));
  }
}

template <class Op, class T>
DEVICE T reduce_row(T value, T* shared) {
  const int extent = blockDim.x, width = extent < 32 ? extent : 32;
  for (int mask = width / 2; mask > 0; mask /= 2) value = Op::combine(value, exchange(value, mask, width));
  if (extent <= 32) return value;
  const int warps = extent / 32, first = threadIdx.y * warps;
  __syncthreads();  // the memory may still be read from the last time
  if (threadIdx.x % 32 == 0) shared[first + threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[first];
  for (int warp = 1; warp < warps; ++warp) value = Op::combine(value, shared[first + warp]);
  return value;
}

#endif

// The first N accumulators of each thread, along x.
template <class Op, int N = 0, class T, int M>
DEVICE void reduce_x(T (&value)[M], char* shared) {
#if defined(TSFUSER_CUDA) || defined(TSFUSER_FIBERS)
  for (int lane = 0; lane < (N ? N : M); ++lane) value[lane] = reduce_row<Op>(value[lane], reinterpret_cast<T*>(shared));
#endif
}

// The same along y, in a tree through shared memory; the threads are a power of two.
template <class Op, int N = 0, class T, int M>
DEVICE void reduce_y(T (&value)[M], char* memory) {
  if (blockDim.y == 1) return;
  T* const shared = reinterpret_cast<T*>(memory);
  const int index = threadIdx.y * blockDim.x + threadIdx.x;
  for (int lane = 0; lane < (N ? N : M); ++lane) {
    __syncthreads();
    shared[index] = value[lane];
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.y < half) shared[index] = Op::combine(shared[index], shared[index + half * blockDim.x]);
    }
    __syncthreads();
    value[lane] = shared[threadIdx.x];
  }
}
