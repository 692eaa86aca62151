// What one CUDA thread does in the Adam kernel, as a host/device function of (block, thread): tests/cpp runs it on the host
// over all blocks and threads and compares bits with the CPU path.
//
// A block works on one chunk of one tensor. Aligned tensors go 8 elements a thread in 16-byte accesses; the rest of the
// last chunk, and tensors that are not aligned to 16 bytes, go element by element through the same formula. Tensors with
// 8-bit states go a 256-element block a warp (adam_cuda_q8.h).
#pragma once

#include <cstdint>

#include "adam/adam_cuda_q8.h"
#include "adam/adam_cuda_view.h"
#include "adam/adam_math.h"
#include "core/chunks.h"

namespace shardcore {

template <bool kL2, bool kAmsgrad>
SHARDCORE_HD void adam_cuda_scalar(const AdamChunkView& t, const AdamScalars& s, int i) {
  const float g = load_as_f32(t.grad, t.grad_dtype, i);
  float p = load_weight(t, i);
  float m = load_moment(t, t.exp_avg, i);
  float v = load_moment(t, t.exp_avg_sq, i);
  adam_element<kL2, kAmsgrad>(s, g, p, m, v, kAmsgrad ? t.max_exp_avg_sq + i : nullptr);
  store_moments(t, i, m, v);
  store_weight(t, i, p);
}

// 8 elements in two halves of 4, whose first elements are first and second: neighbours if a stream is 16-bit.
// kReduced: moments may be bfloat16, the master split; else both are float32.
template <bool kL2, bool kAmsgrad, bool kReduced>
SHARDCORE_HD void adam_cuda_vector(const AdamChunkView& t, const AdamScalars& s, int first, int second) {
  const bool grad_f32 = t.grad_dtype == DType::f32;
  const bool param_f32 = t.param_dtype == DType::f32;
  const bool weight_f32 = t.master_kind == Master::f32 || param_f32;
  const bool split = kReduced && t.master_kind == Master::split;
  const bool moments_f32 = !kReduced || t.state_dtype == StateDType::f32;
  char* const weight = t.master_kind == Master::f32 ? t.master : t.param;  // the float32 weights, if weight_f32
  Bytes16 grad16{}, param16{}, rest16{}, m16{}, v16{};
  if (!grad_f32) grad16 = load16(t.grad + 2 * first);
  if (!weight_f32) param16 = load16(t.param + 2 * first);
  if (split) rest16 = load16(t.master + 2 * first);
  if (!moments_f32) m16 = load16(t.exp_avg + 2 * first), v16 = load16(t.exp_avg_sq + 2 * first);
  SHARDCORE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i = half == 0 ? first : second;
    // All loads before the first use, so that they are in flight together.
    Bytes16 raw_g{}, raw_p{}, raw_m{}, raw_v{}, raw_vmax{};
    if (grad_f32) raw_g = load16(t.grad + 4 * i);
    if (weight_f32) raw_p = load16(weight + 4 * i);
    if (moments_f32) raw_m = load16(t.exp_avg + 4 * i), raw_v = load16(t.exp_avg_sq + 4 * i);
    if (kAmsgrad) raw_vmax = load16(t.max_exp_avg_sq + i);
    float g[4], p[4], m[4], v[4], vmax[4];
    grad_f32 ? unpack_f32(raw_g, g) : unpack_16bit(grad16, t.grad_dtype, half, g);
    if (weight_f32) {
      unpack_f32(raw_p, p);
    } else if (split) {
      unpack_split(param16, rest16, half, p);
    } else {
      unpack_16bit(param16, t.param_dtype, half, p);
    }
    moments_f32 ? unpack_f32(raw_m, m) : unpack_16bit(m16, DType::bf16, half, m);
    moments_f32 ? unpack_f32(raw_v, v) : unpack_16bit(v16, DType::bf16, half, v);
    unpack_f32(raw_vmax, vmax);
    SHARDCORE_UNROLL
    for (int k = 0; k < 4; ++k) adam_element<kL2, kAmsgrad>(s, g[k], p[k], m[k], v[k], vmax + k);
    if (moments_f32) {
      store_f32(reinterpret_cast<float*>(t.exp_avg) + i, m);
      store_f32(reinterpret_cast<float*>(t.exp_avg_sq) + i, v);
    } else {
      SHARDCORE_UNROLL
      for (int k = 0; k < 4; ++k) {
        pack_16bit(m16, half, k, f32_to_bf16(m[k]));
        pack_16bit(v16, half, k, round_bf16_exp_avg_sq(t, v[k], i + k));
      }
    }
    if (kAmsgrad) store_f32(t.max_exp_avg_sq + i, vmax);
    if (weight_f32) store_f32(reinterpret_cast<float*>(weight) + i, p);
    if (param_f32) {
      if (t.master_kind == Master::f32) store_f32(reinterpret_cast<float*>(t.param) + i, p);
    } else {
      SHARDCORE_UNROLL
      for (int k = 0; k < 4; ++k) {
        pack_16bit(param16, half, k, round_16bit_weight(t, p[k], i + k));
        if (split) pack_16bit(rest16, half, k, static_cast<uint16_t>(split_remainder(p[k])));
      }
    }
  }
  if (!param_f32) store16(t.param + 2 * first, param16);
  if (split) store16(t.master + 2 * first, rest16);
  if (!moments_f32) store16(t.exp_avg + 2 * first, m16), store16(t.exp_avg_sq + 2 * first, v16);
}

template <bool kL2, bool kAmsgrad, bool kReduced>
SHARDCORE_HD void adam_cuda_chunk(const AdamChunkView& t, const AdamScalars& s, bool aligned, int thread) {
  // float32 alone: neighbouring threads take neighbouring 16 bytes. With a 16-bit stream a thread takes 8 neighbours.
  const bool f32_only = t.param_dtype == DType::f32 && t.grad_dtype == DType::f32 && t.state_dtype == StateDType::f32;
  const int first = (f32_only ? 4 : 8) * thread;
  const int second = first + (f32_only ? 4 * kAdamThreads : 4);
  constexpr int kPerRound = 8 * kAdamThreads;
  const int vector_numel = aligned ? t.numel / kPerRound * kPerRound : 0;
  SHARDCORE_NO_UNROLL
  for (int base = 0; base < vector_numel; base += kPerRound) {
    adam_cuda_vector<kL2, kAmsgrad, kReduced>(t, s, base + first, base + second);
  }
  SHARDCORE_NO_UNROLL
  for (int i = vector_numel + thread; i < t.numel; i += kAdamThreads) adam_cuda_scalar<kL2, kAmsgrad>(t, s, i);
}

// kReduced: segments may have bfloat16 or 8-bit moments or a split master; without it the kernel needs fewer registers.
template <bool kReduced, typename Warp>
SHARDCORE_HD void adam_cuda_body(const AdamSegment* segments, const Chunk* chunks, const AdamScalars* scalars, int64_t block,
                                 int thread, const Warp& warp) {
  const Chunk chunk = chunks[block];
  const AdamSegment& segment = segments[chunk.tensor];
  const AdamScalars s = scalars[segment.hyper_index];
  if (s.skip) return;
  const AdamChunkView t = adam_chunk_view(segment, chunk.first, s);
  const bool aligned = segment.aligned16;
  const bool l2 = s.l2 != 0.0f;
  if (kReduced && t.state_dtype == StateDType::q8) {
    l2 ? adam_cuda_q8_chunk<true>(t, s, aligned, thread, warp) : adam_cuda_q8_chunk<false>(t, s, aligned, thread, warp);
  } else if (t.max_exp_avg_sq) {
    l2 ? adam_cuda_chunk<true, true, kReduced>(t, s, aligned, thread)
       : adam_cuda_chunk<false, true, kReduced>(t, s, aligned, thread);
  } else {
    l2 ? adam_cuda_chunk<true, false, kReduced>(t, s, aligned, thread)
       : adam_cuda_chunk<false, false, kReduced>(t, s, aligned, thread);
  }
}

}  // namespace shardcore
