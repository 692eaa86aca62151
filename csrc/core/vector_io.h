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

// The 8 elements that a thread takes of each stream: two halves of 4, which are neighbours unless every stream is float32.
struct Octet {
  int first;
  int second;
};

SHARDCORE_HD int octet_element(Octet at, int k) { return k < 4 ? at.first + k : at.second + k - 4; }

// kVector: the 8 elements are there and their stream is aligned to 16 bytes; else only those below numel are read, one by one,
// and the others are 0.
template <bool kVector>
SHARDCORE_HD void load_octet(const void* data, DType dtype, Octet at, int numel, float (&x)[8]) {
  if (!kVector) {
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) x[k] = octet_element(at, k) < numel ? load_as_f32(data, dtype, octet_element(at, k)) : 0.0f;
    return;
  }
  float low[4], high[4];
  if (dtype == DType::f32) {
    const auto* const stream = static_cast<const float*>(data);
    unpack_f32(load16(stream + at.first), low);
    unpack_f32(load16(stream + at.second), high);
  } else {
    const Bytes16 bytes = load16(static_cast<const uint16_t*>(data) + at.first);
    unpack_16bit(bytes, dtype, 0, low);
    unpack_16bit(bytes, dtype, 1, high);
  }
  SHARDCORE_UNROLL
  for (int k = 0; k < 4; ++k) x[k] = low[k], x[k + 4] = high[k];
}

template <bool kVector>
SHARDCORE_HD void store_octet(void* data, DType dtype, Octet at, int numel, const float (&x)[8]) {
  if (!kVector) {
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) {
      if (octet_element(at, k) < numel) store_from_f32(data, dtype, octet_element(at, k), x[k]);
    }
  } else if (dtype == DType::f32) {
    const float low[4] = {x[0], x[1], x[2], x[3]}, high[4] = {x[4], x[5], x[6], x[7]};
    store_f32(static_cast<float*>(data) + at.first, low);
    store_f32(static_cast<float*>(data) + at.second, high);
  } else {
    Bytes16 bytes{};
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) pack_16bit(bytes, k / 4, k % 4, dtype == DType::bf16 ? f32_to_bf16(x[k]) : f32_to_f16(x[k]));
    store16(static_cast<uint16_t*>(data) + at.first, bytes);
  }
}

SHARDCORE_HD bool is_aligned16(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

}  // namespace shardcore
