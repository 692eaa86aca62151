// 16-byte accesses to streams of any dtype on CUDA (and on the host, where CUDA bodies are tested).
//
// A thread takes 8 elements in two halves of 4. A 16-bit stream is loaded and stored once for both halves, a float32 stream
// once a half: 16 bytes each time.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/convert.h"
#include "core/dtype.h"
#include "core/macros.h"

namespace shardcore {

struct Bytes16 {
  uint32_t words[4];
};

SHARDCORE_HD Bytes16 load16(const void* p) {
  Bytes16 bytes;
#if defined(__CUDA_ARCH__)
  const uint4 v = *static_cast<const uint4*>(p);
  bytes.words[0] = v.x, bytes.words[1] = v.y, bytes.words[2] = v.z, bytes.words[3] = v.w;
#else
  memcpy(&bytes, __builtin_assume_aligned(p, 16), sizeof bytes);
#endif
  return bytes;
}

SHARDCORE_HD void store16(void* p, const Bytes16& bytes) {
#if defined(__CUDA_ARCH__)
  *static_cast<uint4*>(p) = make_uint4(bytes.words[0], bytes.words[1], bytes.words[2], bytes.words[3]);
#else
  memcpy(__builtin_assume_aligned(p, 16), &bytes, sizeof bytes);
#endif
}

// 8 bytes: 8 elements of an 8-bit stream.
SHARDCORE_HD void load8(const void* p, uint32_t (&words)[2]) {
#if defined(__CUDA_ARCH__)
  const uint2 v = *static_cast<const uint2*>(p);
  words[0] = v.x, words[1] = v.y;
#else
  memcpy(words, __builtin_assume_aligned(p, 8), 8);
#endif
}

SHARDCORE_HD void store8(void* p, const uint32_t (&words)[2]) {
#if defined(__CUDA_ARCH__)
  *static_cast<uint2*>(p) = make_uint2(words[0], words[1]);
#else
  memcpy(__builtin_assume_aligned(p, 8), words, 8);
#endif
}

SHARDCORE_HD void unpack_f32(const Bytes16& bytes, float (&x)[4]) {
  for (int k = 0; k < 4; ++k) x[k] = bits_float(bytes.words[k]);
}

SHARDCORE_HD void store_f32(float* p, const float (&x)[4]) {
  Bytes16 bytes;
  for (int k = 0; k < 4; ++k) bytes.words[k] = float_bits(x[k]);
  store16(p, bytes);
}

// Half 0 or 1 of 8 elements of a 16-bit dtype.
SHARDCORE_HD void unpack_16bit(const Bytes16& bytes, DType dtype, int half, float (&x)[4]) {
  for (int k = 0; k < 4; ++k) {
    const uint32_t word = bytes.words[2 * half + k / 2];
    const uint16_t h = static_cast<uint16_t>(k % 2 ? word >> 16 : word);
    x[k] = dtype == DType::bf16 ? bf16_to_f32(h) : f16_to_f32(h);
  }
}

// A split master: bfloat16 weights and their remainders.
SHARDCORE_HD void unpack_split(const Bytes16& weight, const Bytes16& rest, int half, float (&x)[4]) {
  for (int k = 0; k < 4; ++k) {
    const int word = 2 * half + k / 2;
    const int shift = 16 * (k % 2);
    x[k] = split_to_f32(static_cast<uint16_t>(weight.words[word] >> shift), static_cast<int16_t>(rest.words[word] >> shift));
  }
}

SHARDCORE_HD void pack_16bit(Bytes16& bytes, int half, int k, uint16_t h) {
  uint32_t& word = bytes.words[2 * half + k / 2];
  word = k % 2 ? word | (static_cast<uint32_t>(h) << 16) : h;
}

}  // namespace shardcore
