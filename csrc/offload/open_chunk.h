// A chunk of a step that Adam works on, part by part, in order.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "offload/tier_steps.h"

namespace shardcore {

using Clock = std::chrono::steady_clock;

// What the arguments point to must live as long. passing: how values pass through Adam's threads; null: they lie in places.
struct OpenChunk {
  std::vector<AdamSegment> segments;
  std::vector<AdamHome> homes;
  std::unique_ptr<const AdamLine> line;
  int64_t taken = 0, done = 0;  // blocks
  int64_t numel = 0;
  Clock::time_point begin = Clock::now(), end = begin;

  OpenChunk(const TierChunk& chunk, const std::vector<AdamScalars>& scalars, const AdamCopies* passing) {
    for (const TierSpan& span : chunk.spans) {
      segments.push_back(span.segment);
      if (!span.grad_comes) segments.back().grad = span.grad;
      homes.push_back({span.grad_comes ? span.grad : nullptr, span.weight});
      numel += span.segment.numel;
    }
    line = std::make_unique<const AdamLine>(segments.data(), static_cast<int64_t>(segments.size()), scalars.data(),
                                            passing == nullptr ? nullptr : homes.data(), passing);
  }

  bool is_taken() const { return taken == line->num_blocks(); }
  bool is_done() const { return done == line->num_blocks(); }
};

}  // namespace shardcore
