// Zeros behind parts of a tensor, which products of matrices read as if they were elements.
//
//     fill_room<int32_t>(blockIdx.x, gridDim.x, args.y, 300, 49, 56);  // 300 rows of 49, and 7 zeros
#pragma once

#include "kernel.h"
#include "types.h"

// By all threads of the grid together. `parts` of `length` elements begin `pitch` elements apart.
template <class Index, class T>
DEVICE void fill_room(unsigned block, unsigned blocks, T* memory, Index parts, Index length, Index pitch) {
  const Index width = pitch - length, threads = blockDim.x * blockDim.y;
  Index i = static_cast<Index>(block) * threads + threadIdx.y * blockDim.x + threadIdx.x;
  for (; i < parts * width; i += blocks * threads) memory[i / width * pitch + length + i % width] = T{};
}
