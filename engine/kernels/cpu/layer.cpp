// What comes before and after attention in a decoder layer, all layers in one parallel region, and the logits. Twin:
// engine/kernels/torch_ops.py.
//
// Few rows: threads share the panels of each product, with a barrier between the stages.
// Many rows: each thread takes its rows through all stages.
#include <omp.h>

#include <vector>

#include "attention.h"
#include "norms.h"
#include "quantised.h"

extern "C" {
struct Linear {  // mirrored by engine/kernels/cpu/ops.py
  const void* weight;                // packed, see matmul.h and quantised.h
  const uint16_t *scale, *minimum;   // of quantised weights; minimum is null when they are symmetric
  const float* bias;                 // [n] or null
  long n, k, bits;                   // bits 0: weights of the type of the activations
};
struct LayerWeights {  // likewise
  long hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rope;
  float eps;
  int num_threads, layer_norm, parallel, activation, gated, full_qk_norm;
  // Each may be null; q_norm and k_norm are [head_dim], or full: [heads * head_dim].
  const float *input_norm, *input_norm_bias, *post_norm, *post_norm_bias, *q_norm, *k_norm, *attention_norm, *mlp_norm;
  Linear qkv, output, gate_up, down;  // gate_up, where gated: a panel of gate, then the same of up; its bias likewise
};
struct Scratch {  // for the rows of a step, overwritten by each layer; likewise
  void* normed;
  float* qkv;
  void* activation;
  char* rounded;
  void *q, *k, *v;
  float* delta;  // what a layer adds to the residual stream, where it is normed; else unused
};
struct Layer {  // likewise
  const LayerWeights* weights;
  const Attention* attention;
  char *k_cache, *v_cache;
  float scale, softcap;
  long window;
};
}

static QuantisedRows rounded_rows(const LayerWeights& w, char* scratch) {
  return {scratch, QuantisedRows::bytes(std::max({w.hidden_size, w.output.k, w.down.k})), 0};
}

static long round_up(long n, long to) { return (n + to - 1) / to * to; }

struct Share {  // what one thread does
  long rows, row0, row1;
  Part* parts;  // of all threads
  int thread, threads;
  bool by_rows;
  uint64_t products = 0;  // begun so far; the same number in all threads

  Share(long rows, std::vector<Part>& all)
      : parts(all.data()), thread(omp_get_thread_num()), threads(omp_get_num_threads()) {
    set_rows(rows);
  }
  void set_rows(long count) {
    rows = count;
    by_rows = rows >= 4 * ROWS * threads;
    long tiles = round_up(rows, ROWS) / ROWS;
    row0 = by_rows ? std::min(rows, tiles * thread / threads * ROWS) : rows * thread / threads;
    row1 = by_rows ? std::min(rows, tiles * (thread + 1) / threads * ROWS) : rows * (thread + 1) / threads;
  }
  // Panels of `w` in units of `unit`, for the product that was begun last.
  Claims claims(const Linear& w, long unit, Part& own) const {
    long panels = round_up(w.n, LANES) / LANES;
    return by_rows ? Claims{&own, 0, 1, 1, panels, unit} : Claims{parts, thread, threads, products, panels, unit};
  }
  // Where this thread begins to read `w`; null when it is quantised.
  template <class T>
  const T* start_of(const Linear& w, long unit) const {
    Part none;
    long first = by_rows ? 0 : claims(w, unit, none).part_begin(thread);
    return w.bits ? nullptr : Packed<T>{(const T*)w.weight, w.n, w.k}.panel(first);
  }
  // Quantised weights meet rounded activations, in `scratch`; `then` are the weights that follow.
  template <class T, class Epilogue>
  void product(const T* x, long ldx, const Linear& w, long unit, const QuantisedRows& scratch, const T* then,
               Epilogue&& epilogue) {
    long first_row = by_rows ? row0 : 0, last_row = by_rows ? row1 : rows;
    Part own;
    products++;
    Claims panels = claims(w, unit, own);
    if (!w.bits) {
      Packed<T> weights{(const T*)w.weight, w.n, w.k};
      return matmul(x, ldx, weights, first_row, last_row, panels, then, epilogue);
    }
    QuantisedRows rounded{scratch.data, scratch.row_bytes, w.k};
    for (long r = row0; r < row1; r++) rounded.write(r, x + r * ldx);
    barrier();
    QuantisedWeights weights{(const uint8_t*)w.weight, w.scale, w.minimum, w.n, w.k, (int)w.bits};
    quantised_matmul(rounded, weights, first_row, last_row, panels, epilogue);
  }
  void barrier() const {
    if (!by_rows && threads > 1) {
#pragma omp barrier
    }
  }
};

// Without a weight x itself.
template <class T>
static void norm_row(const LayerWeights& w, const float* x, const float* weight, const float* bias, T* y) {
  if (!weight) return copy_row(x, y, w.hidden_size);
  if (w.layer_norm) return layer_norm(x, weight, bias, y, w.hidden_size, w.eps);
  rms_norm(x, weight, y, w.hidden_size, w.eps);
}

// In place: x[i], x[i + half] rotated by the angle whose cos and sin stand at cos_sin[i], cos_sin[half + i].
static void rotate(float* x, const float* cos_sin, long rotary_dim) {
  long half = rotary_dim / 2;
  for (long i = 0; i < half; i++) {
    float a = x[i], b = x[i + half], c = cos_sin[i], s = cos_sin[half + i];
    x[i] = a * c - b * s;
    x[i + half] = b * c + a * s;
  }
}

template <class T>
static void heads(const LayerWeights& w, float* row, const float* cos_sin, T* q, T* k, T* v) {
  long d = w.head_dim, all = w.num_heads + 2 * w.num_kv_heads;
  if (w.full_qk_norm) {
    if (w.qkv.bias)
      for (long i = 0; i < (w.num_heads + w.num_kv_heads) * d; i++) row[i] += w.qkv.bias[i];
    rms_norm(row, w.q_norm, row, w.num_heads * d, w.eps);
    rms_norm(row + w.num_heads * d, w.k_norm, row + w.num_heads * d, w.num_kv_heads * d, w.eps);
  }
  for (long h = 0; h < all; h++) {
    float* x = row + h * d;
    bool is_q = h < w.num_heads, is_v = h >= w.num_heads + w.num_kv_heads;
    bool is_done = w.full_qk_norm && !is_v;
    if (w.qkv.bias && !is_done)
      for (long i = 0; i < d; i++) x[i] += w.qkv.bias[h * d + i];
    const float* norm = is_q ? w.q_norm : w.k_norm;
    if (!is_v && !is_done && norm) rms_norm(x, norm, x, d, w.eps);
    if (!is_v) rotate(x, cos_sin, d);
    T* to = is_q ? q + h * d : is_v ? v + (h - w.num_heads - w.num_kv_heads) * d : k + (h - w.num_heads) * d;
    copy_row(x, to, d);
  }
}

template <class T>
static void attention_input(Share& share, const LayerWeights& w, const Scratch& scratch, const float* hidden,
                            const float* cos_sin) {
  long kd = w.num_kv_heads * w.head_dim, qd = w.num_heads * w.head_dim;
  long ld = round_up(w.hidden_size, 2), ldy = round_up(w.qkv.n, LANES);
  T *normed = (T*)scratch.normed, *q = (T*)scratch.q, *k = (T*)scratch.k, *v = (T*)scratch.v;
  for (long r = share.row0; r < share.row1; r++)
    norm_row(w, hidden + r * w.hidden_size, w.input_norm, w.input_norm_bias, normed + r * ld);
  share.barrier();
  share.product(normed, ld, w.qkv, 1, rounded_rows(w, scratch.rounded), (const T*)nullptr,
                [&](long r, long first, long columns, const float* values) {
                  std::memcpy(scratch.qkv + r * ldy + first, values, columns * sizeof(float));
                });
  share.barrier();
  for (long r = share.row0; r < share.row1; r++)
    heads(w, scratch.qkv + r * ldy, cos_sin + r * w.head_dim, q + r * qd, k + r * kd, v + r * kd);
}

// hidden += norm(product with w + its bias); without a norm each sum is added as soon as it is there.
template <class T>
static void add_product(Share& share, const LayerWeights& w, const Scratch& scratch, const T* x, long ldx,
                        const Linear& linear, const float* norm, float* hidden, const T* then) {
  long h = w.hidden_size;
  float* to = norm ? scratch.delta : hidden;
  share.product(x, ldx, linear, 1, rounded_rows(w, scratch.rounded), then,
                [&](long r, long first, long columns, const float* values) {
                  put(to + r * h, values, linear.bias, first, columns, h, !norm);
                });
  if (!norm) return;
  share.barrier();
  for (long r = share.row0; r < share.row1; r++) {
    float* delta = scratch.delta + r * h;
    rms_norm(delta, norm, delta, h, w.eps);
    for (long i = 0; i < h; i++) hidden[r * h + i] += delta[i];
  }
}

template <class T>
static void attention_output(Share& share, const LayerWeights& w, const Scratch& scratch, float* hidden,
                             const T* attention) {
  long h = w.hidden_size, qd = w.num_heads * w.head_dim, unit = w.gated ? 2 : 1;
  long ld = round_up(h, 2), ldi = round_up(w.intermediate_size, LANES);
  T *normed = (T*)scratch.normed, *activation = (T*)scratch.activation;
  const float* bias = w.gate_up.bias;
  auto norm_rows = [&] {
    for (long r = share.row0; r < share.row1; r++)
      norm_row(w, hidden + r * h, w.post_norm, w.post_norm_bias, normed + r * ld);
    share.barrier();
  };
  if (w.parallel) norm_rows();
  add_product(share, w, scratch, attention, qd, w.output, w.attention_norm, hidden, share.start_of<T>(w.gate_up, unit));
  share.barrier();
  if (!w.parallel) norm_rows();
  auto gate_and_up = [&](long r, long first, long columns, const float* values) {
    for (long c = 0; c < columns; c += 2 * LANES) {
      v16f gate = load<v16f>(values + c), up = load<v16f>(values + c + LANES);
      if (bias) gate += load<v16f>(bias + first + c), up += load<v16f>(bias + first + c + LANES);
      store_floats(activation + r * ldi + (first + c) / 2, activate(w.activation, gate) * up);
    }
  };
  auto up_alone = [&](long r, long first, long columns, const float* values) {
    for (long c = 0; c < columns; c += LANES) {
      v16f up = load<v16f>(values + c);
      if (bias) up += load<v16f>(bias + first + c);
      store_floats(activation + r * ldi + first + c, activate(w.activation, up));
    }
  };
  share.product(normed, ld, w.gate_up, unit, rounded_rows(w, scratch.rounded), share.start_of<T>(w.down, 1),
                [&](long r, long first, long columns, const float* values) {
                  w.gated ? gate_and_up(r, first, columns, values) : up_alone(r, first, columns, values);
                });
  share.barrier();
  add_product(share, w, scratch, activation, ldi, w.down, w.mlp_norm, hidden, (const T*)nullptr);
}

// Rows at `wanted`, ascending, moved to the front.
template <class V>
static void keep_rows(V* x, long row_size, const int64_t* wanted, long count) {
  for (long i = 0; i < count; i++) std::memmove(x + i * row_size, x + wanted[i] * row_size, row_size * sizeof(V));
}

// hidden [rows, hidden_size] -> after all layers, the `wanted` rows of it at its front. The last layer computes no others
// behind its attention.
template <class T>
static void run_layers(const Layer* layers, long num_layers, const Scratch& scratch, float* hidden, const float* cos_sin,
                       T* attention, long rows, const int64_t* wanted, long num_wanted) {
  const LayerWeights& w = *layers->weights;
  std::vector<Part> parts(w.num_threads);
#pragma omp parallel num_threads(w.num_threads)
  {
    Share share(rows, parts);
    for (const Layer* layer = layers; layer < layers + num_layers; layer++) {
      attention_input<T>(share, *layer->weights, scratch, hidden, cos_sin + layer->weights->rope * rows * w.head_dim);
#pragma omp barrier
      attend(*layer->attention, layer->k_cache, layer->v_cache, (const T*)scratch.q, (const T*)scratch.k,
             (const T*)scratch.v, attention, {layer->scale, layer->softcap, layer->window}, share.thread, share.threads);
#pragma omp barrier
      if (layer + 1 == layers + num_layers) {
#pragma omp single
        {
          keep_rows(hidden, w.hidden_size, wanted, num_wanted);
          keep_rows(attention, w.num_heads * w.head_dim, wanted, num_wanted);
        }
        share.set_rows(num_wanted);
      }
      attention_output(share, *layer->weights, scratch, hidden, attention);
#pragma omp barrier
    }
  }
}

// logits[rows, head.n] of the final norm, which stands in `w` as a layer's first, and the head
template <class T>
static void logits(const float* hidden, const LayerWeights& w, const Linear& head, T* normed, char* scratch, float* out,
                   long rows) {
  long hidden_size = w.hidden_size, ld = round_up(hidden_size, 2);
  std::vector<Part> parts(w.num_threads);
#pragma omp parallel num_threads(w.num_threads)
  {
    Share share(rows, parts);
    for (long r = share.row0; r < share.row1; r++)
      norm_row(w, hidden + r * hidden_size, w.input_norm, w.input_norm_bias, normed + r * ld);
    share.barrier();
    share.product(normed, ld, head, 1, {scratch, QuantisedRows::bytes(hidden_size), 0}, (const T*)nullptr,
                  [&](long r, long first, long columns, const float* values) {
                    put(out + r * head.n, values, head.bias, first, columns, head.n, false);
                  });
  }
}

// Row `id` of packed weights, taken out of its lane.
template <class T>
static void embed_row(const Linear& w, int64_t id, float* out, long columns) {
  constexpr long pair = Pair<T>::k;
  if (w.bits) return QuantisedWeights{(const uint8_t*)w.weight, w.scale, w.minimum, w.n, w.k, (int)w.bits}.read_row(id, out);
  const T* values = Packed<T>{(const T*)w.weight, w.n, w.k}.panel(id / LANES) + id % LANES * pair;
  for (long i = 0; i < columns; i++) out[i] = to_float(values[i / pair * pair * LANES + i % pair]);
}

// weight [n, k] -> panels of padded_k; the output is written whole, padding included
template <class T>
static void pack(const T* weight, T* out, long n, long k, long padded_k, int threads) {
  constexpr long pair = Pair<T>::k;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long p = 0; p < (n + LANES - 1) / LANES; p++)
    for (long i = 0; i < padded_k; i++)
      for (long lane = 0; lane < LANES; lane++) {
        long row = p * LANES + lane;
        T value{};
        if (row < n && i < k) value = weight[row * k + i];
        out[p * LANES * padded_k + i / pair * pair * LANES + lane * pair + i % pair] = value;
      }
}

// q [n, k], scale and minimum [n, k / 32] -> the panels of quantised.h, written whole
static void pack_quantised_panels(const uint8_t* q, const uint16_t* scale, const uint16_t* minimum, uint8_t* out,
                                  uint16_t* out_scale, uint16_t* out_minimum, long n, long k, int bits, int threads) {
  long groups = k / GROUP;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long p = 0; p < (n + LANES - 1) / LANES; p++)
    for (long g = 0; g < groups; g++)
      for (long lane = 0; lane < LANES; lane++) {
        long row = p * LANES + lane, to = (p * groups + g) * LANES + lane;
        out_scale[to] = row < n ? scale[row * groups + g] : 0;
        out_minimum[to] = row < n ? minimum[row * groups + g] : 0;
        const uint8_t* from = q + std::min(row, n - 1) * k + g * GROUP;
        uint8_t* panel = out + (p * groups + g) * LANES * GROUP * bits / 8;
        for (long j = 0; j < bits; j++)
          for (long i = 0; i < 4; i++)
            panel[(j * LANES + lane) * 4 + i] = bits == 8 ? from[4 * j + i] : from[4 * j + i] | from[4 * j + 16 + i] << 4;
      }
}

extern "C" {
void pack_quantised(const uint8_t* q, const uint16_t* scale, const uint16_t* minimum, uint8_t* out, uint16_t* out_scale,
                    uint16_t* out_minimum, long n, long k, int bits, int threads) {
  pack_quantised_panels(q, scale, minimum, out, out_scale, out_minimum, n, k, bits, threads);
}
#define EXPORT(NAME, T)                                                                                             \
  void attention_input_##NAME(const LayerWeights* w, const Scratch* scratch, const float* hidden,                   \
                              const float* cos_sin, long rows) {                                                    \
    std::vector<Part> parts(w->num_threads);                                                                        \
    _Pragma("omp parallel num_threads(w->num_threads)") {                                                           \
      Share share(rows, parts);                                                                                     \
      attention_input<T>(share, *w, *scratch, hidden, cos_sin);                                                     \
    }                                                                                                               \
  }                                                                                                                 \
  void attention_output_##NAME(const LayerWeights* w, const Scratch* scratch, float* hidden, const T* attention,    \
                               long rows) {                                                                         \
    std::vector<Part> parts(w->num_threads);                                                                        \
    _Pragma("omp parallel num_threads(w->num_threads)") {                                                           \
      Share share(rows, parts);                                                                                     \
      attention_output<T>(share, *w, *scratch, hidden, attention);                                                  \
    }                                                                                                               \
  }                                                                                                                 \
  void layers_##NAME(const Layer* layers, long num_layers, const Scratch* scratch, float* hidden,                   \
                     const float* cos_sin, T* attention, long rows, const int64_t* wanted, long num_wanted) {       \
    run_layers<T>(layers, num_layers, *scratch, hidden, cos_sin, attention, rows, wanted, num_wanted);              \
  }                                                                                                                 \
  void logits_##NAME(const float* hidden, const LayerWeights* w, const Linear* head, T* normed, char* scratch,      \
                     float* out, long rows) {                                                                       \
    logits<T>(hidden, *w, *head, normed, scratch, out, rows);                                                       \
  }                                                                                                                 \
  void embed_##NAME(const Linear* w, const int64_t* ids, float* out, long rows, long columns, int threads) {        \
    _Pragma("omp parallel for num_threads(rows < 16 ? 1 : threads) schedule(static)")                               \
    for (long r = 0; r < rows; r++) embed_row<T>(*w, ids[r], out + r * columns, columns);                           \
  }                                                                                                                 \
  void pack_##NAME(const T* weight, T* out, long n, long k, long padded_k, int threads) {                           \
    pack<T>(weight, out, n, k, padded_k, threads);                                                                  \
  }
EXPORT(float32, float)
EXPORT(bfloat16, bf16)
}
