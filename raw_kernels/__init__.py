"""The sources of the kernels, as data: burstmpi.raw_kernels in an installation."""
