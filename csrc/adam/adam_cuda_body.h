// What one CUDA thread does in the Adam kernel, as a host/device function of (block, thread): tests/cpp runs it on the host
// over all blocks and threads and compares bits with the CPU path.
//
// A CUDA block works on one chunk of one tensor, a warp on 256 elements of it at a time, in 16-byte accesses
// (adam_cuda_lanes.h). The rest of the last chunk, and tensors that are not aligned to 16 bytes, go element by element through
// the same formula.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "adam/adam_cuda_lanes.h"
#include "adam/adam_cuda_q8.h"
#include "adam/adam_cuda_view.h"
#include "adam/adam_math.h"
#include "core/chunks.h"

namespace shardcore {

template <bool kAmsgrad>
SHARDCORE_HD void adam_cuda_scalar(const AdamChunkView& t, const AdamScalars& s, int i) {
  const float g = load_as_f32(t.grad, t.grad_dtype, i);
  float p = load_weight(t, i);
  float m = load_moment(t, t.exp_avg, i);
  float v = load_moment(t, t.exp_avg_sq, i);
  float* const vmax = kAmsgrad ? t.max_exp_avg_sq + i : nullptr;
  s.l2 != 0.0f ? adam_element<true, kAmsgrad>(s, g, p, m, v, vmax) : adam_element<false, kAmsgrad>(s, g, p, m, v, vmax);
  store_moments(t, i, m, v);
  store_weight(t, i, p);
}

// All that a lane loads of a block: all loads before the first use, so that they are in flight together.
struct AdamRaw {
  Raw g, p, m, v, vmax;  // moments that are bfloat16: in low
  Q8Moments q;
};

template <StateDType kState, bool kAmsgrad>
SHARDCORE_HD AdamRaw load_block(const AdamChunkView& t, int i, Octet at, int lane) {
  AdamRaw raw{};
  raw.g = load_grad_raw(t, i, at, lane);
  raw.p = load_weight_raw(t, i, at, lane);
  if (kState == StateDType::f32) {
    raw.m = load_f32_raw(t.exp_avg, i, at);
    raw.v = load_f32_raw(t.exp_avg_sq, i, at);
    if (kAmsgrad) raw.vmax = load_f32_raw(t.max_exp_avg_sq, i, at);
  } else if (kState == StateDType::bf16) {
    raw.m.low = load16(t.exp_avg + 2 * (i + 8 * lane));
    raw.v.low = load16(t.exp_avg_sq + 2 * (i + 8 * lane));
  } else {
    raw.q = load_q8(t, i, lane);
  }
  return raw;
}

// Every lane of the warp calls it.
template <StateDType kState, bool kAmsgrad, typename Warp>
SHARDCORE_HD void update_block(const AdamChunkView& t, const AdamScalars& s, const MomentKeys& keys, int i, int lane,
                               const Warp& warp) {
  const Octet at = lane_octet(lane, t.any_f32);
  AdamRaw raw = load_block<kState, kAmsgrad>(t, i, at, lane);
  float g[8], p[8], m[8], v[8], vmax[8];
  unpack_grad(t, raw.g, lane, warp, g);
  unpack_weight(t, raw.p, lane, warp, p);
  if (kState == StateDType::f32) {
    unpack_f32_raw(raw.m, m);
    unpack_f32_raw(raw.v, v);
    if (kAmsgrad) unpack_f32_raw(raw.vmax, vmax);
    update_octet<kAmsgrad>(s, g, p, m, v, vmax);
    store_f32_octet(t.exp_avg, i, at, m);
    store_f32_octet(t.exp_avg_sq, i, at, v);
    if (kAmsgrad) store_f32_octet(t.max_exp_avg_sq, i, at, vmax);
  } else if (kState == StateDType::bf16) {
    to_octet<2>(t, raw.m.low.words, lane, warp);
    to_octet<2>(t, raw.v.low.words, lane, warp);
    unpack_16bit(raw.m.low, DType::bf16, m);
    unpack_16bit(raw.v.low, DType::bf16, v);
    update_octet<false>(s, g, p, m, v, vmax);
    uint32_t bits[8];
    random_octet(key_of_block(keys, i, warp), keys.parent, t.first_element + i, at, bits);
    Bytes16 m16 = pack_bf16(m), v16 = pack_bf16(v, [&](int k) { return bits[k] >> 16; });
    to_neighbours<2>(t, m16.words, lane, warp);
    to_neighbours<2>(t, v16.words, lane, warp);
    store16(t.exp_avg + 2 * (i + 8 * lane), m16);
    store16(t.exp_avg_sq + 2 * (i + 8 * lane), v16);
  } else {
    to_octet<1>(t, raw.q.m, lane, warp);
    to_octet<1>(t, raw.q.v, lane, warp);
    update_q8(t, s, keys, i, at, static_cast<int>(kBlock), lane, warp, g, p, raw.q);
    to_neighbours<1>(t, raw.q.m, lane, warp);
    to_neighbours<1>(t, raw.q.v, lane, warp);
    store8(t.exp_avg + i + 8 * lane, raw.q.m);
    store8(t.exp_avg_sq + i + 8 * lane, raw.q.v);
  }
  store_weight_octet(t, i, at, lane, warp, p);
}

template <StateDType kState, bool kAmsgrad, typename Warp>
SHARDCORE_HD void adam_cuda_chunk(const AdamChunkView& t, const AdamScalars& s, bool aligned, int thread, const Warp& warp) {
  constexpr int kSize = static_cast<int>(kBlock);
  const int lane = thread % 32, warp_index = thread / 32;
  const int vector_numel = aligned ? t.numel / kSize * kSize : 0;
  int i = warp_index * kSize;
  const MomentKeys keys = kState == StateDType::f32 ? MomentKeys{} : moment_keys(t, warp_index, lane);
  SHARDCORE_NO_UNROLL
  for (; i < vector_numel; i += kAdamStride) update_block<kState, kAmsgrad>(t, s, keys, i, lane, warp);
  if (kState == StateDType::q8) {
    SHARDCORE_NO_UNROLL
    for (; i < t.numel; i += kAdamStride) adam_cuda_q8_tail(t, s, keys, i, lane, warp);
  } else {
    SHARDCORE_NO_UNROLL
    for (int e = vector_numel + thread; e < t.numel; e += kAdamThreads) adam_cuda_scalar<kAmsgrad>(t, s, e);
  }
}

// A kernel's scalars: a table in device memory or, without one, a few that are arguments of the launch itself, so that no copy
// to the device precedes a step that the host decides.
struct AdamScalarsArg {
  static constexpr size_t kFew = 8;
  const AdamScalars* table = nullptr;
  AdamScalars few[kFew] = {};

  // Makes them arguments of the launch; false if they are too many.
  bool try_assign(const std::vector<AdamScalars>& scalars) {
    if (scalars.size() > kFew) return false;
    std::copy(scalars.begin(), scalars.end(), few);
    return true;
  }
};

SHARDCORE_HD AdamScalars scalars_at(const AdamScalarsArg& scalars, int i) {
  return scalars.table != nullptr ? scalars.table[i] : scalars.few[i];
}

// kForm: an index of kAdamForms.
template <int kForm, typename Warp>
SHARDCORE_HD void adam_cuda_body(const ChunkTable<AdamSegment>& table, const AdamScalarsArg& scalars, int64_t block, int thread,
                                 const Warp& warp) {
  constexpr AdamForm form = kAdamForms[kForm];
  const Chunk chunk = chunk_at(table, block, kAdamChunk);
  const AdamSegment& segment = table.segments[chunk.tensor];
  const AdamScalars s = scalars_at(scalars, segment.hyper_index);
  if (s.skip) return;
  const AdamChunkView t = adam_chunk_view<kForm>(segment, chunk.first, s);
  const StateDType state = form.any_state ? t.state_dtype : form.state;
  const bool aligned = segment.aligned16;
  if (state == StateDType::q8) {
    adam_cuda_chunk<StateDType::q8, false>(t, s, aligned, thread, warp);
  } else if (state == StateDType::bf16) {
    adam_cuda_chunk<StateDType::bf16, false>(t, s, aligned, thread, warp);
  } else if (form.any_state && t.max_exp_avg_sq) {
    adam_cuda_chunk<StateDType::f32, true>(t, s, aligned, thread, warp);
  } else {
    adam_cuda_chunk<StateDType::f32, false>(t, s, aligned, thread, warp);
  }
}

}  // namespace shardcore
