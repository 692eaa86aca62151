// Kernels that lack a barrier, and copies that nobody waits for. CTest runs each under the thread sanitizer, a real thread for
// every CUDA thread, and wants the race to be caught: then the same tool also sees what the kernels' own bodies, and the steps
// that wait, would race for.
#include <atomic>
#include <cstdio>
#include <string>

#include "copy/copy_cuda.cu"
#include "cpp/cuda_kernels.h"

namespace shardcore::testing {
namespace {

// A warp writes its shared memory again, without a second barrier, while slow lanes still read it.
double missing_second_barrier() {
  std::atomic<uint32_t> sum{0};  // what is not used is not read
  HostGrid::run(
      1, 32,
      [&](int64_t, int lane, const HostBlock& block) {
        auto* const slots = block.shared<uint32_t>();
        uint32_t own = 0;
        for (uint32_t round = 0; round < 200; ++round) {
          slots[lane] = round;
          block.sync();
          for (int i = 0; i < 32; ++i) own += slots[i];
        }
        sum += own;
      },
      TeamKind::threads);
  return sum;
}

// The block reduction of the norm, and of the ordered sum.
double norm_without_barrier() {
  const std::vector<float> x(4096, 1.0f);
  return sq_norm_cuda_body<BlockWithoutSync>({{x.data(), 4096, DType::f32}}).high;
}

double ordered_sum_without_barrier() {
  const std::vector<float> pieces(8192, 1.0f);
  std::vector<float> out(4096);
  return ordered_sum_cuda_body<BlockWithoutSync>(
             {pieces.data(), DType::f32, 2, 4096, 0.5, out.data(), DType::f32, false, nullptr, 0})
      .high;
}

// Threads that happen to meet at a queue's mutex are in order: one round in a few goes unseen, so many never all do.
constexpr int kRounds = 1000;

// A step over one staging buffer: a copy in, a change, a copy out.
double step_over_copies(bool wait_for_arrival, bool wait_before_reuse) {
  const auto backend = make_thread_backend();
  CopyStream &in = backend->stream(Direction::to_tier), &out = backend->stream(Direction::from_tier);
  std::vector<float> device(1000, 1.0f), staging(1000, 0.0f);
  const auto size_bytes = static_cast<int64_t>(4 * device.size());
  for (int round = 0; round < kRounds; ++round) {
    const int64_t arrived = in.copy(staging.data(), device.data(), size_bytes, nullptr);
    if (wait_for_arrival) in.synchronize(arrived);
    for (float& x : staging) x += 1.0f;
    const int64_t back = out.copy(device.data(), staging.data(), size_bytes, nullptr);
    if (wait_before_reuse) out.synchronize(back);
  }
  in.drain(), out.drain();
  return device[0];
}

double copy_without_wait() { return step_over_copies(false, true); }
double copy_without_wait_before_reuse() { return step_over_copies(true, false); }

// Kernels and copies of the CUDA backend over one buffer, in the order of streams alone.
double step_over_streams(bool streams_wait) {
  fake_cuda::runtime().streams_wait = streams_wait;
  cudaStream_t compute = nullptr;
  cudaStreamCreateWithFlags(&compute, 0);
  auto backend = make_cuda_backend(0);
  CopyStream &in = backend->stream(Direction::to_tier), &out = backend->stream(Direction::from_tier);
  std::vector<float> device(1000, 1.0f), host(1000, 0.0f);
  const auto size_bytes = static_cast<int64_t>(4 * device.size());
  for (int round = 0; round < kRounds; ++round) {
    compute->push([&device] {
      for (float& x : device) x += 1.0f;
    });
    in.wait(in.copy(host.data(), device.data(), size_bytes, compute), compute);
    out.wait(out.copy(device.data(), host.data(), size_bytes, compute), compute);
  }
  backend.reset();
  cudaStreamSynchronize(compute);
  cudaStreamDestroy(compute);
  return device[0];
}

double copy_without_hand_over() { return step_over_streams(false); }

// Nothing is missing here: no race may be reported.
double copies_on_streams() { return step_over_streams(true); }

double copies() { return step_over_copies(true, true); }

double norm() {
  const std::vector<float> x(4096, 1.0f);
  return sq_norm_cuda_body({{x.data(), 4096, DType::f32}}).high;
}

}  // namespace
}  // namespace shardcore::testing

int main(int count, char** arguments) {
  using namespace shardcore::testing;
  const std::string name = count > 1 ? arguments[1] : "";
  for (const auto& [known, run] :
       {std::pair{"second_barrier", &missing_second_barrier}, std::pair{"norm", &norm_without_barrier},
        std::pair{"ordered_sum", &ordered_sum_without_barrier}, std::pair{"copy", &copy_without_wait},
        std::pair{"copy_reuse", &copy_without_wait_before_reuse}, std::pair{"copy_hand_over", &copy_without_hand_over},
        std::pair{"none", &norm}, std::pair{"none_copy_streams", &copies_on_streams}, std::pair{"none_copy", &copies}}) {
    if (name != known) continue;
    std::printf("%g\n", run());
    return 0;
  }
  std::fprintf(stderr, "planted_race: argument has '%s'; expected a name in main()\n", name.c_str());
  return 2;
}
