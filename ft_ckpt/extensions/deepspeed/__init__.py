"""DeepSpeed: gathers the weights of ZeRO-3, and captures and restores the optimizers of ZeRO.

Nothing here imports deepspeed before it meets one of its models. Begin at `zero`, which reads the
models, and at `zero_optimizer`, which reads the optimizers.
"""
