// Element types and the conversions between them, without any system header.
//
// In: a value of any element type. Out: `convert<To>(value)`, equal to torch's `c10::convert` on the same
// target. Example: `convert<half_t>(1.0f).bits == 0x3c00`, `convert<uint8_t>(-1.5f) == 255`.
#pragma once

#if defined(__CUDACC_RTC__) || defined(__CUDA_ARCH__)
#define TSFUSER_CUDA 1
#define DEVICE __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#define copy_bytes memcpy
#else
#define DEVICE static inline __attribute__((always_inline))
#define DEVICE_MEMBER inline __attribute__((always_inline))
typedef __INT8_TYPE__ int8_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __INT16_TYPE__ int16_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __INT32_TYPE__ int32_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT64_TYPE__ uint64_t;
#define copy_bytes __builtin_memcpy
#endif

// Storage only: arithmetic is done in float.
struct alignas(2) half_t {
  uint16_t bits;
};
struct alignas(2) bfloat16_t {
  uint16_t bits;
};

template <class T>
struct complex_t;  // complex.h

// Answers about types are enumerators: NVRTC would emit a static member as a variable of the module.
template <class A, class B>
struct same_type {
  enum : bool { value = false };
};
template <class A>
struct same_type<A, A> {
  enum : bool { value = true };
};

// Those of which a processor makes a number other than 0 from NaN.
template <class T>
struct is_wide_integer {
  enum : bool {
    value = same_type<T, int32_t>::value || same_type<T, int64_t>::value || same_type<T, uint64_t>::value
  };
};

template <class To, class From>
DEVICE To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast between types of different sizes");
  To result;
  copy_bytes(&result, &x, sizeof(To));
  return result;
}

#include "float8.h"

// What `convert` must know of a type: whether it is complex or a float that only memory has, and the type of
// its parts.
template <class T>
struct type_traits {
  enum : bool {
    is_complex = false,
    is_16bit_float = same_type<T, half_t>::value || same_type<T, bfloat16_t>::value,
    is_narrow_float = is_16bit_float || is_float8<T>::value
  };
  using real = T;
};
template <class T>
struct type_traits<complex_t<T>> {
  enum : bool { is_complex = true, is_16bit_float = false, is_narrow_float = false };
  using real = T;
};

#if defined(TSFUSER_CUDA)

// Packing with a zero is one instruction also where `x` is the upper half of a loaded word; a shift takes
// two there.
DEVICE float to_float(bfloat16_t x) {
  float result;
  asm("mov.b32 %0, {0, %1};" : "=f"(result) : "h"(x.bits));
  return result;
}

DEVICE float to_float(half_t x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}

DEVICE void round_to(half_t& result, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x)); }

DEVICE void round_to(bfloat16_t& result, float x) {
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
#else
  const uint32_t bits = __float_as_uint(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  result.bits = static_cast<uint16_t>(x != x ? 0x7fffu : rounded);
#endif
}

#else

DEVICE float to_float(bfloat16_t x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

#if defined(TSFUSER_HOST) && defined(__F16C__) && defined(__AVX2__) && !defined(__clang__)
#include "host_half.h"

DEVICE float to_float(half_t x) { return widen_half(x.bits); }

DEVICE void round_to(half_t& result, float x) { result.bits = static_cast<uint16_t>(narrow_half(x)); }

#else

// Integer arithmetic without branches, which compilers vectorise.
DEVICE float to_float(half_t x) {
  const uint32_t magnitude = x.bits & 0x7fffu;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  // Subnormals: their integer value, placed under the exponent of 2^-14 * 2^0, minus that power of two.
  const float small = bit_cast<float>(0x38800000u + (magnitude << 13)) - bit_cast<float>(0x38800000u);
  const uint32_t normal = (magnitude << 13) + (magnitude >= 0x7c00u ? 0x70000000u : 0x38000000u);
  const uint32_t bits = magnitude < 0x0400u ? bit_cast<uint32_t>(small) : normal;
  return bit_cast<float>(sign | bits);
}

DEVICE void round_to(half_t& result, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  // Below 2^-14 the addition of 0.5 leaves the half's subnormal in the low bits, rounded by the FPU.
  const uint32_t small =
      bit_cast<uint32_t>(bit_cast<float>(magnitude < 0x38800000u ? magnitude : 0u) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  // A NaN is made quiet, as processors do it.
  const uint32_t large = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? small : normal;
  result.bits = static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? large : finite));
}

#endif

DEVICE void round_to(bfloat16_t& result, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  result.bits = static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

#endif

// `x`, an integer that was a float: g++ does not see through, and so does not make one rounding of a cast to
// integers and back, which would keep NaN, what is out of range, and the sign of a zero.
template <class T>
DEVICE T settled(T x) {
#if defined(__GNUC__) && !defined(__clang__) && !defined(TSFUSER_CUDA)
#if __GNUC__ >= 12
  return __builtin_assoc_barrier(x);
#else
  asm("" : "+r"(x));
#endif
#endif
  return x;
}

// The value of `x` as a `To`: complex -> real drops the imaginary part, anything -> bool is `!= 0`, float ->
// uint8 wraps through int64 as in c10, and on the host so do the other unsigned types. Out of range float ->
// int gives what the plain cast gives on the target, as in torch.
template <class To, class From>
DEVICE To convert(From x) {
  using T = type_traits<To>;
  using F = type_traits<From>;
  if constexpr (same_type<To, From>::value) {
    return x;
  } else if constexpr (same_type<From, bool>::value && !T::is_complex && !T::is_narrow_float) {
    return x ? To(1) : To(0);  // g++ vectorises a selection, not the conversion of a bool
  } else if constexpr (F::is_narrow_float) {
    const float value = to_float(x);
    if constexpr (is_float8<From>::lone_nan && same_type<typename T::real, double>::value) {
      // A processor makes it quiet, and so has torch's compiler for a GPU; the GPU's instruction does not.
      const double quiet = bit_cast<double>(uint64_t{0x7ff8000020000000u});
      return To(value != value ? quiet : static_cast<double>(value));
    }
#if !defined(TSFUSER_CUDA)
    if constexpr (is_float8<From>::lone_nan && is_wide_integer<To>::value) {
      return value != value ? To(0) : convert<To>(value);  // so has torch's compiler folded this one NaN
    }
#endif
    return convert<To>(value);
  } else if constexpr (T::is_complex && F::is_complex) {
    using R = typename T::real;
    return To(static_cast<R>(x.re), static_cast<R>(x.im));
  } else if constexpr (T::is_complex) {
    using R = typename T::real;
    return To(convert<R>(x), R(0));
  } else if constexpr (F::is_complex && same_type<To, bool>::value) {
    return x.re != 0 || x.im != 0;
  } else if constexpr (F::is_complex) {
    return convert<To>(x.re);
  } else if constexpr (T::is_narrow_float) {
    To result;
    round_to(result, convert<float>(x));
    return result;
  } else if constexpr (same_type<To, bool>::value) {
    return x != 0;
  } else if constexpr (same_type<To, uint8_t>::value) {
    return static_cast<uint8_t>(static_cast<int64_t>(x));
#if !defined(TSFUSER_CUDA)
  } else if constexpr (sizeof(To) < 4 && From(0.5) != 0) {
    // else clang saturates where torch, built by g++, wraps
    return static_cast<To>(static_cast<int32_t>(x));
  } else if constexpr (same_type<To, uint32_t>::value && From(0.5) != 0) {
    return static_cast<uint32_t>(static_cast<int64_t>(x));  // else vectors saturate
  } else if constexpr (same_type<To, uint64_t>::value && From(0.5) != 0) {
    const From half = From(9223372036854775808.0);
    const bool upper = x >= half;
    const uint64_t low = static_cast<uint64_t>(static_cast<int64_t>(upper ? x - half : x));
    return upper ? low ^ (1ull << 63) : low;
#endif
  } else if constexpr (From(0.5) != 0 && To(0.5) == 0) {
    return settled(static_cast<To>(x));
  } else {
    return static_cast<To>(x);
  }
}
