"""A CUDA device that is only pretended, so that the path that all users take runs where there is no GPU.

`library` compiles and loads it, `torch_cuda` shows it as `torch.cuda`, `detector` reports what a real device would do
wrong in rare moments. `on_device` runs functions on it, in a process of its own: it has to be loaded before torch.
"""
