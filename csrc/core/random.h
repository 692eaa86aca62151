// Counter-based random bits for stochastic rounding, keyed by (seed, step, parameter index, element index in the parameter).
//
// The key of each 256-element block is mixed in 64 bits (splitmix64's finalizer); the bits of each element come from a
// 32-bit mixer (xor, shift, multiply) that vectorizes. The same bits on every CPU and on CUDA, whatever the shard.
#pragma once

#include <cstdint>

#include "core/macros.h"

namespace shardcore {

SHARDCORE_HD uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// parent is the key of what encloses: 0 -> seed -> step -> parameter -> block. Equal children of other parents differ.
SHARDCORE_HD uint64_t child_key(uint64_t parent, uint64_t child) {
  return mix64(parent + 0x9e3779b97f4a7c15ull + mix64(child + 0x9e3779b97f4a7c15ull));
}

// Mixes the key of a block and the lane (0..255) of an element in it; the high bits are the best ones.
// The constants are those of lowbias32 (C. Wellons, hash-prospector), a mixer of counters.
SHARDCORE_HD uint32_t mix32(uint64_t block_key, uint32_t lane) {
  uint32_t x = static_cast<uint32_t>(block_key) + lane;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  return (x ^ (x >> 15) ^ static_cast<uint32_t>(block_key >> 32)) * 0x846ca68bu;
}

// 32 uniform bits for the element.
SHARDCORE_HD uint32_t random32(uint64_t block_key, uint32_t lane) {
  const uint32_t x = mix32(block_key, lane);
  return x ^ (x >> 16);
}

// The high 16 of them.
SHARDCORE_HD uint32_t random16(uint64_t block_key, uint32_t lane) { return mix32(block_key, lane) >> 16; }

}  // namespace shardcore
