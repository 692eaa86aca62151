#include "elementwise/element_cpu.h"

#include <algorithm>

#include "core/block_walk.h"
#include "core/cpu_isa.h"
#include "core/executor.h"
#include "core/fp_env.h"

namespace shardcore {
namespace {
constexpr int64_t kGrainBlocks = 128;
}

void update_elements_cpu(const ElementSegment* segments, int64_t num_segments, const ElementScalars& scalars,
                         Executor& executor) {
  const auto element_span = SHARDCORE_PICK(element_span);
  const BlockWalk walk(num_segments, [segments](int64_t i) { return segments[i].numel; });
  executor.parallel_for(0, walk.num_blocks(), kGrainBlocks, [&](int64_t begin, int64_t end) {
    const SubnormalGuard guard;
    walk.visit(begin, end, [&](int64_t i, int64_t first, int64_t last) {
      element_span(segments[i], scalars, first * kBlock, std::min(segments[i].numel, last * kBlock));
    });
  });
}

}  // namespace shardcore
