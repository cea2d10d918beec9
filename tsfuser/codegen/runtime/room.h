// Zeros behind parts of a tensor, which products of matrices read as if they were elements.
//
//     fill_room<int32_t>(blockIdx.x, gridDim.x, args.y, 300, 49, 56, 0);  // 300 rows of 49, and 7 zeros
#pragma once

#include "kernel.h"
#include "types.h"

// By all threads of the grid together. `parts` of `length` elements begin `pitch` elements apart. `behind`
// more zeros lie behind all parts.
template <class Index, class T>
DEVICE void fill_room(unsigned block, unsigned blocks, T* memory, Index parts, Index length, Index pitch,
                      Index behind) {
  const Index width = pitch - length, threads = blockDim.x * blockDim.y;
  const Index first = static_cast<Index>(block) * threads + threadIdx.y * blockDim.x + threadIdx.x;
  for (Index i = first; i < behind; i += blocks * threads)
    memory[static_cast<long long>(parts) * pitch + i] = T{};
  for (Index i = first; i < parts * width; i += blocks * threads) {
    memory[static_cast<long long>(i / width) * pitch + length + i % width] = T{};
  }
}
