// Products with weights of 8 or 4 bits: value = scale * q + minimum in groups of 32 along k, q unsigned.
//
// Packed weights [n, k], k a multiple of 32, in panels of 16 output rows; a quad is 4 consecutive k:
//     q, 8 bits: panel[k / 32][8 quads][16][4]
//     q, 4 bits: panel[k / 32][4][16][4], a byte holds quad j in its low and quad j + 4 in its high half
//     scale, minimum: float16 panel[k / 32][16]
// Activations are rounded to 8 bits in the same groups, x = x_scale * x_q, so that for each group
//     sum of value * x = scale * x_scale * (sum of q * x_q) + minimum * (x_scale * sum of x_q)
// where the sums of q run in integers (VNNI). Symmetric weights, minimum = -2^(bits - 1) * scale, store no minimum: their sums
// start at -2^(bits - 1) * sum of x_q. As in matmul.h, the order of sums does not depend on the number of rows.
#pragma once
#include "matmul.h"

constexpr long GROUP = 32;

static inline float half_to_float(uint16_t half) {
  uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, mantissa = half & 1023;
  float magnitude = exponent ? std::ldexp((float)(mantissa | 1024), (int)exponent - 25) : std::ldexp((float)mantissa, -24);
  return sign ? -magnitude : magnitude;
}
static inline vf load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__F16C__) && defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(load<__m128i>(p));
#else
  vf v;
  for (int i = 0; i < WIDTH; i++) v[i] = half_to_float(p[i]);
  return v;
#endif
}

// acc += w[lane][0] * x[0] + … + w[lane][3] * x[3], w unsigned and x signed bytes
static inline vi dot_quad(vi acc, vu w, const int8_t* x) {
#if defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(load<int32_t>(x)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  __m256i quads = _mm256_set1_epi32(load<int32_t>(x));  // bytes 0 and 2, then 1 and 3, as pairs of 16 bits
  __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(quads, 8), 8), odd = _mm256_srai_epi16(quads, 8);
  acc += (vi)_mm256_madd_epi16((__m256i)(w & 0x00ff00ffu), even);
  return acc + (vi)_mm256_madd_epi16((__m256i)(w >> 8 & 0x00ff00ffu), odd);
#else
  for (int i = 0; i < 4; i++) acc += (vi)(w >> (8 * i) & 255u) * (int32_t)x[i];
  return acc;
#endif
}

// Rows of activations, rounded: q [k], then per group of 32 the scale, the sum of q and scale * sum. Rows lie `row_bytes` apart
// whatever k is: threads that take rows of their own through several products never meet.
struct QuantisedRows {
  char* data;
  long row_bytes, k;

  static long bytes(long k) { return k + k / GROUP * 3 * sizeof(float); }
  int8_t* q(long row) const { return (int8_t*)(data + row * row_bytes); }
  float* scale(long row) const { return (float*)(data + row * row_bytes + k); }
  int32_t* sum(long row) const { return (int32_t*)scale(row) + k / GROUP; }
  float* scaled_sum(long row) const { return scale(row) + 2 * (k / GROUP); }

  template <class T>
  void write(long row, const T* x) const {
    int8_t* to = q(row);
    for (long g = 0; g < k / GROUP; g++) {
      v16f a = load_floats(x + g * GROUP), b = load_floats(x + g * GROUP + LANES);
      v16f highest = select(a > -a, a, -a), other = select(b > -b, b, -b);
      float s = max_lanes(select(highest > other, highest, other)) / 127.0f;
      if (!std::isfinite(sum_lanes(a + b))) s = NAN;  // shows in the result
      v16f inverse = splat(s > 0 ? 1.0f / s : 0.0f);
      v16i qa = nearest(a * inverse), qb = nearest(b * inverse);
      store(to + g * GROUP, convert<v16b>(qa));
      store(to + g * GROUP + LANES, convert<v16b>(qb));
      scale(row)[g] = s;
      float total = sum_lanes(convert<v16f>(qa + qb));
      sum(row)[g] = (int32_t)total;
      scaled_sum(row)[g] = s * total;
    }
  }

 private:
  static v16i nearest(v16f x) {  // |x| is at most 127
    return (v16i)(x + 12582912.0f) - 0x4B400000;
  }
};

template <int BITS, bool SYMMETRIC, int M, int P>
static void quantised_tile(const QuantisedRows& x, long row, const uint8_t* q, const uint16_t* scale,
                           const uint16_t* minimum, float* y, long ldy, Prefetch& shared_prefetch) {
  long groups = x.k / GROUP, panel_bytes = x.k * LANES * BITS / 8, panel_scales = groups * LANES, ldx = x.row_bytes;
  const int8_t* xq = x.q(row);
  const char *x_scale = (const char*)x.scale(row), *x_sum = (const char*)x.sum(row), *scaled = (const char*)x.scaled_sum(row);
  // With many rows the state of the prefetch would take the registers of the sums: it stays in memory, and is seldom used.
  constexpr bool many = M > 3;
  Prefetch own_prefetch = shared_prefetch, &prefetch = many ? shared_prefetch : own_prefetch;
  vf acc[M][P * PARTS] = {};
  for (long g = 0; g < groups; g++, xq += GROUP) {
    if (many) prefetch.step(BITS);
    vi sum[M][P * PARTS];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      vi start = {};
      if (SYMMETRIC) start -= (int32_t)(load<uint32_t>(x_sum + m * ldx + g * sizeof(float)) << (BITS - 1));
#pragma GCC unroll 8
      for (int p = 0; p < P * PARTS; p++) sum[m][p] = start;
    }
#pragma GCC unroll 8
    for (long j = 0; j < BITS; j++, q += 64) {
      vu w[P * PARTS], high[P * PARTS];
#pragma GCC unroll 8
      for (int p = 0; p < P * PARTS; p++) {
        w[p] = load<vu>(q + p / PARTS * panel_bytes + p % PARTS * sizeof(vu));
        if (BITS == 4) high[p] = w[p] >> 4 & 0x0f0f0f0fu, w[p] &= 0x0f0f0f0fu;
      }
      if (!many) prefetch.step();
#pragma GCC unroll 8
      for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int p = 0; p < P * PARTS; p++) {
          sum[m][p] = dot_quad(sum[m][p], w[p], xq + m * ldx + 4 * j);
          if (BITS == 4) sum[m][p] = dot_quad(sum[m][p], high[p], xq + m * ldx + 4 * j + 16);
        }
    }
#pragma GCC unroll 8
    for (int p = 0; p < P * PARTS; p++) {
      long at = p / PARTS * panel_scales + g * LANES + p % PARTS * WIDTH;
      vf s = load_halves(scale + at), low = {};
      if (!SYMMETRIC) low = load_halves(minimum + at);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        acc[m][p] += convert<vf>(sum[m][p]) * (s * load<float>(x_scale + m * ldx + g * sizeof(float)));
        if (!SYMMETRIC) acc[m][p] += low * load<float>(scaled + m * ldx + g * sizeof(float));
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int p = 0; p < P * PARTS; p++) store(y + m * ldy + p * WIDTH, acc[m][p]);
  if (!many) shared_prefetch = own_prefetch;
}

using QuantisedTile = void (*)(const QuantisedRows&, long, const uint8_t*, const uint16_t*, const uint16_t*, float*, long,
                               Prefetch&);

template <int BITS, bool SYMMETRIC>
static QuantisedTile quantised_tile_function(long rows, long panels) {
#define TILE(M, P) quantised_tile<BITS, SYMMETRIC, M, P>
#define ROW(M) {TILE(M, 1), TILE(M, 2), TILE(M, 3), TILE(M, 4)}
  static const QuantisedTile table[6][4] = {ROW(1), ROW(2), ROW(3), ROW(4), ROW(5), ROW(6)};
#undef ROW
#undef TILE
  return table[rows - 1][panels - 1];
}

static QuantisedTile quantised_tile_function(int bits, bool symmetric, long rows, long panels) {
  auto choose = bits == 8 ? (symmetric ? quantised_tile_function<8, true> : quantised_tile_function<8, false>)
                          : (symmetric ? quantised_tile_function<4, true> : quantised_tile_function<4, false>);
  return choose(rows, panels);
}

struct QuantisedWeights {
  const uint8_t* q;
  const uint16_t *scale, *minimum;  // minimum: null when symmetric
  long n, k;
  int bits;
  long panels() const { return (n + LANES - 1) / LANES; }
  const uint8_t* panel(long p) const { return q + p * LANES * k * bits / 8; }
  void read_row(long row, float* out) const {
    long p = row / LANES, lane = row % LANES;
    for (long g = 0; g < k / GROUP; g++, out += GROUP) {
      long at = (p * (k / GROUP) + g) * LANES + lane;
      float s = half_to_float(scale[at]), low = minimum ? half_to_float(minimum[at]) : -s * (1 << (bits - 1));
      const uint8_t* quads = panel(p) + (g * bits * LANES + lane) * 4;
      for (long i = 0; i < GROUP; i++) {
        int byte = quads[i / 4 % bits * LANES * 4 + i % 4];
        out[i] = s * (bits == 8 ? byte : i < GROUP / 2 ? byte & 15 : byte >> 4) + low;
      }
    }
  }
};

// As matmul() of matmul.h.
template <class Epilogue>
static void quantised_matmul(const QuantisedRows& x, const QuantisedWeights& w, long row0, long row1, const Claims& claims,
                             Epilogue&& epilogue) {
  if (row0 >= row1) return;
  constexpr long most_rows = 6, most_panels = 4;
  alignas(64) float y[most_rows][most_panels * LANES];
  // Panels at once: sums and totals fill 32 registers; without AVX-512 the sums of a panel fill 12 of 16.
  const long most = PARTS == 1 && row1 - row0 <= 3 ? 4 : 2, at_once = PARTS == 1 ? most : 1;
  long tiles = (row1 - row0 + most_rows - 1) / most_rows, groups = w.k / GROUP;
  for (Group group = claims.next(most), following; group.count > 0; group = following) {
    following = claims.next(most);
    long p = group.first, panels = group.count;
    const void* next = w.panel(following.first);
    Prefetch prefetch{&next, following.count > 0, most * LANES * w.k * w.bits / 8, (int)std::max(1l, (most + tiles - 1) / tiles)};
    for (long m = row0; m < row1; m += most_rows) {
      long rows = std::min(most_rows, row1 - m), first_scale = p * groups * LANES;
      for (long i = 0; i < panels; i += at_once, first_scale += at_once * groups * LANES) {
        const uint16_t* minimum = w.minimum ? w.minimum + first_scale : nullptr;
        quantised_tile_function(w.bits, !minimum, rows, std::min(at_once, panels - i))(
            x, m, w.panel(p + i), w.scale + first_scale, minimum, y[0] + i * LANES, most_panels * LANES, prefetch);
      }
      for (long r = 0; r < rows; r++) epilogue(m + r, p * LANES, panels * LANES, y[r]);
    }
  }
}
