"""What runs on a GPU: Triton kernels, each with its wrapper, and what launches a step of them.

Nothing here is imported where the device is a CPU; tests do, under Triton's interpreter.
"""
