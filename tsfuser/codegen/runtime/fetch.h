// Copies from memory into shared memory that run beside the thread which asked for them.
//
// In: a place in shared memory that only this thread reads, an address, whether to read it. Out: the N
// elements there, zeros where it is not to be read, once `fetch_wait` says so: it waits for all groups but
// the last. Example:
//
//     fetch<4>(prefetched, x + i, i < n);  fetch_group();      // this iteration's
//     fetch<4>(prefetched + 4, x + j, j < n);  fetch_group();  // the next one's
//     fetch_wait();                                      // prefetched[0 .. 3] is there
#pragma once

#include "vector.h"

// A vector whose elements share words: those of a vec<T, N> have a register each, however narrow they are.
template <class T, int N>
struct packed {
  enum : int { each = sizeof(T) < 4 ? 4 / sizeof(T) : 1, count = (N * sizeof(T) + 3) / 4 };
  uint32_t words[count];
  DEVICE_MEMBER T operator[](int lane) const {
    T result;
    if constexpr (each == 1) {
      copy_bytes(&result, words + lane * (sizeof(T) / 4), sizeof(T));
    } else {
      const uint32_t own = words[lane / each] >> (lane % each * 8 * sizeof(T));
      copy_bytes(&result, &own, sizeof(T));  // the lowest bytes come first
    }
    return result;
  }
};

template <class T, int N>
DEVICE packed<T, N> pack(const vec<T, N>& loaded) {
  packed<T, N> result;
  copy_bytes(result.words, &loaded, sizeof(loaded));
  return result;
}

template <int N, class T>
DEVICE packed<T, N> load_packed(const T* pointer) {
  return pack(load<N>(pointer));
}

// From global memory; zeros where it is not `wanted`.
template <int N, class T>
DEVICE packed<T, N> load_packed(const T* pointer, bool wanted) {
  return pack(load<N>(pointer, wanted));
}

// Adds the upper half of `iteration`, of which no compiler knows that it is 0, so that what was computed
// from these elements is computed anew: it would keep them, converted, for a later loop.
template <class T, int N>
DEVICE void hide(packed<T, N>& held, int64_t iteration) {
#if defined(TSFUSER_CUDA)
#pragma unroll
  for (int k = 0; k < packed<T, N>::count; ++k) {
    asm volatile("add.u32 %0, %0, %1;" : "+r"(held.words[k]) : "r"(static_cast<uint32_t>(iteration >> 32)));
  }
#endif
}

#if defined(TSFUSER_CUDA) && __CUDA_ARCH__ >= 800

template <int N, class T>
DEVICE void fetch(T* prefetched, const T* far, bool wanted) {
  constexpr int bytes = N * sizeof(T);
  const unsigned place = static_cast<unsigned>(__cvta_generic_to_shared(prefetched)),
                 taken = wanted ? bytes : 0;
  if constexpr (bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(far), "r"(taken)
                 : "memory");
  } else if constexpr (bytes == 8) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(place), "l"(far), "r"(taken)
                 : "memory");
  } else if constexpr (bytes == 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(place), "l"(far), "r"(taken)
                 : "memory");
  } else {
    store(prefetched, load<N>(far, wanted));
  }
}

DEVICE void fetch_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

DEVICE void fetch_wait() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }

#elif defined(TSFUSER_CUDA) || defined(TSFUSER_FIBERS)

template <int N, class T>
DEVICE void fetch(T* prefetched, const T* far, bool wanted) {
  store(prefetched, load<N>(far, wanted));
}
DEVICE void fetch_group() {}
DEVICE void fetch_wait() {}

#endif
