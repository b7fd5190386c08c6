"""DeepSpeed: gathers the weights of ZeRO-3, and captures and restores the optimizers of ZeRO.

Nothing here imports deepspeed before a model of it is met. Begin at `zero`, the wrapper, and at
`zero_optimizer`, its optimizers.
"""
