// Functions of one element that templates of the op table call.
//
// In: float, double or integer registers. Out: what eager torch computes, to within a few units in the last
// place. sin, exp, ... are CUDA's own functions; on the host overloads of the C library's. Names that
// differ from those of the C library have other semantics at NaN, at negative operands or at the integers'
// limits: `nan_max(1.0f, NAN)` is NaN, `floor_mod(-1, 3)` is 2.
#pragma once

#include "types.h"

#if !defined(TSFUSER_CUDA)

// Those that host_simd.h does not have.
#define LIBM_1(NAME)                        \
  extern "C" double NAME(double) noexcept;  \
  extern "C" float NAME##f(float) noexcept; \
  DEVICE float NAME(float x) { return NAME##f(x); }
#define LIBM_2(NAME)                               \
  extern "C" double NAME(double, double) noexcept; \
  extern "C" float NAME##f(float, float) noexcept; \
  DEVICE float NAME(float x, float y) { return NAME##f(x, y); }
// clang-format off
#if !defined(TSFUSER_SIMD_2_22)
LIBM_1(exp) LIBM_1(log) LIBM_1(sin) LIBM_1(cos) LIBM_2(pow)
#endif
#if !defined(TSFUSER_SIMD_2_35)
LIBM_1(exp2) LIBM_1(expm1) LIBM_1(log2) LIBM_1(log10) LIBM_1(log1p) LIBM_1(tan)
LIBM_1(asin) LIBM_1(acos) LIBM_1(atan) LIBM_1(sinh) LIBM_1(cosh) LIBM_1(tanh)
LIBM_1(asinh) LIBM_1(acosh) LIBM_1(atanh) LIBM_1(erf) LIBM_1(erfc) LIBM_2(atan2) LIBM_2(hypot)
#endif
LIBM_1(sqrt) LIBM_1(cbrt) LIBM_1(lgamma) LIBM_1(tgamma) LIBM_1(j0) LIBM_1(j1) LIBM_1(y0) LIBM_1(y1)
LIBM_1(ceil) LIBM_1(floor) LIBM_1(rint) LIBM_1(trunc) LIBM_1(fabs)
LIBM_2(fmod) LIBM_2(copysign) LIBM_2(nextafter)
// clang-format on
#undef LIBM_1
#undef LIBM_2

                            template <class T>
                            DEVICE T rsqrt(T x) {
  return 1 / sqrt(x);
}

#endif

template <class T>
struct identity {
  using type = T;
};
template <class T>
using just = typename identity<T>::type;  // a parameter that does not take part in deduction

template <class T>
inline constexpr bool is_real = same_type<T, float>::value || same_type<T, double>::value;

// ---- limits and tests

template <class T>
DEVICE T infinity() {
  if constexpr (sizeof(T) == 4)
    return bit_cast<T>(0x7f800000u);
  else
    return bit_cast<T>(static_cast<uint64_t>(0x7ff0000000000000ull));
}

template <class T>
DEVICE T largest() {
  if constexpr (sizeof(T) == 4)
    return bit_cast<T>(0x7f7fffffu);
  else
    return bit_cast<T>(static_cast<uint64_t>(0x7fefffffffffffffull));
}

template <class T>
DEVICE T not_a_number() {
  if constexpr (sizeof(T) == 4)
    return bit_cast<T>(0x7fc00000u);
  else
    return bit_cast<T>(static_cast<uint64_t>(0x7ff8000000000000ull));
}

template <class T>
DEVICE bool is_nan(T x) {
  return x != x;
}
template <class T>
DEVICE bool is_inf(T x) {
  return fabs(x) == infinity<T>();
}
template <class T>
DEVICE bool is_finite(T x) {
  return fabs(x) < infinity<T>();
}
// A power of two, at most 1 / n: a sum of n terms times it does not overflow, and is rounded as without it.
// Of the exponent alone: a division per element would be a branch.
DEVICE float sum_scale(float n) {
  return bit_cast<float>((0x7f000000u - bit_cast<uint32_t>(n)) & 0x7f800000u);
}
DEVICE double sum_scale(double n) {
  return bit_cast<double>((0x7fe0000000000000ull - bit_cast<uint64_t>(n)) & 0x7ff0000000000000ull);
}

// The mean of n terms from the sum of all times sum_scale(n): finite where that sum is.
template <class T>
DEVICE T scaled_mean(T sum, T n) {
  const T mean = sum / (n * sum_scale(n));
  return is_inf(mean) && is_finite(sum) ? copysign(largest<T>(), sum) : mean;
}

template <class T>
DEVICE bool is_negative(T x) {  // also -0 and negative NaN
  return copysign(T(1), x) < 0;
}

// ---- sums of a product

// x * y + z, rounded once where eager's kernels do, which are compiled with fused multiply-adds: the product
// alone may overflow where the sum does not. On CUDA the compiler makes one of the plain formula, unless an
// option says not to.
template <class T>
DEVICE T multiply_add(T x, T y, T z) {
  return x * y + z;
}
#if !defined(TSFUSER_CUDA) && (defined(__FMA__) || defined(__aarch64__))
DEVICE float multiply_add(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
DEVICE double multiply_add(double x, double y, double z) { return __builtin_fma(x, y, z); }
#endif

// ---- divisions

// x * y + z, rounded once on all devices.
DEVICE float multiply_add_once(float x, float y, float z) {
#if defined(TSFUSER_CUDA)
  return __fmaf_rn(x, y, z);
#else
  return __builtin_fmaf(x, y, z);
#endif
}

// From what is off by a unit of the last place, a step to what is rounded as a division is (Markstein,
// "Computation of elementary functions on the IBM RISC System/6000 processor", 1990).
DEVICE float nearer_reciprocal(float y, float near) {
  return multiply_add_once(multiply_add_once(-y, near, 1.0f), near, near);
}
DEVICE float nearer_quotient(float x, float y, float reciprocal, float near) {
  return multiply_add_once(multiply_add_once(-y, near, x), reciprocal, near);
}
#if defined(TSFUSER_CUDA)
DEVICE float near_reciprocal(float y) {  // 1 ulp
  float result;
  asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(y));
  return result;
}
#endif

template <class T>
DEVICE T sixth(T x) {  // torch multiplies on CUDA
#if defined(TSFUSER_CUDA)
  return x * (T(1) / 6);
#else
  return x / 6;
#endif
}

// 1 / y and x / y where y is 1 at least, or NaN: rounded as a division, and where y is below 2^126 off by no
// more than that. A GPU's division is a branch for each element, between which no other's work is done.
template <class T>
DEVICE T one_over(T y) {
  return 1 / y;
}
template <class T>
DEVICE T over(T x, T y) {
  return x / y;
}
#if defined(TSFUSER_CUDA)
DEVICE float one_over(float y) {
  const float near = near_reciprocal(y);
  return y < 8.507059e37f ? nearer_reciprocal(y, near) : near;
}
DEVICE float over(float x, float y) {
  const float reciprocal = one_over(y), first = x * reciprocal;
  const float second = nearer_quotient(x, y, reciprocal, first);
  return second != 0 && is_finite(second) ? second : first;  // of -0, or an infinity, there is no rest
}
#endif

// ---- integers, which wrap at their width

template <int bytes>
struct unsigned_of_size;
template <>
struct unsigned_of_size<1> {
  using type = uint8_t;
};
template <>
struct unsigned_of_size<2> {
  using type = uint16_t;
};
template <>
struct unsigned_of_size<4> {
  using type = uint32_t;
};
template <>
struct unsigned_of_size<8> {
  using type = uint64_t;
};
// At least 32 bits, since uint16_t * uint16_t is computed in int and may overflow it.
template <class T>
using bits_of = typename unsigned_of_size<(sizeof(T) < 4 ? 4 : sizeof(T))>::type;

template <class T>
inline constexpr bool is_signed = T(-1) < T(0);

template <class T>
DEVICE T wrap_add(T a, T b) {
  return static_cast<T>(static_cast<bits_of<T>>(a) + static_cast<bits_of<T>>(b));
}
template <class T>
DEVICE T wrap_sub(T a, T b) {
  return static_cast<T>(static_cast<bits_of<T>>(a) - static_cast<bits_of<T>>(b));
}
template <class T>
DEVICE T wrap_mul(T a, T b) {
  return static_cast<T>(static_cast<bits_of<T>>(a) * static_cast<bits_of<T>>(b));
}
template <class T>
DEVICE T wrap_neg(T a) {
  return wrap_sub(T(0), a);
}
template <class T>
DEVICE T wrap_abs(T a) {
  return a < T(0) ? wrap_neg(a) : a;
}

// A shift by a negative number or by the width and more: all bits go.
template <class T>
DEVICE T shift_left(T a, T by) {
  constexpr int width = 8 * sizeof(T);
  return by < T(0) || by >= T(width) ? T(0) : static_cast<T>(static_cast<bits_of<T>>(a) << by);
}
template <class T>
DEVICE T shift_right(T a, T by) {
  constexpr int width = 8 * sizeof(T);
  if (by >= T(0) && by < T(width)) return static_cast<T>(a >> by);
  return a < T(0) ? T(-1) : T(0);
}

template <class T>
DEVICE T int_pow(T base, T exponent) {
  if (exponent < T(0)) return base == T(1) ? T(1) : base == T(-1) ? (exponent & 1 ? T(-1) : T(1)) : T(0);
  T result = 1;
  for (; exponent; exponent = static_cast<T>(exponent >> 1)) {
    if (exponent & 1) result = wrap_mul(result, base);
    base = wrap_mul(base, base);
  }
  return result;
}

// ---- division

// Towards zero. The lowest integer by -1 wraps. Where an integer is divided by 0, CUDA gives what the
// machine does, as in eager's kernels; the host, where that would be a signal, 0.
template <class T>
DEVICE T trunc_div(T a, T b) {
  if constexpr (is_real<T>) return trunc(a / b);
#if defined(TSFUSER_CUDA)
  else
    return static_cast<T>(a / b);
#else
  else if (b == T(0))
    return T(0);
  else
    return is_signed<T> && b == T(-1) ? wrap_neg(a) : static_cast<T>(a / b);
#endif
}

// The remainder of trunc_div; it has the sign of `a`.
template <class T>
DEVICE T trunc_mod(T a, T b) {
  if constexpr (is_real<T>) return fmod(a, b);
#if defined(TSFUSER_CUDA)
  else
    return static_cast<T>(a % b);
#else
  else
    return b == T(0) || (is_signed<T> && b == T(-1)) ? T(0) : static_cast<T>(a % b);
#endif
}

// The remainder that has the sign of `b`.
template <class T>
DEVICE T floor_mod(T a, T b) {
  const T rest = trunc_mod(a, b);
  return rest != T(0) && (rest < T(0)) != (b < T(0)) ? static_cast<T>(rest + b) : rest;
}

// Downwards. On floats by Python's rule: (a - a % b) / b is nearly whole, so rounding it finds the whole
// number meant.
template <class T>
DEVICE T floor_div(T a, T b) {
  if constexpr (is_real<T>) {
    if (b == 0) return a / b;
    const T rest = fmod(a, b);
    T quotient = (a - rest) / b;
    if (rest != 0 && (b < 0) != (rest < 0)) quotient -= 1;
    if (quotient == 0) return copysign(T(0), a / b);
    const T down = floor(quotient);
    return quotient - down > T(0.5) ? down + 1 : down;
  } else {
    const T quotient = trunc_div(a, b);
    return trunc_mod(a, b) != T(0) && (a < T(0)) != (b < T(0)) ? static_cast<T>(quotient - 1) : quotient;
  }
}

// A power whose exponent is one number for all elements: eager computes some exponents in a way of their
// own, with other results at -0 and -inf.
template <class T>
DEVICE T pow_number(T x, T exponent) {
  if (exponent == T(0.5)) return sqrt(x);
  if (exponent == T(2)) return x * x;
  if (exponent == T(3)) return x * x * x;
  if (exponent == T(-0.5)) return rsqrt(x);
  if (exponent == T(-1)) return 1 / x;
  if (exponent == T(-2)) return 1 / (x * x);
  return pow(x, exponent);
}

// ---- extrema

// NaN if either operand is one. Of 0 and -0 the host chooses the first operand, as eager's clamps do; CUDA
// takes 0 for the larger one, as its instructions do. Two selections instead of one with `||`, which g++
// does not vectorise once two of them are nested.
template <class T>
DEVICE T nan_max(T a, just<T> b) {
#if defined(TSFUSER_CUDA)
  if constexpr (is_real<T>) return a != a ? a : b != b ? b : fmax(a, b);
#endif
  const T larger = a < b ? b : a;
  return b != b ? b : larger;
}
template <class T>
DEVICE T nan_min(T a, just<T> b) {
#if defined(TSFUSER_CUDA)
  if constexpr (is_real<T>) return a != a ? a : b != b ? b : fmin(a, b);
#endif
  const T smaller = b < a ? b : a;
  return b != b ? b : smaller;
}
// one instruction, which gives NaN if either operand is one
#if defined(TSFUSER_CUDA) && __CUDA_ARCH__ >= 800
DEVICE float nan_max(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
DEVICE float nan_min(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
#endif
// The other operand if one is NaN; of 0 and -0 the host returns the first operand.
template <class T>
DEVICE T number_max(T a, just<T> b) {
#if defined(TSFUSER_CUDA)
  return fmax(a, b);
#endif
  const T larger = a < b ? b : a;
  return a != a ? b : larger;
}
template <class T>
DEVICE T number_min(T a, just<T> b) {
#if defined(TSFUSER_CUDA)
  return fmin(a, b);
#endif
  const T smaller = b < a ? b : a;
  return a != a ? b : smaller;
}
template <class T>
DEVICE T clamp(T x, just<T> low, just<T> high) {
  return nan_min(nan_max(x, low), high);
}
template <class T>
DEVICE T signum(T x) {  // 0 for NaN
  return static_cast<T>((T(0) < x) - (x < T(0)));
}
template <class T>
DEVICE T nan_to_num(T x, T nan, T positive, T negative) {
  return x != x ? nan : x == infinity<T>() ? positive : x == -infinity<T>() ? negative : x;
}

// ---- special functions

template <class T>
DEVICE T sigmoid(T x) {
  return one_over(1 + exp(-x));
}
template <class T>
DEVICE T xlogy(T x, T y) {
  const T product = x * log(y);
  return y != y ? y : x == 0 ? T(0) : product;
}
template <class T>
DEVICE T xlog1py(T x, T y) {
  const T product = x * log1p(y);
  return y != y ? y : x == 0 ? T(0) : product;
}
template <class T>
DEVICE T logaddexp(T a, T b) {
  const T sum = nan_max(a, b) + log1p(exp(-fabs(a - b)));
  return a == b && is_inf(a) ? a : sum;
}
template <class T>
DEVICE T logaddexp2(T a, T b) {
  const T sum = nan_max(a, b) + log1p(exp2(-fabs(a - b))) * T(1.4426950408889634);
  return a == b && is_inf(a) ? a : sum;
}
template <class T>
DEVICE T sinc(T x) {
  const T angle = x * T(3.141592653589793);
  const T quotient = sin(angle) / angle;
  return x == 0 ? T(1) : quotient;
}
template <class T>
DEVICE T deg2rad(T x) {
  return x * T(0.017453292519943295);
}
template <class T>
DEVICE T rad2deg(T x) {
  return x * T(57.29577951308232);
}
template <class T>
DEVICE T entropy(T x) {
  const T product = -x * log(x);
  return x != x ? x : x > 0 ? product : x == 0 ? T(0) : -infinity<T>();
}
template <class T>
DEVICE T normal_cdf(T x) {
  return (1 + erf(x * T(0.7071067811865476))) / 2;
}
template <class T>
DEVICE T lerp(T a, T b, T weight) {
  return fabs(weight) < T(0.5) ? multiply_add(weight, b - a, a) : multiply_add(-(b - a), 1 - weight, b);
}
template <class T>
DEVICE T logit(T x, T eps) {
  const T z = eps < 0 ? x : x < eps ? eps : x > 1 - eps ? 1 - eps : x;
  return log(z / (1 - z));
}

#if !defined(TSFUSER_CUDA)

// The inverse of erf: a start by Winitzki's formula, then Halley steps on erf, or on erfc near 1, where erf
// has no digits left.
DEVICE double erfinv(double x) {
  const double size = fabs(x), rest = 1 - size;
  const double l = log(rest * (1 + size)), a = 0.147, t = 2 / (3.141592653589793 * a) + l / 2;
  const double small =
      size < 0.5;  // a factor: of a choice in each step g++ makes two ways through all of them
  double y = sqrt(sqrt(t * t - l / a) - t);
  for (int step = 0; step < 3; ++step) {
    const double error = small * (erf(y) - size) + (1 - small) * (rest - erfc(y));
    const double newton = error / (1.1283791670955126 * exp(-y * y));
    y -= newton / (1 + y * newton);
  }
  const double end = size == 1 ? infinity<double>() : not_a_number<double>();
  return copysign(size < 1 ? y : end, x);
}
DEVICE float erfinv(float x) { return static_cast<float>(erfinv(static_cast<double>(x))); }

#endif

#include "activations.h"
