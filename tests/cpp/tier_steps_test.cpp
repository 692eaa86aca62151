// Steps of the cpu tier: bits, order, waits that are left out, failures, ends in between, threads and forks.
#include "offload/tier_steps.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <string>
#include <thread>

#include "copy/copy_thread.h"
#include "core/thread_pool.h"
#include "cpp/adam_problem.h"
#include "cpp/common.h"

namespace shardcore::testing {
namespace {

// Which wait on the host of a direction returns at once: the n-th from 1, -1: every one, 0: none.
struct LeftOut {
  int to_tier = 0, from_tier = 0;
};

// The thread backend, but for waits that are left out.
class DeafBackend final : public CopyBackend {
 public:
  DeafBackend(const Simulation& simulation, LeftOut left_out)
      : inner_(make_thread_backend(simulation)),
        streams_{{inner_->stream(Direction::to_tier), left_out.to_tier},
                 {inner_->stream(Direction::from_tier), left_out.from_tier}} {}

  CopyStream& stream(Direction direction) override { return streams_[static_cast<int>(direction)]; }
  bool caller_copies() const noexcept override { return inner_->caller_copies(); }
  bool can_pin() const noexcept override { return false; }
  std::string pin(void*, int64_t) override { return ""; }
  void unpin(void*) noexcept override {}

 private:
  class DeafStream final : public CopyStream {
   public:
    DeafStream(CopyStream& inner, int left_out) : inner_(inner), left_out_(left_out) {}
    int64_t copy(void* dst, const void* src, int64_t size_bytes, void* stream) override {
      return inner_.copy(dst, src, size_bytes, stream);
    }
    void synchronize(int64_t number) override {
      if (++waits_ != left_out_ && left_out_ != -1) inner_.synchronize(number);
    }
    void wait(int64_t number, void* stream) override { inner_.wait(number, stream); }
    bool query(int64_t number) override { return inner_.query(number); }
    int64_t completed() noexcept override { return inner_.completed(); }
    int64_t queued() const noexcept override { return inner_.queued(); }
    void drain(bool hurry) noexcept override { inner_.drain(hurry); }

   private:
    CopyStream& inner_;
    const int left_out_;
    int waits_ = 0;
  };

  const std::unique_ptr<CopyBackend> inner_;
  DeafStream streams_[2];
};

Simulation latest() {
  Simulation simulation;
  simulation.late = true;
  return simulation;
}

constexpr int kTierSteps = 3;

std::vector<AdamScalars> scalars_of_step(int step) {
  std::vector<AdamHyper> hypers = various_hypers();
  for (AdamHyper& hyper : hypers) hyper.step += step;
  return AdamProblem::scalars_of(hypers);
}

struct Form {
  int num_threads = 0;         // 0: in the waits
  bool passes = false;         // Adam's threads copy
  bool grads_come = true;      // else they lie there
  bool weights_travel = true;  // else they lie there
};

// A problem's segments, each in a chunk with the next; what travels does so between the problem's memory and places.
class Offloaded {
 public:
  explicit Offloaded(AdamProblem& problem, const Simulation& simulation = latest(), Form form = {}, LeftOut left_out = {},
                     double adam_per_second = 0)
      : form_(form),
        tier_(std::make_shared<HostTier>(std::make_unique<DeafBackend>(simulation, left_out), false, -1)),
        steps(tier_, 3, form.passes, adam_per_second) {
    const std::vector<AdamSegment>& segments = problem.segments();
    for (auto& place : places_) place.resize(size_t{4} << 16, 0xff);
    for (size_t first = 0; first < segments.size(); first += 2) {
      const auto turn = static_cast<size_t>(chunks_.size());
      TierChunk chunk;
      chunk.place = form.passes ? 0 : static_cast<int>(turn % 3);
      size_t cursor = 0;
      for (size_t i = first; i < std::min(first + 2, segments.size()); ++i) {
        TierSpan span;
        span.segment = segments[i];
        span.grad = segments[i].grad;
        span.grad_comes = form.grads_come;
        if (form.grads_come) span.segment.grad = &places_[form.passes ? 0 : turn % 2][cursor];
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
    tier_->drain(true);
  }

  int64_t count() const { return static_cast<int64_t>(chunks_.size()); }
  HostTier& tier() { return *tier_; }

  void begin(int step) {
    TierSteps::Step next;
    next.chunks = chunks_;
    next.scalars = scalars_of_step(step);
    next.weights_leave = !form_.weights_travel;
    steps.begin(std::move(next), form_.num_threads);
  }

  void run() {
    for (int step = 0; step < kTierSteps; ++step) {
      begin(step);
      steps.wait_fetched(2, executor_);
      steps.wait_updated(count(), executor_);
      tier_->stream(Direction::from_tier).wait(steps.left(0, count()), nullptr);
      steps.end();
    }
  }

  std::vector<std::string> names() const {
    std::vector<std::string> names;
    for (const TierEvent& event : steps.events()) names.emplace_back(event.what);
    return names;
  }

 private:
  const Form form_;
  const std::shared_ptr<HostTier> tier_;
  std::deque<std::vector<uint8_t>> places_{5};  // two for gradients, three for weights
  std::vector<TierChunk> chunks_;
  SerialExecutor executor_;

 public:
  TierSteps steps;  // ends before what it uses
};

std::vector<TensorSpec> specs() {
  std::vector<TensorSpec> specs = every_reduced_mix(700, 0);
  for (const DType param : {DType::f32, DType::bf16}) {
    for (const int64_t numel : {1, 256, 5000})
      specs.push_back({numel, param, DType::f32, Master::none, false, 0, 0, specs.size()});
  }
  return specs;
}

auto expected_of(AdamProblem& problem) {
  SerialExecutor executor;
  for (int step = 0; step < kTierSteps; ++step) {
    const auto scalars = scalars_of_step(step);
    adam_cpu(problem.segments().data(), static_cast<int64_t>(problem.segments().size()), scalars.data(), executor);
  }
  const auto expected = problem.result();
  problem.reset();
  return expected;
}

auto result_of(AdamProblem& problem, const Simulation& simulation, Form form, LeftOut left_out = {}) {
  {
    Offloaded offloaded(problem, simulation, form, left_out);
    offloaded.run();
  }
  const auto result = problem.result();
  problem.reset();
  return result;
}

TEST(tier_steps, every_form_has_the_bits_of_adam_where_all_lies) {
  AdamProblem problem(specs(), 1);
  const auto expected = expected_of(problem);
  for (const int num_threads : {0, 1, 3}) {
    for (const bool grads_come : {true, false}) {
      for (const bool weights_travel : {true, false}) {
        EXPECT_EQ(result_of(problem, latest(), {num_threads, false, grads_come, weights_travel}), expected);
        EXPECT_EQ(result_of(problem, {}, {num_threads, false, grads_come, weights_travel}), expected);
        EXPECT_EQ(result_of(problem, {}, {num_threads, true, grads_come, weights_travel}), expected);
      }
    }
  }
}

// Under the latest schedule that waits allow, each of them shows.
TEST(tier_steps, a_wait_that_is_left_out_changes_the_bits) {
  AdamProblem problem(specs(), 2);
  const auto expected = expected_of(problem);
  for (const int num_threads : {0, 2}) {
    EXPECT_NE(result_of(problem, latest(), {num_threads}, {5, 0}), expected) << "the chunk has come";
    EXPECT_NE(result_of(problem, latest(), {num_threads}, {0, -1}), expected) << "the place is free";
  }
}

TEST(tier_steps, what_comes_next_travels_while_adam_works) {
  AdamProblem problem(std::vector<TensorSpec>(12, TensorSpec{300}), 3);  // six chunks
  Offloaded offloaded(problem);
  SerialExecutor executor;
  offloaded.begin(0);
  offloaded.steps.wait_fetched(2, executor);
  const std::vector<std::string> fetched(8, "to_tier");  // gradients and weights of two spans in each of two chunks
  EXPECT_EQ(offloaded.names(), fetched);
  offloaded.steps.wait_updated(1, executor);
  std::vector<std::string> names = fetched;
  for (const char* name : {"to_tier.synchronize", "adam", "from_tier", "from_tier"}) names.emplace_back(name);
  EXPECT_EQ(offloaded.names(), names);
  offloaded.steps.wait_updated(6, executor);
  const std::vector<std::string> all = offloaded.names();
  const std::vector<std::string> steady{"from_tier.synchronize", "to_tier", "to_tier",   "to_tier",  "to_tier",
                                        "to_tier.synchronize",   "adam",    "from_tier", "from_tier"};
  const size_t third = names.size() + 4 + 4;  // the third chunk has a place of its own; then the second one's Adam
  for (size_t i = 0; i < 3 * steady.size(); ++i) EXPECT_EQ(all.at(third + i), steady[i % steady.size()]) << i;
  EXPECT_EQ(offloaded.steps.left(0, 6), 12);
  EXPECT_EQ(offloaded.steps.left(2, 3), 6);
  EXPECT_EQ(offloaded.steps.left(2, 2), 0);
  for (const TierEvent& event : offloaded.steps.events()) EXPECT_LE(event.begin_s, event.end_s);
}

int64_t adams(const Offloaded& offloaded) {
  int64_t count = 0;
  for (const std::string& name : offloaded.names()) count += name == "adam";
  return count;
}

TEST(tier_steps, a_thread_of_its_own_waits_for_nobody) {
  AdamProblem problem(specs(), 4);
  Offloaded offloaded(problem, {}, {2});
  offloaded.begin(0);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (adams(offloaded) < offloaded.count() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(adams(offloaded), offloaded.count());
}

TEST(tier_steps, a_step_that_is_ended_updates_no_more) {
  AdamProblem problem(specs(), 5);
  for (const int num_threads : {0, 2}) {
    Offloaded offloaded(problem, {}, {num_threads}, {}, 5e4);  // 28 ms a chunk
    SerialExecutor executor;
    offloaded.begin(0);
    offloaded.steps.wait_updated(2, executor);
    offloaded.steps.end();
    const int64_t made = adams(offloaded);
    EXPECT_GE(made, 2);
    EXPECT_LT(made, offloaded.count());
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    EXPECT_EQ(adams(offloaded), made);
    offloaded.begin(1);  // another may begin
    offloaded.steps.wait_updated(1, executor);
  }
}

TEST(tier_steps, a_step_that_is_ended_reads_no_gradient_any_more) {
  AdamProblem problem(specs(), 9);
  for (const int num_threads : {0, 2}) {
    Offloaded offloaded(problem, latest(), {num_threads});
    SerialExecutor executor;
    offloaded.begin(0);
    offloaded.steps.wait_fetched(2, executor);
    CopyStream& queue = offloaded.tier().stream(Direction::to_tier);
    offloaded.steps.end();
    EXPECT_EQ(queue.completed(), queue.queued());
  }
}

TEST(tier_steps, a_copy_that_fails_is_told_by_the_waits_from_then_on) {
  AdamProblem problem(specs(), 6);
  Simulation simulation;
  simulation.failing_copy = 20;
  for (const int num_threads : {0, 2}) {
    Offloaded offloaded(problem, simulation, {num_threads});
    SerialExecutor executor;
    for (int step = 0; step < 2; ++step) {
      offloaded.begin(step);
      EXPECT_THROW(offloaded.steps.wait_updated(offloaded.count(), executor), CopyError);
      offloaded.steps.wait_updated(adams(offloaded) - 1, executor);  // what is behind is told by whoever waits for it
      EXPECT_LT(adams(offloaded), offloaded.count());
      offloaded.steps.end();
    }
  }
}

TEST(tier_steps, nothing_to_update) {
  AdamProblem problem({}, 7);
  for (const int num_threads : {0, 2}) {
    Offloaded offloaded(problem, {}, {num_threads});
    offloaded.run();
    EXPECT_EQ(offloaded.count(), 0);
  }
}

#if !defined(__SANITIZE_THREAD__)  // which does not follow threads that a forked child starts
TEST(tier_steps, a_forked_child_has_a_thread_of_its_own) {
  AdamProblem problem(specs(), 8);
  const auto expected = expected_of(problem);
  Offloaded offloaded(problem, {}, {2});
  offloaded.run();
  EXPECT_EQ(problem.result(), expected);
  problem.reset();
  const pid_t child = fork();
  if (child == 0) {
    offloaded.run();
    _exit(problem.result() == expected ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  offloaded.run();
  EXPECT_EQ(problem.result(), expected);
}
#endif

}  // namespace
}  // namespace shardcore::testing
