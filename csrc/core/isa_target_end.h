// Ends what core/isa_target.h began; the last include of a per-ISA source. (No include guard: it has no declarations.)
#if defined(__clang__) && !defined(SHARDCORE_ISA_BASE)
#pragma clang attribute pop
#endif
