// The CPU loops compiled for AVX2; see base.cpp for what they may include.
#include "core/macros.h"
#if SHARDCORE_X86
#define SHARDCORE_ISA isa_avx2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#include "adam/adam_cpu_loop.h"
#include "digest/digest_cpu_loop.h"
#include "elementwise/element_cpu_loop.h"
#include "norm/norm_cpu_loop.h"
#include "reduce/reduce_cpu_loop.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
