"""`jit` and its stages: arguments, tracing, planning, compiling, calling; `parallelize` beside them."""
