#include "adam/adam_cpu.h"

#include "core/block_walk.h"
#include "core/cpu_isa.h"

namespace shardcore {
namespace {

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
  walk_elements(segments, num_segments, executor,
                [scalars, adam_span = SHARDCORE_PICK(adam_span)](const AdamSegment& segment, int64_t first, int64_t last) {
                  adam_span(segment, scalars[segment.hyper_index], first, last);
                });
}

}  // namespace shardcore
