// Runs groups of blocks on an executor, each with a double-double partial sum, and adds the partials in order.
//
// The groups have a fixed size, so the result does not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/double_double.h"
#include "core/executor.h"
#include "core/fp_env.h"

namespace shardcore {

constexpr int64_t kGroupBlocks = 256;  // 64K elements
// Of float32 2 MiB: to wake a second thread that rests takes longer than to read that much.
constexpr int64_t kGrainGroups = 8;

// span(first_block, last_block, total): do the blocks and add their sum to total. reads: how many values for each element.
template <typename Span>
DoubleDouble grouped_sum(int64_t num_blocks, int64_t reads, Executor& executor, const Span& span) {
  const int64_t num_groups = (num_blocks + kGroupBlocks - 1) / kGroupBlocks;
  std::vector<DoubleDouble> partial(static_cast<size_t>(num_groups));
  executor.parallel_for(0, num_groups, std::max<int64_t>(1, kGrainGroups / reads), [&](int64_t begin, int64_t end) {
    const SubnormalGuard guard;
    for (int64_t group = begin; group < end; ++group) {
      DoubleDouble total{};
      span(group * kGroupBlocks, std::min(num_blocks, (group + 1) * kGroupBlocks), total);
      partial[static_cast<size_t>(group)] = total;
    }
  });
  DoubleDouble total{};
  for (const DoubleDouble& p : partial) total = dd_add(total, p);
  return total;
}

}  // namespace shardcore
