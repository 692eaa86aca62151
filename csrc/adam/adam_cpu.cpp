#include "adam/adam_cpu.h"

#include <algorithm>
#include <memory>

#include "core/cpu_isa.h"
#include "core/executor.h"
#include "core/fp_env.h"

namespace shardcore {
namespace {

constexpr int64_t kGrainBlocks =
    128;  // 32K elements, as torch has it: below that waking a second thread costs more than it brings
constexpr int64_t kPieceNumel = 64 * kBlock;  // with all its streams a third of a second-level cache of 1 MiB

// What values of a piece pass through, of each thread its own: all pieces use it, so it stays in cache. Not on the stack: those
// of OpenMP's threads may be smaller.
struct Places {
  alignas(64) char grad[kPieceNumel * sizeof(float)];
  alignas(64) char param[kPieceNumel * sizeof(float)];
};

Places& places_of_thread() {
  static thread_local const auto places = std::make_unique<Places>();
  return *places;
}

// Elements [first, first + numel) of a segment; first starts a block.
AdamSegment part_of(const AdamSegment& segment, int64_t first, int64_t numel) {
  AdamSegment part = segment;
  const auto advance = [](void*& data, int64_t size_bytes) {
    if (data != nullptr) data = static_cast<char*>(data) + size_bytes;
  };
  const auto advance_floats = [](float*& data, int64_t count) {
    if (data != nullptr) data += count;
  };
  advance(part.param, first * itemsize(part.param_dtype));
  part.grad = static_cast<const char*>(part.grad) + first * itemsize(part.grad_dtype);
  advance(part.exp_avg, first * itemsize(part.state_dtype));
  advance(part.exp_avg_sq, first * itemsize(part.state_dtype));
  advance(part.master, first * (part.master_kind == Master::split ? 2 : 4));
  advance_floats(part.max_exp_avg_sq, first);
  advance_floats(part.exp_avg_scale, first / kBlock);
  advance_floats(part.exp_avg_sq_scale, first / kBlock);
  part.first_element += first;
  part.numel = numel;
  return part;
}

}  // namespace

AdamLine::AdamLine(const AdamSegment* segments, int64_t num_segments, const AdamScalars* scalars, const AdamHome* homes,
                   const AdamCopies* copies)
    : segments_(segments),
      scalars_(scalars),
      homes_(homes),
      copies_(copies),
      adam_span_(SHARDCORE_PICK(adam_span)),
      walk_(num_segments, [segments](int64_t i) { return segments[i].numel; }) {}

void AdamLine::update(int64_t first_block, int64_t last_block) const {
  const SubnormalGuard guard;
  walk_.visit(first_block, last_block, [this](int64_t i, int64_t begin, int64_t end) {
    const AdamSegment& segment = segments_[i];
    const int64_t first = begin * kBlock, last = std::min(segment.numel, end * kBlock);
    if (homes_ == nullptr) {
      adam_span_(segment, scalars_[segment.hyper_index], first, last);
    } else {
      pass(segment, homes_[i], first, last);
    }
  });
}

void AdamLine::pass(const AdamSegment& segment, const AdamHome& home, int64_t first, int64_t last) const {
  Places& places = places_of_thread();
  for (int64_t at = first; at < last; at += kPieceNumel) {
    AdamSegment piece = part_of(segment, at, std::min(kPieceNumel, last - at));
    const int64_t grad_bytes = piece.numel * itemsize(piece.grad_dtype);
    const int64_t param_item = itemsize(piece.param_dtype), param_bytes = piece.numel * param_item;
    if (home.grad != nullptr) {
      copies_->to_place(places.grad, static_cast<const char*>(home.grad) + at * itemsize(piece.grad_dtype), grad_bytes);
      piece.grad = places.grad;
    }
    char* const param_home = home.param == nullptr ? nullptr : static_cast<char*>(home.param) + at * param_item;
    if (param_home != nullptr) {
      piece.param = places.param;
      if (piece.master_kind != Master::f32) copies_->to_place(piece.param, param_home, param_bytes);
    }
    adam_span_(piece, scalars_[piece.hyper_index], 0, piece.numel);
    if (param_home != nullptr) copies_->to_home(param_home, piece.param, param_bytes);
  }
}

void AdamLine::update(Executor& executor) const {
  executor.parallel_for(0, num_blocks(), kGrainBlocks, [this](int64_t first, int64_t last) { update(first, last); });
}

void adam_cpu(const AdamSegment* segments, int64_t num_segments, const AdamScalars* scalars, Executor& executor) {
  AdamLine(segments, num_segments, scalars).update(executor);
}

}  // namespace shardcore
