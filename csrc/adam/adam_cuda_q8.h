// Adam over a chunk with 8-bit moments on CUDA: a warp takes a 256-element block, a lane 8 neighbours of it.
//
// Invariant: all lanes have read a block's old scales (their largest magnitudes depend on them) before lane 0 writes the new.
#pragma once

#include "adam/adam_cuda_view.h"
#include "adam/adam_math.h"

namespace shardcore {

// The 8 elements of one lane.
struct Octet {
  float g[8], p[8];
  uint32_t m[2], v[2];  // codes, 4 a word
};

SHARDCORE_HD uint8_t code_of(const uint32_t (&words)[2], int k) { return static_cast<uint8_t>(words[k / 4] >> (8 * (k % 4))); }

SHARDCORE_HD void set_code(uint32_t (&words)[2], int k, uint8_t code) {
  const uint32_t shifted = static_cast<uint32_t>(code) << (8 * (k % 4));
  words[k / 4] = k % 4 == 0 ? shifted : words[k / 4] | shifted;
}

SHARDCORE_HD void unpack_stream(const char* data, DType dtype, int i, float (&x)[8]) {
  float half[4];
  SHARDCORE_UNROLL
  for (int h = 0; h < 2; ++h) {
    dtype == DType::f32 ? unpack_f32(load16(data + 4 * (i + 4 * h)), half) : unpack_16bit(load16(data + 2 * i), dtype, h, half);
    SHARDCORE_UNROLL
    for (int k = 0; k < 4; ++k) x[4 * h + k] = half[k];
  }
}

SHARDCORE_HD void store_f32_octet(char* data, int i, const float (&x)[8]) {
  const float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
  store_f32(reinterpret_cast<float*>(data) + i, low);
  store_f32(reinterpret_cast<float*>(data) + i + 4, high);
}

SHARDCORE_HD void load_octet(const AdamChunkView& t, int i, Octet& o) {
  unpack_stream(t.grad, t.grad_dtype, i, o.g);
  if (t.master_kind == Master::f32) {
    unpack_stream(t.master, DType::f32, i, o.p);
  } else if (t.master_kind == Master::split) {
    const Bytes16 weight = load16(t.param + 2 * i), rest = load16(t.master + 2 * i);
    float half[4];
    SHARDCORE_UNROLL
    for (int h = 0; h < 2; ++h) {
      unpack_split(weight, rest, h, half);
      SHARDCORE_UNROLL
      for (int k = 0; k < 4; ++k) o.p[4 * h + k] = half[k];
    }
  } else {
    unpack_stream(t.param, t.param_dtype, i, o.p);
  }
  load8(t.exp_avg + i, o.m);
  load8(t.exp_avg_sq + i, o.v);
}

SHARDCORE_HD void store_octet(const AdamChunkView& t, int i, const Octet& o) {
  store8(t.exp_avg + i, o.m);
  store8(t.exp_avg_sq + i, o.v);
  if (t.master_kind == Master::f32) store_f32_octet(t.master, i, o.p);
  if (t.param_dtype == DType::f32) {
    store_f32_octet(t.param, i, o.p);
    return;
  }
  Bytes16 weight{}, rest{};
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    pack_16bit(weight, k / 4, k % 4, round_16bit_weight(t, o.p[k], i + k));
    if (t.master_kind == Master::split) pack_16bit(rest, k / 4, k % 4, static_cast<uint16_t>(split_remainder(o.p[k])));
  }
  store16(t.param + 2 * i, weight);
  if (t.master_kind == Master::split) store16(t.master + 2 * i, rest);
}

// One block of 256, the last of a tensor perhaps shorter. Every lane of the warp calls it.
template <bool kL2, typename Warp>
SHARDCORE_HD void adam_cuda_q8_block(const AdamChunkView& t, const AdamScalars& s, bool aligned, int base, int lane,
                                     const Warp& warp) {
  const int i = base + 8 * lane;
  const int left = t.numel - i;
  const int n = left < 0 ? 0 : (left < 8 ? left : 8);
  const bool vector = aligned && n == 8;
  const int block = base / static_cast<int>(kBlock);
  Octet o{};
  if (vector) {
    load_octet(t, i, o);
  } else {
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) {
      if (k >= n) continue;
      o.g[k] = load_as_f32(t.grad, t.grad_dtype, i + k);
      o.p[k] = load_weight(t, i + k);
      set_code(o.m, k, static_cast<uint8_t>(t.exp_avg[i + k]));
      set_code(o.v, k, static_cast<uint8_t>(t.exp_avg_sq[i + k]));
    }
  }
  const float m_scale = t.exp_avg_scale[block], v_scale = t.exp_avg_sq_scale[block];
  float m[8], v[8];
  uint32_t m_largest = 0, v_largest = 0;
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    m[k] = v[k] = 0.0f;
    if (k < n) {
      m[k] = decode_exp_avg(static_cast<int8_t>(code_of(o.m, k)), m_scale);
      v[k] = decode_exp_avg_sq(code_of(o.v, k), v_scale);
      adam_element<kL2, false>(s, o.g[k], o.p[k], m[k], v[k], nullptr);
    }
    m_largest = magnitude_bits(m[k]) > m_largest ? magnitude_bits(m[k]) : m_largest;
    v_largest = magnitude_bits(v[k]) > v_largest ? magnitude_bits(v[k]) : v_largest;
  }
  const float new_m_scale = scale_of(warp.max(m_largest)), new_v_scale = scale_of(warp.max(v_largest));
  const float m_inv = 1.0f / new_m_scale, v_inv = 1.0f / new_v_scale;
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    const uint32_t bits = moment_bits(t, i + k);
    set_code(o.m, k, static_cast<uint8_t>(encode_exp_avg(m[k], m_inv, exp_avg_noise(bits))));
    set_code(o.v, k, encode_exp_avg_sq(v[k], v_inv, exp_avg_sq_noise(bits)));
  }
  if (vector) {
    store_octet(t, i, o);
  } else {
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) {
      if (k >= n) continue;
      t.exp_avg[i + k] = static_cast<char>(code_of(o.m, k));
      t.exp_avg_sq[i + k] = static_cast<char>(code_of(o.v, k));
      store_weight(t, i + k, o.p[k]);
    }
  }
  if (lane == 0) {
    t.exp_avg_scale[block] = new_m_scale;
    t.exp_avg_sq_scale[block] = new_v_scale;
  }
}

template <bool kL2, typename Warp>
SHARDCORE_HD void adam_cuda_q8_chunk(const AdamChunkView& t, const AdamScalars& s, bool aligned, int thread, const Warp& warp) {
  constexpr int kWarps = kAdamThreads / 32;
  SHARDCORE_NO_UNROLL
  for (int base = thread / 32 * static_cast<int>(kBlock); base < t.numel; base += kWarps * static_cast<int>(kBlock)) {
    adam_cuda_q8_block<kL2>(t, s, aligned, base, thread % 32, warp);
  }
}

}  // namespace shardcore
