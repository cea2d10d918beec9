// Small helpers of the index arithmetic that generated code does.
#pragma once

#include "types.h"
#include "vector.h"

#if defined(TSFUSER_CUDA) || !defined(__GNUC__) || defined(__clang__)
#define SIMD_LOOP
#define LANE_LOOP
#else
// Without the second, g++ would unroll a loop of few iterations, and then make no vectors of it.
#define LANE_LOOP _Pragma("GCC ivdep") _Pragma("GCC unroll 1")
#define SIMD_LOOP _Pragma("GCC ivdep")  // inputs and outputs of a kernel never overlap
#endif

// The smaller of two indices; either may be negative.
template <class A, class B>
DEVICE int64_t smaller(A a, B b) {
  return static_cast<int64_t>(a) < static_cast<int64_t>(b) ? a : b;
}
DEVICE int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

// a / b, neither of which is negative: a GPU takes 7 instructions fewer for numbers without signs.
template <class A, class B>
DEVICE int64_t quotient(A a, B b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) / static_cast<uint64_t>(b));
}
DEVICE int32_t quotient(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

// How many of the N numbers `ends`, which ascend, are at most `place`; N is a power of two, less one.
template <int N, class End, class Place>
DEVICE int32_t passed(const End (&ends)[N], Place place) {
  int32_t count = 0;
#pragma unroll
  for (int32_t step = (N + 1) / 2; step; step /= 2) {
    if (ends[count + step - 1] <= place) count += step;
  }
  return count;
}

// The first `count` elements at `pointer`, in one piece where all N are there; the other lanes are zero.
template <int N, class T>
DEVICE vec<T, N> load_upto(const T* pointer, int32_t count) {
#if defined(TSFUSER_CUDA)
  if constexpr (sizeof(T) < 4 && N * sizeof(T) >= 4) return load_words_upto<N>(pointer, count);
#endif
  if (count >= N) return load<N>(pointer);
  return load_partial<N>(pointer, count);
}

template <class T, int N>
DEVICE void store_upto(T* pointer, const vec<T, N>& value, int32_t count) {
  if (count >= N) {
    store(pointer, value);
  } else {
    store_partial(pointer, value, count);
  }
}

// Each lane converted; 16-bit floats in pairs where the GPU can.
template <class To, class From, int N>
DEVICE vec<To, N> convert_lanes(const vec<From, N>& value) {
  vec<To, N> result;
#if defined(TSFUSER_CUDA) && __CUDA_ARCH__ >= 800
  if constexpr (N % 2 == 0 && same_type<From, float>::value && type_traits<To>::is_16bit_float) {
#pragma unroll
    for (int lane = 0; lane < N; lane += 2) {
      uint32_t pair;  // the first source is the upper half
      if constexpr (same_type<To, half_t>::value) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(value[lane + 1]), "f"(value[lane]));
      } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(value[lane + 1]), "f"(value[lane]));
      }
      copy_bytes(&result[lane], &pair, sizeof(pair));
    }
    return result;
  }
#endif
#pragma unroll
  for (int lane = 0; lane < N; ++lane) result[lane] = convert<To>(value[lane]);
  return result;
}
