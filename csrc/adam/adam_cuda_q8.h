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

SHARDCORE_HD int block_of(int i) { return i >> 8; }

SHARDCORE_HD uint8_t code_of(const uint32_t (&words)[2], int k) { return static_cast<uint8_t>(words[k / 4] >> (8 * (k % 4))); }

SHARDCORE_HD void set_code(uint32_t (&words)[2], int k, uint8_t code) {
  const uint32_t shifted = static_cast<uint32_t>(code) << (8 * (k % 4));
  words[k / 4] = k % 4 == 0 ? shifted : words[k / 4] | shifted;
}

// 4 codes without sign, given with kDroppedBits.
SHARDCORE_HD uint32_t pack_codes(const uint32_t* wide) {
  static_assert(kDroppedBits == 20);
  const uint32_t low = high_halves(wide[0], wide[1]) >> 4, high = high_halves(wide[2], wide[3]) >> 4;
#if defined(__CUDA_ARCH__)
  return __byte_perm(low, high, 0x6420);
#else
  return (low & 0xffu) | ((low >> 8) & 0xff00u) | ((high & 0xffu) << 16) | ((high << 8) & 0xff000000u);
#endif
}

SHARDCORE_HD bool any_byte_is_zero(uint32_t a, uint32_t b) {
  return ((((a - 0x01010101u) & ~a) | ((b - 0x01010101u) & ~b)) & 0x80808080u) != 0;
}

// 4 signs: a byte of ones where x is below zero. On CUDA also where it is -0, whose code is zero; not where it is a NaN if x is
// the result of an operation, since such a NaN has no sign there.
SHARDCORE_HD uint32_t pack_signs(const float* x) {
#if defined(__CUDA_ARCH__)
  uint32_t low, high;  // the selectors f and b: the sign of the one and of the other, in all bits of a byte
  asm("prmt.b32 %0, %1, %2, 0xfb;" : "=r"(low) : "r"(float_bits(x[0])), "r"(float_bits(x[1])));
  asm("prmt.b32 %0, %1, %2, 0xfb;" : "=r"(high) : "r"(float_bits(x[2])), "r"(float_bits(x[3])));
  return low_halves(low, high);
#else
  uint32_t signs = 0;
  for (int k = 0; k < 4; ++k) signs |= x[k] < 0.0f ? 0xffu << (8 * k) : 0u;
  return signs;
#endif
}

// encode_exp_avg of the lane's elements. Signs are applied to 4 codes at once: 128 - code has no borrow.
SHARDCORE_HD void encode_exp_avg(const float (&m)[8], float inv_scale, const uint32_t (&bits)[8], uint32_t (&words)[2]) {
  uint32_t wide[8];
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    wide[k] = wide_code_by_scaling(bits_float(magnitude_bits(m[k])) * inv_scale, kExpAvgBias, exp_avg_noise(bits[k]));
  }
  SHARDCORE_UNROLL
  for (int k = 0; k < 2; ++k) {
    const uint32_t codes = pack_codes(wide + 4 * k), signs = pack_signs(m + 4 * k);
    words[k] = (((0x80808080u - codes) ^ 0x80808080u) & signs) | (codes & ~signs);
  }
}

// encode_exp_avg_sq of the lane's elements.
SHARDCORE_HD void encode_exp_avg_sq(const float (&v)[8], float inv_scale, const uint32_t (&bits)[8], uint32_t (&words)[2]) {
  uint32_t wide[8];
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) wide[k] = wide_code_by_scaling(v[k] * inv_scale, kExpAvgSqBias, exp_avg_sq_noise(bits[k]));
  words[0] = pack_codes(wide), words[1] = pack_codes(wide + 4);
  if (!any_byte_is_zero(words[0], words[1])) return;
  const uint32_t codes[2] = {words[0], words[1]};
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    set_code(words, k, static_cast<uint8_t>(not_zero_unless(magnitude_bits(v[k]), code_of(codes, k))));
  }
}

// One step of the lane's elements; those from i + numel on count as 0 in the largest magnitudes. (They are 0 in any case, since
// their streams are; without these lines nvcc 13.0 spills registers in the kernel for mixtures.) Every lane of the warp calls
// it.
template <typename Warp>
SHARDCORE_HD void update_q8(const AdamChunkView& t, const AdamScalars& s, const MomentKeys& keys, int i, Octet at, int numel,
                            int lane, const Warp& warp, const float (&g)[8], float (&p)[8], Q8Moments& q) {
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
    v_largest = larger(v_largest, float_bits(v[k]));  // never negative
  }
  q.m_scale = scale_of(warp.max(m_largest)), q.v_scale = scale_of(warp.max(v_largest));
  const float m_inv = inverse_of_scale(q.m_scale), v_inv = inverse_of_scale(q.v_scale);
  uint32_t bits[8];
  random_octet(key_of_block(keys, i, warp), keys.parent, t.first_element + i, at, bits);
  encode_exp_avg_sq(v, v_inv, bits, q.v);
  encode_exp_avg(m, m_inv, bits, q.m);
  const int block = block_of(i);
  if (lane == 0) t.exp_avg_scale[block] = q.m_scale, t.exp_avg_sq_scale[block] = q.v_scale;
}

SHARDCORE_HD Q8Moments load_q8(const AdamChunkView& t, int i, int lane) {
  const int block = block_of(i);
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
SHARDCORE_HD void adam_cuda_q8_tail(const AdamChunkView& t, const AdamScalars& s, const MomentKeys& keys, int i, int lane,
                                    const Warp& warp) {
  const Octet at = lane_octet(lane, false);
  const int block = block_of(i);
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
  update_q8(t, s, keys, i, at, t.numel - i, lane, warp, g, p, q);
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
