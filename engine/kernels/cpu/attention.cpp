// Paged attention over any mix of prefill chunks and decodes, with GQA, sliding window and soft-capped scores.
//
// Layout of one layer's cache, chosen so that keys and values are panels of matmul.h; a group is 16 tokens of a block:
//     K: [num_blocks, num_kv_heads, groups, head_dim / pair, 16 tokens, pair]            (panel: 16 keys, k = head_dim)
//     V: [num_blocks, num_kv_heads, groups, head_dim / 16, 16 tokens / pair, 16, pair]   (panel: 16 dims, k = 16 tokens)
// with pair = 2 for bfloat16 and 1 for float.
//
// Softmax runs online (arXiv 2112.05682) over tiles of 64 keys at fixed positions, so that a token's result is the same
// bits whether it is computed alone, in a chunk, or beside other requests. Partial results of SPLIT keys each are merged
// in order, so threads may compute them apart: the work is a row of units, one per (sequence, kv head, query tokens), a
// unit's splits are its parts, and each thread takes an equal share of all parts. What threads computed of a unit that
// several of them share goes to `partials`, and is merged after a barrier:
//
//     units     | 0                 | 1                 | 2                 |
//     parts     | 0    1    2    3  | 4    5    6    7  | 8    9    10   11 |
//     threads   | 0                           | 1                           |     to merge: unit 1
#include <omp.h>

#include <vector>

#include "matmul.h"

constexpr long GROUPS_PER_TILE = 4, TILE = GROUPS_PER_TILE * LANES;
constexpr long SPLIT = 256;  // also in engine/attention/cpu.py
constexpr float MINUS_INFINITY = -INFINITY;

extern "C" {
struct Unit {  // this and Attention are mirrored by engine/attention/cpu.py
  int32_t sequence, kv_head;
  int32_t first_token, num_tokens;  // of the sequence's queries
  int32_t first_split;              // of the sequence's keys
  int32_t first_part;
  int32_t slot;                     // in `partials`, of the first part; -1 when one thread has the whole unit
};
struct Attention {
  long num_heads, num_kv_heads, head_dim, block_size, max_blocks, num_tokens, num_units, num_merges, slot_size;
  int num_threads;
  const int32_t *query_start_loc, *seq_lens, *block_table;
  const int64_t* slot_mapping;
  const Unit* units;          // [num_units + 1]; first_part of the last one is the number of all parts
  const int32_t* first_part;  // [num_threads + 1]: parts of each thread
  const int32_t* merges;      // [num_merges]: units that several threads share
  float* partials;            // [slots][slot_size]: a Partial of each part
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

// Result of one split: each row's maximum, sum and weighted values, relative to the maximum.
struct Partial {
  float *max, *sum, *out;  // [rows], [rows], [rows][dim]

  Partial(float* at, long rows) : max(at), sum(at + rows), out(at + 2 * rows) {}
};

// Rows of one unit: query token r / group of query head r % group. All buffers belong to one thread.
template <class T>
struct Rows {
  long rows, dim;
  std::vector<T> q, p, edges;        // [rows][dim], [rows][TILE], one tile of values
  std::vector<float> s;              // [rows][TILE]
  std::vector<float> split, merged;  // a Partial each: of the split, of all splits before it
  std::vector<v16f> sum;             // of the split; its lanes are added when it ends
  std::vector<long> position;        // of each row's query token
  std::vector<const T*> panels;

  void start(long new_rows, long new_dim) {
    rows = new_rows, dim = new_dim;
    auto grow = [](auto& buffer, size_t n) {
      if (buffer.size() < n) buffer.resize(n);
    };
    grow(q, rows * dim), grow(p, rows * TILE), grow(edges, TILE * dim), grow(panels, TILE * dim / LANES);
    grow(s, rows * TILE), grow(split, rows * (dim + 2)), grow(merged, rows * (dim + 2));
    grow(sum, rows), grow(position, rows);
    clear(merged);
    start_split();
  }
  void clear(std::vector<float>& partial) {
    std::fill_n(partial.begin(), rows, MINUS_INFINITY);
    std::fill_n(partial.begin() + rows, rows * (dim + 1), 0.0f);
  }
  void start_split() {
    clear(split);
    std::fill_n(sum.begin(), rows, v16f{});
  }
  Partial end_split() {
    Partial partial(split.data(), rows);
    for (long r = 0; r < rows; r++) partial.sum[r] = sum_lanes(sum[r]);
    return partial;
  }
  // Not inlined: the same instructions, hence the same bits, wherever the partial result was computed.
  __attribute__((noinline)) void merge(Partial part) {
    Partial all(merged.data(), rows);
    for (long r = 0; r < rows; r++) {
      if (part.max[r] == MINUS_INFINITY) continue;
      float top = std::max(all.max[r], part.max[r]);
      float a = std::exp2(all.max[r] - top), b = std::exp2(part.max[r] - top);
      all.sum[r] = all.sum[r] * a + part.sum[r] * b;
      for (long d = 0; d < dim; d++) all.out[r * dim + d] = all.out[r * dim + d] * a + part.out[r * dim + d] * b;
      all.max[r] = top;
    }
  }
};

struct Scores {  // what becomes of a product of query and key
  float scale, softcap;
  long window;

  // In units of log2(e): exponentials are powers of two.
  v16f operator()(v16f x) const {
    if (softcap == 0) return x * (scale * LOG2_E);
    // softcap * tanh(scale * x / softcap), with tanh(y) = 1 - 2 / (e^2y + 1)
    v16f y = x * (2 * LOG2_E * scale / softcap);
    return softcap * LOG2_E * (1.0f - 2.0f / (vexp2(select(y > 60.0f, splat(60.0f), y)) + 1.0f));
  }
};

// Scores of one tile -> probabilities relative to the running maximum; rescales what was summed before.
template <class T>
static void softmax_tile(Rows<T>& u, long first_key, long groups, const Scores& scores) {
  Partial split(u.split.data(), u.rows);
  const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (long r = 0; r < u.rows; r++) {
    // keys of the tile that this row sees: [low, high)
    long high = u.position[r] + 1 - first_key, low = std::max(0l, high - scores.window);
    if (high <= 0 || low >= groups * LANES) {
      std::fill_n(u.p.begin() + r * TILE, groups * LANES, T{});
      continue;
    }
    float* s = &u.s[r * TILE];
    v16f best = splat(MINUS_INFINITY), x[GROUPS_PER_TILE];
    for (long g = 0; g < groups; g++) {
      v16i key = lane + (int32_t)(g * LANES);
      x[g] = scores(load<v16f>(s + g * LANES));
      if (low > g * LANES || high < (g + 1) * LANES)
        x[g] = select((key >= (int32_t)low) & (key < (int32_t)std::min(high, TILE)), x[g], splat(MINUS_INFINITY));
      best = select(x[g] > best, x[g], best);
    }
    float top = std::max(split.max[r], max_lanes(best));
    float keep = top == split.max[r] ? 1.0f : std::exp2(split.max[r] - top);
    v16f sum = u.sum[r] * keep;
    for (long g = 0; g < groups; g++) {
      v16f e = vexp2(x[g] - top);
      store_floats(&u.p[r * TILE + g * LANES], e);
      sum += load_floats(&u.p[r * TILE + g * LANES]);
    }
    u.sum[r] = sum;
    split.max[r] = top;
    if (keep != 1.0f)
      for (long d = 0; d < u.dim; d++) split.out[r * u.dim + d] *= keep;
  }
}

// Columns of 16 for each of num_panels panels; segments, k and accumulate as in tile().
template <class T>
static void product(const T* x, long ldx, const T* const* panels, long num_panels, long segments, long k, float* y,
                    long ldy, long rows, bool accumulate, Prefetch& prefetch) {
  for (long m = 0; m < rows; m += ROWS) {
    long count = std::min<long>(ROWS, rows - m);
    for (long p = 0; p < num_panels; p += panels_at_once(count))
      tile_function<T>(count, std::min(panels_at_once(count), num_panels - p))(
          x + m * ldx, ldx, panels + p, num_panels, segments, k, y + m * ldy + p * LANES, ldy, accumulate, prefetch);
  }
}

// One call's tensors, and what a thread does with a unit.
template <class T>
struct Run {
  const Attention& a;
  const Cache<T>& cache;
  const Scores& scores;
  const T* q;
  T* out;

  long group() const { return a.num_heads / a.num_kv_heads; }
  long position(const Unit& unit) const {  // of its first query token
    return a.seq_lens[unit.sequence] - a.query_start_loc[unit.sequence + 1] + first_token(unit);
  }
  long first_token(const Unit& unit) const { return a.query_start_loc[unit.sequence] + unit.first_token; }
  long row(const Unit& unit, long r) const {  // where row r of a unit begins in q and out
    return ((first_token(unit) + r / group()) * a.num_heads + unit.kv_head * group() + r % group()) * a.head_dim;
  }
  Partial partial(const Unit& unit, long part) const {
    return {a.partials + (unit.slot + part - unit.first_part) * a.slot_size, unit.num_tokens * group()};
  }

  void attend(int share, Rows<T>& u) const {
    long first = a.first_part[share], last = a.first_part[share + 1];
    auto begins_behind = [](long part, const Unit& unit) { return part < unit.first_part; };
    const Unit* unit = std::upper_bound(a.units, a.units + a.num_units, first, begins_behind) - 1;
    for (; first < last; unit++, first = unit->first_part)
      attend(*unit, first, std::min<long>(last, unit[1].first_part), u);
  }

  // Parts [first_part, last_part) of the unit.
  void attend(const Unit& unit, long first_part, long last_part, Rows<T>& u) const {
    u.start(unit.num_tokens * group(), a.head_dim);
    long first = position(unit);
    for (long r = 0; r < u.rows; r++) {
      u.position[r] = first + r / group();
      std::memcpy(&u.q[r * u.dim], q + row(unit, r), u.dim * sizeof(T));
    }
    // keys that some row of the unit sees: [low, high)
    long low = std::max(0l, first + 1 - scores.window), high = first + unit.num_tokens;
    for (long part = first_part; part < last_part; part++) {
      u.start_split();
      long key = (unit.first_split + part - unit.first_part) * SPLIT, end = std::min(high, key + SPLIT);
      for (long tile = std::max(low / TILE * TILE, key); tile < end; tile += TILE) attend_tile(unit, u, tile, low, high);
      Partial result = u.end_split();
      if (unit.slot < 0)
        u.merge(result);
      else
        std::memcpy(partial(unit, part).max, result.max, u.rows * (u.dim + 2) * sizeof(float));
    }
    if (unit.slot < 0) finish(unit, u);
  }

  void merge(const Unit& unit, Rows<T>& u) const {
    u.start(unit.num_tokens * group(), a.head_dim);
    for (long part = unit.first_part; part < (&unit)[1].first_part; part++) u.merge(partial(unit, part));
    finish(unit, u);
  }

 private:
  void attend_tile(const Unit& unit, Rows<T>& u, long tile, long low, long high) const {
    const int32_t* blocks = a.block_table + unit.sequence * a.max_blocks;
    long dim = a.head_dim, dim_panels = dim / LANES, bases[GROUPS_PER_TILE];
    auto base = [&](long key) {
      return cache.group(blocks[key / a.block_size], unit.kv_head, key % a.block_size / LANES);
    };
    long groups = std::min(GROUPS_PER_TILE, (high - tile + LANES - 1) / LANES);
    for (long g = 0; g < groups; g++) u.panels[g] = cache.k + (bases[g] = base(tile + g * LANES));
    const void* next[2 * GROUPS_PER_TILE];
    long num_next = 0;
    for (long key = tile + TILE; key < std::min(high, tile + 2 * TILE); key += LANES) {
      next[num_next++] = cache.k + base(key);
      next[num_next++] = cache.v + base(key);
    }
    Prefetch prefetch{next, num_next, LANES * dim * (long)sizeof(T), 4};
    product(u.q.data(), dim, u.panels.data(), groups, 1, dim, u.s.data(), TILE, u.rows, false, prefetch);
    softmax_tile(u, tile, groups, scores);
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
    product(u.p.data(), TILE, u.panels.data(), dim_panels, groups, LANES, Partial(u.split.data(), u.rows).out, dim,
            u.rows, true, prefetch);
  }

  void finish(const Unit& unit, Rows<T>& u) const {
    Partial all(u.merged.data(), u.rows);
    for (long r = 0; r < u.rows; r++)
      for (long d = 0; d < u.dim; d += LANES)
        store_floats(out + row(unit, r) + d, load<v16f>(all.out + r * u.dim + d) / all.sum[r]);
  }
};

template <class T>
static void attention(const Attention& a, T* k_cache, T* v_cache, const T* q, const T* k, const T* v, T* out,
                      const Scores& scores) {
  Cache<T> cache{k_cache, v_cache, a.num_kv_heads, a.head_dim, a.block_size};
  Run<T> run{a, cache, scores, q, out};
#pragma omp parallel num_threads(a.num_threads)
  {
    int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    for (long t = a.num_tokens * thread / threads; t < a.num_tokens * (thread + 1) / threads; t++)
      for (long h = 0; h < a.num_kv_heads && a.slot_mapping[t] >= 0; h++)
        cache.write(a.slot_mapping[t], h, k + (t * a.num_kv_heads + h) * a.head_dim,
                    v + (t * a.num_kv_heads + h) * a.head_dim);
#pragma omp barrier
    static thread_local Rows<T> rows;
    for (int share = thread; share < a.num_threads; share += threads) run.attend(share, rows);
    if (a.num_merges > 0) {
#pragma omp barrier
      for (long i = thread; i < a.num_merges; i += threads) run.merge(a.units[a.merges[i]], rows);
    }
  }
}

extern "C" {
#define EXPORT(NAME, T)                                                                                          \
  void attention_##NAME(const Attention* a, T* k_cache, T* v_cache, const T* q, const T* k, const T* v, T* out,  \
                        float scale, float softcap, long window) {                                               \
    attention<T>(*a, k_cache, v_cache, q, k, v, out, {scale, softcap, window});                                  \
  }
EXPORT(float32, float)
EXPORT(bfloat16, bf16)
}
