// Races between the threads of a kernel that runs as fibers, found as it runs.
//
// In: with -DTSFUSER_RACES and -fsanitize=thread, g++ calls a function of this header at each access to
// memory; fiber.h says which thread runs and which barriers it has passed. Out: an abort with a message
// where two threads reach one byte, one of them writes to it, and no barrier is between them. Not looked at:
// stacks, the fibers themselves, atomic accesses (which make no order either), and kernels that reach too
// much memory.
//
// Of each byte the last write is known, and the last read since then. Two accesses are in order
//
// - if one thread makes both;
// - in one block, if the later one has passed more of its barriers (__syncthreads);
// - in one warp, if the later one has passed more barriers of the warp (__syncwarp, whatever the mask);
// - in one cluster, if the later one has waited for it more often than the earlier one had arrived;
// - in one cluster, if one of them sends, and the later thread has got mail more often: then it is no more
//   than one exchange ahead, if a barrier of the block stands between what a thread has received and what
//   its block sends next.
//
// A shuffle orders no memory, as on the GPU. One thing is let pass that may be a race: a thread may write to
// what it has read in global memory, though others have read it, too. Batch norm updates its running
// statistics so: all threads of a channel load them, and one uses what it has loaded.
#pragma once

#include <stdio.h>
#include <stdlib.h>

#include "types.h"

#define UNCHECKED __attribute__((no_sanitize("thread"), noinline))
#undef copy_bytes  // a call of memcpy, into which g++ may make it, goes unseen
#define copy_bytes race_copy

// Where a thread is when it reaches memory.
struct RacePlace {
  unsigned block, thread;
  unsigned passed;           // barriers of its block
  unsigned warp_passed;      // barriers of its warp
  unsigned arrivals, waits;  // at the barrier of its cluster
  unsigned mails;            // how often it has got mail
  bool sends;                // to another block
};

// Who has read a byte since it was written.
enum RaceReaders : unsigned { race_nobody, race_thread, race_warp, race_block, race_blocks };

struct RaceByte {
  RacePlace write, read;  // `read`: the last one
  uint64_t seen_by;       // threads that have read it, a bit each; some share one
  bool written;
  RaceReaders readers;
};

struct RacePage {
  static constexpr size_t bytes = 4096;
  size_t number;
  RacePage* next;  // of the same bucket
  RaceByte at[bytes];
};

// What one run of a kernel's blocks has reached.
struct RaceRun {
  static constexpr int buckets = 1024;
  static constexpr int64_t most_pages = 4096;  // 1 GB
  RacePage* pages[buckets];
  RacePage* last;
  int64_t page_count;
  unsigned at_once;  // blocks of a cluster
  char *unchecked_begin, *unchecked_end;
};

static thread_local RaceRun* race_run = nullptr;

// By fiber.h: whether that is shared memory of the block that runs; where the thread is that runs; and the
// end of the program, as the thread `does` what the thread at `other` `has` done.
static bool race_is_shared(const void* address);
static RacePlace race_here();
[[noreturn]] static void race_abort(const char* does, const char* has, const void* address,
                                    const RacePlace& other);

UNCHECKED static RaceByte* race_byte(RaceRun& run, size_t address) {
  const size_t number = address / RacePage::bytes, offset = address % RacePage::bytes;
  if (run.last && run.last->number == number) return &run.last->at[offset];
  RacePage*& bucket = run.pages[number % RaceRun::buckets];
  for (RacePage* page = bucket; page; page = page->next) {
    if (page->number == number) return &(run.last = page)->at[offset];
  }
  if (run.page_count >= RaceRun::most_pages) return nullptr;
  RacePage* made = static_cast<RacePage*>(calloc(1, sizeof(RacePage)));
  if (!made) return nullptr;
  ++run.page_count;
  made->number = number;
  made->next = bucket;
  bucket = run.last = made;
  return &made->at[offset];
}

// Whether a barrier is between them. `readers`: race_thread where `before` is one thread's access.
UNCHECKED static bool race_ordered(const RaceRun& run, const RacePlace& before, RaceReaders readers,
                                   const RacePlace& now) {
  if (before.block / run.at_once == now.block / run.at_once && readers != race_blocks) {
    if (now.waits > before.arrivals) return true;
    if ((before.sends || now.sends) && now.mails > before.mails) return true;
  }
  if (readers == race_blocks || before.block != now.block) return false;
  if (now.passed > before.passed) return true;
  if (readers == race_block || before.thread / 32 != now.thread / 32) return false;
  if (now.warp_passed > before.warp_passed) return true;
  return readers == race_thread && before.thread == now.thread;
}

UNCHECKED static RaceReaders race_joined(const RaceByte& byte, const RacePlace& now) {
  const RacePlace& read = byte.read;
  if (byte.readers == race_blocks || read.block != now.block) return race_blocks;
  if (byte.readers == race_block || read.thread / 32 != now.thread / 32) return race_block;
  return byte.readers == race_warp || read.thread != now.thread ? race_warp : race_thread;
}

UNCHECKED static void race_access(const void* address, size_t size, bool writes) {
  RaceRun* const run = race_run;
  char* const stack = static_cast<char*>(__builtin_frame_address(0));
  const char* const first = static_cast<const char*>(address);
  if (!run || stack < run->unchecked_begin || stack >= run->unchecked_end) return;  // no thread of a kernel
  if (first >= run->unchecked_begin && first < run->unchecked_end) return;
  const RacePlace now = race_here();
  const uint64_t own = uint64_t{1} << (now.block + now.thread) % 64;
  const bool is_shared = race_is_shared(address);
  for (size_t i = 0; i < size; ++i) {
    RaceByte* const byte = race_byte(*run, reinterpret_cast<size_t>(first) + i);
    if (!byte) return;
    if (byte->written && !race_ordered(*run, byte->write, race_thread, now))
      race_abort(writes ? "writes" : "reads", "written", first + i, byte->write);
    const bool is_later = byte->readers == race_nobody || race_ordered(*run, byte->read, byte->readers, now);
    if (!writes) {
      if (byte->readers == race_nobody) byte->seen_by = 0;
      byte->seen_by |= own;
      byte->readers = is_later ? race_thread : race_joined(*byte, now);
      byte->read = now;
      continue;
    }
    const bool updates = !is_shared && byte->seen_by & own;
    if (!is_later && !updates) race_abort("writes", "read", first + i, byte->read);
    byte->write = now;
    byte->written = true;
    byte->readers = race_nobody;
  }
}

UNCHECKED static void race_copy(void* to, const void* from, size_t size) {
  race_access(from, size, false);
  race_access(to, size, true);
  __builtin_memcpy(to, from, size);
}

// Memory that the next block gets anew.
UNCHECKED static void race_forget(const void* address, size_t size) {
  for (size_t i = 0; race_run && i < size; ++i) {
    RaceByte* const byte = race_byte(*race_run, reinterpret_cast<size_t>(address) + i);
    if (!byte) return;
    byte->written = false;
    byte->readers = race_nobody;
  }
}

// A run of blocks, of which `at_once` are in one cluster. Stacks and fibers are in `unchecked`.
UNCHECKED static RaceRun* race_begin(unsigned at_once, void* unchecked, size_t size) {
  RaceRun* const outer = race_run;
  race_run = static_cast<RaceRun*>(calloc(1, sizeof(RaceRun)));
  if (race_run) {
    race_run->at_once = at_once;
    race_run->unchecked_begin = static_cast<char*>(unchecked);
    race_run->unchecked_end = race_run->unchecked_begin + size;
  }
  return outer;
}

UNCHECKED static void race_end(RaceRun* outer) {
  for (int i = 0; race_run && i < RaceRun::buckets; ++i) {
    while (RacePage* const page = race_run->pages[i]) {
      race_run->pages[i] = page->next;
      free(page);
    }
  }
  free(race_run);
  race_run = outer;
}

// What g++ calls.
#define RACE_HOOK UNCHECKED __attribute__((visibility("hidden")))
#define RACE_ACCESS(SIZE)                                                                \
  RACE_HOOK void __tsan_read##SIZE(void* address) { race_access(address, SIZE, false); } \
  RACE_HOOK void __tsan_write##SIZE(void* address) { race_access(address, SIZE, true); }
#define RACE_ATOMIC(BITS, TYPE)                                                                     \
  RACE_HOOK TYPE __tsan_atomic##BITS##_load(const volatile TYPE* address, int) { return *address; } \
  RACE_HOOK void __tsan_atomic##BITS##_store(volatile TYPE* address, TYPE value, int) { *address = value; }

extern "C" {
RACE_ACCESS(1)
RACE_ACCESS(2)
RACE_ACCESS(4)
RACE_ACCESS(8)
RACE_ACCESS(16)
RACE_ATOMIC(8, uint8_t)
RACE_ATOMIC(16, uint16_t)
RACE_ATOMIC(32, uint32_t)
RACE_ATOMIC(64, uint64_t)
RACE_HOOK void __tsan_read_range(void* address, size_t size) { race_access(address, size, false); }
RACE_HOOK void __tsan_write_range(void* address, size_t size) { race_access(address, size, true); }
RACE_HOOK void __tsan_init() {}
RACE_HOOK void __tsan_func_entry(void*) {}
RACE_HOOK void __tsan_func_exit() {}
}
