#include "digest/digest_cpu.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "core/block_walk.h"
#include "core/cpu_isa.h"

namespace shardcore {

void digest_cpu(const DigestSegment* segments, int64_t num_segments, uint64_t* out, Executor& executor) {
  const auto digest_span = SHARDCORE_PICK(digest_span);
  std::vector<std::atomic<uint64_t>> sums(static_cast<size_t>(num_segments));
  for (auto& sum : sums) sum.store(0, std::memory_order_relaxed);
  walk_elements(segments, num_segments, executor, [&](const DigestSegment& segment, int64_t first, int64_t last) {
    sums[static_cast<size_t>(&segment - segments)].fetch_add(digest_span(segment, first / kBlock, blocks_of(last)),
                                                             std::memory_order_relaxed);
  });
  for (int64_t i = 0; i < num_segments; ++i) out[i] = sums[static_cast<size_t>(i)].load(std::memory_order_relaxed);
}

}  // namespace shardcore
