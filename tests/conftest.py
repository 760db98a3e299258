"""Environment of every test."""

import os

# Tiny matrices: threads cost more than they bring, and pytest-xdist runs one process a core already.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
