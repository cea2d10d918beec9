// The GPU's launch shape on the CPU, for tests: each thread of a block is a fiber that runs until it meets a
// barrier.
//
// In: a kernel and its launch. Out: the same memory as on the GPU, or an abort with a message where the GPU
// would have hung or read garbage: threads that do not all reach a barrier, or reach different ones, and
// writes past the dynamic shared memory. Shared memory starts as 0xFF bytes (NaN in every floating type).
// Odd blocks run their threads backwards, so that a missing barrier shows in one of two neighbours. Blocks
// may run in several OS threads; those of a COOPERATIVE_KERNEL, or of a cluster, wait for each other, so one
// thread runs them all alternately. With -DTSFUSER_RACES -fsanitize=thread, each race between threads is an
// abort, too (fiber_races.h).
#pragma once

#include <setjmp.h>
#include <string.h>
#include <ucontext.h>

#include "types.h"
#if defined(TSFUSER_RACES)
#include "fiber_races.h"
#endif

struct index3 {
  unsigned x, y, z;
};

static constexpr int warpSize = 32;

struct Fiber {
  jmp_buf place;  // where it goes on; unlike swapcontext, _longjmp makes no system call
  index3 thread;
  int linear;
  bool started;  // has a place, on its stack
  bool finished;
  const char* file;  // barrier that it waits at; null: may run
  int line;
  unsigned waits_for;         // lanes of its warp that must come to the barrier; 0: the whole block
  bool is_barrier;            // and no shuffle
  unsigned char offered[16];  // value offered to the other lanes by a shuffle
  unsigned char taken[16];    // the same once all lanes have come: none of them offers another one earlier
  int64_t arrivals;           // at the barrier of its cluster
  int64_t waits;              // that have ended, at the same barrier
  int64_t warp_passed;        // barriers of its warp
  int64_t mails;              // how often it has got mail from its cluster
  bool sends;                 // to another block
};

// One block while it runs; each OS thread has its own.
struct FiberBlock {
  static constexpr size_t stack_bytes = 256 * 1024;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t canary_bytes = 0;  // which g++ has of its own
#else
  static constexpr size_t canary_bytes = 64;
#endif

  const char* kernel;
  void (*body)(const void*);
  const void* args;
  index3 block, grid, shape;
  int threads;
  char* shared;
  size_t shared_bytes;
  char* stacks;
  Fiber* fibers;
  Fiber* current;
  jmp_buf scheduler;
  ucontext_t start;    // enters fibers for the first time
  int64_t fruitless;   // rounds in which threads looked for another block's word in vain
  FiberBlock* first;   // of the blocks that run at the same time
  int together, rank;  // how many these are, and the number of this one among them
  int64_t arrived;     // how often threads came to the barrier of the cluster, in the first of its blocks
  bool runs;           // some of its threads have begun, and not all have returned
  int64_t passed;      // barriers
};

#if defined(TSFUSER_FIBER_LIBRARY)
extern __thread FiberBlock* fiber_block;
[[noreturn]] void fiber_abort(const char* reason, const Fiber* fiber);
void fiber_leave();
void fiber_run(const char* kernel, void (*body)(const void*), const void* args, int64_t most_threads,
               int64_t grid, int64_t block_x, int64_t block_y, int64_t shared, int64_t begin, int64_t end,
               int64_t at_once);
#else
#include "fiber_run.h"
#endif

static inline void fiber_wait(const char* file, int line, unsigned lanes, bool is_barrier) {
  Fiber* self = fiber_block->current;
  self->file = file;
  self->line = line;
  self->waits_for = lanes;
  self->is_barrier = is_barrier;
  fiber_leave();
}

// Lets the others run, of this block and of all others that run at the same time.
static inline void fiber_yield() { fiber_leave(); }

// The barrier of a cluster, in two steps as on the GPU: nobody goes on from the second before all threads of
// all blocks have done the first.
static inline void fiber_arrive() {
  ++fiber_block->current->arrivals;
  ++fiber_block->first->arrived;
}

static inline void fiber_await() {
  const FiberBlock& first = *fiber_block->first;
  const int64_t all = int64_t{first.threads} * first.together;
  const int64_t wanted = fiber_block->current->arrivals * all;
  if (wanted == 0) fiber_abort("waits for its cluster without having arrived", fiber_block->current);
  while (first.arrived < wanted) fiber_yield();
  ++fiber_block->current->waits;
}

// What a thread writes while it `sends` is for another block, which reads it once it has got mail.
static inline void fiber_sends(bool sends) { fiber_block->current->sends = sends; }
static inline void fiber_got_mail() { ++fiber_block->current->mails; }

// The same place in the shared memory of block `rank` of the cluster, which must be there.
static inline char* fiber_shared_of(char* place, int rank) {
  const FiberBlock& other = fiber_block->first[rank];
  if (rank < 0 || rank >= fiber_block->together || !other.runs)
    fiber_abort("writes to a block that has not begun or has returned", fiber_block->current);
  return other.shared + (place - fiber_block->shared);
}

// Offers `value` to the lanes of `mask` and takes lane `source`'s; NaN bytes from a lane that is not there.
template <class T>
static inline T fiber_exchange(const char* file, int line, unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= 16, "shuffle of a type longer than 16 bytes");
  Fiber* self = fiber_block->current;
  memcpy(self->offered, &value, sizeof(T));
  fiber_wait(file, line, mask, false);
  const int warp = self->linear / warpSize * warpSize;
  const bool there = (mask >> source & 1) && warp + source < fiber_block->threads;
  T result;
  memset(&result, 0xff, sizeof(T));
  if (there) memcpy(&result, fiber_block->fibers[warp + source].taken, sizeof(T));
  return result;
}

static inline int fiber_lane() { return fiber_block->current->linear % warpSize; }

// `lane` if it is in the same segment of `width` lanes as the caller, else the caller's own lane.
static inline int fiber_same_segment(int lane, int width) {
  return lane >= 0 && lane / width == fiber_lane() / width ? lane : fiber_lane();
}

template <class T>
static inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int segment = fiber_lane() / width * width;
  return fiber_exchange("__shfl_sync", 0, mask, value, segment + (source & (width - 1)));
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  return fiber_exchange("__shfl_xor_sync", 0, mask, value, fiber_same_segment(fiber_lane() ^ lanes, width));
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return fiber_exchange("__shfl_down_sync", 0, mask, value,
                        fiber_same_segment(fiber_lane() + static_cast<int>(delta), width));
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return fiber_exchange("__shfl_up_sync", 0, mask, value,
                        fiber_same_segment(fiber_lane() - static_cast<int>(delta), width));
}
static inline void __syncwarp(unsigned mask = 0xffffffffu) { fiber_wait("__syncwarp", 0, mask, true); }

#define __syncthreads() fiber_wait(__FILE__, __LINE__, 0, true)
#define threadIdx (fiber_block->current->thread)
#define blockIdx (fiber_block->block)
#define blockDim (fiber_block->shape)
#define gridDim (fiber_block->grid)

#define KERNEL(NAME, ARGS, THREADS, ...) FIBER_KERNEL(NAME, ARGS, THREADS, 1)
#define COOPERATIVE_KERNEL(NAME, ARGS, THREADS, ...) FIBER_KERNEL(NAME, ARGS, THREADS, end - begin)
#define CLUSTER_KERNEL(NAME, ARGS, BLOCKS, THREADS, ...) FIBER_KERNEL(NAME, ARGS, THREADS, BLOCKS)

#define FIBER_KERNEL(NAME, ARGS, THREADS, AT_ONCE)                                                         \
  static void NAME##_thread(const ARGS& args);                                                             \
  extern "C" void NAME(const void* packed, int64_t grid, int64_t block_x, int64_t block_y, int64_t shared, \
                       int64_t begin, int64_t end) {                                                       \
    ARGS args;                                                                                             \
    memcpy(&args, packed, sizeof(args));                                                                   \
    fiber_run(                                                                                             \
        #NAME, [](const void* p) { NAME##_thread(*static_cast<const ARGS*>(p)); }, &args, THREADS, grid,   \
        block_x, block_y, shared, begin, end, AT_ONCE);                                                    \
  }                                                                                                        \
  static void NAME##_thread(const ARGS& args)

static inline void launch_dependents() {}
static inline void wait_for_predecessor() {}

#define SHARED_MEMORY(name) char* const name = fiber_block->shared
