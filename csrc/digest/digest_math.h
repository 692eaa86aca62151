// The digest of values: 64 bits that any cut of a tensor at 256-element boundaries gives alike (docs/reproducibility.md has the
// format, and the same in NumPy).
//
// An element is a word of 32 bits. A block of up to 256 words is their sum, each times an odd constant of its place, so a
// change of one word always changes it. One bijective mix with the tensor's key and the block's number follows; blocks are
// added. All arithmetic is modulo 2^64: no order of adding changes it.
#pragma once

#include <cstdint>

#include "core/convert.h"
#include "core/dtype.h"
#include "core/macros.h"
#include "core/tile.h"

namespace shardcore {

// How the elements of a tensor become words. f32, bf16, f16: the bits of the float32 of the same value. split: those of the
// master that a bfloat16 weight and its remainder (`rest`) make. words: 32-bit words as they are. bytes: each byte is a word;
// `rest`: a float32 scale for each block, or null.
enum class DigestKind : uint8_t { f32 = 0, bf16 = 1, f16 = 2, split = 3, words = 4, bytes = 5 };

struct DigestSegment {
  const void* data;
  const void* rest;
  int64_t numel;
  uint64_t key;
  uint64_t first_block;  // the number of the tensor's first block in the whole tensor
  DigestKind kind;
};

constexpr uint64_t kDigestStep = 0x9e3779b97f4a7c15u;

// The finalizer of splitmix64 (Steele, Lea, Flood 2014), a bijection.
SHARDCORE_HD uint64_t digest_mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The constant of place `index` in a block; that of a block's scale is at 256.
SHARDCORE_HD uint64_t digest_factor(uint32_t index) { return digest_mix((index + uint64_t{1}) * kDigestStep) | 1u; }

SHARDCORE_HD uint64_t digest_block(uint64_t sum, uint64_t key, uint64_t block) {
  return digest_mix(sum + key + (block + 1) * kDigestStep);
}

// The word of a float: every NaN has the same; -0 differs from +0.
SHARDCORE_HD uint32_t digest_word(float x) { return x != x ? 0x7fc00000u : float_bits(x); }

// The dtype of a kind whose words are float32 values.
SHARDCORE_HD DType digest_dtype(DigestKind kind) { return static_cast<DType>(kind); }

}  // namespace shardcore
