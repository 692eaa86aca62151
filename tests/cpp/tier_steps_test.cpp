// Steps of the cpu tier: bits, order, waits that are left out, failures, ends in between, threads and forks.
#include "offload/tier_steps.h"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <mutex>
#include <set>
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

// Chunks of several parts, so that threads are at two of them at once.
TEST(tier_steps, threads_that_share_chunks_have_the_bits_of_one) {
  std::vector<TensorSpec> specs;
  for (const int64_t numel : {70'000, 1, 200'000, 65'536, 65'537, 300, 131'072, 90'000}) {
    const auto number = specs.size();
    const bool is_bf16 = number % 2 != 0;
    specs.push_back(
        {numel, is_bf16 ? DType::bf16 : DType::f32, DType::f32, is_bf16 ? Master::f32 : Master::none, false, 0, 0, number});
  }
  AdamProblem problem(specs, 10);
  const auto expected = expected_of(problem);
  for (const int num_threads : {1, 2, 5}) {
    for (const bool grads_come : {true, false}) {
      EXPECT_EQ(result_of(problem, {}, {num_threads, false, grads_come, true}), expected);
      EXPECT_EQ(result_of(problem, latest(), {num_threads, false, grads_come, true}), expected);
      EXPECT_EQ(result_of(problem, {}, {num_threads, true, grads_come, true}), expected);
    }
  }
}

// Nothing of it comes, so that every chunk can be opened at once.
TensorSpec at_home(int64_t numel) { return {numel, DType::bf16, DType::f32, Master::f32}; }
constexpr bool kGradsAreThere = false;

#if !defined(__SANITIZE_THREAD__)  // which would tell that the test looks at a moment while Adam writes it
TEST(tier_steps, the_next_chunk_is_updated_while_one_is_sent) {
  AdamProblem problem(std::vector<TensorSpec>(4, at_home(300)), 11);  // two chunks
  const auto* const moment = static_cast<const volatile float*>(problem.segments()[2].exp_avg);
  const float before = *moment;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  bool is_first = true, is_updated = false;  // of the first weights to leave; one thread at a time sends
  Hooks hooks;
  hooks.leaving = [&] {
    if (!std::exchange(is_first, false)) return;
    while (!(is_updated = *moment != before) && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  };
  Offloaded offloaded(problem, {}, {2, false, kGradsAreThere}, {}, 0, hooks);
  SerialExecutor executor;
  offloaded.begin(0);
  offloaded.steps.wait_updated(1, executor);
  EXPECT_TRUE(is_updated);
}
#endif

// Also where they copy: each in memory of its own, so that no chunk has to end for all before the next one begins.
TEST(tier_steps, threads_that_copy_go_on_where_a_chunk_ends) {
  AdamProblem problem(std::vector<TensorSpec>(8, TensorSpec{150'000}), 15);  // four chunks of five parts
  Offloaded offloaded(problem, {}, {2, true});
  const auto one_begins_early = [&] {
    double end = 0;
    for (const TierEvent& event : offloaded.steps.events()) {
      if (std::string(event.what) == "adam" && event.begin_s < std::exchange(end, event.end_s)) return true;
    }
    return false;
  };
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!one_begins_early() && std::chrono::steady_clock::now() < deadline) offloaded.run();
  EXPECT_TRUE(one_begins_early());
}

// Under the latest schedule that waits allow, each of them shows.
TEST(tier_steps, a_wait_that_is_left_out_changes_the_bits) {
  AdamProblem problem(specs(), 2);
  const auto expected = expected_of(problem);
  for (const int num_threads : {0, 1}) {  // with more, what is left out is a data race, too
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

// The second chunk is open by then, but not begun.
TEST(tier_steps, nothing_is_begun_after_a_copy_that_fails) {
  AdamProblem problem(std::vector<TensorSpec>(4, at_home(300)), 12);
  const auto* const moment = static_cast<const float*>(problem.segments()[2].exp_avg);
  const float before = *moment;
  Hooks hooks;
  hooks.leaving = [] { throw CopyError("planted"); };
  Offloaded offloaded(problem, {}, {1, false, kGradsAreThere}, {}, 0, hooks);
  SerialExecutor executor;
  offloaded.begin(0);
  EXPECT_THROW(offloaded.steps.wait_updated(1, executor), CopyError);
  offloaded.steps.end();
  EXPECT_EQ(*moment, before);
}

TEST(tier_steps, every_thread_enters_before_it_lets_weights_go) {
  AdamProblem problem(std::vector<TensorSpec>(6, TensorSpec{100'000}), 13);
  static thread_local bool entered = false;
  std::mutex mutex;
  std::set<std::thread::id> senders;
  int strangers = 0;
  Hooks hooks;
  hooks.entering = [] { entered = true; };
  hooks.leaving = [&] {
    const std::lock_guard<std::mutex> lock(mutex);
    senders.insert(std::this_thread::get_id());
    strangers += entered ? 0 : 1;
  };
  Offloaded offloaded(problem, {}, {3}, {}, 0, hooks);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (senders.size() < 2 && std::chrono::steady_clock::now() < deadline) offloaded.run();
  EXPECT_GE(senders.size(), 2U);
  EXPECT_EQ(strangers, 0);
}

TEST(tier_steps, a_slowed_adam_works_on_one_chunk_at_a_time) {
  AdamProblem problem(specs(), 14);
  const double rate = 1e6;
  Offloaded offloaded(problem, {}, {3}, {}, rate);
  SerialExecutor executor;
  offloaded.begin(0);
  offloaded.steps.wait_updated(offloaded.count(), executor);
  double free = 0;
  for (const TierEvent& event : offloaded.steps.events()) {
    if (std::string(event.what) != "adam") continue;
    EXPECT_GE(event.begin_s, free);
    EXPECT_GE(event.end_s - event.begin_s, 0.999 * static_cast<double>(event.amount) / rate);
    free = event.end_s;
  }
  EXPECT_GT(free, 0);
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
