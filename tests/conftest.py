import os

# Runs are compared to the last bit, which the number of threads changes; and two threads that wait for each other take
# many times as long on a machine that is busy. The processes that tests start inherit this.
os.environ["OMP_NUM_THREADS"] = "1"
# Tests fork processes that are to be killed. In a fork MKL's own memory manager may wait forever for what another
# thread held; it reads this when it is first used.
os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")

import torch

assert torch.get_num_threads() == 1, "something imported torch before the tests could say how many threads it has"
