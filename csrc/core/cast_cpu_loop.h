// The CPU loop of the cast, compiled once per instruction set by csrc/isa.
#include "core/cast.h"
#include "core/tile.h"

namespace shardcore {
namespace SHARDCORE_ISA {

void cast_span(const CastSegment& t, int64_t first, int64_t last) {
  alignas(64) float tile[kBlock];
  for (int64_t i = first; i < last; i += kBlock) {
    const int64_t n = last - i < kBlock ? last - i : kBlock;
    load_tile(tile, t.src, t.src_dtype, i, n);
    store_tile(t.dst, t.dst_dtype, i, n, tile);
  }
}

}  // namespace SHARDCORE_ISA
}  // namespace shardcore
