// AdamHyper, AdamLists and AdamStepper.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "adam/adam_cpu.h"
#include "adam/make_scalars.h"
#include "bind/adam_lists.h"
#include "bind/checks.h"
#include "bind/cuda_table.h"
#include "bind/device_step.h"
#include "core/tile.h"

#ifdef SHARDCORE_WITH_CUDA
#include "adam/adam_cuda.h"
#endif

namespace shardcore::bind {

namespace {

// Of options that shardcore.optim.group_options has checked.
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

const PyDeviceScalars* device_scalars_of(const py::handle& object) {
  return py::isinstance<PyDeviceScalars>(object) ? &object.cast<const PyDeviceScalars&>() : nullptr;
}

// Of scalars in host memory.
std::vector<AdamScalars> scalars_in(const PyDeviceScalars& made) {
  const auto* const data = static_cast<const AdamScalars*>(made.bytes.const_data_ptr());
  return {data, data + made.count};
}

}  // namespace

std::vector<PyAdamHyper> hypers_of(const py::handle& sequence) { return sequence.cast<std::vector<PyAdamHyper>>(); }

std::vector<AdamScalars> scalars_of(const char* op, const std::vector<PyAdamHyper>& hypers) {
  std::vector<AdamScalars> scalars;
  for (size_t i = 0; i < hypers.size(); ++i) {
    if (hypers[i].lr.tensor.defined()) {
      value_error({op, "hypers", static_cast<int64_t>(i)}, "a tensor as lr; expected a number (device_step reads one)");
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
            const py::object& exp_avg_sq_scales, const py::object& changed) {
    run(adam_lists_of(params, exp_avgs, exp_avg_sqs, hyper_index, masters, max_exp_avg_sqs, keys, exp_avg_scales,
                      exp_avg_sq_scales, changed),
        grads, hypers);
  }

  void repeat(const PyAdamLists& kept, const py::handle& grads, const py::handle& hypers) { run(kept.lists, grads, hypers); }

 private:
  void run(const AdamLists& lists, const py::handle& grads_object, const py::handle& hypers) {
    const size_t count = lists.params.size();
    const TensorList grads = tensors_of(kStepOp, "grads", grads_object);
    check_count(kStepOp, "grads", grads.size(), "params", count);
    const PyDeviceScalars* const made = device_scalars_of(hypers);
    std::vector<AdamScalars> scalars = made == nullptr ? scalars_of(kStepOp, hypers_of(hypers)) : std::vector<AdamScalars>();
    if (count == 0) return;

    const at::Device device = lists.params[0].device();
    check_device_supported({kStepOp, "params", 0}, device);
    if (made != nullptr) check_layout({kStepOp, "hypers"}, made->bytes, device);
    std::vector<AdamSegment> segments(count);
    for (size_t i = 0; i < count; ++i) {
      AdamSegment& t = segments[i] = segment_of(lists, grads, i, device);
      t.hyper_index = static_cast<int32_t>(lists.hyper_index.at(i));
      if (!lists.keys.empty()) {
        t.param_index = lists.keys[i].param_index;
        t.first_element = lists.keys[i].first_element;
      }
    }
    if (segments != last_) {
      last_.clear();
      tabled_ = false;
      check_overlap(lists, segments);
      last_ = segments;
    }
    for (size_t i = 0; i < count; ++i) bump_version(lists.params[i]);  // states are not part of any graph
    const py::gil_scoped_release no_gil;
    if (device.is_cpu()) {
      if (made != nullptr) scalars = scalars_in(*made);
      if (scalars[0].skip) return;
      adam_cpu(segments.data(), static_cast<int64_t>(count), scalars.data(), torch_executor());
    }
#ifdef SHARDCORE_WITH_CUDA
    if (device.is_cuda()) step_cuda(segments, scalars, made, device);
#endif
  }

#ifdef SHARDCORE_WITH_CUDA
  void step_cuda(const std::vector<AdamSegment>& segments, const std::vector<AdamScalars>& scalars, const PyDeviceScalars* made,
                 at::Device device) {
    const c10::cuda::CUDAGuard guard(device);
    const cudaStream_t stream = current_stream(device);
    at::Tensor bytes = made == nullptr ? at::Tensor() : made->bytes;
    AdamScalarsArg arg;
    if (made == nullptr && !arg.try_assign(scalars)) bytes = upload({bytes_of(scalars)}, device);
    if (is_capturing(stream) || !tabled_ || stream != stream_) {
      table_ = DeviceTable<AdamSegment>(segments, kAdamChunk, device);
      stream_ = stream;
      tabled_ = true;
    }
    if (table_.num_chunks == 0) return;
    if (bytes.defined()) arg.table = static_cast<const AdamScalars*>(bytes.const_data_ptr());
    adam_cuda(table_.get(), table_.num_chunks, arg, adam_form_of(segments), stream);
  }

  DeviceTable<AdamSegment> table_;
  cudaStream_t stream_ = nullptr;  // that table_ was made for
#endif
  std::vector<AdamSegment> last_;  // that check_overlap found good
  bool tabled_ = false;            // whether table_ is of last_
};

void bind_adam(py::module_& module) {
  bind_device_step(module);
  bind_adam_lists(module);
  py::class_<PyAdamHyper>(module, "AdamHyper")
      .def(py::init(&make_hyper), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
           py::arg("weight_decay"), py::arg("step"), py::arg("grad_scale") = 1.0, py::arg("adam_w_mode") = true,
           py::arg("bias_correction") = true, py::arg("maximize") = false, py::arg("stochastic_rounding") = false,
           py::arg("seed") = 0);
  py::class_<AdamStepper>(module, "AdamStepper")
      .def(py::init<>())
      .def("step", &AdamStepper::step, py::arg("params"), py::arg("grads"), py::arg("exp_avgs"), py::arg("exp_avg_sqs"),
           py::arg("hypers"), py::arg("hyper_index"), py::arg("masters") = py::none(), py::arg("max_exp_avg_sqs") = py::none(),
           py::arg("keys") = py::none(), py::arg("exp_avg_scales") = py::none(), py::arg("exp_avg_sq_scales") = py::none(),
           py::arg("changed") = py::none())
      .def("repeat", &AdamStepper::repeat, py::arg("lists"), py::arg("grads"), py::arg("hypers"));
}

}  // namespace shardcore::bind
