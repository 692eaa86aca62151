# Fails if an object of a per-ISA source (csrc/isa/avx512.cpp, avx2.cpp) defines a weak symbol: the linker keeps one copy
# of those, and the base path could get AVX-512 code. NM: the tool; OBJECTS: all objects of the core.
set(checked 0)
foreach(object ${OBJECTS})
  if(object MATCHES "/isa/avx(512|2)\\.cpp")
    execute_process(COMMAND ${NM} -C ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
    # Sanitizers add weak symbols of their own.
    string(REGEX REPLACE "[^\n]*(__asan|__ubsan|__tsan|__odr|DW\\.ref)[^\n]*\n" "" symbols "${symbols}")
    if(symbols MATCHES "[^\n]* [VWu] [^\n]*")
      message(FATAL_ERROR "${object} defines a symbol that other sources may share:\n${CMAKE_MATCH_0}\n"
                          "expected only static functions and those of its ISA's namespace (see csrc/core/macros.h)")
    endif()
    math(EXPR checked "${checked} + 1")
  endif()
endforeach()
message(STATUS "${checked} objects checked")
