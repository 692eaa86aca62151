// The step of the cpu tier, chunk by chunk: copy gradients in, update, copy new weights out. The caller says what updates a
// chunk: a kernel, which needs no Python from begin to end, or a function that calls Python.
//
// Each chunk is fetched before the one before it is updated, so that its copies overlap that update. A place for weights is
// used again when its last copy from the tier is done; one for gradients when its chunk is updated, which the order of chunks
// ensures.
//
// Gradients that are copied to the tier outside of the step may be on their way when it begins: each chunk waits for its own
// alone. Where nothing else is copied in, and the order is free, chunks from the end are updated while the next one's gradients
// are not there: backward makes those of the last chunks first.
//
//   chunk   waiting --fetch--> fetched --update--> updated            in their order
//              `-------------update--------------> updated_from_end   any_order; it is not fetched
//   step    begin --> running --all updated, or an error--> over      the next wait throws the error
//                        `------end: abandoned------------> over      after the chunk that is being updated
//   thread  begin --> idle --running--> step --over--> idle --quit--> joined; without a thread a step runs in the waits
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "adam/adam_segment.h"
#include "copy/host_tier.h"

namespace shardcore {

class Executor;

// A range that is updated in one chunk.
struct OffloadSpan {
  AdamSegment segment;     // param and, if it is copied, grad: places that values are copied to; the rest is for `update`
  void* weight = nullptr;  // where new weights are copied to, and old ones from unless there are masters; null: param itself
  bool grad_comes = true;  // copied to segment.grad; else it is in the tier already
  const void* grad = nullptr;  // of this step: where it is
};

struct OffloadChunk {
  std::vector<OffloadSpan> spans;
  int place = 0;        // the number of its places for weights
  int64_t arrival = 0;  // of gradients in the tier: the copy to it that brings the last of them; 0: they are there
};

// Events, in seconds of std::chrono::steady_clock.
struct OffloadEvent {
  const char* what;
  double begin_s, end_s;
  int64_t amount;  // bytes of a copy, elements updated, the number of the copy that was waited for
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
    // Updates the chunk of a number: its segments, with this step's gradients. Runs where the step does.
    std::function<void(int64_t number, const std::vector<AdamSegment>& segments, Executor& executor)> update;
    void* stream = nullptr;      // the compute stream that copies begin after; see CopyStream
    bool weights_leave = false;  // copies of the chunks' weights may still be on their way to the device: wait for them first
    bool any_order = false;      // else chunks are updated in their order
  };

  // num_threads: 0: the step runs in the waits, on the waiting thread, with its executor; else on a thread of its own, which
  // starts with the first such step, takes over the caller's affinity, and has a pool of so many threads, itself included.
  void begin(Step step, int num_threads);
  // Wait until the first `count` chunks are fetched, or updated and their weights on their way. Throw what went wrong before.
  void wait_fetched(int64_t count, Executor& executor);
  void wait_updated(int64_t count, Executor& executor);
  // The number of the last copy from the tier of chunks [first, last), which are updated; 0: none.
  int64_t last_copy(int64_t first, int64_t last) const;
  // Ends the step: once this returns nothing more of it runs, and its gradients are not read; chunks not yet updated are left
  // out. Weights may be on their way.
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
