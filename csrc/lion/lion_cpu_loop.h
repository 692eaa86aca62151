// The CPU loop of Lion, compiled once per instruction set by csrc/isa.
#include "core/tile.h"
#include "lion/lion_cpu.h"

namespace shardcore {
namespace SHARDCORE_ISA {
namespace {

void run_lion(const LionScalars& scalars, const float* SHARDCORE_RESTRICT g, float* SHARDCORE_RESTRICT p,
              float* SHARDCORE_RESTRICT m, int64_t n) {
  const LionScalars s = scalars;  // a copy: stores to p and m cannot alias it
  for (int64_t i = 0; i < n; ++i) lion_element(s, g[i], p[i], m[i]);
}

// Elements [first, first + n) as float32: where they are, or copied into `tile`.
float* lion_tile(void* data, DType dtype, int64_t first, int64_t n, float* tile) {
  if (dtype == DType::f32) return static_cast<float*>(data) + first;
  load_tile(tile, data, dtype, first, n);
  return tile;
}

}  // namespace

void lion_span(const LionSegment& t, const LionScalars& s, int64_t first, int64_t last) {
  alignas(64) float grad_tile[kBlock], weight_tile[kBlock], state_tile[kBlock];
  for (int64_t i = first; i < last; i += kBlock) {
    const int64_t n = last - i < kBlock ? last - i : kBlock;
    const float* g = grad_tile;
    if (t.grad_dtype == DType::f32) {
      g = static_cast<const float*>(t.grad) + i;
    } else {
      load_tile(grad_tile, t.grad, t.grad_dtype, i, n);
    }
    float* const m = lion_tile(t.exp_avg, t.state_dtype, i, n, state_tile);
    float* const p = t.master != nullptr ? t.master + i : lion_tile(t.param, t.param_dtype, i, n, weight_tile);
    run_lion(s, g, p, m, n);
    if (m == state_tile) store_tile(t.exp_avg, t.state_dtype, i, n, m);
    if (t.master != nullptr || p == weight_tile) store_tile(t.param, t.param_dtype, i, n, p);
  }
}

}  // namespace SHARDCORE_ISA
}  // namespace shardcore
