// The CPU path: every instruction set, thread count, size, alignment and dtype mix gives the same bits, and touches nothing
// else.
#include <sys/mman.h>

#include "core/thread_pool.h"
#include "cpp/adam_problem.h"

#if SHARDCORE_X86
#include <xmmintrin.h>
#endif

namespace shardcore::testing {
namespace {

// Sizes around vector widths (up to 16 floats), unrolled loops and the tile.
std::vector<int64_t> sizes() {
  std::vector<int64_t> list;
  for (int64_t n = 0; n <= 2 * 16 + 3; ++n) list.push_back(n);
  for (const int64_t n : {63, 64, 65, 127, 255, 256, 257, 511, 512, 513, 1000}) list.push_back(n);
  return list;
}

// One element at a time, by the formula and the scalar conversions: what every path must equal.
void run_reference(AdamProblem& problem, const std::vector<AdamHyper>& hypers) {
  const std::vector<AdamScalars> scalars = AdamProblem::scalars_of(hypers);
  for (AdamSegment& t : problem.segments()) {
    const AdamScalars& s = scalars[static_cast<size_t>(t.hyper_index)];
    for (int64_t i = 0; i < t.numel; ++i) {
      float p = t.master ? t.master[i] : load_as_f32(t.param, t.param_dtype, i);
      const float g = load_as_f32(t.grad, t.grad_dtype, i);
      float* const vmax = t.max_exp_avg_sq ? t.max_exp_avg_sq + i : nullptr;
      if (s.l2 != 0.0f) {
        vmax ? adam_element<true, true>(s, g, p, t.exp_avg[i], t.exp_avg_sq[i], vmax)
             : adam_element<true, false>(s, g, p, t.exp_avg[i], t.exp_avg_sq[i], vmax);
      } else {
        vmax ? adam_element<false, true>(s, g, p, t.exp_avg[i], t.exp_avg_sq[i], vmax)
             : adam_element<false, false>(s, g, p, t.exp_avg[i], t.exp_avg_sq[i], vmax);
      }
      if (t.master) t.master[i] = p;
      if (s.stochastic_rounding && !t.master && t.param_dtype == DType::bf16) {
        const int64_t element = t.first_element + i;
        const uint64_t key = rounding_block_key(child_key(s.random_key, t.param_index), element);
        static_cast<uint16_t*>(t.param)[i] = f32_to_bf16_stochastic(p, key, element);
      } else {
        store_from_f32(t.param, t.param_dtype, i, p);
      }
    }
  }
}

// Every mix of dtypes, master, amsgrad and hyper for one size and misalignment.
std::vector<TensorSpec> every_mix(int64_t numel, int64_t misalign) {
  std::vector<TensorSpec> specs;
  for (const DType param : kDTypes) {
    for (const DType grad : kDTypes) {
      for (const bool master : {false, true}) {
        for (const bool amsgrad : {false, true}) {
          for (int32_t hyper = 0; hyper < 4; ++hyper) {
            specs.push_back({numel, param, grad, master, amsgrad, misalign, hyper, specs.size(), 100 * numel});
          }
        }
      }
    }
  }
  return specs;
}

TEST(adam_cpu, every_mix_size_and_alignment_has_the_reference_bits_on_every_isa) {
  for (const int64_t misalign : {0, 1, 3}) {
    for (const int64_t numel : sizes()) {
      AdamProblem problem(every_mix(numel, misalign), static_cast<uint32_t>(numel * 7 + misalign));
      run_reference(problem, various_hypers());
      const auto want = problem.result();
      for_each_isa([&](const std::string&) {
        problem.reset();
        problem.run_cpu(various_hypers());
        ASSERT_EQ(problem.result(), want) << numel << " elements, misaligned by " << misalign;
      });
    }
  }
}

TEST(adam_cpu, special_values_have_the_reference_bits_on_every_isa) {
  AdamProblem problem(every_mix(300, 1), 30, AdamProblem::Values::with_specials);
  run_reference(problem, various_hypers());
  const auto want = problem.result();
  for_each_isa([&](const std::string&) {
    problem.reset();
    problem.run_cpu(various_hypers());
    ASSERT_EQ(problem.result(), want);
  });
}

// The bits themselves, for every machine: inputs are made with integers only, NaN does not occur. If this hash changes, the
// arithmetic changed, and weights trained before cannot be continued to the same bits.
TEST(adam_cpu, the_hash_of_a_fixed_problem_is_the_same_on_every_architecture) {
  AdamProblem problem(every_mix(600, 0), 36);
  uint32_t state = 1;
  const auto next = [&] {  // a number in [-2, 2) with 16 bits
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state >> 16) - 32768) / 16384.0f;
  };
  for (AdamSegment& t : problem.segments()) {
    for (int64_t i = 0; i < t.numel; ++i) {
      store_from_f32(t.param, t.param_dtype, i, next());
      store_from_f32(const_cast<void*>(t.grad), t.grad_dtype, i, next());
      t.exp_avg[i] = next() / 4;
      t.exp_avg_sq[i] = std::fabs(next()) / 4;
      if (t.master) t.master[i] = next();
      if (t.max_exp_avg_sq) t.max_exp_avg_sq[i] = std::fabs(next()) / 4;
    }
  }
  problem.run_cpu(various_hypers());
  uint64_t hash = 0xcbf29ce484222325ull;  // FNV-1a
  for (const auto& bytes : problem.result()) {
    for (const uint8_t byte : bytes) hash = (hash ^ byte) * 0x100000001b3ull;
  }
  EXPECT_EQ(hash, 14017518963786347556ull);
}

TEST(adam_cpu, a_dropped_tail_and_a_skipped_tensor_are_rejected) {
  AdamProblem problem({{257}, {3}}, 31);
  run_reference(problem, various_hypers());
  const auto want = problem.result();
  problem.reset();
  problem.segments()[0].numel = 256;
  problem.run_cpu(various_hypers());
  EXPECT_NE(problem.result(), want);
  problem.reset();
  problem.segments()[0].numel = 257;
  problem.segments()[1].numel = 0;
  problem.run_cpu(various_hypers());
  EXPECT_NE(problem.result(), want);
}

std::vector<TensorSpec> mixed_list() {
  std::vector<TensorSpec> specs;
  Random random(32);
  for (const int64_t numel : {0, 0, 70000, 1, 0, 255, 256, 257, 0, 33, 100000, 16, 0, 5000, 0}) {
    TensorSpec spec{numel};
    spec.param = kDTypes[random.integer(3)];
    spec.grad = kDTypes[random.integer(3)];
    spec.master = random.integer(2) != 0;
    spec.amsgrad = random.integer(2) != 0;
    spec.misalign = random.integer(3);
    spec.hyper = static_cast<int32_t>(random.integer(4));
    spec.param_index = specs.size();
    specs.push_back(spec);
  }
  return specs;
}

TEST(adam_cpu, bits_do_not_depend_on_threads_and_empty_tensors_may_stand_anywhere) {
  AdamProblem problem(mixed_list(), 33);
  run_reference(problem, various_hypers());
  const auto want = problem.result();
  for_each_isa([&](const std::string&) {
    for (const int threads : {1, 2, 3, 5, 8}) {
      ThreadPool pool(threads);
      problem.reset();
      problem.run_cpu(various_hypers(), pool);
      ASSERT_EQ(problem.result(), want) << threads << " threads";
    }
  });
  AdamProblem empty({{0}, {0}}, 34);
  empty.run_cpu(various_hypers());
  AdamProblem none({}, 34);
  none.run_cpu(various_hypers());
}

#if SHARDCORE_X86
TEST(adam_cpu, flush_to_zero_of_the_caller_changes_nothing) {
  AdamProblem problem(every_mix(100, 0), 35, AdamProblem::Values::with_specials);
  problem.run_cpu(various_hypers());
  const auto want = problem.result();
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040u);
  for_each_isa([&](const std::string&) {
    problem.reset();
    problem.run_cpu(various_hypers());
    EXPECT_EQ(_mm_getcsr() & 0x8040u, 0x8040u);
    _mm_setcsr(saved);  // the test's own comparisons want subnormals
    EXPECT_EQ(problem.result(), want);
    _mm_setcsr(saved | 0x8040u);
  });
  _mm_setcsr(saved);
}
#endif

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // they shadow every mapped byte
TEST(adam_cpu, elements_beyond_2_to_the_31) {
  // Memory is reserved, and exists only where it is touched: the last elements.
  const int64_t numel = (int64_t{1} << 31) + 1000;
  const auto reserve = [&](int64_t size_bytes) {
    void* const data = mmap(nullptr, static_cast<size_t>(size_bytes), PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(data, MAP_FAILED);
    return data;
  };
  AdamSegment t{};
  t.numel = numel;
  t.param_dtype = DType::bf16;
  t.grad_dtype = DType::f32;
  t.aligned16 = true;
  t.param = reserve(numel * 2);
  t.grad = reserve(numel * 4);
  t.exp_avg = static_cast<float*>(reserve(numel * 4));
  t.exp_avg_sq = static_cast<float*>(reserve(numel * 4));
  t.master = static_cast<float*>(reserve(numel * 4));
  AdamHyper hyper;
  hyper.lr = 0.5;
  const AdamScalars s = make_adam_scalars(hyper);
  auto* const grad = const_cast<float*>(static_cast<const float*>(t.grad));
  const int64_t first = numel / kAdamChunk * kAdamChunk;
  for_each_isa([&](const std::string&) {
    for (int64_t i = first; i < numel; ++i) grad[i] = 1.0f, t.exp_avg[i] = t.exp_avg_sq[i] = t.master[i] = 0.0f;
    SHARDCORE_PICK(adam_span)(t, s, first, numel);
    for (int64_t i = first; i < numel; ++i) ASSERT_EQ(bf16_to_f32(static_cast<uint16_t*>(t.param)[i]), -0.5f) << i;
  });
  for (int64_t i = first; i < numel; ++i) t.exp_avg[i] = t.exp_avg_sq[i] = t.master[i] = 0.0f;
  const auto chunks = make_chunks(
      1, [&](int64_t) { return numel; }, kAdamChunk);
  for (int thread = 0; thread < kAdamThreads; ++thread) {
    adam_cuda_body(&t, chunks.data(), &s, static_cast<int64_t>(chunks.size()) - 1, thread);
  }
  for (int64_t i = first; i < numel; ++i) ASSERT_EQ(t.master[i], -0.5f) << i;
  munmap(t.param, static_cast<size_t>(numel * 2));
  for (void* data : {static_cast<void*>(grad), static_cast<void*>(t.exp_avg), static_cast<void*>(t.exp_avg_sq),
                     static_cast<void*>(t.master)}) {
    munmap(data, static_cast<size_t>(numel * 4));
  }
}
#endif

}  // namespace
}  // namespace shardcore::testing
