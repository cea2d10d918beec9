// Complex numbers: the operations of the op table that have complex operands.
//
// In: `complex_t<float>` or `complex_t<double>`. Out: as c10::complex computes them. Example:
// `(complex_t<float>(0, 1) * complex_t<float>(0, 1)).re == -1`.
#pragma once

#include "types.h"
#include "math.h"

template <class T>
struct alignas(2 * sizeof(T)) complex_t {
  T re, im;
  complex_t() = default;
  DEVICE_MEMBER complex_t(T re, T im = T(0)) : re(re), im(im) {}
};

template <class T>
DEVICE complex_t<T> operator+(complex_t<T> a, complex_t<T> b) {
  return {a.re + b.re, a.im + b.im};
}
template <class T>
DEVICE complex_t<T> operator-(complex_t<T> a, complex_t<T> b) {
  return {a.re - b.re, a.im - b.im};
}
template <class T>
DEVICE complex_t<T> operator-(complex_t<T> a) {
  return {-a.re, -a.im};
}
template <class T>
DEVICE complex_t<T> operator*(complex_t<T> a, complex_t<T> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

// Smith's method: the divisor's smaller part is divided by its larger one, so that no square overflows.
template <class T>
DEVICE complex_t<T> operator/(complex_t<T> a, complex_t<T> b) {
  if (b.re == 0 && b.im == 0) return {a.re / fabs(b.re), a.im / fabs(b.im)};
  if (fabs(b.re) >= fabs(b.im)) {
    const T ratio = b.im / b.re, scale = 1 / (b.re + b.im * ratio);
    return {(a.re + a.im * ratio) * scale, (a.im - a.re * ratio) * scale};
  }
  const T ratio = b.re / b.im, scale = 1 / (b.re * ratio + b.im);
  return {(a.re * ratio + a.im) * scale, (a.im * ratio - a.re) * scale};
}
template <class T>
DEVICE complex_t<T> reciprocal(complex_t<T> a) {
  return complex_t<T>(1) / a;
}
template <class T>
DEVICE bool operator==(complex_t<T> a, complex_t<T> b) {
  return a.re == b.re && a.im == b.im;
}
template <class T>
DEVICE bool operator!=(complex_t<T> a, complex_t<T> b) {
  return !(a == b);
}
template <class T>
DEVICE T magnitude(complex_t<T> a) {
  return hypot(a.re, a.im);
}

template <class T>
DEVICE bool is_nan(complex_t<T> a) {
  return is_nan(a.re) || is_nan(a.im);
}
template <class T>
DEVICE bool is_inf(complex_t<T> a) {
  return is_inf(a.re) || is_inf(a.im);
}
template <class T>
DEVICE bool is_finite(complex_t<T> a) {
  return is_finite(a.re) && is_finite(a.im);
}

// Products for the functions below. A factor of 0 wins over infinity and NaN, as annex G of the C standard
// has it, and what grows overflows only where the product does: from LARGE on it is multiplied in four
// parts, and sinh and cosh are half of exp.
constexpr int LARGE = 80;

template <class T>
DEVICE T times_exp(T factor, T x, T scale = T(1)) {
  if (factor == 0) return factor;
  if (!(x > LARGE)) return factor * (exp(x) * scale);
  const T part = exp(x / 4);
  return factor * (part * scale) * part * part * part;
}
template <class T>
DEVICE T times_cosh(T factor, T x) {
  if (factor == 0) return factor;
  return fabs(x) > LARGE ? times_exp(factor, fabs(x), T(0.5)) : factor * cosh(x);
}
template <class T>
DEVICE T times_sinh(T factor, T x) {
  if (factor == 0 || x == 0) return T(0);
  return fabs(x) > LARGE ? times_exp(copysign(T(1), x) * factor, fabs(x), T(0.5)) : factor * sinh(x);
}

// sin(inf - infj) is NaN and an infinity whose sign C leaves open: torch's is that of `x` on CUDA, + with
// glibc.
template <class T>
DEVICE T open_infinity(T x) {
#if defined(TSFUSER_CUDA)
  return x;
#else
  return fabs(x);
#endif
}

template <class T>
DEVICE complex_t<T> exp(complex_t<T> a) {
  if (a.im == 0) return {exp(a.re), a.im};
  if (is_finite(a.im)) return {times_exp(cos(a.im), a.re), times_exp(sin(a.im), a.re)};
  if (a.re == -infinity<T>()) return {T(0), T(0)};
  return {a.re == infinity<T>() ? a.re : not_a_number<T>(), not_a_number<T>()};
}
template <class T>
DEVICE complex_t<T> sin(complex_t<T> a) {
  if (is_inf(a.im) && !is_finite(a.re)) return {not_a_number<T>(), open_infinity(a.im)};
  return {times_cosh(sin(a.re), a.im), times_sinh(cos(a.re), a.im)};
}
template <class T>
DEVICE complex_t<T> cos(complex_t<T> a) {
  if (is_inf(a.im) && !is_finite(a.re)) return {infinity<T>(), not_a_number<T>()};
  return {times_cosh(cos(a.re), a.im), -times_sinh(sin(a.re), a.im)};
}
