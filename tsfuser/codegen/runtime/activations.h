// Activation functions and their derivatives. Included by math.h, whose functions they use.
//
// In: registers of one floating type. Out: eager torch's formula for it. Example: `relu(NAN)` is NaN,
// `gelu(0.0f) == 0`.
#pragma once

#include "math.h"

// ---- activations

// Functions of the C library are called before a choice, not in one of its branches: g++ then vectorises the
// loop (it moves no call itself, see target/host.py).

template <class T>
DEVICE T relu(T x) {  // keeps NaN
#if defined(TSFUSER_CUDA)
  if constexpr (is_real<T>) return nan_max(x, T(0));  // of -0, too, where the host gives -0
#endif
  return x < T(0) ? T(0) : x;
}
template <class T>
DEVICE T silu(T x) {
  return over(x, 1 + exp(-x));
}
template <class T>
DEVICE T mish(T x) {
  return x * tanh(log1p(exp(x)));
}
// Where eager's `elu` scales x. On the CPU that includes 0: `elu(0, -1)` is 0 there, and -0 on CUDA.
template <class T>
DEVICE bool is_scaled_by_elu(T x) {
#if defined(TSFUSER_CUDA)
  return x > 0;
#else
  return !(x < 0);
#endif
}
template <class T>
DEVICE T elu(T x, T alpha, T scale, T input_scale) {
  const T power = expm1(x * input_scale);
  return is_scaled_by_elu(x) ? x * scale : power * (alpha * scale);
}
template <class T>
DEVICE T celu(T x, T alpha) {
  const T power = expm1(x / alpha);
  return is_scaled_by_elu(x) ? x : power * alpha;
}
template <class T>
DEVICE T selu(T x) {
  return elu(x, T(1.6732632423543772), T(1.0507009873554805), T(1));
}
template <class T>
DEVICE T hardsigmoid(T x) {
  return sixth(clamp(x + 3, 0, 6));
}
template <class T>
DEVICE T hardswish(T x) {
  return sixth(x * clamp(x + 3, 0, 6));
}
template <class T>
DEVICE T log_sigmoid(T x) {
  return nan_min(x, 0) - log1p(exp(-fabs(x)));
}
template <class T>
DEVICE T softplus(T x, T beta, T threshold) {
  const T soft = log1p(exp(x * beta)) / beta;
  return x * beta > threshold ? x : soft;
}
template <class T>
DEVICE T softshrink(T x, T lambda) {
  return x > lambda ? x - lambda : x < -lambda ? x + lambda : x != x ? x : T(0);
}
template <class T>
DEVICE T gelu(T x) {
  return x * T(0.5) * (1 + erf(x * T(0.7071067811865476)));
}
// tanh(sqrt(2 / pi) (x + 0.044715 x^3)), the middle of the approximation
template <class T>
DEVICE T gelu_tanh_inner(T x) {
  return tanh(T(0.7978845608028654) * (x + T(0.044715) * x * x * x));
}
template <class T>
DEVICE T gelu_tanh(T x) {
  return T(0.5) * x * (1 + gelu_tanh_inner(x));
}

// ---- derivatives

template <class T>
DEVICE T gelu_backward(T grad, T x) {
  const T cdf = T(0.5) * (1 + erf(x * T(0.7071067811865476)));
  const T density = exp(T(-0.5) * x * x) * T(0.3989422804014327);
  return grad * (cdf + x * density);
}
#if defined(TSFUSER_HOST)
// With one exponential for both: erfc(z) = exp(-z^2) P(1 / (1 + p z)), the form of Abramowitz and Stegun
// 7.1.26, P fitted to a relative error of 1.4e-7.
DEVICE float gelu_backward(float grad, float x) {
  const float e = exp(-0.5f * x * x);
  const float t = 1 / (1 + 0.3275911f * 0.70710678f * fabs(x));
  const float upper = 0.449072239f + t * (-0.401826245f + t * (0.494535589f + t * -0.140652891f));
  const float lower =
      0.185041354f + t * (0.180884373f + t * (0.20504392f + t * (0.0279017977f + t * upper)));
  const float tail = 0.5f * e * (t * lower);
  const float cdf = x < 0 ? tail : 1 - tail;
  return grad * (cdf + x * (e * 0.3989422804f));
}
#endif
template <class T>
DEVICE T gelu_tanh_backward(T grad, T x) {
  const T t = gelu_tanh_inner(x);
  const T slope = T(0.7978845608028654) * (1 + 3 * T(0.044715) * x * x);
  return grad * (T(0.5) * (1 + t) + T(0.5) * x * (1 - t * t) * slope);
}
template <class T>
DEVICE T silu_backward(T grad, T x) {
  const T s = sigmoid(x);
  return grad * s * (1 + x * (1 - s));
}
template <class T>
DEVICE T mish_backward(T grad, T x) {
  const T s = sigmoid(x), t = tanh(log1p(exp(x)));
  return grad * (t + x * s * (1 - t * t));
}
// Where x is NaN, CUDA's derivatives below hand the gradient on; those of the CPU are 0, or NaN by a
// product.
#if defined(TSFUSER_CUDA)
template <class T>
DEVICE bool is_upper(T x, T bound) {
  return !(x < bound);
}
template <class T>
DEVICE bool is_above(T x, T bound) {
  return !(x <= bound);
}
template <class T>
DEVICE T hardtanh_backward(T grad, T x, T low, T high) {
  return x <= low || x >= high ? T(0) : grad;
}
template <class T>
DEVICE T hardshrink_backward(T grad, T x, T bound) {
  return fabs(x) <= bound ? T(0) : grad;
}
#else
template <class T>
DEVICE bool is_upper(T x, T bound) {
  return x >= bound;
}
template <class T>
DEVICE bool is_above(T x, T bound) {
  return x > bound;
}
template <class T>
DEVICE T hardtanh_backward(T grad, T x, T low, T high) {
  return x > low && x < high ? grad : T(0);
}
template <class T>
DEVICE T hardshrink_backward(T grad, T x, T bound) {
  return fabs(x) > bound ? grad : T(0);
}
#endif
template <class T>
DEVICE T hardswish_backward(T grad, T x) {
  return x <= -3 ? T(0) : is_upper(x, T(3)) ? grad : grad * (2 * sixth(x) + T(0.5));
}
template <class T>
DEVICE T softplus_backward(T grad, T x, T beta, T threshold) {
  const T z = exp(x * beta);
  return x * beta > threshold ? grad : over(grad * z, z + 1);
}
template <class T>
DEVICE T elu_backward(T grad, T x, T alpha, T scale, T input_scale) {
  const T power = exp(x * input_scale);
  return is_above(x, T(0)) ? grad * scale : grad * input_scale * (alpha * scale) * power;
}
template <class T>
DEVICE T elu_backward_of_result(T grad, T y, T alpha, T scale, T input_scale) {
  return is_above(y, T(0)) ? grad * scale : grad * input_scale * (y + alpha * scale);
}
template <class T>
DEVICE T logit_backward(T grad, T x) {
  return x < 0 || x > 1 ? not_a_number<T>() : grad / (x * (1 - x));
}
template <class T>
DEVICE T logit_backward(T grad, T x, T eps) {
  if (eps < 0) return logit_backward(grad, x);
  return x < eps || x > 1 - eps ? T(0) : grad / (x * (1 - x));
}
