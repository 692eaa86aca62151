// The verdict on a step (csrc/adam/step_verdict.h): its steps are those of a host that knows all; twins with a typical mistake
// are not. The bodies are what the CUDA kernels run.
#include <functional>

#include "adam/make_scalars.h"
#include "adam/step_verdict.h"
#include "cpp/adam_problem.h"

namespace shardcore::testing {
namespace {

constexpr int kSteps = 200;  // each number three times

bool overflows(int step) { return step % 7 == 2 || step % 11 == 5 || (step > 130 && step < 134); }
bool has_gradient(int cohort, int step) { return cohort == 0 || step % (cohort + 1) != 0; }

// Written from the words in shardcore/engine/loss_scale.py, not from loss_scale.h.
struct Scale {
  double scale = 4096.0;
  int64_t since_overflow = 0, overflows_left = 3;
  void update() {
    if (since_overflow != 0 && since_overflow % 4 == 0) scale = std::min(scale * 2.0, std::ldexp(1.0, 127)), overflows_left = 3;
    ++since_overflow;
  }
  void overflow() {
    since_overflow = 0;
    if (overflows_left > 1) {
      --overflows_left;
    } else {
      scale = std::max(scale / 2.0, 0.75);
    }
  }
};

using Body = std::function<void(const std::vector<DoubleDouble>&, const VerdictTerms&, const std::vector<VerdictHyper>&,
                                StepVerdict*, AdamScalars*)>;

void ours(const std::vector<DoubleDouble>& squares, const VerdictTerms& terms, const std::vector<VerdictHyper>& hypers,
          StepVerdict* verdict, AdamScalars* scalars) {
  step_verdict_body(squares.data(), static_cast<int64_t>(squares.size()), terms, verdict);
  for (auto i = static_cast<int64_t>(hypers.size()) - 1; i >= 0; --i) {  // they do not wait for each other
    verdict_scalars_body(hypers.data(), *verdict, i, scalars);
  }
}

// The host is `behind` steps behind in what it knows of counts.
bool is_the_hosts(const Body& body, int behind) {
  constexpr int cohorts = 4;
  Scale want_scale;
  StepVerdict verdict{{want_scale.scale, 0, 3}, 0.0, ~uint64_t{0}, 0.0, 0.0, 0};  // bits of steps before count for nothing
  std::vector<int64_t> true_steps(cohorts, 0);
  std::vector<std::vector<int64_t>> history(cohorts);  // the true count before each step
  for (int step = 0; step < kSteps; ++step) {
    VerdictTerms terms{step % 5 == 0 ? 0.37 : 1.0, step % 3 == 0 ? HUGE_VAL : 0.5, step % 64, 3.0, true, {4, 3, 0.75, false}};
    const double part = overflows(step) ? static_cast<double>(kInf) : 0.1 * (step + 1);
    const std::vector<DoubleDouble> squares = {{part, 1e-20}, {2.5, -1e-18}, {1e-9, 0.0}};
    std::vector<VerdictHyper> hypers;
    std::vector<AdamHyper> want;
    for (int c = 0; c < cohorts; ++c) {
      history[static_cast<size_t>(c)].push_back(true_steps[static_cast<size_t>(c)]);
      const int known = std::max(0, step - behind);
      uint64_t since = 0;
      for (int s = known; s < step; ++s) since |= has_gradient(c, s) ? uint64_t{1} << (s % 64) : 0;
      AdamHyper h = various_hypers()[static_cast<size_t>(c)];
      h.step = history[static_cast<size_t>(c)][static_cast<size_t>(known)] + 1;
      hypers.push_back({h, since});
      h.step = true_steps[static_cast<size_t>(c)] + 1;
      want.push_back(h);
    }
    std::vector<AdamScalars> got(cohorts);
    body(squares, terms, hypers, &verdict, got.data());
    DoubleDouble total{};
    for (const DoubleDouble& x : squares) total = dd_add(total, x);
    const double norm = static_cast<double>(static_cast<float>(std::sqrt(total.high + total.low))) * terms.grad_scale;
    if ((verdict.skip != 0) != overflows(step) || std::memcmp(&verdict.norm, &norm, 8) != 0) return false;
    for (int c = 0; c < cohorts; ++c) {
      const auto i = static_cast<size_t>(c);
      if (overflows(step)) {
        if (got[i].skip != 1) return false;
        continue;
      }
      want[i].grad_scale = terms.grad_scale * std::min(1.0, terms.max_norm / (norm + 1e-6));
      const AdamScalars expected = make_adam_scalars(want[i]);
      if (std::memcmp(&got[i], &expected, sizeof expected) != 0) return false;
      true_steps[i] += has_gradient(c, step);
    }
    overflows(step) ? want_scale.overflow() : want_scale.update();
    if (verdict.loss.scale != want_scale.scale || verdict.unscale != 1.0 / (3.0 * want_scale.scale)) return false;
    if (verdict.loss.stable_steps != want_scale.since_overflow) return false;
    if (verdict.loss.hysteresis_left != want_scale.overflows_left) return false;
  }
  return true;
}

TEST(step_verdict, is_the_hosts_however_far_that_is_behind) {
  for (const int behind : {0, 1, 2, 17, 63}) EXPECT_TRUE(is_the_hosts(ours, behind)) << behind;
}

TEST(step_verdict, a_host_too_far_behind_is_seen) { EXPECT_FALSE(is_the_hosts(ours, 65)); }

TEST(step_verdict, twins_are_rejected) {
  const auto twin = [](const std::function<void(VerdictTerms&, std::vector<VerdictHyper>&)>& spoil) {
    return is_the_hosts(
        [&](const auto& squares, const VerdictTerms& terms, const auto& hypers, StepVerdict* verdict, AdamScalars* scalars) {
          VerdictTerms other = terms;
          std::vector<VerdictHyper> others = hypers;
          spoil(other, others);
          ours(squares, other, others, verdict, scalars);
        },
        5);
  };
  EXPECT_TRUE(twin([](VerdictTerms&, std::vector<VerdictHyper>&) {}));
  EXPECT_FALSE(twin([](VerdictTerms&, std::vector<VerdictHyper>& hypers) { hypers[1].since = 0; }));
  EXPECT_FALSE(twin([](VerdictTerms&, std::vector<VerdictHyper>& hypers) { hypers[2].since = hypers[0].since; }));
  EXPECT_FALSE(twin([](VerdictTerms& terms, std::vector<VerdictHyper>&) { terms.number = (terms.number + 1) % 64; }));
  EXPECT_FALSE(twin([](VerdictTerms& terms, std::vector<VerdictHyper>&) { terms.moves = false; }));
  EXPECT_FALSE(twin([](VerdictTerms& terms, std::vector<VerdictHyper>&) { terms.rule.consecutive_hysteresis = true; }));
  EXPECT_FALSE(twin([](VerdictTerms& terms, std::vector<VerdictHyper>&) { terms.rule.window = 5; }));
  EXPECT_FALSE(twin([](VerdictTerms& terms, std::vector<VerdictHyper>&) { terms.ranks = 1.0; }));
  EXPECT_FALSE(is_the_hosts(
      [](const auto& squares, const VerdictTerms& terms, const auto& hypers, StepVerdict* verdict, AdamScalars* scalars) {
        const uint64_t before = verdict->updates;
        ours(squares, terms, hypers, verdict, scalars);
        if (verdict->skip != 0) verdict->updates = before;  // leaves the bit of 64 steps ago
      },
      5));
}

TEST(step_verdict, on_the_host_the_same) {
  EXPECT_TRUE(is_the_hosts(
      [](const auto& squares, const VerdictTerms& terms, const auto& hypers, StepVerdict* verdict, AdamScalars* scalars) {
        make_step_verdict(squares.data(), static_cast<int64_t>(squares.size()), terms, hypers.data(),
                          static_cast<int64_t>(hypers.size()), verdict, scalars);
      },
      9));
}

TEST(step_verdict, a_fixed_scale_stays) {
  const DoubleDouble squares[] = {{static_cast<double>(kInf), 0.0}};
  StepVerdict verdict{{64.0, 1, 1}, 0.25, 0, 0.0, 0.0, 0};
  step_verdict_body(squares, 1, {1.0, HUGE_VAL, 0, 2.0, false, {}}, &verdict);
  EXPECT_EQ(verdict.loss.scale, 64.0);
  EXPECT_EQ(verdict.unscale, 0.25);
  EXPECT_EQ(verdict.skip, 1);
}

}  // namespace
}  // namespace shardcore::testing
