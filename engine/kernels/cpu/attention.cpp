// Paged attention over any mix of prefill chunks and decodes, with GQA and sliding window.
//
// Layout of one layer's cache, chosen so that keys and values are panels of matmul.h; a group is 16 tokens of a block:
//     K: [num_blocks, num_kv_heads, groups, head_dim / pair, 16 tokens, pair]            (panel: 16 keys, k = head_dim)
//     V: [num_blocks, num_kv_heads, groups, head_dim / 16, 16 tokens / pair, 16, pair]   (panel: 16 dims, k = 16 tokens)
// with pair = 2 for bfloat16 and 1 for float.
//
// Softmax runs online (arXiv 2112.05682) over tiles of 64 keys at fixed positions, so that a token's result is the same
// bits whether it is computed alone, in a chunk, or beside other requests. Partial results of SPLIT keys each are merged
// in order: threads may compute them apart when there are few sequences.
#include <omp.h>

#include <vector>

#include "matmul.h"

constexpr long GROUPS_PER_TILE = 4, TILE = GROUPS_PER_TILE * LANES, SPLIT = 512;
constexpr float MINUS_INFINITY = -INFINITY;

extern "C" {
struct Attention {  // mirrored by engine/attention/cpu.py
  long num_heads, num_kv_heads, head_dim, block_size, max_blocks, num_tokens, num_units;
  int num_threads;
  const int32_t *query_start_loc, *seq_lens, *block_table;
  const int64_t* slot_mapping;
  const int32_t* units;         // [num_units][4]: sequence, kv head, first query token within its chunk, query tokens
  const int32_t* first_unit;    // [num_threads + 1]: units of each thread
};
}

template <class T>
struct Cache {
  T *k, *v;
  long kv_heads, head_dim, block_size;

  long group(long block, long head, long group_in_block) const {
    return ((block * kv_heads + head) * (block_size / LANES) + group_in_block) * LANES * head_dim;
  }
  void write(long slot, long head, const T* key, const T* value) const {
    constexpr long pair = Pair<T>::k;
    long offset = slot % block_size, t = offset % LANES;
    long base = group(slot / block_size, head, offset / LANES);
    T* kt = k + base + t * pair;
    for (long i = 0; i < head_dim; i += pair)
      for (long j = 0; j < pair; j++) kt[i * LANES + j] = key[i + j];
    T* vt = v + base + t / pair * pair * LANES + t % pair;
    for (long i = 0; i < head_dim; i++) vt[i / LANES * LANES * LANES + i % LANES * pair] = value[i];
  }
};

// Rows of one unit: query token r / group of query head r % group. All buffers belong to one thread.
template <class T>
struct Unit {
  long rows, dim;
  std::vector<T> q, p, edges;         // [rows][dim], [rows][TILE], one tile of values
  std::vector<float> s, out, merged;  // [rows][TILE], [rows][dim] of the split, of all splits before it
  std::vector<float> max, merged_max, merged_sum;
  std::vector<v16f> sum;
  std::vector<long> position;  // of each row's query token
  std::vector<const T*> panels;

  void start(long new_rows, long new_dim) {
    rows = new_rows, dim = new_dim;
    auto grow = [](auto& buffer, size_t n) {
      if (buffer.size() < n) buffer.resize(n);
    };
    grow(q, rows * dim), grow(p, rows * TILE), grow(edges, TILE * dim);
    grow(panels, TILE * dim / LANES);
    grow(s, rows * TILE), grow(out, rows * dim), grow(merged, rows * dim);
    grow(max, rows), grow(merged_max, rows), grow(merged_sum, rows), grow(sum, rows), grow(position, rows);
    std::fill_n(merged_max.begin(), rows, MINUS_INFINITY);
    std::fill_n(merged_sum.begin(), rows, 0.0f);
    std::fill_n(merged.begin(), rows * dim, 0.0f);
    start_split();
  }
  void start_split() {
    std::fill_n(max.begin(), rows, MINUS_INFINITY);
    std::fill_n(sum.begin(), rows, v16f{});
    std::fill_n(out.begin(), rows * dim, 0.0f);
  }
  void end_split() {
    for (long r = 0; r < rows; r++) {
      if (max[r] == MINUS_INFINITY) continue;
      float top = std::max(merged_max[r], max[r]);
      float a = std::exp2(merged_max[r] - top), b = std::exp2(max[r] - top);
      merged_sum[r] = merged_sum[r] * a + sum_lanes(sum[r]) * b;
      for (long d = 0; d < dim; d++) merged[r * dim + d] = merged[r * dim + d] * a + out[r * dim + d] * b;
      merged_max[r] = top;
    }
  }
};

// Scores of one tile -> probabilities relative to the running maximum; rescales what was summed before.
// `scale` holds the factor log2(e): exponentials are powers of two.
template <class T>
static void softmax_tile(Unit<T>& u, long first_key, long groups, long window, float scale) {
  const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (long r = 0; r < u.rows; r++) {
    // keys of the tile that this row sees: [low, high)
    long high = u.position[r] + 1 - first_key, low = std::max(0l, high - window);
    if (high <= 0 || low >= groups * LANES) {
      std::fill_n(u.p.begin() + r * TILE, groups * LANES, T{});
      continue;
    }
    float* s = &u.s[r * TILE];
    v16f best = splat(MINUS_INFINITY), x[GROUPS_PER_TILE];
    for (long g = 0; g < groups; g++) {
      v16i key = lane + (int32_t)(g * LANES);
      x[g] = load<v16f>(s + g * LANES) * scale;
      if (low > g * LANES || high < (g + 1) * LANES)
        x[g] = select((key >= (int32_t)low) & (key < (int32_t)std::min(high, TILE)), x[g], splat(MINUS_INFINITY));
      best = select(x[g] > best, x[g], best);
    }
    float top = std::max(u.max[r], max_lanes(best));
    float keep = top == u.max[r] ? 1.0f : std::exp2(u.max[r] - top);
    v16f sum = u.sum[r] * keep;
    for (long g = 0; g < groups; g++) {
      v16f e = vexp2(x[g] - top);
      store_floats(&u.p[r * TILE + g * LANES], e);
      sum += load_floats(&u.p[r * TILE + g * LANES]);
    }
    u.sum[r] = sum;
    u.max[r] = top;
    if (keep != 1.0f)
      for (long d = 0; d < u.dim; d++) u.out[r * u.dim + d] *= keep;
  }
}

// Columns of 16 for each of num_panels panels; segments, k and accumulate as in tile().
template <class T>
static void product(const T* x, long ldx, const T* const* panels, long num_panels, long segments, long k, float* y,
                    long ldy, long rows, bool accumulate, Prefetch& prefetch) {
  for (long p = 0; p < num_panels; p += PANELS) {
    long count = std::min<long>(PANELS, num_panels - p);
    for (long m = 0; m < rows; m += ROWS)
      tile_function<T>(std::min<long>(ROWS, rows - m), count)(x + m * ldx, ldx, panels + p, num_panels,
                                                             segments, k, y + m * ldy + p * LANES, ldy, accumulate,
                                                             prefetch);
  }
}

template <class T>
static void attend(const Attention& a, const Cache<T>& cache, const int32_t* unit, const T* q, T* out, float scale,
                   long window, Unit<T>& u) {
  long seq = unit[0], head = unit[1], first = unit[2], tokens = unit[3], dim = a.head_dim;
  long group = a.num_heads / a.num_kv_heads, start = a.query_start_loc[seq] + first;
  long context = a.seq_lens[seq] - (a.query_start_loc[seq + 1] - a.query_start_loc[seq]);
  u.start(tokens * group, dim);
  for (long r = 0; r < u.rows; r++) {
    u.position[r] = context + first + r / group;
    std::memcpy(&u.q[r * dim], q + ((start + r / group) * a.num_heads + head * group + r % group) * dim,
                dim * sizeof(T));
  }
  // keys that some row of the unit sees: [low, high)
  long high = context + first + tokens, low = std::max(0l, context + first + 1 - window);
  const int32_t* blocks = a.block_table + seq * a.max_blocks;
  long dim_panels = dim / LANES;

  for (long tile = low / TILE * TILE; tile < high; tile += TILE) {
    if (tile % SPLIT == 0 && tile > low) u.end_split(), u.start_split();
    long groups = std::min(GROUPS_PER_TILE, (high - tile + LANES - 1) / LANES), bases[GROUPS_PER_TILE];
    for (long g = 0; g < groups; g++) {
      long key = tile + g * LANES;
      bases[g] = cache.group(blocks[key / a.block_size], head, key % a.block_size / LANES);
      u.panels[g] = cache.k + bases[g];
    }
    const void* next[2 * GROUPS_PER_TILE];
    long num_next = 0;
    for (long key = tile + TILE; key < std::min(high, tile + 2 * TILE); key += LANES) {
      long base = cache.group(blocks[key / a.block_size], head, key % a.block_size / LANES);
      next[num_next++] = cache.k + base;
      next[num_next++] = cache.v + base;
    }
    Prefetch prefetch{next, num_next, LANES * dim * (long)sizeof(T), 4};
    product(u.q.data(), dim, u.panels.data(), groups, 1, dim, u.s.data(), TILE, u.rows, false, prefetch);
    softmax_tile(u, tile, groups, window, scale * LOG2_E);
    for (long g = 0; g < groups; g++) {
      long key = tile + g * LANES;
      const T* values = cache.v + bases[g];
      if (key < low || key + LANES > high) {  // never read what other requests left behind: 0 * NaN is NaN
        constexpr long pair = Pair<T>::k;
        for (long i = 0; i < LANES * dim; i++) {
          long t = key + i % (LANES * LANES) / (LANES * pair) * pair + i % pair;
          u.edges[g * LANES * dim + i] = t >= low && t < high ? values[i] : T{};
        }
        values = &u.edges[g * LANES * dim];
      }
      for (long p = 0; p < dim_panels; p++) u.panels[g * dim_panels + p] = values + p * LANES * LANES;
    }
    product(u.p.data(), TILE, u.panels.data(), dim_panels, groups, LANES, u.out.data(), dim, u.rows, true, prefetch);
  }
  u.end_split();
  for (long r = 0; r < u.rows; r++) {
    T* to = out + ((start + r / group) * a.num_heads + head * group + r % group) * dim;
    for (long d = 0; d < dim; d += LANES)
      store_floats(to + d, load<v16f>(&u.merged[r * dim + d]) / u.merged_sum[r]);
  }
}

template <class T>
static void attention(const Attention& a, T* k_cache, T* v_cache, const T* q, const T* k, const T* v, T* out,
                      float scale, long window) {
  Cache<T> cache{k_cache, v_cache, a.num_kv_heads, a.head_dim, a.block_size};
#pragma omp parallel num_threads(a.num_threads)
  {
    int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (long t = a.num_tokens * thread / threads; t < a.num_tokens * (thread + 1) / threads; t++)
      for (long h = 0; h < a.num_kv_heads && a.slot_mapping[t] >= 0; h++)
        cache.write(a.slot_mapping[t], h, k + (t * a.num_kv_heads + h) * a.head_dim,
                    v + (t * a.num_kv_heads + h) * a.head_dim);
#pragma omp barrier
    static thread_local Unit<T> unit;
    for (int share = thread; share < a.num_threads; share += threads)
      for (long i = a.first_unit[share]; i < a.first_unit[share + 1]; i++)
        attend(a, cache, a.units + 4 * i, q, out, scale, window, unit);
  }
}

extern "C" {
#define EXPORT(NAME, T)                                                                                          \
  void attention_##NAME(const Attention* a, T* k_cache, T* v_cache, const T* q, const T* k, const T* v, T* out,  \
                        float scale, long window) {                                                              \
    attention<T>(*a, k_cache, v_cache, q, k, v, out, scale, window);                                             \
  }
EXPORT(float32, float)
EXPORT(bfloat16, bf16)
}
