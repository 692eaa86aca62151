// AdamHyper, AdamLists and AdamStepper.
#include <algorithm>
#include <deque>
#include <memory>
#include <optional>
#include <utility>

#include "adam/adam_cpu.h"
#include "adam/make_scalars.h"
#include "bind/adam_lists.h"
#include "bind/adam_tables.h"
#include "bind/checks.h"
#include "bind/device_step.h"
#include "bind/step_verdict.h"
#include "core/tile.h"
#include "norm/norm_cpu.h"

namespace shardcore::bind {

namespace {

// Of options that shardcore.optim.options has checked.
PyAdamHyper make_hyper(const py::handle& lr, double beta1, double beta2, double eps, double weight_decay, int64_t step,
                       double grad_scale, bool adam_w_mode, bool bias_correction, bool maximize, bool stochastic_rounding,
                       const py::int_& seed) {
  const NumberArg lr_arg = number_arg({"AdamHyper", "lr"}, lr);
  AdamHyper hyper;
  hyper.lr = lr_arg.value;
  hyper.beta1 = beta1;
  hyper.beta2 = beta2;
  hyper.eps = eps;
  hyper.weight_decay = weight_decay;
  hyper.grad_scale = grad_scale;
  hyper.step = step;
  hyper.adam_w_mode = adam_w_mode;
  hyper.bias_correction = bias_correction;
  hyper.maximize = maximize;
  hyper.stochastic_rounding = stochastic_rounding;
  hyper.seed = PyLong_AsUnsignedLongLongMask(seed.ptr());
  return {hyper, lr_arg};
}

// The same options at another step: what a step that repeats the last one needs.
PyAdamHyper hyper_at(const PyAdamHyper& other, int64_t step, double grad_scale) {
  PyAdamHyper made = other;
  made.hyper.grad_scale = grad_scale;
  made.hyper.step = step;
  return made;
}

const PyDeviceStep* device_step_of(const py::object& object) {
  if (object.is_none()) return nullptr;
  if (!py::isinstance<PyDeviceStep>(object)) {
    type_error({kStepOp, "device_step"}, "type ", Py_TYPE(object.ptr())->tp_name, "; expected DeviceStep or None");
  }
  return &object.cast<const PyDeviceStep&>();
}

const PyDeviceScalars* device_scalars_of(const py::handle& object) {
  return py::isinstance<PyDeviceScalars>(object) ? &object.cast<const PyDeviceScalars&>() : nullptr;
}

std::vector<PyAdamHyper> plain_hypers(const PyDeviceScalars& made) {
  std::vector<PyAdamHyper> hypers;
  for (const AdamHyper& hyper : made.hypers) hypers.push_back({hyper, {hyper.lr, {}}});
  return hypers;
}

// Of scalars in host memory.
std::vector<AdamScalars> scalars_in(const PyDeviceScalars& made) {
  const auto* const data = static_cast<const AdamScalars*>(made.bytes.const_data_ptr());
  return {data, data + made.hypers.size()};
}

}  // namespace

std::vector<PyAdamHyper> hypers_of(const py::handle& sequence) { return sequence.cast<std::vector<PyAdamHyper>>(); }

std::vector<AdamScalars> scalars_of(const char* op, const std::vector<PyAdamHyper>& hypers) {
  std::vector<AdamScalars> scalars;
  for (size_t i = 0; i < hypers.size(); ++i) {
    if (hypers[i].lr.tensor.defined()) {
      value_error({op, "hypers", static_cast<int64_t>(i)}, "a tensor as lr; expected a number (without device_step)");
    }
    scalars.push_back(make_adam_scalars(hypers[i].hyper));
  }
  return scalars;
}

class __attribute__((visibility("hidden"))) AdamStepper {
 public:
  void step(const py::handle& params, const py::handle& grads, const py::handle& exp_avgs, const py::handle& exp_avg_sqs,
            const py::handle& hypers, const py::handle& hyper_index, const py::object& masters,
            const py::object& max_exp_avg_sqs, const py::object& keys, const py::object& exp_avg_scales,
            const py::object& exp_avg_sq_scales, const py::object& device_step) {
    run(adam_lists_of(params, exp_avgs, exp_avg_sqs, hyper_index, masters, max_exp_avg_sqs, keys, exp_avg_scales,
                      exp_avg_sq_scales),
        grads, hypers, device_step);
  }

  void repeat(const PyAdamLists& kept, const py::handle& grads, const py::handle& hypers, const py::object& device_step) {
    run(kept.lists, grads, hypers, device_step);
  }

  int64_t table_builds() const { return table_builds_; }

 private:
  void run(const AdamLists& lists, const py::handle& grads_object, const py::handle& hypers, const py::object& device_step) {
    const size_t count = lists.params.size();
    const TensorList grads = tensors_of(kStepOp, "grads", grads_object);
    check_count(kStepOp, "grads", grads.size(), "params", count);
    const PyDeviceScalars* const made = device_scalars_of(hypers);
    const std::vector<PyAdamHyper> hyper_list = made == nullptr ? hypers_of(hypers) : plain_hypers(*made);
    const PyDeviceStep* const on_device = device_step_of(device_step);
    if (made != nullptr && on_device != nullptr)
      value_error({kStepOp, "device_step"}, "a value; expected None with DeviceScalars");
    const bool on_host = made == nullptr && on_device == nullptr;
    const std::vector<AdamScalars> scalars = on_host ? scalars_of(kStepOp, hyper_list) : std::vector<AdamScalars>();
    if (count == 0) return;

    const at::Device device = lists.params[0].device();
    check_device_supported({kStepOp, "params", 0}, device);
    if (made != nullptr) check_layout({kStepOp, "hypers"}, made->bytes, device);
    std::vector<AdamSegment> segments(count);
    for (size_t i = 0; i < count; ++i) {
      AdamSegment& t = segments[i] = segment_of(lists, grads, i, device);
      // The host makes scalars for each of hypers, the device for each tensor.
      t.hyper_index = static_cast<int32_t>(on_device == nullptr ? lists.hyper_index.at(i) : static_cast<int64_t>(i));
      if (!lists.keys.empty()) {
        t.param_index = lists.keys[i].param_index;
        t.first_element = lists.keys[i].first_element;
      }
    }
    std::optional<DevicePlan> plan;
    std::vector<int64_t*> counts;
    if (on_device != nullptr) {
      plan = plan_of(*on_device, lists.hyper_index, device);
      for (size_t i = 0; i < hyper_list.size(); ++i) {
        const Where where{kStepOp, "hypers.lr", static_cast<int64_t>(i)};
        plan->hypers.push_back({hyper_list[i].hyper, device_number(where, hyper_list[i].lr, device)});
      }
      for (const DeviceCount& c : plan->counts) counts.push_back(c.count);
    }
    const int64_t* const skipped = plan ? plan->decision.skipped : nullptr;
    if (!(segments == apart_.segments && counts == apart_.counts && skipped == apart_.skipped)) {
      apart_ = {};
      check_overlap(lists, segments, counts, skipped, overlap_);
      apart_ = {segments, counts, skipped};
    }
    for (size_t i = 0; i < count; ++i) mark_written(lists.params[i]);  // states are not part of any graph
    const py::gil_scoped_release no_gil;
    if (device.is_cpu()) step_cpu(segments, made == nullptr ? scalars : scalars_in(*made), plan ? &*plan : nullptr);
#ifdef SHARDCORE_WITH_CUDA
    if (device.is_cuda()) step_cuda(std::move(segments), scalars, made, plan ? &*plan : nullptr, device);
#endif
  }

  static void step_cpu(const std::vector<AdamSegment>& segments, std::vector<AdamScalars> scalars, DevicePlan* plan) {
    const auto count = static_cast<int64_t>(segments.size());
    if (plan != nullptr) {
      std::vector<NormSegment> grads;
      DoubleDouble total{};
      if (plan->clips) {
        for (const AdamSegment& t : segments) grads.push_back({t.grad, t.numel, t.grad_dtype});
        total = sq_norm_cpu(grads.data(), count, torch_executor());
        plan->decision.sq_norm = &total;
      }
      scalars.resize(segments.size());
      make_device_scalars(plan->hypers.data(), plan->counts.data(), count, plan->decision, scalars.data());
    }
    if (scalars[0].skip) return;
    adam_cpu(segments.data(), count, scalars.data(), torch_executor());
  }

#ifdef SHARDCORE_WITH_CUDA
  void step_cuda(std::vector<AdamSegment> segments, const std::vector<AdamScalars>& scalars, const PyDeviceScalars* made,
                 DevicePlan* plan, at::Device device) {
    const c10::cuda::CUDAGuard guard(device);
    const cudaStream_t stream = current_stream(device);
    const bool for_graph = plan != nullptr && is_capturing(stream);
    const AdamTables& tables = tables_for(std::move(segments), plan, device, stream, for_graph);
    const auto count = static_cast<int64_t>(tables.segments().size());
    at::Tensor scalars_bytes;
    AdamScalarsArg arg;
    if (made != nullptr) {
      scalars_bytes = made->bytes;
    } else if (plan == nullptr) {
      if (!arg.take(scalars)) scalars_bytes = upload({bytes_of(scalars)}, device);
    } else {
      const at::Tensor hypers = upload_table({bytes_of(plan->hypers)}, device, for_graph);
      if (for_graph) graph_hypers_.push_back(hypers);
      at::Tensor total;
      if (plan->clips) {
        total = tables.sq_norm();
        plan->decision.sq_norm = static_cast<const DoubleDouble*>(total.const_data_ptr());
      }
      scalars_bytes =
          at::empty({count * static_cast<int64_t>(sizeof(AdamScalars))}, at::TensorOptions().dtype(at::kByte).device(device));
      device_scalars_cuda(static_cast<const DeviceHyper*>(hypers.const_data_ptr()), tables.counts(), count, plan->decision,
                          static_cast<AdamScalars*>(scalars_bytes.data_ptr()), stream);
    }
    if (tables.adam().num_chunks == 0) return;
    if (scalars_bytes.defined()) arg.table = static_cast<const AdamScalars*>(scalars_bytes.const_data_ptr());
    adam_cuda(tables.adam().segments(), tables.adam().chunks(), tables.adam().num_chunks, arg,
              moment_kinds_of(tables.segments()), stream);
  }

  const AdamTables& tables_for(std::vector<AdamSegment> segments, const DevicePlan* plan, at::Device device,
                               cudaStream_t stream, bool for_graph) {
    std::deque<AdamTables>& kept = for_graph ? graph_tables_ : tables_;
    if (kept.empty() || !kept.back().serve(segments, plan, device, stream)) {
      if (!for_graph) kept.clear();
      kept.emplace_back(std::move(segments), plan, device, stream, for_graph);
      ++table_builds_;
    }
    return kept.back();
  }

  std::deque<AdamTables> tables_;         // of the last step outside a capture: one or none
  std::deque<AdamTables> graph_tables_;   // of every capture: graphs that read them may be replayed as long as this lives
  std::vector<at::Tensor> graph_hypers_;  // the same
#endif
  struct Checked {
    std::vector<AdamSegment> segments;
    std::vector<int64_t*> counts;
    const int64_t* skipped = nullptr;
  };
  Checked apart_;  // what check_overlap found good last
  OverlapCheck overlap_;
  int64_t table_builds_ = 0;
};

void bind_adam(py::module_& module) {
  bind_device_step(module);
  bind_adam_lists(module);
  py::class_<PyAdamHyper>(module, "AdamHyper")
      .def(py::init(&make_hyper), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("step"), py::arg("grad_scale") = 1.0, py::arg("adam_w_mode") = true,
           py::arg("bias_correction") = true, py::arg("maximize") = false, py::arg("stochastic_rounding") = false,
           py::arg("seed") = 0)
      .def("at", &hyper_at, py::arg("step"), py::arg("grad_scale"));
  py::class_<AdamStepper>(module, "AdamStepper")
      .def(py::init<>())
      .def("step", &AdamStepper::step, py::arg("params"), py::arg("grads"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"),
           py::arg("hypers"), py::arg("hyper_index"), py::arg("masters") = py::none(), py::arg("max_exp_avg_sqs") = py::none(),
           py::arg("keys") = py::none(), py::arg("exp_avg_scales") = py::none(), py::arg("exp_avg_sq_scales") = py::none(),
           py::arg("device_step") = py::none())
      .def("repeat", &AdamStepper::repeat, py::arg("lists"), py::arg("grads"), py::arg("hypers"),
           py::arg("device_step") = py::none())
      .def_property_readonly("table_builds", &AdamStepper::table_builds);
}

}  // namespace shardcore::bind
