#include "core/block_walk.h"
#include "core/cast.h"
#include "core/cpu_isa.h"

namespace shardcore {

void cast_cpu(const CastSegment* segments, int64_t num_segments, Executor& executor) {
  walk_elements(segments, num_segments, executor, SHARDCORE_PICK(cast_span));
}

}  // namespace shardcore
