// Kernels that lack a barrier. CTest runs each under the thread sanitizer, a real thread for every CUDA thread, and wants the
// race to be caught: then the same tool also sees what the kernels' own bodies would race for.
#include <atomic>
#include <cstdio>
#include <string>

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

// Nothing is missing here: no race may be reported.
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
        std::pair{"ordered_sum", &ordered_sum_without_barrier}, std::pair{"none", &norm}}) {
    if (name != known) continue;
    std::printf("%g\n", run());
    return 0;
  }
  std::fprintf(stderr, "planted_race: argument has '%s'; expected second_barrier, norm, ordered_sum or none\n", name.c_str());
  return 2;
}
