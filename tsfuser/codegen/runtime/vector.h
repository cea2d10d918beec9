// Fixed-size vectors of elements and their memory accesses.
//
// In: a pointer aligned to min(16, N * sizeof(T)) bytes. Out: `vec<T, N>` in registers, moved in accesses of
// 16 bytes (one access where the whole vector is shorter). N is a power of two. Example:
//
//     vec<float, 4> x = load<4>(args.x + i);
//     for (int lane = 0; lane < 4; ++lane) x[lane] = x[lane] + 1.0f;
//     store(args.y + i, x);
#pragma once

#include "types.h"

template <class T, int N>
struct vec {
  T lanes[N];
  DEVICE_MEMBER T& operator[](int lane) { return lanes[lane]; }
  DEVICE_MEMBER const T& operator[](int lane) const { return lanes[lane]; }
};

// One bool, as torch reads it: any byte but 0 is true. (And g++ vectorises loops over bytes, not over
// bools.)
DEVICE bool load_bool(const bool* pointer) { return *reinterpret_cast<const uint8_t*>(pointer) != 0; }

#if defined(TSFUSER_CUDA)

// The machine word that holds `Bytes` bytes.
template <int Bytes>
struct word;
template <>
struct word<1> {
  using type = unsigned char;
};
template <>
struct word<2> {
  using type = unsigned short;
};
template <>
struct word<4> {
  using type = unsigned int;
};
template <>
struct word<8> {
  using type = uint2;
};
template <>
struct word<16> {
  using type = uint4;
};

template <class T, int N>
struct vector_access {
  enum : int { bytes = N * sizeof(T), width = bytes < 16 ? bytes : 16, count = bytes / width };
  using type = typename word<width>::type;
};

// A word, or zero where it is not `wanted`. In assembler: the compiler would look into it and clear 16-bit
// lanes one by one.
template <class Word>
DEVICE Word load_word(const Word* pointer, bool wanted) {
  return wanted ? *pointer : Word{};
}
DEVICE uint4 load_word(const uint4* pointer, bool wanted) {
  uint4 w;
  asm("{ .reg .pred p; setp.ne.s32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
      " @p ld.global.v4.b32 {%0, %1, %2, %3}, [%4]; }"
      : "=&r"(w.x), "=&r"(w.y), "=&r"(w.z), "=&r"(w.w)
      : "l"(pointer), "r"(static_cast<int>(wanted)));
  return w;
}
DEVICE uint2 load_word(const uint2* pointer, bool wanted) {
  uint2 w;
  asm("{ .reg .pred p; setp.ne.s32 p, %3, 0; mov.b32 %0, 0; mov.b32 %1, 0; @p ld.global.v2.b32 {%0, %1}, "
      "[%2]; }"
      : "=&r"(w.x), "=&r"(w.y)
      : "l"(pointer), "r"(static_cast<int>(wanted)));
  return w;
}

template <int N, class T>
DEVICE vec<T, N> load(const T* pointer) {
  using access = vector_access<T, N>;
  typename access::type words[access::count];
  const auto* source = reinterpret_cast<const typename access::type*>(pointer);
#pragma unroll
  for (int i = 0; i < access::count; ++i) words[i] = source[i];
  vec<T, N> result;
  copy_bytes(&result, words, sizeof(result));
  return result;
}

// The same, or zeros.
template <int N, class T>
DEVICE vec<T, N> load(const T* pointer, bool wanted) {
  using access = vector_access<T, N>;
  typename access::type words[access::count];
  const auto* source = reinterpret_cast<const typename access::type*>(pointer);
#pragma unroll
  for (int i = 0; i < access::count; ++i) words[i] = load_word(source + i, wanted);
  vec<T, N> result;
  copy_bytes(&result, words, sizeof(result));
  return result;
}

// The first `count` elements, which are shorter than a register; the other lanes are zero. Both branches
// make registers: if they made elements, the first one would take its word apart, and so wait for it before
// the next load begins.
template <int N, class T>
DEVICE vec<T, N> load_words_upto(const T* pointer, int32_t count) {
  using access = vector_access<T, N>;
  enum : int { per = 4 / sizeof(T), registers = access::bytes / 4 };
  uint32_t words[registers];
  if (count >= N) {
    const auto* source = reinterpret_cast<const typename access::type*>(pointer);
#pragma unroll
    for (int i = 0; i < access::count; ++i) {
      const typename access::type whole = source[i];
      copy_bytes(words + i * (access::width / 4), &whole, sizeof(whole));
    }
  } else {
    const auto* source = reinterpret_cast<const typename word<sizeof(T)>::type*>(pointer);
#pragma unroll
    for (int w = 0; w < registers; ++w) {
      words[w] = 0;
#pragma unroll
      for (int lane = 0; lane < per; ++lane) {
        const int at = w * per + lane;
        if (at < count) words[w] |= static_cast<uint32_t>(source[at]) << (8 * sizeof(T) * lane);
      }
    }
  }
#pragma unroll
  for (int w = 0; w < registers; ++w) asm("" : "+r"(words[w]));
  vec<T, N> result;
  copy_bytes(&result, words, sizeof(result));
  return result;
}

template <class T, int N>
DEVICE void store(T* pointer, const vec<T, N>& value) {
  using access = vector_access<T, N>;
  typename access::type words[access::count];
  copy_bytes(words, &value, sizeof(value));
  auto* target = reinterpret_cast<typename access::type*>(pointer);
#pragma unroll
  for (int i = 0; i < access::count; ++i) target[i] = words[i];
}

#else

template <int N, class T>
DEVICE vec<T, N> load(const T* pointer, bool wanted = true) {
  vec<T, N> result;
  for (int lane = 0; lane < N; ++lane) result.lanes[lane] = wanted ? pointer[lane] : T{};
  return result;
}

template <class T, int N>
DEVICE void store(T* pointer, const vec<T, N>& value) {
  for (int lane = 0; lane < N; ++lane) pointer[lane] = value.lanes[lane];
}

#endif

// The first `count` elements; the other lanes are zero. `count` may be negative or past N.
template <int N, class T>
DEVICE vec<T, N> load_partial(const T* pointer, int64_t count) {
  vec<T, N> result;
#pragma unroll
  for (int lane = 0; lane < N; ++lane) result.lanes[lane] = lane < count ? pointer[lane] : T{};
  return result;
}

template <class T, int N>
DEVICE void store_partial(T* pointer, const vec<T, N>& value, int64_t count) {
#pragma unroll
  for (int lane = 0; lane < N; ++lane) {
    if (lane < count) pointer[lane] = value.lanes[lane];
  }
}
