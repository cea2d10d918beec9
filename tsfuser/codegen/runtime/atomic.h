// Additions to elements of memory to which other threads may add at the same time, in any order.
//
//     add_at(args.y + at + i, value);              // one element
//     add_lanes(args.y + at + i, values);          // a vector, whose address is aligned as for `store`
//     add_lanes_upto(args.y + at + i, values, count);
#pragma once

#include "types.h"
#include "vector.h"

#if defined(TSFUSER_CUDA)

template <class T>
DEVICE void add_at(T* pointer, T value) {
  atomicAdd(pointer, value);
}

template <class T, int N>
DEVICE void add_lanes(T* pointer, const vec<T, N>& value) {
#pragma unroll
  for (int lane = 0; lane < N; ++lane) atomicAdd(pointer + lane, value.lanes[lane]);
}

#if __CUDA_ARCH__ >= 900
// One operation of 16 bytes: neighbours lie in one sector of the cache that adds.
DEVICE void add_lanes(float* pointer, const vec<float, 4>& value) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(pointer), "f"(value.lanes[0]), "f"(value.lanes[1]), "f"(value.lanes[2]),
                 "f"(value.lanes[3])
               : "memory");
}
DEVICE void add_lanes(float* pointer, const vec<float, 2>& value) {
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};"
               :
               : "l"(pointer), "f"(value.lanes[0]), "f"(value.lanes[1])
               : "memory");
}
#endif

#else

#if defined(TSFUSER_RACES)  // an addition is no race, and fiber_races.h does not know the compiler's atomics
#define ADDITION static UNCHECKED
#else
#define ADDITION DEVICE
#endif

template <class T>
ADDITION void add_at(T* pointer, T value) {
  T old, sum;
  __atomic_load(pointer, &old, __ATOMIC_RELAXED);
  do {
    sum = old + value;
  } while (!__atomic_compare_exchange(pointer, &old, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

template <class T, int N>
DEVICE void add_lanes(T* pointer, const vec<T, N>& value) {
  for (int lane = 0; lane < N; ++lane) add_at(pointer + lane, value.lanes[lane]);
}

#endif

// The first `count` lanes.
template <class T, int N>
DEVICE void add_lanes_upto(T* pointer, const vec<T, N>& value, int64_t count) {
  if (count >= N) {
    add_lanes(pointer, value);
    return;
  }
#pragma unroll
  for (int lane = 0; lane < N; ++lane) {
    if (lane < count) add_at(pointer + lane, value.lanes[lane]);
  }
}
