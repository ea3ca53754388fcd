// Paged attention over any mix of prefill chunks and decodes, with GQA, sliding window and soft-capped scores.
//
// Layout of one layer's cache, chosen so that keys and values are panels of matmul.h; a group is 16 tokens of a block:
//     K: [num_blocks, num_kv_heads, groups, head_dim / pair, 16 tokens, pair]            (panel: 16 keys, k = head_dim)
//     V: [num_blocks, num_kv_heads, groups, head_dim / 16, 16 tokens / pair, 16, pair]   (panel: 16 dims, k = 16 tokens)
// with pair = 2 for bfloat16 and 1 for float. A cache of 8-bit integers has the same order; 16 float scales follow the
// elements of a group, one of each token, and meet the scores (K) and the probabilities (V) instead of the elements.
//
// Keys are taken in splits of 256 at fixed positions, each with a softmax of its own, and the splits' results are merged in
// order (arXiv 2112.05682). So a token's result is the same bits whether it is computed alone, in a chunk, or beside other
// requests, and threads may compute splits apart: the work is a row of units, one per (sequence, kv head, query tokens), a
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

constexpr long SPLIT = 256, GROUPS = SPLIT / LANES;  // SPLIT also in engine/attention/cpu.py
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
  std::vector<T> q;                         // [rows][dim]
  std::vector<T> key_copies, value_copies;  // of one split, where the cache is not read as it is
  std::vector<float> split, merged;         // a Partial each: of the split, of all splits before it
  std::vector<long> position;               // of each row's query token
  std::vector<const T*> values;             // panels of one split

  void start(long new_rows, long new_dim) {
    rows = new_rows, dim = new_dim;
    auto grow = [](auto& buffer, size_t n) {
      if (buffer.size() < n) buffer.resize(n);
    };
    grow(q, rows * dim), grow(values, GROUPS * dim), grow(key_copies, SPLIT * dim), grow(value_copies, SPLIT * dim);
    grow(split, rows * (dim + 2)), grow(merged, rows * (dim + 2)), grow(position, rows);
    clear(Partial(merged.data(), rows), 0, rows);
  }
  void clear(Partial partial, long first, long count) const {
    std::fill_n(partial.max + first, count, MINUS_INFINITY);
    std::fill_n(partial.sum + first, count, 0.0f);
    std::fill_n(partial.out + first * dim, count * dim, 0.0f);
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

struct Scales {  // of the tokens of a split
  v16f key[GROUPS], value[GROUPS];
};

// Scores [count][SPLIT] of `count` rows and one split -> probabilities relative to the rows' maxima, and these and the sums.
template <bool ROUNDED, class T>
static void softmax(Rows<T>& u, long first_row, long count, long first_key, long groups, const Scores& scores,
                    const Scales& scales, const float* s, T* p) {
  Partial split(u.split.data(), u.rows);
  for (long r = first_row; r < first_row + count; r++, s += SPLIT, p += SPLIT) {
    // keys of the split that this row sees: [low, high)
    long high = u.position[r] + 1 - first_key, low = std::max(0l, high - scores.window);
    if (high <= 0 || low >= groups * LANES) {
      u.clear(split, r, 1);
      std::fill_n(p, groups * LANES, T{});
      continue;
    }
    v16f best = splat(MINUS_INFINITY), sum = {}, x[GROUPS];
    for (long g = 0; g < groups; g++) {
      v16f score = load<v16f>(s + g * LANES);
      x[g] = scores(ROUNDED ? score * scales.key[g] : score);
      if (low > g * LANES || high < (g + 1) * LANES)
        x[g] = select(in_range(low - g * LANES, high - g * LANES), x[g], splat(MINUS_INFINITY));
      best = larger(x[g], best);
    }
    float top = split.max[r] = max_lanes(best);
    for (long g = 0; g < groups; g++) {
      v16f e = vexp2(x[g] - top);
      store_floats(p + g * LANES, ROUNDED ? e * scales.value[g] : e);
      sum += e;
    }
    split.sum[r] = sum_lanes(sum);
  }
}

// Columns of 16 for each of num_panels panels and at most ROWS rows; segments and k as in tile().
template <class T>
static void product(const T* x, long ldx, const T* const* panels, long num_panels, long segments, long k, float* y,
                    long ldy, long rows, Prefetch& prefetch) {
  for (long p = 0; p < num_panels; p += panels_at_once(rows))
    tile_function<T>(rows, std::min(panels_at_once(rows), num_panels - p))(
        x, ldx, panels + p, num_panels, segments, k, y + p * LANES, ldy, prefetch);
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
      long key = (unit.first_split + part - unit.first_part) * SPLIT;
      attend_split(unit, u, std::max(key, low / LANES * LANES), low, high);
      Partial result(u.split.data(), u.rows);
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

  // Where the split after this one lies; at the end of a unit, the first of the next one.
  long next_split(const Unit* unit, long first_key, long high, const void** regions) const {
    long key = end_of_split(first_key), count = 0;
    if (key >= high) {
      if ((++unit)->sequence < 0) return 0;
      high = position(*unit) + unit->num_tokens;
      key = std::max(0l, position(*unit) + 1 - scores.window) / LANES * LANES;
    }
    for (long end = std::min(high, end_of_split(key)); key < end; key += LANES) {
      regions[count++] = cache.k + base(*unit, key);
      regions[count++] = cache.v + base(*unit, key);
    }
    return count;
  }

  static long end_of_split(long key) { return (key / SPLIT + 1) * SPLIT; }

  // The split from first_key on, a multiple of 16; of its keys, those in [low, high) belong to the unit.
  void attend_split(const Unit& unit, Rows<T>& u, long first_key, long low, long high) const {
    long dim = a.head_dim, dim_panels = dim / LANES;
    long groups = (std::min(high, end_of_split(first_key)) - first_key + LANES - 1) / LANES;
    const T* keys[GROUPS];
    Scales scales;
    for (long g = 0; g < groups; g++) read_group(unit, first_key, g, low, high, u, keys[g], scales);
    const void* regions[2 * GROUPS];
    Prefetch prefetch{regions, next_split(&unit, first_key, high, regions), cache.group_bytes(), 1};
    prefetch.spread_over((u.rows + ROWS - 1) / ROWS * steps_of_row_block(groups));
    Partial split(u.split.data(), u.rows);
    alignas(64) float s[ROWS * SPLIT];
    alignas(64) T p[ROWS * SPLIT];
    for (long r = 0; r < u.rows; r += ROWS) {
      // The last of these rows sees the most keys: what none of them sees is left out.
      long count = std::min<long>(ROWS, u.rows - r), seen = u.position[r + count - 1] + 1 - first_key;
      long seen_groups = std::min(groups, (seen + LANES - 1) / LANES);
      if (seen <= 0) {
        u.clear(split, r, count);
        continue;
      }
      product(&u.q[r * dim], dim, keys, seen_groups, 1, dim, s, SPLIT, count, prefetch);
      softmax<Cache<T, S>::rounded>(u, r, count, first_key, seen_groups, scores, scales, s, p);
      product(p, SPLIT, u.values.data(), dim_panels, seen_groups, LANES, split.out + r * dim, dim, count, prefetch);
    }
  }
  // Steps of both products, of up to ROWS rows.
  long steps_of_row_block(long groups) const {
    long dim = a.head_dim, dim_panels = dim / LANES;
    return ((groups + PANELS - 1) / PANELS * dim + (dim_panels + PANELS - 1) / PANELS * groups * LANES) / Pair<T>::k;
  }

  // Panels and scales of group g of a split.
  void read_group(const Unit& unit, long first_key, long g, long low, long high, Rows<T>& u, const T*& keys,
                  Scales& scales) const {
    long key = first_key + g * LANES, size = LANES * a.head_dim, at = base(unit, key);
    bool edge = key < low || key + LANES > high;
    T *key_copy = &u.key_copies[g * size], *copy = &u.value_copies[g * size];
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
