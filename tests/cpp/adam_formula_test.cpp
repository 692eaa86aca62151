// The formula and its scalars against float64, element by element, in units of 2^-24 of the terms; broken twins are rejected.
#include <functional>

#include "adam/adam_math.h"
#include "adam/adam_roots.h"
#include "adam/make_scalars.h"
#include "cpp/common.h"

namespace shardcore::testing {
namespace {

struct Element {
  float grad, p, m, v, vmax;
};

// The largest error over many elements, each in units of 2^-24 of the sum of the magnitudes of its terms.
struct Errors {
  double m = 0, v = 0, vmax = 0, p = 0;
  bool within() const { return m <= 5 && v <= 8 && vmax <= 8 && p <= 16; }
};

using Step = std::function<void(const AdamHyper&, Element&)>;

void ours(const AdamHyper& h, Element& e, bool amsgrad) {
  const AdamScalars s = make_adam_scalars(h);
  if (s.l2 != 0.0f) {
    amsgrad ? adam_element<true, true>(s, e.grad, e.p, e.m, e.v, &e.vmax)
            : adam_element<true, false>(s, e.grad, e.p, e.m, e.v, nullptr);
  } else {
    amsgrad ? adam_element<false, true>(s, e.grad, e.p, e.m, e.v, &e.vmax)
            : adam_element<false, false>(s, e.grad, e.p, e.m, e.v, nullptr);
  }
}

// Float64 from the user's numbers, written from the paper and not from our scalars.
Errors compare(const AdamHyper& h, bool amsgrad, const Step& step) {
  Errors worst;
  Random random(20);
  for (int i = 0; i < 2000; ++i) {
    const Element before = {random.normal(), random.normal(), random.normal(0.3f), std::fabs(random.normal(0.3f)) + 1e-3f,
                            std::fabs(random.normal(0.3f))};
    Element after = before;
    step(h, after);
    double g = before.grad * h.grad_scale * (h.maximize ? -1 : 1);
    double g_terms = std::fabs(g);
    if (!h.adam_w_mode) {
      g += h.weight_decay * before.p;
      g_terms += std::fabs(h.weight_decay * before.p);
    }
    const double m = h.beta1 * before.m + (1 - h.beta1) * g;
    const double m_terms = std::fabs(h.beta1 * before.m) + (1 - h.beta1) * g_terms;
    const double v = h.beta2 * before.v + (1 - h.beta2) * g * g;
    const double v_terms = h.beta2 * before.v + (1 - h.beta2) * g_terms * g_terms;
    const double vmax = std::max<double>(before.vmax, v);
    const double bc1 = h.bias_correction ? 1 - std::pow(h.beta1, h.step) : 1;
    const double bc2 = h.bias_correction ? 1 - std::pow(h.beta2, h.step) : 1;
    const double denominator = std::sqrt((amsgrad ? vmax : v) / bc2) + h.eps;
    const double decayed = before.p * (h.adam_w_mode ? 1 - h.lr * h.weight_decay : 1);
    const double p = decayed - h.lr / bc1 * m / denominator;
    const double p_terms = std::fabs(decayed) + h.lr / bc1 * m_terms / denominator * (v_terms / v);
    const double unit = std::ldexp(1.0, -24);
    const auto raise = [&](double& error, double got, double want, double terms) {
      const double e = std::fabs(got - want) / (terms * unit);
      error = std::isnan(e) ? INFINITY : std::max(error, e);
    };
    raise(worst.m, after.m, m, m_terms);
    raise(worst.v, after.v, v, v_terms);
    raise(worst.p, after.p, p, p_terms);
    raise(worst.vmax, after.vmax, amsgrad ? vmax : before.vmax, std::max(v_terms, vmax));
  }
  return worst;
}

std::vector<AdamHyper> hypers() {
  std::vector<AdamHyper> list;
  for (const bool adam_w_mode : {true, false}) {
    for (const bool bias_correction : {true, false}) {
      for (const bool maximize : {true, false}) {
        for (const int64_t step : {1, 2, 10, 1000}) {
          AdamHyper h;
          h.lr = 0.05, h.beta1 = 0.8, h.beta2 = 0.97, h.eps = 1e-6, h.weight_decay = 0.2, h.grad_scale = 0.6;
          h.adam_w_mode = adam_w_mode, h.bias_correction = bias_correction, h.maximize = maximize, h.step = step;
          list.push_back(h);
        }
      }
    }
  }
  return list;
}

TEST(adam_formula, within_a_few_units_of_float64) {
  for (const AdamHyper& h : hypers()) {
    for (const bool amsgrad : {false, true}) {
      const Errors e = compare(h, amsgrad, [&](const AdamHyper& hyper, Element& x) { ours(hyper, x, amsgrad); });
      EXPECT_TRUE(e.within()) << "m " << e.m << " v " << e.v << " vmax " << e.vmax << " p " << e.p << " step " << h.step;
    }
  }
}

TEST(adam_formula, broken_twins_are_rejected) {
  using Twin = std::pair<const char*, Step>;
  const auto with = [](const std::function<void(AdamHyper&)>& change) {
    return [change](const AdamHyper& h, Element& x) {
      AdamHyper other = h;
      change(other);
      ours(other, x, false);
    };
  };
  const Twin twins[] = {
      {"does nothing", [](const AdamHyper&, Element&) {}},
      {"no decay", with([](AdamHyper& h) { h.weight_decay = 0; })},
      {"the other decay", with([](AdamHyper& h) { h.adam_w_mode = !h.adam_w_mode; })},
      {"stale step", with([](AdamHyper& h) { h.step += 1; })},
      {"no bias correction", with([](AdamHyper& h) { h.bias_correction = false; })},
      {"betas swapped", with([](AdamHyper& h) { std::swap(h.beta1, h.beta2); })},
      {"other sign", with([](AdamHyper& h) { h.maximize = !h.maximize; })},
      {"grad_scale forgotten", with([](AdamHyper& h) { h.grad_scale = 1; })},
      {"eps inside the root",
       [](const AdamHyper& h, Element& x) {
         const AdamScalars s = make_adam_scalars(h);
         const float p = x.p;
         ours(h, x, false);
         x.p = p * s.decay + s.minus_step_size * x.m / (std::sqrt(x.v + s.eps) * s.inv_sqrt_bc2);
       }},
      {"weight rounded to bf16",
       [](const AdamHyper& h, Element& x) {
         ours(h, x, false);
         x.p = bf16_to_f32(f32_to_bf16(x.p));
       }},
  };
  AdamHyper h = hypers()[2];
  h.bias_correction = true, h.step = 2;
  for (const auto& [name, twin] : twins) EXPECT_FALSE(compare(h, false, twin).within()) << name;
}

TEST(adam_formula, scalars_are_rounded_once_from_double) {
  for (AdamHyper h : hypers()) {
    h.lr = 1e-3, h.beta1 = 0.9, h.beta2 = 0.999;
    const AdamScalars s = make_adam_scalars(h);
    const long double bc1 = h.bias_correction ? 1.0L - std::pow(static_cast<long double>(h.beta1), h.step) : 1.0L;
    const long double bc2 = h.bias_correction ? 1.0L - std::pow(static_cast<long double>(h.beta2), h.step) : 1.0L;
    // 1 - 0.999 in double has an error of 1e-13: the quotients agree to a float32 unit at every step.
    EXPECT_FLOAT_EQ(s.minus_step_size, static_cast<float>(-h.lr / bc1));
    EXPECT_FLOAT_EQ(s.inv_sqrt_bc2, static_cast<float>(1.0L / std::sqrt(bc2)));
    EXPECT_EQ(s.beta1, 0.9f);
    EXPECT_EQ(s.one_minus_beta1, static_cast<float>(1.0 - 0.9));
    EXPECT_EQ(s.one_minus_beta2, static_cast<float>(1.0 - 0.999));
    EXPECT_EQ(s.decay, h.adam_w_mode ? static_cast<float>(1.0 - 1e-3 * 0.2) : 1.0f);
    EXPECT_EQ(s.l2, h.adam_w_mode ? 0.0f : 0.2f);
    EXPECT_EQ(s.grad_scale, h.maximize ? -0.6f : 0.6f);
  }
}

TEST(adam_formula, amsgrad_propagates_nan_and_keeps_the_larger) {
  const AdamScalars s = make_adam_scalars(AdamHyper{});
  Element e = {1.0f, 1.0f, 0.0f, 0.5f, 2.0f};
  adam_element<false, true>(s, e.grad, e.p, e.m, e.v, &e.vmax);
  EXPECT_EQ(e.vmax, 2.0f);
  e.v = 100.0f;
  adam_element<false, true>(s, e.grad, e.p, e.m, e.v, &e.vmax);
  EXPECT_GT(e.vmax, 99.0f);
  e.v = kNan;
  adam_element<false, true>(s, e.grad, e.p, e.m, e.v, &e.vmax);
  EXPECT_TRUE(std::isnan(e.vmax));
  e.v = 1.0f;
  adam_element<false, true>(s, e.grad, e.p, e.m, e.v, &e.vmax);
  EXPECT_TRUE(std::isnan(e.vmax));
}

// What CUDA's threads call (adam_roots.h), with the host's instructions. fast: as sure_scalars says.
bool four_at_once_have_the_bits_of_one(const AdamHyper& h, bool fast) {
  const AdamScalars s = make_adam_scalars(h);
  Random random(21);
  bool same = true;
  for (int trial = 0; trial < 20000; ++trial) {
    float g[4], p[4], m[4], v[4];
    for (int k = 0; k < 4; ++k) {
      const auto any = [&](int least, int most) {  // of both signs, with every exponent as often
        const double magnitude = std::ldexp(random.uniform() + 1.0, least + static_cast<int>(random.integer(most - least)));
        return static_cast<float>(random.bits() & 1 ? magnitude : -magnitude);
      };
      const bool wide = trial % 4 == 0;  // most trials lie in the ranges of the short way
      g[k] = 0.0f, p[k] = any(-140, 0), m[k] = wide ? any(-149, 127) : any(-96, 58);
      v[k] = std::fabs(wide ? any(-149, 127) : any(-98, 29));
    }
    float p_one[4], m_one[4], v_one[4];
    std::copy(p, p + 4, p_one), std::copy(m, m + 4, m_one), std::copy(v, v + 4, v_one);
    for (int k = 0; k < 4; ++k) adam_element<false, false>(s, g[k], p_one[k], m_one[k], v_one[k], nullptr);
    adam_quartet<false>(s, fast, g, p, m, v, nullptr);
    for (int k = 0; k < 4; ++k) same &= float_bits(p[k]) == float_bits(p_one[k]) || (std::isnan(p[k]) && std::isnan(p_one[k]));
  }
  return same;
}

TEST(adam_formula, four_elements_at_once_have_the_bits_of_one_for_numbers_of_any_size) {
  AdamHyper plain;
  plain.lr = 1e20;  // brings small quotients to the size of the weights
  std::vector<AdamHyper> list(5, plain);
  list[1].eps = 0.0;
  list[2].eps = 1e39;             // infinite as float32
  list[3].beta2 = 1.0 - 0x1p-52;  // inv_sqrt_bc2 is 2^26
  list[4].bias_correction = false;
  for (size_t i = 0; i < list.size(); ++i) {
    const bool sure = sure_scalars(make_adam_scalars(list[i]));
    EXPECT_EQ(sure, i != 2 && i != 3);
    EXPECT_TRUE(four_at_once_have_the_bits_of_one(list[i], sure)) << i;
  }
  EXPECT_FALSE(four_at_once_have_the_bits_of_one(list[2], true)) << "a twin that does not look at the scalars";
}

}  // namespace
}  // namespace shardcore::testing
