// What one CUDA thread does in the kernel of digests, as a host/device function: tests/cpp runs it on the host.
//
// A warp takes a block of 256 words at a time, a lane 8 of them, always at the same places: so it computes their factors once
// in a chunk.
#pragma once

#include <cstdint>

#include "core/chunks.h"
#include "core/vector_io.h"
#include "digest/digest_math.h"

namespace shardcore {

constexpr int kDigestThreads = 256;
constexpr int kDigestWarps = kDigestThreads / 32;
constexpr int64_t kDigestChunk = 256 * kBlock;

// The words of elements first + at of a segment; 0 from numel on. kVector: all 8 are there, and aligned.
template <bool kVector>
SHARDCORE_HD void digest_octet(const DigestSegment& t, int64_t first, Octet at, int numel, uint32_t (&words)[8]) {
  if (t.kind == DigestKind::bytes) {
    const auto* const data = static_cast<const uint8_t*>(t.data) + first;
    uint32_t packed[2] = {};
    if (kVector) load8(data + at.first, packed);
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) {
      const int i = octet_element(at, k);
      words[k] = kVector ? (packed[k / 4] >> (8 * (k % 4))) & 0xffu : i < numel ? data[i] : 0u;
    }
    return;
  }
  float x[8];
  if (t.kind == DigestKind::split) {
    const auto* const weight = static_cast<const uint16_t*>(t.data) + first;
    const auto* const rest = static_cast<const int16_t*>(t.rest) + first;
    if (kVector) {
      unpack_split(load16(weight + at.first), load16(rest + at.first), x);
    } else {
      SHARDCORE_UNROLL
      for (int k = 0; k < 8; ++k) {
        const int i = octet_element(at, k);
        x[k] = i < numel ? split_to_f32(weight[i], rest[i]) : 0.0f;
      }
    }
  } else {
    const bool wide = t.kind == DigestKind::words;  // which are moved as floats
    const DType dtype = wide ? DType::f32 : digest_dtype(t.kind);
    const char* const data = static_cast<const char*>(t.data) + first * itemsize(dtype);
    SHARDCORE_ASSUME_GLOBAL(data);
    load_octet<kVector>(data, dtype, at, numel, x);
  }
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) words[k] = t.kind == DigestKind::words ? float_bits(x[k]) : digest_word(x[k]);
}

// CUDA block block_index: one chunk of one tensor, added to its digest.
template <typename Block>
SHARDCORE_HD void digest_body(const ChunkTable<DigestSegment>& table, uint64_t* out, int64_t block_index, int thread,
                              const Block& block) {
  const Chunk chunk = chunk_at(table, block_index, kDigestChunk);
  const DigestSegment t = table.segments[chunk.tensor];
  const int lane = thread % 32;
  const bool wide = t.kind == DigestKind::f32 || t.kind == DigestKind::words;
  const Octet at = lane_octet(lane, wide);
  const bool aligned = is_aligned16(t.data) && (t.kind != DigestKind::split || is_aligned16(t.rest));
  uint64_t factors[8];
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) factors[k] = digest_factor(static_cast<uint32_t>(octet_element(at, k)));
  const int64_t end = t.numel - chunk.first < kDigestChunk ? t.numel : chunk.first + kDigestChunk;
  uint64_t total = 0;
  SHARDCORE_NO_UNROLL
  for (int64_t first = chunk.first + thread / 32 * kBlock; first < end; first += kDigestWarps * kBlock) {
    const int numel = static_cast<int>(end - first < kBlock ? end - first : kBlock);
    const int64_t index = first / kBlock;
    uint32_t words[8];
    if (aligned && numel == kBlock) {
      digest_octet<true>(t, first, at, numel, words);
    } else {
      digest_octet<false>(t, first, at, numel, words);
    }
    uint64_t sum = 0;
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) sum += words[k] * factors[k];
    if (lane == 0 && t.kind == DigestKind::bytes && t.rest != nullptr) {
      sum += digest_word(static_cast<const float*>(t.rest)[index]) * digest_factor(kBlock);
    }
    SHARDCORE_UNROLL
    for (int mask = 16; mask > 0; mask /= 2) sum += block.shfl_xor(sum, mask);
    total += digest_block(sum, t.key, t.first_block + static_cast<uint64_t>(index));
  }
  if (lane == 0) block.add(out + chunk.tensor, total);
}

}  // namespace shardcore
