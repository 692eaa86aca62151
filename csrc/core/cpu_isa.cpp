#include "core/cpu_isa.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace shardcore {
namespace {

#if SHARDCORE_X86
constexpr const char* kBaseName = "base";

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#else
constexpr const char* kBaseName = "neon";
#endif

std::vector<CpuIsa> supported() {
  std::vector<CpuIsa> isas;
#if SHARDCORE_X86
  __builtin_cpu_init();
  if (has_avx512()) isas.push_back(CpuIsa::avx512);
  if (has_avx2()) isas.push_back(CpuIsa::avx2);
#endif
  isas.push_back(CpuIsa::base);
  return isas;
}

CpuIsa parse(const std::string& where, const std::string& name) {
  std::string known;
  for (const CpuIsa isa : supported()) {
    if (cpu_isa_name(isa) == name) return isa;
    known += (known.empty() ? "" : " | ") + cpu_isa_name(isa);
  }
  throw std::invalid_argument(where + " has \"" + name + "\"; expected " + known +
                              " (what this build has and this CPU can run)");
}

std::atomic<int> chosen{-1};  // -1: not chosen yet

}  // namespace

std::string cpu_isa_name(CpuIsa isa) { return isa == CpuIsa::avx512 ? "avx512" : (isa == CpuIsa::avx2 ? "avx2" : kBaseName); }

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const CpuIsa isa : supported()) names.push_back(cpu_isa_name(isa));
  return names;
}

void set_cpu_isa(const std::string& name) { chosen = static_cast<int>(parse("set_cpu_isa: name", name)); }

CpuIsa cpu_isa() {
  int isa = chosen;
  if (isa < 0) {
    const char* forced = std::getenv("SHARDCORE_CPU_ISA");
    isa = static_cast<int>(forced && *forced ? parse("environment: SHARDCORE_CPU_ISA", forced) : supported().front());
    chosen = isa;
  }
  return static_cast<CpuIsa>(isa);
}

}  // namespace shardcore
