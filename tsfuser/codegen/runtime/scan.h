// Scans along a row of threads.
//
// In: vectors of each thread along x, and what has been combined before them. Out: each element combined
// with those before it. Each thread combines its own, a warp those of its threads, and each warp those of
// all warps, which meet in shared memory: one barrier for all vectors. Example, of rows of a block:
//
//     scan_x<Sum, false, 0, 512>(value, carry, shared);
#pragma once

#include "kernel.h"
#include "reduce.h"
#include "vector.h"

#if defined(TSFUSER_CUDA) || defined(TSFUSER_FIBERS)

// The value of the thread that is `distance` before, or of thread `source`, among `width` neighbours.
template <bool Before, class T>
DEVICE T of_lane(T value, int number, int width) {
  static_assert(sizeof(T) % 4 == 0, "values travel in words");
  unsigned words[sizeof(T) / 4];
  copy_bytes(words, &value, sizeof(T));
#pragma unroll
  for (unsigned i = 0; i < sizeof(T) / 4; ++i)
    words[i] = Before ? __shfl_up_sync(0xffffffffu, words[i], number, width)
                      : __shfl_sync(0xffffffffu, words[i], number, width);
  copy_bytes(&value, words, sizeof(T));
  return value;
}

// Of `width` neighbours, of which this is `lane`; only the first `count` matter.
template <class Op, class T>
DEVICE T scan_lanes(T value, int lane, int width, int count) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    if (distance >= count) break;
    const T before = of_lane<true>(value, distance, width);
    if (lane >= distance) value = Op::combine(before, value);
  }
  return value;
}

// `value`: of each vector the elements of a thread; a row has the first vectors of its threads, then the
// second ones... `Backwards`: lanes count from the last one on, as the threads do that call it. `Warp`:
// threads of a row that are neighbours in a warp, else 0; `Across`: those of a block, if they are known.
// `carry`: of all threads.
template <class Op, bool Backwards, int Warp, int Across, class T, int L, int U>
DEVICE void scan_x(vec<T, L> (&value)[U], T (&carry)[1], char* memory) {
  const int across = Warp ? Warp : threads_across<Across>(), width = across < 32 ? across : 32;
  const int lane = threadIdx.x % width, warps = across / width, warp = threadIdx.x / width;
  T total[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
#pragma unroll
    for (int i = 1; i < L; ++i) {
      const int now = Backwards ? L - 1 - i : i, before = Backwards ? now + 1 : now - 1;
      value[u][now] = Op::combine(value[u][before], value[u][now]);
    }
    total[u] = scan_lanes<Op>(value[u][Backwards ? 0 : L - 1], lane, width, width);
  }
  T* const shared = reinterpret_cast<T*>(memory);
  if (warps > 1) {
    if (lane == width - 1) {
#pragma unroll
      for (int u = 0; u < U; ++u) shared[u * 32 + warp] = total[u];
    }
    __syncthreads();
  }
  T base = carry[0];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    T own = base;
    if (warps > 1) {
      const T all = scan_lanes<Op>(shared[u * 32 + (lane < warps ? lane : 0)], lane, 32, warps);
      const T before = of_lane<false>(all, warp > 0 ? warp - 1 : 0, 32);
      own = warp > 0 ? Op::combine(base, before) : base;
      base = Op::combine(base, of_lane<false>(all, warps - 1, 32));
    } else {
      base = Op::combine(base, of_lane<false>(total[u], width - 1, width));
    }
    const T before = of_lane<true>(total[u], 1, width);
    own = lane > 0 ? Op::combine(own, before) : own;
#pragma unroll
    for (int i = 0; i < L; ++i) value[u][i] = Op::combine(own, value[u][i]);
  }
  carry[0] = base;
}

// Along y: each thread has U neighbours in each of L columns, which it shares with the threads of its
// blockDim.y; `Across` threads, a power of two of at most 32, have other columns. A warp has 32 / Across
// rows of threads.
template <class Op, int Across, class T, int L, int U>
DEVICE void scan_y(vec<T, L> (&value)[U], T (&carry)[L], char* memory) {
  static_assert(Across <= 32 && (Across & (Across - 1)) == 0, "rows of threads do not part warps");
  const int thread = thread_of_block(), lane = thread % 32, warp = thread / 32;
  const int warps = Across * blockDim.y / 32;
  vec<T, L> total, own, all;
#pragma unroll
  for (int i = 0; i < L; ++i) {
#pragma unroll
    for (int u = 1; u < U; ++u) value[u][i] = Op::combine(value[u - 1][i], value[u][i]);
    total[i] = value[U - 1][i];
    own[i] = all[i] = carry[i];
#pragma unroll
    for (int distance = Across; distance < 32; distance *= 2) {
      const T before = of_lane<true>(total[i], distance, 32);
      if (lane >= distance) total[i] = Op::combine(before, total[i]);
    }
  }
  T* const shared = reinterpret_cast<T*>(memory) + threadIdx.x * L;
  if (lane >= 32 - Across) store(shared + warp * (Across * L), total);
  __syncthreads();
  for (int w = 0; w < warps; ++w) {
    const vec<T, L> next = load<L>(shared + w * (Across * L));
#pragma unroll
    for (int i = 0; i < L; ++i) {
      if (w < warp) own[i] = Op::combine(own[i], next[i]);
      all[i] = Op::combine(all[i], next[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < L; ++i) {
    carry[i] = all[i];
    const T before = of_lane<true>(total[i], Across, 32);
    const T start = lane >= Across ? Op::combine(own[i], before) : own[i];
#pragma unroll
    for (int u = 0; u < U; ++u) value[u][i] = Op::combine(start, value[u][i]);
  }
}

#endif
