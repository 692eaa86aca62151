// Adam over a list of tensors on the CPU: one call, split over threads by elements.
#pragma once

#include <cstdint>
#include <functional>

#include "adam/adam_scalars.h"
#include "adam/adam_segment.h"
#include "core/block_walk.h"
#include "core/macros.h"

namespace shardcore {

class Executor;

// Updates segments[0:num_segments] in place. scalars[segments[i].hyper_index] are the scalars of segment i.
// Bits do not depend on the number of threads or on the instruction set.
void adam_cpu(const AdamSegment* segments, int64_t num_segments, const AdamScalars* scalars, Executor& executor);

// Where the gradient and the weights of a segment live that only pass through memory of Adam's threads. Null: where the segment
// says.
struct AdamHome {
  const void* grad = nullptr;
  void* param = nullptr;

  bool operator==(const AdamHome& o) const { return grad == o.grad && param == o.param; }
};

// How values get from their home to a thread's place, and back; called from any threads.
struct AdamCopies {
  using Copy = std::function<void(void* dst, const void* src, int64_t size_bytes)>;
  Copy to_place, to_home;
};

// The same work as one line of 256-element blocks, for who splits it over threads himself. What the arguments point to must
// live as long. With homes and copies, those of segment i are homes[i]: piece by piece what it reads comes, is updated while it
// is in the caches, and the new weights go.
class AdamLine {
 public:
  AdamLine(const AdamSegment* segments, int64_t num_segments, const AdamScalars* scalars, const AdamHome* homes = nullptr,
           const AdamCopies* copies = nullptr);

  int64_t num_blocks() const { return walk_.num_blocks(); }
  void update(int64_t first_block, int64_t last_block) const;
  void update(Executor& executor) const;  // all

 private:
  using Span = void (*)(const AdamSegment& segment, const AdamScalars& scalars, int64_t first, int64_t last);

  void pass(const AdamSegment& segment, const AdamHome& home, int64_t first, int64_t last) const;

  const AdamSegment* segments_;
  const AdamScalars* scalars_;
  const AdamHome* homes_;
  const AdamCopies* copies_;
  const Span adam_span_;
  const BlockWalk walk_;
};

// Elements [first, last) of one segment, per instruction set (adam_cpu_loop.h).
SHARDCORE_PER_ISA(void adam_span(const AdamSegment& segment, const AdamScalars& scalars, int64_t first, int64_t last);)

}  // namespace shardcore
