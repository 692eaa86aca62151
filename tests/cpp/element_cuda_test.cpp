// The CUDA kernel of SGD, Adagrad, Lion and casts on the host: the CPU's bits, nothing else touched.
#include <array>

#include "core/executor.h"
#include "cpp/cuda_kernels.h"
#include "elementwise/element_cpu.h"

namespace shardcore::testing {
namespace {

struct ElementProblem {
  ElementSegment t{};
  std::vector<Buffer> buffers;  // weight, gradient, state, master

  // of: the dtypes of weight, gradient and state.
  ElementProblem(int64_t numel, int64_t misalign, const std::array<DType, 3>& of, bool master) {
    t.numel = numel;
    t.param_dtype = of[0], t.grad_dtype = of[1], t.state_dtype = of[2];
    const DType dtypes[] = {of[0], of[1], of[2], DType::f32};
    Random random(static_cast<uint32_t>(numel + misalign));
    for (int i = 0; i < 4; ++i) {
      buffers.emplace_back(numel * itemsize(dtypes[i]), misalign * itemsize(dtypes[i]));
      for (int64_t k = 0; k < numel; ++k) store_from_f32(buffers[i].data(), dtypes[i], k, random.with_specials());
    }
    t.param = buffers[0].data(), t.grad = buffers[1].data(), t.state = buffers[2].data();
    if (master) t.master = buffers[3].as<float>();
  }

  std::vector<std::vector<uint8_t>> bytes() {
    canonicalize_nans(t.param, t.param_dtype, t.numel);
    if (t.state != nullptr) canonicalize_nans(t.state, t.state_dtype, t.numel);
    if (t.master != nullptr) canonicalize_nans(t.master, DType::f32, t.numel);
    std::vector<std::vector<uint8_t>> all;
    for (Buffer& buffer : buffers) all.push_back(buffer.bytes());
    return all;
  }
};

ElementScalars scalars_of(Formula formula, float l2) {
  return {formula, 0.6f, l2, 0.9f, -0.05f, 0.8f, 0.2f, 0.97f, 0.03f, 1e-6f};
}

class ElementCuda : public ::testing::TestWithParam<Formula> {};

TEST_P(ElementCuda, has_the_cpu_bits_for_every_dtype_size_and_alignment) {
  std::vector<std::array<DType, 3>> mixes;
  for (const DType param : kDTypes) {
    for (const DType grad : kDTypes) mixes.push_back({param, grad, mixes.size() % 2 == 0 ? DType::f32 : param});
  }
  const bool cast = GetParam() == Formula::assign;
  const bool stateless = cast || GetParam() == Formula::sgd;
  for (size_t number = 0; number < 4 * mixes.size(); ++number) {  // aligned with and without a master, else by turns
    const auto& mix = mixes[number / 4];
    const int64_t misalign = std::array<int64_t, 4>{0, 0, 1, 4}[number % 4];
    const bool master = !cast && (number + number / 4) % 2 != 0;
    for (const int64_t numel : {int64_t{0}, int64_t{1}, int64_t{9}, int64_t{2055}, kElementChunk + 13}) {
      if (kThreadSanitizer && (misalign > 1 || numel != 2055)) continue;
      const ElementScalars scalars = scalars_of(GetParam(), misalign == 1 && !cast ? 0.1f : 0.0f);
      ElementProblem cpu(numel, misalign, mix, master), cuda(numel, misalign, mix, master);
      if (stateless) cpu.t.state = cuda.t.state = nullptr;
      SerialExecutor serial;
      update_elements_cpu(&cpu.t, 1, scalars, serial);
      element_cuda_body({ElementSegment{}, cuda.t}, scalars);
      ASSERT_EQ(cuda.bytes(), cpu.bytes()) << numel << " elements, misaligned by " << misalign;
      for (Buffer& buffer : cuda.buffers) ASSERT_TRUE(buffer.sentinels_intact());
      if (numel != 2055) continue;
      ElementProblem twin(numel, misalign, mix, master);
      if (stateless) twin.t.state = nullptr;
      --twin.t.numel;  // a dropped element must show
      element_cuda_body({twin.t}, scalars);
      ++twin.t.numel;
      ASSERT_NE(twin.bytes(), cpu.bytes());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(element_cuda, ElementCuda,
                         ::testing::Values(Formula::sgd, Formula::momentum, Formula::nesterov, Formula::adagrad, Formula::lion,
                                           Formula::assign));

}  // namespace
}  // namespace shardcore::testing
