// Steps of the cpu tier: bits, order, waits that are left out, failures, ends in between, threads and forks.
#include "offload/offload_pipeline.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include "cpp/common.h"
#include "cpp/offloaded_problem.h"

namespace shardcore::testing {
namespace {

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
  for (int step = 0; step < kSteps; ++step) {
    const auto scalars = scalars_of_step(step);
    adam_cpu(problem.segments().data(), static_cast<int64_t>(problem.segments().size()), scalars.data(), executor);
  }
  const auto expected = problem.result();
  problem.reset();
  return expected;
}

auto result_of(AdamProblem& problem, std::unique_ptr<CopyBackend> backend, Form form, LeftOut left_out = {}) {
  {
    Offloaded offloaded(problem, std::move(backend), form, left_out);
    offloaded.run();
  }
  const auto result = problem.result();
  problem.reset();
  return result;
}

TEST(offload_pipeline, every_form_has_the_bits_of_adam_where_all_lies) {
  AdamProblem problem(specs(), 1);
  const auto expected = expected_of(problem);
  for (const int num_threads : {0, 1, 3}) {
    for (const bool grads_come : {true, false}) {
      for (const bool weights_travel : {true, false}) {
        EXPECT_EQ(result_of(problem, latest(), {num_threads, grads_come, weights_travel}), expected);
        EXPECT_EQ(result_of(problem, soonest(), {num_threads, grads_come, weights_travel}), expected);
      }
    }
    for (const bool weights_travel : {true, false}) {
      EXPECT_EQ(result_of(problem, latest(), {num_threads, false, weights_travel, true}), expected);
      EXPECT_EQ(result_of(problem, soonest(), {num_threads, false, weights_travel, true}), expected);
    }
  }
}

// Under the latest schedule that waits allow, each of them shows.
TEST(offload_pipeline, a_wait_that_is_left_out_changes_the_bits) {
  AdamProblem problem(specs(), 2);
  const auto expected = expected_of(problem);
  for (const int num_threads : {0, 1}) {  // with more, what is left out is a data race, too
    EXPECT_NE(result_of(problem, latest(), {num_threads}, {5, 0}), expected) << "the chunk has come";
    EXPECT_NE(result_of(problem, latest(), {num_threads}, {0, -1}), expected) << "the place is free";
    EXPECT_NE(result_of(problem, latest(), {num_threads, false, false, true}, {5, 0}), expected) << "gradients are there";
  }
}

TEST(offload_pipeline, what_comes_next_travels_while_adam_works) {
  AdamProblem problem(std::vector<TensorSpec>(12, TensorSpec{300}), 3);  // six chunks
  Offloaded offloaded(problem);
  SerialExecutor executor;
  offloaded.begin(0);
  offloaded.steps.wait_fetched(2, executor);
  const std::vector<std::string> fetched(8, "to_tier");  // gradients and weights of two spans in each of two chunks
  EXPECT_EQ(offloaded.names(), fetched);
  offloaded.steps.wait_updated(1, executor);
  std::vector<std::string> names = fetched;
  for (const char* name : {"to_tier.synchronize", "update", "from_tier", "from_tier"}) names.emplace_back(name);
  EXPECT_EQ(offloaded.names(), names);
  offloaded.steps.wait_updated(6, executor);
  const std::vector<std::string> all = offloaded.names();
  const std::vector<std::string> steady{"from_tier.synchronize", "to_tier", "to_tier",   "to_tier",  "to_tier",
                                        "to_tier.synchronize",   "update",  "from_tier", "from_tier"};
  const size_t third = names.size() + 4 + 4;  // the third chunk has a place of its own; then the second one's Adam
  for (size_t i = 0; i < 3 * steady.size(); ++i) EXPECT_EQ(all.at(third + i), steady[i % steady.size()]) << i;
  EXPECT_EQ(offloaded.steps.last_copy(0, 6), 12);
  EXPECT_EQ(offloaded.steps.last_copy(2, 3), 6);
  EXPECT_EQ(offloaded.steps.last_copy(2, 2), 0);
  for (const OffloadEvent& event : offloaded.steps.events()) EXPECT_LE(event.begin_s, event.end_s);
}

TEST(offload_pipeline, adam_works_on_gradients_that_are_there_while_others_arrive) {
  TensorSpec with_master{300, DType::bf16, DType::bf16};
  with_master.master = Master::f32;
  AdamProblem problem(std::vector<TensorSpec>(12, with_master), 14);  // six chunks in three places
  const auto expected = expected_of(problem);
  EXPECT_EQ(result_of(problem, latest(), {0, false, true, true}), expected);
  EXPECT_EQ(result_of(problem, latest(), {1, false, true, true}), expected);
  Offloaded offloaded(problem, latest(), {0, false, true, true});
  SerialExecutor executor;
  offloaded.begin(0);
  offloaded.steps.wait_updated(1, executor);
  std::vector<std::string> names;
  for (const bool place_was_used : {false, false, false, true, true}) {  // the chunks 5, 4, 3 and 2, and then the first
    names.emplace_back("to_tier.synchronize");
    if (place_was_used) names.emplace_back("from_tier.synchronize");
    for (const char* name : {"update", "from_tier", "from_tier"}) names.emplace_back(name);
  }
  EXPECT_EQ(offloaded.names(), names);
  offloaded.steps.wait_updated(6, executor);
  EXPECT_EQ(offloaded.steps.last_copy(5, 6), 2) << "was updated first";
  EXPECT_EQ(offloaded.steps.last_copy(0, 1), 10);
}

int64_t adams(const Offloaded& offloaded) {
  int64_t count = 0;
  for (const std::string& name : offloaded.names()) count += name == "update";
  return count;
}

TEST(offload_pipeline, a_thread_of_its_own_waits_for_nobody) {
  AdamProblem problem(specs(), 4);
  Offloaded offloaded(problem, soonest(), {2});
  offloaded.begin(0);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (adams(offloaded) < offloaded.count() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(adams(offloaded), offloaded.count());
}

TEST(offload_pipeline, a_step_that_is_ended_updates_no_more) {
  AdamProblem problem(specs(), 5);
  for (const int num_threads : {0, 2}) {
    Offloaded offloaded(problem, make_simulated_backend({2e5}), {num_threads});  // 28 ms a chunk each way
    SerialExecutor executor;
    offloaded.begin(0);
    offloaded.steps.wait_updated(2, executor);
    offloaded.steps.end();
    const int64_t made = adams(offloaded);
    EXPECT_GE(made, 2);
    EXPECT_LT(made, offloaded.count());
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    EXPECT_EQ(adams(offloaded), made);
    offloaded.tier().drain();
    offloaded.begin(1);  // another may begin
    offloaded.steps.wait_updated(1, executor);
  }
}

TEST(offload_pipeline, a_step_that_is_ended_reads_no_gradient_any_more) {
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

TEST(offload_pipeline, a_copy_that_fails_is_told_by_the_waits_from_then_on) {
  AdamProblem problem(specs(), 6);
  for (const int num_threads : {0, 2}) {
    Offloaded offloaded(problem, make_simulated_backend({0, /*failing_copy=*/20}), {num_threads});
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

TEST(offload_pipeline, its_thread_enters_before_it_copies) {
  AdamProblem problem(specs(), 13);
  static thread_local bool entered = false;
  int strangers = 0;
  Hooks hooks;
  hooks.entering = [] { entered = true; };
  hooks.leaving = [&] { strangers += entered ? 0 : 1; };
  Offloaded offloaded(problem, soonest(), {3}, {}, hooks);
  offloaded.run();
  EXPECT_EQ(strangers, 0);
  EXPECT_FALSE(entered);
}

TEST(offload_pipeline, nothing_to_update) {
  AdamProblem problem({}, 7);
  for (const int num_threads : {0, 2}) {
    Offloaded offloaded(problem, soonest(), {num_threads});
    offloaded.run();
    EXPECT_EQ(offloaded.count(), 0);
  }
}

#if !defined(__SANITIZE_THREAD__)  // which does not follow threads that a forked child starts
TEST(offload_pipeline, a_forked_child_has_a_thread_of_its_own) {
  AdamProblem problem(specs(), 8);
  const auto expected = expected_of(problem);
  Offloaded offloaded(problem, soonest(), {2});
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
