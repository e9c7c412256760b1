"""The fused step's kernels, in Triton; `eagle3.draft.fused.plain` has the same functions in torch, for tests."""
