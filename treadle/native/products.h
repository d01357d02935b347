// Products of few rows with large matrices.
//
// Many rows lie across the lanes of a vector, and one weight at a time is multiplied with all of them; for few rows it is
// outputs that lie across the lanes. Either way no sum goes across lanes: every output is one chain of fused
// multiply-adds in the order of its inputs, however many rows there are.
//
// Axes: R rows · E inputs · N outputs of a matrix.
#pragma once

#include "vectors.h"

namespace {

constexpr int ACROSS = 4;  // vectors of rows that one pass over the weights takes, at most
constexpr int FEW = 8;     // rows for which weights are turned instead

struct Block {
  const void* weight;
  const void* bias;
  int64_t rows, column;
};

constexpr int64_t BLOCK = 48;  // outputs that one piece of work makes

// out[r][m] = Σ_k x[k][r] · weight[m][k] for N vectors of rows r and M outputs m; `next` is fetched meanwhile.
template <int M, int N>
inline void panel(const float* x, const float* weight, int64_t size, float* out, const float* next) {
  Vec sums[M][N] = {};
  auto step = [&](int64_t k) {
    Vec right[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) right[n] = load(x + (k * N + n) * LANES);
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sums[m][n] += weight[m * size + k] * right[n];
  };
  int64_t k = 0;
  for (; k + 16 <= size; k += 16) {
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) __builtin_prefetch(next + m * size + k, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < 16; i++) step(k + i);
  }
  for (; k < size; k++) step(k);
#pragma GCC unroll 8
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(out + (m * N + n) * LANES, sums[m][n], LANES);
}

// All outputs of a block for N vectors of rows, `count` of which are there.
template <int N>
void panels(const float* x, const float* weight, const float* bias, int64_t outputs, int64_t size, int64_t count,
            float* to, int64_t width) {
  constexpr int M = std::min(8, SUMS / N);
  float found[BLOCK * N * LANES];
  int64_t m = 0;
  for (; m + M <= outputs; m += M)
    panel<M, N>(x, weight + m * size, size, found + m * N * LANES, weight + (m + M) * size);
  for (; m < outputs; m++) panel<1, N>(x, weight + m * size, size, found + m * N * LANES, weight + m * size);
  for (m = 0; m < outputs; m += LANES) {
    Vec added = bias == nullptr ? Vec{} : load(bias + m, outputs - m);
    for (int64_t r = 0; r < count; r += LANES) {
      Vec square[LANES];
      for (int i = 0; i < LANES; i++) square[i] = load(found + (std::min(m + i, outputs - 1) * N) * LANES + r);
      transpose(square);
      for (int i = 0; i < std::min<int64_t>(LANES, count - r); i++)
        store(to + (r + i) * width + m, square[i] + added, outputs - m);
    }
  }
}

// All outputs of a block for R rows x [R, size].
template <int R>
void columns(const float* x, const float* weight, const float* bias, int64_t outputs, int64_t size, float* to,
             int64_t width) {
  for (int64_t m = 0; m < outputs; m += LANES) {
    Vec sums[R] = {}, square[LANES];
    const float* from = weight + m * size;
    const int64_t last = std::min<int64_t>(LANES, outputs - m) - 1;
    auto step = [&](int64_t k, int64_t count) {
      for (int64_t i = 0; i < LANES; i++) square[i] = load(from + std::min(i, last) * size + k, count);
      transpose(square);
      for (int64_t j = 0; j < count; j++)
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r] += square[j] * x[r * size + k + j];
    };
    int64_t k = 0;
    for (; k + LANES <= size; k += LANES) {
#pragma GCC unroll 16
      for (int64_t i = 0; i < LANES; i++) __builtin_prefetch(from + (LANES + i) * size + k, 0, 2);
      step(k, LANES);
    }
    if (k < size) step(k, size - k);
    Vec added = bias == nullptr ? Vec{} : load(bias + m, outputs - m);
    for (int r = 0; r < R; r++) store(to + r * width + m, sums[r] + added, outputs - m);
  }
}

template <int... R>
void columns_of(int64_t count, const float* x, const float* weight, const float* bias, int64_t outputs, int64_t size,
                float* to, int64_t width, std::integer_sequence<int, R...>) {
  using Columns = void (*)(const float*, const float*, const float*, int64_t, int64_t, float*, int64_t);
  static constexpr Columns all[] = {columns<R + 1>...};
  all[count - 1](x, weight, bias, outputs, size, to, width);
}

// x [count, size] with rows across lanes: [groups of ACROSS vectors, the last with fewer][size][lanes], filled with 0.
inline std::vector<float> across(const float* x, int64_t count, int64_t size) {
  int64_t vectors = (count + LANES - 1) / LANES;
  std::vector<float> turned(vectors * LANES * size);
  at::parallel_for(0, (size + LANES - 1) / LANES, grain(count), [&](int64_t begin, int64_t end) {
    for (int64_t v = 0; v < vectors; v++) {
      int64_t first = v / ACROSS * ACROSS, lanes = std::min<int64_t>(ACROSS, vectors - first) * LANES;
      float* to = turned.data() + first * LANES * size + (v - first) * LANES;
      for (int64_t k = begin * LANES; k < std::min(end * LANES, size); k += LANES) {
        Vec square[LANES];
        for (int64_t i = 0; i < LANES; i++)
          square[i] = v * LANES + i < count ? load(x + (v * LANES + i) * size + k, size - k) : Vec{};
        transpose(square);
        for (int64_t i = 0; i < std::min<int64_t>(LANES, size - k); i++) store(to + (k + i) * lanes, square[i], LANES);
      }
    }
  });
  return turned;
}

template <class W>
void products(const std::vector<Block>& blocks, const float* x, int64_t count, int64_t size, float* out, int64_t width) {
  std::vector<float> turned = count > FEW ? across(x, count, size) : std::vector<float>();
  at::parallel_for(0, blocks.size(), grain(BLOCK * size * count / LANES), [&](int64_t begin, int64_t end) {
    std::vector<float> wide(std::is_same_v<W, float> ? 0 : BLOCK * size), offset(BLOCK);
    for (int64_t i = begin; i < end; i++) {
      const Block& block = blocks[i];
      const float* weight = static_cast<const float*>(block.weight);
      if constexpr (!std::is_same_v<W, float>) {
        const W* narrow = static_cast<const W*>(block.weight);
        for (int64_t k = 0; k < block.rows * size; k += LANES)
          store(wide.data() + k, load(narrow + k, block.rows * size - k), block.rows * size - k);
        weight = wide.data();
      }
      const W* bias = static_cast<const W*>(block.bias);
      if (bias != nullptr)
        for (int64_t n = 0; n < block.rows; n++) offset[n] = static_cast<float>(bias[n]);
      if (count <= FEW) {
        columns_of(count, x, weight, bias == nullptr ? nullptr : offset.data(), block.rows, size, out + block.column,
                   width, std::make_integer_sequence<int, FEW>());
        continue;
      }
      for (int64_t r = 0; r < count; r += ACROSS * LANES) {
        int64_t some = std::min<int64_t>(ACROSS * LANES, count - r);
        auto run = [&](auto vectors) {
          panels<vectors>(turned.data() + r * size, weight, bias == nullptr ? nullptr : offset.data(), block.rows, size,
                          some, out + r * width + block.column, width);
        };
        switch ((some + LANES - 1) / LANES) {
          case 1: run(std::integral_constant<int, 1>()); break;
          case 2: run(std::integral_constant<int, 2>()); break;
          case 3: run(std::integral_constant<int, 3>()); break;
          default: run(std::integral_constant<int, 4>());
        }
      }
    }
  });
}

// x [R, E] float times each weight [N_i, E], and its bias if there are biases: [R, Σ N_i] float.
Tensor linear(const Tensor& x, at::TensorList weights, at::TensorList biases) {
  TORCH_CHECK(x.is_contiguous() && x.scalar_type() == at::kFloat && x.dim() == 2, "x must be a float32 matrix");
  int64_t size = x.size(1), width = 0;
  std::vector<Block> blocks;
  for (size_t i = 0; i < weights.size(); i++) {
    const Tensor& weight = weights[i];
    TORCH_CHECK(weight.is_contiguous() && weight.dim() == 2 && weight.size(1) == size, "weights must be [N, E]");
    TORCH_CHECK(weight.scalar_type() == weights[0].scalar_type(), "weights of one type");
    const char* at = static_cast<const char*>(weight.const_data_ptr());
    const char* bias = biases.empty() ? nullptr : static_cast<const char*>(biases[i].const_data_ptr());
    for (int64_t n = 0; n < weight.size(0); n += BLOCK)
      blocks.push_back({at + n * size * weight.element_size(), bias ? bias + n * weight.element_size() : nullptr,
                        std::min(BLOCK, weight.size(0) - n), width + n});
    width += weight.size(0);
  }
  Tensor out = at::empty({x.size(0), width}, x.options());
  if (x.size(0) == 0) return out;
  FOR_TYPE(weights[0], W, products<W>(blocks, x.const_data_ptr<float>(), x.size(0), size, out.data_ptr<float>(), width);)
  return out;
}

}  // namespace
