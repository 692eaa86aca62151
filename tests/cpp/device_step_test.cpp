// Steps that are decided where the tensors are (csrc/adam/device_step.h): scalars and counts have the host's bits,
// and a skipped step writes nothing. The functions are what the CUDA kernel runs; twins with a typical mistake are rejected.
// The loss scale: tests/native/test_device_step.py.
#include <functional>

#include "adam/device_step.h"
#include "adam/make_scalars.h"
#include "cpp/adam_problem.h"
#include "cpp/cuda_kernels.h"

namespace shardcore::testing {
namespace {

static_assert(sizeof(AdamScalars) == 56, "compared as bytes, so it may have no padding");

std::vector<uint8_t> bytes_of(const std::vector<AdamScalars>& scalars) {
  const auto* const data = reinterpret_cast<const uint8_t*>(scalars.data());
  return {data, data + scalars.size() * sizeof(AdamScalars)};
}

// The memory that a replay of a graph reads and counts, and the arguments that it was captured with.
struct Device {
  std::vector<DeviceHyper> hypers;
  std::vector<int64_t> counters;
  std::vector<DeviceCount> counts;
  DeviceStepTerms terms;
  DeviceStepState state{};
  DoubleDouble sq_norm{0.0, 0.0};
  float grad_scale = 1.0f, found_inf = 0.0f;
  double loss_scale = 1.0;

  // One tensor for each of `options`, which made options.step - 1 steps.
  explicit Device(const std::vector<AdamHyper>& options) {
    for (const AdamHyper& h : options) {
      AdamHyper fixed = h;
      fixed.lr = fixed.grad_scale = -1.0;  // not to be read
      fixed.step = -1;
      hypers.push_back({fixed, {h.lr}});
      counters.push_back(h.step - 1);
    }
    for (size_t i = 0; i < counters.size(); ++i) counts.push_back({&counters[i], static_cast<int64_t>(i)});
    terms.grad_scale.data = &grad_scale;
    terms.loss_scale.data = &loss_scale;
    terms.loss_scale.f64 = true;
    terms.found_inf.data = &found_inf;
  }
  Device(const Device&) = delete;

  void clip(double max_norm) {
    terms.max_norm = max_norm;
    terms.squares = &sq_norm;
    terms.num_squares = 1;
  }

  using Body = std::function<void(Device&, AdamScalars*)>;
  // The last parameter first: they do not wait for each other.
  static void ours(Device& d, AdamScalars* scalars) {
    const StepDecision decision = decide_step(d.terms);
    for (auto i = static_cast<int64_t>(d.counts.size()) - 1; i >= 0; --i) {
      step_scalars_body(d.hypers.data(), d.counts.data(), decision, i, scalars);
    }
    move_state(decision, d.terms, &d.state);
  }
  static void on_the_host(Device& d, AdamScalars* scalars) {
    make_device_step(d.hypers.data(), d.counts.data(), static_cast<int64_t>(d.counts.size()), d.terms, &d.state, scalars);
  }
  template <typename Block>
  static void on_the_grid(Device& d, AdamScalars* scalars) {
    const auto count = static_cast<int64_t>(d.counts.size());
    HostGrid::run((count + kStepThreads - 1) / kStepThreads, kStepThreads,
                  [&](int64_t index, int thread, const HostBlock& block) {
                    device_step_body(d.hypers.data(), d.counts.data(), count, d.terms, &d.state, scalars,
                                     block.shared<StepDecision>(), index, thread, Block(block));
                  });
  }

  std::vector<AdamScalars> replay(const Body& body = ours) {
    std::vector<AdamScalars> scalars(counts.size());
    body(*this, scalars.data());
    return scalars;
  }
};

constexpr int64_t kLarge = int64_t{1} << 24;  // float32 counts no further
const int64_t kStepNumbers[] = {
    1, 2, 3, 10, 999, 100000, kLarge - 1, kLarge, kLarge + 1, (int64_t{1} << 31) + 7, int64_t{1} << 40};

std::vector<AdamHyper> many_hypers() {
  std::vector<AdamHyper> list;
  for (const int64_t step : kStepNumbers) {
    for (AdamHyper h : various_hypers()) {
      for (const double lr : {0.0, 1e-3, 0.1, 3.3333333333333335e-5}) {
        for (const double beta2 : {0.999, 0.95, 0.99999999}) {
          h.step = step, h.lr = lr, h.beta2 = beta2, h.beta1 = beta2 - 0.1, h.seed = list.size();
          list.push_back(h);
        }
      }
    }
  }
  return list;
}

struct Scaling {
  float grad_scale;
  double loss_scale;
  double max_norm;  // negative: no clipping
  DoubleDouble sq_norm;
};

std::vector<Scaling> scalings() {
  std::vector<Scaling> list;
  for (const float grad_scale : {1.0f, 0.37f, -0.1f, 1e-30f}) {
    for (const double loss_scale : {1.0, 65536.0, 3.0}) {
      list.push_back({grad_scale, loss_scale, -1.0, {kNan, 0.0}});  // the norm is not looked at
      for (const double max_norm : {0.0, 3e-7, 1e-3, 1.0, 7.7, static_cast<double>(kInf)}) {
        for (const DoubleDouble sq : {DoubleDouble{0.0, 0.0}, {1e-12, 0.0}, {1.7, 1e-17}, {3e8, -1e-9}, {1.1e70, 3e53}}) {
          list.push_back({grad_scale, loss_scale, max_norm, sq});
        }
      }
    }
  }
  return list;
}

// What the host multiplies with, written from DESIGN's words and not from grad_scale.h.
double host_scale(const Scaling& s) {
  const double scale = static_cast<double>(s.grad_scale) / s.loss_scale;
  if (s.max_norm < 0.0) return scale;
  const double norm = static_cast<double>(static_cast<float>(std::sqrt(s.sq_norm.high + s.sq_norm.low))) * std::fabs(scale);
  return scale * std::min(1.0, s.max_norm / (norm + 1e-6));
}

bool has_the_hosts_bits(const Device::Body& body, size_t every = 1) {
  const std::vector<Scaling> all = scalings();
  for (size_t which = 0; which < all.size(); which += every) {
    const Scaling& s = all[which];
    std::vector<AdamHyper> hypers = many_hypers();
    Device device(hypers);
    device.grad_scale = s.grad_scale, device.loss_scale = s.loss_scale, device.sq_norm = s.sq_norm;
    if (s.max_norm >= 0.0) device.clip(s.max_norm);
    for (int replay = 0; replay < 2; ++replay) {
      std::vector<AdamScalars> want;
      for (AdamHyper& h : hypers) {
        h.grad_scale = host_scale(s);
        want.push_back(make_adam_scalars(h));
        ++h.step;
      }
      if (bytes_of(device.replay(body)) != bytes_of(want)) return false;
      for (size_t i = 0; i < hypers.size(); ++i) {
        if (device.counters[i] != hypers[i].step - 1) return false;
      }
    }
    if (device.state.skipped != 0) return false;
  }
  return true;
}

TEST(device_step, has_the_hosts_bits) {
  EXPECT_TRUE(has_the_hosts_bits(Device::ours, kSlow ? 7 : 1));
  EXPECT_TRUE(has_the_hosts_bits(Device::on_the_host, 7));
}

TEST(device_step, has_the_hosts_bits_on_the_grid) {
  const size_t every = kThreadSanitizer ? 190 : 31;
  EXPECT_TRUE(has_the_hosts_bits(Device::on_the_grid<HostBlock>, every));
  if (!kThreadSanitizer) {  // the twin does race
    EXPECT_TRUE(some_run_is_rejected([&] { return !has_the_hosts_bits(Device::on_the_grid<BlockWithoutSync>, every); }));
  }
}

TEST(device_step, twins_are_rejected) {
  EXPECT_FALSE(has_the_hosts_bits([](Device& d, AdamScalars* scalars) {  // counts in float32, as torch does
    Device::ours(d, scalars);
    for (int64_t& count : d.counters) count = static_cast<int64_t>(static_cast<float>(count));
  }));
  EXPECT_FALSE(has_the_hosts_bits([](Device& d, AdamScalars* scalars) {  // forgets to count
    Device::ours(d, scalars);
    --d.counters.back();
  }));
  EXPECT_FALSE(has_the_hosts_bits([](Device& d, AdamScalars* scalars) {  // lr through float32
    for (DeviceHyper& hyper : d.hypers) hyper.lr.value = static_cast<float>(hyper.lr.value);
    Device::ours(d, scalars);
  }));
  EXPECT_FALSE(has_the_hosts_bits([](Device& d, AdamScalars* scalars) {  // the scale rounded before it is clipped
    const float scale = static_cast<float>(d.grad_scale / d.loss_scale);
    d.terms.grad_scale = {scale}, d.terms.loss_scale = {1.0};
    Device::ours(d, scalars);
  }));
  EXPECT_FALSE(has_the_hosts_bits([](Device& d, AdamScalars* scalars) {  // a norm summed in float32
    d.sq_norm = {d.sq_norm.high * (1.0 + 1e-7), 0.0};
    Device::ours(d, scalars);
  }));
}

TEST(device_step, divides_by_the_loss_scale_and_does_not_multiply_with_its_inverse) {
  const double tie = 2.0 - std::ldexp(1.0, -24);  // halfway between two float32
  Device device(various_hypers());
  device.terms.grad_scale = {49.0 * tie};
  device.terms.loss_scale = {49.0};
  EXPECT_EQ(device.replay()[0].grad_scale, 2.0f);
  EXPECT_LT(static_cast<float>(49.0 * tie * (1.0 / 49.0)), 2.0f);  // the twin
}

TEST(device_step, reads_lr_from_memory_at_every_replay) {
  std::vector<AdamHyper> hypers = {various_hypers()[0], various_hypers()[1]};
  Device device(hypers);
  float lr32 = 0.0f;
  double lr64 = 0.0;
  device.hypers[0].lr = {-1.0, &lr32, false};
  device.hypers[1].lr = {-1.0, &lr64, true};
  for (const double lr : {0.1, 1e-5, 0.25}) {
    lr32 = static_cast<float>(lr), lr64 = lr;
    hypers[0].lr = static_cast<double>(lr32), hypers[1].lr = lr;
    std::vector<AdamScalars> want;
    for (AdamHyper& h : hypers) {
      h.grad_scale = 1.0;
      want.push_back(make_adam_scalars(h));
      ++h.step;
    }
    EXPECT_EQ(bytes_of(device.replay()), bytes_of(want)) << lr;
  }
}

std::vector<TensorSpec> mixed_tensors() {
  std::vector<TensorSpec> specs = every_reduced_mix(300, 0);
  for (TensorSpec spec : every_reduced_mix(257, 1)) specs.push_back(spec);
  specs.push_back({kAdamChunk + int64_t{5}});
  specs.push_back({0});
  for (const Master master : {Master::none, Master::f32}) specs.push_back({1000, DType::bf16, DType::f32, master, true});
  return specs;
}

// As the kernel does it: scalars of tensor i at index i.
std::vector<AdamHyper> hyper_each(AdamProblem& problem) {
  std::vector<AdamHyper> hypers;
  for (AdamSegment& t : problem.segments()) {
    hypers.push_back(various_hypers()[static_cast<size_t>(t.hyper_index)]);
    t.hyper_index = static_cast<int32_t>(hypers.size() - 1);
  }
  return hypers;
}

TEST(device_step, replays_are_the_next_steps_of_the_cpu) {
  AdamProblem problem(mixed_tensors(), 50);
  std::vector<AdamHyper> hypers = hyper_each(problem);
  const float found_inf[] = {0, 0, 1, 0, 0};  // the third is skipped
  Device device(hypers);
  device.loss_scale = 8.0;
  for (const float found : found_inf) {
    device.found_inf = found;
    problem.run_cuda_form<kNumAdamForms - 1>(device.replay());
  }
  const auto got = problem.result();
  problem.reset();
  for (int step = 0; step < 4; ++step) {
    for (AdamHyper& h : hypers) h.grad_scale = 1.0 / 8.0;
    problem.run_cpu(hypers);
    for (AdamHyper& h : hypers) ++h.step;
  }
  EXPECT_EQ(got, problem.result());
  EXPECT_EQ(device.state.skipped, 1);
}

TEST(device_step, a_skipped_step_writes_nothing_and_is_counted_once) {
  const auto spoils = std::vector<std::function<void(Device&)>>{
      [](Device& d) { d.found_inf = 1.0f; },
      [](Device& d) { d.found_inf = kNan; },
      [](Device& d) { d.terms.found_inf = {2.0}; },
      [](Device& d) {
        d.clip(1.0), d.sq_norm = {kInf, 0.0};
      },
      [](Device& d) {
        d.clip(1.0), d.sq_norm = {kNan, 0.0};
      },
      [](Device& d) {
        d.clip(kInf), d.sq_norm = {1e80, 0.0};
      },  // finite here, and not as float32
      [](Device& d) { d.grad_scale = kNan; },
      [](Device& d) { d.grad_scale = kInf; },
      [](Device& d) { d.loss_scale = 0.0; },
      [](Device& d) { d.grad_scale = 1e38f, d.loss_scale = 1e-300; },
      [](Device& d) { d.grad_scale = 1e38f, d.loss_scale = 0.1; },  // finite, and not as float32
      [](Device& d) { d.loss_scale = static_cast<double>(kInf); },
  };
  for (size_t which = 0; which < (kThreadSanitizer ? 1 : spoils.size()); ++which) {
    AdamProblem problem(mixed_tensors(), 51);
    const auto before = problem.result();
    const std::vector<AdamHyper> hypers = hyper_each(problem);
    Device device(hypers);
    const std::vector<int64_t> counters = device.counters;
    spoils[which](device);
    std::vector<AdamScalars> scalars = device.replay();
    problem.run_cuda_form<kNumAdamForms - 1>(scalars);
    EXPECT_EQ(problem.result(), before) << which;
    EXPECT_EQ(device.counters, counters) << which;
    EXPECT_EQ(device.state.skipped, 1) << which;
    for (AdamScalars& s : scalars) s.skip = 0;  // the twin that does not look
    problem.run_cuda_form<kNumAdamForms - 1>(scalars);
    EXPECT_NE(problem.result(), before) << which;
  }
}

TEST(device_step, an_unlooked_norm_does_not_skip) {
  Device device(various_hypers());
  device.sq_norm = {kNan, 0.0};
  for (const AdamScalars& s : device.replay()) EXPECT_EQ(s.skip, 0u);
  device.clip(1.0);
  for (const AdamScalars& s : device.replay()) EXPECT_EQ(s.skip, 1u);
  EXPECT_EQ(device.state.skipped, 1);
}

TEST(device_step, a_fixed_scale_stays) {
  Device device(various_hypers());
  device.state.loss = {64.0, 1, 1};
  device.state.unscale = 0.25;
  device.clip(HUGE_VAL);
  device.sq_norm = {static_cast<double>(kInf), 0.0};
  device.replay();
  EXPECT_EQ(device.state.loss.scale, 64.0);
  EXPECT_EQ(device.state.unscale, 0.25);
  EXPECT_EQ(device.state.skipped, 1);
}

}  // namespace
}  // namespace shardcore::testing
