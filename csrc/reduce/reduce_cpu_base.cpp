// reduce_cpu_loop.h compiled for any CPU of the build target (on aarch64: NEON).
#include "core/streaming.h"  // intrinsics come before the instruction set
#define SHARDCORE_ISA_BASE
#include "core/isa_target.h"
// isa_target.h comes first
#include "reduce/reduce_cpu_loop.h"
// and this last
#include "core/isa_target_end.h"
