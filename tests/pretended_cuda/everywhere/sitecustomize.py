"""Pretends CUDA devices in each process of Python whose path has this folder, before anything imports torch."""

import tests.pretended_cuda.torch_cuda  # noqa: F401
