#include "io/crc32c.h"

#include <array>
#include <cstring>

#include "core/cpu_isa.h"

#if SHARDCORE_X86
#include <nmmintrin.h>
#define SHARDCORE_CRC_TARGET __attribute__((target("sse4.2")))
#else  // aarch64: core/fp_env.h compiles for no other CPU
#include <arm_acle.h>
#include <sys/auxv.h>
#define SHARDCORE_CRC_TARGET __attribute__((target("+crc")))
#endif

namespace shardcore {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78u;
// A stretch of each of the three: long enough that joining them costs nothing, and no multiple of 4096, or loads of one
// stretch would wait for stores of another with the same low bits of the address.
constexpr int64_t kStretch = 8192 - 192;

using Bytes = const unsigned char*;

uint64_t load(Bytes data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

// Eight tables: entry [k][b] is what byte b contributes with k more bytes after it.
struct Tables {
  std::array<std::array<uint32_t, 256>, 8> of;

  Tables() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kPolynomial : 0);
      of[0][byte] = crc;
    }
    for (size_t k = 1; k < 8; ++k) {
      for (size_t byte = 0; byte < 256; ++byte) of[k][byte] = of[k - 1][byte] >> 8 ^ of[0][of[k - 1][byte] & 255];
    }
  }
};

const Tables& tables() {
  static const Tables made;
  return made;
}

template <bool kCopy>
uint32_t run_tables(unsigned char* dst, Bytes src, int64_t size, uint32_t crc) {
  const auto& of = tables().of;
  crc = ~crc;
  for (; size >= 8; size -= 8, src += 8) {
    uint64_t word = load(src);
    if constexpr (kCopy) std::memcpy(dst, &word, 8), dst += 8;
    word ^= crc;
    crc = 0;
    for (size_t i = 0; i < 8; ++i) crc ^= of[7 - i][word >> (8 * i) & 255];
  }
  for (; size > 0; --size, ++src) {
    if constexpr (kCopy) *dst++ = *src;
    crc = crc >> 8 ^ of[0][(crc ^ *src) & 255];
  }
  return ~crc;
}

// a * b modulo the polynomial; the highest bit is x^0.
uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if (a & 0x80000000u) product ^= b;
    b = b >> 1 ^ (b & 1 ? kPolynomial : 0);
  }
  return product;
}

// What a checksum becomes when kStretch zero bytes follow, by each of its bytes.
struct Shift {
  std::array<std::array<uint32_t, 256>, 4> of;

  Shift() {
    uint32_t power = 0x80000000u;                                                                         // x^0
    for (int64_t bit = 0; bit < 8 * kStretch; ++bit) power = power >> 1 ^ (power & 1 ? kPolynomial : 0);  // times x
    for (uint32_t k = 0; k < 4; ++k) {
      for (uint32_t byte = 0; byte < 256; ++byte) of[k][byte] = multiply(byte << (8 * k), power);
    }
  }

  uint32_t operator()(uint32_t crc) const {
    return of[0][crc & 255] ^ of[1][crc >> 8 & 255] ^ of[2][crc >> 16 & 255] ^ of[3][crc >> 24];
  }
};

SHARDCORE_CRC_TARGET inline uint32_t add8(uint32_t crc, uint64_t word) {
#if SHARDCORE_X86
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
#else
  return __crc32cd(crc, word);
#endif
}

SHARDCORE_CRC_TARGET inline uint32_t add1(uint32_t crc, unsigned char byte) {
#if SHARDCORE_X86
  return _mm_crc32_u8(crc, byte);
#else
  return __crc32cb(crc, byte);
#endif
}

template <bool kCopy>
SHARDCORE_CRC_TARGET uint32_t run_instruction(unsigned char* dst, Bytes src, int64_t size, uint32_t crc) {
  static const Shift shift;
  crc = ~crc;
  for (; size >= 3 * kStretch; size -= 3 * kStretch, src += 3 * kStretch) {
    uint32_t first = crc, second = 0, third = 0;
    for (int64_t i = 0; i < kStretch; i += 8) {
      const uint64_t a = load(src + i), b = load(src + kStretch + i), c = load(src + 2 * kStretch + i);
      if constexpr (kCopy) {
        std::memcpy(dst + i, &a, 8);
        std::memcpy(dst + kStretch + i, &b, 8);
        std::memcpy(dst + 2 * kStretch + i, &c, 8);
      }
      first = add8(first, a), second = add8(second, b), third = add8(third, c);
    }
    crc = shift(shift(first) ^ second) ^ third;
    if constexpr (kCopy) dst += 3 * kStretch;
  }
  for (; size >= 8; size -= 8, src += 8) {
    const uint64_t word = load(src);
    if constexpr (kCopy) std::memcpy(dst, &word, 8), dst += 8;
    crc = add8(crc, word);
  }
  for (; size > 0; --size, ++src) {
    if constexpr (kCopy) *dst++ = *src;
    crc = add1(crc, *src);
  }
  return ~crc;
}

bool has_instruction() {
#if SHARDCORE_X86
  static const bool has = (__builtin_cpu_init(), __builtin_cpu_supports("sse4.2"));
  return has && cpu_isa() != CpuIsa::base;
#else
  static const bool has = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
  return has;
#endif
}

template <bool kCopy>
uint32_t run(void* dst, const void* src, int64_t size_bytes, uint32_t crc) {
  if (has_instruction())
    return run_instruction<kCopy>(static_cast<unsigned char*>(dst), static_cast<Bytes>(src), size_bytes, crc);
  return run_tables<kCopy>(static_cast<unsigned char*>(dst), static_cast<Bytes>(src), size_bytes, crc);
}

}  // namespace

uint32_t crc32c(const void* data, int64_t size_bytes, uint32_t crc) { return run<false>(nullptr, data, size_bytes, crc); }

uint32_t copy_crc32c(void* dst, const void* src, int64_t size_bytes, uint32_t crc) {
  return run<true>(dst, src, size_bytes, crc);
}

uint32_t crc32c_by_table(const void* data, int64_t size_bytes, uint32_t crc) {
  return run_tables<false>(nullptr, static_cast<Bytes>(data), size_bytes, crc);
}

uint32_t copy_crc32c_by_table(void* dst, const void* src, int64_t size_bytes, uint32_t crc) {
  return run_tables<true>(static_cast<unsigned char*>(dst), static_cast<Bytes>(src), size_bytes, crc);
}

}  // namespace shardcore
