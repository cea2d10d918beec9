// Cooperative blocks share a row and combine their results in global memory.
//
// In: the result of each block, one value in every thread. Out: the combination over all blocks of the row,
// in every thread. A block publishes the 4-byte words of its value, each beside a tag that says in which
// iteration it was written, as one 8-byte store: a thread that reads the tag has the word too, so no fence
// and no counter is needed. Slots begin as 0. Iterations alternate between two sets of slots, since no block
// is more than one iteration ahead. All blocks of the grid must run at the same time (a cooperative launch).
// Example, of one total:
//
//     const cooperative_slots slots = slots_of<4>(args.slots, block_set, parts, part, iteration);
//     store_partial_cooperative<0>(total, slots, 0);
//     load_partial_cooperative<Sum, 0>(total, slots, 0, shared, 0.0f);
//     sync_cooperative();
//     receive_cooperative(total, shared);
#pragma once

#include "kernel.h"
#include "reduce.h"

#if defined(TSFUSER_CUDA) || defined(TSFUSER_FIBERS)

struct cooperative_slots {
  uint64_t* at;
  int parts, part;
  unsigned tag;
};

// `block_set`: the number of the set of blocks that share a row. `Words`: what a block publishes in an
// iteration.
template <int Words>
DEVICE cooperative_slots slots_of(uint64_t* slots, int64_t block_set, int parts, int part,
                                  int64_t iteration) {
  cooperative_slots made;
  made.at = slots + (block_set * 2 + iteration % 2) * Words * parts;
  made.parts = parts;
  made.part = part;
  made.tag = static_cast<unsigned>(iteration) + 1;
  return made;
}

DEVICE void publish(uint64_t* slot, uint64_t value) {
#if defined(TSFUSER_CUDA)
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(slot), "l"(value) : "memory");
#else
  __atomic_store_n(slot, value, __ATOMIC_RELAXED);
#endif
}

DEVICE uint64_t look_at(const uint64_t* slot) {
#if defined(TSFUSER_CUDA)
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(slot) : "memory");
  return value;
#else
  return __atomic_load_n(slot, __ATOMIC_RELAXED);
#endif
}

template <class T>
inline constexpr int words_of = (sizeof(T) + 3) / 4;

// By the first thread of warp `Warp`, so that several totals are on their way at the same time.
template <int Warp, class T, int M>
DEVICE void store_partial_cooperative(const T (&value)[M], const cooperative_slots& slots, int word) {
  if (threadIdx.x != Warp * 32) return;
  unsigned bits[words_of<T>] = {};
  copy_bytes(bits, value, sizeof(T));
#pragma unroll
  for (int i = 0; i < words_of<T>; ++i)
    publish(slots.at + (word + i) * slots.parts + slots.part, uint64_t{slots.tag} << 32 | bits[i]);
}

// Warp `Warp` waits for all blocks and leaves in `shared` what they have together, combined in an order that
// does not change from run to run. A lane looks at several slots at a time where registers allow it, since
// each look takes most of a microsecond; and no more at those that it has.
template <class Op, int Warp, class T, int M>
DEVICE void load_partial_cooperative(const T (&)[M], const cooperative_slots& slots, int word, char* shared,
                                     just<T> identity) {
  if (threadIdx.x / 32 != Warp) return;
  constexpr int words = words_of<T>, looks = words < 4 ? 4 / words : 1;
  T total = identity;
  for (int first = threadIdx.x % 32; first < slots.parts; first += 32 * looks) {
    const uint64_t* const place = slots.at + word * slots.parts + first;
    uint64_t seen[looks][words] = {};
    for (bool there = false; !there;) {
#pragma unroll
      for (int look = 0; look < looks; ++look) {
#pragma unroll
        for (int i = 0; i < words; ++i) {
          if (seen[look][i] >> 32 != slots.tag && first + 32 * look < slots.parts)
            seen[look][i] = look_at(place + i * slots.parts + 32 * look);
        }
      }
      there = true;
#pragma unroll
      for (int look = 0; look < looks; ++look) {
#pragma unroll
        for (int i = 0; i < words; ++i)
          there = there && (seen[look][i] >> 32 == slots.tag || first + 32 * look >= slots.parts);
      }
#if defined(TSFUSER_FIBERS)
      if (!there) fiber_yield();
#endif
    }
#pragma unroll
    for (int look = 0; look < looks; ++look) {
      if (first + 32 * look >= slots.parts) continue;
      unsigned bits[words];
#pragma unroll
      for (int i = 0; i < words; ++i) bits[i] = static_cast<unsigned>(seen[look][i]);
      T other;
      copy_bytes(&other, bits, sizeof(T));
      total = Op::combine(total, other);
    }
  }
  total = combine_lanes<Op>(total, 32);
  if (threadIdx.x % 32 == 0) copy_bytes(shared, &total, sizeof(T));
}

DEVICE void sync_cooperative() { __syncthreads(); }

template <class T, int M>
DEVICE void receive_cooperative(T (&value)[M], const char* shared) {
  copy_bytes(value, shared, sizeof(T));
}

#endif
