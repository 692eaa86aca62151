// Which ranges of memory share bytes that a call writes: kernels read and write through __restrict__ pointers, on many threads.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

namespace shardcore {

// Whose memory a range is: tensor `index` of the caller's list number `list`.
struct MemoryOwner {
  int list;
  size_t index;

  auto operator<=>(const MemoryOwner&) const = default;
};

struct MemoryRange {
  uintptr_t begin, end;  // bytes [begin, end), not empty
  MemoryOwner owner;
  bool written;
};

struct SharedMemory {
  MemoryOwner first, second;  // first < second
};

// Two ranges that share bytes of which at least one is written, or nothing. Ranges that are only read may overlap.
std::optional<SharedMemory> find_shared(std::vector<MemoryRange> ranges);

}  // namespace shardcore
