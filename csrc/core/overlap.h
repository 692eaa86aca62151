// Which ranges of memory share bytes that a call writes: kernels read and write through __restrict__ pointers, on many threads.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace shardcore {

struct MemoryRange {
  uintptr_t begin, end;  // bytes [begin, end), not empty
  int64_t tag;           // the caller's number of their owner

  bool operator==(const MemoryRange&) const = default;
};

inline MemoryRange memory_range(const void* data, int64_t size_bytes, int64_t tag) {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  return {begin, begin + static_cast<uintptr_t>(size_bytes), tag};
}

struct SharedMemory {
  int64_t first_tag, second_tag;  // first_tag < second_tag
};

// Keeps the written ranges that passed last: sorting them takes longer than the rest of a call's checks, and they usually are
// those of the step before.
class OverlapCheck {
 public:
  // Two ranges that share bytes of which at least one is written, or nothing. Ranges that are only read may overlap.
  std::optional<SharedMemory> find(std::vector<MemoryRange> written, std::vector<MemoryRange> read);

 private:
  std::vector<MemoryRange> given_;   // as written was last
  std::vector<MemoryRange> sorted_;  // given_ by address
};

}  // namespace shardcore
