#include "elementwise/element_cpu.h"

#include "core/block_walk.h"
#include "core/cpu_isa.h"

namespace shardcore {

void update_elements_cpu(const ElementSegment* segments, int64_t num_segments, const ElementScalars& scalars,
                         Executor& executor) {
  walk_elements(segments, num_segments, executor,
                [&, element_span = SHARDCORE_PICK(element_span)](const ElementSegment& segment, int64_t first, int64_t last) {
                  element_span(segment, scalars, first, last);
                });
}

}  // namespace shardcore
