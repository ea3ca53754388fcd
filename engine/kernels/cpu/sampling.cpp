// One token per row of logits. The order of operations and the meaning of the parameters: engine/sampler.py, steps 4 to 7.
//
// Weights are relative to the likeliest token's. Real distributions are peaked: what top_k and top_p keep lies nearly always
// among the few tokens above LIKELY, which one pass collects. Selection runs on those when it provably finds the same there.
#include <omp.h>

#include <limits>
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
constexpr float LIKELY = 1e-4f;

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

static double sum_at_least(const float* w, long n, float bound) {
  double sums[LANES] = {};
  long i = 0;
  for (; i + LANES <= n; i += LANES)
    for (long lane = 0; lane < LANES; lane++) sums[lane] += w[i + lane] >= bound ? w[i + lane] : 0.0f;
  double sum = 0;
  for (int lane = 0; lane < LANES; lane++) sum += sums[lane];
  for (; i < n; i++) sum += w[i] >= bound ? w[i] : 0.0f;
  return sum;
}

// Tokens that may still be drawn, in order of their ids. The buffers belong to one thread.
struct Candidates {
  std::vector<float> weights;
  std::vector<int32_t> ids;
  long count;

  void collect(const float* w, long n, float bound) {
    if ((long)ids.size() < n + LANES) weights.resize(n + LANES), ids.resize(n + LANES);
    count = 0;
    long i = 0;
#if defined(__AVX512F__)
    const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (; i + LANES <= n; i += LANES) {
      __m512 v = load<__m512>(w + i);
      __mmask16 is_kept = _mm512_cmp_ps_mask(v, (__m512)splat(bound), _CMP_GE_OQ);
      if (!is_kept) continue;
      store(&weights[count], _mm512_maskz_compress_ps(is_kept, v));
      store(&ids[count], _mm512_maskz_compress_epi32(is_kept, (__m512i)(lane + (int32_t)i)));
      count += __builtin_popcount(is_kept);
    }
#endif
    for (; i < n; i++) put(w[i], i, bound);
  }
  void keep(float bound) {
    long n = count;
    count = 0;
    for (long i = 0; i < n; i++) put(weights[i], ids[i], bound);
  }
  double sum() const { return sum_at_least(weights.data(), count, 0); }

 private:
  void put(float weight, int32_t id, float bound) {  // without a branch
    weights[count] = weight;
    ids[count] = id;
    count += weight >= bound;
  }
};

// The greatest b for which the measure of {weights >= b} reaches `target`, 0 if none does. Weights are not negative, so their
// bits sort as they do: a radix selection over three times ten bits.
template <class Measure>
static float reach(const Candidates& candidates, double target, Measure&& measure) {
  double buckets[1024], above = 0;
  uint32_t prefix = 0;
  for (int shift = 20; shift >= 0; shift -= 10) {
    std::fill_n(buckets, 1024, 0.0);
    for (long i = 0; i < candidates.count; i++) {
      float weight = candidates.weights[i];
      uint32_t bits = load<uint32_t>(&weight);
      if (shift == 20 || bits >> (shift + 10) == prefix) buckets[bits >> shift & 1023] += measure(weight);
    }
    long bucket = 1023;
    while (bucket > 0 && above + buckets[bucket] < target) above += buckets[bucket--];
    prefix = prefix << 10 | bucket;
  }
  return load<float>(&prefix);
}

static void drop_below(float* w, long n, float bound) {
  for (long i = 0; bound > 0 && i < n; i++) w[i] = w[i] >= bound ? w[i] : 0.0f;
}

static int64_t draw(const float* w, long n, double u) {
  static thread_local std::vector<double> sums;
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

static int64_t draw(const Candidates& candidates, double u) {
  double left = u * candidates.sum();
  long i = 0;
  for (; i + 1 < candidates.count && left >= candidates.weights[i]; i++) left -= candidates.weights[i];
  return candidates.ids[i];
}

// Leaves what min_p, top_k and top_p keep, in this order.
static void select_candidates(const float* w, long n, float min_p, long top_k, double top_p, Candidates& candidates) {
  float lowest = std::max(min_p, std::numeric_limits<float>::denorm_min());
  float bound = top_k < n || top_p < 1 ? std::max(lowest, LIKELY) : lowest;
  candidates.collect(w, n, bound);
  if (top_k < n) {
    if (candidates.count < top_k && bound > lowest) candidates.collect(w, n, bound = lowest);
    candidates.keep(reach(candidates, top_k, [](float) { return 1.0; }));
    bound = lowest;  // nothing that is missing would have been kept
  }
  if (top_p < 1) {
    double found = candidates.sum(), target = top_p * (bound > lowest ? sum_at_least(w, n, lowest) : found);
    if (found < target * (1 + 1e-12) && bound > lowest) candidates.collect(w, n, lowest);
    candidates.keep(reach(candidates, target, [](float weight) { return (double)weight; }));
  }
}

static void sample_row(const Sampling& s, long row) {
  float* x = s.logits + row * s.vocab;
  float highest = s.highest[row] = find_highest(x, s.vocab);
  s.token_ids[row] = 0;
  if (!std::isfinite(highest)) return;
  if (s.temperature[row] == 0) {
    s.token_ids[row] = std::find(x, x + s.vocab, highest) - x;
    return;
  }
  weigh(x, s.vocab, highest, std::max(s.temperature[row], 1e-30f));
  long top_k = s.top_k[row] > 0 ? s.top_k[row] : s.vocab;
  if (top_k >= s.vocab && s.top_p[row] >= 1) {
    drop_below(x, s.vocab, s.min_p[row]);
    s.token_ids[row] = draw(x, s.vocab, s.u[row]);
    return;
  }
  static thread_local Candidates candidates;
  select_candidates(x, s.vocab, s.min_p[row], top_k, s.top_p[row], candidates);
  s.token_ids[row] = draw(candidates, s.u[row]);
}

extern "C" void sample(const Sampling* s) {
#pragma omp parallel for num_threads(std::max(1l, std::min<long>(s->rows, s->num_threads))) schedule(dynamic, 1)
  for (long row = 0; row < s->rows; row++) sample_row(*s, row);
}
