// What this machine can do at most, for `octavo bench kernels`: reading memory, and products from registers.
#include <omp.h>

#include "quantised.h"

constexpr int SUMS = ROWS * panels_at_once(ROWS) * PARTS;  // independent ones, as many as the kernels keep in registers

template <class Sum, class Weights, class X, class Dot>
static float multiply(long repetitions, int threads, Dot&& dot) {
  float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    Sum sums[SUMS] = {};
    Weights weights = {};
    alignas(64) X x[4] = {};
    asm volatile("" : "+m"(weights), "+m"(x));  // values that the compiler does not know
    for (long i = 0; i < repetitions; i++)
#pragma GCC unroll 32
      for (int s = 0; s < SUMS; s++) sums[s] = dot(sums[s], weights, x);
    for (int s = 0; s < SUMS; s++) total += (float)sums[s][0];
  }
  return total;
}

extern "C" {
// Every thread reads its share of `bytes` once; the result keeps the compiler from leaving it out.
int read_memory(const char* data, long bytes, int threads) {
  int total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    constexpr long step = 4 * sizeof(v16i);
    long thread = omp_get_thread_num(), count = omp_get_num_threads();
    long begin = bytes / step * thread / count * step, end = bytes / step * (thread + 1) / count * step;
    v16i sums[4] = {};
    for (long at = begin; at < end; at += step)
#pragma GCC unroll 4
      for (long i = 0; i < 4; i++) sums[i] += load<v16i>(data + at + i * sizeof(v16i));
    v16i sum = sums[0] + sums[1] + sums[2] + sums[3];
    for (int i = 0; i < LANES; i++) total += sum[i];
  }
  return total;
}

// Each thread: repetitions * products_per_repetition() vectors of weights times one activation.
long products_per_repetition() { return SUMS / PARTS; }
float multiply_float32(long repetitions, int threads) {
  return multiply<vf, vf, float>(repetitions, threads, [](vf sum, vf w, const float* x) { return dot(sum, w, x); });
}
float multiply_bfloat16(long repetitions, int threads) {
  return multiply<vf, vi, bf16>(repetitions, threads, [](vf sum, vi w, const bf16* x) { return dot(sum, w, x); });
}
float multiply_int8(long repetitions, int threads) {
  return multiply<vi, vu, int8_t>(repetitions, threads,
                                      [](vi sum, vu w, const int8_t* x) { return dot_quad(sum, w, x); });
}
}
