// The CPU loop of Adam, compiled once per instruction set by adam_cpu_{avx512,avx2,base}.cpp.
//
// The plain loop vectorizes; its tail is the compiler's scalar copy of the same operations, so sizes and alignments do not
// show in the bits. Whatever is not float32 goes through 256-element tiles that stay in the first-level cache.
#include "adam/adam_cpu.h"
#include "adam/adam_math.h"
#include "adam/state_codec.h"
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

// Random bits for n elements of a parameter from `element` on, which may lie inside a block.
void random_tile(uint32_t* SHARDCORE_RESTRICT bits, uint64_t key, int64_t element, int64_t n) {
  for (int64_t done = 0; done < n;) {
    const int64_t lane = (element + done) & (kBlock - 1);
    const int64_t count = n - done < kBlock - lane ? n - done : kBlock - lane;
    const uint64_t block_key = rounding_block_key(key, element + done);
    for (int64_t i = 0; i < count; ++i) bits[done + i] = random32(block_key, static_cast<uint32_t>(lane + i));
    done += count;
  }
}

void store_bf16_stochastic(uint16_t* SHARDCORE_RESTRICT dst, const float* SHARDCORE_RESTRICT src,
                           const uint32_t* SHARDCORE_RESTRICT bits, int64_t n) {
  for (int64_t i = 0; i < n; ++i) dst[i] = f32_to_bf16_plus(src[i], bits[i] >> 16);
}

void load_split(float* SHARDCORE_RESTRICT tile, const uint16_t* SHARDCORE_RESTRICT weight,
                const int16_t* SHARDCORE_RESTRICT remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) tile[i] = split_to_f32(weight[i], remainder[i]);
}

void store_split(const float* SHARDCORE_RESTRICT tile, uint16_t* SHARDCORE_RESTRICT weight,
                 int16_t* SHARDCORE_RESTRICT remainder, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    weight[i] = f32_to_bf16(tile[i]);
    remainder[i] = split_remainder(tile[i]);
  }
}

template <typename Code, typename Decode>
void load_q8(float* SHARDCORE_RESTRICT tile, const Code* SHARDCORE_RESTRICT codes, float scale, int64_t n,
             const Decode& decode) {
  for (int64_t i = 0; i < n; ++i) tile[i] = decode(codes[i], scale);
}

template <typename Code, typename Encode>
void store_q8(const float* SHARDCORE_RESTRICT tile, Code* SHARDCORE_RESTRICT codes, float& scale,
              const uint32_t* SHARDCORE_RESTRICT bits, int64_t n, const Encode& encode) {
  scale = block_scale(tile, n);
  const float inv_scale = 1.0f / scale;
  for (int64_t i = 0; i < n; ++i) codes[i] = encode(tile[i], inv_scale, bits[i]);
}

// The moments of a tile: where they are if float32, else converted into tiles here and back.
struct Moments {
  float* m;
  float* v;
  alignas(64) float m_tile[kBlock];
  alignas(64) float v_tile[kBlock];

  void load(const AdamSegment& t, int64_t i, int64_t n) {
    if (t.state_dtype == StateDType::f32) {
      m = static_cast<float*>(t.exp_avg) + i;
      v = static_cast<float*>(t.exp_avg_sq) + i;
      return;
    }
    m = m_tile;
    v = v_tile;
    if (t.state_dtype == StateDType::bf16) {
      load_tile(m, t.exp_avg, DType::bf16, i, n);
      load_tile(v, t.exp_avg_sq, DType::bf16, i, n);
    } else {
      load_q8(m, static_cast<const int8_t*>(t.exp_avg) + i, t.exp_avg_scale[i / kBlock], n,
              [](int8_t code, float scale) { return decode_exp_avg(code, scale); });
      load_q8(v, static_cast<const uint8_t*>(t.exp_avg_sq) + i, t.exp_avg_sq_scale[i / kBlock], n,
              [](uint8_t code, float scale) { return decode_exp_avg_sq(code, scale); });
    }
  }

  // key: state_key of the parameter. bits: room for a tile.
  void store(const AdamSegment& t, int64_t i, int64_t n, uint64_t key, uint32_t* bits) const {
    if (t.state_dtype == StateDType::f32) return;
    random_tile(bits, key, t.first_element + i, n);
    if (t.state_dtype == StateDType::bf16) {
      store_tile(t.exp_avg, DType::bf16, i, n, m);
      store_bf16_stochastic(static_cast<uint16_t*>(t.exp_avg_sq) + i, v, bits, n);
    } else {
      store_q8(m, static_cast<int8_t*>(t.exp_avg) + i, t.exp_avg_scale[i / kBlock], bits, n,
               [](float x, float inv, uint32_t r) { return encode_exp_avg(x, inv, exp_avg_noise(r)); });
      store_q8(v, static_cast<uint8_t*>(t.exp_avg_sq) + i, t.exp_avg_sq_scale[i / kBlock], bits, n,
               [](float x, float inv, uint32_t r) { return encode_exp_avg_sq(x, inv, exp_avg_sq_noise(r)); });
    }
  }
};

// The float32 weights of a tile: where they are, or in `tile`.
float* load_weight(const AdamSegment& t, int64_t i, int64_t n, float* tile) {
  if (t.master_kind == Master::f32) return static_cast<float*>(t.master) + i;
  if (t.param_dtype == DType::f32) return static_cast<float*>(t.param) + i;
  if (t.master_kind == Master::split) {
    load_split(tile, static_cast<const uint16_t*>(t.param) + i, static_cast<const int16_t*>(t.master) + i, n);
  } else {
    load_tile(tile, t.param, t.param_dtype, i, n);
  }
  return tile;
}

void store_weight(const AdamSegment& t, int64_t i, int64_t n, const float* weight) {
  if (t.master_kind == Master::split) {
    store_split(weight, static_cast<uint16_t*>(t.param) + i, static_cast<int16_t*>(t.master) + i, n);
  } else if (t.master_kind == Master::f32 || t.param_dtype != DType::f32) {
    store_tile(t.param, t.param_dtype, i, n, weight);
  }
}

}  // namespace

void adam_span(const AdamSegment& t, const AdamScalars& s, int64_t first, int64_t last) {
  const Run run_tile = choose_run(s.l2 != 0.0f, t.max_exp_avg_sq != nullptr);
  float* const vmax = t.max_exp_avg_sq;
  const bool f32_only = t.param_dtype == DType::f32 && t.grad_dtype == DType::f32 && t.state_dtype == StateDType::f32;
  if (f32_only && t.master_kind == Master::none) {
    run_tile(s, static_cast<const float*>(t.grad) + first, static_cast<float*>(t.param) + first,
             static_cast<float*>(t.exp_avg) + first, static_cast<float*>(t.exp_avg_sq) + first, vmax ? vmax + first : nullptr,
             last - first);
    return;
  }
  const bool stochastic = rounds_weights_stochastically(t, s.stochastic_rounding);
  const uint64_t param_key = child_key(s.random_key, t.param_index);
  const uint64_t moments_key = state_key(param_key);
  Moments moments;
  alignas(64) float grad_tile[kBlock];
  alignas(64) float weight_tile[kBlock];
  alignas(64) uint32_t bits[kBlock];
  for (int64_t i = first; i < last; i += kBlock) {
    const int64_t n = last - i < kBlock ? last - i : kBlock;
    const float* g = grad_tile;
    if (t.grad_dtype == DType::f32) {
      g = static_cast<const float*>(t.grad) + i;
    } else {
      load_tile(grad_tile, t.grad, t.grad_dtype, i, n);
    }
    float* const weight = load_weight(t, i, n, weight_tile);
    moments.load(t, i, n);
    run_tile(s, g, weight, moments.m, moments.v, vmax ? vmax + i : nullptr, n);
    moments.store(t, i, n, moments_key, bits);
    if (stochastic) {
      random_tile(bits, param_key, t.first_element + i, n);
      store_bf16_stochastic(static_cast<uint16_t*>(t.param) + i, weight, bits, n);
    } else {
      store_weight(t, i, n, weight);
    }
  }
}

}  // namespace SHARDCORE_ISA
}  // namespace shardcore
