// Sixteen lanes of float on any machine: GCC vector extensions, intrinsics only where they have no spelling there.
// Without registers of 64 bytes (AVX-512) they are made of smaller ones, see wide.h.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

constexpr long LANES = 16;

// As many lanes as a register holds.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;  // SSE, NEON
#endif
typedef float vf __attribute__((vector_size(WIDTH * 4)));
typedef int32_t vi __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t vu __attribute__((vector_size(WIDTH * 4)));

template <class To, class V>
static inline To convert(V x) {
  return __builtin_convertvector(x, To);
}
#if defined(__AVX512F__)
typedef vf v16f;
typedef vi v16i;
typedef vu v16u;
typedef uint16_t v16h __attribute__((vector_size(32)));
typedef int8_t v16b __attribute__((vector_size(16)));
#else
#include "wide.h"
typedef Lanes<float, 16>::type v16f;
typedef Lanes<int32_t, 16>::type v16i;
typedef Lanes<uint32_t, 16>::type v16u;
typedef Lanes<uint16_t, 16>::type v16h;
typedef Lanes<int8_t, 16>::type v16b;
#endif

struct bf16 {
  uint16_t bits;
};

template <class V>
static inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
static inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

static inline v16f splat(float x) { return x - (v16f){}; }
static inline v16f load_floats(const float* p) { return load<v16f>(p); }
static inline v16f load_floats(const bf16* p) {
  return (v16f)(convert<v16u>(load<v16h>(p)) << 16);
}

static inline void store_floats(float* p, v16f v) { store(p, v); }
static inline void store_floats(bf16* p, v16f v) {
#if defined(__AVX512BF16__)
  store(p, _mm512_cvtneps_pbh((__m512)v));
#else
  v16u u = (v16u)v;  // round to nearest even
  store(p, convert<v16h>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16));
#endif
}

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  uint32_t u = (uint32_t)x.bits << 16;
  return load<float>(&u);
}
static inline void from_float(float* p, float x) { *p = x; }
static inline void from_float(bf16* p, float x) {
  uint32_t u = load<uint32_t>(&x);
  p->bits = (u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0 : (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
}

static inline float sum_lanes(v16f v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0;
  for (int i = 0; i < LANES; i++) s += v[i];
  return s;
#endif
}
static inline float max_lanes(v16f v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < LANES; i++) m = std::max(m, v[i]);
  return m;
#endif
}
static inline bool any_above(v16f v, float bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)v, (__m512)splat(bound), _CMP_GT_OQ);
#else
  return max_lanes(v) > bound;
#endif
}
static inline v16f select(v16i mask, v16f a, v16f b) { return (v16f)((mask & (v16i)a) | (~mask & (v16i)b)); }
static inline v16f larger(v16f a, v16f b) {  // b where a is NaN
#if defined(__AVX512F__)
  return (v16f)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(a > b, a, b);
#endif
}

// 2^x for x <= 127: 2^n * 2^f with f in [-0.5, 0.5] by the polynomial of degree 5 with the least relative error, 1e-7,
// that is 1 at 0. Below -149 the result is 0; NaN stays NaN.
static inline v16f vexp2(v16f x) {
#if defined(__AVX512DQ__)
  v16f f = (v16f)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);  // 0 of infinity
#else
  x = select(x < -200.0f, splat(-200.0f), x);  // NaN stays NaN
  v16f r = x + 12582912.0f;  // rounds to an integer in the low mantissa bits
  v16f f = x - (r - 12582912.0f);
#endif
  v16f p = f * 1.3264727e-3f + 9.6715127e-3f;
  p = p * f + 5.5507337e-2f;
  p = p * f + 2.4022242e-1f;
  p = p * f + 6.9314698e-1f;
  p = p * f + 1.0f;
#if defined(__AVX512DQ__)
  return (v16f)_mm512_scalef_ps((__m512)p, (__m512)(x - f));
#else
  v16i n = (v16i)r - 0x4B400000;
  v16f y = (v16f)((v16i)p + (n << 23));
  y = select(n < -126, (v16f){}, y);
  return select(x == x, y, x);
#endif
}
constexpr float LOG2_E = 1.44269504088896341f;
