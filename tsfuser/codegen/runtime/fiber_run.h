// How the threads of fiber.h take turns: a scheduler runs each until it meets a barrier, and lets it go on
// when the others have come.
//
// A kernel includes it. Tests, which compile thousands of kernels, compile it once instead, to a library
// that their kernels call (-DTSFUSER_FIBER_LIBRARY; tests/kit/quick.py): in it, FIBER_LINKAGE is nothing.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "fiber.h"

#if !defined(FIBER_LINKAGE)
#define FIBER_LINKAGE static
#endif

FIBER_LINKAGE thread_local FiberBlock* fiber_block = nullptr;

[[noreturn]] FIBER_LINKAGE void fiber_abort(const char* reason, const Fiber* fiber) {
  const FiberBlock& b = *fiber_block;
  fprintf(stderr, "tsfuser: kernel %s, block %u, thread (%u, %u): %s", b.kernel, b.block.x, fiber->thread.x,
          fiber->thread.y, reason);
  if (fiber->file) fprintf(stderr, " (barrier at %s:%d)", fiber->file, fiber->line);
  fprintf(stderr, "\n");
  abort();
}

// Goes on in the scheduler; returns when the scheduler goes on here.
FIBER_LINKAGE __attribute__((noinline)) void fiber_leave() {
  FiberBlock& b = *fiber_block;
  if (!_setjmp(b.current->place)) _longjmp(b.scheduler, 1);
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
FIBER_LINKAGE void fiber_run(const char* kernel, void (*body)(const void*), const void* args,
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
