// The blocks of a cluster share a row and combine their results in each other's shared memory.
//
// In: the result of each block, one value in every thread. Out: the combination over all blocks of the
// cluster, in every thread. Each block sends its value into the shared memory of all of them, and reads what
// has come to its own once a *mailbox* there has counted all bytes (an mbarrier). So no block reads
// another's memory, and when all that it awaits has come, it may return. A barrier of the cluster would also
// wait until all accesses of its threads to memory are done (MEMBAR). Nobody sends to a block that has not
// begun: `begin_cluster` stands at the start of the kernel and `await_cluster` before the first exchange. A
// place that is used again, one iteration of a loop later, is in the other of two halves of the memory, each
// with a mailbox: no block is more than one exchange ahead. Example, of one total, which takes
// `room_in_cluster<float>` bytes of shared memory:
//
//     begin_cluster(shared + 64);
//     await_cluster();
//     store_partial_cluster<0>(total, shared, shared + 64);
//     await_mail<4>(shared + 64, 0);
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

DEVICE unsigned shared_address(const char* place) {
  return static_cast<unsigned>(__cvta_generic_to_shared(place));
}

// The same place in the shared memory of another block, or of this one.
DEVICE unsigned address_in_cluster(const char* place, int rank) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(place)), "r"(rank));
  return address;
}

DEVICE void open_mailbox(char* mailbox) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(mailbox)) : "memory");
}

// `mailboxes`: all that the kernel has. Not `.aligned`: lanes of a warp may come here one after the other.
template <class... Mailboxes>
DEVICE void begin_cluster(Mailboxes*... mailboxes) {
  if (thread_of_block() == 0) {
    (open_mailbox(mailboxes), ...);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
DEVICE void await_cluster() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// To `place` in the shared memory of block `rank`, whose mailbox counts the bytes.
DEVICE void send_in_cluster(char* place, int rank, unsigned word, char* mailbox) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   address_in_cluster(place, rank)),
               "r"(word), "r"(address_in_cluster(mailbox, rank))
               : "memory");
}

// Until `Bytes` of each block of the cluster have come. `uses`: how often the block has waited for this
// mailbox before.
template <int Bytes>
DEVICE void await_mail(char* mailbox, int64_t uses) {
  const unsigned address = shared_address(mailbox), parity = uses & 1;
  if (thread_of_block() == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address),
                 "r"(Bytes * blocks_of_cluster())
                 : "memory");
  }
  for (unsigned done = 0; !done;) {
    asm volatile(
        "{\n\t.reg .pred all;\n\tmbarrier.try_wait.parity.shared::cta.b64 all, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, all;\n\t}"
        : "=r"(done)
        : "r"(address), "r"(parity)
        : "memory");
  }
}

#elif defined(TSFUSER_CUDA)

// No schedule makes clusters for such devices.
DEVICE int blocks_of_cluster() { return 1; }
DEVICE int block_in_cluster() { return 0; }
template <class... Mailboxes>
DEVICE void begin_cluster(Mailboxes*...) {}
DEVICE void await_cluster() {}
DEVICE void send_in_cluster(char* place, int, unsigned word, char*) {
  copy_bytes(place, &word, sizeof(word));
}
template <int Bytes>
DEVICE void await_mail(char*, int64_t) {
  __syncthreads();
}

#else

DEVICE int blocks_of_cluster() { return fiber_block->together; }
DEVICE int block_in_cluster() { return fiber_block->rank; }
// A mailbox is the number of bytes that have come to it.
DEVICE int64_t mail_of(const char* mailbox) {
  return __atomic_load_n(reinterpret_cast<const int64_t*>(mailbox), __ATOMIC_RELAXED);
}
DEVICE void count_mail(char* mailbox, int64_t bytes) {
  __atomic_store_n(reinterpret_cast<int64_t*>(mailbox), bytes, __ATOMIC_RELAXED);
}

template <class... Mailboxes>
DEVICE void begin_cluster(Mailboxes*... mailboxes) {
  if (thread_of_block() == 0) (count_mail(mailboxes, 0), ...);
  fiber_arrive();
}
DEVICE void await_cluster() { fiber_await(); }
DEVICE void send_in_cluster(char* place, int rank, unsigned word, char* mailbox) {
  fiber_sends(true);
  copy_bytes(fiber_shared_of(place, rank), &word, sizeof(word));
  fiber_sends(false);
  char* const there = fiber_shared_of(mailbox, rank);
  count_mail(there, mail_of(there) + sizeof(word));
}
template <int Bytes>
DEVICE void await_mail(char* mailbox, int64_t uses) {
  const int64_t wanted = int64_t{Bytes} * blocks_of_cluster() * (uses + 1);
  while (mail_of(mailbox) < wanted) fiber_yield();
  if (mail_of(mailbox) > wanted) fiber_abort("got more mail than it waits for", fiber_block->current);
  fiber_got_mail();
}

#endif

// Bytes in which the blocks of a cluster exchange one value each.
template <class T>
inline constexpr int room_in_cluster = words_of<T> * most_cluster_blocks * 4;

// By warp `Warp`, a lane for each block, so that several totals are on their way at the same time.
template <int Warp, class T, int M>
DEVICE void store_partial_cluster(const T (&value)[M], char* shared, char* mailbox) {
  const int rank = static_cast<int>(threadIdx.x) - Warp * 32;
  if (rank < 0 || rank >= blocks_of_cluster()) return;
  unsigned bits[words_of<T>] = {};
  copy_bytes(bits, value, sizeof(T));
#pragma unroll
  for (int i = 0; i < words_of<T>; ++i)
    send_in_cluster(shared + (i * most_cluster_blocks + block_in_cluster()) * 4, rank, bits[i], mailbox);
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
DEVICE void store_columns_cluster(const T (&)[M], char* own, char* memory, char* mailbox) {
  static_assert(sizeof(T) % 4 == 0, "an accumulator is some words");
  const int all = blocks_of_cluster() * Columns;
  for (int i = thread_of_block(); i < all; i += Warps * 32) {
    const int rank = i / Columns, column = i % Columns;
    unsigned bits[words_of<T>];
    copy_bytes(bits, gathered<Columns, Warps, T>(own) + column, sizeof(T));
    char* const place = memory + (block_in_cluster() * Columns + column) * sizeof(T);
#pragma unroll
    for (int k = 0; k < words_of<T>; ++k) send_in_cluster(place + k * 4, rank, bits[k], mailbox);
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
