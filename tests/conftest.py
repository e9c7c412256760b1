import os

# Tests fork processes that are to be killed. MKL's own memory manager may wait forever in a fork for what another thread
# held; it reads this when it is first used.
os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")
