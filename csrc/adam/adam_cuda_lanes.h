// What a lane does with the 8 elements that it has of a 256-element block of a chunk: gradients and weights in and out in
// 16-byte accesses, random bits, and the formula. i: the block's first element in the chunk.
#pragma once

#include "adam/adam_cuda_view.h"
#include "adam/adam_roots.h"

namespace shardcore {

// 8 elements as they lie in memory: of float32 streams a half each; of 16-bit ones 8 neighbours in low.
struct Raw {
  Bytes16 low, high;
};

template <int kWords, typename Warp>
SHARDCORE_HD void to_octet(const AdamChunkView& t, uint32_t (&words)[2 * kWords], int lane, const Warp& warp) {
  if (t.any_f32) neighbours_to_octet<kWords>(words, lane, warp);
}

template <int kWords, typename Warp>
SHARDCORE_HD void to_neighbours(const AdamChunkView& t, uint32_t (&words)[2 * kWords], int lane, const Warp& warp) {
  if (t.any_f32) octet_to_neighbours<kWords>(words, lane, warp);
}

SHARDCORE_HD Raw load_f32_raw(const void* data, int i, Octet at) {
  const float* const stream = static_cast<const float*>(data) + i;
  return {load16(stream + at.first), load16(stream + at.second)};
}

SHARDCORE_HD void unpack_f32_raw(const Raw& raw, float (&x)[8]) {
  SHARDCORE_UNROLL
  for (int k = 0; k < 4; ++k) x[k] = bits_float(raw.low.words[k]), x[k + 4] = bits_float(raw.high.words[k]);
}

SHARDCORE_HD void store_f32_octet(void* data, int i, Octet at, const float (&x)[8]) {
  store_octet<true>(static_cast<float*>(data) + i, DType::f32, at, 0, x);
}

SHARDCORE_HD Raw load_grad_raw(const AdamChunkView& t, int i, Octet at, int lane) {
  if (t.grad_dtype == DType::f32) return load_f32_raw(t.grad, i, at);
  return {load16(t.grad + 2 * (i + 8 * lane)), {}};
}

template <typename Warp>
SHARDCORE_HD void unpack_grad(const AdamChunkView& t, Raw& raw, int lane, const Warp& warp, float (&g)[8]) {
  if (t.grad_dtype == DType::f32) {
    unpack_f32_raw(raw, g);
  } else {
    to_octet<2>(t, raw.low.words, lane, warp);
    unpack_16bit(raw.low, t.grad_dtype, g);
  }
}

// Of a split master the weights are in low, the remainders in high.
SHARDCORE_HD Raw load_weight_raw(const AdamChunkView& t, int i, Octet at, int lane) {
  if (t.master_kind == Master::f32) return load_f32_raw(t.master, i, at);
  if (t.param_dtype == DType::f32) return load_f32_raw(t.param, i, at);
  Raw raw{load16(t.param + 2 * (i + 8 * lane)), {}};
  if (t.master_kind == Master::split) raw.high = load16(t.master + 2 * (i + 8 * lane));
  return raw;
}

template <typename Warp>
SHARDCORE_HD void unpack_weight(const AdamChunkView& t, Raw& raw, int lane, const Warp& warp, float (&p)[8]) {
  if (t.master_kind == Master::f32 || t.param_dtype == DType::f32) {
    unpack_f32_raw(raw, p);
    return;
  }
  to_octet<2>(t, raw.low.words, lane, warp);
  if (t.master_kind == Master::split) {
    to_octet<2>(t, raw.high.words, lane, warp);
    unpack_split(raw.low, raw.high, p);
  } else {
    unpack_16bit(raw.low, t.param_dtype, p);
  }
}

// The keys of random bits of the moments' blocks that a warp has in a chunk, made once, one in a lane.
struct MomentKeys {
  uint64_t parent, of_lane;
};

// The key of the block at i. Every lane of the warp calls it.
template <typename Warp>
SHARDCORE_HD uint64_t key_of_block(const MomentKeys& keys, int i, const Warp& warp) {
  const int lane = static_cast<int>(static_cast<uint32_t>(i) / kAdamStride);
  const uint32_t low = warp.shfl(static_cast<uint32_t>(keys.of_lane), lane);
  return (static_cast<uint64_t>(warp.shfl(static_cast<uint32_t>(keys.of_lane >> 32), lane)) << 32) | low;
}

SHARDCORE_HD MomentKeys moment_keys(const AdamChunkView& t, int warp_index, int lane) {
  static_assert(kAdamChunk <= 32 * kAdamStride);
  const uint64_t parent = state_key(t.param_key);
  return {parent, rounding_block_key(parent, t.first_element + kBlock * warp_index + kAdamStride * lane)};
}

// random32 of the lane's elements of the block, which lies in one or two of the parameter's: a key each. element: the block's
// first in the parameter; key: rounding_block_key(parent, element).
SHARDCORE_HD void random_octet(uint64_t key, uint64_t parent, int64_t element, Octet at, uint32_t (&bits)[8]) {
  const auto start = static_cast<uint32_t>(element & 255);
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) bits[k] = random32(key, start + static_cast<uint32_t>(octet_element(at, k)));
  if (start == 0) return;
  const uint64_t next = rounding_block_key(parent, element + kBlock);
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    const uint32_t place = start + static_cast<uint32_t>(octet_element(at, k));
    if (place >= 256) bits[k] = random32(next, place - 256);
  }
}

// Rounded to nearest.
SHARDCORE_HD Bytes16 pack_weight(const AdamChunkView& t, const float (&p)[8]) {
  if (t.param_dtype == DType::bf16) return pack_bf16(p);
  Bytes16 weight;
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) pack_16bit(weight, k, f32_to_f16(p[k]));
  return weight;
}

// Notes which of 8 neighbours are about to change. A float32 master, not written yet, rounds to the weights. Every lane of the
// warp calls it.
template <typename Warp>
SHARDCORE_HD void mark_changed(const AdamChunkView& t, int i, Octet at, int lane, const Warp& warp, const Bytes16& after) {
  Bytes16 before;
  if (t.master_kind == Master::f32) {
    float p[8];
    unpack_f32_raw(load_f32_raw(t.master, i, at), p);
    before = pack_weight(t, p);
    to_neighbours<2>(t, before.words, lane, warp);
  } else {
    before = load16(t.param + 2 * (i + 8 * lane));
  }
  uint32_t bits = 0;
  SHARDCORE_UNROLL
  for (int k = 0; k < 4; ++k) {
    const uint32_t differs = before.words[k] ^ after.words[k];
    bits |= ((differs & 0xffffu) != 0 ? 1u : 0u) << (2 * k) | (differs >> 16 != 0 ? 2u : 0u) << (2 * k);
  }
  if (bits != 0) t.changed[i / 8 + lane] |= static_cast<uint8_t>(bits);
}

template <typename Warp>
SHARDCORE_HD void store_weight_octet(const AdamChunkView& t, int i, Octet at, int lane, const Warp& warp, const float (&p)[8]) {
  if (t.param_dtype == DType::f32) {
    if (t.master_kind == Master::f32) store_f32_octet(t.master, i, at, p);
    store_f32_octet(t.param, i, at, p);
    return;
  }
  Bytes16 weight;
  if (t.stochastic) {
    uint32_t bits[8];
    const int64_t element = t.first_element + i;
    random_octet(rounding_block_key(t.param_key, element), t.param_key, element, at, bits);
    weight = pack_bf16(p, [&](int k) { return bits[k] >> 16; });
  } else {
    weight = pack_weight(t, p);
  }
  to_neighbours<2>(t, weight.words, lane, warp);
  if (t.changed != nullptr) mark_changed(t, i, at, lane, warp, weight);
  if (t.master_kind == Master::f32) store_f32_octet(t.master, i, at, p);
  store16(t.param + 2 * (i + 8 * lane), weight);
  if (t.master_kind != Master::split) return;
  Bytes16 rest;
  SHARDCORE_UNROLL
  for (int k = 0; k < 4; ++k) rest.words[k] = low_halves(float_bits(p[2 * k]), float_bits(p[2 * k + 1]));  // split_remainder
  to_neighbours<2>(t, rest.words, lane, warp);
  store16(t.master + 2 * (i + 8 * lane), rest);
}

// The formula. vmax: with kAmsgrad.
template <bool kAmsgrad>
SHARDCORE_HD void update_octet(const AdamScalars& s, const float (&g)[8], float (&p)[8], float (&m)[8], float (&v)[8],
                               float (&vmax)[8]) {
  const bool fast = sure_scalars(s);
  adam_quartet<kAmsgrad>(s, fast, g, p, m, v, vmax);
  adam_quartet<kAmsgrad>(s, fast, g + 4, p + 4, m + 4, v + 4, vmax + 4);
}

}  // namespace shardcore
