// 16-byte accesses to streams of any dtype on CUDA (and on the host, where CUDA bodies are tested).
//
// A thread accesses 8 elements in two halves of 4. A 16-bit stream is loaded and stored once for both halves, a float32 stream
// once per half: 16 bytes each time.
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
  SHARDCORE_ASSUME_GLOBAL(p);
  Bytes16 bytes;
#if defined(__CUDA_ARCH__)
  const uint4 v = *static_cast<const uint4*>(p);
  bytes.words[0] = v.x, bytes.words[1] = v.y, bytes.words[2] = v.z, bytes.words[3] = v.w;
#else
  memcpy(&bytes, __builtin_assume_aligned(p, 16), sizeof bytes);
#endif
  return bytes;
}

// The same of memory that the kernel reads once and that is not written while it runs: leaves no line in L1.
SHARDCORE_HD Bytes16 load16_once(const void* p) {
#if defined(__CUDA_ARCH__)
  Bytes16 bytes;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(bytes.words[0]), "=r"(bytes.words[1]), "=r"(bytes.words[2]), "=r"(bytes.words[3])
      : "l"(p));
  return bytes;
#else
  return load16(p);
#endif
}

SHARDCORE_HD void store16(void* p, const Bytes16& bytes) {
  SHARDCORE_ASSUME_GLOBAL(p);
#if defined(__CUDA_ARCH__)
  *static_cast<uint4*>(p) = make_uint4(bytes.words[0], bytes.words[1], bytes.words[2], bytes.words[3]);
#else
  memcpy(__builtin_assume_aligned(p, 16), &bytes, sizeof bytes);
#endif
}

// 8 bytes: 8 elements of an 8-bit stream.
SHARDCORE_HD void load8(const void* p, uint32_t (&words)[2]) {
  SHARDCORE_ASSUME_GLOBAL(p);
#if defined(__CUDA_ARCH__)
  const uint2 v = *static_cast<const uint2*>(p);
  words[0] = v.x, words[1] = v.y;
#else
  memcpy(words, __builtin_assume_aligned(p, 8), 8);
#endif
}

SHARDCORE_HD void store8(void* p, const uint32_t (&words)[2]) {
  SHARDCORE_ASSUME_GLOBAL(p);
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

// 8 elements of a 16-bit dtype.
SHARDCORE_HD uint16_t half_word(const Bytes16& bytes, int k) {
  const uint32_t word = bytes.words[k / 2];
  return static_cast<uint16_t>(k % 2 ? word >> 16 : word);
}

SHARDCORE_HD void unpack_16bit(const Bytes16& bytes, DType dtype, float (&x)[8]) {
  if (dtype == DType::bf16) {
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) x[k] = bf16_to_f32(half_word(bytes, k));
  } else {
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) x[k] = f16_to_f32(half_word(bytes, k));
  }
}

SHARDCORE_HD bool any_nan(const float (&x)[8]) {
  bool found = false;
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) found |= x[k] != x[k];
  return found;
}

// A split master: bfloat16 weights and their remainders.
SHARDCORE_HD void unpack_split(const Bytes16& weight, const Bytes16& rest, float (&x)[8]) {
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    const auto low = static_cast<int16_t>(half_word(rest, k));
    x[k] = bits_float((static_cast<uint32_t>(half_word(weight, k)) << 16) + static_cast<uint32_t>(int32_t{low}));
  }
  if (!any_nan(x)) return;  // split_from_sum changes nothing else
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) x[k] = split_from_sum(float_bits(x[k]));
}

// Two halves in one word, a's first: one instruction on CUDA.
SHARDCORE_HD uint32_t low_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, 0x5410);
#else
  return (a & 0xffffu) | (b << 16);
#endif
}

SHARDCORE_HD uint32_t high_halves(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, 0x7632);
#else
  return (a >> 16) | (b & 0xffff0000u);
#endif
}

// Element 0, 2, .. before element 1, 3, ...
SHARDCORE_HD void pack_16bit(Bytes16& bytes, int k, uint16_t h) {
  uint32_t& word = bytes.words[k / 2];
  word = k % 2 ? word | (static_cast<uint32_t>(h) << 16) : h;
}

// f32_to_bf16_plus of 8 elements; noise(k) is that of element k.
template <typename Noise>
SHARDCORE_HD Bytes16 pack_bf16(const float (&x)[8], const Noise& noise) {
  Bytes16 bytes;
  if (any_nan(x)) {
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) pack_16bit(bytes, k, f32_to_bf16_plus(x[k], noise(k)));
    return bytes;
  }
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; k += 2) {
    bytes.words[k / 2] = high_halves(float_bits(x[k]) + noise(k), float_bits(x[k + 1]) + noise(k + 1));
  }
  return bytes;
}

SHARDCORE_HD Bytes16 pack_bf16(const float (&x)[8]) {
  return pack_bf16(x, [](int) { return 0x8000u; });
}

// The 8 elements that a thread takes of each stream: two halves of 4, which are neighbours unless every stream is float32.
struct Octet {
  int first;
  int second;
};

// Which elements of a 256-element block a lane of the warp has. Beside float32 streams: two halves far apart, so that in each
// of its two accesses neighbouring lanes take neighbouring 16 bytes. Else 8 neighbours, as the lane accesses them.
SHARDCORE_HD Octet lane_octet(int lane, bool any_f32) {
  const int first = any_f32 ? 4 * lane : 8 * lane;
  return {first, first + (any_f32 ? 128 : 4)};
}

SHARDCORE_HD int octet_element(Octet at, int k) { return k < 4 ? at.first + k : at.second + k - 4; }

// kVector: the 8 elements are there and their stream is aligned to 16 bytes; else only those below numel are read, one by one,
// and the others are 0. kOnce: load16_once.
template <bool kVector, bool kOnce = false>
SHARDCORE_HD void load_octet(const void* data, DType dtype, Octet at, int numel, float (&x)[8]) {
  if (!kVector) {
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) x[k] = octet_element(at, k) < numel ? load_as_f32(data, dtype, octet_element(at, k)) : 0.0f;
    return;
  }
  const auto load = [](const void* p) { return kOnce ? load16_once(p) : load16(p); };
  float low[4], high[4];
  if (dtype == DType::f32) {
    const auto* const stream = static_cast<const float*>(data);
    unpack_f32(load(stream + at.first), low);
    unpack_f32(load(stream + at.second), high);
  } else {
    unpack_16bit(load(static_cast<const uint16_t*>(data) + at.first), dtype, x);
    return;
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
    for (int k = 0; k < 8; ++k) pack_16bit(bytes, k, dtype == DType::bf16 ? f32_to_bf16(x[k]) : f32_to_f16(x[k]));
    store16(static_cast<uint16_t*>(data) + at.first, bytes);
  }
}

// Between the 8 neighbours that a lane accesses in a stream of 16 bits (2 words per half) or 8 bits (1 word per half), and the
// halves that it has beside a float32 stream. Half h of lane S is the block's quartet 2 S + h in the one order, S + 32 h in the
// other. In each of two turns every lane passes one of its halves to one lane, and receives one. Every lane of the warp calls
// it.
template <int kWords, typename Warp>
SHARDCORE_HD void neighbours_to_octet(uint32_t (&words)[2 * kWords], int lane, const Warp& warp) {
  const bool upper = lane >= 16, odd = lane % 2 != 0;
  const int from = lane / 2 + (odd ? 16 : 0);  // the lane whose quartet is received in the first turn
  SHARDCORE_UNROLL
  for (int k = 0; k < kWords; ++k) {
    const uint32_t low = words[k], high = words[kWords + k];
    const uint32_t one = warp.shfl(upper ? high : low, from), other = warp.shfl(upper ? low : high, from ^ 16);
    words[k] = odd ? other : one;
    words[kWords + k] = odd ? one : other;
  }
}

template <int kWords, typename Warp>
SHARDCORE_HD void octet_to_neighbours(uint32_t (&words)[2 * kWords], int lane, const Warp& warp) {
  const bool upper = lane >= 16, odd = lane % 2 != 0;
  const int from = 2 * (lane % 16) + (upper ? 1 : 0);
  SHARDCORE_UNROLL
  for (int k = 0; k < kWords; ++k) {
    const uint32_t low = words[k], high = words[kWords + k];
    const uint32_t one = warp.shfl(odd ? high : low, from), other = warp.shfl(odd ? low : high, from ^ 1);
    words[k] = upper ? other : one;
    words[kWords + k] = upper ? one : other;
  }
}

SHARDCORE_HD bool is_aligned16(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

}  // namespace shardcore
