// Ordered sums for tests: their pieces, and what must come out.
#pragma once

#include <algorithm>
#include <bit>
#include <vector>

#include "cpp/common.h"
#include "reduce/reduce_cpu.h"

namespace shardcore::testing {

struct SumCase {
  int64_t numel;
  int64_t world_size;
  DType pieces, out;
  bool accumulate;
  int64_t misalign;
  bool own;      // the last rank's piece is given where it is, and is garbage among the pieces
  double scale;  // of the average
};

struct ReduceProblem {
  explicit ReduceProblem(const SumCase& c)
      : pieces(c.numel * c.world_size * itemsize(c.pieces), c.misalign * itemsize(c.pieces)),
        out(c.numel * itemsize(c.out), c.misalign * itemsize(c.out)) {
    Random random(static_cast<uint32_t>(c.numel * 31 + c.world_size));
    for (int64_t i = 0; i < c.numel * c.world_size; ++i) store_from_f32(pieces.data(), c.pieces, i, random.normal());
    for (int64_t i = 0; i < c.numel; ++i) store_from_f32(out.data(), c.out, i, random.normal());
    initial = out.bytes();
    const double scale = c.scale / static_cast<double>(c.world_size);
    op = {pieces.data(), c.pieces, c.world_size, c.numel, scale, out.data(), c.out, c.accumulate, nullptr, c.world_size - 1};
  }

  // The last rank's piece moves to `own`; what the pieces hold in its place is garbage.
  void use_own() {
    const auto size = static_cast<size_t>(op.numel * itemsize(op.piece_dtype));
    uint8_t* const place = pieces.as<uint8_t>() + static_cast<size_t>(op.own_rank) * size;
    own.assign(place, place + size);
    std::fill(place, place + size, uint8_t{0x77});
    op.own = own.data();
  }

  Buffer pieces, out;
  std::vector<uint8_t> own;
  std::vector<uint8_t> initial;
  OrderedSum op;
};

// The definition, element by element.
inline std::vector<uint8_t> definition(ReduceProblem& problem) {
  problem.out.set_bytes(problem.initial);
  const OrderedSum& op = problem.op;
  for (int64_t i = 0; i < op.numel; ++i) {
    volatile float sum = load_as_f32(op.pieces, op.piece_dtype, i);  // volatile: each addition rounded to float32
    for (int64_t rank = 1; rank < op.world_size; ++rank)
      sum = sum + load_as_f32(op.pieces, op.piece_dtype, rank * op.numel + i);
    volatile float result = static_cast<float>(static_cast<double>(sum) * op.scale);
    if (op.accumulate) result = load_as_f32(op.out, op.out_dtype, i) + result;
    store_from_f32(op.out, op.out_dtype, i, result);
  }
  return problem.out.bytes();
}

inline std::vector<SumCase> sum_cases(const std::vector<int64_t>& numels) {
  std::vector<SumCase> list;
  for (const DType pieces : kDTypes) {
    for (const DType out : {DType::f32, DType::bf16}) {
      for (const bool accumulate : {false, true}) {
        for (const int64_t world_size : {1, 2, 5}) {
          for (const int64_t numel : numels) {
            for (const int64_t misalign : {0, 1}) {
              const bool own = std::popcount(list.size()) % 2 == 0;  // in turns that no loop above has
              list.push_back({numel, world_size, pieces, out, accumulate, misalign, own, list.size() % 3 ? 0.3 : 1.0});
            }
          }
        }
      }
    }
  }
  return list;
}

}  // namespace shardcore::testing
