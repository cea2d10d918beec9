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
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

static thread_local FiberBlock* fiber_block = nullptr;

[[noreturn]] static inline void fiber_abort(const char* reason, const Fiber* fiber) {
  const FiberBlock& b = *fiber_block;
  fprintf(stderr, "tsfuser: kernel %s, block %u, thread (%u, %u): %s", b.kernel, b.block.x, fiber->thread.x,
          fiber->thread.y, reason);
  if (fiber->file) fprintf(stderr, " (barrier at %s:%d)", fiber->file, fiber->line);
  fprintf(stderr, "\n");
  abort();
}

// Goes on in the scheduler; returns when the scheduler goes on here.
static __attribute__((noinline)) void fiber_leave() {
  FiberBlock& b = *fiber_block;
  if (!_setjmp(b.current->place)) _longjmp(b.scheduler, 1);
}

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

// A thread of one block after the other: what it is in the next one, the scheduler has changed meanwhile.
static inline void fiber_entry() {
  for (;;) {
    fiber_block->body(fiber_block->args);
    fiber_block->current->finished = true;
    fiber_leave();
  }
}

#if defined(TSFUSER_RACES)
UNCHECKED static bool race_is_shared(const void* address) {
  const char* const at = static_cast<const char*>(address);
  return at >= fiber_block->shared && at < fiber_block->shared + fiber_block->shared_bytes;
}

UNCHECKED static RacePlace race_here() {
  const Fiber& f = *fiber_block->current;
  return {fiber_block->block.x,
          static_cast<unsigned>(f.linear),
          static_cast<unsigned>(fiber_block->passed),
          static_cast<unsigned>(f.warp_passed),
          static_cast<unsigned>(f.arrivals),
          static_cast<unsigned>(f.waits),
          static_cast<unsigned>(f.mails),
          f.sends};
}

UNCHECKED static void race_abort(const char* does, const char* has, const void* address,
                                 const RacePlace& other) {
  const FiberBlock& b = *fiber_block;
  const bool is_shared = race_is_shared(address);
  const int64_t byte = static_cast<const char*>(address) - (is_shared ? b.shared : nullptr);
  char reason[256];
  snprintf(reason, sizeof(reason), "race: %s what thread %u of block %u has %s, byte %#llx of %s memory",
           does, other.thread, other.block, has, static_cast<unsigned long long>(byte),
           is_shared ? "shared" : "global");
  race_run = nullptr;
  fiber_abort(reason, b.current);
}
#endif

// Runs a thread until it waits, yields or returns.
static __attribute__((noinline)) void fiber_resume(FiberBlock& b, Fiber& f) {
  b.current = &f;
  if (_setjmp(b.scheduler)) return;
  if (f.started) _longjmp(f.place, 1);
  f.started = true;
  b.start.uc_stack.ss_sp = b.stacks + f.linear * FiberBlock::stack_bytes;
  b.start.uc_stack.ss_size = FiberBlock::stack_bytes;
  b.start.uc_link = nullptr;
  makecontext(&b.start, fiber_entry, 0);
  setcontext(&b.start);
}

// Lets all threads go on that wait at the block's barrier, if all of the block do.
static inline bool fiber_release_block(FiberBlock& b) {
  const Fiber* first = nullptr;
  for (int i = 0; i < b.threads; ++i) {
    const Fiber& f = b.fibers[i];
    if (!f.finished && (!f.file || f.waits_for)) return false;
    if (!f.finished && !first) first = &f;
  }
  if (!first) return false;
  for (int i = 0; i < b.threads; ++i) {
    Fiber& f = b.fibers[i];
    if (f.finished) fiber_abort("returned while others wait at a barrier", &f);
    if (f.line != first->line || (f.file != first->file && strcmp(f.file, first->file)))
      fiber_abort("waits at another barrier than thread (0, 0)", &f);
  }
  for (int i = 0; i < b.threads; ++i) b.fibers[i].file = nullptr;
  ++b.passed;
  return true;
}

// The same for one warp and the lanes that its threads wait for; lanes that do not exist or have returned
// count as there.
static inline bool fiber_release_warp(FiberBlock& b, int begin) {
  const int lanes = b.threads - begin < warpSize ? b.threads - begin : warpSize;
  bool released = false;
  for (int i = 0; i < lanes; ++i) {
    Fiber& f = b.fibers[begin + i];
    if (f.finished || !f.file || !f.waits_for) continue;
    const unsigned mask = f.waits_for;
    bool complete = true;
    for (int j = 0; j < lanes; ++j) {
      const Fiber& other = b.fibers[begin + j];
      const bool there = other.finished || (other.file && other.waits_for == mask);
      if ((mask >> j & 1) && !there) complete = false;
    }
    if (!complete) continue;
    for (int j = 0; j < lanes; ++j) {
      if (!(mask >> j & 1)) continue;
      Fiber& other = b.fibers[begin + j];
      other.warp_passed += other.is_barrier;
      other.file = nullptr;
      memcpy(other.taken, other.offered, sizeof(other.taken));
      if (other.finished) memset(other.taken, 0xff, sizeof(other.taken));
    }
    released = true;
  }
  return released;
}

static inline bool fiber_release(FiberBlock& b) {
  bool released = false;
  for (int begin = 0; begin < b.threads; begin += warpSize) released |= fiber_release_warp(b, begin);
  return released || fiber_release_block(b);
}

static inline void fiber_start_block(FiberBlock& b) {
  b.fruitless = b.arrived = b.passed = 0;
  b.runs = false;
  for (int i = 0; i < b.threads; ++i) {
    Fiber& f = b.fibers[i];
    f.thread = {i % b.shape.x, i / b.shape.x, 0};
    f.linear = i;
    f.finished = false;
    f.file = nullptr;
    f.arrivals = f.waits = f.mails = f.warp_passed = 0;
    f.sends = false;
  }
}

// Runs every thread until it waits or yields; false when all have returned.
static inline bool fiber_run_round(FiberBlock& b) {
  constexpr int64_t patience = 1 << 20;
  int alive = 0, yielded = 0;
  fiber_block = &b;
  b.runs = true;
  for (int i = 0; i < b.threads; ++i) {
    Fiber& f = b.fibers[b.block.x & 1 ? b.threads - 1 - i : i];
    if (!f.finished && !f.file) {
      fiber_resume(b, f);
      yielded += !f.finished && !f.file;
    }
    alive += !f.finished;
  }
  if (!alive) return b.runs = false;
  const bool released = fiber_release(b);
  b.fruitless = released ? 0 : b.fruitless + 1;
  if (!released && (!yielded || b.fruitless > patience)) {
    for (int i = 0; i < b.threads; ++i) {
      if (!b.fibers[i].finished)
        fiber_abort(yielded ? "waits for blocks that never come" : "waits for threads that never come",
                    &b.fibers[i]);
    }
  }
  return true;
}

// The same, for as long as the block needs no other, so that a missing barrier between blocks shows.
static inline bool fiber_run_far(FiberBlock& b) {
  bool alive = fiber_run_round(b);
  while (alive && b.fruitless == 0) alive = fiber_run_round(b);
  return alive;
}

static inline char* fiber_memory(const char* kernel, void* found) {
  if (!found || found == MAP_FAILED) {
    fprintf(stderr, "tsfuser: no memory for the fibers of kernel %s\n", kernel);
    abort();
  }
  return static_cast<char*>(found);
}

// The blocks from `begin` to `end`, of which `at_once` neighbours run at the same time.
static inline void fiber_run(const char* kernel, void (*body)(const void*), const void* args,
                             int64_t most_threads, int64_t grid, int64_t block_x, int64_t block_y,
                             int64_t shared, int64_t begin, int64_t end, int64_t at_once) {
  const int threads = static_cast<int>(block_x * block_y);
  if (threads < 1 || threads > most_threads) {
    fprintf(stderr, "tsfuser: kernel %s launched with %d threads a block, allows 1 to %d\n", kernel, threads,
            static_cast<int>(most_threads));
    abort();
  }
  if (at_once < 1 || (end - begin) % at_once || begin % at_once) {
    fprintf(stderr, "tsfuser: kernel %s launched with blocks %d to %d, in clusters of %d\n", kernel,
            static_cast<int>(begin), static_cast<int>(end), static_cast<int>(at_once));
    abort();
  }
  const size_t padded = (static_cast<size_t>(shared) + 63) / 64 * 64 + FiberBlock::canary_bytes;
  const size_t stack_total = threads * FiberBlock::stack_bytes;
  // Stacks first, which are aligned then; the blocks themselves, and their fibers.
  const size_t own = at_once * (stack_total + sizeof(FiberBlock) + threads * sizeof(Fiber));
  // Zeros, by pages: most threads need little of their stack.
  void* const pages =
      mmap(nullptr, own, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  char* const memory = fiber_memory(kernel, pages);
  FiberBlock* blocks = reinterpret_cast<FiberBlock*>(memory + at_once * stack_total);
  Fiber* const fibers = reinterpret_cast<Fiber*>(blocks + at_once);
#if defined(TSFUSER_RACES)
  RaceRun* const outer_races = race_begin(static_cast<unsigned>(at_once), memory, own);
#endif
  for (int64_t i = 0; i < at_once; ++i) {
    FiberBlock& b = blocks[i];
    b.kernel = kernel;
    b.body = body;
    b.args = args;
    b.grid = {static_cast<unsigned>(grid), 1, 1};
    b.shape = {static_cast<unsigned>(block_x), static_cast<unsigned>(block_y), 1};
    b.threads = threads;
    b.first = blocks;
    b.together = static_cast<int>(at_once);
    b.rank = static_cast<int>(i);
    b.stacks = memory + i * stack_total;
    b.fibers = fibers + i * threads;
    b.shared = fiber_memory(kernel, aligned_alloc(64, padded));
    b.shared_bytes = padded;
    getcontext(&b.start);
  }
  FiberBlock* outer = fiber_block;
  for (int64_t first = begin; first < end; first += at_once) {
    for (int64_t i = 0; i < at_once; ++i) {
      blocks[i].block = {static_cast<unsigned>(first + i), 0, 0};
      memset(blocks[i].shared, 0xff, padded);
#if defined(TSFUSER_RACES)
      race_forget(blocks[i].shared, padded);
#endif
      fiber_start_block(blocks[i]);
    }
    for (bool alive = true; alive;) {
      alive = false;
      for (int64_t i = 0; i < at_once; ++i) alive |= fiber_run_far(blocks[i]);
    }
    for (int64_t i = 0; i < at_once; ++i) {
      fiber_block = &blocks[i];
      for (size_t k = shared; k < padded; ++k) {
        if (blocks[i].shared[k] != static_cast<char>(0xff))
          fiber_abort("wrote past the end of shared memory", blocks[i].current);
      }
    }
  }
  fiber_block = outer;
#if defined(TSFUSER_RACES)
  race_end(outer_races);
#endif
  for (int64_t i = 0; i < at_once; ++i) free(blocks[i].shared);
  munmap(memory, own);
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
