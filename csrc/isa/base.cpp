// Every CPU loop, compiled for any CPU of the build target (on aarch64: NEON); avx2.cpp and avx512.cpp: for those. Their target
// is set in the source, not in flags: torch's build has one flag list for all files.
//
// Invariant: the loops use only headers whose functions are static (see core/macros.h), never the C++ library's templates:
// their instances are shared by the linker, and the base path could get AVX-512 code.
#define SHARDCORE_ISA isa_base

#include "adam/adam_cpu_loop.h"
#include "digest/digest_cpu_loop.h"
#include "elementwise/element_cpu_loop.h"
#include "norm/norm_cpu_loop.h"
#include "reduce/reduce_cpu_loop.h"
