"""CUDA devices behind the accelerator seam, through the driver's library, which is loaded at run time.

No toolkit is needed, and torch isn't imported: where it is in use, its current stream is asked for.
"""

from gpu_compat.accelerator import CudaAccelerator, CudaFacts

__all__ = ["CudaAccelerator", "CudaFacts"]
