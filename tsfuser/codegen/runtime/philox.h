// Random numbers by counter: Philox 4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
// easy as 1, 2, 3" (SC'11).
//
// In: where the random numbers of a call start, the number of the op in its fusion (its stream), and the
// index of an element. Out: a uniform number in [0, 1), the same in whatever order, thread or kernel it is
// asked for. The seed is the key. The low half of the counter is offset / 4 + stream, as in torch's kernels,
// which get offsets of their own; the high half is the index, 4 floats (2 doubles) a block. Example:
//
//     const random_start random = start_of(args.random);
//     vec<float, 4> u = uniform<float, 4>(random, 0, i);   // u[k] == uniform<float>(random, 0, i + k)
#pragma once

#include "types.h"
#include "vector.h"
#include "index.h"

// What the launch says of a call's random numbers. In a captured CUDA graph, and where a tensor holds the
// seed (`captured` is 1, else 0), `seed` and `offset` are addresses; torch writes there before each replay.
// `within` adds to the offset. On the CPU (`captured` is 2) `seed` is the address of a key for each stream.
struct random_state {
  uint64_t seed, offset, within, captured;
};

// The keys of the ten rounds.
struct philox_keys {
  uint32_t first[10], second[10];
};

DEVICE philox_keys keys_of(uint64_t key) {
  philox_keys keys;
  uint32_t first = static_cast<uint32_t>(key), second = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    keys.first[round] = first;
    keys.second[round] = second;
    first += 0x9e3779b9u;
    second += 0xbb67ae85u;
  }
  return keys;
}

struct random_start {
#if defined(TSFUSER_CUDA)
  philox_keys keys;
  uint64_t low;  // of stream 0
#else
  uint64_t key, low;            // of stream 0
  const uint64_t* stream_keys;  // of all streams; null: they have one key, and differ in `low`
#endif
};

struct random_stream {
  philox_keys keys;
  uint64_t low;

  DEVICE_MEMBER uint64_t key() const { return static_cast<uint64_t>(keys.second[0]) << 32 | keys.first[0]; }
};

DEVICE random_start start_of(const random_state& state) {
  uint64_t seed = state.seed, offset = state.offset;
#if defined(TSFUSER_CUDA)
  if (state.captured) {  // once a kernel
    seed = __ldg(reinterpret_cast<const uint64_t*>(seed));
    offset = __ldg(reinterpret_cast<const uint64_t*>(offset));
  }
  random_start start = {keys_of(seed), (offset + state.within) / 4};
  // Keeps the keys in 20 registers: the compiler would add them up anew for each block of numbers, which is
  // a quarter of what a block takes.
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    asm volatile("" : "+r"(start.keys.first[round]), "+r"(start.keys.second[round]));
  }
  return start;
#else
  const uint64_t* const place = reinterpret_cast<const uint64_t*>(seed);
  if (state.captured == 2) return {place[0], 0, place};
  if (state.captured) {
    seed = *place;
    offset = *reinterpret_cast<const uint64_t*>(offset);
  }
  return {seed, (offset + state.within) / 4, nullptr};
#endif
}

DEVICE random_stream stream_of(const random_start& start, uint32_t number) {
#if defined(TSFUSER_CUDA)
  return {start.keys, start.low + number};
#else
  if (start.stream_keys) return {keys_of(start.stream_keys[number]), 0};
  return {keys_of(start.key), start.low + number};
#endif
}

struct philox_block {
  uint32_t words[4];
};

DEVICE philox_block philox(const philox_keys& keys, uint64_t low, uint64_t high) {
  uint32_t a = static_cast<uint32_t>(low), b = static_cast<uint32_t>(low >> 32);
  uint32_t c = static_cast<uint32_t>(high), d = static_cast<uint32_t>(high >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = static_cast<uint64_t>(0xd2511f53u) * a, q = static_cast<uint64_t>(0xcd9e8d57u) * c;
    const uint32_t next = static_cast<uint32_t>(q >> 32) ^ b ^ keys.first[round];
    c = static_cast<uint32_t>(p >> 32) ^ d ^ keys.second[round];
    a = next;
    b = static_cast<uint32_t>(q);
    d = static_cast<uint32_t>(p);
  }
  return {{a, b, c, d}};
}

// The numbers that one block gives: 4 floats of 24 random bits, or 2 doubles of 53. All are exact multiples
// of 2^-24 (2^-53), so none rounds up to 1.
template <class T>
struct uniform_block;

template <>
struct uniform_block<float> {
  enum : int { count = 4 };
  static DEVICE_MEMBER float number(const philox_block& block, int i) {
    return static_cast<float>(block.words[i] >> 8) * 5.9604644775390625e-8f;
  }
};

template <>
struct uniform_block<double> {
  enum : int { count = 2 };
  static DEVICE_MEMBER double number(const philox_block& block, int i) {
    const uint64_t bits = static_cast<uint64_t>(block.words[2 * i + 1]) << 32 | block.words[2 * i];
    return static_cast<double>(static_cast<int64_t>(bits >> 11)) * 1.1102230246251565e-16;
  }
};

template <class T>
DEVICE T uniform(const random_start& start, uint32_t stream, int64_t index) {
  enum : int { count = uniform_block<T>::count };
  const uint64_t element = static_cast<uint64_t>(index);
  const random_stream at = stream_of(start, stream);
  const philox_block block = philox(at.keys, at.low, element / count);
  T result = uniform_block<T>::number(block, 0);
#pragma unroll
  for (int i = 1; i < count; ++i) {
    if (element % count == i) result = uniform_block<T>::number(block, i);
  }
  return result;
}

#if defined(TSFUSER_HOST)
// The numbers of the elements from `first` on, `count` of them, somewhere in `room`, which holds 8 more.
template <class T, int N>
DEVICE const T* draw(T (&room)[N], const random_start& start, uint32_t stream, int64_t first,
                     int64_t count) {
  enum : int { each = uniform_block<T>::count };
  const random_stream at = stream_of(start, stream);
  const uint64_t block = static_cast<uint64_t>(first) / each;
  const int64_t skip = static_cast<int64_t>(static_cast<uint64_t>(first) % each),
                blocks = (skip + count + each - 1) / each;
  SIMD_LOOP
  for (int64_t k = 0; k < blocks; ++k) {
    const philox_block words = philox(at.keys, at.low, block + k);
    for (int i = 0; i < each; ++i) room[k * each + i] = uniform_block<T>::number(words, i);
  }
  return room + skip;
}
#endif

// The numbers of N neighbours; `first` a multiple of 4 is the quick case.
template <class T, int N>
DEVICE vec<T, N> uniform(const random_start& start, uint32_t stream, int64_t first) {
  enum : int { count = uniform_block<T>::count, whole = (N + count - 1) / count, all = (whole + 1) * count };
  const random_stream at = stream_of(start, stream);
  const uint64_t block = static_cast<uint64_t>(first) / count;
  const int skip = static_cast<int>(static_cast<uint64_t>(first) % count);
  T numbers[all];
#pragma unroll
  for (int k = 0; k < whole; ++k) {
    const philox_block drawn = philox(at.keys, at.low, block + k);
#pragma unroll
    for (int i = 0; i < count; ++i) numbers[k * count + i] = uniform_block<T>::number(drawn, i);
  }
  vec<T, N> result;
#pragma unroll
  for (int lane = 0; lane < N; ++lane) result[lane] = numbers[lane];
  if (skip == 0) return result;
  if (skip + N > whole * count) {
    const philox_block drawn = philox(at.keys, at.low, block + whole);
#pragma unroll
    for (int i = 0; i < count; ++i) numbers[whole * count + i] = uniform_block<T>::number(drawn, i);
  }
#pragma unroll
  // no array is indexed by a variable, which would leave the registers
  for (int shift = 1; shift < count; ++shift) {
#pragma unroll
    for (int lane = 0; lane < N; ++lane) {
      if (skip == shift) result[lane] = numbers[lane + shift];
    }
  }
  return result;
}
