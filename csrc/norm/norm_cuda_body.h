// What one CUDA thread does in the norm's kernels, as host/device functions: tests/cpp runs them on the host. Also the parts
// that the ordered sum shares: the tree of norm_block.h over lanes, and the sum over a CUDA block.
//
// 8 lanes read a 256-element block and a warp 4 blocks at once: a round. A lane's accesses are spread over the block, so the
// tree's first steps are made within a lane, and few between lanes. Addition commutes, so both lanes of a step get the same
// bits.
//
// A float32 lane has eight 16-byte loads in flight before it uses the first. With 16 bits the same bytes are twice the work,
// and warps that load and then work leave the memory waiting: there a lane copies its part of the next round to shared memory
// while it works on this one. It alone reads what it copied, so no barrier is needed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "core/double_double.h"
#include "core/vector_io.h"
#include "norm/norm_block.h"
#include "norm/norm_cpu.h"

namespace shardcore {

constexpr int kNormThreads = 256;
constexpr int kNormWarps = kNormThreads / 32;
constexpr int kNormResident = 4;  // CUDA blocks of a multiprocessor
constexpr int kSums = 512;  // that the CUDA block which adds what others have summed makes side by side, before it adds them
constexpr int kSumWarps = kSums / 32;
constexpr int kSumsOfThread = kSums / kNormThreads;
constexpr int kSumBatch = 4;  // of each sum a thread has that many terms in flight
constexpr int kBlockSize = static_cast<int>(kBlock);
constexpr int64_t kNormChunk = 128 * kBlock;  // float32 elements; a chunk of 16-bit ones has as many bytes

SHARDCORE_HD int64_t norm_chunk(DType dtype) { return kNormChunk * 4 / itemsize(dtype); }

// CUDA blocks of a launch: as many as run at once on an A100 or H100, each with every so many-th chunk.
SHARDCORE_HD int64_t norm_grid(int64_t num_chunks, int multiprocessors) {
  const int64_t most = int64_t{kNormResident} * multiprocessors;
  return num_chunks < most ? num_chunks : most;
}

// A tensor of a launch; first_chunk: where its chunks begin among all.
struct NormItem {
  const void* data;
  int64_t numel;
  int32_t first_chunk;
  DType dtype;
};

// A list of tensors as a launch needs it.
struct NormPlan {
  std::vector<NormItem> items;  // without empty ones
  int64_t num_chunks = 0;

  explicit NormPlan(const std::vector<NormSegment>& segments) {
    for (const NormSegment& t : segments) {
      if (t.numel > 0) items.push_back({t.data, t.numel, static_cast<int32_t>(num_chunks), t.dtype});
      num_chunks += (t.numel + norm_chunk(t.dtype) - 1) / norm_chunk(t.dtype);
    }
  }
};

// The items of a launch: a table in device memory or, without one, a few that are arguments of the launch itself, so that no
// copy to the device precedes it.
struct NormItems {
  static constexpr size_t kFew = 160;  // as many as the 4 KiB of arguments hold that every launch carries
  const NormItem* table = nullptr;
  int32_t count = 0;
  NormItem few[kFew] = {};

  // Makes them arguments of the launch; false if they are too many.
  bool try_assign(const std::vector<NormItem>& items) {
    if (items.size() > kFew) return false;
    std::copy(items.begin(), items.end(), few);
    count = static_cast<int32_t>(items.size());
    return true;
  }
};

// The one that a chunk belongs to: the last that starts no later. Those of a launch are found by bisection: all lanes read the
// same argument, which is fast. Each read of a table takes long, so the lanes read 32 entries at a time.
template <typename Warp>
SHARDCORE_HD NormItem item_of_chunk(const NormItems& items, int64_t chunk, int lane, const Warp& warp) {
  int first = 0, end = items.count;
  if (items.table == nullptr) {
    while (end - first > 1) {
      const int middle = (first + end) / 2;
      (items.few[middle].first_chunk <= chunk ? first : end) = middle;
    }
    return items.few[first];
  }
  while (end - first > 1) {
    const int step = (end - first + 31) / 32, at = first + lane * step;
    const bool starts = at < end && items.table[at].first_chunk <= chunk;
    first = static_cast<int>(warp.max(starts ? static_cast<uint32_t>(at) : 0u));
    end = first + step < end ? first + step : end;
  }
  return items.table[first];
}

// How lanes take a block: kLanes of them, each in runs of kRun elements, kLanes * kRun apart. Where all streams are float32 a
// run is 4, so that neighbouring lanes take neighbouring 16 bytes, else 8.
template <int kLanes_, int kRun_>
struct Lanes {
  static constexpr int kLanes = kLanes_;
  static constexpr int kRun = kRun_;
  static constexpr int kBlocks = 32 / kLanes;           // of a warp
  static constexpr int kNumel = kBlockSize / kLanes;    // of a lane
  static constexpr int kStride = kNormWarps * kBlocks;  // blocks that a CUDA block does at a time

  // Where elements 8 * i to 8 * i + 7 of the lane lie in the block.
  SHARDCORE_HD Octet octet(int lane, int i) {
    const int first = lane % kLanes * kRun + i * 8 * kLanes;
    return {first, first + (kRun == 4 ? 4 * kLanes : 4)};
  }
};

using LanesF32 = Lanes<8, 4>;
using LanesMixed = Lanes<8, 8>;       // 16-bit streams, and streams of both sizes
using LanesUnaligned = Lanes<32, 8>;  // loads of single elements

// A lane's elements of a block that has numel, 0 for what is not there.
template <bool kVector, typename L, bool kOnce = false>
SHARDCORE_HD void load_lane(const void* data, DType dtype, int numel, int lane, float (&x)[L::kNumel]) {
  SHARDCORE_UNROLL
  for (int i = 0; i < L::kNumel / 8; ++i) {
    float octet[8];
    load_octet<kVector, kOnce>(data, dtype, L::octet(lane, i), numel, octet);
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) x[8 * i + k] = octet[k];
  }
}

// The squared norm of the lane's block, in each of its lanes. x: of load_lane.
template <typename L, typename Warp>
SHARDCORE_HD double sq_norm_lanes(const float (&x)[L::kNumel], int lane, const Warp& warp) {
  constexpr int kRuns = L::kNumel / L::kRun;
  double a[L::kRun];
  SHARDCORE_UNROLL
  for (int k = 0; k < L::kRun; ++k) {  // steps 128 to kLanes * kRun
    if constexpr (kRuns == 1) {
      a[k] = square_f64(x[k]);
    } else {
      double sums[kRuns / 2];
      SHARDCORE_UNROLL
      for (int run = 0; run < kRuns / 2; ++run)
        sums[run] = sum_of_squares(x[run * L::kRun + k], x[(run + kRuns / 2) * L::kRun + k]);
      SHARDCORE_UNROLL
      for (int half = kRuns / 4; half >= 1; half /= 2) {
        SHARDCORE_UNROLL
        for (int run = 0; run < half; ++run) sums[run] += sums[run + half];
      }
      a[k] = sums[0];
    }
  }
  // Steps down to 1. While a lane has several sums, each of two lanes continues with half of them: the upper with the upper
  // half. So the steps within a run are between the same lanes again, highest first.
  int kept = L::kRun, mask = L::kLanes / 2;
  SHARDCORE_UNROLL
  for (int step = L::kLanes * L::kRun / 2; step >= 1; step /= 2) {
    const bool halve = kept > 1, upper = halve && (lane & mask) != 0;
    kept = halve ? kept / 2 : 1;
    SHARDCORE_UNROLL
    for (int k = 0; k < kept; ++k) {
      const double low = a[k], high = halve ? a[k + kept] : a[k];
      a[k] = (upper ? high : low) + warp.shfl_xor(upper ? low : high, mask);
    }
    mask = mask > 1 ? mask / 2 : L::kLanes / 2;
  }
  return a[0];
}

// The sum of total over lanes that differ in the bits of masks first, 2 * first, ... below limit, in each of them.
template <typename Warp>
SHARDCORE_HD DoubleDouble add_lanes(DoubleDouble total, int first, int limit, const Warp& warp) {
  SHARDCORE_UNROLL
  for (int mask = first; mask < limit; mask *= 2) {
    total = dd_add(total, DoubleDouble{warp.shfl_xor(total.high, mask), warp.shfl_xor(total.low, mask)});
  }
  return total;
}

// Adds the totals of all warps (those of their first lanes); the result is right in thread 0. shared: kWarps sums in shared
// memory.
template <int kWarps, typename Block>
SHARDCORE_HD DoubleDouble add_warps(DoubleDouble total, DoubleDouble* shared, int thread, const Block& block) {
  if (thread % 32 == 0) shared[thread / 32] = total;
  block.sync();
  if (thread < 32) total = add_lanes(shared[thread % kWarps], 1, kWarps, block);
  return total;
}

// What a CUDA block shares.
struct NormShared {
  static constexpr int kCopies = LanesMixed::kNumel / 8;  // of a lane in a round
  DoubleDouble sums[kSumWarps];
  uint32_t last;  // whether the CUDA block is the last one to come to its end
  alignas(16) Bytes16 rounds[2][kCopies][kNormThreads];
};

// The block that a lane has in a round whose first is `first`; past the last one that again, for nothing.
template <typename L>
SHARDCORE_HD int block_of_lane(int first, int whole, int lane) {
  const int own = first + lane / L::kLanes;
  return own < whole ? own : whole - 1;
}

// What a lane has of a warp's rounds over the first `whole` blocks: whole blocks, aligned.
template <typename Block>
SHARDCORE_HD DoubleDouble sq_norm_rounds_f32(const char* data, int whole, int thread, const Block& block) {
  using L = LanesF32;
  const int lane = thread % 32;
  DoubleDouble total{0.0, 0.0};
  SHARDCORE_NO_UNROLL
  for (int first = thread / 32 * L::kBlocks; first < whole; first += L::kStride) {
    float x[L::kNumel];
    load_lane<true, L, true>(data + block_of_lane<L>(first, whole, lane) * kBlockSize * 4, DType::f32, kBlockSize, lane, x);
    const double sum = sq_norm_lanes<L>(x, lane, block);
    total = dd_add(total, first + lane / L::kLanes < whole ? sum : 0.0);
  }
  return total;
}

template <DType kDType, typename Block>
SHARDCORE_HD DoubleDouble sq_norm_rounds_16bit(const char* data, int whole, NormShared& shared, int thread,
                                               const Block& block) {
  using L = LanesMixed;
  const int lane = thread % 32;
  const auto copy_round = [&](int first, int turn) {
    if (first < whole) {
      const char* const own = data + block_of_lane<L>(first, whole, lane) * kBlockSize * 2;
      SHARDCORE_UNROLL
      for (int i = 0; i < NormShared::kCopies; ++i)
        block.copy16(&shared.rounds[turn][i][thread], own + L::octet(lane, i).first * 2);
    }
    block.commit_copies();
  };
  DoubleDouble total{0.0, 0.0};
  int first = thread / 32 * L::kBlocks, turn = 0;
  copy_round(first, turn);
  SHARDCORE_NO_UNROLL
  for (; first < whole; first += L::kStride, turn ^= 1) {
    copy_round(first + L::kStride, turn ^ 1);
    block.template wait_copies<1>();  // all but those of the next round
    float x[L::kNumel];
    SHARDCORE_UNROLL
    for (int i = 0; i < NormShared::kCopies; ++i) {
      float octet[8];
      unpack_16bit(shared.rounds[turn][i][thread], kDType, octet);
      SHARDCORE_UNROLL
      for (int k = 0; k < 8; ++k) x[8 * i + k] = octet[k];
    }
    const double sum = sq_norm_lanes<L>(x, lane, block);
    total = dd_add(total, first + lane / L::kLanes < whole ? sum : 0.0);
  }
  return total;
}

// What a warp does of a chunk of numel elements.
template <DType kDType, typename Block>
SHARDCORE_HD DoubleDouble sq_norm_chunk(const char* data, int numel, bool aligned, NormShared& shared, int thread,
                                        const Block& block) {
  const int lane = thread % 32;
  const int whole = aligned ? numel / kBlockSize : 0;
  DoubleDouble total;
  if constexpr (kDType == DType::f32) {
    total = sq_norm_rounds_f32(data, whole, thread, block);
  } else {
    total = sq_norm_rounds_16bit<kDType>(data, whole, shared, thread, block);
  }
  static_assert(LanesF32::kLanes == LanesMixed::kLanes);
  total = add_lanes(total, LanesF32::kLanes, 32, block);
  SHARDCORE_NO_UNROLL
  for (int at = whole + thread / 32; at * kBlockSize < numel; at += kNormWarps) {
    float x[LanesUnaligned::kNumel];
    load_lane<false, LanesUnaligned>(data + at * kBlockSize * itemsize(kDType), kDType, numel - at * kBlockSize, lane, x);
    total = dd_add(total, sq_norm_lanes<LanesUnaligned>(x, lane, block));
  }
  return total;
}

// A chunk's sum, right in thread 0.
template <typename Block>
SHARDCORE_HD DoubleDouble sum_chunk(const NormItems& items, int64_t chunk, NormShared& shared, int thread, const Block& block) {
  const NormItem t = item_of_chunk(items, chunk, thread % 32, block);
  const int64_t most = norm_chunk(t.dtype), first = (chunk - t.first_chunk) * most;
  const int numel = static_cast<int>(t.numel - first < most ? t.numel - first : most);
  const char* const data = static_cast<const char*>(t.data) + first * itemsize(t.dtype);
  SHARDCORE_ASSUME_GLOBAL(data);
  const bool aligned = is_aligned16(t.data);
  DoubleDouble total;
  if (t.dtype == DType::f32) {
    total = sq_norm_chunk<DType::f32>(data, numel, aligned, shared, thread, block);
  } else if (t.dtype == DType::bf16) {
    total = sq_norm_chunk<DType::bf16>(data, numel, aligned, shared, thread, block);
  } else {
    total = sq_norm_chunk<DType::f16>(data, numel, aligned, shared, thread, block);
  }
  return add_warps<kNormWarps>(total, shared.sums, thread, block);
}

// out[0] = the sum of partial[0:count], in an order that count fixes: kSums sums of every kSums-th, added in a tree. One CUDA
// block of kNormThreads. shared: kSumWarps sums.
template <typename Block>
SHARDCORE_HD void add_partials_body(const DoubleDouble* partial, int64_t count, DoubleDouble* out, DoubleDouble* shared,
                                    int thread, const Block& block) {
  DoubleDouble totals[kSumsOfThread]{};
  SHARDCORE_NO_UNROLL
  for (int64_t first = thread; first < count; first += kSumBatch * kSums) {
    DoubleDouble batch[kSumBatch][kSumsOfThread];
    SHARDCORE_UNROLL
    for (int k = 0; k < kSumBatch; ++k) {
      SHARDCORE_UNROLL
      for (int own = 0; own < kSumsOfThread; ++own) {
        const int64_t i = first + k * kSums + own * kNormThreads;
        batch[k][own] = i < count ? partial[i] : DoubleDouble{0.0, 0.0};
      }
    }
    SHARDCORE_UNROLL
    for (int k = 0; k < kSumBatch; ++k) {
      SHARDCORE_UNROLL
      for (int own = 0; own < kSumsOfThread; ++own) totals[own] = dd_add(totals[own], batch[k][own]);
    }
  }
  SHARDCORE_UNROLL
  for (int own = 1; own < kSumsOfThread; ++own) {
    const DoubleDouble total = add_lanes(totals[own], 1, 32, block);
    if (thread % 32 == 0) shared[own * kNormWarps + thread / 32] = total;
  }
  const DoubleDouble total = add_warps<kSumWarps>(add_lanes(totals[0], 1, 32, block), shared, thread, block);
  if (thread == 0) *out = total;
}

// CUDA block block_index of num_blocks. partial: num_chunks sums; out: their sum, which the last block adds that comes to its
// end. arrived: a counter that is 0 and stays so; nullptr: nobody adds.
template <typename Block>
SHARDCORE_HD void sq_norm_body(const NormItems& items, int64_t num_chunks, DoubleDouble* partial, DoubleDouble* out,
                               uint32_t* arrived, NormShared& shared, int64_t block_index, int64_t num_blocks, int thread,
                               const Block& block) {
  SHARDCORE_NO_UNROLL
  for (int64_t chunk = block_index; chunk < num_chunks; chunk += num_blocks) {
    const DoubleDouble total = sum_chunk(items, chunk, shared, thread, block);
    if (thread == 0) partial[chunk] = total;
    block.sync();  // before shared memory is written again
  }
  if (arrived == nullptr) return;
  if (thread == 0) shared.last = block.is_last(arrived, static_cast<uint32_t>(num_blocks));
  block.sync();
  if (shared.last != 0) add_partials_body(partial, num_chunks, out, shared.sums, thread, block);
}

}  // namespace shardcore
