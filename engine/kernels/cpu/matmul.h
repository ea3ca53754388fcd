// Products of a few or many rows with weights packed for this machine.
//
// Packed weights [n, k]: panels of 16 output rows, each contiguous, the last one padded with zeros:
//     float: panel[k][16]            bfloat16: panel[k / 2][16][2]   (odd k padded with a zero)
// One vector of weights is loaded once and used for up to ROWS rows. Each output element is summed over k in order,
// whatever the number of rows: results do not depend on what else is in the batch.
#pragma once
#include <atomic>

#include "vectors.h"

constexpr int ROWS = 6;
constexpr int PARTS = LANES / WIDTH;  // registers that a vector of weights fills
#if defined(__AVX512F__)
constexpr int PANELS = 4;  // 24 sums of 32 registers
static constexpr long panels_at_once(long) { return PANELS; }
#else
constexpr int PANELS = 2;
static constexpr long panels_at_once(long rows) { return rows <= 2 ? PANELS : 1; }  // AVX2: 8 or 12 sums of 16 registers
#endif

template <class T>
struct Pair;  // how many k one vector of weights spans
template <>
struct Pair<float> {
  static constexpr long k = 1;
};
template <>
struct Pair<bf16> {
  static constexpr long k = 2;
};

static inline vf dot(vf acc, vf w, const float* x) { return acc + w * *x; }
#if defined(__AVX512BF16__)
static inline vf dot(vf acc, vi w, const bf16* x) {
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)w, (__m512bh)_mm512_set1_epi32(load<int32_t>(x)));
}
#else
static inline vf dot(vf acc, vi w, const bf16* x) {
  acc += (vf)((vu)w << 16) * to_float(x[0]);
  return acc + (vf)((vu)w & 0xffff0000u) * to_float(x[1]);
}
#endif
static inline vf load_weights(const float* p) { return load<vf>(p); }
static inline vi load_weights(const bf16* p) { return load<vi>(p); }

// Memory that will be needed soon, fetched into the second-level cache a few lines at a time while something else is
// computed, so that the memory bus never rests. A burst would stall the computation instead.
struct Prefetch {
  const void* const* regions;
  long num_regions, bytes;  // of each region
  int lines_at_once;
  long offset = 0;

  void spread_over(long steps) { lines_at_once = (int)(num_regions * bytes / 64 / std::max(1l, steps) + 1); }
  void step(int times = 1) {
    for (int i = 0; i < lines_at_once * times && num_regions > 0; i++) {
      __builtin_prefetch((const char*)*regions + offset, 0, 2);
      offset += 64;
      if (offset >= bytes) offset = 0, regions++, num_regions--;
    }
  }
};

// y[m][p * 16 ...] = sum over segments s of x[m][s * k ...] . panels[s * stride + p]
template <class T, int M, int P>
static void tile(const T* x, long ldx, const T* const* panels, long stride, long segments, long k, float* y, long ldy,
                 Prefetch& shared_prefetch) {
  Prefetch prefetch = shared_prefetch;  // a copy that no store can alias
  vf acc[M][P * PARTS];  // in registers only when every loop over it is unrolled
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int p = 0; p < P * PARTS; p++) acc[m][p] = (vf){};
  for (long s = 0; s < segments; s++, x += k, panels += stride) {
    const T* w[P];
    for (int p = 0; p < P; p++) w[p] = panels[p];
    for (long i = 0; i < k; i += Pair<T>::k) {
      decltype(load_weights(w[0])) wv[P * PARTS];
#pragma GCC unroll 8
      for (int p = 0; p < P * PARTS; p++)
        wv[p] = load_weights(w[p / PARTS] + i * LANES + p % PARTS * WIDTH * Pair<T>::k);
      prefetch.step();
#pragma GCC unroll 8
      for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int p = 0; p < P * PARTS; p++) acc[m][p] = dot(acc[m][p], wv[p], x + m * ldx + i);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 8
    for (int p = 0; p < P * PARTS; p++) store(y + m * ldy + p * WIDTH, acc[m][p]);
  shared_prefetch = prefetch;
}

template <class T>
using TileFunction = void (*)(const T*, long, const T* const*, long, long, long, float*, long, Prefetch&);

template <class T>
static TileFunction<T> tile_function(long rows, long panels) {
#define ROW(M) {tile<T, M, 1>, tile<T, M, 2>, tile<T, M, PANELS - 1>, tile<T, M, PANELS>}
  static const TileFunction<T> table[ROWS][4] = {ROW(1), ROW(2), ROW(3), ROW(4), ROW(5), ROW(6)};
#undef ROW
  return table[rows - 1][panels - 1];
}

template <class T>
struct Packed {
  const T* data;  // [panels][k][16]
  long n, k;      // k is even for bfloat16
  const T* panel(long p) const { return data + p * LANES * k; }
};

// Panels [first, end) that are left of one thread's part of the product number `product`, in one word.
struct alignas(64) Part {
  std::atomic<uint64_t> left{0};

  static uint64_t word(uint64_t product, uint64_t first, uint64_t end) { return product << 48 | first << 24 | end; }
};
struct Group {
  long first, count;
};

// What a thread computes of a product: its own part from the front, and when that is done, of others' parts from the end,
// even if they have not begun. So a thread that is slow or does not run holds up the others by no more than the two
// groups that it has taken. Whoever computes a panel, the result is the same. Between products is a barrier.
struct Claims {
  Part* parts;
  int thread, threads;
  uint64_t product;       // its number since `parts` were made, from 1
  long num_panels, unit;  // parts begin at a multiple of `unit`

  long part_begin(int t) const { return std::min(num_panels, (num_panels + unit - 1) / unit * t / threads * unit); }
  Group next(long most) const {
    for (int i = 0; i < threads; i++) {
      int t = (thread + i) % threads;
      for (uint64_t seen = parts[t].left;;) {
        uint64_t left = seen >> 48 == product ? seen : Part::word(product, part_begin(t), part_begin(t + 1));
        uint64_t first = left >> 24 & 0xffffff, end = left & 0xffffff, count = std::min<uint64_t>(most, end - first);
        if (first >= end) break;
        left = i == 0 ? Part::word(product, first + count, end) : Part::word(product, first, end - count);
        if (parts[t].left.compare_exchange_weak(seen, left)) return {(long)(i == 0 ? first : end - count), (long)count};
      }
    }
    return {0, 0};
  }
};

// Calls epilogue(row, first_column, columns, values) for each row of [row0, row1) and group of panels. `values` holds
// `columns` (a multiple of 16, padding included) float sums. While a group is computed the next one is fetched; `then`
// are weights that follow the last.
template <class T, class Epilogue>
static void matmul(const T* x, long ldx, const Packed<T>& w, long row0, long row1, const Claims& claims, const T* then,
                   Epilogue&& epilogue) {
  if (row0 >= row1) return;
  alignas(64) float y[ROWS][PANELS * LANES];
  long tiles = (row1 - row0 + ROWS - 1) / ROWS, group_bytes = PANELS * LANES * w.k * sizeof(T);
  for (Group group = claims.next(PANELS), following; group.count > 0; group = following) {
    following = claims.next(PANELS);
    long p = group.first, panels = group.count;
    const T* pointers[PANELS];
    for (long i = 0; i < panels; i++) pointers[i] = w.panel(p + i);
    const void* next = following.count > 0 ? w.panel(following.first) : then;
    Prefetch prefetch{&next, next != nullptr, group_bytes, (int)std::max(1l, (PANELS + tiles - 1) / tiles)};
    for (long m = row0; m < row1; m += ROWS) {
      long rows = std::min<long>(ROWS, row1 - m);
      for (long i = 0; i < panels; i += panels_at_once(rows))
        tile_function<T>(rows, std::min(panels_at_once(rows), panels - i))(
            x + m * ldx, ldx, pointers + i, 0, 1, w.k, y[0] + i * LANES, PANELS * LANES, prefetch);
      for (long r = 0; r < rows; r++) epilogue(m + r, p * LANES, panels * LANES, y[r]);
    }
  }
}
