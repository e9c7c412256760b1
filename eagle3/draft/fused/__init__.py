"""The training step, forward and backward at once, chunk of chains by chunk (docs/training-step.md).

`layout` says which rows a chunk has at each step, `step` computes them, `plain` and `cuda` are its operations on any
device and type and on a GPU in bfloat16, `function` joins it to autograd. `eagle3.draft.ttt.unroll` is the same step
by autograd.
"""
