// Which ranges of memory share bytes that a call writes: kernels read and write through __restrict__ pointers, on many threads.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace shardcore {

struct MemoryRange {
  uintptr_t begin, end;  // bytes [begin, end), not empty
  int64_t tag;           // the caller's number of their owner
  bool written;
};

struct SharedMemory {
  int64_t first_tag, second_tag;  // first_tag < second_tag
};

// Two ranges that share bytes of which at least one is written, or nothing. Ranges that are only read may overlap.
std::optional<SharedMemory> find_shared(std::vector<MemoryRange> ranges);

}  // namespace shardcore
