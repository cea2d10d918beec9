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

template <class T>
DEVICE complex_t<T> exp(complex_t<T> a) {
  const T size = exp(a.re);
  if (a.im == 0) return {size, a.im};
  return {size * cos(a.im), size * sin(a.im)};
}
template <class T>
DEVICE complex_t<T> sin(complex_t<T> a) {
  return {sin(a.re) * cosh(a.im), cos(a.re) * sinh(a.im)};
}
template <class T>
DEVICE complex_t<T> cos(complex_t<T> a) {
  return {cos(a.re) * cosh(a.im), -(sin(a.re) * sinh(a.im))};
}
