// A list of tensors as one line of 256-element blocks, split over threads by blocks, not by tensors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/executor.h"
#include "core/fp_env.h"
#include "core/tile.h"

namespace shardcore {

class BlockWalk {
 public:
  // numel_of(i): elements of tensor i.
  template <typename NumelOf>
  BlockWalk(int64_t num_tensors, const NumelOf& numel_of) : starts_(static_cast<size_t>(num_tensors) + 1) {
    for (int64_t i = 0; i < num_tensors; ++i) starts_[i + 1] = starts_[i] + blocks_of(numel_of(i));
  }

  int64_t num_blocks() const { return starts_.back(); }

  // Calls span(tensor, first_block, last_block), blocks counted within the tensor, over blocks [begin, end) of the line.
  template <typename Span>
  void visit(int64_t begin, int64_t end, const Span& span) const {
    int64_t tensor = std::upper_bound(starts_.begin(), starts_.end(), begin) - starts_.begin() - 1;
    for (int64_t block = begin; block < end; ++tensor) {
      const int64_t last = std::min(end, starts_[tensor + 1]);
      if (last == block) continue;  // a tensor without elements
      span(tensor, block - starts_[tensor], last - starts_[tensor]);
      block = last;
    }
  }

 private:
  std::vector<int64_t> starts_;  // first block of each tensor, then their number
};

// Calls span(segment, first, last), elements counted within the segment, over all of `segments`, on the executor's threads. A
// thread gets at least 32K elements, as torch has it: below that waking a second one costs more than it brings.
template <typename Segment, typename Span>
void walk_elements(const Segment* segments, int64_t count, Executor& executor, const Span& span) {
  const BlockWalk walk(count, [segments](int64_t i) { return segments[i].numel; });
  executor.parallel_for(0, walk.num_blocks(), 32768 / kBlock, [&](int64_t begin, int64_t end) {
    const SubnormalGuard guard;
    walk.visit(begin, end, [&](int64_t i, int64_t first, int64_t last) {
      span(segments[i], first * kBlock, std::min(segments[i].numel, last * kBlock));
    });
  });
}

}  // namespace shardcore
