// Run-time choice of the CPU's instruction set. All of them give the same bits; they differ in speed only.
//
// SHARDCORE_CPU_ISA=avx512|avx2|base (neon on aarch64) forces one; it is read at the first use.
#pragma once

#include <string>
#include <vector>

#include "core/macros.h"

namespace shardcore {

enum class CpuIsa { base, avx2, avx512 };

// The one in use. Throws std::invalid_argument if SHARDCORE_CPU_ISA names one that this build or CPU lacks.
CpuIsa cpu_isa();
// Throws std::invalid_argument if this build or CPU lacks it.
void set_cpu_isa(const std::string& name);
// Fastest first.
std::vector<std::string> cpu_isas();
std::string cpu_isa_name(CpuIsa isa);

// Picks one of a kernel's versions. SHARDCORE_PICK(adam_span) is the adam_span of the namespace of the ISA in use.
template <typename Fn>
Fn pick_isa(Fn avx512, Fn avx2, Fn base) {
  switch (cpu_isa()) {
    case CpuIsa::avx512:
      return avx512;
    case CpuIsa::avx2:
      return avx2;
    default:
      return base;
  }
}

#if SHARDCORE_X86
#define SHARDCORE_PICK(function) ::shardcore::pick_isa(&isa_avx512::function, &isa_avx2::function, &isa_base::function)
#else
#define SHARDCORE_PICK(function) (&isa_base::function)
#endif

}  // namespace shardcore
