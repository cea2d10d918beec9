// Tiles that are read along one axis and used along the other.
//
// In: `columns` lines of `rows` elements, `stride` elements apart. Out: tile[row * Pitch + column]. Squares
// of N by N are transposed in vectors: in log2(N) steps, each of which interleaves the first half of the
// vectors with the second. Example:
//
//     fill_tile<80>(x_tile, args.x + start, args.x_stride, 64, 64);
#pragma once

#include "types.h"

template <int Bytes>
struct lane_of;
template <>
struct lane_of<1> {
  using type = uint8_t;
};
template <>
struct lane_of<2> {
  using type = uint16_t;
};
template <>
struct lane_of<4> {
  using type = uint32_t;
};
template <>
struct lane_of<8> {
  using type = uint64_t;
};

#if defined(__GNUC__) && !defined(__clang__)

template <class T, int N>
struct square {
  using bits = typename lane_of<sizeof(T)>::type;
  typedef bits vector __attribute__((vector_size(N * sizeof(T))));

  static DEVICE_MEMBER void transpose(T* target, int64_t pitch, const T* source, int64_t stride) {
    vector lines[N], low, high;
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      __builtin_memcpy(&lines[i], source + i * stride, sizeof(vector));
      low[i] = i / 2 + i % 2 * N;
      high[i] = N / 2 + i / 2 + i % 2 * N;
    }
#pragma GCC unroll 4
    for (int step = 1; step < N; step *= 2) {
      vector next[N];
#pragma GCC unroll 16
      for (int i = 0; i < N / 2; ++i) {
        next[2 * i] = __builtin_shuffle(lines[i], lines[i + N / 2], low);
        next[2 * i + 1] = __builtin_shuffle(lines[i], lines[i + N / 2], high);
      }
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) lines[i] = next[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) __builtin_memcpy(target + i * pitch, &lines[i], sizeof(vector));
  }
};

#else

template <class T, int N>
struct square {
  static DEVICE_MEMBER void transpose(T* target, int64_t pitch, const T* source, int64_t stride) {
    for (int i = 0; i < N; ++i) {
      for (int k = 0; k < N; ++k) target[k * pitch + i] = source[i * stride + k];
    }
  }
};

#endif

template <int Pitch, class T>
DEVICE void fill_tile(T* tile, const T* source, int64_t stride, int64_t rows, int64_t columns) {
  int64_t whole_rows = 0, whole_columns = 0;
  if constexpr (sizeof(T) <= 8) {
#if defined(__AVX512F__)
    enum : int { side = sizeof(T) == 4 ? 16 : 8 };
#else
    enum : int { side = 8 };
#endif
    whole_rows = rows / side * side, whole_columns = columns / side * side;
    for (int64_t column = 0; column < whole_columns; column += side) {
      for (int64_t row = 0; row < whole_rows; row += side)
        square<T, side>::transpose(tile + row * Pitch + column, Pitch, source + column * stride + row,
                                   stride);
    }
  }
  for (int64_t column = 0; column < columns; ++column) {
    for (int64_t row = column < whole_columns ? whole_rows : 0; row < rows; ++row)
      tile[row * Pitch + column] = source[column * stride + row];
  }
}
