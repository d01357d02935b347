#include <torch/library.h>

#include "products.h"
#include "training.h"

TORCH_LIBRARY(treadle, library) {
  library.def("linear(Tensor x, Tensor[] weights, Tensor[] biases) -> Tensor", linear);
  library.def("add_norm(Tensor(a!) x, Tensor? delta, Tensor weight, float eps, ScalarType like) -> Tensor", add_norm);
  library.def(
      "rotate(Tensor(a!) qkv, int heads, int keys, Tensor? q_norm, Tensor? k_norm, float eps, Tensor? cosine, "
      "Tensor? sine) -> ()",
      rotate);
  library.def("silu_mul(Tensor gate_up) -> Tensor", silu_mul);
  library.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor[] keys, Tensor[] values, Tensor place, float scale) -> Tensor",
      attend);
  library.def("sample(Tensor logits, Tensor temperature, Tensor uniform) -> (Tensor, Tensor)", sample);
  library.def("norm_backward(Tensor grad, Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", norm_backward);
  library.def("silu_mul_backward(Tensor grad, Tensor gate_up) -> Tensor", silu_mul_backward);
  library.def("tree_attend(Tensor qkv, int heads, int keys, Tensor tree, float scale) -> (Tensor, Tensor)", tree_attend);
  library.def(
      "tree_attend_backward(Tensor grad, Tensor qkv, Tensor out, Tensor norm, int heads, int keys, Tensor tree, "
      "float scale) -> Tensor",
      tree_attend_backward);
}
