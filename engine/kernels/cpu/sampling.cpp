// One token per row of logits. The order of operations and the meaning of the parameters: engine/sampler.py, steps 4 to 7.
#include <omp.h>

#include <vector>

#include "vectors.h"

extern "C" {
struct Sampling {  // mirrored by engine/kernels/cpu/ops.py
  float* logits;   // [rows][vocab], overwritten
  long rows, vocab;
  const float *temperature, *min_p;  // [rows]; temperature 0 is greedy
  const double* top_p;               // [rows]
  const int64_t* top_k;              // [rows]; 0 keeps all
  const double* u;                   // [rows], in [0, 1)
  int64_t* token_ids;                // [rows]
  float* highest;                    // [rows]: greatest logit, NaN where the row holds one
  int num_threads;
};
}

constexpr long BLOCK = 16 * LANES;  // ids whose weight is summed at once

static float find_highest(const float* x, long n) {
  v16f best = splat(-INFINITY);
  v16i is_nan = {};
  long i = 0;
  for (; i + LANES <= n; i += LANES) {
    v16f v = load<v16f>(x + i);
    best = select(v > best, v, best);
    is_nan |= v != v;
  }
  float highest = max_lanes(best);
  bool any_nan = false;
  for (int lane = 0; lane < LANES; lane++) any_nan |= is_nan[lane] != 0;
  for (; i < n; i++) {
    highest = std::max(highest, x[i]);
    any_nan |= x[i] != x[i];
  }
  return any_nan ? NAN : highest;
}

static void weigh(float* x, long n, float highest, float temperature) {
  float scale = LOG2_E / temperature;
  long i = 0;
  for (; i + LANES <= n; i += LANES) store(x + i, vexp2((load<v16f>(x + i) - highest) * scale));
  for (; i < n; i++) x[i] = vexp2(splat((x[i] - highest) * scale))[0];
}

static void drop_below(float* w, long n, float bound) {
  for (long i = 0; i < n; i++) w[i] = w[i] < bound ? 0.0f : w[i];
}

// The greatest b for which the measure of {w >= b} reaches `target`, 0 if none does. Weights are not negative, so their
// bits sort as they do: a radix selection over three times ten bits.
template <class Measure>
static float reach(const float* w, long n, double target, Measure&& measure) {
  double buckets[1024], above = 0;
  uint32_t prefix = 0;
  for (int shift = 20; shift >= 0; shift -= 10) {
    std::fill_n(buckets, 1024, 0.0);
    for (long i = 0; i < n; i++) {
      uint32_t bits = load<uint32_t>(w + i);
      if (shift == 20 || bits >> (shift + 10) == prefix) buckets[bits >> shift & 1023] += measure(w[i]);
    }
    long bucket = 1023;
    while (bucket > 0 && above + buckets[bucket] < target) above += buckets[bucket--];
    prefix = prefix << 10 | bucket;
  }
  return load<float>(&prefix);
}

static int64_t draw(float* w, long n, double u, std::vector<double>& sums) {
  sums.clear();
  double total = 0;
  for (long b = 0; b < n; b += BLOCK) {
    v16f sum = {};
    long i = b, end = std::min(n, b + BLOCK);
    for (; i + LANES <= end; i += LANES) sum += load<v16f>(w + i);
    double block = sum_lanes(sum);
    for (; i < end; i++) block += w[i];
    sums.push_back(block);
    total += block;
  }
  double left = u * total;
  long b = 0;
  for (; b + 1 < (long)sums.size() && left >= sums[b]; b++) left -= sums[b];
  int64_t last = -1;  // rounding may leave something over: then the last possible token
  for (long i = b * BLOCK; i < n; i++) {
    if (w[i] == 0) continue;
    last = i;
    if (left < w[i]) return i;
    left -= w[i];
    if ((i + 1) % BLOCK == 0) break;
  }
  for (long i = b * BLOCK; last < 0 && i-- > 0;)
    if (w[i] > 0) last = i;
  return last;
}

static void sample_row(const Sampling& s, long row, std::vector<double>& sums) {
  float* x = s.logits + row * s.vocab;
  float highest = s.highest[row] = find_highest(x, s.vocab);
  s.token_ids[row] = 0;
  if (!std::isfinite(highest)) return;
  if (s.temperature[row] == 0) {
    s.token_ids[row] = std::find(x, x + s.vocab, highest) - x;
    return;
  }
  weigh(x, s.vocab, highest, std::max(s.temperature[row], 1e-30f));
  if (s.min_p[row] > 0) drop_below(x, s.vocab, s.min_p[row]);
  if (s.top_k[row] > 0 && s.top_k[row] < s.vocab)
    drop_below(x, s.vocab, reach(x, s.vocab, s.top_k[row], [](float) { return 1.0; }));
  if (s.top_p[row] < 1) {
    double total = 0;
    for (long i = 0; i < s.vocab; i++) total += x[i];
    drop_below(x, s.vocab, reach(x, s.vocab, s.top_p[row] * total, [](float w) { return (double)w; }));
  }
  s.token_ids[row] = draw(x, s.vocab, s.u[row], sums);
}

extern "C" void sample(const Sampling* s) {
#pragma omp parallel num_threads(s->num_threads)
  {
    std::vector<double> sums;
#pragma omp for schedule(dynamic, 1)
    for (long row = 0; row < s->rows; row++) sample_row(*s, row, sums);
  }
}
