// How the chunks of a step come and go: gradients and old weights to the tier, new weights from it; and what happened when.
//
// A place for weights is taken again when its last way back is done; one for gradients when Adam has worked on it, which the
// order of chunks says.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "offload/open_chunk.h"
#include "offload/tier_steps.h"

namespace shardcore {

// fetch, has_come, open and send are called by one thread at a time, and throw CopyError. Chunks are known by their numbers.
class ChunkMoves {
 public:
  // See TierSteps.
  ChunkMoves(std::shared_ptr<HostTier> tier, int places, bool passes, double adam_per_second);
  // In a forked child, in place of the parent's, whose mutex may be held for good: the same places, and no step.
  ChunkMoves(const ChunkMoves& parent);
  ChunkMoves& operator=(const ChunkMoves&) = delete;

  HostTier& tier() const { return *tier_; }

  // While nobody makes a step.
  void begin(TierSteps::Step next);
  void end() noexcept { step_ = {}; }
  int64_t count() const { return static_cast<int64_t>(step_.chunks.size()); }

  // Lets a chunk come to its places, if it has any.
  void fetch(int64_t number);
  bool has_come(int64_t number);
  // Waits until a chunk has come; what Adam works on.
  std::unique_ptr<OpenChunk> open(int64_t number);
  // Lets the weights of a chunk go, which is updated.
  void send(int64_t number, OpenChunk& chunk);

  // See TierSteps; called from any thread.
  int64_t left(int64_t first, int64_t last) const;
  std::vector<TierEvent> events() const;

 private:
  int64_t copy(Direction direction, void* dst, const void* src, int64_t size_bytes);
  AdamCopies::Copy copy_now(Direction direction) const;
  void wait_for(Direction direction, int64_t number);
  void note(const char* what, Clock::time_point begin, Clock::time_point end, int64_t amount);

  const std::shared_ptr<HostTier> tier_;
  const bool passes_;
  const double adam_per_second_;
  const AdamCopies passing_copies_;
  TierSteps::Step step_;
  std::vector<int64_t> place_left_;  // the last copy that leaves each place
  std::vector<int64_t> arrived_;     // the last copy that comes for each chunk; 0: none
  Clock::time_point adam_is_free_;   // if it is slowed

  mutable std::mutex mutex_;   // guards what follows
  std::vector<int64_t> left_;  // the last copy that leaves each chunk; 0: none
  std::vector<TierEvent> events_;
};

}  // namespace shardcore
