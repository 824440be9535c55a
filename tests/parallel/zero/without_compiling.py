"""Runs a script as `python SCRIPT ARGUMENTS` does, without DeepSpeed's minute of compiling collectives for the CPU."""

import runpy
import sys

import deepspeed

if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
