// What one CUDA thread does in the Adam kernel, as a host/device function of (block, thread): tests/cpp runs it on the host
// over all blocks and threads and compares bits with the CPU path.
//
// A block works on one chunk of one tensor. Aligned tensors go 8 elements a thread in 16-byte accesses; the rest of the
// last chunk, and tensors that are not aligned to 16 bytes, go element by element through the same formula.
#pragma once

#include <cstdint>

#include "adam/adam_math.h"
#include "adam/adam_segment.h"
#include "core/chunks.h"
#include "core/vector_io.h"

namespace shardcore {

constexpr int kAdamThreads = 128;
constexpr int kAdamChunk = 8 * 8 * kAdamThreads;

// The pointers of one chunk, moved to its first element.
struct AdamChunkView {
  char* param;
  const char* grad;
  float* exp_avg;
  float* exp_avg_sq;
  float* master;
  float* max_exp_avg_sq;
  int numel;
  DType param_dtype;
  DType grad_dtype;
  bool stochastic;
  uint64_t param_key;     // stochastic only
  int64_t first_element;  // of the chunk, in the whole parameter
};

SHARDCORE_HD AdamChunkView adam_chunk_view(const AdamSegment& t, int64_t first, const AdamScalars& s) {
  AdamChunkView view;
  view.param_dtype = t.param_dtype;
  view.grad_dtype = t.grad_dtype;
  view.param = static_cast<char*>(t.param) + first * itemsize(t.param_dtype);
  view.grad = static_cast<const char*>(t.grad) + first * itemsize(t.grad_dtype);
  view.exp_avg = t.exp_avg + first;
  view.exp_avg_sq = t.exp_avg_sq + first;
  view.master = t.master ? t.master + first : nullptr;
  view.max_exp_avg_sq = t.max_exp_avg_sq ? t.max_exp_avg_sq + first : nullptr;
  view.numel = static_cast<int>(t.numel - first < kAdamChunk ? t.numel - first : kAdamChunk);
  view.stochastic = s.stochastic_rounding && !t.master && t.param_dtype == DType::bf16;
  view.param_key = view.stochastic ? child_key(s.random_key, t.param_index) : 0;
  view.first_element = t.first_element + first;
  return view;
}

SHARDCORE_HD uint16_t adam_round_16bit(const AdamChunkView& t, float p, int i) {
  if (t.stochastic) {
    const int64_t element = t.first_element + i;
    return f32_to_bf16_stochastic(p, rounding_block_key(t.param_key, element), element);
  }
  return t.param_dtype == DType::bf16 ? f32_to_bf16(p) : f32_to_f16(p);
}

template <bool kL2, bool kAmsgrad>
SHARDCORE_HD void adam_cuda_scalar(const AdamChunkView& t, const AdamScalars& s, int i) {
  float p = t.master ? t.master[i] : load_as_f32(t.param, t.param_dtype, i);
  float m = t.exp_avg[i];
  float v = t.exp_avg_sq[i];
  const float g = load_as_f32(t.grad, t.grad_dtype, i);
  adam_element<kL2, kAmsgrad>(s, g, p, m, v, kAmsgrad ? t.max_exp_avg_sq + i : nullptr);
  t.exp_avg[i] = m;
  t.exp_avg_sq[i] = v;
  if (t.master) t.master[i] = p;
  if (t.param_dtype == DType::f32) {
    reinterpret_cast<float*>(t.param)[i] = p;
  } else {
    reinterpret_cast<uint16_t*>(t.param)[i] = adam_round_16bit(t, p, i);
  }
}

// first, second: where the two halves of 4 elements begin. Neighbours if a stream is 16-bit.
template <bool kL2, bool kAmsgrad>
SHARDCORE_HD void adam_cuda_vector(const AdamChunkView& t, const AdamScalars& s, int first, int second) {
  const bool grad_f32 = t.grad_dtype == DType::f32;
  const bool param_f32 = t.param_dtype == DType::f32;
  float* const weight = t.master ? t.master : reinterpret_cast<float*>(t.param);  // unless the formula works on 16-bit weights
  const bool weight_f32 = t.master || param_f32;
  Bytes16 grad16{};
  Bytes16 param16{};
  if (!grad_f32) grad16 = load16(t.grad + 2 * first);
  if (!weight_f32) param16 = load16(t.param + 2 * first);
  SHARDCORE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int i = half == 0 ? first : second;
    // All loads before the first use, so that they are in flight together.
    Bytes16 raw_g{}, raw_p{}, raw_vmax{};
    if (grad_f32) raw_g = load16(t.grad + 4 * i);
    if (weight_f32) raw_p = load16(weight + i);
    const Bytes16 raw_m = load16(t.exp_avg + i);
    const Bytes16 raw_v = load16(t.exp_avg_sq + i);
    if (kAmsgrad) raw_vmax = load16(t.max_exp_avg_sq + i);
    float g[4], p[4], m[4], v[4], vmax[4];
    if (grad_f32) {
      unpack_f32(raw_g, g);
    } else {
      unpack_16bit(grad16, t.grad_dtype, half, g);
    }
    if (weight_f32) {
      unpack_f32(raw_p, p);
    } else {
      unpack_16bit(param16, t.param_dtype, half, p);
    }
    unpack_f32(raw_m, m);
    unpack_f32(raw_v, v);
    unpack_f32(raw_vmax, vmax);
    SHARDCORE_UNROLL
    for (int k = 0; k < 4; ++k) adam_element<kL2, kAmsgrad>(s, g[k], p[k], m[k], v[k], vmax + k);
    store_f32(t.exp_avg + i, m);
    store_f32(t.exp_avg_sq + i, v);
    if (kAmsgrad) store_f32(t.max_exp_avg_sq + i, vmax);
    if (weight_f32) store_f32(weight + i, p);
    if (param_f32) {
      if (t.master) store_f32(reinterpret_cast<float*>(t.param) + i, p);
    } else {
      SHARDCORE_UNROLL
      for (int k = 0; k < 4; ++k) pack_16bit(param16, half, k, adam_round_16bit(t, p[k], i + k));
    }
  }
  if (!param_f32) store16(t.param + 2 * first, param16);
}

template <bool kL2, bool kAmsgrad>
SHARDCORE_HD void adam_cuda_chunk(const AdamChunkView& t, const AdamScalars& s, bool aligned, int thread) {
  // float32 alone: neighbouring threads take neighbouring 16 bytes. With a 16-bit stream a thread takes 8 neighbours.
  const bool f32_only = t.param_dtype == DType::f32 && t.grad_dtype == DType::f32;
  const int first = (f32_only ? 4 : 8) * thread;
  const int second = first + (f32_only ? 4 * kAdamThreads : 4);
  constexpr int kPerRound = 8 * kAdamThreads;
  const int vector_numel = aligned ? t.numel / kPerRound * kPerRound : 0;
  SHARDCORE_NO_UNROLL
  for (int base = 0; base < vector_numel; base += kPerRound) {
    adam_cuda_vector<kL2, kAmsgrad>(t, s, base + first, base + second);
  }
  SHARDCORE_NO_UNROLL
  for (int i = vector_numel + thread; i < t.numel; i += kAdamThreads) adam_cuda_scalar<kL2, kAmsgrad>(t, s, i);
}

SHARDCORE_HD void adam_cuda_body(const AdamSegment* segments, const Chunk* chunks, const AdamScalars* scalars, int64_t block,
                                 int thread) {
  const Chunk chunk = chunks[block];
  const AdamSegment& segment = segments[chunk.tensor];
  const AdamScalars s = scalars[segment.hyper_index];
  const AdamChunkView t = adam_chunk_view(segment, chunk.first, s);
  const bool aligned = segment.aligned16;
  if (s.l2 != 0.0f) {
    if (t.max_exp_avg_sq) {
      adam_cuda_chunk<true, true>(t, s, aligned, thread);
    } else {
      adam_cuda_chunk<true, false>(t, s, aligned, thread);
    }
  } else if (t.max_exp_avg_sq) {
    adam_cuda_chunk<false, true>(t, s, aligned, thread);
  } else {
    adam_cuda_chunk<false, false>(t, s, aligned, thread);
  }
}

}  // namespace shardcore
