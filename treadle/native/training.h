// What a training pass does between its matrix products, forward and backward, in float.
//
// Axes: S positions of a pass · E size of a row · H query heads · K key/value heads · G = H / K · D head size ·
// B positions of one segment · T positions that a segment sees.
#pragma once

#include "decoding.h"

namespace {

inline void check_rows(const Tensor& x, const char* name) {
  TORCH_CHECK(x.is_contiguous() && x.scalar_type() == at::kFloat, name, " must be contiguous float32");
}

// ---------------------------------------------------------------------------------------------------- norms, gates

// Gradients of `add_norm` without its addition: of x [S, E], and of the weight [E].
std::tuple<Tensor, Tensor> norm_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, double eps) {
  for (const Tensor& each : {grad, x, weight}) check_rows(each, "norm_backward's arguments");
  int64_t size = x.size(-1), rows = x.numel() / size;
  Tensor grad_x = at::empty_like(x);
  const float *g = grad.const_data_ptr<float>(), *from = x.const_data_ptr<float>();
  const float* scale = weight.const_data_ptr<float>();
  float* to = grad_x.data_ptr<float>();
  constexpr int64_t PART = 64;  // rows whose share of the weight's gradient is summed apart: the same for any threads
  int64_t parts = (rows + PART - 1) / PART;
  Tensor shares = at::zeros({parts, size}, x.options());
  at::parallel_for(0, parts, grain(PART * size), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin * PART; r < std::min(end * PART, rows); r++) {
      const float *row = from + r * size, *g_row = g + r * size;
      float* share = shares.data_ptr<float>() + r / PART * size;
      float factor = inverse_rms(row, size, eps);
      Vec dots = {};
      for (int64_t i = 0; i < size; i += LANES) {
        Vec value = load(row + i, size - i) * factor, gradient = load(g_row + i, size - i);
        store(share + i, load(share + i, size - i) + gradient * value, size - i);
        dots += gradient * load(scale + i, size - i) * value;
      }
      float mean = sum(dots) / size;
      for (int64_t i = 0; i < size; i += LANES) {
        Vec value = load(row + i, size - i) * factor;
        Vec gradient = load(g_row + i, size - i) * load(scale + i, size - i);
        store(to + r * size + i, (gradient - value * mean) * factor, size - i);
      }
    }
  });
  return {grad_x, shares.sum(0)};
}

// Gradient of `silu_mul`: of gate_up [S, 2 N].
Tensor silu_mul_backward(const Tensor& grad, const Tensor& gate_up) {
  check_rows(grad, "grad"), check_rows(gate_up, "gate_up");
  int64_t rows = gate_up.size(0), size = gate_up.size(1) / 2;
  Tensor out = at::empty_like(gate_up);
  const float *g = grad.const_data_ptr<float>(), *from = gate_up.const_data_ptr<float>();
  float* to = out.data_ptr<float>();
  at::parallel_for(0, rows, grain(size), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++)
      for (int64_t i = 0; i < size; i += LANES) {
        int64_t at = 2 * r * size + i;
        Vec gate = load(from + at, size - i), up = load(from + at + size, size - i);
        Vec gradient = load(g + r * size + i, size - i), open = 1.0f / (exponential(-gate) + 1.0f);
        store(to + at, gradient * up * open * (1.0f + gate * (1.0f - open)), size - i);
        store(to + at + size, gradient * gate * open, size - i);
      }
  });
  return out;
}

// ---------------------------------------------------------------------------------------------------- small products

// out[m][n] (+)= Σ_k a[m · row + k · column] · b[k][n] for M rows and N vectors.
template <int M, int N>
inline void patch(const float* a, int64_t row, int64_t column, const float* b, int64_t width, int64_t inner, float* out,
                  int64_t out_width, bool adds) {
  Vec sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) sums[m][n] = adds ? load(out + m * out_width + n * LANES) : Vec{};
  for (int64_t k = 0; k < inner; k++) {
    Vec right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) right[n] = load(b + k * width + n * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sums[m][n] += a[m * row + k * column] * right[n];
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(out + m * out_width + n * LANES, sums[m][n], LANES);
}

template <int N>
void patches(const float* a, int64_t row, int64_t column, int64_t rows, const float* b, int64_t width, int64_t inner,
             float* out, int64_t out_width, bool adds) {
  constexpr int M = std::min(8, SUMS / N);
  int64_t m = 0;
  for (; m + M <= rows; m += M)
    patch<M, N>(a + m * row, row, column, b, width, inner, out + m * out_width, out_width, adds);
  for (; m < rows; m++)
    patch<1, N>(a + m * row, row, column, b, width, inner, out + m * out_width, out_width, adds);
}

// out [rows, vectors · LANES] (+)= a [rows, inner] · b [inner, vectors · LANES], where `a` may lie transposed.
void multiply(const float* a, int64_t row, int64_t column, int64_t rows, const float* b, int64_t width, int64_t inner,
              int64_t vectors, float* out, int64_t out_width, bool adds) {
  for (; vectors >= 4; vectors -= 4, b += 4 * LANES, out += 4 * LANES)
    patches<4>(a, row, column, rows, b, width, inner, out, out_width, adds);
  if (vectors == 3) patches<3>(a, row, column, rows, b, width, inner, out, out_width, adds);
  if (vectors == 2) patches<2>(a, row, column, rows, b, width, inner, out, out_width, adds);
  if (vectors == 1) patches<1>(a, row, column, rows, b, width, inner, out, out_width, adds);
}

// ---------------------------------------------------------------------------------------------------- attention

constexpr int64_t QUERIES = 32;  // positions whose scores exist at a time
constexpr int64_t TREE = 4;      // of a segment: first and last position, first and last of what it also sees before

inline int64_t filled(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

struct Heads {
  int64_t heads, keys, size, width;
  const float* qkv;  // [S, (H + 2 K) · D], rotated

  int64_t share() const { return heads / keys; }
  int64_t lanes() const { return filled(size); }
  const float* query(int64_t s, int64_t head, int64_t g) const { return qkv + s * width + (head * share() + g) * size; }
  const float* key(int64_t s, int64_t head) const { return qkv + s * width + (heads + head) * size; }
  const float* value(int64_t s, int64_t head) const { return qkv + s * width + (heads + keys + head) * size; }
};

// Rows of D numbers, `stride` apart, to rows of whole vectors, times `factor`.
inline void gather(const float* from, int64_t stride, int64_t count, int64_t size, float* to, float factor = 1) {
  int64_t lanes = filled(size);
  for (int64_t i = 0; i < count; i++)
    for (int64_t d = 0; d < size; d += LANES) store(to + i * lanes + d, load(from + i * stride + d, size - d) * factor, LANES);
}

// The same, transposed: [D][width], `count` columns of it.
inline void gather_across(const float* from, int64_t stride, int64_t count, int64_t size, float* to, int64_t width) {
  for (int64_t i = 0; i < count; i += LANES)
    for (int64_t d = 0; d < size; d += LANES) {
      Vec square[LANES];
      for (int64_t j = 0; j < LANES; j++) square[j] = i + j < count ? load(from + (i + j) * stride + d, size - d) : Vec{};
      transpose(square);
      for (int64_t j = 0; j < std::min<int64_t>(LANES, size - d); j++) store(to + (d + j) * width + i, square[j], LANES);
    }
}

// Families of segments that follow each other: a trunk, then branches that see all of it. Their first ones, and the end.
inline std::vector<int64_t> families(const int64_t* tree, int64_t segments) {
  std::vector<int64_t> first;
  for (int64_t i = 0; i < segments; i++)
    if (tree[i * TREE + 2] == tree[i * TREE + 3]) first.push_back(i);
  first.push_back(segments);
  return first;
}

struct Sight {  // of a segment's queries: keys and values of what it sees, before and in itself
  std::vector<float> key_across, value_across, key, value;
  int64_t width;

  Sight(int64_t most, int64_t lanes, bool backward)
      : key_across(lanes * (filled(most) + LANES)), value_across(backward ? key_across.size() : 0),
        key(backward ? (most + LANES) * lanes : 0), value((most + LANES) * lanes), width(filled(most) + LANES) {}

  void see(const Heads& all, int64_t head, int64_t from, int64_t count, int64_t place) {
    int64_t size = all.size, lanes = all.lanes();
    gather_across(all.key(from, head), all.width, count, size, key_across.data() + place, width);
    gather(all.value(from, head), all.width, count, size, value.data() + place * lanes);
    if (key.empty()) return;
    gather(all.key(from, head), all.width, count, size, key.data() + place * lanes);
    gather_across(all.value(from, head), all.width, count, size, value_across.data() + place, width);
  }
};

// What one head of a family sees: `each(first query, last, positions before the first)` for blocks of queries, and
// `seen(first position, positions, positions before)` after a segment. The trunk comes first, and stays in sight.
template <class Each, class Seen>
void walk(const Heads& all, const int64_t* tree, int64_t begin, int64_t end, int64_t head, Sight& sight, Each each,
          Seen seen) {
  for (int64_t i = begin; i < end; i++) {
    const int64_t* at = tree + i * TREE;
    int64_t before = at[3] - at[2];
    sight.see(all, head, at[0], at[1] - at[0], before);
    for (int64_t s = at[0]; s < at[1]; s += QUERIES)
      each(s, std::min(s + QUERIES, at[1]), before + s - at[0]);
    seen(at[0], at[1] - at[0], before);
  }
}

// Queries of the positions from s on, all of a head's share: row (s, g).
inline void queries(const Heads& all, int64_t head, int64_t s, int64_t until, float* to, float factor) {
  for (; s < until; s++, to += all.share() * all.lanes())
    gather(all.query(s, head, 0), all.size, all.share(), all.size, to, factor);
}

inline std::tuple<int64_t, int64_t> longest(const int64_t* tree, int64_t segments) {
  int64_t most = 0, block = 0;
  for (const int64_t* at = tree; at < tree + segments * TREE; at += TREE) {
    most = std::max(most, at[1] - at[0] + at[3] - at[2]);
    block = std::max(block, std::min(QUERIES, at[1] - at[0]));
  }
  return {most, block};
}

// qkv [S, (H + 2 K) · D], rotated; tree [segments, 4] int64, families one after the other. Returns the result [S, H · D]
// and the logarithm of each query's softmax normaliser [S, H].
std::tuple<Tensor, Tensor> tree_attend(const Tensor& qkv, int64_t heads, int64_t keys, const Tensor& tree, double scale) {
  check_rows(qkv, "qkv");
  int64_t width = qkv.size(1), size = width / (heads + 2 * keys), segments = tree.size(0), share = heads / keys;
  Tensor out = at::empty({qkv.size(0), heads * size}, qkv.options()), norm = at::empty({qkv.size(0), heads}, qkv.options());
  Heads all{heads, keys, size, width, qkv.const_data_ptr<float>()};
  const int64_t* parts = tree.const_data_ptr<int64_t>();
  std::vector<int64_t> first = families(parts, segments);
  auto [most, block] = longest(parts, segments);
  int64_t lanes = all.lanes(), count = first.size() - 1;
  float *result = out.data_ptr<float>(), *norms = norm.data_ptr<float>();
  at::parallel_for(0, keys * count, 1, [&, most = most, block = block](int64_t begin, int64_t end) {
    Sight sight(most, lanes, false);
    std::vector<float> query(block * share * lanes), score(block * share * sight.width), found(query.size());
    for (int64_t i = begin; i < end; i++) {
      int64_t head = i / count, *at = &first[i % count];
      walk(all, parts, at[0], at[1], head, sight, [&](int64_t s, int64_t until, int64_t before) {
        int64_t rows = (until - s) * share, seen = before + until - s;
        queries(all, head, s, until, query.data(), scale);
        multiply(query.data(), lanes, 1, rows, sight.key_across.data(), sight.width, size, filled(seen) / LANES,
                 score.data(), sight.width, false);
        for (int64_t r = 0; r < rows; r++) {
          float* row = score.data() + r * sight.width;
          int64_t visible = before + r / share + 1;
          float total = softmax(row, visible);
          std::fill(row + visible, row + seen, 0.0f);
          norms[(s + r / share) * heads + head * share + r % share] = total;
        }
        multiply(score.data(), sight.width, 1, rows, sight.value.data(), lanes, seen, lanes / LANES, found.data(), lanes,
                 false);
        for (int64_t r = 0; r < rows; r++)
          for (int64_t d = 0; d < size; d += LANES)
            store(result + (s + r / share) * heads * size + (head * share + r % share) * size + d,
                  load(found.data() + r * lanes + d), size - d);
      }, [](int64_t, int64_t, int64_t) {});
    }
  });
  return {out, norm};
}

// The gradient of qkv from that of the result.
Tensor tree_attend_backward(const Tensor& grad, const Tensor& qkv, const Tensor& out, const Tensor& norm, int64_t heads,
                            int64_t keys, const Tensor& tree, double scale) {
  for (const Tensor& each : {grad, qkv, out, norm}) check_rows(each, "tree_attend_backward's arguments");
  int64_t width = qkv.size(1), size = width / (heads + 2 * keys), segments = tree.size(0), share = heads / keys;
  Tensor grad_qkv = at::empty_like(qkv);
  Heads all{heads, keys, size, width, qkv.const_data_ptr<float>()};
  const int64_t* parts = tree.const_data_ptr<int64_t>();
  std::vector<int64_t> first = families(parts, segments);
  auto [most, block] = longest(parts, segments);
  int64_t lanes = all.lanes(), count = first.size() - 1;
  const float *g = grad.const_data_ptr<float>(), *o = out.const_data_ptr<float>(), *norms = norm.const_data_ptr<float>();
  float* to = grad_qkv.data_ptr<float>();
  at::parallel_for(0, keys * count, 1, [&, most = most, block = block](int64_t begin, int64_t end) {
    Sight sight(most, lanes, true);
    std::vector<float> query(block * share * lanes), gradient(query.size()), found(query.size());
    std::vector<float> weight(block * share * sight.width), change(weight.size());
    std::vector<float> grad_key((most + LANES) * lanes), grad_value(grad_key.size());
    for (int64_t i = begin; i < end; i++) {
      int64_t head = i / count, *at = &first[i % count];
      int64_t root = parts[at[0] * TREE], trunk = parts[at[0] * TREE + 1] - root;
      std::fill(grad_key.begin(), grad_key.end(), 0.0f);
      std::fill(grad_value.begin(), grad_value.end(), 0.0f);
      auto lay = [&](const float* key, const float* value, int64_t s, int64_t n) {
        for (int64_t t = 0; t < n; t++)
          for (int64_t d = 0; d < size; d += LANES) {
            float* row = to + (s + t) * width + (heads + head) * size + d;
            store(row, load(key + t * lanes + d), size - d);
            store(row + keys * size, load(value + t * lanes + d), size - d);
          }
      };
      walk(all, parts, at[0], at[1], head, sight, [&](int64_t s, int64_t until, int64_t before) {
        int64_t rows = (until - s) * share, seen = before + until - s, vectors = lanes / LANES;
        queries(all, head, s, until, query.data(), scale);
        for (int64_t t = s; t < until; t++)
          gather(g + (t * heads + head * share) * size, size, share, size, gradient.data() + (t - s) * share * lanes);
        multiply(query.data(), lanes, 1, rows, sight.key_across.data(), sight.width, size, filled(seen) / LANES,
                 weight.data(), sight.width, false);
        multiply(gradient.data(), lanes, 1, rows, sight.value_across.data(), sight.width, size, filled(seen) / LANES,
                 change.data(), sight.width, false);
        for (int64_t r = 0; r < rows; r++) {
          int64_t q = (s + r / share) * heads + head * share + r % share, visible = before + r / share + 1;
          float *w = weight.data() + r * sight.width, *c = change.data() + r * sight.width;
          Vec dots = {};
          for (int64_t d = 0; d < size; d += LANES)
            dots += load(o + q * size + d, size - d) * load(g + q * size + d, size - d);
          float mean = sum(dots), normaliser = norms[q];
          for (int64_t t = 0; t < filled(seen); t += LANES) {
            Vec p = exponential(load(w + t) - normaliser);
            if (visible - t < LANES)
              for (int64_t lane = std::max<int64_t>(visible - t, 0); lane < LANES; lane++) p[lane] = 0;
            store(w + t, p, LANES);
            store(c + t, p * (load(c + t) - mean), LANES);
          }
        }
        multiply(weight.data(), 1, sight.width, seen, gradient.data(), lanes, rows, vectors, grad_value.data(), lanes, true);
        multiply(change.data(), 1, sight.width, seen, query.data(), lanes, rows, vectors, grad_key.data(), lanes, true);
        multiply(change.data(), sight.width, 1, rows, sight.key.data(), lanes, seen, vectors, found.data(), lanes, false);
        for (int64_t r = 0; r < rows; r++)
          for (int64_t d = 0; d < size; d += LANES)
            store(to + (s + r / share) * width + (head * share + r % share) * size + d,
                  load(found.data() + r * lanes + d) * static_cast<float>(scale), size - d);
      }, [&](int64_t s, int64_t n, int64_t before) {
        float *own_key = grad_key.data() + before * lanes, *own_value = grad_value.data() + before * lanes;
        if (s == root) return;  // its branches add to it
        lay(own_key, own_value, s, n);
        std::fill_n(own_key, n * lanes, 0.0f), std::fill_n(own_value, n * lanes, 0.0f);
      });
      lay(grad_key.data(), grad_value.data(), root, trunk);
    }
  });
  return grad_qkv;
}

}  // namespace
