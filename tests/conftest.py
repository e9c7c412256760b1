import os

# Tests fork processes that are to be killed. In a fork MKL's own memory manager may wait forever for what another
# thread held; it reads this when it is first used.
os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")
