"""A machine that runs PTX with no GPU: parser, machine, memory with sanitiser, counters, CuPy stand-in."""
