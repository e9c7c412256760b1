"""A server started and measured at each of several settings, and a plan held against what was measured; see
docs/sweep.md."""
