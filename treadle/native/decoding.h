// What a decode step does, as loops over vectors: portable C++ (vector extensions of GCC and Clang), no intrinsics.
//
// Activations are float or bfloat16 (the type the matrix products want), the residual stream is float, weights and cache
// are float or bfloat16; all sums are float. The result of a row never depends on which rows share its pass: every
// output is made by the same operations in the same order, however many rows there are.
//
// Axes: R rows · E hidden size · N outputs of a matrix · H query heads · K key/value heads · G = H / K · D head size ·
// C capacity of a slot · V vocabulary.

#pragma once

#include "vectors.h"

namespace {

// ---------------------------------------------------------------------------------------------------- dot products

// out[m][n] = Σ_k a[m][k] · b[n][k] for M × N rows; meanwhile the next N rows of `b` are fetched into the cache.
template <int M, int N, bool FETCHES, class B>
inline void tile(const float* a, int64_t stride_a, const B* b, int64_t size, float* out, int64_t stride_out) {
  Vec sums[M][N] = {};
  int64_t k = 0;
  for (; k + LANES <= size; k += LANES) {
    Vec right[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) right[n] = load(b + n * size + k);
    if constexpr (FETCHES) {
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) __builtin_prefetch(b + (N + n) * size + k, 0, 2);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      Vec left = load(a + m * stride_a + k);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sums[m][n] += left * right[n];
    }
  }
  if (k < size) [[unlikely]] {
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) sums[m][n] += load(a + m * stride_a + k, size - k) * load(b + n * size + k, size - k);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    if constexpr (N == 4) {
      Vec four = paired<LANES / 4>(paired<LANES / 2>(sums[m][0], sums[m][2]), paired<LANES / 2>(sums[m][1], sums[m][3]));
      four = folded<LANES / 8>(four);
      Four found = __builtin_shufflevector(four, four, 0, LANES / 4, LANES / 2, LANES / 4 * 3);
      std::memcpy(out + m * stride_out, &found, sizeof found);
    } else {
      for (int n = 0; n < N; n++) out[m * stride_out + n] = sum(sums[m][n]);
    }
  }
}

template <int M, bool FETCHES, class B>
void strip(const float* a, int64_t stride_a, const B* b, int64_t rows, int64_t size, float* out, int64_t stride_out) {
  int64_t n = 0;
  for (; n + 4 <= rows; n += 4) tile<M, 4, FETCHES>(a, stride_a, b + n * size, size, out + n, stride_out);
  for (; n < rows; n++) tile<M, 1, false>(a, stride_a, b + n * size, size, out + n, stride_out);
}

template <bool FETCHES, class B, int... M>
void strip_of(int64_t m, const float* a, int64_t stride_a, const B* b, int64_t rows, int64_t size, float* out,
              int64_t stride_out, std::integer_sequence<int, M...>) {
  using Strip = void (*)(const float*, int64_t, const B*, int64_t, int64_t, float*, int64_t);
  static constexpr Strip strips[] = {strip<M + 1, FETCHES, B>...};
  strips[m - 1](a, stride_a, b, rows, size, out, stride_out);
}

// out[m][n] = Σ_k a[m][k] · b[n][k]. The first tiles fetch the four rows that the next one reads; they stay for the others.
template <class B>
void dots(int64_t count, const float* a, int64_t stride_a, const B* b, int64_t rows, int64_t size, float* out,
          int64_t stride_out) {
  constexpr std::make_integer_sequence<int, TILE> sizes;
  for (int64_t m = 0; m < count; m += TILE) {
    int64_t some = std::min<int64_t>(TILE, count - m);
    const float* left = a + m * stride_a;
    if (m == 0)
      strip_of<true>(some, left, stride_a, b, rows, size, out, stride_out, sizes);
    else
      strip_of<false>(some, left, stride_a, b, rows, size, out + m * stride_out, stride_out, sizes);
  }
}

// ---------------------------------------------------------------------------------------------------- norms, rotation

template <class W>
inline float inverse_rms(const W* x, int64_t size, double eps) {
  Vec squares = {};
  for (int64_t i = 0; i < size; i += LANES) {
    Vec value = load(x + i, size - i);
    squares += value * value;
  }
  return 1.0f / std::sqrt(sum(squares) / size + static_cast<float>(eps));
}

// x [R, E] float becomes x + delta; returns its root-mean-square norm times `weight` (Zhang, Sennrich 2019), in `like`.
Tensor add_norm(Tensor x, const std::optional<Tensor>& delta, const Tensor& weight, double eps, at::ScalarType like) {
  TORCH_CHECK(x.is_contiguous() && (!delta || delta->is_contiguous()), "rows must be contiguous");
  int64_t rows = x.size(0), size = x.size(1);
  Tensor out = at::empty({rows, size}, x.options().dtype(like));
  float* stream = x.data_ptr<float>();
  FOR_TYPE(out, T, FOR_TYPE(weight, W, {
    const T* add = delta ? delta->const_data_ptr<T>() : nullptr;
    const W* scale = weight.const_data_ptr<W>();
    T* to = out.data_ptr<T>();
    at::parallel_for(0, rows, grain(size / 4), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++) {
        float* row = stream + r * size;
        if (add != nullptr)
          for (int64_t i = 0; i < size; i += LANES)
            store(row + i, load(row + i, size - i) + load(add + r * size + i, size - i), size - i);
        float factor = inverse_rms(row, size, eps);
        for (int64_t i = 0; i < size; i += LANES)
          store(to + r * size + i, load(row + i, size - i) * factor * load(scale + i, size - i), size - i);
      }
    });
  }))
  return out;
}

// One head: normed if there is a weight, then its two halves rotated (Su et al. 2021).
template <class T, class W>
inline void rotate_head(T* head, const W* norm, double eps, const float* cosine, const float* sine, int64_t size) {
  float factor = norm == nullptr ? 1.0f : inverse_rms(head, size, eps);
  int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    Vec low = load(head + i, half - i), high = load(head + half + i, half - i);
    if (norm != nullptr) {
      low = low * factor * load(norm + i, half - i);
      high = high * factor * load(norm + half + i, half - i);
    }
    if (cosine != nullptr) {
      Vec turned = low * load(cosine + i, half - i) - high * load(sine + i, half - i);
      high = high * load(cosine + half + i, half - i) + low * load(sine + half + i, half - i);
      low = turned;
    }
    store(head + i, low, half - i);
    store(head + half + i, high, half - i);
  }
}

// Queries and keys of qkv [R, (H + 2 K) · D] in place, cosine and sine [R, D] float; none of them: norms alone.
void rotate(Tensor qkv, int64_t heads, int64_t keys, const std::optional<Tensor>& q_norm,
            const std::optional<Tensor>& k_norm, double eps, const std::optional<Tensor>& cosine,
            const std::optional<Tensor>& sine) {
  TORCH_CHECK(qkv.is_contiguous(), "qkv must be contiguous");
  int64_t rows = qkv.size(0), width = qkv.size(1), size = width / (heads + 2 * keys);
  const float* cos = cosine ? cosine->const_data_ptr<float>() : nullptr;
  const float* sin = sine ? sine->const_data_ptr<float>() : nullptr;
  const Tensor& typed = q_norm ? *q_norm : qkv;
  FOR_TYPE(qkv, T, FOR_TYPE(typed, W, {
    const W* norms[2] = {q_norm ? q_norm->const_data_ptr<W>() : nullptr, k_norm ? k_norm->const_data_ptr<W>() : nullptr};
    T* all = qkv.data_ptr<T>();
    at::parallel_for(0, rows, grain(width / 4), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++)
        for (int64_t h = 0; h < heads + keys; h++)
          rotate_head(all + r * width + h * size, norms[h >= heads], eps, cos ? cos + r * size : nullptr,
                      sin ? sin + r * size : nullptr, size);
    });
  }))
}

// gate_up [R, 2 N] to SiLU(gate) · up [R, N] (Shazeer 2020).
Tensor silu_mul(const Tensor& gate_up) {
  TORCH_CHECK(gate_up.is_contiguous(), "gate_up must be contiguous");
  int64_t rows = gate_up.size(0), size = gate_up.size(1) / 2;
  Tensor out = at::empty({rows, size}, gate_up.options());
  FOR_TYPE(gate_up, T, {
    const T* from = gate_up.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    at::parallel_for(0, rows, grain(size / 2), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++)
        for (int64_t i = 0; i < size; i += LANES) {
          const T* at = from + 2 * r * size + i;
          Vec gate = load(at, size - i), up = load(at + size, size - i);
          store(to + r * size + i, gate / (exponential(-gate) + 1.0f) * up, size - i);
        }
    });
  })
  return out;
}

// ---------------------------------------------------------------------------------------------------- attention

// out[m] = Σ_t weight[m][t] · value[t], added to what is there; [D] each.
template <int M, class C>
void weighted(const float* weight, int64_t stride, const C* value, int64_t count, int64_t size, float* out) {
  for (int64_t d = 0; d < size; d += LANES) {
    Vec sums[M];
    for (int m = 0; m < M; m++) sums[m] = load(out + m * size + d, size - d);
    for (int64_t t = 0; t < count; t++) {
      Vec one = load(value + t * size + d, size - d);
      for (int m = 0; m < M; m++) sums[m] += one * weight[m * stride + t];
    }
    for (int m = 0; m < M; m++) store(out + m * size + d, sums[m], size - d);
  }
}

template <class C, int... M>
void weighted_of(int64_t count, const float* weight, int64_t stride, const C* value, int64_t tokens, int64_t size,
                 float* out, std::integer_sequence<int, M...>) {
  using Weighted = void (*)(const float*, int64_t, const C*, int64_t, int64_t, float*);
  static constexpr Weighted all[] = {weighted<M + 1, C>...};
  for (int64_t m = 0; m < count; m += TILE)
    all[std::min<int64_t>(TILE, count - m) - 1](weight + m * stride, stride, value, tokens, size, out + m * size);
}

// Scores to weights: softmax over `count`. Returns the logarithm of the normaliser.
inline float softmax(float* score, int64_t count) {
  Vec most = Vec{} - std::numeric_limits<float>::infinity();
  for (int64_t t = 0; t < count; t += LANES) most = larger(most, load(score + t, count - t, score[0]));
  float peak = largest(most);
  Vec total = {};
  for (int64_t t = 0; t < count; t += LANES) {
    Vec value = exponential(load(score + t, count - t, -std::numeric_limits<float>::infinity()) - peak);
    store(score + t, value, count - t);
    total += load(score + t, count - t);
  }
  float factor = 1.0f / sum(total);
  for (int64_t t = 0; t < count; t += LANES) store(score + t, load(score + t, count - t) * factor, count - t);
  return peak - std::log(factor);
}

// Ask for the beginning of a stretch of memory; what follows comes by itself.
template <class C>
inline void fetch(const C* from, int64_t count) {
  const char* bytes = reinterpret_cast<const char*>(from);
  for (int64_t i = 0; i < std::min<int64_t>(count * sizeof(C), 4096); i += 64) __builtin_prefetch(bytes + i, 0, 2);
}

constexpr int64_t PLACE = 6;  // of a row: shelf, slot and length of its prompt's part, then of its own

// The new token of every row: its key and value enter the cache, and its queries attend to all before and itself.
// q [R, H, D], k, v [R, K, D] in one type; keys, values: shelves [slots, K, C, D]; place [R, 6] int64, where the
// lengths do not count the new token, which belongs to the row's own part. Returns [R, H · D].
Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, at::TensorList keys, at::TensorList values,
              const Tensor& place, double scale) {
  int64_t rows = q.size(0), heads = q.size(1), size = q.size(2), groups = k.size(1), share = heads / groups;
  TORCH_CHECK(place.is_contiguous() && place.scalar_type() == at::kLong && place.size(1) == PLACE, "place [R, 6]");
  for (const Tensor& x : {q, k, v}) TORCH_CHECK(x.stride(2) == 1 && (x.size(1) == 1 || x.stride(1) == size), "heads must lie end to end");
  Tensor out = at::empty({rows, heads * size}, q.options());
  const int64_t* places = place.const_data_ptr<int64_t>();
  int64_t longest = 0;
  for (int64_t r = 0; r < rows; r++) longest = std::max(longest, places[r * PLACE + 2] + places[r * PLACE + 5] + 1);
  constexpr std::make_integer_sequence<int, TILE> sizes;
  FOR_TYPE(q, T, FOR_TYPE(keys[0], C, {
    const T *queries = q.const_data_ptr<T>(), *new_k = k.const_data_ptr<T>(), *new_v = v.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    // Heads outside, rows inside: rows that share a prompt follow each other and find its keys in the cache.
    at::parallel_for(0, groups * rows, grain(longest * size / 4), [&](int64_t begin, int64_t end) {
      std::vector<float> query(share * size), score(share * longest), sums(share * size);
      for (int64_t i = begin; i < end; i++) {
        int64_t head = i / rows, r = i % rows, total = 0;
        const int64_t *at = places + r * PLACE, *after = places + (r + 1) % rows * PLACE;
        auto part = [&](at::TensorList shelves, const int64_t* where) {
          const Tensor& shelf = shelves[where[0]];
          return static_cast<C*>(shelf.data_ptr()) + (where[1] * groups + head) * shelf.size(2) * size;
        };
        fetch(part(values, at + 3), at[5] * size);
        fetch(part(keys, after + 3), after[5] * size);
        C* own_k = part(keys, at + 3) + at[5] * size;
        C* own_v = part(values, at + 3) + at[5] * size;
        for (int64_t d = 0; d < size; d += LANES) {
          store(own_k + d, load(new_k + r * k.stride(0) + head * size + d, size - d), size - d);
          store(own_v + d, load(new_v + r * v.stride(0) + head * size + d, size - d), size - d);
        }
        const T* mine = queries + r * q.stride(0) + head * share * size;
        for (int64_t d = 0; d < share * size; d++) query[d] = static_cast<float>(mine[d]) * static_cast<float>(scale);
        std::fill(sums.begin(), sums.end(), 0.0f);
        const int64_t lengths[2] = {at[2], at[5] + 1};
        for (int p = 0; p < 2; p++) {
          if (lengths[p] > 0)
            dots(share, query.data(), size, part(keys, at + 3 * p), lengths[p], size, score.data() + total, longest);
          total += lengths[p];
        }
        for (int64_t g = 0; g < share; g++) softmax(score.data() + g * longest, total);
        total = 0;
        for (int p = 0; p < 2; p++) {
          if (lengths[p] > 0)
            weighted_of(share, score.data() + total, longest, part(values, at + 3 * p), lengths[p], size, sums.data(),
                        sizes);
          total += lengths[p];
        }
        T* result = to + (r * heads + head * share) * size;
        for (int64_t d = 0; d < share * size; d += LANES)
          store(result + d, load(sums.data() + d, share * size - d), share * size - d);
      }
    });
  }))
  return out;
}

// ---------------------------------------------------------------------------------------------------- sampling

constexpr int64_t CHUNK = 256;

// Where cumulated weights pass a fraction of their total, and the fraction of that entry which lies before it.
std::pair<int64_t, double> search(const std::vector<double>& weight, int64_t count, double fraction, double total) {
  double target = std::min(fraction * total, std::nextafter(total, 0.0)), before = 0;
  for (int64_t i = 0; i < count; i++) {
    if (before + weight[i] > target)
      return {i, std::clamp((target - before) / std::max(weight[i], std::numeric_limits<double>::min()), 0.0, 1.0)};
    before += weight[i];
  }
  return {count - 1, 1.0};
}

// One token: a search over sums of chunks, then over one chunk, as `sampling.sample` does.
template <class T>
std::pair<int64_t, float> draw(const T* logit, int64_t vocabulary, float temperature, double uniform) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  bool greedy = temperature == 0;
  float divisor = greedy ? 1.0f : temperature;
  auto scaled = [&](int64_t i) { return load(logit + i, vocabulary - i, -infinity) / divisor; };
  Vec most = Vec{} - infinity;
  for (int64_t i = 0; i < vocabulary; i += LANES) most = larger(most, scaled(i));
  float peak = largest(most);
  std::vector<double> sums((vocabulary + CHUNK - 1) / CHUNK), within(CHUNK);
  double total = 0, inside = 0;
  for (size_t c = 0; c < sums.size(); c++) {
    Vec weights = {};
    for (int64_t i = c * CHUNK; i < std::min<int64_t>(vocabulary, (c + 1) * CHUNK); i += LANES) {
      Vec weight = exponential(scaled(i) - peak);
      weights += vocabulary - i < LANES ? load(reinterpret_cast<const float*>(&weight), vocabulary - i) : weight;
    }
    total += sums[c] = sum(weights);
  }
  int64_t token = 0;
  if (greedy) {
    while (token < vocabulary - 1 && static_cast<float>(logit[token]) != peak) token++;
  } else {
    auto [chunk, left] = search(sums, sums.size(), uniform, total);
    int64_t first = chunk * CHUNK, count = std::min<int64_t>(CHUNK, vocabulary - first);
    for (int64_t i = 0; i < count; i += LANES) {
      Vec weight = exponential(scaled(first + i) - peak);
      for (int64_t j = 0; j < std::min<int64_t>(LANES, count - i); j++) inside += within[i + j] = weight[j];
    }
    token = first + search(within, count, left, inside).first;
  }
  float chosen = static_cast<float>(logit[token]) / divisor;
  return {token, static_cast<float>(static_cast<double>(chosen - peak) - std::log(total))};
}

// logits [R, V], temperature [R] float (0: the most likely), uniform [R] double: token int64 and log-prob float, [R].
std::tuple<Tensor, Tensor> sample(const Tensor& logits, const Tensor& temperature, const Tensor& uniform) {
  int64_t rows = logits.size(0), vocabulary = logits.size(1);
  TORCH_CHECK(logits.is_contiguous(), "logits must be contiguous");
  Tensor token = at::empty({rows}, logits.options().dtype(at::kLong));
  Tensor logprob = at::empty({rows}, logits.options().dtype(at::kFloat));
  FOR_TYPE(logits, T, {
    at::parallel_for(0, rows, grain(vocabulary / 2), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; r++)
        std::tie(token.data_ptr<int64_t>()[r], logprob.data_ptr<float>()[r]) =
            draw(logits.const_data_ptr<T>() + r * vocabulary, vocabulary, temperature.const_data_ptr<float>()[r],
                 uniform.const_data_ptr<double>()[r]);
    });
  })
  return {token, logprob};
}

}  // namespace
