// What one CUDA thread does in the ordered sum's kernel, as a host/device function: tests/cpp runs it on the host. The CPU loop
// does the same steps a tile at a time.
//
// A warp takes one 256-element block, and a lane 8 elements of it, through all ranks. The more ranks, the shorter their pieces:
// of a thousand so few elements are left that each lane must have much under way. So CUDA blocks are small, and a lane copies
// its elements of the next ranks to shared memory while it adds those of this one. It alone reads what it copied, so no barrier
// is needed.
#pragma once

#include "norm/norm_cuda_body.h"
#include "reduce/reduce_cpu.h"
#include "reduce/reduce_math.h"

namespace shardcore {

constexpr int kOrderedThreads = 64;
constexpr int kOrderedWarps = kOrderedThreads / 32;
constexpr int kOrderedResident = 12;      // CUDA blocks of a multiprocessor
constexpr int64_t kOrderedBlocks = 4096;  // of a launch at most: more than any GPU runs at once, few enough to add up

// Elements of a CUDA block: one 256-element block a warp, or equal rounds of that. numel alone decides, so that the norm's
// terms are grouped alike on every GPU.
SHARDCORE_HD int64_t ordered_sum_chunk(int64_t numel) {
  constexpr int64_t kRound = kOrderedWarps * kBlock;
  return kRound * ((numel + kRound * kOrderedBlocks - 1) / (kRound * kOrderedBlocks));
}

// CUDA blocks of a launch; 0 without elements.
SHARDCORE_HD int64_t ordered_sum_grid(int64_t numel) {
  return numel == 0 ? 0 : (numel + ordered_sum_chunk(numel) - 1) / ordered_sum_chunk(numel);
}

// What a CUDA block shares: a ring of steps, each of a few ranks' elements.
struct OrderedShared {
  static constexpr int kSteps = 4;
  static constexpr int kCopies = 4;  // of a lane in a step
  DoubleDouble sums[kOrderedWarps];
  alignas(16) Bytes16 steps[kSteps][kCopies][kOrderedThreads];
};

// How lanes take a block. Float32 pieces: two runs of 4, so that neighbouring lanes take neighbouring 16 bytes.
template <DType kPieces>
using SumLanes = Lanes<32, kPieces == DType::f32 ? 4 : 8>;

// The sums of all ranks' pieces, in rank order, over the whole, aligned block that begins at element first. They begin at -0:
// -0 + x is x, -0 too.
template <DType kPieces, typename Block>
SHARDCORE_HD void add_pieces(const OrderedSum& op, int64_t first, OrderedShared& shared, int thread, const Block& block,
                             float (&sums)[8]) {
  using S = OrderedShared;
  constexpr int kHalves = kPieces == DType::f32 ? 2 : 1, kRanks = S::kCopies / kHalves;
  const int64_t size = itemsize(kPieces);
  const auto world_size = static_cast<int>(op.world_size);
  const Octet at = SumLanes<kPieces>::octet(thread % 32, 0);
  const auto copy_step = [&](int step) {
    SHARDCORE_UNROLL
    for (int k = 0; k < kRanks; ++k) {
      const int rank = step * kRanks + k;
      if (rank < world_size) {
        const char* const piece = static_cast<const char*>(piece_of(op, rank)) + first * size;
        SHARDCORE_UNROLL
        for (int half = 0; half < kHalves; ++half)
          block.copy16(&shared.steps[step % S::kSteps][k * kHalves + half][thread],
                       piece + (half == 0 ? at.first : at.second) * size);
      }
    }
    block.commit_copies();
  };
  SHARDCORE_NO_UNROLL
  for (int step = 0; step < S::kSteps; ++step) copy_step(step);
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) sums[k] = -0.0f;
  SHARDCORE_NO_UNROLL
  for (int step = 0; step * kRanks < world_size; ++step) {
    block.template wait_copies<S::kSteps - 1>();  // all but those of the next steps
    Bytes16 bytes[S::kCopies];
    SHARDCORE_UNROLL
    for (int i = 0; i < S::kCopies; ++i) bytes[i] = shared.steps[step % S::kSteps][i][thread];
    SHARDCORE_UNROLL
    for (int k = 0; k < kRanks; ++k) {
      if (step * kRanks + k >= world_size) break;
      float x[8];
      if constexpr (kPieces == DType::f32) {
        SHARDCORE_UNROLL
        for (int i = 0; i < 8; ++i) x[i] = bits_float(bytes[2 * k + i / 4].words[i % 4]);
      } else {
        unpack_16bit(bytes[k], kPieces, x);
      }
      SHARDCORE_UNROLL
      for (int i = 0; i < 8; ++i) sums[i] += x[i];
    }
    copy_step(step + S::kSteps);
  }
}

// The same of a block of numel elements, loaded one by one.
SHARDCORE_HD void add_pieces_singly(const OrderedSum& op, int64_t first, int numel, int lane, float (&sums)[8]) {
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) sums[k] = -0.0f;
  SHARDCORE_NO_UNROLL
  for (int64_t rank = 0; rank < op.world_size; ++rank) {
    const char* const piece = static_cast<const char*>(piece_of(op, rank)) + first * itemsize(op.piece_dtype);
    float x[8];
    load_octet<false>(piece, op.piece_dtype, LanesUnaligned::octet(lane, 0), numel, x);
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) sums[k] += x[k];
  }
}

// Whether every stream starts on 16 bytes, each rank's piece too.
SHARDCORE_HD bool is_aligned16(const OrderedSum& op) {
  const bool rows = op.world_size == 1 || op.numel * itemsize(op.piece_dtype) % 16 == 0;
  return rows && is_aligned16(op.pieces) && is_aligned16(op.own) && is_aligned16(op.out);
}

// A lane's 8 elements of the block that begins at `out`: 16 bytes at once where they are neighbours, else two runs.
template <bool kVector, typename L, DType kDType>
SHARDCORE_HD void load_out(const char* out, int numel, int lane, float (&x)[8]) {
  const Octet at = L::octet(lane, 0);
  if constexpr (kVector && L::kRun == 4 && kDType == DType::bf16) {
    SHARDCORE_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t words[2];
      load8(out + 2 * (half == 0 ? at.first : at.second), words);
      SHARDCORE_UNROLL
      for (int k = 0; k < 4; ++k) x[4 * half + k] = bf16_to_f32(static_cast<uint16_t>(words[k / 2] >> (k % 2 * 16)));
    }
  } else {
    load_octet<kVector>(out, kDType, at, numel, x);
  }
}

template <bool kVector, typename L, DType kDType>
SHARDCORE_HD void store_out(char* out, int numel, int lane, const float (&x)[8]) {
  const Octet at = L::octet(lane, 0);
  if constexpr (kVector && L::kRun == 4 && kDType == DType::bf16) {
    SHARDCORE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const float* const run = x + 4 * half;
      const uint32_t words[2] = {f32_to_bf16(run[0]) | static_cast<uint32_t>(f32_to_bf16(run[1])) << 16,
                                 f32_to_bf16(run[2]) | static_cast<uint32_t>(f32_to_bf16(run[3])) << 16};
      store8(out + 2 * (half == 0 ? at.first : at.second), words);
    }
  } else {
    store_octet<kVector>(out, kDType, at, numel, x);
  }
}

// Scales a block's sums, adds them to what is there, and stores them. sums: after it, what was stored (0 past the end).
template <bool kVector, typename L, DType kDType>
SHARDCORE_HD void store_sums(const OrderedSum& op, double scale, int64_t first, int numel, int lane, float (&sums)[8]) {
  char* const out = static_cast<char*>(op.out) + first * itemsize(kDType);
  scale_sums(sums, 8, scale);
  if (op.accumulate) {
    float x[8];
    load_out<kVector, L, kDType>(out, numel, lane, x);
    SHARDCORE_UNROLL
    for (int k = 0; k < 8; ++k) sums[k] = x[k] + sums[k];
  }
  store_out<kVector, L, kDType>(out, numel, lane, sums);
  SHARDCORE_UNROLL
  for (int k = 0; k < 8; ++k) {
    const float stored = kDType == DType::bf16 ? bf16_to_f32(f32_to_bf16(sums[k])) : sums[k];
    sums[k] = kVector || octet_element(L::octet(lane, 0), k) < numel ? stored : 0.0f;
  }
}

// What is left to do of a block when its pieces are added; returns the squared norm of what was stored.
template <bool kVector, typename L, typename Block>
SHARDCORE_HD double finish_block(const OrderedSum& op, double scale, int64_t first, int numel, int lane, const Block& block,
                                 float (&sums)[8]) {
  if (op.out_dtype == DType::f32) {
    store_sums<kVector, L, DType::f32>(op, scale, first, numel, lane, sums);
  } else {
    store_sums<kVector, L, DType::bf16>(op, scale, first, numel, lane, sums);
  }
  return sq_norm_lanes<L>(sums, lane, block);
}

// What a warp does of the first `whole` blocks of the chunk that begins at element begin: whole blocks, aligned.
template <DType kPieces, typename Block>
SHARDCORE_HD DoubleDouble sum_whole_blocks(const OrderedSum& op, double scale, int64_t begin, int whole, OrderedShared& shared,
                                           int thread, const Block& block) {
  DoubleDouble total{0.0, 0.0};
  SHARDCORE_NO_UNROLL
  for (int at = thread / 32; at < whole; at += kOrderedWarps) {
    const int64_t first = begin + at * kBlock;
    float sums[8];
    add_pieces<kPieces>(op, first, shared, thread, block, sums);
    total = dd_add(total, finish_block<true, SumLanes<kPieces>>(op, scale, first, kBlockSize, thread % 32, block, sums));
  }
  return total;
}

template <typename Block>
SHARDCORE_HD void ordered_sum_body(const OrderedSum& op, DoubleDouble* partial, OrderedShared& shared, int64_t block_index,
                                   int thread, const Block& block) {
  const int64_t chunk = ordered_sum_chunk(op.numel), begin = block_index * chunk;
  const int numel = static_cast<int>(op.numel - begin < chunk ? op.numel - begin : chunk);
  const int whole = is_aligned16(op) ? numel / kBlockSize : 0;
  const double scale = op.scale_at == nullptr ? op.scale : op.scale * *op.scale_at;
  DoubleDouble total;
  if (op.piece_dtype == DType::f32) {
    total = sum_whole_blocks<DType::f32>(op, scale, begin, whole, shared, thread, block);
  } else if (op.piece_dtype == DType::bf16) {
    total = sum_whole_blocks<DType::bf16>(op, scale, begin, whole, shared, thread, block);
  } else {
    total = sum_whole_blocks<DType::f16>(op, scale, begin, whole, shared, thread, block);
  }
  SHARDCORE_NO_UNROLL
  for (int at = whole + thread / 32; at * kBlockSize < numel; at += kOrderedWarps) {
    const int first = at * kBlockSize, lane = thread % 32;
    float sums[8];
    add_pieces_singly(op, begin + first, numel - first, lane, sums);
    total = dd_add(total, finish_block<false, LanesUnaligned>(op, scale, begin + first, numel - first, lane, block, sums));
  }
  total = add_warps<kOrderedWarps>(total, shared.sums, thread, block);
  if (thread == 0) partial[block_index] = total;
}

}  // namespace shardcore
