// The cast's CUDA kernel on the host: the CPU's bits, nothing else touched.
#include "core/executor.h"
#include "cpp/cuda_kernels.h"

namespace shardcore::testing {
namespace {

TEST(cast_cuda, has_the_cpu_bits_for_every_pair_of_dtypes_size_and_alignment) {
  for (const DType from : kDTypes) {
    for (const DType to : kDTypes) {
      for (const int64_t misalign : {0, 1, 4}) {
        for (const int64_t numel : {int64_t{0}, int64_t{1}, int64_t{9}, int64_t{2055}, kCastChunk, kCastChunk + 13}) {
          Random random(static_cast<uint32_t>(numel + misalign));
          Buffer src(numel * itemsize(from), misalign * itemsize(from));
          Buffer dst(numel * itemsize(to), (misalign == 4 ? 0 : misalign) * itemsize(to));
          for (int64_t i = 0; i < numel; ++i) store_from_f32(src.data(), from, i, random.with_specials());
          const auto initial = dst.bytes();
          const CastSegment t{dst.data(), src.data(), numel, to, from};
          SerialExecutor serial;
          cast_cpu(&t, 1, serial);
          canonicalize_nans(dst.data(), to, numel);
          const auto want = dst.bytes();
          dst.set_bytes(initial);
          cast_cuda_body({{nullptr, nullptr, 0, to, from}, t});
          canonicalize_nans(dst.data(), to, numel);
          ASSERT_EQ(dst.bytes(), want) << numel << " elements, misaligned by " << misalign;
          ASSERT_TRUE(dst.sentinels_intact());
          if (numel == 0) continue;
          dst.set_bytes(initial);  // a dropped element must show
          CastSegment shorter = t;
          --shorter.numel;
          cast_cuda_body({shorter});
          canonicalize_nans(dst.data(), to, numel);
          ASSERT_TRUE(dst.bytes() != want ||
                      std::equal(initial.end() - itemsize(to), initial.end(), want.end() - itemsize(to)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardcore::testing
