#include "adam/adam_cpu.h"

#include <algorithm>

#include "core/block_walk.h"
#include "core/cpu_isa.h"
#include "core/executor.h"
#include "core/fp_env.h"

namespace shardcore {
namespace {

// 32K elements, as torch has it: below that waking a second thread costs more than it brings.
constexpr int64_t kGrainBlocks = 128;

bool is_amd() {
#if SHARDCORE_X86
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

}  // namespace

int64_t prefetch_elements() {
  static const int64_t elements = is_amd() ? 96 : 384;
  return elements;
}

void adam_cpu(const AdamSegment* segments, int64_t num_segments, const AdamScalars* scalars, Executor& executor) {
  const auto adam_span = SHARDCORE_PICK(adam_span);
  const BlockWalk walk(num_segments, [segments](int64_t i) { return segments[i].numel; });
  executor.parallel_for(0, walk.num_blocks(), kGrainBlocks, [&](int64_t first_block, int64_t last_block) {
    const SubnormalGuard guard;
    walk.visit(first_block, last_block, [&](int64_t i, int64_t begin, int64_t end) {
      const AdamSegment& segment = segments[i];
      adam_span(segment, scalars[segment.hyper_index], begin * kBlock, std::min(segment.numel, end * kBlock));
    });
  });
}

}  // namespace shardcore
