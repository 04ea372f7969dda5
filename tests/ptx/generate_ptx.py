"""Write generated/<kernel>.<toolkit>.sm_<arch>.ptx for the toolkits of the tests: python tests/ptx/generate_ptx.py

The files are what the compilers make of our own kernels, so that the machine is tested on the code of several
toolkits where only one is installed.
"""

import os

from ptxmachine.nvrtc import fetched_toolkit

HERE = os.path.dirname(os.path.abspath(__file__))
TOOLKITS = {
    "12.8": ["nvidia-cuda-nvrtc-cu12==12.8.93", "nvidia-cuda-runtime-cu12==12.8.90"],
    "13.0": ["nvidia-cuda-nvrtc==13.0.88", "nvidia-cuda-runtime==13.0.96", "nvidia-cuda-crt==13.0.88"],
    "13.4": ["nvidia-cuda-nvrtc==13.4.92", "nvidia-cuda-runtime==13.4.92", "nvidia-cuda-crt==13.4.92"],
}
KERNELS = {"matmul": ("75",), "broad": ("75", "90", "120"), "attention_small": ("80",)}
OPTIONS = ("-ftz=true", "--device-as-default-execution-space")


def compile_with(toolkit, kernel, arch, options=OPTIONS):
    with open(os.path.join(HERE, "kernels", kernel + ".cu")) as file:
        return toolkit.compile(file.read(), arch, options, kernel + ".cu")[0]


if __name__ == "__main__":
    os.makedirs(os.path.join(HERE, "generated"), exist_ok=True)
    for name, requirements in TOOLKITS.items():
        toolkit = fetched_toolkit(requirements)
        if toolkit is None or "%d.%d" % toolkit.version != name:
            raise SystemExit("toolkit %s cannot be fetched (%s)" % (name, toolkit))
        for kernel, archs in KERNELS.items():
            for arch in archs:
                with open(
                    os.path.join(HERE, "generated", "%s.%s.sm_%s.ptx" % (kernel, name, arch)), "w"
                ) as file:
                    file.write(compile_with(toolkit, kernel, arch))
