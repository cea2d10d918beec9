// The parameter of a batched kernel: one launch does what several launches would (codegen/batched.py):
//
//     using Table = batched<Args, 145>;
//     KERNEL(fused_add, Table, 128) {
//       const batch_place at = args.place_of(blockIdx.x);
//       fused_add_block(args.structs[at.index], at.block);
//     }
//
// csrc_stubs/call/batched_launch.cpp writes it.
#pragma once

#include "types.h"

// A block: which struct is its own, and its number among the blocks of that one.
struct batch_place {
  int32_t index, block;
};

constexpr int32_t batch_power(int32_t n) { return n < 2 ? n : 2 * batch_power(n / 2); }

// `ends[k]` is how many blocks the structs up to and with the k-th have, the largest int32_t where there is
// no k-th.
template <class Args, int32_t N>
struct batched {
  int32_t ends[N];
  alignas(16) Args structs[N];

  DEVICE_MEMBER batch_place place_of(int32_t block) const {
    int32_t index = 0;  // how many of `ends` are at most `block`
#pragma unroll
    for (int32_t step = batch_power(N); step; step /= 2) {
      if (index + step <= N && ends[index + step - 1] <= block) index += step;
    }
    return {index, index ? block - ends[index - 1] : block};
  }
};
