"""Builds stream_limit.cpp with the C++ compiler and calls it: the time that a step's memory traffic alone takes."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("stream_limit.cpp")


class StreamLimit:
    """The two loops of stream_limit.cpp. Raises OSError or CalledProcessError where there is no working C++ compiler."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
        with tempfile.TemporaryDirectory() as directory:
            library = Path(directory, "stream_limit.so")
            flags = ["-O3", "-std=c++20", "-shared", "-fPIC", "-pthread"]
            subprocess.run([compiler, *flags, "-o", library, SOURCE], check=True)
            self._library = ctypes.CDLL(str(library))

    def adam(self, param: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        """Walk the streams of a float32 step once; all tensors (n,) float32."""
        self._call(self._library.stream_limit_adam, param, grad, exp_avg, exp_avg_sq)

    def offload(
        self, weight: torch.Tensor, grad: torch.Tensor, master: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor
    ) -> None:
        """Walk the streams of an offload step once; weight and grad (n,) bfloat16, the others (n,) float32."""
        self._call(self._library.stream_limit_offload, weight, grad, master, exp_avg, exp_avg_sq)

    def _call(self, function: "ctypes._CFuncPtr", *tensors: torch.Tensor) -> None:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        function(*pointers, ctypes.c_int64(tensors[0].numel()), ctypes.c_int(self.threads))
