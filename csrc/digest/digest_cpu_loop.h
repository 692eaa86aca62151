// The CPU loop of digests, compiled once per instruction set by csrc/isa.
#include "digest/digest_cpu.h"

namespace shardcore {
namespace SHARDCORE_ISA {
namespace {

struct DigestFactors {
  alignas(64) uint64_t of[kBlock];

  DigestFactors() {
    for (uint32_t i = 0; i < kBlock; ++i) of[i] = digest_factor(i);
  }
};

uint64_t digest_sum(const uint32_t* SHARDCORE_RESTRICT words, const DigestFactors& factors) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < kBlock; ++i) sum += words[i] * factors.of[i];
  return sum;
}

// words[0:n]: of elements [first, first + n).
void digest_words(const DigestSegment& t, int64_t first, int64_t n, uint32_t* SHARDCORE_RESTRICT words) {
  if (t.kind == DigestKind::words) {
    const auto* const data = static_cast<const uint32_t*>(t.data) + first;
    for (int64_t i = 0; i < n; ++i) words[i] = data[i];
  } else if (t.kind == DigestKind::bytes) {
    const auto* const data = static_cast<const uint8_t*>(t.data) + first;
    for (int64_t i = 0; i < n; ++i) words[i] = data[i];
  } else if (t.kind == DigestKind::split) {
    const auto* const weight = static_cast<const uint16_t*>(t.data) + first;
    const auto* const rest = static_cast<const int16_t*>(t.rest) + first;
    for (int64_t i = 0; i < n; ++i) words[i] = digest_word(split_to_f32(weight[i], rest[i]));
  } else {
    alignas(64) float tile[kBlock];
    const float* const x = values_or_tile(t.data, digest_dtype(t.kind), first, n, tile);
    for (int64_t i = 0; i < n; ++i) words[i] = digest_word(x[i]);
  }
}

}  // namespace

uint64_t digest_span(const DigestSegment& t, int64_t first_block, int64_t last_block) {
  const DigestFactors factors;
  alignas(64) uint32_t words[kBlock];
  uint64_t total = 0;
  for (int64_t block = first_block; block < last_block; ++block) {
    const int64_t first = block * kBlock, n = t.numel - first < kBlock ? t.numel - first : kBlock;
    digest_words(t, first, n, words);
    for (int64_t i = n; i < kBlock; ++i) words[i] = 0;
    uint64_t sum = digest_sum(words, factors);
    if (t.kind == DigestKind::bytes && t.rest != nullptr) {
      sum += digest_word(static_cast<const float*>(t.rest)[block]) * digest_factor(kBlock);
    }
    total += digest_block(sum, t.key, t.first_block + static_cast<uint64_t>(block));
  }
  return total;
}

}  // namespace SHARDCORE_ISA
}  // namespace shardcore
