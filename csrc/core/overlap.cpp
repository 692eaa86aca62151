#include "core/overlap.h"

#include <algorithm>
#include <utility>

namespace shardcore {
namespace {

void sort_by_address(std::vector<MemoryRange>& ranges) {
  const auto before = [](const MemoryRange& a, const MemoryRange& b) { return a.begin < b.begin; };
  if (!std::is_sorted(ranges.begin(), ranges.end(), before)) std::sort(ranges.begin(), ranges.end(), before);
}

SharedMemory shared(const MemoryRange& a, const MemoryRange& b) { return {std::min(a.tag, b.tag), std::max(a.tag, b.tag)}; }

}  // namespace

std::optional<SharedMemory> OverlapCheck::find(std::vector<MemoryRange> written, std::vector<MemoryRange> read) {
  if (written != given_) {
    given_.clear();  // until these are found good
    sorted_.clear();
    std::vector<MemoryRange> sorted = written;
    sort_by_address(sorted);
    for (size_t i = 1; i < sorted.size(); ++i) {
      if (sorted[i].begin < sorted[i - 1].end) return shared(sorted[i - 1], sorted[i]);
    }
    sorted_ = std::move(sorted);
    given_ = std::move(written);
  }
  sort_by_address(read);
  // next: the first that does not lie wholly before the range read. They are disjoint, so ends ascend, too.
  auto next = sorted_.begin();
  for (const MemoryRange& range : read) {
    while (next != sorted_.end() && next->end <= range.begin) ++next;
    if (next == sorted_.end()) break;
    if (next->begin < range.end) return shared(*next, range);
  }
  return std::nullopt;
}

}  // namespace shardcore
