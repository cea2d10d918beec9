// The accumulators of a thread of the host, combined into one.
//
// In: an array of N accumulators. Out: their combination in its first element. Floats stay in vector
// registers, halved until one is left: what was stored as a long vector is slow to read back in parts.
// Example: `fold_all<Sum>(total)`.
#pragma once

#include "types.h"

#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12

template <class T, int N>
struct lanes_of {
  typedef T vector __attribute__((vector_size(N * sizeof(T))));
};
template <int... I>
struct places {};

// `a` or `b` as nan_max and nan_min choose: a NaN, where there is one.
template <class Op, class V>
DEVICE V combine_vectors(V a, V b) {
  if constexpr (same_type<Op, Sum>::value) {
    return a + b;
  } else if constexpr (same_type<Op, Product>::value) {
    return a * b;
  } else if constexpr (same_type<Op, Largest>::value) {
    return (a < b) | (b != b) ? b : a;
  } else {
    return (b < a) | (b != b) ? b : a;
  }
}

template <class T, int N, class V, int... I>
DEVICE typename lanes_of<T, N>::vector part_of(V v, places<I...>, int from) {
  return from ? __builtin_shufflevector(v, v, (I + N)...) : __builtin_shufflevector(v, v, I...);
}

template <class Op, class T, int N, class V>
DEVICE T fold_vector(V v) {
  if constexpr (N == 2) {
    return Op::combine(v[0], v[1]);
  } else {
    const places<__integer_pack(N / 2)...> half;
    return fold_vector<Op, T, N / 2>(
        combine_vectors<Op>(part_of<T, N / 2>(v, half, 0), part_of<T, N / 2>(v, half, 1)));
  }
}

template <class Op, class T>
struct folds_in_vectors {
  enum : bool {
    known = same_type<Op, Sum>::value || same_type<Op, Product>::value || same_type<Op, Largest>::value ||
        same_type<Op, Smallest>::value,
    value = known && (same_type<T, float>::value || same_type<T, double>::value)
  };
};

#else

template <class Op, class T>
struct folds_in_vectors {
  enum : bool { value = false };
};
template <class Op, class T, int N, class V>
DEVICE T fold_vector(V v) {
  return v[0];
}

#endif

template <class Op, class T, int N>
DEVICE void fold_all(T (&value)[N]) {
  enum : int { long_vector = 64 / sizeof(T) };
  if constexpr (folds_in_vectors<Op, T>::value && N >= long_vector) {
    typedef T vector __attribute__((vector_size(64)));
    vector lines[N / long_vector];
    __builtin_memcpy(lines, value, sizeof(value));
#pragma GCC unroll 8
    for (int half = N / long_vector / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
      for (int i = 0; i < half; ++i) lines[i] = combine_vectors<Op>(lines[i], lines[i + half]);
    }
    value[0] = fold_vector<Op, T, long_vector>(lines[0]);
  } else {
#pragma GCC unroll 8
    for (int half = N / 2; half > 0; half /= 2) {
      LANE_LOOP
      for (int lane = 0; lane < half; ++lane) value[lane] = Op::combine(value[lane], value[lane + half]);
    }
  }
}
