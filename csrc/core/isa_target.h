// Sets the instruction set of everything that follows in a per-ISA source; include it first, with SHARDCORE_ISA_AVX512,
// SHARDCORE_ISA_AVX2 or SHARDCORE_ISA_BASE defined. In the source, not in flags: torch's build has one flag list for all files.
//
// Invariant: after it, such a source includes only headers whose functions are static (see core/macros.h), never the
// C++ library's templates: their instances are shared by the linker, and the base path could get AVX-512 code.
#pragma once

#if defined(SHARDCORE_ISA_AVX512)
#define SHARDCORE_ISA isa_avx512
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")
#endif
#elif defined(SHARDCORE_ISA_AVX2)
#define SHARDCORE_ISA isa_avx2
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#elif defined(SHARDCORE_ISA_BASE)
#define SHARDCORE_ISA isa_base
#else
#error "define SHARDCORE_ISA_AVX512, SHARDCORE_ISA_AVX2 or SHARDCORE_ISA_BASE"
#endif
