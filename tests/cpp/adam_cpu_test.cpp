// The CPU path: every instruction set, thread count, size, alignment and dtype mix gives the same bits, and touches nothing
// else.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/thread_pool.h"
#include "cpp/adam_problem.h"

#if SHARDCORE_X86
#include <xmmintrin.h>
#endif

namespace shardcore::testing {
namespace {

// Sizes around vector widths (up to 16 floats), unrolled loops and the tile.
std::vector<int64_t> sizes() {
  if (kThreadSanitizer) return {257};  // one thread does them all
  std::vector<int64_t> list;
  for (int64_t n = 0; n <= 2 * 16 + 3; ++n) list.push_back(n);
  for (const int64_t n : {63, 64, 65, 127, 255, 256, 257, 511, 512, 513, 1000}) list.push_back(n);
  return list;
}

float* f32(void* data) { return static_cast<float*>(data); }

// One element at a time, by the formula and the scalar conversions: what every path must equal.
class Reference {
 public:
  Reference(AdamSegment& segment, const AdamScalars& scalars) : t_(segment), s_(scalars) {}

  void run() {
    for (int64_t first = 0; first < t_.numel; first += kBlock) block(first, std::min(t_.numel, first + kBlock));
  }

 private:
  void block(int64_t first, int64_t last) {
    std::vector<float> ms, vs;
    for (int64_t i = first; i < last; ++i) {
      float m = moment(t_.exp_avg, i,
                       [&](uint8_t c) { return decode_exp_avg(static_cast<int8_t>(c), t_.exp_avg_scale[i / kBlock]); });
      float v = moment(t_.exp_avg_sq, i, [&](uint8_t c) { return decode_exp_avg_sq(c, t_.exp_avg_sq_scale[i / kBlock]); });
      element(i, m, v);
      ms.push_back(m);
      vs.push_back(v);
    }
    const float m_scale = scale_for(ms), v_scale = scale_for(vs);
    for (int64_t i = first; i < last; ++i)
      store(i, ms[static_cast<size_t>(i - first)], vs[static_cast<size_t>(i - first)], m_scale, v_scale);
    if (t_.state_dtype != StateDType::q8) return;
    t_.exp_avg_scale[first / kBlock] = m_scale;
    t_.exp_avg_sq_scale[first / kBlock] = v_scale;
  }

  template <typename Decode>
  float moment(const void* data, int64_t i, const Decode& decode) const {
    if (t_.state_dtype == StateDType::q8) return decode(static_cast<const uint8_t*>(data)[i]);
    return load_as_f32(data, t_.state_dtype == StateDType::f32 ? DType::f32 : DType::bf16, i);
  }

  // The smallest power of two that is not below any magnitude, within what has an inverse; NaN if one is not finite.
  static float scale_for(const std::vector<float>& x) {
    float largest = 0.0f;
    for (const float value : x) {
      if (!std::isfinite(value)) return kNan;
      largest = std::max(largest, std::fabs(value));
    }
    if (largest == 0.0f) return std::ldexp(1.0f, -126);
    int exponent = 0;
    const float fraction = std::frexp(largest, &exponent);  // in [0.5, 1)
    return std::ldexp(1.0f, std::min(127, std::max(-126, fraction > 0.5f ? exponent : exponent - 1)));
  }

  void element(int64_t i, float& m, float& v) {
    auto* const weight = static_cast<uint16_t*>(t_.param);
    auto* const rest = static_cast<int16_t*>(t_.master);
    float p = t_.master_kind == Master::f32     ? f32(t_.master)[i]
              : t_.master_kind == Master::split ? split_to_f32(weight[i], rest[i])
                                                : load_as_f32(t_.param, t_.param_dtype, i);
    const float g = load_as_f32(t_.grad, t_.grad_dtype, i);
    float* const vmax = t_.max_exp_avg_sq ? t_.max_exp_avg_sq + i : nullptr;
    if (s_.l2 != 0.0f) {
      vmax ? adam_element<true, true>(s_, g, p, m, v, vmax) : adam_element<true, false>(s_, g, p, m, v, vmax);
    } else {
      vmax ? adam_element<false, true>(s_, g, p, m, v, vmax) : adam_element<false, false>(s_, g, p, m, v, vmax);
    }
    if (t_.master_kind == Master::f32) f32(t_.master)[i] = p;
    if (t_.master_kind == Master::split) rest[i] = split_remainder(p);
    if (s_.stochastic_rounding && t_.master_kind == Master::none && t_.param_dtype == DType::bf16) {
      const int64_t element = t_.first_element + i;
      weight[i] = f32_to_bf16_stochastic(p, rounding_block_key(param_key_, element), element);
    } else {
      store_from_f32(t_.param, t_.param_dtype, i, p);
    }
  }

  void store(int64_t i, float m, float v, float m_scale, float v_scale) {
    const int64_t element = t_.first_element + i;
    const uint32_t bits = random32(rounding_block_key(state_key(param_key_), element), static_cast<uint32_t>(element & 255));
    if (t_.state_dtype == StateDType::f32) {
      f32(t_.exp_avg)[i] = m;
      f32(t_.exp_avg_sq)[i] = v;
    } else if (t_.state_dtype == StateDType::bf16) {
      static_cast<uint16_t*>(t_.exp_avg)[i] = f32_to_bf16(m);
      static_cast<uint16_t*>(t_.exp_avg_sq)[i] = f32_to_bf16_plus(v, bits >> 16);
    } else {
      static_cast<int8_t*>(t_.exp_avg)[i] = encode_exp_avg(m, 1.0f / m_scale, bits & 0xfffffu);
      static_cast<uint8_t*>(t_.exp_avg_sq)[i] = encode_exp_avg_sq(v, 1.0f / v_scale, bits >> 12);
    }
  }

  AdamSegment& t_;
  const AdamScalars& s_;
  uint64_t param_key_ = child_key(s_.random_key, t_.param_index);
};

void run_reference(AdamProblem& problem, const std::vector<AdamHyper>& hypers) {
  const std::vector<AdamScalars> scalars = AdamProblem::scalars_of(hypers);
  for (AdamSegment& t : problem.segments()) Reference(t, scalars[static_cast<size_t>(t.hyper_index)]).run();
}

// Every mix of dtypes, master, amsgrad and hyper for one size and misalignment; or each with one hyper, another one at the next
// size.
std::vector<TensorSpec> every_mix(int64_t numel, int64_t misalign, bool every_hyper = true) {
  std::vector<TensorSpec> specs;
  int64_t mix = 0;
  for (const DType param : kDTypes) {
    for (const DType grad : kDTypes) {
      for (const Master master : {Master::none, Master::f32}) {
        for (const bool amsgrad : {false, true}) {
          ++mix;
          for (int32_t hyper = 0; hyper < 4; ++hyper) {
            if (!every_hyper && hyper != (mix + numel) % 4) continue;
            specs.push_back({numel, param, grad, master, amsgrad, misalign, hyper, specs.size(), 100 * numel});
          }
        }
      }
    }
  }
  return specs;
}

uint16_t word(const void* data, int64_t i) { return static_cast<const uint16_t*>(data)[i]; }

// The 16-bit weights of a segment: its own, or its float32 master rounded.
std::vector<uint16_t> words_of(const AdamSegment& t, bool of_memory) {
  std::vector<uint16_t> words(static_cast<size_t>(t.numel));
  for (int64_t i = 0; i < t.numel; ++i) {
    if (t.master_kind == Master::f32 && !of_memory) {
      store_from_f32(words.data(), t.param_dtype, i, f32(t.master)[i]);
    } else {
      words[static_cast<size_t>(i)] = word(t.param, i);
    }
  }
  return words;
}

struct Noted {
  bool right = true;
  int64_t changed = 0, kept = 0;  // elements
};

// Whether exactly the bits of the weights that one step changes are set, beside those that were before.
Noted note_changes(AdamProblem& problem, const std::vector<AdamHyper>& hypers, bool of_memory = false) {
  problem.reset();
  std::vector<std::vector<uint16_t>> before;
  std::vector<std::vector<uint8_t>> bits;
  for (const AdamSegment& t : problem.segments()) {
    before.push_back(t.changed == nullptr ? std::vector<uint16_t>() : words_of(t, of_memory));
    bits.emplace_back(t.changed, t.changed + (t.changed == nullptr ? 0 : (t.numel + 7) / 8));
  }
  problem.run_cpu(hypers);
  Noted noted;
  for (size_t k = 0; k < before.size(); ++k) {
    const AdamSegment& t = problem.segments()[k];
    for (int64_t i = 0; t.changed != nullptr && i < t.numel; ++i) {
      const bool changes = before[k][static_cast<size_t>(i)] != word(t.param, i);
      ++(changes ? noted.changed : noted.kept);
      if (changes) bits[k][static_cast<size_t>(i / 8)] |= static_cast<uint8_t>(1u << (i % 8));
    }
    noted.right = noted.right && std::equal(bits[k].begin(), bits[k].end(), t.changed);
  }
  return noted;
}

TEST(adam_cpu, notes_exactly_the_weights_that_change_on_every_isa) {
  std::vector<AdamHyper> small = various_hypers();
  for (AdamHyper& hyper : small) hyper.lr = 1e-3;
  Noted all;
  for (const int64_t misalign : {0, 1, 3}) {
    for (const int64_t numel : sizes()) {
      std::vector<TensorSpec> specs = every_mix(numel, misalign, false);
      const std::vector<TensorSpec> reduced = every_reduced_mix(numel, misalign);
      specs.insert(specs.end(), reduced.begin(), reduced.end());
      const auto seed = static_cast<uint32_t>(numel + misalign);
      AdamProblem problem(noting_changes(specs), seed);
      for_each_isa([&](const std::string& isa) {
        const Noted noted = note_changes(problem, small);
        ASSERT_TRUE(noted.right) << numel << " elements, misaligned by " << misalign << ", " << isa;
        problem.result();  // checks the sentinels
        all.changed += noted.changed, all.kept += noted.kept;
      });
      if (numel < 64) continue;
      EXPECT_FALSE(note_changes(problem, small, true).right);  // a twin that reads weights which have no memory in host tiers
    }
  }
  EXPECT_GT(all.changed, 1000);
  EXPECT_GT(all.kept, 1000);
}

TEST(adam_cpu, every_mix_size_and_alignment_has_the_reference_bits_on_every_isa) {
  for (const int64_t misalign : {0, 1, 3}) {
    for (const int64_t numel : sizes()) {
      std::vector<TensorSpec> specs = every_mix(numel, misalign, false);
      const std::vector<TensorSpec> reduced = every_reduced_mix(numel, misalign);
      specs.insert(specs.end(), reduced.begin(), reduced.end());
      const auto values = (numel / 4 + misalign) % 2 ? AdamProblem::Values::with_specials : AdamProblem::Values::normal;
      AdamProblem problem(specs, static_cast<uint32_t>(numel * 7 + misalign), values);
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

// The bits themselves, for every machine: inputs are made with integers only, NaN does not occur. If one of these hashes
// changes, the arithmetic or the random bits changed, and weights trained before cannot be continued to the same bits.
uint64_t hash_after_a_step(const std::vector<TensorSpec>& specs) {
  AdamProblem problem(specs, 36);
  uint32_t state = 1;
  const auto next = [&] {  // a number in [-2, 2) with 16 bits
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(static_cast<int32_t>(state >> 16) - 32768) / 16384.0f;
  };
  for (AdamSegment& t : problem.segments()) {
    const DType moments = t.state_dtype == StateDType::f32 ? DType::f32 : DType::bf16;
    for (int64_t i = 0; i < t.numel; ++i) {
      store_from_f32(t.param, t.param_dtype, i, next());
      store_from_f32(const_cast<void*>(t.grad), t.grad_dtype, i, next());
      if (t.state_dtype != StateDType::q8) {
        store_from_f32(t.exp_avg, moments, i, next() / 4);
        store_from_f32(t.exp_avg_sq, moments, i, std::fabs(next()) / 4);
      }
      if (t.master_kind == Master::f32) f32(t.master)[i] = next();
      if (t.max_exp_avg_sq) t.max_exp_avg_sq[i] = std::fabs(next()) / 4;
    }
    for (int64_t i = 0; t.exp_avg_scale && i < blocks_of(t.numel); ++i) t.exp_avg_scale[i] = t.exp_avg_sq_scale[i] = 0.25f;
  }
  problem.run_cpu(various_hypers());
  return hash_of(problem.result());
}

TEST(adam_cpu, the_hash_of_a_fixed_problem_is_the_same_on_every_architecture) {
  EXPECT_EQ(hash_after_a_step(every_mix(600, 0)), 15520424087155337681ull);
  EXPECT_EQ(hash_after_a_step(every_reduced_mix(600, 0)), 6416916903457974761ull);
}

// Tables on the device are kept while segments are equal.
TEST(adam_cpu, segments_differ_if_any_of_their_bytes_does) {
  constexpr size_t kPadding = sizeof(AdamSegment) - offsetof(AdamSegment, aligned16) - sizeof(bool);
  const AdamSegment zero{};
  size_t unseen = 0;
  for (size_t byte = 0; byte < sizeof(AdamSegment); ++byte) {
    alignas(AdamSegment) unsigned char bytes[sizeof(AdamSegment)];
    std::memcpy(bytes, &zero, sizeof zero);
    bytes[byte] = 1;
    AdamSegment other;
    std::memcpy(&other, bytes, sizeof other);
    unseen += other == zero;
  }
  EXPECT_EQ(unseen, kPadding);
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
    spec.master = random.integer(2) != 0 ? Master::f32 : Master::none;
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
TEST(adam_cpu, flush_to_zero_of_the_caller_changes_no_scalar) {
  AdamHyper h;
  h.lr = 1e-42, h.eps = 1e-43, h.weight_decay = 1e-44, h.adam_w_mode = false;  // subnormal as float32
  const AdamScalars want = make_adam_scalars(h);
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040u);
  const AdamScalars got = make_adam_scalars(h);
  _mm_setcsr(saved);
  EXPECT_EQ(std::memcmp(&got, &want, sizeof got), 0);
  EXPECT_NE(got.eps, 0.0f);
}

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

}  // namespace
}  // namespace shardcore::testing
