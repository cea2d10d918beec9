// Kernels for CPU tensors: a block is one thread, so thread loops fold away, barriers are nothing and every
// exchange between threads is the identity.
#pragma once

#include "types.h"
#include "host_simd.h"
#include "host_transpose.h"

extern "C" void* aligned_alloc(__SIZE_TYPE__ alignment, __SIZE_TYPE__ size) noexcept;
extern "C" void free(void* pointer) noexcept;

struct index3 {
  unsigned x, y, z;
};

static constexpr index3 threadIdx = {0, 0, 0};
static constexpr index3 blockDim = {1, 1, 1};
static constexpr int warpSize = 1;

DEVICE void __syncthreads() {}
DEVICE void __syncwarp(unsigned = 1) {}

// `x`, which is a value of T, so that nothing is rounded.
template <class T, class F>
DEVICE T exactly(F x) {
  if constexpr (same_type<T, bfloat16_t>::value && same_type<F, float>::value) {
    return {static_cast<uint16_t>(bit_cast<uint32_t>(x) >> 16)};
  } else {
    return convert<T>(x);
  }
}

// `c ? a : b` without a branch: of one that no lane changes, g++ makes no vectors.
DEVICE float choose(bool c, float a, float b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(c);
  return bit_cast<float>((bit_cast<uint32_t>(a) & mask) | (bit_cast<uint32_t>(b) & ~mask));
}

template <class T>
DEVICE T __shfl_sync(unsigned, T value, int, int = 1) {
  return value;
}
template <class T>
DEVICE T __shfl_xor_sync(unsigned, T value, int, int = 1) {
  return value;
}
template <class T>
DEVICE T __shfl_down_sync(unsigned, T value, unsigned, int = 1) {
  return value;
}
template <class T>
DEVICE T __shfl_up_sync(unsigned, T value, unsigned, int = 1) {
  return value;
}

// The arguments are copied, so that the compiler knows that no store of the kernel changes them.
#define KERNEL(NAME, ARGS, THREADS, ...)                                                                    \
  DEVICE void NAME##_block(const ARGS& args, index3 blockIdx, index3 gridDim, char* dynamic_shared_memory); \
  extern "C" void NAME(const void* packed, int64_t grid, int64_t, int64_t, int64_t shared, int64_t begin,   \
                       int64_t end) {                                                                       \
    ARGS args;                                                                                              \
    __builtin_memcpy(&args, packed, sizeof(args));                                                          \
    char* memory = shared > 0 ? static_cast<char*>(aligned_alloc(64, (shared + 63) / 64 * 64)) : nullptr;   \
    const index3 gridDim = {static_cast<unsigned>(grid), 1, 1};                                             \
    for (int64_t block = begin; block < end; ++block)                                                       \
      NAME##_block(args, {static_cast<unsigned>(block), 0, 0}, gridDim, memory);                            \
    free(memory);                                                                                           \
  }                                                                                                         \
  DEVICE void NAME##_block(const ARGS& args, index3 blockIdx, index3 gridDim, char* dynamic_shared_memory)

// The part of a block's memory behind `elements` of `bytes` bytes.
template <class T>
DEVICE T* scratch(char* memory, int64_t elements, int64_t bytes) {
  return reinterpret_cast<T*>(memory + elements * bytes);
}

#define SHARED_MEMORY(name) \
  char* const name = static_cast<char*>(__builtin_assume_aligned(dynamic_shared_memory, 64))
