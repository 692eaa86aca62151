#include "reduce/reduce_cpu.h"

#include "core/cpu_isa.h"
#include "core/grouped_sum.h"
#include "core/tile.h"

namespace shardcore {

DoubleDouble ordered_sum_cpu(const OrderedSum& op, Executor& executor) {
  const auto ordered_sum_span = SHARDCORE_PICK(ordered_sum_span);
  return grouped_sum(blocks_of(op.numel), op.world_size, executor,
                     [&](int64_t first, int64_t last, DoubleDouble& total) { ordered_sum_span(op, first, last, total); });
}

}  // namespace shardcore
