// What lies between the products of a layer, on one row: norms, activations, sums.
#pragma once
#include "vectors.h"

// y = x / rms(x) * weight (arXiv 1910.07467)
template <class T>
static void rms_norm(const float* x, const float* weight, T* y, long n, float eps) {
  v16f squares = {};
  long i = 0;
  for (; i + LANES <= n; i += LANES) {
    v16f v = load<v16f>(x + i);
    squares += v * v;
  }
  float sum = sum_lanes(squares);
  for (long j = i; j < n; j++) sum += x[j] * x[j];
  float scale = 1.0f / std::sqrt(sum / n + eps);
  for (i = 0; i + LANES <= n; i += LANES) store_floats(y + i, load<v16f>(x + i) * scale * load<v16f>(weight + i));
  for (; i < n; i++) from_float(y + i, x[i] * scale * weight[i]);
}

// y = (x - mean(x)) / deviation(x) * weight + bias, which may be null (arXiv 1607.06450)
template <class T>
static void layer_norm(const float* x, const float* weight, const float* bias, T* y, long n, float eps) {
  v16f sums = {}, squares = {};
  long i = 0, whole = n / LANES * LANES;
  for (; i < whole; i += LANES) sums += load<v16f>(x + i);
  float sum = sum_lanes(sums);
  for (; i < n; i++) sum += x[i];
  float mean = sum / n;
  for (i = 0; i < whole; i += LANES) {
    v16f v = load<v16f>(x + i) - mean;
    squares += v * v;
  }
  float variance = sum_lanes(squares);
  for (; i < n; i++) variance += (x[i] - mean) * (x[i] - mean);
  float scale = 1.0f / std::sqrt(variance / n + eps);
  for (i = 0; i < n; i++) from_float(y + i, (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.0f));
}

template <class T>
static void copy_row(const float* x, T* y, long n) {
  long i = 0;
  for (; i + LANES <= n; i += LANES) store_floats(y + i, load<v16f>(x + i));
  for (; i < n; i++) from_float(y + i, x[i]);
}

// to += values + bias, or to = values + bias; `columns` from `first` on, of n
static inline void put(float* to, const float* values, const float* bias, long first, long columns, long n, bool adds) {
  long end = std::min(n, first + columns);
  if (!adds && !bias)
    std::memcpy(to + first, values, (end - first) * sizeof(float));
  else if (adds)
    for (long c = first; c < end; c++) to[c] += values[c - first] + (bias ? bias[c] : 0.0f);
  else
    for (long c = first; c < end; c++) to[c] = values[c - first] + (bias ? bias[c] : 0.0f);
}

enum Activation : int { SILU, GELU, GELU_TANH, RELU, RELU2 };  // in the order of engine/kernels/cpu/ops.py

// x / (1 + e^-z): x times the logistic function of z
static inline v16f logistic(v16f x, v16f z) { return x / (1.0f + vexp2(select(z > -80.0f, z, splat(-80.0f)) * -LOG2_E)); }

// x * (1 + erf(x / sqrt(2))) / 2, with an error below 2e-7 * |x| (Abramowitz and Stegun, 7.1.26)
static inline v16f gelu(v16f x) {
  v16f z = larger(x, -x) * 0.70710678f;
  v16f t = 1.0f / (1.0f + 0.3275911f * z);
  v16f p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = (p * t + 0.254829592f) * t;
  v16f square = z * z;
  v16f tail = 0.5f * p * vexp2(select(square < 100.0f, square, splat(100.0f)) * -LOG2_E);  // half of 1 - erf(z)
  return x * select(x > 0.0f, 1.0f - tail, tail);
}

static inline v16f activate(int activation, v16f x) {
  switch (activation) {
    case GELU:
      return gelu(x);
    case GELU_TANH:  // (1 + tanh(y)) / 2 is the logistic function of 2y
      return logistic(x, 1.5957691216057308f * (x + 0.044715f * x * x * x));
    case RELU:
      return select(x > 0.0f, x, (v16f){});
    case RELU2:
      return select(x > 0.0f, x * x, (v16f){});
    default:
      return logistic(x, x);
  }
}
