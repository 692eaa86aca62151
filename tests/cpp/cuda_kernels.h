// The launches of csrc/norm, csrc/reduce, csrc/digest and csrc/elementwise's .cu files, on the host's grid. Twin: what stands
// for CUDA's block; a broken one must be rejected. first_chunk: those before it are left out, as if their elements were 0.
#pragma once

#include <vector>

#include "core/grad_scale.h"
#include "cpp/common.h"
#include "cpp/host_grid.h"
#include "digest/digest_cuda_body.h"
#include "elementwise/element_cuda_body.h"
#include "norm/norm_cuda_body.h"
#include "reduce/reduce_cuda_body.h"

namespace shardcore::testing {

// Its barriers are missing.
struct BlockWithoutSync : HostBlock {
  explicit BlockWithoutSync(const HostBlock& block) : HostBlock(block) {}
  void sync() const {}
};

// Whether one of a few runs is rejected: without a barrier, fibers may happen to come in an order that does no harm.
template <typename Rejected>
bool some_run_is_rejected(const Rejected& rejected) {
  bool any = false;
  for (int run = 0; run < 20; ++run) any = rejected() || any;
  return any;
}

// Its lanes take from others than they should.
struct BlockOfOtherLanes : HostBlock {
  explicit BlockOfOtherLanes(const HostBlock& block) : HostBlock(block) {}
  double shfl_xor(double x, int mask) const { return HostBlock::shfl_xor(x, mask == 8 ? 4 : mask); }
};

// It reads shared memory without waiting for the copies to it.
struct BlockWithoutWait : HostBlock {
  explicit BlockWithoutWait(const HostBlock& block) : HostBlock(block) {}
  template <int kGroups>
  void wait_copies() const {}
};

// It never counts itself as the last, as if another block were still to come.
struct BlockThatWaits : HostBlock {
  explicit BlockThatWaits(const HostBlock& block) : HostBlock(block) {}
  bool is_last(uint32_t*, uint32_t) const { return false; }
};

// It takes the first block that comes to its end for the last.
struct BlockInAHurry : HostBlock {
  explicit BlockInAHurry(const HostBlock& block) : HostBlock(block) {}
  bool is_last(uint32_t* counter, uint32_t) const { return (*counter)++ == 0; }
};

class Partials {
 public:
  explicit Partials(int64_t count) : count_(count), buffer_(count * static_cast<int64_t>(sizeof(DoubleDouble)), 0) {
    std::fill(data(), data() + count, DoubleDouble{});
  }
  ~Partials() { EXPECT_TRUE(buffer_.sentinels_intact()); }
  DoubleDouble* data() { return buffer_.as<DoubleDouble>(); }

  template <typename Block>
  DoubleDouble total() {
    Partials out(1);
    HostGrid::run(1, kNormThreads, [&](int64_t, int thread, const HostBlock& block) {
      add_partials_body(data(), count_, out.data(), block.shared<DoubleDouble>(), thread, Block(block));
    });
    return *out.data();
  }

 private:
  int64_t count_;
  Buffer buffer_;
};

// order: in which the CUDA blocks run, by default as many as a GPU of one multiprocessor has, one after the other. out: of more
// launches than one, with one counter.
template <typename Block = HostBlock>
DoubleDouble sq_norm_cuda_body(const std::vector<NormSegment>& segments, int64_t first_chunk = 0,
                               std::vector<int64_t> order = {}, int launches = 1) {
  const NormPlan plan(segments);
  if (plan.num_chunks == 0) return {};
  NormItems items;
  if (!items.try_assign(plan.items)) items.table = plan.items.data(), items.count = static_cast<int32_t>(plan.items.size());
  int64_t blocks = first_chunk == 0 ? norm_grid(plan.num_chunks, 1) : plan.num_chunks;
  if (order.empty()) {
    for (int64_t block = first_chunk; block < blocks; ++block) order.push_back(block);
  } else {
    blocks = static_cast<int64_t>(order.size());
  }
  Partials partials(plan.num_chunks), out(1);
  auto arrived = static_cast<uint32_t>(first_chunk);
  for (int launch = 0; launch < launches; ++launch) {
    *out.data() = {std::nan(""), 0.0};
    for (const int64_t block_index : order) {
      HostGrid::run_block(block_index, kNormThreads, [&](int64_t index, int thread, const HostBlock& block) {
        sq_norm_body(items, plan.num_chunks, partials.data(), out.data(), &arrived, *block.shared<NormShared>(), index, blocks,
                     thread, Block(block));
      });
    }
  }
  return *out.data();
}

template <typename Block = HostBlock>
DoubleDouble ordered_sum_cuda_body(const OrderedSum& op, int64_t first_chunk = 0) {
  const int64_t count = ordered_sum_grid(op.numel);
  if (count == 0) return {};
  Partials partials(count);
  HostGrid::run_from(first_chunk, count, kOrderedThreads, [&](int64_t index, int thread, const HostBlock& block) {
    ordered_sum_body(op, partials.data(), *block.shared<OrderedShared>(), index, thread, Block(block));
  });
  return partials.total<Block>();
}

inline void element_cuda_body(const std::vector<ElementSegment>& segments, const ElementScalars& scalars,
                              int64_t first_chunk = 0) {
  const HostTable table(segments, kElementChunk);
  HostGrid::run_from(first_chunk, table.num_chunks(), kElementThreads, [&](int64_t index, int thread, const HostBlock&) {
    const auto body = scalars.formula == Formula::assign ? element_body<true> : element_body<false>;
    body(table.get(), scalars, index, thread);
  });
}

template <typename Block = HostBlock>
std::vector<uint64_t> digest_cuda_body(const std::vector<DigestSegment>& segments) {
  std::vector<uint64_t> out(segments.size());
  const HostTable table(segments, kDigestChunk);
  HostGrid::run(table.num_chunks(), kDigestThreads, [&](int64_t index, int thread, const HostBlock& block) {
    digest_body(table.get(), out.data(), index, thread, Block(block));
  });
  return out;
}

// How far two sums are apart, as a part of the first; 0 if both are not finite.
inline double relative_difference(DoubleDouble a, DoubleDouble b) {
  if (!is_finite(a.high) && !is_finite(b.high)) return 0.0;
  const double difference = std::fabs((a.high - b.high) + (a.low - b.low));
  return difference == 0.0 ? 0.0 : difference / a.high;
}

// What grouping may change of a double-double sum.
constexpr double kGrouping = 0x1p-98;

}  // namespace shardcore::testing
