// The frame of a kernel in the three modes.
//
//     struct Args { const float* x; float* y; int64_t n; };
//     KERNEL(fused_relu, Args, 128) {  // name, type of `args`, most threads a block, and, where given,
//     blocks that a multiprocessor must have room for
//       SHARED_MEMORY(shared);         // char* to the block's dynamic shared memory, aligned to 16 bytes
//       ...                            // threadIdx, blockIdx, blockDim, gridDim, __syncthreads()
//     }
//
// On the GPU that is a __global__ function whose parameter is `args`. On the host it is a function that runs
// the blocks [begin, end) of a grid: `void fused_relu(args, grid, block_x, block_y, shared, begin, end)`.
#pragma once

#include "types.h"

#if defined(TSFUSER_CUDA)

#define KERNEL(NAME, ARGS, ...) \
  extern "C" __global__ void __launch_bounds__(__VA_ARGS__) NAME(const __grid_constant__ ARGS args)
#define COOPERATIVE_KERNEL KERNEL  // all blocks of which run at the same time
// `BLOCKS`, of the arguments, neighbouring blocks are a cluster: as many as it is launched with.
#define CLUSTER_KERNEL(NAME, ARGS, BLOCKS, ...) KERNEL(NAME, ARGS, __VA_ARGS__)

// The next kernel of the stream may be set up while this one runs, if it waits for this one by itself.
static __device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until the kernel before this one is done and what it has written is visible. Half a microsecond a block,
// so not for kernels of many short blocks.
static __device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#define SHARED_MEMORY(name) extern __shared__ __align__(16) char name[]

#elif defined(TSFUSER_FIBERS)
#include "fiber.h"
#else
#include "host.h"
#endif
