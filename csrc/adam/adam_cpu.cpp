#include "adam/adam_cpu.h"

#include <algorithm>

#include "core/block_walk.h"
#include "core/cpu_isa.h"
#include "core/executor.h"
#include "core/fp_env.h"

namespace shardcore {
namespace {
constexpr int64_t kGrainBlocks =
    128;  // 32K elements, as torch has it: below that waking a second thread costs more than it brings
}

void adam_cpu(const AdamSegment* segments, int64_t num_segments, const AdamScalars* scalars, Executor& executor) {
  const auto adam_span = SHARDCORE_PICK(adam_span);
  const BlockWalk walk(num_segments, [&](int64_t i) { return segments[i].numel; });
  executor.parallel_for(0, walk.num_blocks(), kGrainBlocks, [&](int64_t begin, int64_t end) {
    const SubnormalGuard guard;
    walk.visit(begin, end, [&](int64_t i, int64_t first_block, int64_t last_block) {
      const AdamSegment& segment = segments[i];
      adam_span(segment, scalars[segment.hyper_index], first_block * kBlock, std::min(segment.numel, last_block * kBlock));
    });
  });
}

}  // namespace shardcore
