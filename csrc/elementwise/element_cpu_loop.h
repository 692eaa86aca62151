// The CPU loop of SGD, Adagrad, Lion and casts, compiled once per instruction set by csrc/isa.
#include "core/tile.h"
#include "elementwise/element_cpu.h"

namespace shardcore {
namespace SHARDCORE_ISA {
namespace {

template <Formula kFormula, bool kL2>
void run_elements(const ElementScalars& scalars, const float* SHARDCORE_RESTRICT g, float* SHARDCORE_RESTRICT p,
                  float* SHARDCORE_RESTRICT state, int64_t n) {
  const ElementScalars s = scalars;  // a copy: stores to p and state cannot alias it
  for (int64_t i = 0; i < n; ++i) update_element<kFormula>(s, kL2, g[i], p[i], state[i]);
}

template <bool kL2>
decltype(&run_elements<Formula::sgd, kL2>) choose_elements(Formula formula) {
  switch (formula) {
    case Formula::sgd:
      return run_elements<Formula::sgd, kL2>;
    case Formula::momentum:
      return run_elements<Formula::momentum, kL2>;
    case Formula::nesterov:
      return run_elements<Formula::nesterov, kL2>;
    case Formula::adagrad:
      return run_elements<Formula::adagrad, kL2>;
    case Formula::assign:
      return run_elements<Formula::assign, kL2>;
    default:
      return run_elements<Formula::lion, kL2>;
  }
}

// Elements [first, first + n) as float32: where they are, or copied into `tile` if they are read.
float* element_tile(void* data, DType dtype, int64_t first, int64_t n, float* tile, bool read = true) {
  if (dtype == DType::f32) return static_cast<float*>(data) + first;
  if (read) load_tile(tile, data, dtype, first, n);
  return tile;
}

}  // namespace

void element_span(const ElementSegment& t, const ElementScalars& s, int64_t first, int64_t last) {
  const auto run = s.l2 != 0.0f ? choose_elements<true>(s.formula) : choose_elements<false>(s.formula);
  const bool reads = s.formula != Formula::assign;
  alignas(64) float grad_tile[kBlock], weight_tile[kBlock], state_tile[kBlock] = {};
  for (int64_t i = first; i < last; i += kBlock) {
    const int64_t n = last - i < kBlock ? last - i : kBlock;
    const float* g = grad_tile;
    if (t.grad_dtype == DType::f32) {
      g = static_cast<const float*>(t.grad) + i;
    } else {
      load_tile(grad_tile, t.grad, t.grad_dtype, i, n);
    }
    float* const state = t.state != nullptr ? element_tile(t.state, t.state_dtype, i, n, state_tile) : state_tile;
    float* const p = t.master != nullptr ? t.master + i : element_tile(t.param, t.param_dtype, i, n, weight_tile, reads);
    run(s, g, p, state, n);
    if (t.state != nullptr && state == state_tile) store_tile(t.state, t.state_dtype, i, n, state);
    if (t.master != nullptr || p == weight_tile) store_tile(t.param, t.param_dtype, i, n, p);
  }
}

}  // namespace SHARDCORE_ISA
}  // namespace shardcore
