// The three operations of a decoder layer and the logits, each one parallel region. Twin: engine/kernels/torch_ops.py.
//
// Few rows: threads share the panels of each product, with a barrier between the stages.
// Many rows: each thread takes its rows through all stages.
#include <omp.h>

#include "matmul.h"

extern "C" {
struct LayerWeights {  // mirrored by engine/kernels/cpu/ops.py
  long hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rotary_dim;
  float eps;
  int num_threads;
  const float *input_norm, *post_norm, *q_norm, *k_norm;  // q_norm, k_norm: [head_dim] or null
  const void *qkv, *output, *gate_up, *down;              // packed; gate_up: a panel of gate, then the same of up
  const float *qkv_bias, *output_bias, *gate_up_bias, *down_bias;  // or null; gate_up_bias in the panels' order
};
}

static long round_up(long n, long to) { return (n + to - 1) / to * to; }

struct Share {  // what one thread does
  long rows, row0, row1;
  int thread, threads;
  bool by_rows;

  Share(long rows, int thread, int threads) : rows(rows), thread(thread), threads(threads) {
    by_rows = rows >= 4 * ROWS * threads;
    long tiles = round_up(rows, ROWS) / ROWS;
    row0 = by_rows ? std::min(rows, tiles * thread / threads * ROWS) : rows * thread / threads;
    row1 = by_rows ? std::min(rows, tiles * (thread + 1) / threads * ROWS) : rows * (thread + 1) / threads;
  }
  // First panel of thread `t`; a multiple of `unit`.
  template <class T>
  long panel_of(int t, const Packed<T>& w, long unit) const {
    long units = round_up(w.panels(), unit) / unit;
    return by_rows ? (t > thread ? w.panels() : 0) : std::min(w.panels(), units * t / threads * unit);
  }
  // `then`: the product that follows
  template <class T, class Epilogue>
  void product(const T* x, long ldx, const Packed<T>& w, long unit, const Packed<T>* then, Epilogue&& epilogue) const {
    const T* next = then ? then->panel(panel_of(thread, *then, 2)) : nullptr;
    matmul(x, ldx, w, by_rows ? row0 : 0, by_rows ? row1 : rows, panel_of(thread, w, unit), panel_of(thread + 1, w, unit),
           next, epilogue);
  }
  void barrier() const {
    if (!by_rows && threads > 1) {
#pragma omp barrier
    }
  }
};

// y = x / rms(x) * weight (arXiv 1910.07467)
template <class T>
static void rms_norm(const float* x, const float* weight, T* y, long n, float eps) {
  v16f squares = {};
  long i = 0;
  for (; i + LANES <= n; i += LANES) {
    v16f v = load<v16f>(x + i);
    squares += v * v;
  }
  float sum = sum_lanes(squares);
  for (long j = i; j < n; j++) sum += x[j] * x[j];
  float scale = 1.0f / std::sqrt(sum / n + eps);
  for (i = 0; i + LANES <= n; i += LANES) store_floats(y + i, load<v16f>(x + i) * scale * load<v16f>(weight + i));
  for (; i < n; i++) from_float(y + i, x[i] * scale * weight[i]);
}

template <class T>
static void add_to(float* to, const float* values, const float* bias, long first, long columns, long n) {
  long end = std::min(n, first + columns);
  for (long c = first; c < end; c++) to[c] += values[c - first] + (bias ? bias[c] : 0.0f);
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
  for (long h = 0; h < all; h++) {
    float* x = row + h * d;
    bool is_q = h < w.num_heads, is_v = h >= w.num_heads + w.num_kv_heads;
    if (w.qkv_bias)
      for (long i = 0; i < d; i++) x[i] += w.qkv_bias[h * d + i];
    const float* norm = is_q ? w.q_norm : w.k_norm;
    if (!is_v && norm) rms_norm(x, norm, x, d, w.eps);
    if (!is_v) rotate(x, cos_sin, w.rotary_dim);
    T* to = is_q ? q + h * d : is_v ? v + (h - w.num_heads - w.num_kv_heads) * d : k + (h - w.num_heads) * d;
    for (long i = 0; i < d; i++) from_float(to + i, x[i]);
  }
}

template <class T>
static void attention_input(const LayerWeights& w, const float* hidden, const float* cos_sin, T* normed, float* qkv,
                            T* q, T* k, T* v, long rows) {
  long kd = w.num_kv_heads * w.head_dim, qd = w.num_heads * w.head_dim, n = qd + 2 * kd;
  long ld = round_up(w.hidden_size, 2), ldy = round_up(n, LANES);
  Packed<T> weight{(const T*)w.qkv, nullptr, n, round_up(w.hidden_size, Pair<T>::k)};
#pragma omp parallel num_threads(w.num_threads)
  {
    Share share(rows, omp_get_thread_num(), omp_get_num_threads());
    for (long r = share.row0; r < share.row1; r++)
      rms_norm(hidden + r * w.hidden_size, w.input_norm, normed + r * ld, w.hidden_size, w.eps);
    share.barrier();
    share.product(normed, ld, weight, 1, (const Packed<T>*)nullptr, [&](long r, long first, long columns, const float* values) {
      std::memcpy(qkv + r * ldy + first, values, columns * sizeof(float));
    });
    share.barrier();
    for (long r = share.row0; r < share.row1; r++)
      heads(w, qkv + r * ldy, cos_sin + r * w.rotary_dim, q + r * qd, k + r * kd, v + r * kd);
  }
}

template <class T>
static void attention_output(const LayerWeights& w, float* hidden, const T* attention, T* normed, T* activation,
                             long rows) {
  long h = w.hidden_size, qd = w.num_heads * w.head_dim, even = Pair<T>::k;
  long ld = round_up(h, 2), ldi = round_up(w.intermediate_size, LANES);
  Packed<T> output{(const T*)w.output, w.output_bias, h, round_up(qd, even)};
  Packed<T> gate_up{(const T*)w.gate_up, w.gate_up_bias, 2 * ldi, round_up(h, even)};
  Packed<T> down{(const T*)w.down, w.down_bias, h, ldi};
#pragma omp parallel num_threads(w.num_threads)
  {
    Share share(rows, omp_get_thread_num(), omp_get_num_threads());
    share.product(attention, qd, output, 1, &gate_up, [&](long r, long first, long columns, const float* values) {
      add_to<T>(hidden + r * h, values, w.output_bias, first, columns, h);
    });
    share.barrier();
    for (long r = share.row0; r < share.row1; r++)
      rms_norm(hidden + r * h, w.post_norm, normed + r * ld, h, w.eps);
    share.barrier();
    share.product(normed, ld, gate_up, 2, &down, [&](long r, long first, long columns, const float* values) {
      for (long c = 0; c < columns; c += 2 * LANES) {
        v16f gate = load<v16f>(values + c), up = load<v16f>(values + c + LANES);
        if (w.gate_up_bias) {
          gate += load<v16f>(w.gate_up_bias + first + c);
          up += load<v16f>(w.gate_up_bias + first + c + LANES);
        }
        store_floats(activation + r * ldi + (first + c) / 2, silu(gate) * up);
      }
    });
    share.barrier();
    share.product(activation, ldi, down, 1, (const Packed<T>*)nullptr, [&](long r, long first, long columns, const float* values) {
      add_to<T>(hidden + r * h, values, w.down_bias, first, columns, h);
    });
  }
}

// logits[rows, n] of the final norm and the head
template <class T>
static void logits(const float* hidden, const float* norm, const T* head, T* normed, float* out, long rows,
                   long hidden_size, long n, float eps, int threads) {
  long ld = round_up(hidden_size, 2);
  Packed<T> weight{head, nullptr, n, round_up(hidden_size, Pair<T>::k)};
#pragma omp parallel num_threads(threads)
  {
    Share share(rows, omp_get_thread_num(), omp_get_num_threads());
    for (long r = share.row0; r < share.row1; r++)
      rms_norm(hidden + r * hidden_size, norm, normed + r * ld, hidden_size, eps);
    share.barrier();
    share.product(normed, ld, weight, 1, (const Packed<T>*)nullptr, [&](long r, long first, long columns, const float* values) {
      std::memcpy(out + r * n + first, values, std::min(columns, n - first) * sizeof(float));
    });
  }
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

extern "C" {
#define EXPORT(NAME, T)                                                                                             \
  void attention_input_##NAME(const LayerWeights* w, const float* hidden, const float* cos_sin, T* normed,          \
                              float* qkv, T* q, T* k, T* v, long rows) {                                            \
    attention_input<T>(*w, hidden, cos_sin, normed, qkv, q, k, v, rows);                                            \
  }                                                                                                                 \
  void attention_output_##NAME(const LayerWeights* w, float* hidden, const T* attention, T* normed, T* activation,  \
                               long rows) {                                                                         \
    attention_output<T>(*w, hidden, attention, normed, activation, rows);                                           \
  }                                                                                                                 \
  void logits_##NAME(const float* hidden, const float* norm, const T* head, T* normed, float* out, long rows,       \
                     long hidden_size, long n, float eps, int threads) {                                            \
    logits<T>(hidden, norm, head, normed, out, rows, hidden_size, n, eps, threads);                                 \
  }                                                                                                                 \
  void pack_##NAME(const T* weight, T* out, long n, long k, long padded_k, int threads) {                           \
    pack<T>(weight, out, n, k, padded_k, threads);                                                                  \
  }
EXPORT(float32, float)
EXPORT(bfloat16, bf16)
}
