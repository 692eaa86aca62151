// What one CUDA thread does in the cast kernel, as a host/device function: tests/cpp runs it on the host.
#pragma once

#include <cstdint>

#include "core/cast.h"
#include "core/chunks.h"
#include "core/vector_io.h"

namespace shardcore {

constexpr int kCastThreads = 256;
constexpr int64_t kCastChunk = 4 * 8 * kCastThreads;

// CUDA block block_index: one chunk of one tensor.
SHARDCORE_HD void cast_body(const ChunkTable<CastSegment>& table, int64_t block_index, int thread) {
  const Chunk chunk = chunk_at(table, block_index, kCastChunk);
  const CastSegment t = table.segments[chunk.tensor];
  const int numel = static_cast<int>(t.numel - chunk.first < kCastChunk ? t.numel - chunk.first : kCastChunk);
  const int vector_numel = is_aligned16(t.src) && is_aligned16(t.dst) ? numel / 8 * 8 : 0;
  const char* const src = static_cast<const char*>(t.src) + chunk.first * itemsize(t.src_dtype);
  char* const dst = static_cast<char*>(t.dst) + chunk.first * itemsize(t.dst_dtype);
  SHARDCORE_ASSUME_GLOBAL(src);
  SHARDCORE_ASSUME_GLOBAL(dst);
  float x[8];
  int i = 8 * thread;
  SHARDCORE_NO_UNROLL
  for (; i < vector_numel; i += 8 * kCastThreads) {
    load_octet<true>(src, t.src_dtype, {i, i + 4}, numel, x);
    store_octet<true>(dst, t.dst_dtype, {i, i + 4}, numel, x);
  }
  SHARDCORE_NO_UNROLL
  for (; i < numel; i += 8 * kCastThreads) {
    load_octet<false>(src, t.src_dtype, {i, i + 4}, numel, x);
    store_octet<false>(dst, t.dst_dtype, {i, i + 4}, numel, x);
  }
}

}  // namespace shardcore
