// The CPU loop of Adam, compiled once per instruction set by adam_cpu_{avx512,avx2,base}.cpp.
//
// The plain loop vectorizes; its tail is the compiler's scalar copy of the same operations, so sizes and alignments do not
// show in the bits. Other dtypes than float32 go through 256-element tiles that stay in the first-level cache.
#include "adam/adam_cpu.h"
#include "adam/adam_math.h"
#include "core/tile.h"

namespace shardcore {
namespace SHARDCORE_ISA {
namespace {

template <bool kL2, bool kAmsgrad>
void run(const AdamScalars& scalars, const float* SHARDCORE_RESTRICT g, float* SHARDCORE_RESTRICT p,
         float* SHARDCORE_RESTRICT m, float* SHARDCORE_RESTRICT v, float* SHARDCORE_RESTRICT vmax, int64_t n) {
  const AdamScalars s = scalars;  // a copy: stores to p, m, v cannot alias it
  for (int64_t i = 0; i < n; ++i) adam_element<kL2, kAmsgrad>(s, g[i], p[i], m[i], v[i], kAmsgrad ? vmax + i : nullptr);
}

using Run = void (*)(const AdamScalars&, const float*, float*, float*, float*, float*, int64_t);

Run choose_run(bool l2, bool amsgrad) {
  if (l2) return amsgrad ? run<true, true> : run<true, false>;
  return amsgrad ? run<false, true> : run<false, false>;
}

void store_bf16_stochastic(uint16_t* SHARDCORE_RESTRICT dst, const float* SHARDCORE_RESTRICT src, int64_t n, uint64_t param_key,
                           int64_t element) {
  for (int64_t done = 0; done < n;) {
    const int64_t lane = (element + done) & (kBlock - 1);
    const int64_t count = n - done < kBlock - lane ? n - done : kBlock - lane;
    const uint64_t key = rounding_block_key(param_key, element + done);
    for (int64_t i = 0; i < count; ++i) dst[done + i] = f32_to_bf16_stochastic(src[done + i], key, lane + i);
    done += count;
  }
}

}  // namespace

void adam_span(const AdamSegment& t, const AdamScalars& s, int64_t first, int64_t last) {
  const Run run_tile = choose_run(s.l2 != 0.0f, t.max_exp_avg_sq != nullptr);
  float* const vmax = t.max_exp_avg_sq;
  if (t.master == nullptr && t.param_dtype == DType::f32 && t.grad_dtype == DType::f32) {
    run_tile(s, static_cast<const float*>(t.grad) + first, static_cast<float*>(t.param) + first, t.exp_avg + first,
             t.exp_avg_sq + first, vmax ? vmax + first : nullptr, last - first);
    return;
  }
  float* const weight = t.master ? t.master : (t.param_dtype == DType::f32 ? static_cast<float*>(t.param) : nullptr);
  const bool stochastic = s.stochastic_rounding && t.master == nullptr && t.param_dtype == DType::bf16;
  const uint64_t param_key = stochastic ? child_key(s.random_key, t.param_index) : 0;
  alignas(64) float grad_tile[kBlock];
  alignas(64) float weight_tile[kBlock];
  for (int64_t i = first; i < last; i += kBlock) {
    const int64_t n = last - i < kBlock ? last - i : kBlock;
    const float* g = grad_tile;
    if (t.grad_dtype == DType::f32) {
      g = static_cast<const float*>(t.grad) + i;
    } else {
      load_tile(grad_tile, t.grad, t.grad_dtype, i, n);
    }
    float* w = weight_tile;
    if (weight) {
      w = weight + i;
    } else {
      load_tile(weight_tile, t.param, t.param_dtype, i, n);
    }
    run_tile(s, g, w, t.exp_avg + i, t.exp_avg_sq + i, vmax ? vmax + i : nullptr, n);
    if (stochastic) {
      store_bf16_stochastic(static_cast<uint16_t*>(t.param) + i, w, n, param_key, t.first_element + i);
    } else if (weight != t.param) {
      store_tile(t.param, t.param_dtype, i, n, w);
    }
  }
}

}  // namespace SHARDCORE_ISA
}  // namespace shardcore
