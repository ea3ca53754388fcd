// What attention.cpp computes, for those who call it inside a parallel region.
#pragma once
#include "matmul.h"

extern "C" {
struct Unit {  // this and Attention are mirrored by engine/attention/cpu.py
  int32_t sequence, kv_head;
  int32_t first_token, num_tokens;  // of the sequence's queries
  int32_t first_split;              // of the sequence's keys
  int32_t first_part;
  int32_t slot;                     // in `partials`, of the first part; -1 when one thread has the whole unit
};
struct Attention {  // the work of one step; layers of one window share it
  long num_heads, num_kv_heads, head_dim, block_size, max_blocks, num_tokens, num_units, num_merges, slot_size;
  int num_threads, rounded_cache;  // the cache holds 8-bit integers with scales
  const int32_t *query_start_loc, *seq_lens, *block_table;
  const int64_t* slot_mapping;
  const Unit* units;          // [num_units + 1]; first_part of the last one is the number of all parts
  const int32_t* first_part;  // [num_threads + 1]: parts of each thread
  const int32_t* merges;      // [num_merges]: units that several threads share
  float* partials;            // [slots][slot_size]: a Partial of each part
};
}

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

// The share of one thread in a step's attention; all threads of the region call it. Ends without a barrier.
template <class T>
void attend(const Attention& a, char* k_cache, char* v_cache, const T* q, const T* k, const T* v, T* out,
            const Scores& scores, int thread, int threads);
