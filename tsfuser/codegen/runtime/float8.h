// Floats of 8 bits: how they lie in memory, and their conversions from and to float.
//
// In: a float. Out: the bits that torch's own conversion gives on the same target, NaN included: the nearest
// value, ties to even. Integer arithmetic without branches: compilers vectorise it, and every GPU has it.
// GPUs from compute capability 8.9 on have an instruction for two of the types, too.
// Example: `float8_e5m2_t y; round_to(y, 1.0f); static_cast<uint8_t>(y) == 0x3c`.
#pragma once

// Storage only, since there is no arithmetic in these types. g++ vectorises copies of enumerations, not
// those of structs.
enum class float8_e5m2_t : uint8_t {};
enum class float8_e4m3fn_t : uint8_t {};
enum class float8_e5m2fnuz_t : uint8_t {};
enum class float8_e4m3fnuz_t : uint8_t {};
enum class float8_e8m0fnu_t : uint8_t {};  // a power of two: an exponent alone, without a sign or zero

// What torch makes of numbers beyond 448 depends on its version: a kernel is told (planning/torch_casts.py).
#if !defined(TSFUSER_E4M3FN_MOST)
#define TSFUSER_E4M3FN_MOST 0x7f
#endif

// A sign, an exponent with that `bias`, and `mantissa` bits. `most`: the magnitude of what is too large, as
// bits. `nan`: that of NaN. Where it is 0x80 there is one NaN, and no -0.
template <int mantissa_bits, int exponent_bias, int largest_bits, int nan_bits>
struct float8_layout {
  enum : int { mantissa = mantissa_bits, bias = exponent_bias, most = largest_bits, nan = nan_bits };
  enum : bool { value = true, lone_nan = nan_bits == 0x80 };
};

// `value`: whether it is one of these types; `lone_nan`: whether one pattern alone is NaN.
template <class T>
struct is_float8 {
  enum : bool { value = false, lone_nan = false };
};
template <>
struct is_float8<float8_e5m2_t> : float8_layout<2, 15, 0x7c, 0x7f> {};
template <>
struct is_float8<float8_e4m3fn_t> : float8_layout<3, 7, TSFUSER_E4M3FN_MOST, 0x7f> {};
template <>
struct is_float8<float8_e5m2fnuz_t> : float8_layout<2, 16, 0x80, 0x80> {};
template <>
struct is_float8<float8_e4m3fnuz_t> : float8_layout<3, 8, 0x80, 0x80> {};
template <>
struct is_float8<float8_e8m0fnu_t> {
  enum : bool { value = true, lone_nan = true };
};

template <class T>
DEVICE float widened(T x) {
  using layout = is_float8<T>;
  const uint32_t own = static_cast<uint32_t>(x);
  const uint32_t magnitude = (own & 0x7fu) << (23 - layout::mantissa);
  const uint32_t sign = (own & 0x80u) << 24;
  // Subnormals: their integer value, placed behind a power of two, minus that power.
  const uint32_t power = static_cast<uint32_t>(128 - layout::bias) << 23;
  const uint32_t small = bit_cast<uint32_t>(bit_cast<float>(power + magnitude) - bit_cast<float>(power));
  uint32_t normal;
  if constexpr (layout::most == 0x7c) {
    // As torch does it: infinities and NaN keep their exponent, and a processor makes NaN quiet in its way.
    normal = bit_cast<uint32_t>(bit_cast<float>(magnitude + 0x70000000u) * bit_cast<float>(0x07800000u));
  } else {
    normal = magnitude + (static_cast<uint32_t>(127 - layout::bias) << 23);
  }
  uint32_t bits = sign | (magnitude < (1u << 23) ? small : normal);
  if constexpr (layout::lone_nan) {
    bits = own == 0x80u ? 0x7f800001u : bits;
  } else if constexpr (layout::most != 0x7c) {
    bits = (own & 0x7fu) == 0x7fu ? sign | 0x7ff00000u : bits;
  }
  return bit_cast<float>(bits);
}

template <class T>
DEVICE T narrowed(float x) {
  using layout = is_float8<T>;
  const uint32_t bits = bit_cast<uint32_t>(x);
  const int32_t magnitude = static_cast<int32_t>(bits & 0x7fffffffu);
  const uint32_t sign = (bits >> 24) & 0x80u;
  constexpr int shift = 23 - layout::mantissa;
  // Below the normal numbers this addition leaves the subnormal in the low bits, rounded by the FPU.
  constexpr uint32_t power = static_cast<uint32_t>(128 - layout::bias + shift) << 23;
  const int32_t small =
      static_cast<int32_t>(bit_cast<uint32_t>(bit_cast<float>(magnitude) + bit_cast<float>(power)) - power);
  const int32_t odd = (magnitude >> shift) & 1;
  const int32_t even = magnitude - ((127 - layout::bias) << 23) + ((1 << (shift - 1)) - 1) + odd;
  const int32_t most = layout::most, nan = layout::nan;
  const int32_t normal = (even >> shift) < most ? even >> shift : most;
  const int32_t finite = magnitude < ((128 - layout::bias) << 23) ? small : normal;
  const uint32_t found = static_cast<uint32_t>(magnitude > 0x7f800000 ? nan : finite);
  return static_cast<T>(static_cast<uint8_t>(layout::lone_nan && found == 0 ? 0u : found | sign));
}

DEVICE float to_float(float8_e5m2_t x) { return widened(x); }
DEVICE float to_float(float8_e4m3fn_t x) { return widened(x); }
DEVICE float to_float(float8_e5m2fnuz_t x) { return widened(x); }
DEVICE float to_float(float8_e4m3fnuz_t x) { return widened(x); }
DEVICE float to_float(float8_e8m0fnu_t x) {
  const uint32_t exponent = static_cast<uint32_t>(x);
  const uint32_t bits = exponent == 0 ? 0x00400000u : exponent << 23;
  return bit_cast<float>(exponent == 0xffu ? 0x7f800001u : bits);
}

#if defined(TSFUSER_CUDA) && __CUDA_ARCH__ >= 890

// The instruction converts pairs. It gives the largest finite number for what is larger, and drops the sign
// of NaN.
DEVICE void round_to(float8_e4m3fn_t& result, float x) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  const bool saturates = TSFUSER_E4M3FN_MOST == 0x7e;
  const bool is_nan = saturates ? x != x : !(fabsf(x) <= 464.0f);  // the middle of 448 and what comes next
  const uint32_t other = ((bit_cast<uint32_t>(x) >> 24) & 0x80u) | 0x7fu;
  result = static_cast<float8_e4m3fn_t>(static_cast<uint8_t>(is_nan ? other : pair));
}

DEVICE void round_to(float8_e5m2_t& result, float x) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  const uint32_t sign = (bit_cast<uint32_t>(x) >> 24) & 0x80u;
  const uint32_t other = sign | (x != x ? 0x7fu : 0x7cu);
  const bool fits = fabsf(x) < 61440.0f;  // the middle of 57344 and 65536
  result = static_cast<float8_e5m2_t>(static_cast<uint8_t>(fits ? pair : other));
}

#else

DEVICE void round_to(float8_e5m2_t& result, float x) { result = narrowed<float8_e5m2_t>(x); }
DEVICE void round_to(float8_e4m3fn_t& result, float x) { result = narrowed<float8_e4m3fn_t>(x); }

#endif

DEVICE void round_to(float8_e5m2fnuz_t& result, float x) { result = narrowed<float8_e5m2fnuz_t>(x); }
DEVICE void round_to(float8_e4m3fnuz_t& result, float x) { result = narrowed<float8_e4m3fnuz_t>(x); }

// The nearer power of two in the exponent; the middle between two is rounded up, but for subnormal floats.
DEVICE void round_to(float8_e8m0fnu_t& result, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t exponent = (bits >> 23) & 0xffu;
  const uint32_t up = (bits & 0x7fffffu) >= (exponent == 0 ? 0x400001u : 0x400000u) ? 1u : 0u;
  result = static_cast<float8_e8m0fnu_t>(static_cast<uint8_t>(exponent == 0xffu ? 0xffu : exponent + up));
}

// By value, not by bits: NaN equals nothing, and 0 equals -0.
#define TSFUSER_COMPARISON(T)                                             \
  DEVICE bool operator==(T a, T b) { return to_float(a) == to_float(b); } \
  DEVICE bool operator!=(T a, T b) { return to_float(a) != to_float(b); }
TSFUSER_COMPARISON(float8_e5m2_t)
TSFUSER_COMPARISON(float8_e4m3fn_t)
TSFUSER_COMPARISON(float8_e5m2fnuz_t)
TSFUSER_COMPARISON(float8_e4m3fnuz_t)
TSFUSER_COMPARISON(float8_e8m0fnu_t)
#undef TSFUSER_COMPARISON
