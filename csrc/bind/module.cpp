// The Python module shardcore._C. Its contract is shardcore/_C.pyi.
#include "bind/checks.h"
#include "core/cpu_isa.h"
#include "io/file_engine.h"

#ifdef SHARDCORE_WITH_CUDA
#include "core/cuda_check.h"
#endif

#ifndef SHARDCORE_VERSION
#define SHARDCORE_VERSION "unknown"
#endif
#ifndef SHARDCORE_FOR_TORCH
#define SHARDCORE_FOR_TORCH "unknown"
#endif
#ifndef SHARDCORE_CUDA_ARCH_LIST
#define SHARDCORE_CUDA_ARCH_LIST ""
#endif

namespace {

pybind11::dict build_info() {
  std::string cuda;
  std::string cuda_arch_list;
#ifdef SHARDCORE_WITH_CUDA
  cuda = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
  cuda_arch_list = SHARDCORE_CUDA_ARCH_LIST;
#endif
#if defined(__clang__)
  const std::string compiler = "clang++ " __clang_version__;
#else
  const std::string compiler = "g++ " __VERSION__;
#endif
  using pybind11::literals::operator""_a;
  return pybind11::dict("version"_a = SHARDCORE_VERSION, "torch"_a = SHARDCORE_FOR_TORCH, "cuda"_a = cuda,
                        "cuda_arch_list"_a = cuda_arch_list, "compiler"_a = compiler, "io_uring"_a = shardcore::has_liburing());
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  shardcore::bind::bind_adam(module);
  shardcore::bind::bind_elements(module);
  shardcore::bind::bind_ops(module);
  shardcore::bind::bind_moments(module);
  shardcore::bind::bind_offload(module);
  shardcore::bind::bind_storage(module);
  shardcore::bind::bind_file_engine(module);
  module.def("cpu_isa", [] { return shardcore::cpu_isa_name(shardcore::cpu_isa()); });
  module.def("set_cpu_isa", &shardcore::set_cpu_isa, pybind11::arg("name"));
  module.def("cpu_isas", &shardcore::cpu_isas);
  module.def("use_threads", &shardcore::bind::use_threads, pybind11::arg("count"));
  module.def("build_info", &build_info);
  module.def("allow_captures", [] {
#ifdef SHARDCORE_WITH_CUDA
    cudaStreamCaptureMode mode = cudaStreamCaptureModeThreadLocal;
    SHARDCORE_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode));
#endif
  });
}
