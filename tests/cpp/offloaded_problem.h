// A problem of Adam whose steps OffloadPipeline makes, over a tier whose waits can be left out and whose copies can be watched.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cpp/adam_problem.h"
#include "cpp/simulated_copies.h"
#include "offload/offload_pipeline.h"

namespace shardcore::testing {

// Which wait on the host of a direction returns at once: the n-th from 1, -1: every one, 0: none.
struct LeftOut {
  int to_tier = 0, from_tier = 0;
};

// What a thread calls first, and before weights leave.
struct Hooks {
  std::function<void()> entering = [] {}, leaving = [] {};
};

// A simulated backend, by default that of threads, but for waits that are left out, and for hooks.
class DeafBackend final : public CopyBackend {
 public:
  DeafBackend(std::unique_ptr<CopyBackend> inner, LeftOut left_out, const Hooks& hooks)
      : inner_(std::move(inner)),
        entering_(hooks.entering),
        streams_{{inner_->stream(Direction::to_tier), left_out.to_tier, [] {}},
                 {inner_->stream(Direction::from_tier), left_out.from_tier, hooks.leaving}} {}

  CopyStream& stream(Direction direction) override { return streams_[static_cast<int>(direction)]; }
  void enter_thread() override { entering_(); }

 private:
  class DeafStream final : public CopyStream {
   public:
    DeafStream(CopyStream& inner, int left_out, const std::function<void()>& copying)
        : inner_(inner), left_out_(left_out), copying_(copying) {}
    int64_t copy(void* dst, const void* src, int64_t size_bytes, void* stream) override {
      copying_();
      return inner_.copy(dst, src, size_bytes, stream);
    }
    void synchronize(int64_t number) override {
      if (++waits_ != left_out_ && left_out_ != -1) inner_.synchronize(number);
    }
    void wait(int64_t number, void* stream) override { inner_.wait(number, stream); }
    bool query(int64_t number) override { return inner_.query(number); }
    int64_t completed() noexcept override { return inner_.completed(); }
    int64_t queued() const noexcept override { return inner_.queued(); }
    void drain() noexcept override { inner_.drain(); }

   private:
    CopyStream& inner_;
    const int left_out_;
    const std::function<void()> copying_;
    int waits_ = 0;
  };

  const std::unique_ptr<CopyBackend> inner_;
  const std::function<void()> entering_;
  DeafStream streams_[2];
};

// Copies by threads, as soon as they can; or as late as waits allow.
inline std::unique_ptr<CopyBackend> soonest() { return make_thread_backend(); }
inline std::unique_ptr<CopyBackend> latest() { return make_simulated_backend({0, 0, /*late=*/true}); }

constexpr int kSteps = 3;

inline std::vector<AdamScalars> scalars_of_step(int step) {
  std::vector<AdamHyper> hypers = various_hypers();
  for (AdamHyper& hyper : hypers) hyper.step += step;
  return AdamProblem::scalars_of(hypers);
}

struct Form {
  int num_threads = 0;         // 0: in the waits
  bool grads_come = true;      // else they lie there
  bool weights_travel = true;  // else they lie there
  bool grads_arrive = false;   // they are on their way there when a step begins, those of the last chunk first
};

// A problem's segments, each in a chunk with the next; what travels does so between the problem's memory and places.
class Offloaded {
 public:
  explicit Offloaded(AdamProblem& problem, std::unique_ptr<CopyBackend> backend = latest(), Form form = {},
                     LeftOut left_out = {}, const Hooks& hooks = {})
      : form_(form),
        tier_(std::make_shared<HostTier>(std::make_unique<DeafBackend>(std::move(backend), left_out, hooks), false, -1)),
        steps(tier_, 3) {
    const std::vector<AdamSegment>& segments = problem.segments();
    for (auto& place : places_) place.resize(size_t{4} << 19, 0xff);
    for (size_t first = 0; first < segments.size(); first += 2) {
      const auto turn = static_cast<size_t>(chunks_.size());
      OffloadChunk chunk;
      chunk.place = static_cast<int>(turn % 3);
      size_t cursor = 0;
      for (size_t i = first; i < std::min(first + 2, segments.size()); ++i) {
        OffloadSpan span;
        span.segment = segments[i];
        span.grad = segments[i].grad;
        span.grad_comes = form.grads_come;
        if (form.grads_come) span.segment.grad = &places_[turn % 2][cursor];
        if (form.weights_travel) {
          span.weight = segments[i].param;
          span.segment.param = &places_[2 + static_cast<size_t>(chunk.place)][cursor];
        }
        span.segment.aligned16 = false;
        cursor += static_cast<size_t>(4 * segments[i].numel);
        chunk.spans.push_back(span);
      }
      chunks_.push_back(chunk);
    }
  }
  ~Offloaded() {
    steps.end();
    tier_->drain();
  }

  int64_t count() const { return static_cast<int64_t>(chunks_.size()); }
  HostTier& tier() { return *tier_; }

  void begin(int step) {
    OffloadPipeline::Step next;
    next.chunks = chunks_;
    next.update = [scalars = scalars_of_step(step)](int64_t, const std::vector<AdamSegment>& segments, Executor& executor) {
      adam_cpu(segments.data(), static_cast<int64_t>(segments.size()), scalars.data(), executor);
    };
    next.weights_leave = !form_.weights_travel;
    next.any_order = true;
    if (form_.grads_arrive) send_gradients(next.chunks);
    steps.begin(std::move(next), form_.num_threads);
  }

  void run() {
    for (int step = 0; step < kSteps; ++step) {
      begin(step);
      steps.wait_fetched(2, executor_);
      steps.wait_updated(count(), executor_);
      tier_->stream(Direction::from_tier).wait(steps.last_copy(0, count()), nullptr);
      steps.end();
    }
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const OffloadEvent& event : steps.events()) names.emplace_back(event.what);
    return names;
  }

 private:
  void send_gradients(std::vector<OffloadChunk>& chunks) {
    sent_.clear();
    for (auto chunk = chunks.rbegin(); chunk != chunks.rend(); ++chunk) {
      for (const OffloadSpan& span : chunk->spans) {
        const int64_t size_bytes = span.segment.numel * itemsize(span.segment.grad_dtype);
        auto* const grad = static_cast<uint8_t*>(const_cast<void*>(span.grad));
        sent_.emplace_back(grad, grad + size_bytes);
        std::fill(grad, grad + size_bytes, uint8_t{0});
        chunk->arrival = tier_->copy(Direction::to_tier, grad, sent_.back().data(), size_bytes, nullptr);
      }
    }
  }

  const Form form_;
  const std::shared_ptr<HostTier> tier_;
  std::deque<std::vector<uint8_t>> places_{5};  // two for gradients, three for weights
  std::deque<std::vector<uint8_t>> sent_;       // gradients of the last step
  std::vector<OffloadChunk> chunks_;
  SerialExecutor executor_;

 public:
  OffloadPipeline steps;  // ends before what it uses
};

}  // namespace shardcore::testing
