// 8-bit moments on CUDA: a warp updates a 256-element block, whose scales are of the largest magnitudes in all lanes.
//
// Invariant: all lanes have read a block's old scales (their largest magnitudes depend on them) before lane 0 writes the new.
#pragma once

#include "adam/adam_cuda_lanes.h"

namespace shardcore {

// A lane's moments of a block: codes of 8 elements, 4 per word, and the block's scales.
struct Q8Moments {
  uint32_t m[2], v[2];
  float m_scale, v_scale;
};

SHARDCORE_HD uint8_t code_of(const uint32_t (&words)[2], int k) { return static_cast<uint8_t>(words[k / 4] >> (8 * (k % 4))); }

SHARDCORE_HD void set_code(uint32_t (&words)[2], int k, uint8_t code) {
  const uint32_t shifted = static_cast<uint32_t>(code) << (8 * (k % 4));
  words[k / 4] = k % 4 == 0 ? shifted : words[k / 4] | shifted;
}

// One step of the lane's elements; those from i + numel on count as 0 in the largest magnitudes. (They are 0 in any case, since
// their streams are; without these lines nvcc 13.0 spills registers in the kernel for mixtures.) Every lane of the warp calls
// it.
template <typename Warp>
SHARDCORE_HD void update_q8(const AdamChunkView& t, const AdamScalars& s, int i, Octet at, int numel, int lane,
                            const Warp& warp, const float (&g)[8], float (&p)[8], Q8Moments& q) {
  float m[8], v[8], vmax[8];
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    m[k] = decode_exp_avg(static_cast<int8_t>(code_of(q.m, k)), q.m_scale);
    v[k] = decode_exp_avg_sq(code_of(q.v, k), q.v_scale);
  }
  update_octet<false>(s, g, p, m, v, vmax);
  uint32_t m_largest = 0, v_largest = 0;
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    if (octet_element(at, k) >= numel) m[k] = v[k] = 0.0f;
    m_largest = larger(m_largest, magnitude_bits(m[k]));
    v_largest = larger(v_largest, magnitude_bits(v[k]));
  }
  q.m_scale = scale_of(warp.max(m_largest)), q.v_scale = scale_of(warp.max(v_largest));
  const float m_inv = inverse_of_scale(q.m_scale), v_inv = inverse_of_scale(q.v_scale);
  uint32_t bits[8];
  random_octet(state_key(t.param_key), t.first_element + i, at, bits);
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    set_code(q.m, k, static_cast<uint8_t>(encode_exp_avg(m[k], m_inv, exp_avg_noise(bits[k]))));
    set_code(q.v, k, encode_exp_avg_sq(v[k], v_inv, exp_avg_sq_noise(bits[k])));
  }
  const int block = i / static_cast<int>(kBlock);
  if (lane == 0) t.exp_avg_scale[block] = q.m_scale, t.exp_avg_sq_scale[block] = q.v_scale;
}

SHARDCORE_HD Q8Moments load_q8(const AdamChunkView& t, int i, int lane) {
  const int block = i / static_cast<int>(kBlock);
  SHARDCORE_ASSUME_GLOBAL(t.exp_avg_scale);
  SHARDCORE_ASSUME_GLOBAL(t.exp_avg_sq_scale);
  Q8Moments q;
  load8(t.exp_avg + i + 8 * lane, q.m);
  load8(t.exp_avg_sq + i + 8 * lane, q.v);
  q.m_scale = t.exp_avg_scale[block], q.v_scale = t.exp_avg_sq_scale[block];
  return q;
}

// A partial block, or one whose streams are not aligned: element by element.
template <typename Warp>
SHARDCORE_HD void adam_cuda_q8_tail(const AdamChunkView& t, const AdamScalars& s, int i, int lane, const Warp& warp) {
  const Octet at = lane_octet(lane, false);
  const int block = i / static_cast<int>(kBlock);
  float g[8], p[8];
  Q8Moments q;
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    const int e = i + octet_element(at, k);
    const bool is_there = e < t.numel;
    g[k] = is_there ? load_as_f32(t.grad, t.grad_dtype, e) : 0.0f;
    p[k] = is_there ? load_weight(t, e) : 0.0f;
    set_code(q.m, k, is_there ? static_cast<uint8_t>(t.exp_avg[e]) : 0);
    set_code(q.v, k, is_there ? static_cast<uint8_t>(t.exp_avg_sq[e]) : 0);
  }
  q.m_scale = t.exp_avg_scale[block], q.v_scale = t.exp_avg_sq_scale[block];
  update_q8(t, s, i, at, t.numel - i, lane, warp, g, p, q);
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    const int e = i + octet_element(at, k);
    if (e >= t.numel) continue;
    t.exp_avg[e] = static_cast<char>(code_of(q.m, k));
    t.exp_avg_sq[e] = static_cast<char>(code_of(q.v, k));
    store_weight(t, e, p[k]);
  }
}

}  // namespace shardcore
