"""Benchmarks: one file a subject. Run them from the repository root: ``python -m
benchmarks.bench_cpu_adam``.
"""
