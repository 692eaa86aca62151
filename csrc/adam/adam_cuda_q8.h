// Adam over a chunk with 8-bit moments on CUDA: a warp takes a 256-element block, a lane 8 neighbours of it.
//
// Invariant: all lanes have read a block's old scales (their largest magnitudes depend on them) before lane 0 writes the new.
#pragma once

#include "adam/adam_cuda_view.h"
#include "adam/adam_math.h"

namespace shardcore {

SHARDCORE_HD uint8_t code_of(const uint32_t (&words)[2], int k) { return static_cast<uint8_t>(words[k / 4] >> (8 * (k % 4))); }

SHARDCORE_HD void set_code(uint32_t (&words)[2], int k, uint8_t code) {
  const uint32_t shifted = static_cast<uint32_t>(code) << (8 * (k % 4));
  words[k / 4] = k % 4 == 0 ? shifted : words[k / 4] | shifted;
}

// The 8 codes from element i on, 4 a word; those that are not below numel are 0.
template <bool kVector>
SHARDCORE_HD void load_codes(const char* codes, int i, int numel, uint32_t (&words)[2]) {
  if constexpr (kVector) {
    load8(codes + i, words);
  } else {
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) set_code(words, k, i + k < numel ? static_cast<uint8_t>(codes[i + k]) : 0);
  }
}

template <bool kVector>
SHARDCORE_HD void store_codes(char* codes, int i, int numel, const uint32_t (&words)[2]) {
  if constexpr (kVector) {
    store8(codes + i, words);
  } else {
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) {
      if (i + k < numel) codes[i + k] = static_cast<char>(code_of(words, k));
    }
  }
}

// The float32 weights of 8 neighbours.
template <bool kVector>
SHARDCORE_HD void load_weights(const AdamChunkView& t, int i, float (&p)[8]) {
  const Octet at{i, i + 4};
  if (t.master_kind == Master::f32) {
    load_octet<kVector>(t.master, DType::f32, at, t.numel, p);
  } else if (t.master_kind == Master::none) {
    load_octet<kVector>(t.param, t.param_dtype, at, t.numel, p);
  } else if (kVector) {
    const Bytes16 weight = load16(t.param + 2 * i), rest = load16(t.master + 2 * i);
    float half[4];
    SHARDCORE_UNROLL
    for (int h = 0; h < 2; ++h) {
      unpack_split(weight, rest, h, half);
      SHARDCORE_UNROLL
      for (int k = 0; k < 4; ++k) p[4 * h + k] = half[k];
    }
  } else {
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) p[k] = i + k < t.numel ? load_weight(t, i + k) : 0.0f;
  }
}

template <bool kVector>
SHARDCORE_HD void store_weights(const AdamChunkView& t, int i, const float (&p)[8]) {
  if (!kVector) {
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) {
      if (i + k < t.numel) store_weight(t, i + k, p[k]);
    }
    return;
  }
  const Octet at{i, i + 4};
  if (t.master_kind == Master::f32) store_octet<true>(t.master, DType::f32, at, t.numel, p);
  if (t.param_dtype == DType::f32) {
    store_octet<true>(t.param, DType::f32, at, t.numel, p);
    return;
  }
  Bytes16 weight{}, rest{};
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    pack_16bit(weight, k / 4, k % 4, round_16bit_weight(t, p[k], i + k));
    if (t.master_kind == Master::split) pack_16bit(rest, k / 4, k % 4, static_cast<uint16_t>(split_remainder(p[k])));
  }
  store16(t.param + 2 * i, weight);
  if (t.master_kind == Master::split) store16(t.master + 2 * i, rest);
}

// One block of 256. kVector: whole, and every stream aligned to 16 bytes. Every lane of the warp calls it.
template <bool kL2, bool kVector, typename Warp>
SHARDCORE_HD void adam_cuda_q8_block(const AdamChunkView& t, const AdamScalars& s, int base, int lane, const Warp& warp) {
  const int i = base + 8 * lane;
  const int block = base / static_cast<int>(kBlock);
  float g[8], p[8], m[8], v[8];
  uint32_t m_codes[2], v_codes[2];
  load_octet<kVector>(t.grad, t.grad_dtype, {i, i + 4}, t.numel, g);
  load_weights<kVector>(t, i, p);
  load_codes<kVector>(t.exp_avg, i, t.numel, m_codes);
  load_codes<kVector>(t.exp_avg_sq, i, t.numel, v_codes);
  const float m_scale = t.exp_avg_scale[block], v_scale = t.exp_avg_sq_scale[block];
  uint32_t m_largest = 0, v_largest = 0;
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    m[k] = v[k] = 0.0f;
    if (kVector || i + k < t.numel) {
      m[k] = decode_exp_avg(static_cast<int8_t>(code_of(m_codes, k)), m_scale);
      v[k] = decode_exp_avg_sq(code_of(v_codes, k), v_scale);
      adam_element<kL2, false>(s, g[k], p[k], m[k], v[k], nullptr);
    }
    m_largest = magnitude_bits(m[k]) > m_largest ? magnitude_bits(m[k]) : m_largest;
    v_largest = magnitude_bits(v[k]) > v_largest ? magnitude_bits(v[k]) : v_largest;
  }
  const float new_m_scale = scale_of(warp.max(m_largest)), new_v_scale = scale_of(warp.max(v_largest));
  const float m_inv = 1.0f / new_m_scale, v_inv = 1.0f / new_v_scale;
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    const uint32_t bits = moment_bits(t, i + k);
    set_code(m_codes, k, static_cast<uint8_t>(encode_exp_avg(m[k], m_inv, exp_avg_noise(bits))));
    set_code(v_codes, k, encode_exp_avg_sq(v[k], v_inv, exp_avg_sq_noise(bits)));
  }
  store_codes<kVector>(t.exp_avg, i, t.numel, m_codes);
  store_codes<kVector>(t.exp_avg_sq, i, t.numel, v_codes);
  store_weights<kVector>(t, i, p);
  if (lane == 0) {
    t.exp_avg_scale[block] = new_m_scale;
    t.exp_avg_sq_scale[block] = new_v_scale;
  }
}

template <bool kL2, typename Warp>
SHARDCORE_HD void adam_cuda_q8_chunk(const AdamChunkView& t, const AdamScalars& s, bool aligned, int thread, const Warp& warp) {
  constexpr int kSize = static_cast<int>(kBlock);
  constexpr int kStride = kAdamThreads / 32 * kSize;
  const int vector_numel = aligned ? t.numel / kSize * kSize : 0;
  int base = thread / 32 * kSize;
  SHARDCORE_NO_UNROLL
  for (; base < vector_numel; base += kStride) adam_cuda_q8_block<kL2, true>(t, s, base, thread % 32, warp);
  SHARDCORE_NO_UNROLL
  for (; base < t.numel; base += kStride) adam_cuda_q8_block<kL2, false>(t, s, base, thread % 32, warp);
}

}  // namespace shardcore
