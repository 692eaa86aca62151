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

// The float32 weights of a tile: where they are, or in `tile`, which a cast does not read.
float* element_weight(const ElementSegment& t, Formula formula, int64_t i, int64_t n, float* tile) {
  if (t.master != nullptr) return t.master + i;
  if (formula == Formula::assign && t.param_dtype != DType::f32) return tile;
  return values_or_tile(t.param, t.param_dtype, i, n, tile);
}

}  // namespace

void element_span(const ElementSegment& t, const ElementScalars& s, int64_t first, int64_t last) {
  const auto run = s.l2 != 0.0f ? choose_elements<true>(s.formula) : choose_elements<false>(s.formula);
  alignas(64) float grad_tile[kBlock], weight_tile[kBlock], state_tile[kBlock] = {};
  for_each_tile(first, last, [&](int64_t i, int64_t n) {
    const float* const g = values_or_tile(t.grad, t.grad_dtype, i, n, grad_tile);
    float* const state = t.state != nullptr ? values_or_tile(t.state, t.state_dtype, i, n, state_tile) : state_tile;
    float* const p = element_weight(t, s.formula, i, n, weight_tile);
    run(s, g, p, state, n);
    if (t.state != nullptr && state == state_tile) store_tile(t.state, t.state_dtype, i, n, state);
    if (t.master != nullptr || p == weight_tile) store_tile(t.param, t.param_dtype, i, n, p);
  });
}

}  // namespace SHARDCORE_ISA
}  // namespace shardcore
