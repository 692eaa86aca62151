#include "norm/norm_cpu.h"

#include "core/block_walk.h"
#include "core/cpu_isa.h"
#include "core/grouped_sum.h"

namespace shardcore {

DoubleDouble sq_norm_cpu(const NormSegment* segments, int64_t num_segments, Executor& executor) {
  const auto sq_norm_span = SHARDCORE_PICK(sq_norm_span);
  const BlockWalk walk(num_segments, [&](int64_t i) { return segments[i].numel; });
  return grouped_sum(walk.num_blocks(), 1, executor, [&](int64_t begin, int64_t end, DoubleDouble& total) {
    walk.visit(begin, end, [&](int64_t i, int64_t first, int64_t last) { sq_norm_span(segments[i], first, last, total); });
  });
}

}  // namespace shardcore
