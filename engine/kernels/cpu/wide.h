// Vectors of N lanes as two halves, down to what fits a register: on machines without registers of 64 bytes GCC keeps its
// own vectors of that size in memory, at a fiftieth of the speed. Same spelling as GCC's: operators, comparisons with
// results of 0 or -1, casts that keep the bits, initialisers.
#pragma once
#include <cstdint>
#include <cstring>

template <class T, int N, bool FITS = N <= WIDTH>
struct Lanes;

template <class T, int N>
struct Lanes<T, N, true> {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};

template <class T, int N>
struct Lanes<T, N, false> {
  using type = Lanes;
  using Half = typename Lanes<T, N / 2>::type;
  Half low, high;

  T operator[](long i) const {
    T values[N];
    std::memcpy(values, this, sizeof values);
    return values[i];
  }
  template <class U>
  explicit operator Lanes<U, N, false>() const {
    using To = typename Lanes<U, N / 2>::type;
    return {(To)low, (To)high};
  }
  Lanes operator-() const { return {-low, -high}; }
  Lanes operator~() const { return {~low, ~high}; }
};

template <class T>
struct Same {  // keeps a parameter out of template deduction, so that a scalar is converted
  using type = T;
};

#define BINARY(OP, RESULT)                                                                                    \
  template <class T, int N>                                                                                   \
  static inline Lanes<RESULT, N, false> operator OP(const Lanes<T, N, false>& a, const Lanes<T, N, false>& b) { \
    return {a.low OP b.low, a.high OP b.high};                                                                \
  }                                                                                                           \
  template <class T, int N>                                                                                   \
  static inline Lanes<RESULT, N, false> operator OP(const Lanes<T, N, false>& a, typename Same<T>::type b) {  \
    return {a.low OP b, a.high OP b};                                                                         \
  }                                                                                                           \
  template <class T, int N>                                                                                   \
  static inline Lanes<RESULT, N, false> operator OP(typename Same<T>::type a, const Lanes<T, N, false>& b) {  \
    return {a OP b.low, a OP b.high};                                                                         \
  }
#define ARITHMETIC(OP)                                                                         \
  BINARY(OP, T)                                                                                \
  template <class T, int N, class B>                                                           \
  static inline Lanes<T, N, false>& operator OP##=(Lanes<T, N, false>& a, const B& b) {        \
    return a = a OP b;                                                                         \
  }
ARITHMETIC(+)
ARITHMETIC(-)
ARITHMETIC(*)
ARITHMETIC(/)
ARITHMETIC(&)
ARITHMETIC(|)
ARITHMETIC(>>)
ARITHMETIC(<<)
BINARY(<, int32_t)
BINARY(>, int32_t)
BINARY(>=, int32_t)
BINARY(==, int32_t)
BINARY(!=, int32_t)
#undef ARITHMETIC
#undef BINARY

template <class To, class T, int N>
static inline To convert(const Lanes<T, N, false>& x) {
  using Half = typename To::Half;
  return {convert<Half>(x.low), convert<Half>(x.high)};
}
