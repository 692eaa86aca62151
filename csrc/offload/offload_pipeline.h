// The step of the cpu tier: chunk by chunk gradients come, Adam runs, new weights go. It needs no Python from begin to end.
//
// Each chunk is fetched before the one before it is updated, so that its copies travel meanwhile. A place for weights is used
// again when its last copy from the tier is done; one for gradients when Adam is done with its chunk, which the order of chunks
// says.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "adam/adam_cpu.h"
#include "copy/host_tier.h"

namespace shardcore {

class Executor;

// A range that Adam updates in one chunk.
struct OffloadSpan {
  AdamSegment segment;         // param and, if it comes, grad: places that values are copied to
  void* weight = nullptr;      // where new weights go, and those that Adam reads come from; null: param is where they lie
  bool grad_comes = true;      // to segment.grad; else it lies in the tier already
  const void* grad = nullptr;  // of this step: where it is
};

struct OffloadChunk {
  std::vector<OffloadSpan> spans;
  int place = 0;  // the number of its places for weights
};

// What happened when, in seconds of std::chrono::steady_clock.
struct OffloadEvent {
  const char* what;
  double begin_s, end_s;
  int64_t amount;  // bytes of a copy, elements of Adam
};

// One step at a time. begin, the waits and end are called from one thread at a time.
class OffloadPipeline {
 public:
  // places: for weights.
  OffloadPipeline(std::shared_ptr<HostTier> tier, int places);
  ~OffloadPipeline();
  OffloadPipeline(const OffloadPipeline&) = delete;
  OffloadPipeline& operator=(const OffloadPipeline&) = delete;

  struct Step {
    std::vector<OffloadChunk> chunks;
    std::vector<AdamScalars> scalars;
    void* stream = nullptr;      // the compute stream that copies come after; see CopyStream
    bool weights_leave = false;  // copies of the chunks' weights may still be on their way to the device: wait for them first
  };

  // num_threads: 0: the step is made in the waits, by whoever waits, with its executor; else on a thread of its own, which
  // starts with the first such step, takes over the caller's affinity, and has a pool of so many threads, itself included.
  void begin(Step step, int num_threads);
  // Wait until so many chunks of the step are fetched, or updated and their weights on their way. Throw what went wrong before.
  void wait_fetched(int64_t count, Executor& executor);
  void wait_updated(int64_t count, Executor& executor);
  // The number of the last copy from the tier of chunks [first, last), which are updated; 0: none.
  int64_t last_copy(int64_t first, int64_t last) const;
  // Nothing of the step is done any more once this returns, and its gradients are not read; what was not yet is left out.
  // Weights may be on their way.
  void end() noexcept;

  // What the last step did so far.
  std::vector<OffloadEvent> events() const;

 private:
  struct State;

  void advance_to(const std::function<bool(const State&)>& reached, Executor& executor);
  bool is_forked() const;

  State* state_;  // leaked in a forked child, where its thread does not exist
};

}  // namespace shardcore
