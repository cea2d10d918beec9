// The blocks of a cluster share a row and combine their results in each other's shared memory.
//
// In: the result of each block, one value in every thread. Out: the combination over all blocks of the
// cluster, in every thread. Each block writes its value into the shared memory of all of them, and after a
// barrier of the cluster each reads what has come. So no block reads another's memory, and after its last
// barrier it may return. Nobody writes to a block that has not begun: `begin_cluster` stands at the start of
// the kernel and `await_cluster` before the first exchange. A place that is used again, one iteration of a
// loop later, is in the other of two halves of the memory: no block is more than one exchange ahead.
// Example, of one total, which takes `room_in_cluster<float>` bytes of shared memory:
//
//     begin_cluster();
//     await_cluster();
//     store_partial_cluster<0>(total, shared);
//     sync_cluster();
//     load_partial_cluster<Sum>(total, shared, 0.0f);
#pragma once

#include "cooperative.h"
#include "kernel.h"
#include "reduce.h"

#if defined(TSFUSER_CUDA) || defined(TSFUSER_FIBERS)

static constexpr int most_cluster_blocks = 16;

#if defined(TSFUSER_CUDA) && __CUDA_ARCH__ >= 900

DEVICE int blocks_of_cluster() {
  int count;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  return count;
}

DEVICE int block_in_cluster() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Not `.aligned`: lanes of a warp may come here one after the other.
DEVICE void begin_cluster() { asm volatile("barrier.cluster.arrive.relaxed;"); }
DEVICE void await_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// To the word at `place` in the shared memory of another block, or of this one.
DEVICE void store_in_cluster(char* place, int rank, unsigned word) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(static_cast<unsigned>(__cvta_generic_to_shared(place))), "r"(rank));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

#elif defined(TSFUSER_CUDA)

// No schedule makes clusters for such devices.
DEVICE int blocks_of_cluster() { return 1; }
DEVICE int block_in_cluster() { return 0; }
DEVICE void begin_cluster() {}
DEVICE void await_cluster() {}
DEVICE void sync_cluster() { __syncthreads(); }
DEVICE void store_in_cluster(char* place, int, unsigned word) { copy_bytes(place, &word, sizeof(word)); }

#else

DEVICE int blocks_of_cluster() { return fiber_block->together; }
DEVICE int block_in_cluster() { return fiber_block->rank; }
DEVICE void begin_cluster() { fiber_arrive(); }
DEVICE void await_cluster() { fiber_await(); }
DEVICE void sync_cluster() {
  fiber_arrive();
  fiber_await();
}
DEVICE void store_in_cluster(char* place, int rank, unsigned word) {
  copy_bytes(fiber_shared_of(place, rank), &word, sizeof(word));
}

#endif

// Bytes in which the blocks of a cluster exchange one value each.
template <class T>
inline constexpr int room_in_cluster = words_of<T> * most_cluster_blocks * 4;

// By warp `Warp`, a lane for each block, so that several totals are on their way at the same time.
template <int Warp, class T, int M>
DEVICE void store_partial_cluster(const T (&value)[M], char* shared) {
  const int rank = static_cast<int>(threadIdx.x) - Warp * 32;
  if (rank < 0 || rank >= blocks_of_cluster()) return;
  unsigned bits[words_of<T>] = {};
  copy_bytes(bits, value, sizeof(T));
#pragma unroll
  for (int i = 0; i < words_of<T>; ++i)
    store_in_cluster(shared + (i * most_cluster_blocks + block_in_cluster()) * 4, rank, bits[i]);
}

// Combined in an order that is the same in all blocks.
template <class Op, class T, int M>
DEVICE void load_partial_cluster(T (&value)[M], const char* shared, just<T> identity) {
  const int rank = threadIdx.x % most_cluster_blocks;
  T other = identity;
  if (rank < blocks_of_cluster()) {
    unsigned bits[words_of<T>];
#pragma unroll
    for (int i = 0; i < words_of<T>; ++i)
      copy_bytes(bits + i, shared + (i * most_cluster_blocks + rank) * 4, 4);
    copy_bytes(&other, bits, sizeof(T));
  }
  value[0] = combine_lanes<Op>(other, most_cluster_blocks);
}

// Columns: what each block has of them, behind the partial results of its warps (`gathered`), goes to
// `memory` of all blocks: a thread for each block and column, neighbours for neighbouring columns.
template <int Columns, int Warps, class T, int M>
DEVICE void store_columns_cluster(const T (&)[M], char* own, char* memory) {
  static_assert(sizeof(T) % 4 == 0, "an accumulator is some words");
  const int all = blocks_of_cluster() * Columns;
  for (int i = thread_of_block(); i < all; i += Warps * 32) {
    const int rank = i / Columns, column = i % Columns;
    unsigned bits[words_of<T>];
    copy_bytes(bits, gathered<Columns, Warps, T>(own) + column, sizeof(T));
    char* const place = memory + (block_in_cluster() * Columns + column) * sizeof(T);
#pragma unroll
    for (int k = 0; k < words_of<T>; ++k) store_in_cluster(place + k * 4, rank, bits[k]);
  }
}

// Combined in an order that is the same in all blocks, and left where the block's own results were.
template <class Op, int Columns, int Warps, class T, int M>
DEVICE void load_columns_cluster(const T (&)[M], char* own, const char* memory, just<T> identity) {
  const int rank = thread_of_block() % most_cluster_blocks;
#pragma unroll
  for (int start = 0; start < Columns; start += Warps * 32 / most_cluster_blocks) {
    const int column = start + thread_of_block() / most_cluster_blocks;
    T other = identity;
    if (rank < blocks_of_cluster() && column < Columns)
      copy_bytes(&other, memory + (rank * Columns + column) * sizeof(T), sizeof(T));
    other = combine_lanes<Op>(other, most_cluster_blocks);
    if (rank == 0 && column < Columns) gathered<Columns, Warps, T>(own)[column] = other;
  }
}

#endif
