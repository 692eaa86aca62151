// The CUDA backend of the cpu tier over a fake runtime on host threads: hand-over between streams, who owns events, ends.
#include "copy/copy_cuda.cu"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <functional>
#include <thread>

#include "copy/host_memory.h"
#include "copy/host_tier.h"
#include "cpp/adam_problem.h"
#include "cpp/common.h"
#include "offload/offload_pipeline.h"

namespace shardcore::testing {
namespace {

using Values = std::vector<float>;

constexpr int64_t kSize = 1000;
constexpr int64_t kBytes = kSize * 4;

// One device with a compute stream, and a tier; at its end nothing of CUDA may be left.
class copy_cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    fake_cuda::runtime().events_made = 0;
    cudaStreamCreateWithFlags(&compute, 0);
    backend = make_cuda_backend(0);
    in = &backend->stream(Direction::to_tier);
    out = &backend->stream(Direction::from_tier);
  }
  void TearDown() override {
    fake_cuda::runtime().failing_call.clear();
    fake_cuda::runtime().streams_wait = true;
    backend.reset();
    cudaStreamDestroy(compute);
    EXPECT_EQ(fake_cuda::runtime().events, 0);
    while (fake_cuda::runtime().streams > 0) std::this_thread::yield();  // they end by themselves
    EXPECT_TRUE(fake_cuda::runtime().registered.empty());
  }

  // A kernel on the compute stream.
  void launch(std::function<void()> kernel) { compute->push(std::move(kernel)); }
  int64_t copy_in(Values& dst, const Values& src) { return in->copy(dst.data(), src.data(), kBytes, compute); }
  int64_t copy_out(Values& dst, const Values& src) { return out->copy(dst.data(), src.data(), kBytes, compute); }

  cudaStream_t compute = nullptr;
  std::unique_ptr<CopyBackend> backend;
  CopyStream* in = nullptr;
  CopyStream* out = nullptr;
};

TEST_F(copy_cuda, a_copy_comes_after_what_was_queued_before_it_and_not_after_what_came_later) {
  fake_cuda::Marker before, after;
  Values device(kSize, 0), host(kSize, -1);
  launch([&] {
    before.wait();
    device.assign(kSize, 1);
  });
  const int64_t number = copy_in(host, device);
  launch([&] { after.wait(); });
  EXPECT_EQ(in->completed(), 0);
  EXPECT_FALSE(in->query(number));
  EXPECT_EQ(in->queued(), 1);
  before.set();
  in->synchronize(number);  // though the compute stream is still busy
  EXPECT_EQ(host, Values(kSize, 1));
  EXPECT_EQ(in->completed(), 1);
  after.set();
  cudaStreamSynchronize(compute);
}

// Kernels and copies over one buffer on each side; the host waits only at the end.
float steps_without_the_host(cudaStream_t compute, CopyStream& in, CopyStream& out, bool slow) {
  Values device(kSize, 0), host(kSize, 0);
  int64_t back = 0;
  for (int round = 0; round < 30; ++round) {
    compute->push([&, slow] {
      if (slow) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      for (float& x : device) x += 1;
    });
    in.wait(in.copy(host.data(), device.data(), kBytes, compute), compute);
    compute->push([&] { device.assign(kSize, -100); });
    back = out.copy(device.data(), host.data(), kBytes, compute);
    out.wait(back, compute);
  }
  out.synchronize(back);
  in.drain(), out.drain();
  cudaStreamSynchronize(compute);
  return device[kSize - 1];
}

TEST_F(copy_cuda, streams_hand_over_without_the_host) { EXPECT_EQ(steps_without_the_host(compute, *in, *out, false), 30); }

#if !defined(__SANITIZE_THREAD__)  // the twin does race: planted_race.cpp has it
TEST_F(copy_cuda, without_the_waits_of_streams_the_values_are_wrong) {
  fake_cuda::runtime().streams_wait = false;
  EXPECT_NE(steps_without_the_host(compute, *in, *out, true), 30);
}
#endif

TEST_F(copy_cuda, events_are_used_again_and_belong_to_the_queue) {
  Values device(kSize, 3), host(kSize, 0);
  for (int i = 0; i < 500; ++i) {
    const int64_t number = copy_in(host, device);
    if (i % 4 == 3) in->synchronize(number);
  }
  EXPECT_LE(fake_cuda::runtime().events_made, 2 + 8) << "one for hand-over each way, and those of copies in flight";
  in->synchronize(1);  // long ago
  in->wait(2, compute);
  EXPECT_EQ(in->completed(), 500);
}

TEST_F(copy_cuda, threads_may_wait_while_others_queue) {
  Values device(kSize, 3);
  std::vector<Values> hosts(4, Values(kSize, 0));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < 100; ++i) {
        hosts[t].assign(kSize, 0);
        const int64_t number = copy_in(hosts[t], device);
        if (i % 2 == 0) in->completed();
        in->synchronize(number);
        ASSERT_EQ(hosts[t][kSize - 1], 3);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(in->completed(), 400);
}

TEST_F(copy_cuda, a_call_that_fails_is_reported_with_the_copy) {
  Values device(kSize, 3), host(kSize, 0);
  for (const std::string call : {"cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent", "cudaStreamIsCapturing"}) {
    fake_cuda::runtime().failing_call = call;
    try {
      copy_in(host, device);
      ADD_FAILURE() << call;
    } catch (const CopyError& error) {
      const std::string text = error.what();
      EXPECT_EQ(text.find("HostTier.to_tier: copy 1 failed: cuda: " + call), 0u) << text;
      EXPECT_NE(text.find("cudaErrorUnknown"), std::string::npos) << text;
    }
    fake_cuda::runtime().failing_call.clear();
    EXPECT_EQ(in->queued(), 0);
  }
  const int64_t number = copy_in(host, device);
  EXPECT_EQ(number, 1);
  fake_cuda::runtime().failing_call = "cudaEventSynchronize";
  EXPECT_THROW(in->synchronize(number), CopyError);
  fake_cuda::runtime().failing_call = "cudaEventQuery";
  EXPECT_EQ(in->completed(), 0);  // what failed is never over
  EXPECT_THROW(in->query(number), CopyError);
  fake_cuda::runtime().failing_call.clear();
  in->synchronize(number);
  EXPECT_TRUE(in->query(number));
}

TEST_F(copy_cuda, copies_in_a_graph_are_refused) {
  Values device(kSize, 3), host(kSize, 0);
  compute->capturing = true;
  EXPECT_THROW(copy_in(host, device), CopyError);
  compute->capturing = false;
  in->synchronize(copy_in(host, device));
}

TEST_F(copy_cuda, an_end_with_copies_in_flight_waits_for_them) {
  Values device(kSize, 3), host(kSize, 0), other(kSize, 0);
  fake_cuda::Marker before;
  launch([&] { before.wait(); });
  copy_in(host, device);
  copy_out(other, device);
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    before.set();
  });
  backend.reset();
  EXPECT_EQ(host, device);
  EXPECT_EQ(other, device);
  opener.join();
}

TEST_F(copy_cuda, exactly_the_pages_of_a_buffer_are_registered) {
  const int64_t page = mapped_bytes(1);
  HostTier tier(make_cuda_backend(0), true, -1);
  void* const data = tier.allocate(5 * page + 1, true);
  void* const pageable = tier.allocate(page, false);
  EXPECT_EQ(fake_cuda::runtime().registered, (std::map<void*, size_t>{{data, static_cast<size_t>(6 * page)}}));
  fake_cuda::runtime().failing_call = "cudaHostRegister";
  void* const refused = tier.allocate(page, true);
  EXPECT_EQ(tier.bytes_refused(), page);
  EXPECT_NE(tier.pin_refusal().find("cudaHostRegister refused it: cudaErrorMemoryAllocation"), std::string::npos);
  fake_cuda::runtime().failing_call.clear();
  Values device(kSize / 4, 3);
  tier.copy(Direction::to_tier, refused, device.data(), kBytes / 4, compute);
  tier.synchronize();
  EXPECT_EQ(static_cast<float*>(refused)[kSize / 4 - 1], 3);
  for (void* const buffer : {data, pageable, refused}) tier.release(buffer);
}

// Chunks of 100 elements that lie on the device; returns what is there after a step.
std::vector<std::vector<uint8_t>> stepped_in_chunks(AdamProblem& problem, int num_threads, cudaStream_t compute) {
  problem.reset();
  const auto tier = std::make_shared<HostTier>(make_cuda_backend(3), false, -1);
  {
    std::vector<Values> places(5, Values(100, -1));
    OffloadPipeline::Step step;
    for (const AdamSegment& t : problem.segments()) {
      const size_t turn = step.chunks.size();
      OffloadSpan span{t, t.param, true, t.grad};
      span.segment.grad = places[turn % 2].data();
      span.segment.param = places[2 + turn % 3].data();
      step.chunks.push_back({{span}, static_cast<int>(turn % 3)});
    }
    const auto count = static_cast<int64_t>(step.chunks.size());
    step.update = [scalars = AdamProblem::scalars_of(various_hypers())](int64_t, const std::vector<AdamSegment>& segments,
                                                                        Executor& executor) {
      adam_cpu(segments.data(), static_cast<int64_t>(segments.size()), scalars.data(), executor);
    };
    step.stream = compute;
    OffloadPipeline steps(tier, 3);
    SerialExecutor executor;
    steps.begin(std::move(step), num_threads);
    steps.wait_updated(count, executor);
    tier->stream(Direction::from_tier).synchronize(steps.last_copy(0, count));
    steps.end();
  }
  return problem.result();
}

TEST_F(copy_cuda, steps_have_the_same_bits_and_their_thread_opens_no_other_device) {
  AdamProblem problem(std::vector<TensorSpec>(20, TensorSpec{100}), 5);
  problem.run_cpu(various_hypers());
  const auto expected = problem.result();
  cudaSetDevice(3);  // as torch does for a rank
  EXPECT_EQ(stepped_in_chunks(problem, 0, compute), expected);
  fake_cuda::runtime().opened = 0;
  EXPECT_EQ(stepped_in_chunks(problem, 2, compute), expected);
  EXPECT_EQ(fake_cuda::runtime().opened, uint64_t{1} << 3);
  cudaSetDevice(0);
}

#if !defined(__SANITIZE_THREAD__)  // TSan does not follow a fork of a program with threads
bool is_mapped(void* page) {
  unsigned char resident = 0;
  return mincore(page, static_cast<size_t>(mapped_bytes(1)), &resident) == 0;
}

TEST_F(copy_cuda, a_forked_child_has_no_pinned_pages) {
  const int64_t page = mapped_bytes(1);
  HostTier tier(make_cuda_backend(0), true, -1);
  void* const data = tier.allocate(page, true);
  fake_cuda::runtime().failing_call = "cudaHostRegister";
  void* const refused = tier.allocate(page, true);
  fake_cuda::runtime().failing_call.clear();
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    const bool gone = !is_mapped(data) && is_mapped(refused);
    const int calls = fake_cuda::runtime().calls;
    for (void* const buffer : {data, refused}) tier.release(buffer);  // nothing: another thread may have held the lock
    _exit(gone && is_mapped(refused) && fake_cuda::runtime().calls == calls ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  for (void* const buffer : {data, refused}) tier.release(buffer);
}

TEST_F(copy_cuda, a_forked_child_gets_an_error_and_calls_nothing) {
  Values device(kSize, 3), host(kSize, 0);
  const int64_t number = copy_in(host, device);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    const int calls = fake_cuda::runtime().calls;
    int refused = 0;
    for (const std::function<void()>& use :
         {std::function<void()>([&] { copy_in(host, device); }), std::function<void()>([&] { in->synchronize(number); }),
          std::function<void()>([&] { in->wait(number, compute); })}) {
      try {
        use();
      } catch (const CopyError&) {
        ++refused;
      }
    }
    in->drain();
    in->completed();
    backend.reset();
    _exit(refused == 3 && fake_cuda::runtime().calls == calls ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  in->synchronize(number);
  EXPECT_EQ(host, device);
}
#endif

}  // namespace
}  // namespace shardcore::testing
