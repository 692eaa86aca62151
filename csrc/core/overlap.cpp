#include "core/overlap.h"

#include <algorithm>

namespace shardcore {

std::optional<SharedMemory> find_shared(std::vector<MemoryRange> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const MemoryRange& a, const MemoryRange& b) { return a.begin < b.begin; });
  const MemoryRange *read = nullptr, *written = nullptr;  // those that reach furthest, of the ranges so far
  for (const MemoryRange& range : ranges) {
    for (const MemoryRange* const before : {written, range.written ? read : nullptr}) {
      if (before == nullptr || before->end <= range.begin) continue;
      return SharedMemory{std::min(before->owner, range.owner), std::max(before->owner, range.owner)};
    }
    const MemoryRange*& furthest = range.written ? written : read;
    if (furthest == nullptr || furthest->end < range.end) furthest = &range;
  }
  return std::nullopt;
}

}  // namespace shardcore
