// Vectors of the processor, as portable C++ (vector extensions of GCC and Clang), no intrinsics.
#pragma once

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace {

using at::BFloat16;
using at::Tensor;

#if defined(__AVX512F__)
constexpr int LANES = 16, SUMS = 24, TILE = 6;  // sums that leave room for operands among the 32 registers
#else
constexpr int LANES = 8, SUMS = 12, TILE = 2;
#endif
typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef float Four __attribute__((vector_size(16)));
typedef int32_t Int __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
typedef uint16_t Half __attribute__((vector_size(LANES * 2)));

template <class To, class From>
inline To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline Vec widen(Half half) { return same_bits<Vec>(__builtin_convertvector(half, Bits) << 16); }

inline Half narrow(Vec value) {  // to the nearest, ties to even; a NaN stays one
  Bits bits = same_bits<Bits>(value);
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Bits kept = value == value ? rounded : Bits{} + 0x7fc0;
  return __builtin_convertvector(kept, Half);
}

inline Vec load(const float* from) {
  Vec value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline Vec load(const BFloat16* from) {
  Half half;
  std::memcpy(&half, from, sizeof half);
  return widen(half);
}

template <class T>
inline Vec load(const T* from, int64_t count, float beyond = 0) {
  if (count >= LANES) [[likely]] return load(from);
  Vec value = Vec{} + beyond;
  for (int64_t i = 0; i < count; i++) value[i] = static_cast<float>(from[i]);
  return value;
}

template <class T, class V>
inline void store_lanes(T* to, V value, int64_t count) {
  if (count >= LANES) [[likely]]
    std::memcpy(static_cast<void*>(to), &value, sizeof value);
  else
    std::memcpy(static_cast<void*>(to), &value, count * sizeof(T));
}

inline void store(float* to, Vec value, int64_t count) { store_lanes(to, value, count); }

inline void store(BFloat16* to, Vec value, int64_t count) { store_lanes(to, narrow(value), count); }

inline Vec larger(Vec a, Vec b) { return a < b ? b : a; }

inline Vec exponential(Vec x) {  // to two units in the last place; 0 below -87, e⁸⁸ above 88; a NaN stays one
  auto tiny = x < -87.0f;
  x = x > 88.0f ? Vec{} + 88.0f : x;
  x = tiny ? Vec{} : x;
  Vec whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  Vec rest = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
  Vec sum = Vec{} + 1.0f / 720;
  for (float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * rest + factor;
  Vec power = same_bits<Vec>((__builtin_convertvector(whole, Int) + 127) << 23);
  return tiny ? Vec{} : sum * power;
}

// Sums of W neighbours: the blocks of W lanes of `a` and `b`, added in pairs, in turn.
template <int W, size_t... I>
inline Vec paired(Vec a, Vec b, std::index_sequence<I...>) {
  return __builtin_shufflevector(a, b, ((I / W % 2 ? LANES : 0) + I / W / 2 * 2 * W + I % W)...) +
         __builtin_shufflevector(a, b, ((I / W % 2 ? LANES : 0) + I / W / 2 * 2 * W + W + I % W)...);
}

template <int W>
inline Vec paired(Vec a, Vec b) {
  return paired<W>(a, b, std::make_index_sequence<LANES>());
}

template <int W>
inline Vec folded(Vec v) {  // every lane holds the sum of its block of 2 W lanes
  if constexpr (W == 0) return v;
  else return folded<W / 2>(paired<W>(v, v));
}

// Two rows of a square of lanes change places with each other's blocks of W lanes.
template <int W, size_t... I>
inline void crossed(Vec& a, Vec& b, std::index_sequence<I...>) {
  Vec low = __builtin_shufflevector(a, b, (I / W % 2 ? LANES + I - W : I)...);
  b = __builtin_shufflevector(a, b, (I / W % 2 ? LANES + I : I + W)...);
  a = low;
}

template <int W = LANES / 2>
inline void transpose(Vec (&square)[LANES]) {
  if constexpr (W > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
      if (!(i & W)) crossed<W>(square[i], square[i + W], std::make_index_sequence<LANES>());
    transpose<W / 2>(square);
  }
}

inline float sum(Vec v) { return folded<LANES / 2>(v)[0]; }

inline float largest(Vec v) {
  float most = v[0];
  for (int i = 1; i < LANES; i++) most = std::max(most, v[i]);
  return most;
}

#define FOR_TYPE(tensor, T, ...)                                                            \
  if ((tensor).scalar_type() == at::kFloat) {                                               \
    using T = float;                                                                        \
    __VA_ARGS__                                                                             \
  } else {                                                                                  \
    TORCH_CHECK((tensor).scalar_type() == at::kBFloat16, "float32 or bfloat16, not ", (tensor).scalar_type()); \
    using T = BFloat16;                                                                     \
    __VA_ARGS__                                                                             \
  }

int64_t grain(int64_t cost) {  // items that are worth another thread
  return std::max<int64_t>(1, 30000 / std::max<int64_t>(1, cost));
}

}  // namespace
