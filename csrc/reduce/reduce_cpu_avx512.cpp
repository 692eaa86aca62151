// reduce_cpu_loop.h compiled for avx512.
#include "core/macros.h"
#include "core/streaming.h"  // intrinsics come before the instruction set
#if SHARDCORE_X86
#define SHARDCORE_ISA_AVX512
#include "core/isa_target.h"
// isa_target.h comes first
#include "reduce/reduce_cpu_loop.h"
// and this last
#include "core/isa_target_end.h"
#endif
