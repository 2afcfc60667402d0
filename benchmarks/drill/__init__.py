"""A fault drill: jobs are killed at random moments until they are done, and compared with undisturbed ones.

Jobs are forked, which is sound only from a process with a single thread, so this is said before numpy and torch come.
"""

import os

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE", "WANDB_MODE": "offline"}
