// The 256-element tile: dtypes are converted a tile at a time, so they do not multiply the loops that compute.
//
// The same 256 is the block of the norm, the alignment of shards and the block of 8-bit states.
#pragma once

#include <cstdint>

#include "core/convert.h"
#include "core/dtype.h"

namespace shardcore {

constexpr int64_t kBlock = 256;

constexpr int64_t blocks_of(int64_t numel) { return (numel + kBlock - 1) / kBlock; }

// tile[0:n] = data[first : first + n] as float32. n <= kBlock.
static inline void load_tile(float* SHARDCORE_RESTRICT tile, const void* data, DType dtype, int64_t first, int64_t n) {
  if (dtype == DType::f32) {
    const float* SHARDCORE_RESTRICT x = static_cast<const float*>(data) + first;
    for (int64_t i = 0; i < n; ++i) tile[i] = x[i];
  } else if (dtype == DType::bf16) {
    const uint16_t* SHARDCORE_RESTRICT x = static_cast<const uint16_t*>(data) + first;
    for (int64_t i = 0; i < n; ++i) tile[i] = bf16_to_f32(x[i]);
  } else {
    const uint16_t* SHARDCORE_RESTRICT x = static_cast<const uint16_t*>(data) + first;
    for (int64_t i = 0; i < n; ++i) tile[i] = f16_to_f32(x[i]);
  }
}

// data[first : first + n] = tile[0:n], rounded to dtype.
static inline void store_tile(void* data, DType dtype, int64_t first, int64_t n, const float* SHARDCORE_RESTRICT tile) {
  if (dtype == DType::f32) {
    float* SHARDCORE_RESTRICT x = static_cast<float*>(data) + first;
    for (int64_t i = 0; i < n; ++i) x[i] = tile[i];
  } else if (dtype == DType::bf16) {
    uint16_t* SHARDCORE_RESTRICT x = static_cast<uint16_t*>(data) + first;
    for (int64_t i = 0; i < n; ++i) x[i] = f32_to_bf16(tile[i]);
  } else {
    uint16_t* SHARDCORE_RESTRICT x = static_cast<uint16_t*>(data) + first;
    for (int64_t i = 0; i < n; ++i) x[i] = f32_to_f16(tile[i]);
  }
}

// data[first : first + n] as float32: in place where they are float32, else converted into `tile`.
static inline const float* values_or_tile(const void* data, DType dtype, int64_t first, int64_t n, float* tile) {
  if (dtype == DType::f32) return static_cast<const float*>(data) + first;
  load_tile(tile, data, dtype, first, n);
  return tile;
}

static inline float* values_or_tile(void* data, DType dtype, int64_t first, int64_t n, float* tile) {
  return const_cast<float*>(values_or_tile(static_cast<const void*>(data), dtype, first, n, tile));
}

// Calls update(i, n) for each tile of elements [first, last): elements [i, i + n).
template <typename Update>
SHARDCORE_HD void for_each_tile(int64_t first, int64_t last, const Update& update) {
  for (int64_t i = first; i < last; i += kBlock) update(i, last - i < kBlock ? last - i : kBlock);
}

}  // namespace shardcore
