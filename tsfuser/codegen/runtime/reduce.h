// Combining what the threads of a block have accumulated.
//
// In: an array of accumulators a thread, `shared` memory for one element of each thread. Out: the combination in the threads with index 0 along the axis.
// Both block dimensions are powers of two. All threads of the block call it. Example: `reduce_x<Sum>(total, shared)`.
#pragma once

#include "kernel.h"

struct Sum {
  template <class T>
  DEVICE_MEMBER static T combine(T a, T b) {
    return a + b;
  }
};

// The threads that differ in `mine` (of `extent` threads, `stride` apart in the block) combine, in a tree.
template <class Op, class T>
DEVICE T reduce_threads(T value, T* shared, int index, int mine, int extent, int stride) {
  __syncthreads();  // the memory may still be read from the last time
  shared[index] = value;
  for (int half = extent / 2; half > 0; half /= 2) {
    __syncthreads();
    if (mine < half) shared[index] = Op::combine(shared[index], shared[index + half * stride]);
  }
  __syncthreads();
  return shared[index];
}

template <class Op, class T, int N>
DEVICE void reduce_x(T (&value)[N], char* shared) {
  if (blockDim.x == 1) return;
  const int index = threadIdx.y * blockDim.x + threadIdx.x;
  for (int lane = 0; lane < N; ++lane)
    value[lane] = reduce_threads<Op>(value[lane], reinterpret_cast<T*>(shared), index, threadIdx.x, blockDim.x, 1);
}

template <class Op, class T, int N>
DEVICE void reduce_y(T (&value)[N], char* shared) {
  if (blockDim.y == 1) return;
  const int index = threadIdx.y * blockDim.x + threadIdx.x;
  for (int lane = 0; lane < N; ++lane)
    value[lane] = reduce_threads<Op>(value[lane], reinterpret_cast<T*>(shared), index, threadIdx.y, blockDim.y, blockDim.x);
}
