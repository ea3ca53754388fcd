// Paged attention over any mix of prefill chunks and decodes, with GQA, sliding window and soft-capped scores.
//
// Layout of one layer's cache, chosen so that keys and values are panels of matmul.h; a group is 16 tokens of a block:
//     K: [num_blocks, num_kv_heads, groups, head_dim / pair, 16 tokens, pair]            (panel: 16 keys, k = head_dim)
//     V: [num_blocks, num_kv_heads, groups, head_dim / 16, 16 tokens / pair, 16, pair]   (panel: 16 dims, k = 16 tokens)
// with pair = 2 for bfloat16 and 1 for float. A cache of 8-bit integers has the same order; 16 float scales follow the
// elements of a group, one of each token, and meet the scores (K) and the probabilities (V) instead of the elements.
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
#include "attention.h"

#include <omp.h>

#include <type_traits>
#include <vector>

constexpr long GROUPS_PER_TILE = 4, TILE = GROUPS_PER_TILE * LANES;
constexpr long SPLIT = 256;  // also in engine/attention/cpu.py
constexpr float MINUS_INFINITY = -INFINITY;

static v16i in_range(long low, long high) {  // lanes of 16 keys: those in [low, high)
  const v16i lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (lane >= (int32_t)std::max(low, 0l)) & (lane < (int32_t)std::min(high, LANES));
}

// One layer's cache: T is what the products take, S what is stored.
template <class T, class S>
struct Cache {
  static constexpr bool rounded = !std::is_same_v<T, S>;
  static constexpr long pair = Pair<T>::k;
  char *k, *v;
  long kv_heads, head_dim, block_size;

  long group_bytes() const { return LANES * (head_dim * sizeof(S) + (rounded ? sizeof(float) : 0)); }
  long group(long block, long head, long group_in_block) const {
    return ((block * kv_heads + head) * (block_size / LANES) + group_in_block) * group_bytes();
  }
  float* scales(char* group) const { return (float*)(group + LANES * head_dim * sizeof(S)); }

  void write(long slot, long head, const T* key, const T* value) const {
    long offset = slot % block_size, t = offset % LANES, at = group(slot / block_size, head, offset / LANES);
    put(k + at, t, key, [&](long i) { return (i / pair * LANES + t) * pair + i % pair; });
    put(v + at, t, value, [&](long i) {
      return i / LANES * LANES * LANES + t / pair * pair * LANES + i % LANES * pair + t % pair;
    });
  }

 private:
  template <class Place>
  void put(char* group, long t, const T* x, Place&& place) const {
    S* to = (S*)group;
    if constexpr (rounded) {
      float highest = 0, sum = 0;
      for (long i = 0; i < head_dim; i++) highest = std::max(highest, std::abs(to_float(x[i]))), sum += to_float(x[i]);
      float scale = highest / 127, inverse = highest > 0 ? 127 / highest : 0;
      bool finite = std::isfinite(sum);
      scales(group)[t] = finite ? scale : NAN;  // shows in the result
      for (long i = 0; i < head_dim; i++) to[place(i)] = finite ? (S)std::lrint(to_float(x[i]) * inverse) : 0;
    } else {
      for (long i = 0; i < head_dim; i++) to[place(i)] = x[i];
    }
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
  std::vector<T> q;                  // [rows][dim]
  std::vector<T> key_tile, value_tile;  // copies where the cache is not read as it is
  std::vector<float> split, merged;  // a Partial each: of the split, of all splits before it
  std::vector<v16f> sum;             // of the split; its lanes are added when it ends
  std::vector<long> position;        // of each row's query token
  std::vector<const T*> values;      // panels of one tile

  void start(long new_rows, long new_dim) {
    rows = new_rows, dim = new_dim;
    auto grow = [](auto& buffer, size_t n) {
      if (buffer.size() < n) buffer.resize(n);
    };
    grow(q, rows * dim), grow(values, TILE * dim / LANES), grow(key_tile, TILE * dim), grow(value_tile, TILE * dim);
    grow(split, rows * (dim + 2)), grow(merged, rows * (dim + 2)), grow(sum, rows), grow(position, rows);
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

struct Scales {  // of the tokens of a tile
  v16f key[GROUPS_PER_TILE], value[GROUPS_PER_TILE];
};

// Scores [count][TILE] of `count` rows and one tile -> probabilities relative to the running maximum; rescales what was
// summed before.
template <bool ROUNDED, class T>
static void softmax_tile(Rows<T>& u, long first_row, long count, long first_key, long groups, const Scores& scores,
                         const Scales& scales, const float* s, T* p) {
  Partial split(u.split.data(), u.rows);
  for (long r = first_row; r < first_row + count; r++, s += TILE, p += TILE) {
    // keys of the tile that this row sees: [low, high)
    long high = u.position[r] + 1 - first_key, low = std::max(0l, high - scores.window);
    if (high <= 0 || low >= groups * LANES) {
      std::fill_n(p, groups * LANES, T{});
      continue;
    }
    v16f best = splat(split.max[r]), x[GROUPS_PER_TILE];
    for (long g = 0; g < groups; g++) {
      v16f score = load<v16f>(s + g * LANES);
      x[g] = scores(ROUNDED ? score * scales.key[g] : score);
      if (low > g * LANES || high < (g + 1) * LANES)
        x[g] = select(in_range(low - g * LANES, high - g * LANES), x[g], splat(MINUS_INFINITY));
      best = larger(x[g], best);
    }
    float top = split.max[r];
    if (any_above(best, top)) {
      top = max_lanes(best);
      float keep = std::exp2(split.max[r] - top);
      u.sum[r] *= keep;
      for (long d = 0; d < u.dim; d++) split.out[r * u.dim + d] *= keep;
      split.max[r] = top;
    }
    v16f sum = u.sum[r];
    for (long g = 0; g < groups; g++) {
      v16f e = vexp2(x[g] - top);
      store_floats(p + g * LANES, ROUNDED ? e * scales.value[g] : e);
      sum += e;
    }
    u.sum[r] = sum;
  }
}

// Columns of 16 for each of num_panels panels and at most ROWS rows; segments, k and accumulate as in tile().
template <class T>
static void product(const T* x, long ldx, const T* const* panels, long num_panels, long segments, long k, float* y,
                    long ldy, long rows, bool accumulate, Prefetch& prefetch) {
  for (long p = 0; p < num_panels; p += panels_at_once(rows))
    tile_function<T>(rows, std::min(panels_at_once(rows), num_panels - p))(
        x, ldx, panels + p, num_panels, segments, k, y + p * LANES, ldy, accumulate, prefetch);
}

// One call's tensors, and what a thread does with a unit.
template <class T, class S>
struct Run {
  const Attention& a;
  const Cache<T, S>& cache;
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
  long base(const Unit& unit, long key) const {
    long block = a.block_table[unit.sequence * a.max_blocks + key / a.block_size];
    return cache.group(block, unit.kv_head, key % a.block_size / LANES);
  }

  // Where the tile after this one lies; at the end of a unit, the first of the next one.
  long next_tile(const Unit* unit, long tile, long high, const void** regions) const {
    long key = tile + TILE, count = 0;
    if (key >= high) {
      if ((++unit)->sequence < 0) return 0;
      high = position(*unit) + unit->num_tokens;
      key = std::max(unit->first_split * SPLIT, (position(*unit) + 1 - scores.window) / TILE * TILE);
    }
    for (long end = std::min(high, key + TILE); key < end; key += LANES) {
      regions[count++] = cache.k + base(*unit, key);
      regions[count++] = cache.v + base(*unit, key);
    }
    return count;
  }

  void attend_tile(const Unit& unit, Rows<T>& u, long tile, long low, long high) const {
    long dim = a.head_dim, dim_panels = dim / LANES, groups = std::min(GROUPS_PER_TILE, (high - tile + LANES - 1) / LANES);
    const T* keys[GROUPS_PER_TILE];
    Scales scales;
    for (long g = 0; g < groups; g++) read_group(unit, tile, g, low, high, u, keys[g], scales);
    const void* regions[2 * GROUPS_PER_TILE];
    Prefetch prefetch{regions, next_tile(&unit, tile, high, regions), cache.group_bytes(), 4};
    float* out = Partial(u.split.data(), u.rows).out;
    alignas(64) float s[ROWS * TILE];
    alignas(64) T p[ROWS * TILE];
    for (long r = 0; r < u.rows; r += ROWS) {
      // The last of these rows sees the most keys: what none of them sees is left out.
      long count = std::min<long>(ROWS, u.rows - r), seen = u.position[r + count - 1] + 1 - tile;
      long seen_groups = std::min(groups, (seen + LANES - 1) / LANES);
      if (seen <= 0) continue;
      product(&u.q[r * dim], dim, keys, seen_groups, 1, dim, s, TILE, count, false, prefetch);
      softmax_tile<Cache<T, S>::rounded>(u, r, count, tile, seen_groups, scores, scales, s, p);
      product(p, TILE, u.values.data(), dim_panels, seen_groups, LANES, out + r * dim, dim, count, true, prefetch);
    }
  }

  // Panels and scales of group g of a tile; of its keys, those in [low, high) belong to the unit.
  void read_group(const Unit& unit, long tile, long g, long low, long high, Rows<T>& u, const T*& keys,
                  Scales& scales) const {
    long key = tile + g * LANES, size = LANES * a.head_dim, at = base(unit, key);
    bool edge = key < low || key + LANES > high;
    T *key_copy = &u.key_tile[g * size], *copy = &u.value_tile[g * size];
    const T* values = copy;
    if constexpr (Cache<T, S>::rounded) {
      for (long i = 0; i < size; i += LANES) {
        store_floats(key_copy + i, convert<v16f>(convert<v16i>(load<v16b>(cache.k + at + i))));
        store_floats(copy + i, convert<v16f>(convert<v16i>(load<v16b>(cache.v + at + i))));
      }
      keys = key_copy;
      scales.key[g] = load<v16f>(cache.scales(cache.k + at));
      scales.value[g] = load<v16f>(cache.scales(cache.v + at));
      if (edge) scales.value[g] = select(in_range(low - key, high - key), scales.value[g], v16f{});  // see visible()
    } else {
      keys = (const T*)(cache.k + at);
      values = (const T*)(cache.v + at);
      if (edge) values = visible(values, low - key, high - key, copy);
    }
    for (long p = 0; p < a.head_dim / LANES; p++) u.values[g * (a.head_dim / LANES) + p] = values + p * LANES * LANES;
  }

  // A copy of a group of values without what lies outside [low, high) and other requests left behind: 0 * NaN is NaN.
  const T* visible(const T* values, long low, long high, T* copy) const {
    constexpr long pair = Pair<T>::k;
    v16u mask[LANES / pair];
    for (long i = 0; i < LANES; i += pair) {
      uint32_t bits = 0;
      for (long t = i; t < i + pair; t++)
        if (t >= low && t < high) bits |= ~0u >> (32 - 32 / pair) << (t - i) * (32 / pair);
      mask[i / pair] = bits + (v16u){};
    }
    for (long i = 0; i < LANES * a.head_dim; i += LANES * pair)
      store(copy + i, load<v16u>(values + i) & mask[i / (LANES * pair) % (LANES / pair)]);
    return copy;
  }

  void finish(const Unit& unit, Rows<T>& u) const {
    Partial all(u.merged.data(), u.rows);
    for (long r = 0; r < u.rows; r++)
      for (long d = 0; d < u.dim; d += LANES)
        store_floats(out + row(unit, r) + d, load<v16f>(all.out + r * u.dim + d) / all.sum[r]);
  }
};

template <class T, class S>
static void attend(const Run<T, S>& run, const T* k, const T* v, int thread, int threads) {
  const Attention& a = run.a;
  for (long t = a.num_tokens * thread / threads; t < a.num_tokens * (thread + 1) / threads; t++)
    for (long h = 0; h < a.num_kv_heads && a.slot_mapping[t] >= 0; h++)
      run.cache.write(a.slot_mapping[t], h, k + (t * a.num_kv_heads + h) * a.head_dim,
                      v + (t * a.num_kv_heads + h) * a.head_dim);
#pragma omp barrier
  static thread_local Rows<T> rows;
  for (int share = thread; share < a.num_threads; share += threads) run.attend(share, rows);
  if (a.num_merges > 0) {
#pragma omp barrier
    for (long i = thread; i < a.num_merges; i += threads) run.merge(a.units[a.merges[i]], rows);
  }
}

template <class T>
void attend(const Attention& a, char* k_cache, char* v_cache, const T* q, const T* k, const T* v, T* out,
            const Scores& scores, int thread, int threads) {
  auto run = [&](auto stored) {
    Cache<T, decltype(stored)> cache{k_cache, v_cache, a.num_kv_heads, a.head_dim, a.block_size};
    attend(Run<T, decltype(stored)>{a, cache, scores, q, out}, k, v, thread, threads);
  };
  a.rounded_cache ? run(int8_t{}) : run(T{});
}

template <class T>
static void attention(const Attention& a, char* k_cache, char* v_cache, const T* q, const T* k, const T* v, T* out,
                      const Scores& scores) {
#pragma omp parallel num_threads(a.num_threads)
  attend(a, k_cache, v_cache, q, k, v, out, scores, omp_get_thread_num(), omp_get_num_threads());
}

#define EXPORT(NAME, T)                                                                                               \
  template void attend(const Attention&, char*, char*, const T*, const T*, const T*, T*, const Scores&, int, int);    \
  extern "C" void attention_##NAME(const Attention* a, char* k_cache, char* v_cache, const T* q, const T* k,          \
                                   const T* v, T* out, float scale, float softcap, long window) {                     \
    attention<T>(*a, k_cache, v_cache, q, k, v, out, {scale, softcap, window});                                       \
  }
EXPORT(float32, float)
EXPORT(bfloat16, bf16)
